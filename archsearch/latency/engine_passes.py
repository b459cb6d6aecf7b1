"""Passes as one engine runs them, learnt from steps that the engine itself timed: its kernels need
not be those of the profile.

A pass costs the engine

    seconds = c . FEATURES   c >= 0, least squares of the relative errors

times a Gaussian process over the shape for what that misses. Kernels are chosen by the number of
tokens, so times jump (OpenVINO's pass of 2 tokens takes longer than its pass of 4): a pass that was
itself measured, as every target's are, is answered by the mean of its rows over contexts for as
much as they are surer than the smooth model. What a step takes beside its passes (sampling,
scheduling, hand-over) is `AddedFit`.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import (
    body_parameters,
    kv_cache_bytes,
    mlp_params,
    pass_parameters,
)
from archsearch.architecture.grid import Pass, ShapeGrid
from archsearch.architecture.ops import Attention, Gemm, Part, PassOps
from archsearch.drafters.drafter import RoundPlan
from archsearch.engine_facts import engine_facts
from archsearch.estimate import Array, Estimate, Numbers
from archsearch.latency.added import AddedFit, DraftedFit
from archsearch.latency.constants import constants
from archsearch.latency.fitted_passes import CacheFit, fit_cache, inputs_of, linear, place_of
from archsearch.latency.regression import Residual
from archsearch.profiles import Measurement, PassShape, Profile, RestShape
from archsearch.workload import DTYPE_BYTES

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
_KNOWN: Final = constants()["engine_passes"]
START_STD: Final[float] = _KNOWN["start_relative_std"]
SEVERAL_TOKENS: Final = Estimate(_KNOWN["several_tokens"], _KNOWN["several_std"], "prior")


_Key = tuple[Architecture, int, int, bool, bool]  # shape, batch, tokens, cold, of the target


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

    `coefficients_` by FEATURES, `loo_` (relative errors of passes left out one at a time, the
    coefficients kept) and `rest_` hold what was learnt.
    """

    def __init__(self, profile: Profile, dtype: str, mode: str, engine: str) -> None:
        self.engine, self.facts = engine, engine_facts(engine)
        self.dtype_bytes = DTYPE_BYTES[dtype]
        self.cache_bytes = float(profile.device.get("last_level_cache_bytes") or (32 << 20))

        def measured(kind: str) -> list[Measurement]:
            rows = profile.select(kind, dtype, mode)
            return [row for row in rows if row.sizes()["engine"] == engine]

        self.rows, rests = measured("pass"), measured("rest")
        self.largest_batch = max((PassShape.of(row).batch for row in self.rows), default=1)
        self._fit_passes(self.rows)
        self.rest_ = AddedFit.fit(rests)
        self.drafted_ = DraftedFit.fit(measured("drafted"), self.facts.scattered_head, self.plan_s)
        self.first_pass = FirstPass.fit(rests)

    # --- fitting

    def _fit_passes(self, rows: list[Measurement]) -> None:
        asked = [_asked(row) for row in rows]
        halves = self.cache_bytes * np.array([0.4, 0.7, 1.0, 1.5, 2.2])
        times = np.array([row.median_s for row in rows])
        self.cache_, self.coefficients_, log_ratio = fit_cache(
            FEATURES, self._features, asked, times, halves, (1.5, 3.0)
        )
        inputs = [[*_inputs(a), *_place(part, cold, of)] for a, part, cold, of in asked]
        self._residual = Residual.fit(
            np.array(inputs), log_ratio, min_noise=0.01, bounds=(0.7, 30.0)
        )
        self.loo_ = np.expm1(self._residual.leave_one_out())
        seen: dict[_Key, list[tuple[float, float]]] = {}  # (log(measured / base), 1 / error^2)
        for row, (arch, part, cold, is_target), ratio in zip(rows, asked, log_ratio, strict=True):
            weight = 1.0 / (row.relative_std**2 + START_STD**2)
            key = (arch, part.batch, part.tokens, cold, is_target)
            seen.setdefault(key, []).append((float(ratio), weight))
        # one log ratio of each pass and its error: kernels jump with tokens, not with context
        self._own: dict[_Key, tuple[float, float]] = {}
        for key, found in seen.items():
            ratios, weights = zip(*found, strict=True)
            mean = float(np.average(ratios, weights=weights))
            self._own[key] = mean, math.fsum(weights) ** -0.5

    # --- what a pass is made of

    def _vector(
        self,
        layers: float,
        bytes_: tuple[float, float],
        flops: tuple[float, float],
        kv_bytes: float,
        rows: float,
        share: float,
    ) -> list[float]:
        """FEATURES; `bytes_` and `flops` of body and head. In a loop, the `share` of the weights
        that the cache cannot keep comes from memory again."""
        body, head = bytes_
        parts = (1.0, layers, share * body, (1.0 - share) * body, head)
        return [*parts, *flops, kv_bytes, rows, rows * layers]

    def _features(
        self, arch: Architecture, part: Part, cold: bool, is_target: bool, cache: CacheFit
    ) -> list[float]:
        body, head = body_parameters(arch), arch.head_rows * arch.hidden_size
        width, rows = self.dtype_bytes, float(part.batch * part.tokens)
        heads = rows if is_target else part.batch  # a draft needs each sequence's last token's only
        # llama.cpp goes on with those alone behind its last attention (`inp_out_ids` in its source)
        late = mlp_params(arch) if self.facts.gguf else 0
        # and reads the cache for every token and query head (`ggml_flash_attn_ext` on a CPU)
        times = part.tokens * arch.q_size / arch.kv_size if self.facts.gguf else 1.0
        bytes_ = (body * width, head * width)
        flops = (2.0 * (body * rows - late * (rows - heads)), 2.0 * head * heads)
        cached = times * kv_cache_bytes(arch, part.context + part.tokens, width, part.batch)
        share = 1.0 if cold else cache.cold_share((body + head) * width)
        return self._vector(arch.num_hidden_layers, bytes_, flops, cached, rows, share)

    # --- answers

    def forward_s(
        self, arch: Architecture, part: Part, *, cold: bool = False, is_target: bool = False
    ) -> Estimate:
        """Seconds of one pass with its head; `cold`: its weights come from memory (a target, or a
        draft's first pass)."""
        inputs = [*_inputs(arch), *_place(part, cold, is_target)]
        mean, std = self._residual.predict(np.array(inputs))
        own = self._own.get((arch, part.batch, part.tokens, cold, is_target))
        if own:
            ratio, error = own
            share = self._share(error)
            mean += share * (ratio - mean)
            std = math.hypot((1.0 - share) * std, share * error)
        features = self._features(arch, part, cold, is_target, self.cache_)
        value = linear(self.coefficients_, features) * math.exp(mean)
        return Estimate(value, std * value, "modelled")

    def _share(self, error: float) -> float:
        """How much rows with that error count beside the smooth model."""
        # what the smooth part leaves over: jumps of kernels, where a row is steady
        structure = self._residual.noise
        return float(structure / (structure + error**2))

    def grid_s(self, grid: ShapeGrid, passes: Sequence[Pass]) -> list[Numbers]:
        """Seconds of each pass of each draft of a grid, as `forward_s`, without std."""
        places = np.array([_place(part, cold, False) for part, cold in passes])
        means = self._residual.means(_inputs(grid), places)
        found: list[Numbers] = []
        for number, (part, cold) in enumerate(passes):
            mean = np.broadcast_to(means[..., number], grid.shape).copy()
            for key, own in self._own.items():
                if key[1:] == (part.batch, part.tokens, cold, False):
                    ratio, error = own
                    for place in grid.places_of(key[0]):
                        mean[place] += self._share(error) * (ratio - mean[place])
            features = self._features(grid, part, cold, False, self.cache_)
            found.append(linear(self.coefficients_, features) * np.exp(mean))
        return found

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
        attention = [(op, n) for op, n in ops.in_layers.items() if isinstance(op, Attention)]
        cached = sum(
            n * (op.flops() / 2 if self.facts.gguf else op.kv_elements()) for op, n in attention
        )
        share = 1.0 if cold else self.cache_.cold_share(max(sum(bytes_), 1))
        features = self._vector(
            ops.layers, bytes_, flops, self.dtype_bytes * cached, float(rows), share
        )
        value = float(linear(self.coefficients_, features))
        return Estimate(value, value * math.sqrt(float(np.mean(self.loo_**2))), "modelled")

    def plan_s(self, plan: RoundPlan) -> float:
        """Seconds of all passes of a drafter's plan, or of the host's part of it."""
        first = self.ops_s(plan.first).value if plan.first is not None else plan.host_s
        later = 0.0 if plan.step is None else self.ops_s(plan.step, cold=False).value
        return first + plan.steps * later

    @cached_property
    def left_out_(self) -> Array:
        """|relative error| of each pass by all that is learnt from the others; seconds of work."""
        errors = []
        for number, row in enumerate(self.rows):
            others = copy.copy(self)
            others._fit_passes(self.rows[:number] + self.rows[number + 1 :])
            arch, part, cold, is_target = _asked(row)
            found = others.forward_s(arch, part, cold=cold, is_target=is_target)
            errors.append(abs(found.value / row.median_s - 1.0))
        return np.array(errors)

    def to_dict(self) -> dict[str, object]:
        """What was learnt, for reports."""
        errors = self.left_out_
        return {
            "engine": self.engine,
            "rows": len(self.rows),
            "coefficients": self.coefficients_,
            "leave_one_out_median": float(np.median(errors)),
            "leave_one_out_within_10_percent": float(np.mean(errors <= 0.10)),
            "rest": self.rest_.to_dict(),
            "drafted": self.drafted_.to_dict(),
            "first_pass": {"constant": self.first_pass.constant, "slope": self.first_pass.slope},
        }


def several_tokens(arch: Architecture | ShapeGrid, part: Part) -> tuple[float, float]:
    """A pass over several tokens in passes over one, and its std, by SEVERAL_TOKENS; the head only
    computes the rows whose logits are wanted."""
    body, head = body_parameters(arch), arch.head_rows * arch.hidden_size
    factor, std = 0.0, 0.0
    for weights, rows in ((body, part.tokens), (head, part.logits or part.tokens)):
        times = weights / (body + head) * rows**SEVERAL_TOKENS.value
        factor, std = factor + times, std + times * math.log(rows) * SEVERAL_TOKENS.std
    return factor, std


def _inputs(arch: Architecture) -> list[float]:
    return [*inputs_of(arch), np.log(pass_parameters(arch))]


def _place(part: Part, cold: bool, is_target: bool) -> tuple[float, ...]:
    return *place_of(part, cold), 2.0 * is_target


def known_engines(profile: Profile, dtype: str, mode: str) -> tuple[str, ...]:
    """Engines with enough rows of their own passes."""
    counts = Counter(PassShape.of(row).engine for row in profile.select("pass", dtype, mode))
    return tuple(name for name, count in counts.items() if count >= MIN_PASS_ROWS)


def _asked(row: Measurement) -> tuple[Architecture, Part, bool, bool]:
    """What a row of kind `pass` is about: a pass, whether it is cold, and of the target."""
    shape = PassShape.of(row)
    part = Part(shape.batch, shape.tokens, shape.context)
    return shape.architecture, part, row.cache == "cold", shape.role == "target"
