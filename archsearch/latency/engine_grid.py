"""Passes of many drafts at once as an engine itself ran them: `EnginePasses` over a `ShapeGrid`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import body_parameters, kv_cache_bytes
from archsearch.architecture.grid import BODY_FIELDS, Array, ShapeGrid
from archsearch.architecture.ops import Part
from archsearch.latency.engine_passes import EnginePasses
from archsearch.latency.grid_ops import Pass


def engine_grid_s(own: EnginePasses, grid: ShapeGrid, passes: Sequence[Pass]) -> list[Any]:
    """Seconds of each pass of each shape, without std."""
    places = [
        (2.0 * math.log(p.batch * p.tokens), 0.5 * math.log(p.context + 64), float(cold), 0.0)
        for p, cold in passes
    ]
    body, head = body_parameters(grid), grid.head_rows * grid.hidden_size
    sizes = [
        np.log(grid.hidden_size),
        np.log(grid.intermediate_size),
        np.log(grid.num_hidden_layers),
        0.5 * np.log(grid.q_size),
        0.5 * np.log(grid.kv_size),
        np.log(body + head),
    ]
    means = own._residual.means(sizes, np.array(places))
    found = []
    for number, (part, cold) in enumerate(passes):
        mean = np.broadcast_to(means[..., number], grid.shape)
        base = _base(own, grid, part, cold, body, head)
        found.append(base * np.exp(_own_rows(own, grid, part, cold, mean)))
    return found


def _base(own: EnginePasses, grid: ShapeGrid, part: Part, cold: bool, body: Any, head: Any) -> Any:
    """`EnginePasses._features` of a draft times the coefficients."""
    layers, width, rows = grid.num_hidden_layers, own.dtype_bytes, float(part.batch * part.tokens)
    bytes_ = body * width
    share = 1.0 if cold else 1.0 / (1.0 + (own._half / (bytes_ + head * width)) ** own._steepness)
    cache = kv_cache_bytes(grid, part.context + part.tokens, width, part.batch)
    features = (
        1.0,
        layers,
        share * bytes_,
        (1.0 - share) * bytes_,
        head * width,
        2.0 * body * rows,
        2.0 * head * float(part.batch),
        cache,
        rows,
        rows * layers,
    )
    return sum(c * feature for c, feature in zip(own._coefficients.tolist(), features, strict=True))


def _own_rows(own: EnginePasses, grid: ShapeGrid, part: Part, cold: bool, mean: Array) -> Array:
    """The means with those of shapes whose own pass was measured, as `EnginePasses.forward_s`
    weighs them."""
    measured = [key for key in own._own if key[1:] == (part.batch, part.tokens, cold, False)]
    if not measured:
        return mean
    changed = mean.copy()
    for key in measured:
        for place in _places(grid, key[0]):
            _, ratio, error = min(own._own[key], key=lambda row: abs(row[0] - part.context))
            structure = own._residual.noise
            changed[place] += structure / (structure + error**2) * (ratio - changed[place])
    return changed


def _places(grid: ShapeGrid, arch: Architecture) -> list[tuple[int, ...]]:
    """Where a shape stands in the grid."""
    alike = np.all(
        [np.equal(getattr(grid, name), getattr(arch, name)) for name in BODY_FIELDS], axis=0
    )
    whole = (
        (int(body), *others)
        for body in np.flatnonzero(alike)
        for others in np.ndindex(grid.shape[1:])
    )
    return [place for place in whole if grid.at(place) == arch]
