"""A whole space of independent drafts scored at once: the speed-up of every shape at its best
gamma.

`grid_of` makes the space a `ShapeGrid`: its valid, distinct shapes as a product. `GridScorer`
scores it in chunks, with the numbers of `Scorer` (to 1e-9) but without their std; who is written
down is scored by `Scorer` as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import BODY_FIELDS, Array, Head, ShapeGrid, Window
from archsearch.drafters.models import Independent
from archsearch.latency.grid import GridLatency
from archsearch.search.objective import Scorer
from archsearch.search.space import InvalidShape, SearchSpace
from archsearch.speedup import accepted_by_position, drifting_positions

CHUNK: Final = (
    1 << 17
)  # shapes that are scored together: their arrays stay in the processor's cache
BODY: Final = ("hidden_size", "ffn_ratio", "num_key_value_heads", "kv_group_size", "head_dim")
ORDER: Final = ("num_hidden_layers", *BODY, "draft_vocab_size", "window", "tie_word_embeddings")
Place = tuple[int, int, int, int]
"""Where a shape stands: body, depth, window, head."""


@dataclass(frozen=True)
class SpaceGrid:
    """The valid shapes of a space as a grid. `points`: combinations of choices, valid or not;
    `choices`: the indices (into the space's dimensions) of each body [bodies, 5], depth, window and
    head (rows, tied)."""

    grid: ShapeGrid
    points: int
    bodies: NDArray[np.int64]
    windows: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]

    def indices(self, place: Place) -> tuple[int, ...]:
        """One choice per dimension, in the order of `SearchSpace.dimensions`."""
        body, depth, window, head = place
        rows, tied = self.heads[head]
        return (
            depth,
            *(int(index) for index in self.bodies[body]),
            rows,
            self.windows[window],
            tied,
        )


def can_score(space: SearchSpace, scorer: Scorer) -> bool:
    """Whether `GridScorer` knows all formulas of such a search."""
    if space.family != Independent.family or Independent.family in getattr(
        scorer, "known_families", {}
    ):
        return False
    return all(
        hasattr(one, name)
        for one, name in (
            (scorer, "over_grid"),
            (scorer.latency, "grid_s"),
            (scorer.acceptance, "alphas"),
        )
    )


def grid_of(space: SearchSpace, target: Architecture) -> SpaceGrid | None:
    """The space as a grid; None where no shape of it is valid.

    Which shapes are valid is a matter of their bodies, which `SearchSpace.build` is asked about one
    by one; of choices that make the same shape the first stays, as in `SearchSpace.enumerate`.
    """
    dimensions = {dimension.name: dimension for dimension in space.dimensions(target)}
    windows, heads = _windows(space, target), _heads(space, target)
    found: dict[tuple[int, ...], tuple[tuple[int, ...], Architecture]] = {}
    for body in itertools.product(*(range(len(dimensions[name].choices)) for name in BODY)):
        shape = space.build((0, *body, heads[0][0][0], windows[0][0], heads[0][0][1]), target)
        if isinstance(shape, InvalidShape):
            continue
        assert isinstance(shape, Architecture)
        found.setdefault(_body(shape), (body, shape))
    if not found:
        return None
    sizes = dict(zip(BODY_FIELDS, np.array(list(found), dtype=np.int64).T, strict=True))
    grid = ShapeGrid.of(
        next(iter(found.values()))[1],
        sizes,
        [int(value) for value in dimensions["num_hidden_layers"].choices],
        [window for _, window in windows],
        [head for _, head in heads],
    )
    bodies = np.array([body for body, _ in found.values()])
    return SpaceGrid(
        grid, space.size(target), bodies, tuple(i for i, _ in windows), tuple(i for i, _ in heads)
    )


def _body(shape: Architecture) -> tuple[int, ...]:
    return tuple(getattr(shape, name) for name in BODY_FIELDS)


def _first_valid(space: SearchSpace, target: Architecture) -> tuple[int, ...] | None:
    """Choices of the first valid shape, whatever its depth, window and head."""
    lengths = {dimension.name: len(dimension.choices) for dimension in space.dimensions(target)}
    for body in itertools.product(*(range(lengths[name]) for name in BODY)):
        indices = (0, *body, 0, 0, 0)
        if not isinstance(space.build(indices, target), InvalidShape):
            return indices
    return None


def _windows(space: SearchSpace, target: Architecture) -> list[tuple[int, Window]]:
    """The windows that differ, each with the first of its choices."""
    found: dict[Window, int] = {}
    indices = _first_valid(space, target)
    for index in range(len(_dimension(space, target, "window"))):
        shape = Window("L", None)
        if indices is not None:
            built = space.build((*indices[:7], index, indices[8]), target)
            assert isinstance(built, Architecture)
            shape = Window(built.window_pattern, built.sliding_window)
        found.setdefault(shape, index)
    return [(index, window) for window, index in found.items()]


def _heads(space: SearchSpace, target: Architecture) -> list[tuple[tuple[int, int], Head]]:
    """The heads that differ, each with the first of its choices of rows and of tying."""
    found: dict[Head, tuple[int, int]] = {}
    indices = _first_valid(space, target)
    rows, tied = (
        range(len(_dimension(space, target, name)))
        for name in ("draft_vocab_size", "tie_word_embeddings")
    )
    for pair in itertools.product(rows, tied):
        head = Head(None, False)
        if indices is not None:
            built = space.build((*indices[:6], pair[0], indices[7], pair[1]), target)
            assert isinstance(built, Architecture)
            head = Head(built.draft_vocab_size, built.tie_word_embeddings)
        found.setdefault(head, pair)
    return [(pair, head) for head, pair in found.items()]


def _dimension(space: SearchSpace, target: Architecture, name: str) -> Sequence[Any]:
    return next(
        dimension.choices for dimension in space.dimensions(target) if dimension.name == name
    )


@dataclass(frozen=True)
class GridScores:
    """What a score says, of shapes as one array each, [bodies, layers, windows, heads]; `start`:
    the first body's number.

    `feasible`: within the scorer's limits; `worth`: what they are ranked by, None: the speed-up.
    Seconds; `tau` tokens a round.
    """

    start: int
    speedup: Array
    gamma: NDArray[np.int8]
    alpha: Array
    tau: Array
    draft_s: Array
    round_s: Array
    feasible: NDArray[np.bool_]
    worth: Array | None = None

    @property
    def ranked_by(self) -> Array:
        """`Score.worth` of each."""
        return self.speedup if self.worth is None else self.worth

    def place(self, flat: int) -> Place:
        """Where the shape at a place of the flattened arrays stands in the grid."""
        body, depth, window, head = (int(i) for i in np.unravel_index(flat, self.speedup.shape))
        return self.start + body, depth, window, head


class GridScorer:
    """Scores all shapes of a grid with `scorer`'s latency, acceptance, gammas and limits. Raises
    TypeError where `can_score` says no."""

    def __init__(self, scorer: Scorer, grid: ShapeGrid) -> None:
        self.scorer, self.grid = scorer, grid
        self.latency = GridLatency(
            scorer.latency, scorer.target, grid, scorer.workload, scorer.gammas
        )

    def chunks(self) -> Iterator[GridScores]:
        """Scores of all shapes, some bodies at a time."""
        bodies = self.grid.shape[0]
        size = max(1, CHUNK // math.prod(self.grid.shape[1:]))
        for start in range(0, bodies, size):
            yield self.scores(slice(start, min(start + size, bodies)))

    def scores(self, bodies: slice) -> GridScores:
        """Scores of the shapes of some bodies."""
        scorer, some = self.scorer, self.grid.part(bodies)
        acceptance: Any = scorer.acceptance
        alpha, drift = acceptance.alphas(some, scorer.context)
        reach = accepted_by_position(drifting_positions(alpha, drift, max(scorer.gammas)))
        tokens = dict(enumerate(itertools.accumulate(reach, initial=1.0)))
        decode_s = scorer.decode_s.value
        gain = np.full(some.shape, -np.inf)
        gamma, best = (
            np.zeros(some.shape, dtype=np.int8),
            {name: np.zeros(some.shape) for name in ("tau", "draft_s", "round_s")},
        )
        for time in self.latency.rounds(bodies):
            found = tokens[time.gamma] * decode_s / time.round_s
            better = found > gain
            for array, value in (
                (gain, found),
                (gamma, time.gamma),
                (best["tau"], tokens[time.gamma]),
                (best["draft_s"], time.draft_s),
                (best["round_s"], time.round_s),
            ):
                np.copyto(array, value, where=better, casting="unsafe")
        whole = np.broadcast_to(alpha, some.shape)
        return GridScores(bodies.start, gain, gamma, whole, **best, feasible=feasible(scorer, some))


def feasible(scorer: Scorer, grid: ShapeGrid) -> NDArray[np.bool_]:
    """Within max_parameters and max_memory."""
    fits = np.ones(grid.shape, dtype=bool)
    for over in Scorer.constraints(scorer, grid).values():
        fits &= over <= 0.0
    return fits
