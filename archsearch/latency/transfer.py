"""Kernels of a GPU that was measured, carried over to a relative of the same generation that was
not.

    seconds(device) = seconds(relative, measured) peak(relative) / peak(device) bound by arithmetic
    seconds(device) = least(device) + rest                                           bound by memory
                      (of Ampere less half of what overlaps, where its memory is the slower)

`least` is what memory needs at its best: bytes / (REACHED bandwidth); `rest` what the kernel takes
beyond that, in its launch and in filling and draining the multiprocessors. Neither slower memory
nor fewer multiprocessors slow it down: an H20, with a seventh of an H100's peak, runs steps of
Qwen3-1.7B to 32B 6 to 14 % slower than this says; a rest that grew with the ratio of peaks was 17
to 61 % too slow. Libraries run the same kernels on both, but not between generations
(`benchmarks/transfer.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from archsearch.architecture.op_kinds import OP_KINDS
from archsearch.architecture.ops import AllReduce, Gemm, Op
from archsearch.hardware.device import Device
from archsearch.latency.constants import constants
from archsearch.latency.datasheet import datasheet_s, over_link
from archsearch.latency.ops import Answer, OpModel
from archsearch.workload import DTYPE_BYTES

# Compute capabilities for which libraries pick the same kernels (GA100; GA10x; AD10x; GH100; GB100
# and GB300; GB20x).
GENERATIONS: Final = (("8.0",), ("8.6",), ("8.9",), ("9.0",), ("10.0", "10.3"), ("12.0",))
_KNOWN: Final = constants()["transfer"]
TRANSFER_STD: Final[dict[str, float]] = _KNOWN["relative_std"]
REACHED: Final[float] = _KNOWN["reached"]
OVERLAPPED: Final[dict[str, float]] = _KNOWN["overlapped"]
STEP_ERRORS: Final[dict[str, float]] = _KNOWN["step_errors"]
PCIE_STD: Final[float] = _KNOWN["pcie_relative_std"]


def same_generation(first: Device, second: Device) -> bool:
    """Whether libraries run the same kernels on both GPUs."""
    both = {first.compute_capability, second.compute_capability}
    return first.kind == second.kind == "gpu" and any(both <= set(group) for group in GENERATIONS)


def distance(first: Device, second: Device, dtype: str) -> float:
    """How far apart two datasheets are: log ratios of bandwidth and of peak."""
    bandwidth = math.log(first.bandwidth_bytes_per_s / second.bandwidth_bytes_per_s)
    return abs(bandwidth) + abs(
        math.log(first.peak_flops_per_s(dtype) / second.peak_flops_per_s(dtype))
    )


class CarriedOps:
    """`OpModel`'s answers for `device`, from the measured ops of a relative."""

    def __init__(self, measured: OpModel, device: Device) -> None:
        self.measured, self.device = measured, device
        self.relative = Device.from_dict(measured.profile.device)

    def prepare(self, ops: Iterable[Op], cold: bool) -> None:
        self.measured.prepare(ops, cold)

    def op_s(self, op: Op, cold: bool) -> Answer:
        """Seconds and relative std of one op."""
        both, dtype = (self.device, self.relative), self.measured.dtype
        if not isinstance(op, AllReduce):
            seconds, std = self.measured.op_s(op, cold)
            return self._carried_s(op, seconds), math.hypot(std, TRANSFER_STD.get(op.kind, 0.25))
        here, there = (datasheet_s(device, op, dtype) for device in both)
        # another kind of link between GPUs: nothing of the relative carries over
        if len({over_link(device, op.ranks) for device in both}) > 1:
            return here, PCIE_STD
        seconds, std = self.measured.op_s(op, cold)
        return seconds * here / there, math.hypot(std, TRANSFER_STD.get(op.kind, 0.25))

    def _carried_s(self, op: Op, seconds: float) -> float:
        both, dtype = (self.device, self.relative), self.measured.dtype
        peak, other = (device.peak_flops_per_s(dtype) for device in both)
        here, there = (_memory_s(device, op, dtype) for device in both)
        if OP_KINDS[op.kind].flops(op) / other > there:
            return seconds * other / peak
        known = min(1.0, seconds / there)  # weights in the cache take less than memory's least
        one_by_one = seconds + known * (here - there)
        share = OVERLAPPED.get((self.device.compute_capability or "").split(".")[0], 0.0)
        if here <= there or not share:
            return one_by_one
        # slower memory: part of its time passes while the multiprocessors fill and drain anyway
        return one_by_one - share * (one_by_one - max(seconds, here))


def _memory_s(device: Device, op: Op, dtype: str) -> float:
    width = DTYPE_BYTES[dtype]
    if isinstance(op, Gemm) and op.format:
        width = max(width, 2)  # counted in numbers of 16 bits
    return OP_KINDS[op.kind].elements(op) * width / (REACHED * device.bandwidth_bytes_per_s)
