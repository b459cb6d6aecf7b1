"""Latency of a device that nobody profiled, from its datasheet: bytes over bandwidth, FLOPs over
peak, a constant per kernel.

In eager mode on a GPU the host launches the kernels: a pass takes the longer of device time and the
published host time that composed passes use too (`constants.yaml`).

The same answers as `LatencyModel`, with source `roofline` and a wide band: measured tables put
rooflines of this kind 14-21 % off on large layers and 25-50 % on small ones. It is there so that a
question is answered and marked, never to replace a profile.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import AllReduce, Op, PassOps, forward_ops
from archsearch.engine_facts import engine_facts
from archsearch.engine_rounds import EngineRounds, engine_rounds
from archsearch.estimate import Estimate
from archsearch.hardware.device import Device
from archsearch.latency.composed import all_reduce_wait, constants, sync_waits
from archsearch.latency.datasheet import datasheet_s
from archsearch.latency.rounds import PACE_CORRELATION, LatencyOfRounds, plain_step, verified_rows
from archsearch.workload import Workload

RELATIVE_STD: Final = {"graph": 0.30, "eager": 0.40}


class RooflineLatency(LatencyOfRounds):
    """`LatencyModel`'s answers from a datasheet, with what `rounds` says of the engine on a GPU
    (default: the newest known)."""

    engines: tuple[str, ...] = ()
    largest_batch: int | None = None
    target_correlation = PACE_CORRELATION

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
        self._known: dict[tuple[object, ...], Estimate]
        if device.kind == "gpu" and engine is not None:
            self.rounds = rounds or engine_rounds(engine)
        self._take_wait()

    def _take_wait(self) -> None:
        self.wait = all_reduce_wait(self.rounds, self.device.compute_capability)
        self._known = {}

    def op_s(self, op: Op) -> float:
        """Seconds of one op on the device."""
        return datasheet_s(self.device, op, self.dtype)

    def forward_s(
        self,
        arch: Architecture,
        *,
        batch: int = 1,
        tokens: int = 1,
        context: int = 256,
        ranks: int = 1,
        cold: bool = False,
    ) -> Estimate:
        """Seconds of one forward pass; `cold` makes no difference to a roofline."""
        key = (arch, batch, tokens, context, ranks)
        if key not in self._known:
            ops = forward_ops(
                arch,
                batch=batch,
                tokens=tokens,
                context=context,
                ranks=ranks,
                fused=self.mode == "graph",
            )
            self._known[key] = self._pass_s(ops, arch.num_hidden_layers, ranks)
        return self._known[key]

    def ops_s(self, ops: PassOps, cold: bool = True) -> Estimate:
        """Seconds of one pass given by its ops, of any network; `cold` makes no difference."""
        return self._pass_s(ops.in_layers + ops.outside, ops.layers, ops.ranks)

    def _pass_s(self, ops: Counter[Op], layers: int, ranks: int) -> Estimate:
        value = sum(count * self.op_s(op) for op, count in ops.items())
        reduces = sum(count for op, count in ops.items() if isinstance(op, AllReduce))
        if self.mode == "graph":
            value += self.wait.value * sync_waits(reduces, ranks)
        elif self.device.kind == "gpu":
            value = max(value, self._host_s(layers, reduces))
        return Estimate(value, RELATIVE_STD[self.mode] * value, "roofline")

    @staticmethod
    def _host_s(layers: Any, all_reduces: Any) -> Any:
        """Host time of an eager pass (published, see constants.yaml); of arrays of either
        (`latency.grid`) an array."""
        known = constants()["eager"]
        return known["pass_s"] + layers * known["layer_s"] + all_reduces * known["all_reduce_s"]

    def decode_s(self, target: Architecture, workload: Workload) -> Estimate:
        """One plain decode step of the target."""
        step = self.verify_s(target, workload, 0)
        return (
            step
            if self.rounds is None
            else plain_step(self.rounds, step, target.num_hidden_layers, workload.batch_size)
        )

    def verify_s(self, target: Architecture, workload: Workload, gamma: int) -> Estimate:
        """One target pass over gamma + 1 tokens per sequence."""
        batch, tokens = verified_rows(self.rounds, workload.batch_size, gamma)
        return self.forward_s(
            target,
            batch=batch,
            tokens=tokens,
            context=workload.context_len,
            ranks=workload.tensor_parallel,
        )

    def draft_s(self, draft: Architecture, workload: Workload, gamma: int) -> Estimate:
        """All draft passes of a round."""
        first, later = self.draft_passes(draft, workload, gamma)
        more = self.facts.draft_passes(gamma) - 1
        return Estimate(
            first.value + more * later.value, first.std + more * later.std, first.source
        )

    def draft_passes(
        self, draft: Architecture, workload: Workload, gamma: int
    ) -> tuple[Estimate, Estimate]:
        """See `LatencyModel.draft_passes`; a roofline knows no warm weights."""
        ranks, served = self.facts.ranks_of_draft(workload), self.facts.served_draft(draft)
        tokens = self.first_tokens(gamma)
        batch, context = workload.batch_size, workload.context_len
        first = self.forward_s(served, batch=batch, tokens=tokens, context=context, ranks=ranks)
        return first, self.forward_s(served, batch=batch, context=context, ranks=ranks)

    def idle_draft_s(self, draft: Architecture, workload: Workload) -> Estimate:
        """What a draft costs in a round that drafts nothing (see `LatencyModel.idle_draft_s`)."""
        if not self.facts.idle_pass:
            return Estimate(0.0, 0.0, "roofline")
        return self.forward_s(
            draft.replace(draft_vocab_size=1),
            batch=workload.batch_size,
            tokens=2,
            context=workload.context_len,
            ranks=self.facts.ranks_of_draft(workload),
        )
