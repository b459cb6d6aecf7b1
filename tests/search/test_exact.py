"""A whole space at once says what one by one does: every shipped space, targets, GPUs, a CPU,
engines, gamma 1 to 16."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any, Self

import numpy as np
import pytest

from archsearch.acceptance.estimator import (
    Acceptance,
    AcceptanceContext,
    AcceptanceEstimator,
    AcceptanceObservation,
    GivenAcceptance,
    VocabularyCoverage,
)
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import parameters
from archsearch.engine_rounds import engine_rounds
from archsearch.errors import MissingDataError
from archsearch.estimate import Estimate
from archsearch.hardware.device import load_device
from archsearch.latency.draft_passes import LatencyOfRounds
from archsearch.latency.model import LatencyModel
from archsearch.latency.roofline import RooflineLatency
from archsearch.paths import data_dir
from archsearch.profiles import Profile
from archsearch.search.exact import SpaceGrid, exact_grid, grid_of, rank_all, rank_alone
from archsearch.search.objective import Scorer
from archsearch.search.space import Limits, SearchSpace, list_spaces, load_space
from archsearch.search.study import How, search
from archsearch.workload import Workload
from tests.doubles.world import CostLaw, write_profile
from tests.latency.test_engine_passes import profile_of

SPACES = sorted(name for name in list_spaces() if load_space(name).family == "independent")
SMOLLM2 = Architecture(576, 1536, 30, 9, 3, 64, 49152, tie_word_embeddings=True)


@cache
def shipped(device: str) -> Profile:
    return Profile.load(next((data_dir("profiles") / load_device(device).key).iterdir()))


def scorer_of(
    target: Architecture,
    space: SearchSpace,
    latency: LatencyOfRounds,
    workload: Workload,
    **more: Any,
) -> Scorer:
    scorer = Scorer(target, workload, latency, more.pop("acceptance", PriorAcceptance()), **more)
    return scorer.with_limits(space.limits(target))


def compare(scorer: Scorer, grid: SpaceGrid, space: SearchSpace, some: int = 40) -> None:
    """A sample of the grid's shapes, one by one, at the best gamma and at each alone."""
    rng = random.Random(0)
    scored = list(scorer.over_grid(grid.grid))
    places = [
        (scores, rng.randrange(scores.speedup.size)) for scores in rng.choices(scored, k=some)
    ]
    for scores, flat in places:
        place, _ = scores.found(flat)
        shape = grid.grid.at(place)
        assert space.build(grid.indices(place), scorer.target) == shape
        one = scorer(shape)
        assert scores.speedup.flat[flat] == pytest.approx(one.speedup.value, rel=1e-9)
        if (
            scores.gamma.flat[flat] == one.gamma
        ):  # of two gammas as good as each other either may be named
            assert scores.draft_s.flat[flat] == pytest.approx(one.draft_s.value, rel=1e-9)
        assert scores.feasible.flat[flat] == all(
            value <= 0 for value in scorer.constraints(shape).values()
        )


def holds_all(space: SearchSpace, target: Architecture) -> None:
    """Without a limit on parameters, which is no matter of the grid."""
    kept = tuple(item for item in space.constraints if item[0] != "max_parameters")
    space = SearchSpace(space.name, "", space.choices, space.ffn_multiple, kept, 2, 300)
    grid = grid_of(space, target)
    assert grid is not None
    shapes = {grid.grid.at((b, d, w, h)) for b, d, w, h in np.ndindex(*grid.grid.shape)}
    assert shapes == set(space.enumerate(target)) and len(shapes) == grid.grid.size


def test_a_grid_holds_every_valid_shape_once(small_space: SearchSpace) -> None:
    """Ratios that round to the same width, windows that hold the whole sequence, tied heads that
    are trimmed."""
    twins = {
        "num_hidden_layers": [1, 2],
        "hidden_size": [256, "target"],
        "ffn_ratio": [2, 2.01, 2.5],
        "num_key_value_heads": [1, 2, 3],
        "kv_group_size": [1, 2, 4],
        "head_dim": [32, 63],
        "draft_vocab_size": [8192, 99999, "target"],
        "tie_word_embeddings": [True, False],
        "window_pattern": ["S", "L", "SSL"],
        "sliding_window": [128, 512],
    }
    holds_all(SearchSpace.from_dict({"dimensions": twins}, "twins"), SMOLLM2)
    holds_all(small_space, SMOLLM2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPACES)
def test_of_shipped_spaces_too(name: str) -> None:
    holds_all(load_space(name), catalogue.load("llama-3.1-8b").architecture)


GPUS = [  # device, mode, engine, version, target, ranks, batch, context
    ("h100", "graph", "vllm", None, "llama-3.1-8b", 1, 1, 512),
    ("h100", "graph", "vllm", "0.15.0", "llama-3.1-8b", 1, 16, 2048),
    ("a100", "graph", "sglang", None, "llama-65b", 4, 1, 256),
    ("a100", "graph", "vllm", "0.32.0", "llama-65b", 4, 4, 256),
    ("a100", "eager", "transformers", None, "llama-3.1-8b", 1, 1, 512),
    ("a100", "eager", "vllm", "0.32.0", "llama-65b", 4, 1, 512),
    ("b200", "graph", "tensorrt-llm", None, "llama-3.1-8b", 1, 64, 128),
    ("h200", "graph", "llama.cpp", None, "smollm2-135m", 1, 1, 64),
    ("h100", "graph", "vllm-fp8", None, "llama-3.1-8b", 1, 8, 512),
]
QUICK = (GPUS[0], GPUS[1])  # the others fit the tables of further profiles first: seconds each


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in GPUS],
    ids=lambda case: "-".join(map(str, case[:5])),
)
def test_composed_passes_on_gpus(case: tuple) -> None:
    device, mode, engine, version, name, ranks, batch, context = case
    target = catalogue.load(name).architecture
    engine, dtype = (
        engine.removesuffix("-fp8"),
        "float8_e4m3fn" if engine.endswith("-fp8") else "bfloat16",
    )
    rounds = engine_rounds(engine, version) if version else None
    try:
        latency = LatencyModel(shipped(device), dtype, mode, engine, rounds)
    except MissingDataError as error:
        pytest.skip(str(error))
    for each in SPACES if case is GPUS[0] else ("default",):
        space = load_space(each).served(latency.facts.draft_ranks(ranks), context + 96)
        scorer = scorer_of(target, space, latency, Workload(batch, context, ranks, dtype, mode))
        grid = grid_of(space, target)
        assert grid is not None
        compare(scorer, grid, space)
        if dtype != "bfloat16":
            compare(scorer.with_latency(latency.with_drafts("bfloat16")), grid, space)


def test_a_gpu_carried_over_and_one_of_its_datasheet_only() -> None:
    target = catalogue.load("llama-3.1-8b").architecture
    space = load_space("default").served(1, 600)
    grid = grid_of(space, target)
    assert grid is not None
    own = Profile(load_device("h200").to_dict(), {})
    carried = LatencyModel(own, "bfloat16", "graph", "vllm", tables=shipped("h100"))
    for latency, mode in (
        (carried, "graph"),
        (RooflineLatency(load_device("l4"), "bfloat16", "graph", "vllm"), "graph"),
        (RooflineLatency(load_device("l4"), "bfloat16", "eager", "transformers"), "eager"),
    ):
        compare(
            scorer_of(target, space, latency, Workload(2, 512, 1, "bfloat16", mode)), grid, space
        )


@pytest.fixture(scope="module")
def cpu() -> Profile:
    return write_profile(None, load_space("demo").sample(SMOLLM2, 60), SMOLLM2, CostLaw())


@pytest.mark.parametrize("engine", [None, "transformers", "llama.cpp"])
def test_whole_passes_of_a_cpu(cpu: Profile, engine: str | None) -> None:
    space = load_space("demo").served(1, 300)
    grid = grid_of(space, SMOLLM2)
    assert grid is not None
    latency = LatencyModel(cpu, CostLaw().dtype, engine=engine)
    work = Workload(1, 200, 1, CostLaw().dtype)
    for acceptance in (PriorAcceptance(), GivenAcceptance(0.7)):
        compare(scorer_of(SMOLLM2, space, latency, work, acceptance=acceptance), grid, space)


@pytest.mark.parametrize(
    ("engine", "dtype", "first"), [("vllm", "float32", 2), ("llama.cpp", "q8_0", 1)]
)
def test_passes_that_an_engine_ran_itself(engine: str, dtype: str, first: int) -> None:
    space = SearchSpace.from_dict(
        {
            "dimensions": {
                "num_hidden_layers": [1, 2, 3, 4, 8],
                "hidden_size": [256, 512, 768, 1024],
                "ffn_ratio": [2, 4],
                "num_key_value_heads": [2, 4],
                "kv_group_size": [1, 2, 4],
                "head_dim": [64],
                "tie_word_embeddings": [False],
                "draft_vocab_size": [8192, "target"],
                "window_pattern": ["L", "S"],
                "sliding_window": [64],
            }
        },
        "own",
    )
    grid = grid_of(space, SMOLLM2)
    assert grid is not None
    latency = LatencyModel(profile_of(engine, dtype, first), dtype, engine=engine)
    assert latency.engine_ is not None
    compare(scorer_of(SMOLLM2, space, latency, Workload(1, 256, 1, dtype)), grid, space, some=200)
    measured = Architecture(
        1024, 2048, 2, 8, 2, 64, 49152
    )  # one of the drafts whose own passes were timed
    places = [place for place in np.ndindex(grid.grid.shape) if grid.grid.at(place) == measured]
    assert len(places) == 1


@pytest.mark.parametrize("gammas", [(1,), (3, 5, 16), tuple(range(1, 17))])
def test_every_gamma_text_and_what_was_measured(gammas: tuple[int, ...]) -> None:
    target = catalogue.load("llama-3.1-8b").architecture
    space = load_space("default").served(1, 1096)
    latency = LatencyModel(shipped("h100"), "bfloat16", "graph", "vllm")
    coverage = VocabularyCoverage(((8192, 0.93), (32768, 0.99), (128256, 1.0)))
    scorer = scorer_of(
        target,
        space,
        latency,
        Workload(1, 1000, 1, "bfloat16", "graph", temperature=0.8),
        gammas=gammas,
        domain="code",
    )
    scorer = scorer.with_limits(Limits(2_000_000_000, 6 * 10**9)).with_coverage(coverage)
    draft = space.sample(target, 1)[0]
    learnt = PriorAcceptance().fit(
        [AcceptanceObservation(draft, Estimate(0.62, 0.02, "measured"), scorer.context)]
    )
    grid = grid_of(space, target)
    assert grid is not None
    compare(scorer.with_acceptance(learnt), grid, space)


def test_the_ranking_is_the_enumeration(cpu: Profile, small_space: SearchSpace) -> None:
    space = small_space.served(1, 300)
    scorer = scorer_of(
        SMOLLM2, space, LatencyModel(cpu, CostLaw().dtype), Workload(1, 200, 1, CostLaw().dtype)
    )
    exact = [score for *_, score in rank_alone(space, scorer).ranked[:12]]
    found = search(space, scorer, trials=60)
    assert [score.architecture for score in found.best[:8]] == [
        score.architecture for score in exact[:8]
    ]
    grid = exact_grid(space, scorer)
    assert grid is not None and found.spaces[0].exact and found.spaces[0].shapes == grid.grid.size
    assert found.finished == 60 and {row["origin"] for row in found.trials} == {"exact"}
    widths = {score.architecture.hidden_size for score in found.best}
    assert len(widths) > 3, "the best of other widths are recorded as well"
    assert search(space, scorer, trials=20).trials == found.trials[:20]
    walked = search(space, scorer, trials=60, how=How("random"))
    assert (
        not walked.spaces[0].exact and walked.best[0].speedup.value <= found.best[0].speedup.value
    )


def test_limits_hold_and_ranking_counts(cpu: Profile) -> None:
    space = load_space("demo").served(1, 300)
    scorer = scorer_of(
        SMOLLM2,
        space,
        LatencyModel(cpu, CostLaw().dtype),
        Workload(1, 200, 1, CostLaw().dtype),
    ).with_limits(Limits(20_000_000))
    grid = grid_of(space, SMOLLM2)
    assert grid is not None
    ranking = rank_all(scorer, grid, 10)
    feasible = sum(scores.feasible.sum() for scores in scorer.over_grid(grid.grid))
    assert 0 < feasible < ranking.scored == ranking.size
    assert all(parameters(grid.grid.at(place)) <= 20_000_000 for _, place, _ in ranking.best)


def test_what_has_no_formulas_over_arrays_is_searched_as_before(
    make_scorer: Callable[..., Scorer], small_space: SearchSpace
) -> None:
    class Other:
        def fit(self, observations: Any) -> Self:
            return self

        def predict(self, architecture: Architecture, context: AcceptanceContext) -> Acceptance:
            return PriorAcceptance().predict(architecture, context)

        def difference_std(
            self, first: Architecture, second: Architecture, context: AcceptanceContext
        ) -> float:
            return 0.1

    scorer = make_scorer()
    other: AcceptanceEstimator = Other()
    assert exact_grid(small_space, scorer) is None
    assert exact_grid(small_space, scorer.with_acceptance(other)) is None
    assert exact_grid(load_space("eagle3"), scorer) is None
