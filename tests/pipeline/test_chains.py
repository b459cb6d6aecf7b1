"""Chains and drafts that stop when unsure: chosen by replay, priced round by round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from archsearch.acceptance.estimator import GivenAcceptance
from archsearch.acceptance.lookup import LookupText, NewestNgram
from archsearch.acceptance.measured import Trace
from archsearch.drafters.lookup import NGram
from archsearch.drafters.models import Chain
from archsearch.drafts.records import trained_draft
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.latency.rounds import RoundTime, summed
from archsearch.pipeline import chains
from archsearch.pipeline.chains import Replays
from archsearch.search.objective import Scorer
from archsearch.workload import Workload
from tests.acceptance.test_chain import naive, texts_and_trace
from tests.doubles.serving import DRAFT, TARGET, FormulaLatency


class Free(FormulaLatency):
    """A lookup takes nothing but the target's pass; the draft reads a row in a tenth of its
    time."""

    def verify_s(self, target, workload, gamma) -> Estimate:
        read = super().verify_s(target, workload, gamma)
        share = 0.1 if target == DRAFT else 1.0
        return Estimate(share * read.value, share * read.std, read.source)

    def round(self, target, draft, workload, gamma, verify_s=None) -> RoundTime:
        if not isinstance(draft, NGram):
            return super().round(target, draft, workload, gamma, verify_s)
        nothing = Estimate(0.0, 0.0, "modelled")
        return summed(nothing, self.verify_s(target, workload, gamma), nothing)


@pytest.fixture(autouse=True)
def few_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chain is replayed with each of them."""
    for name, values in (("FOUND", (2, 4)), ("SHORTEST", (2, 3)), ("THRESHOLDS", (0.3, 0.5))):
        monkeypatch.setattr(chains, name, values)


def replays(
    trace: Trace, texts: list[LookupText], engine: str = "transformers", share: float = 0.3
) -> Replays:
    latency = Free(share=share, row=2e-3)
    scorer = Scorer(TARGET, Workload(context_len=100), latency, GivenAcceptance(0.6))
    return Replays(scorer, engine, trained_draft(DRAFT, Path("draft"), trace), trace, texts)


@pytest.mark.parametrize(("engine", "first"), [("transformers", 0), ("llama.cpp", 1)])
def test_a_chain_is_priced_as_the_sum_of_its_rounds(engine: str, first: int) -> None:
    texts, trace = texts_and_trace(3)
    own = replays(trace, texts, engine)
    best = own.chain()
    assert best.lookup is not None and isinstance(best.lookup, NewestNgram) == (first == 1)
    rounds = naive(texts, trace, best.lookup, best.rule, first)
    scorer, workload = own.scorer, own.scorer.workload
    latency, plain = scorer.latency, scorer.decode_s.value

    def seconds(who: str, drafted: int) -> float:
        read = latency.verify_s(TARGET, workload, drafted).value
        if who == "draft":
            dropped = not best.rule.with_last and drafted < best.rule.gamma
            return (read if drafted else plain) + (drafted + dropped) * 0.3 * plain
        passes = latency.verify_s(DRAFT, workload, drafted).value if first else 0.0
        return read + passes  # llama.cpp reads what was verified with the draft too

    unseen = sum(row[2] + 1 for row in rounds if row[0] == "lookup")
    draws = sum(row[0] == "draft" for row in rounds)
    behind = 0 if first else round(unseen / draws)
    more = 2e-4 * behind * draws  # what the draft reads behind the lookup
    spent = sum(seconds(who, drafted) for who, drafted, _ in rounds) + more
    score = own.score(best)
    tokens = sum(accepted + 1 for _, _, accepted in rounds)
    assert best.rate.value == pytest.approx(tokens / spent)
    assert score.speedup.value == pytest.approx(plain * tokens / spent)
    assert score.round_s is not None and score.round_s.value == pytest.approx(spent / len(rounds))
    assert score.family == "chain" and score.gamma == best.rule.longest
    assert isinstance(score.drafter, Chain) and score.tau == best.replay.tau
    assert score.speedup.relative_std >= best.rate.std / best.rate.value


def test_the_best_chain_beats_its_halves_where_both_help() -> None:
    texts, trace = texts_and_trace(2)
    own = replays(trace, texts)
    best, (name, half) = own.chain(), own.half()
    gain = best.gain(half)
    assert gain.value > gain.std > 0 and f"over {name} alone by replay" in own.words(best)
    assert "no gain" not in own.words(best)
    fixed = own.chain(gamma=5)
    assert fixed.rule.gamma == 5 and fixed.rate.value <= best.rate.value
    dear = replays(trace, texts, share=3.0)  # a draft that costs more than it brings
    assert dear.half()[0] == "ngram" and "no gain: " in dear.words(dear.chain())


def test_where_nothing_repeats_there_is_no_chain() -> None:
    _, trace = texts_and_trace(1)
    rows = np.arange(8 * 100).reshape(8, 100)
    sizes = [len(row) for row in trace.agreements]
    texts = [
        LookupText(tuple(row[:10]), tuple(row[10 : 10 + n]))
        for row, n in zip(rows.tolist(), sizes, strict=True)
    ]
    with pytest.raises(ArchsearchError, match="nothing repeats in the run's held-out text"):
        replays(trace, texts).chain()


def test_a_draft_stops_where_that_gains_and_nowhere_else() -> None:
    texts, trace = texts_and_trace(2)
    sure = tuple(np.where(row, 0.9, 0.1).astype(np.float32) for row in trace.agreements)
    knows = replays(replace(trace, confidences=sure), texts)
    stops = knows.stopping
    assert stops is not None and stops.rule.least > 0.1 and stops.rule.with_last
    gain = stops.gain(knows.fixed)
    assert gain.value > 2 * gain.std > 0 and stops.rule.gamma > knows.fixed.rule.gamma
    score = knows.score(stops)
    assert score.drafter is None and score.gamma == stops.rule.gamma
    assert score.speedup.value == pytest.approx(
        knows.score(knows.fixed).speedup.value * (1 + gain.value)
    )
    assert not replays(replace(trace, confidences=sure), texts, "llama.cpp").stopping.rule.with_last
    rng = np.random.default_rng(0)
    noise = tuple(rng.random(len(row)).astype(np.float32) for row in trace.agreements)
    assert replays(replace(trace, confidences=noise), texts).stopping is None
    assert replays(replace(trace, confidences=()), texts).stopping is None
    with pytest.raises(ArchsearchError, match="no chains are replayed for vllm"):
        Replays.of(knows.scorer, "vllm", knows.draft, None)  # type: ignore[arg-type]
    few = replace(trace, confidences=sure).pick(range(7))
    assert replays(few, texts[:7]).stopping is None, "too few texts to say"


def test_a_chain_says_what_it_is() -> None:
    assert Chain(DRAFT, 2, 5, 4, 3, 0.4).label() == (
        f"n-gram of 2 to 5, 4 tokens; else {DRAFT.label()}, gamma 3, stops below 0.4"
    )
