"""Latency of a device that nobody profiled, from its datasheet: bytes over bandwidth, FLOPs over
peak, a constant per kernel.

In eager mode on a GPU the host launches the kernels: a pass takes the longer of device time and the
published host time that composed passes use too (`constants.yaml`).

The same answers as `LatencyModel`, with source `roofline` and a wide band: measured tables put
rooflines of this kind 14-21 % off on large layers and 25-50 % on small ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import Pass, ShapeGrid, priced
from archsearch.architecture.ops import Attention, Op, Part, PassOps, model_pass
from archsearch.engine_facts import engine_facts
from archsearch.engine_rounds import EngineRounds, engine_rounds
from archsearch.estimate import Estimate, Numbers
from archsearch.hardware.device import Device
from archsearch.latency.attention import unpacked, unpacked_s, unpacks
from archsearch.latency.composed import all_reduce_wait, sync_waits
from archsearch.latency.constants import constants
from archsearch.latency.datasheet import datasheet_s
from archsearch.latency.draft_passes import DraftPasses
from archsearch.latency.ops import VERIFY_STD
from archsearch.latency.rounds import PACE_CORRELATION

RELATIVE_STD: Final = {"graph": 0.30, "eager": 0.40}


class RooflineLatency(DraftPasses):
    """`LatencyModel`'s answers from a datasheet, with what `rounds` says of the engine on a GPU
    (default: the newest known)."""

    target_correlation = PACE_CORRELATION
    prices_ops = True

    def __init__(
        self,
        device: Device,
        dtype: str,
        mode: str,
        engine: str | None = None,
        rounds: EngineRounds | None = None,
    ) -> None:
        self.device, self.dtype, self.mode, self.engine = device, dtype, mode, engine
        self.facts = engine_facts(engine)
        device.peak_flops_per_s(dtype)  # refuses a dtype that the device lacks
        self._known: dict[tuple[Architecture, Part, int], Estimate]
        if not device.is_cpu and engine is not None:
            self.rounds = rounds or engine_rounds(engine)
        self._take_wait()

    def _take_wait(self) -> None:
        self.wait = all_reduce_wait(self.rounds, self.device.compute_capability)
        self.cache = self.rounds.cache_dtype(self.dtype) if self.rounds else self.dtype
        self._unpacks = unpacks(self.device.compute_capability, self.engine, self.cache)
        self._known = {}

    def _in(self, dtype: str) -> RooflineLatency:
        return RooflineLatency(self.device, dtype, self.mode, self.engine, self.rounds)

    def op_s(self, op: Op) -> float:
        """Seconds of one op on the device."""
        if isinstance(op, Attention) and self._unpacks and unpacked(op):
            return unpacked_s(self.device, op, self.cache)
        cached = isinstance(op, Attention)
        return datasheet_s(self.device, op, self.cache if cached else self.dtype)

    def pass_s(self, arch: Architecture, asked: Pass, ranks: int) -> Estimate:
        """`cold` and `logits` make no difference to a roofline."""
        key = (arch, replace(asked[0], logits=None), ranks)
        if key not in self._known:
            self._known[key] = self.ops_s(self._ops(*key))
        return self._known[key]

    def _ops(self, arch: Architecture, part: Part, ranks: int) -> PassOps:
        fused = self.mode == "graph"
        return model_pass(arch, [part], ranks=ranks, fused=fused, choose=False)

    def ops_s(self, ops: PassOps, cold: bool = True) -> Estimate:
        """See `LatencyModel.ops_s`; `cold` makes no difference."""
        value = float(self._seconds(ops))
        counts = ops.in_layers.items() if self._unpacks else ()
        # carried over from other cards, and not in a plain step
        carried = sum(count * self.op_s(op) for op, count in counts if unpacked(op))
        std = math.hypot(RELATIVE_STD[self.mode] * value, VERIFY_STD * carried)
        return Estimate(value, std, "roofline")

    def grid_s(self, grid: ShapeGrid, passes: Sequence[Pass], ranks: int) -> list[Numbers]:
        """See `LatencyModel.grid_s`."""
        return [self._seconds(self._ops(grid, part, ranks)) for part, _ in passes]

    def _seconds(self, ops: PassOps) -> float:
        def price(each: Sequence[Op]) -> list[float]:
            return [self.op_s(op) for op in each]

        counts = (*ops.in_layers.items(), *ops.outside.items())
        value = sum(count * priced(op, price) for op, count in counts)
        if self.mode == "graph":
            return value + self.wait.value * sync_waits(ops.all_reduces(), ops.ranks)
        if self.device.is_cpu:
            return value
        known = constants()["eager"]  # the host launches (published, see constants.yaml)
        host = known["pass_s"] + ops.layers * known["layer_s"]
        return np.maximum(value, host + ops.all_reduces() * known["all_reduce_s"])
