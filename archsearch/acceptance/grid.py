"""alpha of many independent drafts at once: what the prior says of each of a `ShapeGrid`, without its std.

The regressors of `terms` over arrays; tests/search/test_grid.py holds the two together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from archsearch.acceptance.estimator import AcceptanceContext, GivenAcceptance
from archsearch.acceptance.prior import INDEPENDENT_DRIFT, PriorAcceptance, after_trimming
from archsearch.acceptance.terms import COEFFICIENTS, UNKNOWN_TARGET, shape_terms, tokens_of, while_young
from archsearch.architecture.counts import body_parameters
from archsearch.architecture.grid import ShapeGrid

Array = NDArray[np.float64]
VARYING: Final = (
    "size", "narrow", "overwide", "depth", "single_layer", "grouped", "single_kv_head", "cut_by_window", "window",
)  # fmt: skip
"""Terms that depend on the shape; those that `shape_terms` has besides are the context's."""


def can_predict(estimator: Any) -> bool:
    """Whether `alphas` knows the estimator."""
    return type(estimator) in (PriorAcceptance, GivenAcceptance)


def alphas(estimator: Any, grid: ShapeGrid, context: AcceptanceContext) -> tuple[Array, float]:
    """(alpha of every shape, [bodies, layers, windows, heads] or what broadcasts to it; the drift along the block)."""
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
    slope = dict(zip(COEFFICIENTS, prior.coefficients_.tolist(), strict=True))
    shared = {name: value for name, value in prior._terms(grid.at((0, 0, 0, 0)), context).items() if name not in VARYING}
    level: Any = math.fsum(slope[name] * value for name, value in shared.items())
    taught = prior.taught(context)
    varying = _terms(grid, context)
    for name, value in (while_young(varying, tokens_of(taught)) if taught.training == "target" else varying).items():
        level = level + slope[name] * value
    return np.asarray(level, dtype=float)


def _terms(grid: ShapeGrid, context: AcceptanceContext) -> Mapping[str, Any]:
    """VARYING of every shape; as `terms.shape_terms` has them of one."""
    from archsearch.acceptance.terms import REFERENCE_LAYERS, REFERENCE_RATIO

    target = context.target
    body = grid.body_parameters() / (body_parameters(target) if target else UNKNOWN_TARGET)
    hidden = grid.hidden_size[:, None, None, None]
    width = np.log(hidden / target.hidden_size) if target else np.zeros((1, 1, 1, 1))
    layers = np.array(grid.layers)[None, :, None, None]
    heads, kv_heads = (x[:, None, None, None] for x in (grid.num_attention_heads, grid.num_key_value_heads))
    return {
        "size": np.log10(np.minimum(body, 1.0) / REFERENCE_RATIO),
        "narrow": np.maximum(0.0, -width),
        "overwide": np.maximum(0.0, width),
        "depth": np.log(layers / REFERENCE_LAYERS),
        "single_layer": (layers == 1).astype(float),
        "grouped": (kv_heads < heads).astype(float),
        "single_kv_head": ((kv_heads == 1) & (heads > 1)).astype(float),
        **_window_terms(grid, context),
    }


def _window_terms(grid: ShapeGrid, context: AcceptanceContext) -> Mapping[str, Array]:
    """`cut_by_window` and `window`, [1, layers, windows, 1]."""
    names = ("cut_by_window", "window")
    found = np.zeros((2, len(grid.layers), len(grid.windows)))
    for depth in range(len(grid.layers)):
        for window in range(len(grid.windows)):
            terms = shape_terms(grid.at((0, depth, window, 0)), context)
            found[:, depth, window] = [terms[name] for name in names]
    return {name: values[None, :, :, None] for name, values in zip(names, found, strict=True)}


def _trimmed(prior: PriorAcceptance, grid: ShapeGrid, full: Array, context: AcceptanceContext) -> Array:
    """`prior.trimmed_alpha` of each head."""
    alpha = np.broadcast_to(full, (*np.broadcast_shapes(full.shape, (1, 1, 1, 1))[:3], len(grid.heads))).copy()
    for head in range(len(grid.heads)):
        coverage, _ = prior._coverage(grid.at((0, 0, 0, head)), context)
        alpha[..., head] = np.minimum(after_trimming(alpha[..., head], coverage), coverage)
    return alpha
