"""The ops of a pass of many drafts at once, each distinct one priced once.

A `ShapeGrid` of a million shapes runs some thousands of distinct ops: `layer_ops` and `head_ops`
list them with arrays for sizes, what is alike among them is asked once, and the answers are spread
over bodies and heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archsearch.architecture.grid import ShapeGrid, Shapes
from archsearch.architecture.ops import AllReduce, Attention, Gemm, Op, head_ops, layer_ops

Array = NDArray[np.float64]
Price = Callable[[Sequence[Op]], Array]
"""Seconds of each of several ops."""


@dataclass(frozen=True)
class GridPart:
    """What a pass reads: `tokens` of each of `batch` sequences against `context` cached ones;
    `logits`: as `Part` has it."""

    batch: int
    tokens: int
    context: int
    logits: int | None = None


@dataclass(frozen=True)
class GridSeconds:
    """Seconds of one pass by kind of op. Of one layer, [bodies]: `gemm`, `elementwise`, `reduce`,
    `attention` by window; outside the layers: `head` (its GEMM) and `reduce_ends`, [bodies, heads],
    `ends` (embedding, norm), [bodies]; `reduces`, `reduces_ends`: how often ranks wait for one
    another in a layer and outside."""

    gemm: Array
    elementwise: Array
    reduce: Array
    attention: dict[int | None, Array]
    head: Array
    ends: Array
    reduce_ends: Array
    reduces: int
    reduces_ends: int

    def layers_s(self, grid: ShapeGrid, bodies: slice) -> Array:
        """All ops of all layers, [bodies, layers, windows, 1]."""
        return self.depth(
            self.gemm + self.elementwise + self.reduce, grid, bodies
        ) + self.attention_s(grid, bodies)

    @staticmethod
    def depth(per_layer: Array, grid: ShapeGrid, bodies: slice) -> Array:
        """Seconds of a layer times the layers, [bodies, layers, 1, 1]."""
        return per_layer[bodies, None, None, None] * np.array(grid.layers)[None, :, None, None]

    def attention_s(self, grid: ShapeGrid, bodies: slice) -> Array:
        """Attention of all layers, [bodies, layers, windows, 1]."""
        total: Array = np.zeros(())
        for window, count in grid.layers_by_window().items():
            total = (
                total + self.attention[window][bodies, None, None, None] * count[None, :, :, None]
            )
        return total

    def ends_s(self, bodies: slice) -> Array:
        """All ops outside the layers, [bodies, 1, 1, heads]."""
        whole = self.head + self.reduce_ends + self.ends[:, None]
        return np.asarray(whole[bodies, None, None, :])


def priced(op: Op, price: Price) -> Array:
    """Seconds of an op whose sizes may be arrays; of the arrays' shape."""
    sizes = {field.name: getattr(op, field.name) for field in fields(op)}
    names = [name for name, value in sizes.items() if isinstance(value, np.ndarray)]
    if not names:
        return np.asarray(price([op])[0])
    arrays = np.broadcast_arrays(*(sizes[name] for name in names))
    key = np.zeros(arrays[0].size, dtype=np.int64)
    for array in arrays:
        flat = array.ravel()
        key = key * (int(flat.max()) + 1) + flat
    _, first, where = np.unique(key, return_index=True, return_inverse=True)
    each = [
        type(op)(**{**sizes, **{n: int(a.flat[i]) for n, a in zip(names, arrays, strict=True)}})
        for i in first
    ]
    return np.asarray(price(each)[where].reshape(arrays[0].shape))


def group_seconds(
    grid: ShapeGrid,
    part: GridPart,
    price: Price,
    *,
    ranks: int = 1,
    fused: bool = False,
    outside: Price | None = None,
) -> GridSeconds:
    """The seconds of a pass of every shape of the grid, by kind of op. `outside`: prices ops
    outside the layers, where another table does."""
    body: Any = grid.body()
    sums: dict[str, Array] = {
        name: np.zeros(len(grid.hidden_size)) for name in ("gemm", "elementwise", "all_reduce")
    }
    attention: dict[int | None, Array] = {}
    reduces = 0
    for number, window in enumerate(grid.layers_by_window()):
        ops = layer_ops(
            body,
            batch=part.batch,
            tokens=part.tokens,
            context=part.context,
            window=window,
            ranks=ranks,
            fused=fused,
        )
        for op in ops:
            if isinstance(op, Attention):
                attention[window] = priced(op, price)
            elif number == 0:  # layers of another window run the same otherwise
                sums[op.kind] = sums[op.kind] + priced(op, price)
                reduces += isinstance(op, AllReduce)
    wide = {"hidden_size": grid.hidden_size[:, None], "draft_vocab_size": grid.head_rows()[None, :]}
    both: Any = Shapes(grid.like, wide)
    size = (len(grid.hidden_size), len(grid.heads))
    head, reduce_ends, ends = np.zeros(size), np.zeros(size), np.zeros(len(grid.hidden_size))
    reduces_ends = 0
    for op in head_ops(
        both, batch=part.batch, tokens=part.tokens, ranks=ranks, head_tokens=part.logits
    ):
        seconds = priced(op, outside or price)
        if isinstance(op, Gemm):
            head = head + seconds
        elif isinstance(op, AllReduce):
            reduce_ends, reduces_ends = reduce_ends + seconds, reduces_ends + 1
        else:
            ends = ends + seconds[:, 0]
    return GridSeconds(
        sums["gemm"],
        sums["elementwise"],
        sums["all_reduce"],
        attention,
        head,
        ends,
        reduce_ends,
        reduces,
        reduces_ends,
    )
