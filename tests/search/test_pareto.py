"""Several goals: the set that nothing beats, exact over a whole space, ties in groups with their
cheapest."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.hardware.device import load_device
from archsearch.latency.roofline import RooflineLatency
from archsearch.records import as_data
from archsearch.report.costs import ParetoSet, pareto_chart, pareto_section
from archsearch.search.exact import exact_grid
from archsearch.search.objective import Scorer
from archsearch.search.pareto import (
    GOALS,
    check_goals,
    goals_of,
    pareto,
    pareto_places,
    undominated,
)
from archsearch.search.space import SearchSpace
from archsearch.workload import Workload

TARGET = Architecture(576, 1536, 30, 9, 3, 64, 49152, tie_word_embeddings=True)


def brute(costs: np.ndarray) -> set[int]:
    beats = lambda a, b: (a <= b).all() and (a < b).any()  # noqa: E731
    return {i for i, row in enumerate(costs) if not any(beats(other, row) for other in costs)}


@pytest.mark.parametrize("columns", [1, 2, 3, 4])
def test_undominated_is_what_nothing_beats(columns: int) -> None:
    rng = np.random.default_rng(columns)
    costs = rng.integers(0, 12, (300, columns)).astype(float)  # many equals
    assert set(np.flatnonzero(undominated(costs))) == brute(costs)
    assert not len(undominated(np.zeros((0, columns))))


def test_the_set_of_a_whole_space_is_exact(small_space: SearchSpace) -> None:
    latency = RooflineLatency(load_device("l4"), "bfloat16", "graph", "vllm")
    space = small_space.served(1, 300)
    scorer = Scorer(TARGET, Workload(1, 200, 1, "bfloat16", "graph"), latency, PriorAcceptance())
    goals = ("speedup", "training_cost", "kv_bytes")
    grid = exact_grid(space, scorer)
    assert grid is not None
    found = [grid.grid.at(place) for place in pareto_places(scorer, grid, goals)]
    grid_scores = [
        score for scores in scorer.over_grid(grid.grid) for score in np.ravel(scores.speedup)
    ]
    assert len(grid_scores) == grid.grid.size
    shapes = [shape for shape in space.enumerate(TARGET) if isinstance(shape, Architecture)]
    scores = [
        scorer(shape) for shape in shapes if shape.num_hidden_layers in (1, 4) or shape in found
    ]
    assert 3 < len(found) < len(scores) / 4
    kept = {
        member.score.architecture for member in pareto(scorer, scores, goals, lambda score: None)
    }
    assert {shape.label() for shape in found} == {shape.label() for shape in kept}
    assert all(value > 0 for value in goals_of(scorer(found[0]), scorer, GOALS).values())


def test_groups_have_a_cheapest_and_members_say_whether_they_were_confirmed(
    make_scorer: Callable[..., Scorer], small_space: SearchSpace
) -> None:
    scorer = make_scorer()
    scores = [scorer(shape) for shape in list(small_space.enumerate(TARGET))[::40]]
    fastest = max(scores, key=lambda score: score.speedup.value)
    members = pareto(
        scorer, scores, ("speedup", "parameters"), lambda score: 1.5 if score == fastest else None
    )
    assert (
        members[0].score == fastest
        and members[0].measured == 1.5
        and as_data(members[0])["confirmed"]
    )
    for number in {member.group for member in members}:
        group = [member for member in members if member.group == number]
        cheapest = min(group, key=lambda member: member.score.parameters)
        assert [member for member in group if member.cheapest] == [cheapest]
    goals = {name: GOALS[name] for name in ("speedup", "parameters")}
    (table,) = pareto_section(ParetoSet(goals, (), tuple(members))).tables
    rows = table.rows
    assert table.header == ["#", "draft", "speedup", "parameters", "group", "measured"] and len(
        rows
    ) == len(members)
    assert rows[0][-1] == "1.50x" and rows[1][-1] == "not confirmed"
    confirmed, others, cheapest = pareto_chart(ParetoSet(goals, (), tuple(members))).series
    assert len(confirmed.x) == 1 and len(others.x) == len(members) - 1
    assert len(cheapest.x) == sum(member.cheapest for member in members)
    assert pareto_chart(ParetoSet(goals, (), ())).series == ()


def test_goals_are_checked() -> None:
    assert check_goals(["speedup", "kv_bytes", "speedup"]) == ("speedup", "kv_bytes")
    with pytest.raises(ArchsearchError, match="unknown goal beauty"):
        check_goals(["speedup", "beauty"])
    with pytest.raises(ArchsearchError, match="two goals or more, got speedup"):
        check_goals(["speedup"])
