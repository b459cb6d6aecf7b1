"""An op of many shapes at once: each distinct one is priced once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

import numpy as np

from archsearch.architecture.grid import Sizes
from archsearch.architecture.ops import Op, Part

Pass = tuple[Part, bool]
"""What is read, and whether the weights come from memory."""


def priced(op: Op, price: Callable[[Sequence[Op]], Any]) -> Any:
    """Seconds of an op whose sizes may be arrays, of the arrays' shape. `price`: seconds of each of
    several ops."""
    sizes = {field.name: getattr(op, field.name) for field in fields(op)}
    names = [name for name, value in sizes.items() if isinstance(value, np.ndarray)]
    if not names:
        return price([op])[0]
    arrays = tuple(sizes[name] for name in names)
    alike, where = _distinct(*arrays)
    each = [type(op)(**{**sizes, **dict(zip(names, row, strict=True))}) for row in alike]
    return np.asarray(price(each))[where]


@lru_cache(maxsize=512)
def _distinct(*arrays: Sizes) -> tuple[list[tuple[int, ...]], Any]:
    """The distinct rows of sizes, and which of them is at each place."""
    together = [np.asarray(each) for each in np.broadcast_arrays(*arrays)]
    key = np.zeros(together[0].size, dtype=np.int64)
    for array in together:
        flat = array.ravel()
        key = key * (int(flat.max()) + 1) + flat
    _, first, where = np.unique(key, return_index=True, return_inverse=True)
    rows = zip(*(array.ravel()[first].tolist() for array in together), strict=True)
    return list(rows), where.reshape(together[0].shape)
