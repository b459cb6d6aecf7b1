"""The ranking of a whole space by what is known beforehand: every shape is scored, the best are
handed on.

Where a space is small enough for that, no sampler can do better. Independent drafts are scored by
formulas over arrays: `grid_of` makes the space a `ShapeGrid`, its valid, distinct shapes as a
product, which `Scorer.over_grid` scores (`rank_all`). Heads are scored one after the other
(`rank_alone`). Of many shapes only some are written down as trials, in an order that does not
depend on how many: two of the best, then the best of another width and depth.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import BODY_FIELDS, Head, ShapeGrid, Window
from archsearch.drafters.drafter import Draft
from archsearch.drafters.models import Independent
from archsearch.errors import InvalidShapeError
from archsearch.search.objective import GridScores, Place, Score, Scorer
from archsearch.search.space import Indices, SearchSpace

BODY: Final = ("hidden_size", "ffn_ratio", "num_key_value_heads", "kv_group_size", "head_dim")


@dataclass(frozen=True)
class SpaceGrid:
    """The valid shapes of a space as a grid, with the indices (into the space's dimensions) of each
    body [bodies, 5], window and head (rows, tied)."""

    grid: ShapeGrid
    bodies: NDArray[np.int64]
    windows: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]

    def indices(self, place: Place) -> tuple[int, ...]:
        """One choice per dimension, in the order of `SearchSpace.dimensions`."""
        body, depth, window, head = place
        rows, tied = self.heads[head]
        return (depth, *map(int, self.bodies[body]), rows, self.windows[window], tied)


def grid_of(space: SearchSpace, target: Architecture) -> SpaceGrid | None:
    """The space as a grid; None where no shape of it is valid.

    Which shapes are valid is a matter of their bodies, which `SearchSpace.build` is asked about one
    by one; of choices that make the same shape the first stays, as in `SearchSpace.enumerate`.
    """
    values = {each.name: each.choices for each in space.dimensions(target)}
    choices = {name: range(len(each)) for name, each in values.items()}

    def built(body: tuple[int, ...], rows: int = 0, window: int = 0, tied: int = 0) -> Any:
        return space.build((0, *body, rows, window, tied), target)

    bodies: dict[tuple[int, ...], tuple[int, ...]] = {}
    for body in itertools.product(*(choices[name] for name in BODY)):
        shape = built(body)
        if isinstance(shape, Architecture):
            bodies.setdefault(tuple(getattr(shape, name) for name in BODY_FIELDS), body)
    if not bodies:
        return None
    first = next(iter(bodies.values()))
    windows: dict[Window, int] = {}
    for window in choices["window"]:
        shape = built(first, window=window)
        windows.setdefault(Window(shape.window_pattern, shape.sliding_window), window)
    heads: dict[Head, tuple[int, int]] = {}
    for rows, tied in itertools.product(
        choices["draft_vocab_size"], choices["tie_word_embeddings"]
    ):
        shape = built(first, rows, tied=tied)
        heads.setdefault(Head(shape.draft_vocab_size, shape.tie_word_embeddings), (rows, tied))
    grid = ShapeGrid.of(
        shape,
        dict(zip(BODY_FIELDS, np.array(list(bodies), dtype=np.int64).T, strict=True)),
        [int(depth) for depth in values["num_hidden_layers"]],
        list(windows),
        list(heads),
    )
    of_bodies, of_windows = np.array(list(bodies.values())), tuple(windows.values())
    return SpaceGrid(grid, of_bodies, of_windows, tuple(heads.values()))


EXACT_POINTS: Final = 5_000_000
"""Combinations of choices up to which a space is scored in full by formulas over arrays: some ten
seconds of one core."""
ALONE_POINTS: Final = 5_000
"""And one by one: heads, of which some third are valid and take 1 ms each."""
ALIKE: Final = 1e-12  # relative difference of speed-ups below which two windows do the same
EVERY: Final = 3  # of so many trials one is the best of its width and depth

Found = tuple[float, Place, int]
"""Worth of a shape (its speed-up, or the gain of a mix's objective), its place and its gamma."""

Report = Callable[[int, int, float], None]
"""Called with how many are scored, of how many, and the best worth so far, 0 before any."""


@dataclass
class Ranking:
    """The best of a grid, best first: of all shapes (`best`, at most `most`) and of each width and
    depth (`corners`). `scored`: how many shapes were so far."""

    grid: SpaceGrid
    most: int
    scored: int = 0
    best: list[Found] = field(default_factory=list)
    corners: dict[tuple[int, int], Found] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many distinct valid shapes the grid has."""
        return self.grid.grid.size

    def add(self, scores: GridScores) -> None:
        """The scores of some more bodies."""
        gains = np.where(scores.feasible, scores.ranked_by, -np.inf)
        self.scored += gains.size
        flat = gains.ravel()
        count = min(self.most, flat.size)
        top = np.argpartition(-flat, count - 1)[:count]
        self.best += [(float(flat[i]), *scores.found(int(i))) for i in top if np.isfinite(flat[i])]
        self.best = sorted(self.best, key=lambda found: (-found[0], found[1]))[: self.most]
        bodies, depths = gains.shape[:2]
        places = np.arange(gains.size).reshape(bodies, depths, -1)
        sizes = np.asarray(self.grid.grid.hidden_size).ravel()
        hidden = sizes[scores.start : scores.start + bodies]
        for width, depth in itertools.product(np.unique(hidden).tolist(), range(depths)):
            alike = places[hidden == width, depth].ravel()
            place = int(alike[flat[alike].argmax()])
            gain, known = float(flat[place]), self.corners.get((width, depth))
            if np.isfinite(gain) and (known is None or gain > known[0]):
                self.corners[width, depth] = (gain, *scores.found(place))

    def places(self) -> Iterator[tuple[Place, int]]:
        """Shapes, with their gammas, in the order in which they become trials; none twice, and no
        window that does what another one does."""
        tops = iter(self._apart(self.best))
        corners = iter(self._apart(sorted(self.corners.values(), key=lambda f: (-f[0], f[1]))))
        given: set[tuple[Place, int]] = set()
        for number in itertools.count(1):
            first, second = (corners, tops) if number % EVERY == 0 else (tops, corners)
            place = next((p for source in (first, second) for p in source if p not in given), None)
            if place is None:
                return
            given.add(place)
            yield place

    def _apart(self, found: Sequence[Found]) -> list[tuple[Place, int]]:
        """Without shapes that differ by a window that changes no number; of such the one with fewer
        windows stays."""
        kept: list[tuple[Place, int]] = []
        known: dict[tuple[int, int, int], list[tuple[float, int]]] = {}
        for gain, place, gamma in found:
            body, depth, window, head = place
            twins = known.setdefault((body, depth, head), [])
            twin = next((at for other, at in twins if abs(gain / other - 1.0) < ALIKE), None)
            if twin is None:
                twins.append((gain, len(kept)))
                kept.append((place, gamma))
            elif self._slides(window) < self._slides(kept[twin][0][2]):
                kept[twin] = place, gamma
        return kept

    def _slides(self, window: int) -> int:
        return self.grid.grid.windows_of[window].pattern.count("S")


def exact_grid(space: SearchSpace, scorer: Scorer, most: int = EXACT_POINTS) -> SpaceGrid | None:
    """The space as a grid where it can be scored in full: of at most `most` combinations, with
    formulas over arrays."""
    arrays = hasattr(scorer.latency, "grid_s") and hasattr(scorer.acceptance, "alphas")
    drafts = space.family == Independent.family not in scorer.known_families
    able = arrays and drafts and space.size(scorer.target) <= most
    return grid_of(space, scorer.target) if able else None


def rank_all(scorer: Scorer, grid: SpaceGrid, most: int, progress: Report | None = None) -> Ranking:
    """Score every shape of the grid; the best `most` are kept."""
    ranking = Ranking(grid, 4 * most + 64)  # some differ by windows that change nothing
    for scores in scorer.over_grid(grid.grid):
        ranking.add(scores)
        if progress is not None:
            progress(ranking.scored, ranking.size, ranking.best[0][0] if ranking.best else 0.0)
    return ranking


@dataclass
class Alone:
    """A space of which every shape was scored by itself. `ranked`: those within the limits, best
    first, with their choices; `invalid`: those of which nothing can be predicted, and why."""

    shapes: int
    ranked: list[tuple[Indices, Draft, Score]]
    invalid: list[tuple[Indices, Draft, str]]


def rank_alone(space: SearchSpace, scorer: Scorer, progress: Report | None = None) -> Alone:
    """Score every shape of a space by itself; `progress` is called every 256."""
    found, target = Alone(0, [], []), scorer.target
    size = space.size(target)

    def looked_at() -> Iterator[Indices]:
        for number, indices in enumerate(space.combinations(target), start=1):
            if progress is not None and number % 256 == 0:
                progress(number, size, max((s.worth for *_, s in found.ranked), default=0.0))
            yield indices

    for indices, shape in space.distinct(target, looked_at()):
        found.shapes += 1
        try:
            if scorer.feasible(shape):
                found.ranked.append((indices, shape, scorer(shape)))
        except InvalidShapeError as error:
            found.invalid.append((indices, shape, str(error)))
    found.ranked.sort(key=lambda each: order(each[2]))
    return found


def order(score: Score) -> tuple[float, float, float]:
    """Fastest first; of equals the smaller, then the one with fewer windows."""
    return (-score.worth, score.parameters, score.architecture.window_pattern.count("S"))
