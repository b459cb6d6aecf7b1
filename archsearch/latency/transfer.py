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
from archsearch.latency.datasheet import datasheet_s, over_link
from archsearch.latency.ops import Answer, OpModel
from archsearch.workload import DTYPE_BYTES

# Compute capabilities for which libraries pick the same kernels (GA100; GA10x; AD10x; GH100; GB100
# and GB300; GB20x).
GENERATIONS: Final = (("8.0",), ("8.6",), ("8.9",), ("9.0",), ("10.0", "10.3"), ("12.0",))
# Relative std that carrying an op over adds. GEMM: the root mean square error over the rows of H100
# and H200, each from the other's (`benchmarks/transfer.py`); attention: what holds 96 to 98 % of
# theirs within two std. All-reduce: 4 % there, over one and the same link; wider for another. Of
# elementwise ops there are no rows: assumed.
TRANSFER_STD: Final = {"gemm": 0.09, "attention": 0.18, "elementwise": 0.10, "all_reduce": 0.10}
# Share of its datasheet's bandwidth that a GEMM reaches where memory is all it waits for: the best
# of four GPUs by a fit of start + bytes / bandwidth to the rows of up to 16 tokens (H100 85 %, H200
# 80, B200 75, A100 69; single rows reach 92).
REACHED: Final = 0.85
# By major compute capability: how far from one after the other to at once, where the device's
# memory is slower than its relative's. Ampere: steps of an A100 40 GB from the 80 GB card's kernels
# (which reach 69 % of its bandwidth) are 11 % too slow at 0, 0 to 5 % at 1/2 (six published steps).
# Hopper's kernels nearly fill their memory: none (0.2 would be best for H100 from H200, 0 for
# rounds on an H100 of 94 GB).
OVERLAPPED: Final = {"8": 0.5}
# Median errors of whole decode steps, the larger of the same two directions.
STEP_ERRORS: Final = {"a target's step": 0.04, "a small draft's": 0.09}
# Relative std of an all-reduce over PCIe: whether cards reach one another directly or through the
# host is not in a datasheet.
PCIE_STD: Final = 0.50


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
        """Price many ops at once."""
        self.measured.prepare(ops, cold)

    def op_s(self, op: Op, cold: bool) -> Answer:
        """Seconds and relative std of one op."""
        dtype = self.measured.dtype
        # another kind of link between GPUs: nothing of the relative carries over
        there = datasheet_s(self.device, op, dtype)
        if isinstance(op, AllReduce) and over_link(self.device, op.ranks) != over_link(
            self.relative, op.ranks
        ):
            return there, PCIE_STD
        seconds, std = self.measured.op_s(op, cold)
        return self._carried_s(op, seconds), math.hypot(std, TRANSFER_STD.get(op.kind, 0.25))

    def _carried_s(self, op: Op, seconds: float) -> float:
        """Seconds of `op` on the device where the relative takes `seconds`."""
        dtype = self.measured.dtype
        if isinstance(op, AllReduce):
            return (
                seconds
                * datasheet_s(self.device, op, dtype)
                / datasheet_s(self.relative, op, dtype)
            )
        peak, other = (device.peak_flops_per_s(dtype) for device in (self.device, self.relative))
        here, there = (_memory_s(device, op, dtype) for device in (self.device, self.relative))
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
    """Seconds that memory needs for an op at its best."""
    width = DTYPE_BYTES[dtype]
    if isinstance(op, Gemm) and op.format:
        width = max(width, 2)  # counted in numbers of 16 bits
    return OP_KINDS[op.kind].elements(op) * width / (REACHED * device.bandwidth_bytes_per_s)
