"""Gamma by batch size: what a schedule says of one batch size, and how it is made out of single
ones."""

from __future__ import annotations

import pytest

from archsearch.engines.engine import check_start
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.schedule import SchedulePoint, gamma_at, merged, refined, schedule_from_points

RANGES = ((1, 2, 4), (3, 16, 1), (17, 256, 0))


def test_gamma_at_a_batch_size() -> None:
    assert [gamma_at(RANGES, batch) for batch in (1, 2, 3, 16, 17, 256, 1000)] == [
        4,
        4,
        1,
        1,
        0,
        0,
        0,
    ]
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
    assert refined([(1, 3)], choose) == [(1, 3)] and refined([(1, 3), (2, 1)], choose) == [
        (1, 3),
        (2, 1),
    ]


def point(batch: int, *gains: float) -> SchedulePoint:
    """Gains of gamma 1, 2, ...; the best of them, or 0 where none is above 1."""
    by_gamma = {gamma: Estimate(gain, 0.2, "modelled") for gamma, gain in enumerate(gains, start=1)}
    best = max(by_gamma, key=lambda gamma: by_gamma[gamma].value)
    gamma = best if by_gamma[best].value > 1.0 else 0
    return SchedulePoint(
        batch, gamma, None, by_gamma[best] if gamma else Estimate(1.0, 0.0, "modelled"), by_gamma
    )


def test_ranges_that_gain_less_than_a_hundredth_are_one() -> None:
    points = [
        point(1, 1.5, 1.995, 2.0),
        point(2, 1.5, 2.0, 1.995),
        point(4, 1.5, 1.99, 2.0),
        point(8, 1.5, 1.2, 1.1),
    ]
    assert [each.gamma for each in points] == [3, 2, 3, 1]
    found = merged(points)
    assert [gamma for _, gamma in found] == [3, 3, 3, 1]
    points[3] = point(8, 1.5, 1.495, 1.1)
    assert [gamma for _, gamma in merged(points)] == [2, 2, 2, 2], (
        "one gamma that is best nowhere but good enough everywhere"
    )
    for (batch, gamma), at in zip(found, points, strict=True):
        assert (
            batch == at.batch_size
            and at.by_gamma[gamma].value >= 0.99 * at.by_gamma[at.gamma].value
        )


def test_the_batch_that_was_asked_for_keeps_its_best_gamma_and_off_stays_off() -> None:
    points = [
        point(1, 1.5, 1.995, 2.0),
        point(2, 1.5, 2.0, 1.995),
        point(4, 1.002, 0.9, 0.8),
        point(8, 0.998, 0.9, 0.8),
    ]
    assert merged(points, kept=2) == [(1, 2), (2, 2), (4, 1), (8, 0)]
    assert merged(points, kept=1) == [(1, 3), (2, 3), (4, 1), (8, 0)]
    assert merged([]) == []
