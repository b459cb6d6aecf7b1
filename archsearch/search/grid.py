"""A whole space of independent drafts scored at once: the speed-up of every shape at its best
gamma.

`grid_of` makes the space a `ShapeGrid`: its valid, distinct shapes as a product, which
`Scorer.over_grid` scores.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import BODY_FIELDS, Head, ShapeGrid, Window
from archsearch.drafters.models import Independent
from archsearch.search.objective import Place, Scorer
from archsearch.search.space import SearchSpace

BODY: Final = ("hidden_size", "ffn_ratio", "num_key_value_heads", "kv_group_size", "head_dim")


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
    choices = {each.name: range(len(each.choices)) for each in space.dimensions(target)}

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
    depths = next(d for d in space.dimensions(target) if d.name == "num_hidden_layers").choices
    grid = ShapeGrid.of(
        shape,
        dict(zip(BODY_FIELDS, np.array(list(bodies), dtype=np.int64).T, strict=True)),
        [int(depth) for depth in depths],
        list(windows),
        list(heads),
    )
    of_bodies, of_windows = np.array(list(bodies.values())), tuple(windows.values())
    return SpaceGrid(grid, space.size(target), of_bodies, of_windows, tuple(heads.values()))
