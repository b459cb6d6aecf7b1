"""Latency of a device that nobody profiled, from its datasheet: bytes over bandwidth, FLOPs over peak, a launch per kernel.

The same answers as `LatencyModel`, with source `roofline` and a wide band: measured tables put rooflines of this kind 14-21 % off
on large layers and 25-50 % on small ones. It is there so that a question is answered and marked, never to replace a profile.
"""

from __future__ import annotations

from typing import Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import AllReduce, Attention, Gemm, Op, forward_ops
from archsearch.estimate import Estimate
from archsearch.hardware.device import Device
from archsearch.workload import DTYPE_BYTES, Workload

BANDWIDTH_SHARE: Final = 0.8  # bytes / (0.8 bandwidth) + 3 us fits measured decode GEMMs of A100, H100, H200 and B200 to 14-21 %
PEAK_SHARE: Final = 0.7
KERNEL_S: Final = {"graph": 3e-6, "eager": 3e-6}
EAGER_LAUNCH_S: Final = 8e-6  # host time of one small kernel in an eager framework on a GPU
EAGER_KERNELS_PER_OP: Final = {"gemm": 1, "attention": 6, "elementwise": 3, "all_reduce": 2}
RELATIVE_STD: Final = {"graph": 0.30, "eager": 0.40}


class RooflineLatency:
    """`LatencyModel`'s answers from a datasheet. `engine` overheads are unknown and taken as 0."""

    engines: tuple[str, ...] = ()

    def __init__(self, device: Device, dtype: str, mode: str) -> None:
        self.device, self.dtype, self.mode = device, dtype, mode
        self.dtype_bytes = DTYPE_BYTES[dtype]
        self._bandwidth = BANDWIDTH_SHARE * device.bandwidth_bytes_per_s
        self._flops = PEAK_SHARE * device.peak_flops_per_s(dtype)
        self._passes: dict[tuple[object, ...], Estimate] = {}

    def op_s(self, op: Op) -> float:
        """Seconds of one op."""
        if isinstance(op, Gemm):
            elements, flops = op.weight_elements() + op.m * (op.n + op.k), op.flops()
        elif isinstance(op, Attention):
            elements, flops = op.kv_elements() + 2 * op.batch * op.tokens * op.q_heads * op.head_dim, op.flops()
        elif isinstance(op, AllReduce):
            link = self.device.link_bytes_per_s or 16e9  # no link known: PCIe 4 x8
            return 2 * (op.ranks - 1) / op.ranks * op.elements * self.dtype_bytes / link + 5e-6
        else:
            elements, flops = 3 * op.elements, 5 * op.elements
        kernel = max(elements * self.dtype_bytes / self._bandwidth, flops / self._flops) + KERNEL_S[self.mode]
        launch = EAGER_LAUNCH_S * EAGER_KERNELS_PER_OP[op.kind] if self.mode == "eager" and self.device.kind == "gpu" else 0.0
        return max(kernel, launch)

    def forward_s(
        self, arch: Architecture, *, batch: int = 1, tokens: int = 1, context: int = 256, ranks: int = 1, cold: bool = False
    ) -> Estimate:
        """Seconds of one forward pass; `cold` makes no difference to a roofline."""
        key = (arch, batch, tokens, context, ranks)
        if key not in self._passes:
            ops = forward_ops(arch, batch=batch, tokens=tokens, context=context, ranks=ranks, fused=self.mode == "graph")
            value = sum(count * self.op_s(op) for op, count in ops.items())
            self._passes[key] = Estimate(value, RELATIVE_STD[self.mode] * value, "roofline")
        return self._passes[key]

    def decode_s(self, target: Architecture, workload: Workload) -> Estimate:
        """One plain decode step of the target."""
        return self.verify_s(target, workload, 0)

    def verify_s(self, target: Architecture, workload: Workload, gamma: int) -> Estimate:
        """One target pass over gamma + 1 tokens per sequence."""
        return self.forward_s(
            target, batch=workload.batch_size, tokens=gamma + 1, context=workload.context_len, ranks=workload.tensor_parallel
        )

    def draft_s(self, draft: Architecture, workload: Workload, gamma: int) -> Estimate:
        """gamma draft steps; the draft runs on one device."""
        step = self.forward_s(draft, batch=workload.batch_size, context=workload.context_len)
        return Estimate(gamma * step.value, gamma * step.std, step.source)

    def overhead_s(self, target: Architecture, workload: Workload, gamma: int) -> Estimate:
        """Unknown, so 0: the band of a roofline is wider than any engine's overhead."""
        return Estimate(0.0, 0.0, "roofline")
