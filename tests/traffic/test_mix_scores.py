"""Scores over a mix of work: what `traffic` says of the same parts, one draft at a time and a whole
space at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from archsearch.acceptance.estimator import GivenAcceptance
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.acceptance.terms import training_tokens
from archsearch.architecture import catalogue
from archsearch.drafters.registry import family
from archsearch.errors import ArchsearchError, InvalidShapeError
from archsearch.estimate import Estimate
from archsearch.hardware.device import load_device
from archsearch.latency.model import LatencyModel
from archsearch.latency.roofline import RooflineLatency
from archsearch.paths import data_dir
from archsearch.profiles import Profile
from archsearch.records import as_data, from_data
from archsearch.search.exact import exact_grid
from archsearch.search.objective import MixScore, Score, Scorer
from archsearch.search.space import SearchSpace
from archsearch.search.study import search
from archsearch.traffic.mix import Mix, mix_of
from archsearch.traffic.mix_scorer import MixScorer
from archsearch.traffic.served import Load, objective_of, overs, serve_part
from archsearch.traffic.steady import RoundTokens, Service
from archsearch.traffic.times import RoundTimes, service_of, times_over_batches
from archsearch.workload import Workload

TARGET = catalogue.load("llama-3.1-8b").architecture
CHAT = {
    "name": "chat",
    "weight": 70,
    "concurrency": 4,
    "prompt_tokens": {"mean": 600, "std": 400},
    "output_tokens": 250,
    "temperature": 0.7,
}
CODE = {
    "name": "code",
    "weight": 30,
    "concurrency": 32,
    "prompt_tokens": 1500,
    "output_tokens": {"low": 100, "high": 500},
    "domain": "code",
    "prefix_cache_hit": 0.3,
}
RATE = {name: value for name, value in CHAT.items() if name != "concurrency"} | {
    "requests_per_second": 2.0
}


def mix(*parts: dict[str, Any], **more: Any) -> Mix:
    return mix_of({"parts": list(parts), **more}, "test")


@cache
def latency(engine: str = "vllm") -> LatencyModel:
    profile = Profile.load(next((data_dir("profiles") / load_device("h100").key).iterdir()))
    return LatencyModel(profile, "bfloat16", "graph", engine)


@cache
def space() -> SearchSpace:
    return SearchSpace.from_dict(
        {
            "dimensions": {
                "num_hidden_layers": [1, 2, 8],
                "hidden_size": [1024, 4096],
                "ffn_ratio": [2, 4],
                "num_key_value_heads": [4, 8],
                "kv_group_size": [4],
                "head_dim": [128],
                "tie_word_embeddings": [False],
                "draft_vocab_size": [16384, "target"],
                "window_pattern": ["L", "S"],
                "sliding_window": [256],
            }
        },
        "some",
    ).served(1, 4096)


def scorer(asked: Mix, own: Any = None, acceptance: Any = None, device: str = "h100") -> MixScorer:
    own = own or latency()
    base = Scorer(
        TARGET, Workload(1, 512, 1, "bfloat16", "graph"), own, acceptance or PriorAcceptance()
    )
    return MixScorer(base, asked, load_device(device))


@pytest.mark.parametrize("name", ["ngram", "eagle3"])
def test_a_load_of_one_request_is_as_sure_as_the_request_alone(name: str) -> None:
    """Rounds that draft nothing are in the band of an n-gram's speed-up too."""
    part = {"name": "one", "weight": 1, "concurrency": 1, "prompt_tokens": 400, "output_tokens": 9}
    draft, own = family(name).usual(TARGET), scorer(mix(part))
    alone = Scorer(own.target, own.workload, own.latency, own.acceptance)
    loaded = own(draft)
    assert loaded.mix is not None and loaded.mix.parts[0].gamma
    assert loaded.speedup.relative_std == pytest.approx(
        alone(draft, loaded.gamma).speedup.relative_std, rel=1e-9
    )


@pytest.mark.parametrize(("gamma", "size"), [(1, 256), (2, 170), (None, 512)])
def test_between_two_sizes_a_pass_leaves_its_graph_where_it_does(
    gamma: int | None, size: int
) -> None:
    draft = family("eagle3").usual(TARGET)

    def server(sizes: Sequence[int]) -> Service:
        args = latency(), TARGET, draft, Workload(1, 256, 1, "bfloat16", "graph"), [1, 2]
        return service_of(times_over_batches(*args, sizes), gamma, RoundTokens(), 0.0, 9.0, None)

    asked = size - 5, size, size + 1, size + 9
    at_a_rate = mix({**RATE, "prompt_tokens": 20, "output_tokens": 20}).parts[0]
    read = server(Load.of(at_a_rate, (None, None), None).sizes)
    for each in asked:
        alone = float(server([each]).round_s[0])
        assert read.round_at(float(each)) == pytest.approx(alone, rel=0.02), each
    assert read.round_at(size + 1.0) > 1.2 * read.round_at(float(size))


@pytest.mark.parametrize(
    ("at", "seconds", "graph"),
    [
        ([64.0, 102.0, 103.0], [1.0, 1.1, 2.0], 102.0),  # both are priced already
        ([64.0, 128.0, 256.0, 257.0], [1.0, 1.1, 1.3, 2.3], 170.0),  # another step, of a draft
    ],
)
def test_the_end_of_a_graph_adds_no_size_twice_and_nothing_outside_its_neighbours(
    at: list[float], seconds: list[float], graph: float
) -> None:
    rows = np.array(seconds)[:, None]
    idle = np.zeros(len(at))
    times = RoundTimes(np.array(at), (1,), rows[:, 0], idle, rows, rows, 2 * graph)
    served = service_of(times, 1, RoundTokens(), 0.0, 9.0, None)
    assert np.all(np.diff(served.at) > 0) and np.all(np.diff(served.round_s) >= 0)
    assert set(at) <= set(served.at.tolist())


def test_a_score_is_what_traffic_says_of_the_same_parts() -> None:
    asked = mix(CHAT, CODE, objective="throughput", limits={"ttft_ms": 1, "parameters": 1e6})
    own = scorer(asked)
    shape = next(iter(space().enumerate(TARGET)))
    score = own(shape)
    served = [serve_part(own, score.proposer, part, (None, None)) for part in own.mix.parts]
    assert score.mix is not None
    assert score.mix.value == pytest.approx(objective_of(served, "throughput", 1), rel=1e-12)
    assert score.mix.plain == pytest.approx(
        objective_of(served, "throughput", 1, plain=True), rel=1e-12
    )
    assert score.speedup.value == pytest.approx(objective_of(served, "speedup", 1), rel=1e-12)
    assert score.tpot_s.value == pytest.approx(objective_of(served, "tpot", 1), rel=1e-12)
    tokens = training_tokens(own.context, score.parameters)
    found = overs(served, asked, score.proposer, own.workload, tokens)
    assert list(score.mix.broken_limits) == [each.words for each in found if each.over > 0]
    assert len(score.mix.broken_limits) == 3  # the first token of both parts, and the parameters
    assert all(
        value > 0
        for name, value in own.constraints(shape).items()
        if "ttft" in name or name == "parameters"
    )
    assert (
        score.speedup.low is not None
        and score.speedup.low < score.speedup.value < score.speedup.high
    )
    assert Score.from_dict(score.to_dict()) == score
    chat, code = score.mix.parts
    assert (
        (chat.weight, code.weight) == (0.7, 0.3)
        and score.gamma == chat.gamma
        and chat.alpha != code.alpha
    )


def test_a_mix_of_one_kind_at_one_request_is_nearly_the_plain_score() -> None:
    long = {"weight": 1, "concurrency": 1, "prompt_tokens": 512, "output_tokens": 4000}
    own = scorer(mix(long), acceptance=GivenAcceptance(0.7))
    plain = Scorer(TARGET, own.workload, latency(), GivenAcceptance(0.7))
    for shape in list(space().enumerate(TARGET))[::12]:
        mixed, alone = own(shape), plain(shape)
        if mixed.mix is not None and mixed.mix.parts[0].gamma:
            assert mixed.speedup.value == pytest.approx(alone.speedup.value, rel=0.01)
            assert mixed.speedup.relative_std == pytest.approx(alone.speedup.relative_std, rel=0.05)


CASES = [
    (mix(CHAT, CODE), None),
    (
        mix(
            CHAT,
            CODE,
            objective="throughput",
            limits={"tpot_ms": 8, "ttft_ms": 60, "memory_gib": 2, "parameters": 5e8},
        ),
        None,
    ),
    (
        mix(
            CHAT | {"concurrency": 300},
            CODE,
            objective="tokens_per_device",
            limits={"training_exaflop": 2},
        ),
        None,
    ),
    (mix(RATE, CODE | {"refill": False}, objective="tpot"), None),
    (mix(RATE | {"requests_per_second": 40.0}), None),
    (
        mix(CHAT, CODE | {"refill": False}),
        RooflineLatency(load_device("l4"), "bfloat16", "graph", "vllm"),
    ),
]


@pytest.mark.parametrize(
    "number",
    [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, len(CASES)))],
)
def test_all_at_once_says_what_one_by_one_does(number: int) -> None:
    asked, own_latency = CASES[number]
    own = scorer(asked, own_latency, device="l4" if own_latency else "h100")
    grid = exact_grid(space(), own)
    assert grid is not None
    rng = random.Random(number)
    chunks = list(own.over_grid(grid.grid))
    assert sum(scores.speedup.size for scores in chunks) == grid.grid.size
    compared = 0
    for scores in rng.choices(chunks, k=12):
        flat = rng.randrange(scores.speedup.size)
        shape = grid.grid.at(scores.found(flat)[0])
        try:
            one = own(shape)
        except InvalidShapeError:  # memory holds no request beside it
            assert not scores.feasible.flat[flat]
            continue
        compared += 1
        found = (scores.ranked_by.flat[flat], scores.speedup.flat[flat])
        assert found == pytest.approx((one.worth, one.speedup.value), rel=1e-9)
        assert scores.feasible.flat[flat] == all(
            value <= 0 for value in own.constraints(shape).values()
        )
    assert compared


def test_the_ranking_is_by_the_objective_and_keeps_the_limits() -> None:
    asked = mix(CHAT, CODE, objective="throughput", limits={"parameters": 6e8})
    own = scorer(asked)
    found = search(space(), own, trials=12)
    assert found.spaces[0].exact and all(score.parameters <= 6e8 for score in found.best)
    gains = [score.worth for score in found.best]
    assert gains == sorted(gains, reverse=True) and all(
        score.mix is not None for score in found.best
    )
    every = [
        own(shape)
        for shape in space().enumerate(TARGET)
        if all(v <= 0 for v in own.constraints(shape).values())
    ]
    assert found.best[0].worth == pytest.approx(max(score.worth for score in every), rel=1e-9)
    assert all("throughput" in row for row in found.trials)
    grid = exact_grid(space(), own)
    assert grid is not None
    assert sum(scores.feasible.sum() for scores in own.over_grid(grid.grid)) == len(every)
    none = scorer(mix(CHAT, limits={"parameters": 100}))
    assert not search(space(), none, trials=3).best and none.limit_words() == "parameters=100"


def test_what_is_asked_elsewhere_fills_in_what_a_part_leaves_open() -> None:
    own = scorer(mix(CHAT | {"temperature": 1.0}, CODE))
    assert [part.temperature for part in own.mix.parts] == [1.0, 0.0], (
        "the heaviest part's is not the others'"
    )
    assert [part.domain for part in own.mix.parts] == ["chat", "code"]
    assert (
        own.workload.batch_size == 4
        and own.workload.temperature == 1.0
        and type(own.at_batch(2)) is Scorer
    )
    shape = next(iter(space().enumerate(TARGET)))
    known = own.with_acceptance(GivenAcceptance(0.9))
    assert known(shape).worth > own(shape).worth, "another acceptance forgets what was served"
    assert own.with_gammas([2])(shape).gamma == 2
    same = own.with_latency(latency())
    assert isinstance(same, MixScorer) and same(shape).worth == own(shape).worth


def test_what_was_measured_of_a_draft_counts_in_every_part() -> None:
    own = scorer(mix(CHAT, CODE))
    shape = next(iter(space().enumerate(TARGET)))
    taus = {gamma: Estimate(1.0 + 0.6 * gamma, 0.05, "measured") for gamma in (2, 4)}
    score = own.measured(shape, Estimate(0.8, 0.02, "measured"), taus)
    assert score.mix is not None and {part.gamma for part in score.mix.parts} <= {0, 2, 4}
    assert all(part.alpha == 0.8 for part in score.mix.parts) and score.gamma in (2, 4)
    with pytest.raises(ArchsearchError, match="tau was measured"):
        own.measured(shape, Estimate(0.8, 0.02, "measured"), {}, gammas=[3])


def test_a_load_that_fits_no_batch_is_refused_before_any_work() -> None:
    with pytest.raises(ArchsearchError, match="the load chat fits no batch"):
        scorer(mix(CHAT | {"prompt_tokens": 9_000_000}))


def test_a_mix_reads_back_what_it_wrote() -> None:
    asked = mix(
        CHAT,
        RATE,
        objective="tpot",
        tensor_parallel=4,
        draft_tensor_parallel=1,
        limits={"ttft_ms": 500},
    )
    assert mix_of(asked.to_dict(), "again") == asked
    with pytest.raises(ArchsearchError, match="tensor_parallel: must be at least 1"):
        mix(CHAT, tensor_parallel=0)
    score = scorer(mix(RATE | {"requests_per_second": 1e6}))(next(iter(space().enumerate(TARGET))))
    assert score.mix is not None and score.mix.parts[0].ttft_s is None
    assert from_data(MixScore, as_data(score.mix)) == score.mix
    assert replace(score.mix, objective="tpot", value=1.0, plain=2.0).gain == 2.0 and np.isfinite(
        score.worth
    )


def test_the_gamma_that_was_asked_is_priced_and_a_choice_has_a_band() -> None:
    part = CODE | {"concurrency": 128, "prompt_tokens": 2048}
    workload = Workload(tensor_parallel=1, mode="graph")
    asked = Scorer(TARGET, workload, latency(), GivenAcceptance(0.2), gammas=[5])
    draft = catalogue.load("llama-3.2-1b").architecture
    one = MixScorer(asked, mix(part), load_device("h100"))(draft)
    assert one.mix is not None and one.mix.parts[0].gamma == 5 and one.speedup.value < 0.9
    free = Scorer(TARGET, workload, latency(), PriorAcceptance(), gammas=[5, 6])
    chosen = MixScorer(free, mix(part), load_device("h100"))(draft)
    assert chosen.mix is not None and chosen.mix.parts[0].gamma == 0
    assert chosen.speedup.low is not None and chosen.speedup.high is not None
    assert chosen.speedup.low <= chosen.speedup.value <= chosen.speedup.high
    # off everywhere: what drafting would bring; as what never drafts it led what is unsure
    assert chosen.speedup.value < chosen.mix.parts[0].speedup < 1.0


def test_a_limit_on_one_request_in_a_hundred() -> None:
    with pytest.raises(ArchsearchError, match="ttft_p99_ms needs requests_per_second"):
        mix(CHAT, limits={"ttft_p99_ms": 500})
    limited = mix(RATE, limits={"ttft_p99_ms": 1})
    scorer = MixScorer(
        Scorer(TARGET, Workload(mode="graph"), latency(), GivenAcceptance(0.7)),
        limited,
        load_device("h100"),
    )
    score = scorer(catalogue.load("llama-3.2-1b").architecture)
    assert score.mix is not None and "99 % within" in score.mix.broken_limits[0]
    assert scorer.constraints(catalogue.load("llama-3.2-1b").architecture)["chat ttft 99 %"] > 0


def test_a_rate_cannot_start_together() -> None:
    with pytest.raises(ArchsearchError, match="refill: false needs concurrency"):
        mix(RATE | {"refill": False})
