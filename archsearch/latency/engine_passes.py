"""Passes as one engine runs them, learnt from steps that the engine itself timed: its kernels need
not be those of the profile.

A pass costs the engine

    seconds = c . [1, layers, weight bytes from memory, weight bytes from the cache, head bytes,
    GEMM FLOPs, head FLOPs,
                   KV bytes, tokens, layers x tokens]   c >= 0, least squares of the relative errors

times a Gaussian process over the shape for what that misses. Kernels are chosen by the number of
tokens, so times jump (OpenVINO's pass of 2 tokens takes longer than its pass of 4): a pass that was
itself measured, as every target's are, is answered by its row for as much as the row is surer than
the smooth model. What a step takes beside its passes (sampling, scheduling, hand-over) is
`AddedFit`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import body_parameters, kv_cache_bytes
from archsearch.architecture.ops import Attention, Gemm, PassOps
from archsearch.drafters.drafter import RoundPlan
from archsearch.engine_facts import engine_facts
from archsearch.estimate import Estimate
from archsearch.latency.added import AddedFit, DraftedFit
from archsearch.latency.regression import Residual, nonnegative_fit
from archsearch.profiles import Measurement, PassShape, Profile, RestShape
from archsearch.workload import DTYPE_BYTES

Array = NDArray[np.float64]
FEATURES: Final = (
    "pass",
    "layers",
    "memory bytes",
    "cache bytes",
    "head bytes",
    "gemm flops",
    "head flops",
    "kv bytes",
    "tokens",
    "layer tokens",
)
MIN_PASS_ROWS: Final = 12
START_STD: Final = 0.03
"""Relative std of the same pass from one start of an engine to the next: four starts of vLLM
decoded in 29.7 to 31.9 ms."""


@dataclass(frozen=True)
class FirstPass:
    """Tokens per sequence in the first pass of a draft in a round: `constant + slope * gamma`.

    vLLM hands the draft the whole verified block, padded; other engines only what is new to it.
    """

    constant: float = 1.0
    slope: float = 0.0

    @classmethod
    def fit(cls, rests: Sequence[Measurement]) -> FirstPass:
        """A line through what the rounds of `rests` were seen to read; one token where they do not
        say."""
        shapes = [RestShape.of(row) for row in rests]
        seen = {
            (shape.gamma, shape.first_tokens)
            for shape in shapes
            if shape.gamma and shape.first_tokens is not None
        }
        if not seen:
            return cls()
        gammas, tokens = (
            np.array(column, dtype=float) for column in zip(*sorted(seen), strict=True)
        )
        if len(set(gammas.tolist())) == 1:
            return cls(float(tokens.mean()), 0.0)
        slope, constant = np.polyfit(gammas, tokens, 1)
        return cls(float(constant), float(slope))

    def tokens(self, gamma: int) -> int:
        return max(1, round(self.constant + self.slope * gamma))


class EnginePasses:
    """The passes of `engine` at `dtype` and `mode`, from the rows of kind `pass` and `rest` of a
    profile.

    `coefficients_` by FEATURES, `loo_` (leave-one-out relative errors of passes) and `rest_` hold
    what was learnt.
    """

    def __init__(self, profile: Profile, dtype: str, mode: str, engine: str) -> None:
        self.engine, self.dtype, self.mode = engine, dtype, mode
        self.dtype_bytes = DTYPE_BYTES[dtype]
        self.cache_bytes = float(profile.device.get("last_level_cache_bytes") or (32 << 20))

        def measured(kind: str) -> list[Measurement]:
            rows = profile.select(kind, dtype, mode)
            return [row for row in rows if row.sizes()["engine"] == engine]

        rows, rests = measured("pass"), measured("rest")
        self.rows = len(rows)
        self.largest_batch = max((PassShape.of(row).batch for row in rows), default=1)
        self._own: dict[
            tuple[Architecture, int, int, bool, bool], list[tuple[int, float, float]]
        ] = {}
        self._fit_passes(rows)
        self.rest_ = AddedFit.fit(rests)
        scattered = engine_facts(engine).scattered_head
        self.drafted_ = DraftedFit.fit(measured("drafted"), scattered, self.plan_s)
        self.first_pass = FirstPass.fit(rests)

    # -- fitting
    # ----------------------------------------------------------------------------------------------

    def _fit_passes(self, rows: list[Measurement]) -> None:
        points = [pass_of(row) for row in rows]
        times = np.array([row.median_s for row in rows])
        found = []
        for half in self.cache_bytes * np.array([0.4, 0.7, 1.0, 1.5, 2.2]):
            for steepness in (1.5, 3.0):
                self._half, self._steepness = float(half), steepness
                features = np.array([self._features(*point) for point in points])
                coefficients = nonnegative_fit(features, times)
                misfit = np.abs(np.log(np.maximum(features @ coefficients, 1e-9) / times)).sum()
                found.append((float(misfit), self._half, self._steepness, coefficients))
        best = min(found, key=lambda fit: fit[0])
        _, self._half, self._steepness, self._coefficients = best
        self.coefficients_ = dict(zip(FEATURES, self._coefficients.tolist(), strict=True))
        base = np.array([self._features(*point) for point in points]) @ self._coefficients
        log_ratio = np.log(times / base)
        inputs = np.array([self._inputs(*point) for point in points])
        self._residual = Residual.fit(inputs, log_ratio, min_noise=0.01, bounds=(0.7, 30.0))
        self.loo_ = np.expm1(self._residual.leave_one_out(log_ratio))
        for row, (arch, batch, tokens, context, cold, is_target), ratio in zip(
            rows, points, log_ratio, strict=True
        ):
            error = math.hypot(row.relative_std, START_STD)
            self._own.setdefault((arch, batch, tokens, cold, is_target), []).append(
                (context, float(ratio), error)
            )

    # -- what a pass is made of
    # ----------------------------------------------------------------------------------------------

    def _vector(
        self,
        layers: float,
        bytes_: tuple[float, float],
        flops: tuple[float, float],
        kv_bytes: float,
        rows: float,
        cold: bool,
    ) -> Array:
        """FEATURES; `bytes_` and `flops` of body and head. In a loop, the share of the weights that
        the cache cannot keep comes from memory again."""
        body, head = bytes_
        kept = 0.0 if cold else (self._half / max(body + head, 1)) ** self._steepness
        share = 1.0 / (1.0 + kept)
        parts = (1.0, layers, share * body, (1.0 - share) * body, head)
        return np.array([*parts, *flops, kv_bytes, rows, rows * layers], dtype=float)

    def _features(
        self, arch: Architecture, batch: int, tokens: int, context: int, cold: bool, is_target: bool
    ) -> Array:
        body, head = body_parameters(arch), arch.head_rows * arch.hidden_size
        rows = batch * tokens
        heads = rows if is_target else batch  # a draft needs each sequence's last token's only
        return self._vector(
            arch.num_hidden_layers,
            (body * self.dtype_bytes, head * self.dtype_bytes),
            (2.0 * body * rows, 2.0 * head * heads),
            kv_cache_bytes(arch, context + tokens, self.dtype_bytes, batch),
            rows,
            cold,
        )

    def _inputs(
        self, arch: Architecture, batch: int, tokens: int, context: int, cold: bool, is_target: bool
    ) -> Array:
        return np.array(
            [
                math.log(arch.hidden_size),
                math.log(arch.intermediate_size),
                math.log(arch.num_hidden_layers),
                0.5 * math.log(arch.q_size),
                0.5 * math.log(arch.kv_size),
                math.log(body_parameters(arch) + arch.head_rows * arch.hidden_size),
                2.0 * math.log(batch * tokens),
                0.5 * math.log(context + 64),
                1.0 if cold else 0.0,
                2.0 if is_target else 0.0,
            ]
        )

    # -- answers
    # ----------------------------------------------------------------------------------------------

    def forward_s(
        self,
        arch: Architecture,
        *,
        batch: int = 1,
        tokens: int = 1,
        context: int = 256,
        cold: bool = False,
        is_target: bool = False,
    ) -> Estimate:
        """Seconds of one pass with its head; `cold`: its weights come from memory (a target, or a
        draft's first pass)."""
        point = (arch, batch, tokens, context, cold, is_target)
        base = float(self._features(*point) @ self._coefficients)
        mean, std = self._residual.predict(self._inputs(*point))
        own = self._own.get((arch, batch, tokens, cold, is_target))
        if own:
            _, ratio, error = min(own, key=lambda row: abs(row[0] - context))
            structure = (
                self._residual.noise
            )  # what the smooth part leaves over: jumps of kernels, where a row is steady
            share = structure / (structure + error**2)
            mean, std = (
                mean + share * (ratio - mean),
                math.hypot((1.0 - share) * std, share * error),
            )
        value = base * math.exp(mean)
        return Estimate(value, std * value, "modelled")

    def ops_s(self, ops: PassOps, cold: bool = True) -> Estimate:
        """Seconds of a pass given by its ops, by the coefficients alone: what is left over is
        learnt from whole models only.

        GEMMs outside the layers count as head.
        """
        body, head = (
            [(op, n) for op, n in counts.items() if isinstance(op, Gemm)]
            for counts in (ops.in_layers, ops.outside)
        )
        weights = [sum(n * op.weight_elements() for op, n in part) for part in (body, head)]
        bytes_ = (self.dtype_bytes * weights[0], self.dtype_bytes * weights[1])
        flops = sum(n * op.flops() for op, n in body), sum(n * op.flops() for op, n in head)
        rows = max((op.m for op, _ in body or head), default=0)
        cached = sum(
            n * op.kv_elements() for op, n in ops.in_layers.items() if isinstance(op, Attention)
        )
        features = self._vector(
            ops.layers, bytes_, flops, self.dtype_bytes * cached, float(rows), cold
        )
        value = float(features @ self._coefficients)
        return Estimate(value, value * math.sqrt(float(np.mean(self.loo_**2))), "modelled")

    def plan_s(self, plan: RoundPlan) -> float:
        """Seconds of all passes of a drafter's plan, or of the host's part of it."""
        first = self.ops_s(plan.first).value if plan.first is not None else plan.host_s
        return first + (
            plan.steps * self.ops_s(plan.step, cold=False).value if plan.step is not None else 0.0
        )

    def summary(self) -> dict[str, Any]:
        """What was learnt, for reports."""
        errors = np.abs(self.loo_)
        return {
            "rows": self.rows,
            "coefficients": self.coefficients_,
            "leave_one_out_median": float(np.median(errors)),
            "leave_one_out_within_10_percent": float(np.mean(errors <= 0.10)),
            "rest": self.rest_.to_dict(),
            "drafted": self.drafted_.to_dict(),
            "first_pass": {"constant": self.first_pass.constant, "slope": self.first_pass.slope},
        }


def known_engines(profile: Profile, dtype: str, mode: str) -> tuple[str, ...]:
    """Engines with enough rows of their own passes."""
    counts = Counter(PassShape.of(row).engine for row in profile.select("pass", dtype, mode))
    return tuple(name for name, count in counts.items() if count >= MIN_PASS_ROWS)


def pass_of(row: Measurement) -> tuple[Architecture, int, int, int, bool, bool]:
    """architecture, batch, tokens per sequence, context, cold, of the target: what a row of kind
    `pass` is about."""
    shape = PassShape.of(row)
    return (
        shape.architecture,
        shape.batch,
        shape.tokens,
        shape.context,
        row.cache == "cold",
        shape.role == "target",
    )
