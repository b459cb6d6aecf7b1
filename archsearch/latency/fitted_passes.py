"""A pass as it was fitted to whole layers and whole models: coefficients on what its ops take, the
cache, and what is left.

The second and third layer of `archsearch.latency.model`, which is where they are explained;
profiles without whole passes have `archsearch.latency.composed` instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import weight_bytes_per_pass
from archsearch.architecture.grid import Pass, ShapeGrid, priced
from archsearch.architecture.ops import Elementwise, Op, Part, PassOps, head_ops, model_pass
from archsearch.errors import MissingDataError
from archsearch.estimate import Array, Estimate, N, Numbers
from archsearch.latency.ops import OpModel, steady
from archsearch.latency.regression import Residual, nonnegative_fit
from archsearch.profiles import ForwardShape, Measurement, Profile

GROUPS: Final = ("pass", "layers", "gemm", "head", "attention", "elementwise", "scatter")
GROUP_OF: Final = {
    "gemm": "gemm",
    "experts": "gemm",
    "attention": "attention",
    "latent_attention": "attention",
}
OUTLIER_MADS: Final = 5.0
MIN_ROWS: Final = {"forward": 8}
# Where the half point may lie, as a share of the last-level cache that the machine reports. Far
# below it too: a virtual machine reports the whole socket's cache (480 MiB seen for two cores) and
# holds a small part of it.
CACHE_SHARES: Final = np.array([0.03, 0.06, 0.12, 0.25, 0.4, 0.6, 0.8, 1.0, 1.3, 1.7, 2.2])


@dataclass(frozen=True)
class CacheFit:
    """Share of a pass's weights that come from memory when it runs in a loop: 1 / (1 + (half_bytes
    / bytes)^steepness)."""

    half_bytes: float
    steepness: float

    def cold_share(self, bytes_: N) -> N:
        return 1.0 / (1.0 + (self.half_bytes / bytes_) ** self.steepness)


class FittedPasses:
    """What `LatencyModel` knows of whole passes of a profile that has them.

    A class that takes this in has `profile`, `dtype`, `mode`, `dtype_bytes`, `ops`, `_parts` (what
    was priced). After `_fit` `coefficients_` (by GROUPS), `cache_` and `loo_` (leave-one-out
    relative errors of whole passes) hold what was learnt.
    """

    profile: Profile
    dtype: str
    mode: str
    dtype_bytes: float
    ops: OpModel
    _parts: dict[tuple[Architecture, Part], tuple[list[float], list[float]]]

    # --- what a pass is made of

    def _group_seconds(self, arch: Architecture, part: Part) -> tuple[list[float], list[float]]:
        """Warm and cold seconds of each of GROUPS for a pass on one device, before coefficients;
        "pass", "layers" and "scatter" are counts."""
        key = (arch, part)
        found = self._parts.get(key)
        if found is not None:
            return found
        ops = model_pass(arch, [part], fused=self.mode == "graph", choose=False)
        scattered = part.batch * part.tokens * arch.trimmed
        warm, cold = (self._groups(ops, out_of_cache, scattered) for out_of_cache in (False, True))
        if not ops.of_grid:
            if len(self._parts) > 200_000:
                self._parts.clear()
            self._parts[key] = (warm, cold)
        return warm, cold

    def _groups(self, ops: PassOps, cold: bool, scattered: float = 0.0) -> list[float]:
        """Seconds of each of GROUPS. The choice of tokens is the engine's, not the pass's."""

        def price(each: Sequence[Op]) -> list[float]:
            self.ops.prepare(each, cold)
            return [self.ops.op_s(op, cold)[0] for op in each]

        if not ops.of_grid:
            self.ops.prepare([*ops.outside, *ops.in_layers], cold)  # together: much quicker
        sums: dict[str, float] = dict.fromkeys(GROUPS, 0.0)
        sums |= {"pass": 1.0, "layers": ops.layers, "scatter": scattered}
        for counts, gemm in ((ops.outside, "head"), (ops.in_layers, "gemm")):
            for op, count in counts.items():
                if isinstance(op, Elementwise) and op.name == "sample":
                    continue
                group = GROUP_OF.get(op.kind, "elementwise")
                group = gemm if group == "gemm" else group
                seconds = priced(op, price) if ops.of_grid else self.ops.op_s(op, cold)[0]
                sums[group] = sums[group] + count * seconds
        return list(sums.values())

    def _features(self, arch: Architecture, part: Part, cold: bool, cache: CacheFit) -> list[float]:
        warm_s, cold_s = self._group_seconds(arch, part)
        if cold:
            return cold_s
        share = cache.cold_share(weight_bytes_per_pass(arch, self.dtype_bytes))
        return _between(warm_s, cold_s, share)

    def _inputs(self, arch: Architecture) -> list[float]:
        """What of a pass is its shape's, as the process sees it; the rest are `_place`."""
        weights = np.log(weight_bytes_per_pass(arch, self.dtype_bytes))
        return [*inputs_of(arch), 0.5 * np.log(arch.head_rows), weights]

    # --- fitting

    def _fit(self) -> None:
        rows = steady(self.profile.select("forward", self.dtype, self.mode))
        if len(rows) < MIN_ROWS["forward"]:
            raise MissingDataError(
                f"the profile has {len(rows)} whole-forward rows for {self.dtype} in {self.mode}"
                f" mode, at least {MIN_ROWS['forward']} are needed; run archsearch profile longer"
                " (--budget 5m)"
            )
        log_ratio = self._learn(rows)
        outlying = np.abs(log_ratio)  # [rows]
        # 1.4826 MAD estimates a std where the errors are normal; below 25 % nothing is called an
        # outlier.
        limit = max(OUTLIER_MADS * 1.4826 * float(np.median(outlying)), 0.25)
        kept = [row for row, size in zip(rows, outlying, strict=True) if size <= limit]
        if MIN_ROWS["forward"] <= len(kept) < len(rows):  # a stall that the probe did not feel
            rows, log_ratio = kept, self._learn(kept)
        inputs = [
            [*self._inputs(arch), *place_of(part, cold)] for arch, part, cold in map(_point, rows)
        ]
        self._residual = Residual.fit(
            np.array(inputs), log_ratio, min_noise=0.015, bounds=(0.7, 30.0)
        )
        self.loo_ = np.expm1(self._residual.leave_one_out())

    def _learn(self, rows: Sequence[Measurement]) -> Array:
        """The cache and the coefficients, from whole passes and single layers; log(measured / base)
        of the passes, [rows]."""
        points, times = [_point(row) for row in rows], np.array([row.median_s for row in rows])
        stacks = steady(self.profile.select("layer", self.dtype, self.mode))
        layers = [(self._stack_features(ForwardShape.of(row)), row.median_s) for row in stacks]

        llc = float(self.profile.device.get("last_level_cache_bytes") or (32 << 20))
        self.cache_, self.coefficients_, log_ratio = fit_cache(
            GROUPS, self._features, points, times, llc * CACHE_SHARES, (1.5, 3.0, 6.0), layers
        )
        return log_ratio

    def _stack_features(self, pass_: ForwardShape) -> Array:
        """Features [GROUPS] of one layer out of a cold stack: a pass without head, embedding and
        per-pass cost."""
        arch, part = asked_pass(pass_)
        one = np.array(self._group_seconds(arch.replace(num_hidden_layers=1), part)[1])
        ends = head_ops(arch, batch=part.batch, tokens=part.tokens)
        head = sum(self.ops.op_s(op, True)[0] for op in ends if isinstance(op, Elementwise))
        one[[GROUPS.index(name) for name in ("pass", "head", "scatter")]] = 0.0
        one[GROUPS.index("elementwise")] -= head
        return one

    def _device_s(self, arch: Architecture, part: Part, cold: bool) -> Estimate:
        mean, std = self._residual.predict(np.array([*self._inputs(arch), *place_of(part, cold)]))
        features = self._features(arch, part, cold, self.cache_)
        value = linear(self.coefficients_, features) * math.exp(mean)
        return Estimate(value, std * value, "modelled")

    def _grid_device_s(self, grid: ShapeGrid, passes: Sequence[Pass]) -> list[Numbers]:
        """`_device_s` of each pass of each shape of a grid, without std."""
        places = np.array([place_of(part, cold) for part, cold in passes])
        factors = np.exp(self._residual.means(self._inputs(grid), places))
        return [
            linear(self.coefficients_, self._features(grid, part, cold, self.cache_))
            * factors[..., i]
            for i, (part, cold) in enumerate(passes)
        ]

    def _fitted_ops_s(self, ops: PassOps, cold: bool) -> Estimate:
        """A pass of any network by the coefficients of whole models."""
        weights = max(1, ops.weight_elements()) * self.dtype_bytes
        share = 1.0 if cold else self.cache_.cold_share(weights)
        features = _between(self._groups(ops, False), self._groups(ops, True), share)
        value = linear(self.coefficients_, features)
        return Estimate(value, value * math.sqrt(float(np.mean(self.loo_**2))), "modelled")


def fit_cache(
    names: Sequence[str],
    features: Callable[..., list[float]],
    points: Sequence[tuple[object, ...]],
    times: Array,
    halves: Iterable[float],
    steepnesses: Iterable[float],
    more: Sequence[tuple[Array, float]] = (),
) -> tuple[CacheFit, dict[str, float], Array]:
    """The cache's half point and steepness (grid) with the coefficients (non-negative least
    squares), by `names`, that fit `times` best, and log(measured / base) [rows]. `features` of a
    point and a cache; `more`: features and seconds of rows that count for coefficients only."""
    best: tuple[float, CacheFit, Array, Array] | None = None
    for half, steepness in itertools.product(halves, steepnesses):
        cache = CacheFit(float(half), steepness)
        rows = np.array([features(*point, cache) for point in points])
        coefficients = nonnegative_fit(
            np.vstack([rows, *(row for row, _ in more)]), np.append(times, [s for _, s in more])
        )
        base = rows @ coefficients
        error = float(np.abs(np.log(np.maximum(base, 1e-9) / times)).sum())
        if best is None or error < best[0]:
            best = (error, cache, coefficients, base)
    assert best is not None
    _, cache, coefficients, base = best
    return cache, dict(zip(names, coefficients.tolist(), strict=True)), np.log(times / base)


def linear(coefficients: Mapping[str, float], features: Sequence[float]) -> float:
    """Seconds by the coefficients alone; features may be arrays that broadcast."""
    return sum(c * feature for c, feature in zip(coefficients.values(), features, strict=True))


def inputs_of(arch: Architecture) -> list[float]:
    """What of a pass is its layers', as a Gaussian process sees it."""
    sizes = (arch.hidden_size, arch.intermediate_size, arch.num_hidden_layers)
    return [*map(np.log, sizes), 0.5 * np.log(arch.q_size), 0.5 * np.log(arch.kv_size)]


def place_of(part: Part, cold: bool) -> tuple[float, float, float]:
    """What of a pass is not its shape's, as a Gaussian process sees it."""
    return 2.0 * math.log(part.batch * part.tokens), 0.5 * math.log(part.context + 64), float(cold)


def _between(warm: list[float], cold: list[float], share: float) -> list[float]:
    return [low + share * (high - low) for low, high in zip(warm, cold, strict=True)]


def _point(row: Measurement) -> tuple[Architecture, Part, bool]:
    return *asked_pass(ForwardShape.of(row)), row.cache == "cold"


def asked_pass(shape: ForwardShape) -> tuple[Architecture, Part]:
    """The pass that a row measured, with the logits of all its tokens."""
    return shape.architecture, Part(shape.batch, shape.tokens, shape.context)
