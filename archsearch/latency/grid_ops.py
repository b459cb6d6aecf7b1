"""An op of many shapes at once: each distinct one is priced once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

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
    arrays = [np.asarray(each) for each in np.broadcast_arrays(*(sizes[name] for name in names))]
    key = np.zeros(arrays[0].size, dtype=np.int64)
    for array in arrays:
        flat = array.ravel()
        key = key * (int(flat.max()) + 1) + flat
    _, first, where = np.unique(key, return_index=True, return_inverse=True)
    each = [
        type(op)(**{**sizes, **{n: int(a.flat[i]) for n, a in zip(names, arrays, strict=True)}})
        for i in first
    ]
    return np.asarray(price(each))[where].reshape(arrays[0].shape)
