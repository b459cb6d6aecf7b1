"""What a search that scored only some shapes missed: its best beside the exact best of its space,
or of a part of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.search.exact import exact_grid, rank_all, rank_alone
from archsearch.search.objective import Score, Scorer
from archsearch.search.space import SearchSpace

GRID_POINTS: Final = (
    1_000_000  # combinations of choices that are scored in full at once: some seconds of one core
)
ALONE_POINTS: Final = 100  # and where shapes are scored one by one: about a second


@dataclass(frozen=True, slots=True)
class Regret:
    """The exact best of `shapes` shapes of a space, and the best that the search found; both as
    drafts are ranked: speed-ups, over a mix of work gains in its objective (`Score.worth`).

    `whole`: those are all shapes of the space. Else they are a part of it that holds the search's
    own best: as many choices of every dimension as fit, at even distances. What was missed of the
    whole space is then `value` or more.
    """

    space: str
    sampler: str
    shapes: int
    whole: bool
    exact: float
    found: float

    @property
    def value(self) -> float:
        """By which share the search's best lies below the exact one, 0 where it is that one."""
        return max(0.0, 1.0 - self.found / self.exact)

    def to_dict(self) -> dict[str, Any]:
        """As `search --json` has it: `regret` is the share, `exact_speedup` and `found_speedup`
        what it is made of."""
        return {
            "space": self.space,
            "sampler": self.sampler,
            "shapes": self.shapes,
            "whole": self.whole,
            "exact_speedup": self.exact,
            "found_speedup": self.found,
            "regret": self.value,
        }


def regret_of(
    space: SearchSpace, scorer: Scorer, best: Score, indices: tuple[int, ...], sampler: str
) -> Regret | None:
    """How far `best`, at the choices `indices` of the space, lies below the exact best of the space
    or of a part of it.

    Up to GRID_POINTS combinations are scored where formulas over arrays say all, else ALONE_POINTS
    one by one. None where no shape of them keeps within the limits.
    """
    for points in (GRID_POINTS, ALONE_POINTS):
        part = space.part(through(space, scorer.target, indices, points))
        grid = exact_grid(part, scorer, points)
        if grid is not None:
            ranking = rank_all(scorer, grid, 1)
            shapes, gains = ranking.size, [gain for gain, _ in ranking.best]
        elif points == ALONE_POINTS:
            alone = rank_alone(part, scorer)
            shapes, gains = alone.shapes, [score.worth for *_, score in alone.ranked]
        else:
            continue
        whole = part.size(scorer.target) == space.size(scorer.target)
        return Regret(space.name, sampler, shapes, whole, max(gains), best.worth) if gains else None
    return None


def through(
    space: SearchSpace, target: Architecture, indices: Sequence[int], points: int
) -> dict[str, tuple[int, ...]]:
    """By dimension which of its choices make a part of at most `points` combinations that holds the
    ones at `indices`.

    The longest dimension gives first. What stays is spread evenly and has both ends where two or
    more stay.
    """
    dimensions = space.dimensions(target)
    counts = [len(dimension.choices) for dimension in dimensions]
    while math.prod(counts) > points and max(counts) > 1:
        counts[counts.index(max(counts))] -= 1
    return {
        dimension.name: spread(len(dimension.choices), count, index)
        for dimension, count, index in zip(dimensions, counts, indices, strict=True)
    }


def spread(length: int, count: int, fixed: int) -> tuple[int, ...]:
    """`count` of the numbers below `length`, ascending, at even distances; the one nearest to
    `fixed` becomes it.

    >>> spread(9, 3, 4), spread(9, 3, 5), spread(4, 4, 2), spread(5, 1, 3)
    ((0, 4, 8), (0, 5, 8), (0, 1, 2, 3), (3,))
    """
    step = (length - 1) / max(count - 1, 1)
    places = [round(step * number) for number in range(count)]
    nearest = min(range(count), key=lambda number: abs(places[number] - fixed))
    places[nearest] = fixed
    return tuple(sorted(places))
