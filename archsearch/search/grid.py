"""A whole space of independent drafts scored at once: the speed-up of every shape at its best
gamma.

`grid_of` makes the space a `ShapeGrid`: its valid, distinct shapes as a product, which
`Scorer.over_grid` scores.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import BODY_FIELDS, Head, ShapeGrid, Window
from archsearch.drafters.models import Independent
from archsearch.search.objective import Place, Scorer
from archsearch.search.space import InvalidShape, SearchSpace

BODY: Final = ("hidden_size", "ffn_ratio", "num_key_value_heads", "kv_group_size", "head_dim")
ORDER: Final = ("num_hidden_layers", *BODY, "draft_vocab_size", "window", "tie_word_embeddings")


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
    """Whether all formulas of such a search know arrays."""
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
