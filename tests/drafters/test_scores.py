"""Scores of every family: finite everywhere, bounded by tau, and an independent draft's as they
always were."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from archsearch import speedup as speculation
from archsearch.acceptance.estimator import Acceptance, GivenAcceptance
from archsearch.acceptance.families import ASSUMED, FamilyAcceptance, acceptance_of
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.drafters.lookup import NGram
from archsearch.drafters.models import Independent
from archsearch.drafters.registry import FAMILIES, as_drafter, family
from archsearch.drafts.records import scored_by
from archsearch.estimate import Estimate
from archsearch.latency.drafted import DrafterRounds
from archsearch.pipeline.latency import choose_latency
from archsearch.search.objective import Score, Scorer, grouped
from archsearch.search.study import SearchResult, merged
from archsearch.workload import WorkloadRequest
from published_table import load_published

GPUS = ("h100", "a100", "h200", "b200")


def scorer_of(
    target: str, gpu: str, *, batch: int = 1, alpha: float | None = None, engine: str = "vllm"
) -> Scorer:
    shape = catalogue.load(target).architecture
    source, workload = choose_latency(
        WorkloadRequest(gpu=gpu, batch_size=batch, engine=engine), shape
    )
    return Scorer(
        shape,
        workload,
        source.latency,
        PriorAcceptance() if alpha is None else GivenAcceptance(alpha),
    )


def shapes_of(target: Architecture) -> list[Architecture]:
    """A dozen drafts: 1 to 8 layers, three widths, with and without a trimmed head."""
    return [
        target.replace(
            num_hidden_layers=layers,
            hidden_size=width,
            intermediate_size=4 * width,
            num_attention_heads=width // 64,
            num_key_value_heads=4,
            head_dim=64,
            draft_vocab_size=rows,
            tie_word_embeddings=False,
        )
        for layers, width in ((1, 512), (2, 1024), (2, 4096), (3, 2048), (4, 1024), (8, 2048))
        for rows in (None, 8192)
    ]


@pytest.mark.parametrize(
    ("target", "gpu", "engine"),
    [
        ("llama-3.1-8b", "h100", "vllm"),
        ("qwen3-32b", "h200", "sglang"),
        ("llama-2-13b", "a100", "transformers"),
        ("llama-3.3-70b", "b200", "vllm"),
    ],
)
def test_an_independent_draft_scores_as_before_there_were_families(
    target: str, gpu: str, engine: str
) -> None:
    """The formula written out: the round of the bare shape at each gamma, alpha of the estimator,
    tau by its drift. To the bit."""
    scorer = scorer_of(target, gpu, engine=engine)
    for shape in shapes_of(scorer.target):
        found = scorer.acceptance.predict(shape, scorer.context)
        positions = speculation.drifting_positions(found.alpha.value, found.drift.value, 16)
        reach = speculation.accepted_by_position(positions)
        rounds = {
            gamma: scorer.latency.round(scorer.target, shape, scorer.workload, gamma)
            for gamma in range(1, 17)
        }
        gains = {
            gamma: (1.0 + math.fsum(reach[:gamma])) * scorer.decode_s.value / time.round_s.value
            for gamma, time in rounds.items()
        }
        best = max(gains, key=lambda gamma: gains[gamma])
        score = scorer(shape)
        assert (
            score == scorer(Independent(shape))
            and score.drafter is None
            and score.family == "independent"
        )
        assert (
            score.gamma == best
            and score.round_s == rounds[best].round_s
            and score.draft_s == rounds[best].draft_s
        )
        tau = speculation.tau_estimate(found.alpha, best, found.drift)
        assert (score.tau.value, score.tau.std) == (tau.value, tau.std)
        times = scorer.decode_s, rounds[best].round_s, rounds[best].verify_s
        gain = speculation.speedup_estimate(tau, *times, scorer.target_correlation)
        assert (score.speedup.value, score.speedup.std) == (gain.value, gain.std)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("target", ["llama-3.1-8b", "qwen3-4b", "llama-2-70b", "opt-6.7b"])
def test_every_family_scores_on_every_shipped_gpu(target: str, gpu: str) -> None:
    scorer = scorer_of(target, gpu)
    for each in FAMILIES.values():
        score = scorer(each.usual(scorer.target))
        for value in (
            score.speedup.value,
            score.speedup.std,
            score.tau.value,
            score.tpot_s.value,
            score.draft_s.value,
        ):
            assert math.isfinite(value) and value > 0
        assert score.family == each.family and 1 <= score.gamma <= 16
        assert score.speedup.value <= score.tau.value * 1.0001, "drafting is never free"
        assert Score.from_dict(score.to_dict()) == score
        assert (
            score.speedup.low is not None
            and score.speedup.low <= score.speedup.value <= score.speedup.high
        )  # type: ignore[operator]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "early_exit"])
def test_more_accepted_tokens_are_never_slower(name: str) -> None:
    gains = []
    for alpha in (0.3, 0.6, 0.9):
        scorer = scorer_of("llama-3.1-8b", "h100", alpha=alpha)
        gains.append(scorer(FAMILIES[name].usual(scorer.target)).speedup.value)
    assert gains == sorted(gains) and gains[0] < gains[-1]


def test_a_lookup_that_never_finds_anything_is_a_plain_step_that_waits() -> None:
    """Rounds without a proposal cost the target's step, the search and, in vLLM, what asynchronous
    scheduling would hide; with one in every round, a whole round."""
    scorer = scorer_of("llama-3.1-8b", "h100", batch=4)
    acceptance = Acceptance(Estimate(0.6, 0.1, "measured"))
    gains = {}
    for share in (0.0, 0.5, 1.0):
        known = {"ngram": FamilyAcceptance(acceptance, Estimate(share, 0.01, "measured"))}
        gains[share] = scorer.with_families(known)(NGram.usual(scorer.target))
    never = gains[0.0]
    assert never.tau.value == 1.0 and 0.8 < never.speedup.value < 1.0
    assert never.round_s is not None and never.round_s.value == pytest.approx(
        scorer.decode_s.value + 0.84e-3, rel=0.02
    )
    assert gains[0.0].speedup.value < gains[0.5].speedup.value < gains[1.0].speedup.value
    assert gains[1.0].alpha.value == 0.6


def test_what_is_believed_of_lookups_gives_back_the_published_tau() -> None:
    """Prompt lookup with ten tokens on Spec-Bench's code: tau 1.77 over all rounds."""
    scorer = scorer_of("llama-3.1-8b", "h100")
    context = replace(scorer.context, domain="code")
    known = acceptance_of(NGram.usual(scorer.target), PriorAcceptance(), context)
    assert known.tau(known.acceptance.tau(10)).value == pytest.approx(1.77, abs=0.005)
    assert 0 < known.share.value < 1 and known.share.std > 0.1  # type: ignore[union-attr]


def test_families_of_one_search_are_told_apart_by_what_both_are_unsure_of() -> None:
    """Two kinds of drafter for one target share its domain and study: the gap is surer than each
    alone."""
    scorer = scorer_of("llama-3.1-8b", "h100")
    eagle3, independent = (
        scorer(FAMILIES[name].usual(scorer.target)) for name in ("eagle3", "independent")
    )
    groups = grouped([eagle3, independent], scorer.acceptance, lambda score: scorer.context)
    assert sum(len(group) for group in groups) == 2
    alone = math.hypot(*(speculation.logit_std(score.alpha) for score in (eagle3, independent)))
    from archsearch.acceptance.families import gap_std

    asked = ((score.proposer, scorer.context) for score in (eagle3, independent))
    assert 0.1 < gap_std(*asked, scorer.acceptance) < alone


def test_a_lookups_mean_round_is_never_shorter_than_a_plain_step() -> None:
    """Batch 64 of a 70B on eight ranks in an engine whose steps the host holds back: some of the
    batch drafts in every round, so the mean round is what a round with a draft adds, not that of a
    full verification taken off a short one."""
    shape = catalogue.load("llama-2-70b").architecture
    asked = WorkloadRequest(
        gpu="h200",
        batch_size=64,
        engine="transformers",
        tensor_parallel=8,
        mode="graph",
        context_len=256,
    )
    source, workload = choose_latency(asked, shape)
    scorer = Scorer(shape, workload, source.latency, PriorAcceptance())
    for share in (0.05, 0.5, 0.9):
        drafter = NGram.usual(shape).with_share(share)
        for gamma in (1, 4, 8):
            time = DrafterRounds(source.latency, shape, drafter, workload).round(gamma)
            assert time.round_s.value >= scorer.decode_s.value
            parts = time.draft_s.value + time.verify_s.value + time.overhead_s.value
            assert time.round_s.value == pytest.approx(parts)
    score = scorer(NGram.usual(shape))
    assert score.break_even_alpha is None or math.isfinite(score.break_even_alpha.value)
    assert score.speedup.value <= score.tau.value


def test_an_engine_that_fills_drafts_up_verifies_all_of_them_in_every_round() -> None:
    """TensorRT-LLM pads n-gram drafts to gamma: the round is the same however seldom a match is
    found. vLLM's is not."""
    rounds = {}
    for engine in ("tensorrt-llm", "vllm"):
        scorer = scorer_of("llama-3.1-8b", "h100", batch=32, engine=engine)
        asked = (scorer.latency, scorer.target, scorer.workload)
        rounds[engine] = [
            DrafterRounds(asked[0], asked[1], NGram.usual(asked[1]).with_share(share), asked[2])
            .round(4)
            .round_s.value
            for share in (0.2, 0.999)
        ]
    assert rounds["tensorrt-llm"][0] == rounds["tensorrt-llm"][1]
    assert rounds["vllm"][0] < 0.97 * rounds["vllm"][1]


def test_a_batch_that_drafts_unevenly_waits_for_the_host() -> None:
    """vLLM has a graph of the whole pass only where every sequence verifies gamma + 1 tokens: a
    short pass of a deep target is launched layer by layer, 80 layers at 0.08 ms."""
    shape = catalogue.load("llama-2-70b").architecture.replace(
        hidden_size=1024, intermediate_size=2048, num_attention_heads=8
    )
    source, workload = choose_latency(
        WorkloadRequest(gpu="h100", batch_size=8, engine="vllm"), shape
    )
    uneven, even = (
        DrafterRounds(source.latency, shape, NGram.usual(shape).with_share(share), workload).round(
            3
        )
        for share in (0.5, 0.99999)
    )
    assert even.verify_s.value < 80 * 0.08e-3 < uneven.round_s.value
    assert even.round_s.value < uneven.round_s.value


def test_what_is_assumed_ranks_by_the_lower_end_of_its_interval() -> None:
    scorer = scorer_of("llama-3.1-8b", "h100")
    pard, eagle3 = (scorer(FAMILIES[name].usual(scorer.target)) for name in ("pard", "eagle3"))
    low = pard.speedup.interval[0]
    assert pard.assumed and low < 1.0 < pard.speedup.value and pard.ranked_by == 1.0
    sure = replace(pard, speedup=replace(pard.speedup, low=1.1))
    assert sure.ranked_by == pytest.approx(1.1, rel=1e-12), "by the lower end of its interval"
    assert not eagle3.assumed and eagle3.ranked_by == eagle3.speedup.value
    given = scorer_of("llama-3.1-8b", "h100", alpha=0.8)(FAMILIES["pard"].usual(scorer.target))
    assert not given.assumed and given.ranked_by == given.speedup.value, "who gives alpha knows it"
    long = scorer.at_context(32768)
    beyond = [long(FAMILIES["pard"].usual(scorer.target)), scored_by(long, pard)]
    assert beyond[0].alpha.value < 0.9 * pard.alpha.value and beyond[0].alpha.std > pard.alpha.std
    # one acceptance, one band: whoever asks a score again, elsewhere too
    assert scored_by(scorer, pard).speedup.interval == pytest.approx(pard.speedup.interval)
    assert beyond[1].alpha == pard.alpha, "what is known of a score stays"
    assert (
        Score.from_dict(
            {name: value for name, value in pard.to_dict().items() if name != "assumed"}
        ).assumed
        == ""
    )
    # The case that this is about: an assumed one that is faster, and whose lower end is slower.
    gain = pard.speedup
    hoped = replace(
        pard,
        speedup=replace(gain, value=eagle3.speedup.value + 0.1, low=eagle3.speedup.value - 0.1),
    )
    found = merged(
        [SearchResult([hoped.with_rank(1)], []), SearchResult([eagle3.with_rank(1)], [])]
    )
    assert [score.family for score in found.best] == ["eagle3", "pard"]


def test_assumed_families_are_those_of_which_less_than_three_targets_were_published() -> None:
    targets: dict[str, set[str]] = {}
    for row in load_published():
        targets.setdefault(row.family, set()).add(row.target)
    for kind in {drafter.acceptance for drafter in FAMILIES.values()}:
        assert (kind in ASSUMED) == (len(targets.get(kind, ())) < 3), kind


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("batch", [2, 100, 600])  # below, across and beyond the largest graph
@pytest.mark.parametrize("name", ["eagle3", "peagle", "dflash", "pard", "medusa", "a model"])
def test_the_rounds_of_all_gammas_at_once_are_those_of_each(
    engine: str, name: str, batch: int
) -> None:
    scorer = scorer_of("llama-3.1-8b", "a100", batch=batch, engine=engine)
    model = catalogue.load("llama-68m").architecture
    draft = model if name == "a model" else family(name).usual(scorer.target)
    latency, asked = scorer.latency, (scorer.target, scorer.workload)
    gammas = as_drafter(draft).gammas(tuple(range(1, 9)))
    verify_s = {gamma: latency.verify_s(*asked, gamma) for gamma in gammas}
    means = latency.means_s(asked[0], draft, asked[1], verify_s)
    assert means is not None
    each = [latency.round(asked[0], draft, asked[1], *known) for known in verify_s.items()]
    assert list(means) == pytest.approx([time.round_s.value for time in each], rel=1e-12)


def test_a_layer_of_experts_is_asked_for_gamma_by_gamma() -> None:
    """How many experts a pass touches is no formula of arrays."""
    scorer = scorer_of("deepseek-v3", "h200")
    mtp = family("mtp").usual(scorer.target)
    rounds = DrafterRounds(scorer.latency, scorer.target, mtp, scorer.workload)
    verify_s = {
        gamma: scorer.latency.verify_s(scorer.target, scorer.workload, gamma) for gamma in (1, 2)
    }
    assert rounds.means_s(verify_s) is None and scorer(mtp).speedup.value > 0
