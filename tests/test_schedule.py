"""Gamma by batch size: what a schedule says of one batch size, and how it is made out of single ones."""

from __future__ import annotations

import pytest

from archsearch.engines.engine import check_start
from archsearch.errors import ArchsearchError
from archsearch.schedule import gamma_at, refined, schedule_from_points

RANGES = ((1, 2, 4), (3, 16, 1), (17, 256, 0))


def test_gamma_at_a_batch_size() -> None:
    assert [gamma_at(RANGES, batch) for batch in (1, 2, 3, 16, 17, 256, 1000)] == [4, 4, 1, 1, 0, 0, 0]
    assert gamma_at(((1, 4, 3),), 9) == 3, "the last gamma goes on above the end"
    assert gamma_at((), 9, 5) == 5


def test_every_schedule_made_of_points_gives_each_point_its_gamma() -> None:
    points = [(1, 4), (2, 4), (4, 2), (8, 3), (64, 0)]
    ranges = schedule_from_points(points)
    assert [gamma_at(ranges, batch) for batch, _ in points] == [gamma for _, gamma in points]


def test_an_engine_is_not_started_with_a_schedule_that_has_a_hole() -> None:
    with pytest.raises(ArchsearchError, match="go on at batch size 3, got 4"):
        check_start(4, "draft", (), ((1, 2, 4), (4, 8, 1)))
    with pytest.raises(ArchsearchError, match="schedule's largest is 4"):
        check_start(3, "draft", (), RANGES)


def test_borders_are_looked_for_between_points() -> None:
    best = {batch: 4 if batch < 19 else 2 if batch < 25 else 0 for batch in range(1, 65)}
    asked: list[int] = []

    def choose(batch: int) -> int:
        asked.append(batch)
        return best[batch]

    points = [(batch, best[batch]) for batch in (1, 2, 4, 8, 16, 32, 64)]
    ranges = schedule_from_points(refined(points, choose))
    assert ranges == ((1, 18, 4), (19, 24, 2), (25, 64, 0))
    assert len(asked) < 16, "by bisection"
    assert refined([(1, 3)], choose) == [(1, 3)] and refined([(1, 3), (2, 1)], choose) == [(1, 3), (2, 1)]
