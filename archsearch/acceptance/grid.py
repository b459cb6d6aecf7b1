"""alpha of many independent drafts at once: what the prior says of each of a `ShapeGrid`, without
its std.

The regressors of `terms` over arrays; tests/search/test_grid.py holds the two together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archsearch.acceptance.estimator import AcceptanceContext, GivenAcceptance
from archsearch.acceptance.learnt import tokens_behind
from archsearch.acceptance.prior import INDEPENDENT_DRIFT, PriorAcceptance, after_trimming
from archsearch.acceptance.terms import (
    COEFFICIENTS,
    learning_of,
    shape_terms,
    target_body,
    tokens_of,
    while_young,
)
from archsearch.architecture.grid import ShapeGrid

Array = NDArray[np.float64]


def can_predict(estimator: Any) -> bool:
    """Whether `alphas` knows the estimator."""
    if type(estimator) is PriorAcceptance:
        return bool(
            estimator.names_ == COEFFICIENTS
        )  # one of an earlier version has terms that vary otherwise
    return type(estimator) is GivenAcceptance


def alphas(estimator: Any, grid: ShapeGrid, context: AcceptanceContext) -> tuple[Array, float]:
    """(alpha of every shape, [bodies, layers, windows, heads] or what broadcasts to it; the drift
    along the block)."""
    if isinstance(estimator, GivenAcceptance):
        known = estimator.predict(grid.at((0, 0, 0, 0)), context)
        return np.full((1, 1, 1, 1), known.alpha.value), known.drift.value
    prior: PriorAcceptance = estimator
    prior.about(context.target)
    level = _level(prior, grid, context)
    full = 1.0 / (1.0 + np.exp(-level))
    return _trimmed(prior, grid, full, context), INDEPENDENT_DRIFT.mean


def _level(prior: PriorAcceptance, grid: ShapeGrid, context: AcceptanceContext) -> Array:
    """logit(alpha) with a full head, [bodies, layers, windows, 1]."""
    slope = dict(zip(prior.names_, prior.coefficients_.tolist(), strict=True))
    varying = _terms(grid, context)
    first = prior._terms(grid.at((0, 0, 0, 0)), context)
    level: Any = math.fsum(
        slope.get(name, 0.0) * value for name, value in first.items() if name not in varying
    )
    for name, value in varying.items():
        level = level + slope.get(name, 0.0) * value
    return np.asarray(level, dtype=float)


def _terms(grid: ShapeGrid, context: AcceptanceContext) -> Mapping[str, Any]:
    """VARYING of every shape; as `terms.shape_terms` has them of one."""
    from archsearch.acceptance.terms import REFERENCE_LAYERS, REFERENCE_RATIO

    target, whole = context.target, target_body(context.target)
    body = grid.body_parameters() / whole
    hidden = grid.hidden_size[:, None, None, None]
    width = np.log(hidden / target.hidden_size) if target else np.zeros((1, 1, 1, 1))
    layers = np.array(grid.layers)[None, :, None, None]
    heads, kv_heads = (
        x[:, None, None, None] for x in (grid.num_attention_heads, grid.num_key_value_heads)
    )
    learning = learning_of(grid.at((0, 0, 0, 0)), context, tokens_of(context, grid.parameters()))
    of_body = {
        "size": np.log10(np.minimum(body, 1.0) / REFERENCE_RATIO),
        "narrow": np.maximum(0.0, -width),
        "overwide": np.maximum(0.0, width),
        "depth": np.log(layers / REFERENCE_LAYERS),
        "single_layer": (layers == 1).astype(float),
        "grouped": (kv_heads < heads).astype(float),
        "single_kv_head": ((kv_heads == 1) & (heads > 1)).astype(float),
    }
    learnt = learning.terms(body * whole, whole, tokens_behind(target))
    return {**while_young(of_body, learning), **learnt, **_window_terms(grid, context)}


def _window_terms(grid: ShapeGrid, context: AcceptanceContext) -> Mapping[str, Array]:
    """`cut_by_window`, `cut_far` and `window`, [1, layers, windows, 1]."""
    names = ("cut_by_window", "cut_far", "window")
    found = np.zeros((3, len(grid.layers), len(grid.windows)))
    for depth in range(len(grid.layers)):
        for window in range(len(grid.windows)):
            terms = shape_terms(grid.at((0, depth, window, 0)), context)
            found[:, depth, window] = [terms[name] for name in names]
    return {name: values[None, :, :, None] for name, values in zip(names, found, strict=True)}


def _trimmed(
    prior: PriorAcceptance, grid: ShapeGrid, full: Array, context: AcceptanceContext
) -> Array:
    """`prior.trimmed_alpha` of each head."""
    alpha = np.broadcast_to(
        full, (*np.broadcast_shapes(full.shape, (1, 1, 1, 1))[:3], len(grid.heads))
    ).copy()
    for head in range(len(grid.heads)):
        coverage, _ = prior._coverage(grid.at((0, 0, 0, head)), context)
        alpha[..., head] = np.minimum(after_trimming(alpha[..., head], coverage), coverage)
    return alpha
