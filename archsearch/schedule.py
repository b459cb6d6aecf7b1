"""Gamma by batch size: what a schedule is, and what it says of one batch size. Every room that has
one uses this."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate

Ranges = tuple[tuple[int, int, int], ...]
"""Inclusive: (first batch size, last batch size, gamma). Starts at 1 and has no holes; the last
gamma goes on above the end."""


@dataclass(frozen=True)
class SchedulePoint:
    """One batch size: the best gamma, its tau and speed-up, and the predicted speed-up of every
    gamma. gamma 0: drafting nothing is faster; `speedup` is then below 1 where the engine runs the
    draft all the same. None: not said (written by hand)."""

    batch_size: int
    gamma: int
    tau: Estimate | None = None
    speedup: Estimate | None = None
    by_gamma: Mapping[int, Estimate] = field(default_factory=dict)


@dataclass(frozen=True)
class GammaSchedule:
    """Gamma by batch size: the `ranges`, what was found at single batch sizes (`points`), and whose
    latencies that comes from (`engine`, `latency`: in words)."""

    ranges: Ranges = ()
    points: tuple[SchedulePoint, ...] = ()
    engine: str = ""
    latency: str = ""


def ranges_words(ranges: Ranges) -> str:
    """ "1-3: 5, 4-8: 3, 9-256: off"."""
    spans = [
        (f"{first}-{last}" if last > first else str(first), gamma or "off")
        for first, last, gamma in ranges
    ]
    return ", ".join(f"{span}: {gamma}" for span, gamma in spans)


def check_schedule(ranges: Sequence[Sequence[int]]) -> Ranges:
    """`ranges` as a schedule. Raises ArchsearchError: not three whole numbers, not from 1 on, a
    hole, a negative gamma."""
    checked = []
    expected = 1
    for entry in ranges:
        numbers = list(entry) if isinstance(entry, list | tuple) else []
        if len(numbers) != 3 or any(type(n) is not int for n in numbers):
            raise ArchsearchError(
                "a schedule entry must be [first batch, last batch, gamma] in whole numbers, got"
                f" {entry!r}"
            )
        first, last, gamma = numbers
        if first != expected:
            where = "start at batch size 1" if expected == 1 else f"go on at batch size {expected}"
            raise ArchsearchError(f"the schedule must {where}, got {first} in {entry!r}")
        if last < first or gamma < 0:
            raise ArchsearchError(
                f"a schedule entry needs last batch >= first batch and gamma >= 0, got {entry!r}"
            )
        checked.append((first, last, gamma))
        expected = last + 1
    return tuple(checked)


def gamma_at(ranges: Ranges, batch_size: int, gamma: int = 0) -> int:
    """Draft tokens a round at a batch size; `gamma` without a schedule. Above its end a schedule
    goes on with its last gamma."""
    for first, last, here in ranges:
        if first <= batch_size <= last:
            return here
    return ranges[-1][2] if ranges else gamma


def largest_gamma(ranges: Ranges, gamma: int) -> int:
    """What an engine must be ready for: the schedule's largest gamma, `gamma` without a schedule
    (or one that never drafts)."""
    return max((entry[2] for entry in ranges), default=0) or gamma


def refined(
    points: Sequence[tuple[int, int]], choose: Callable[[int], int]
) -> list[tuple[int, int]]:
    """`points` (batch size, gamma) with the batch sizes beside each other between which the gamma
    changes: `choose` is asked for those in between, so that no gamma goes on to a batch size where
    another, or none, is better."""
    found: list[tuple[int, int]] = []
    for (batch, gamma), (after, next_gamma) in zip(points, [*points[1:], points[-1]], strict=True):
        found.append((batch, gamma))
        low, here = batch, gamma
        while here != next_gamma and after - low > 1:
            left, right, other = low, after, next_gamma
            while right - left > 1:
                middle = (left + right) // 2
                chosen = choose(middle)
                if chosen == here:
                    left = middle
                else:
                    right, other = middle, chosen
            if left > low:
                found.append((left, here))
            if right < after:
                found.append((right, other))
            low, here = right, other
    return found


MERGED_WITHIN: Final = 0.01
"""Share of the gain that a schedule may lose at a batch size for having fewer ranges: far less than
its error bars."""


def merged(points: Sequence[SchedulePoint], kept: int = 0) -> list[tuple[int, int]]:
    """(batch size, gamma) of `points`, ascending, with as few changes of gamma as lose at most
    MERGED_WITHIN of the best gain at each batch size; of several gammas that do, the one of the
    most gain over its range.

    Nothing is drafted where that is best, and nowhere else; at batch size `kept` the best gamma
    stays.
    """
    ranges: list[tuple[list[SchedulePoint], set[int]]] = []  # points, the gammas that do for all
    for point in points:
        able = {point.gamma}
        if point.gamma and point.batch_size != kept:
            least = (1.0 - MERGED_WITHIN) * _gain(point, point.gamma)
            able = {gamma for gamma in point.by_gamma if _gain(point, gamma) >= least} | able
        if ranges and (both := ranges[-1][1] & able):
            ranges[-1] = ([*ranges[-1][0], point], both)
        else:
            ranges.append(([point], able))
    found = []
    for held, able in ranges:
        gains = {g: math.fsum(_gain(p, g) / _gain(p, p.gamma) for p in held) for g in able}
        best = max(gains, key=gains.__getitem__)
        found += [(point.batch_size, best) for point in held]
    return found


def _gain(point: SchedulePoint, gamma: int) -> float:
    """The predicted speed-up at a gamma; of drafting nothing, 1."""
    return point.by_gamma[gamma].value if gamma in point.by_gamma else 1.0


def schedule_from_points(points: Sequence[tuple[int, int]]) -> Ranges:
    """Ranges (first, last, gamma) out of the best gamma at ascending batch sizes; each holds up to
    the middle to the next.

    The last range ends at the last batch size. Neighbours of equal gamma are one range. Raises
    ArchsearchError for no points.
    """
    if not points or points[0][0] != 1:
        raise ArchsearchError(f"a schedule begins at batch size 1, got {list(points)}")
    ranges: list[tuple[int, int, int]] = []
    first, batch_end = 1, points[-1][0] + 1
    for (batch, gamma), (following, _) in zip(points, [*points[1:], (batch_end, 0)], strict=True):
        last = min(max(batch, int((batch * following) ** 0.5)), following - 1)
        if ranges and ranges[-1][2] == gamma:
            ranges[-1] = (ranges[-1][0], last, gamma)
        else:
            ranges.append((first, last, gamma))
        first = last + 1
    return tuple(ranges)
