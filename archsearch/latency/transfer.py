"""Kernels of a GPU that was measured, carried over to a relative of the same generation that was not.

    seconds(device) = seconds(relative, measured) x datasheet(op, device) / datasheet(op, relative)

The datasheet's time is max(bytes / bandwidth, flops / peak) and a constant per kernel that is the same on both, so small kernels
stay as they are. Libraries run the same kernels on both, so how well they use the hardware carries over too; between generations
it does not (`benchmarks/transfer.py`: there this is no better than the datasheet alone).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from archsearch.architecture.op_kinds import OP_KINDS
from archsearch.architecture.ops import AllReduce, Op
from archsearch.hardware.device import Device
from archsearch.latency.datasheet import datasheet_s, over_link
from archsearch.latency.ops import Answer, OpModel
from archsearch.profiles import Profile

GENERATIONS: Final = (("8.0",), ("8.6",), ("8.9",), ("9.0",), ("10.0", "10.3"), ("12.0",))
"""Compute capabilities for which libraries pick the same kernels (GA100; GA10x; AD10x; GH100; GB100 and GB300; GB20x)."""
TRANSFER_STD: Final = {"gemm": 0.09, "attention": 0.18, "elementwise": 0.10, "all_reduce": 0.10}
"""Relative std that carrying an op over adds. GEMM: the root mean square error over the rows of H100 and H200, each from the
other's (`benchmarks/transfer.py`); attention: what holds 96 to 98 % of theirs within two std. All-reduce: 4 % there, over one and
the same link; wider for another. Of elementwise ops there are no rows: assumed."""
STEP_ERRORS: Final = {"a target's step": 0.04, "a small draft's": 0.09}
"""Median errors of whole decode steps, the larger of the same two directions."""
PCIE_STD: Final = 0.50
"""Relative std of an all-reduce over PCIe: whether cards reach one another directly or through the host is not in a datasheet."""


def same_generation(first: Device, second: Device) -> bool:
    """Whether libraries run the same kernels on both GPUs."""
    both = {first.compute_capability, second.compute_capability}
    return first.kind == second.kind == "gpu" and any(both <= set(group) for group in GENERATIONS)


def distance(first: Device, second: Device, dtype: str) -> float:
    """How far apart two datasheets are: log ratios of bandwidth and of peak."""
    bandwidth = math.log(first.bandwidth_bytes_per_s / second.bandwidth_bytes_per_s)
    return abs(bandwidth) + abs(math.log(first.peak_flops_per_s(dtype) / second.peak_flops_per_s(dtype)))


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
        there = datasheet_s(self.device, op, dtype)
        if isinstance(op, AllReduce) and over_link(self.device, op.ranks) != over_link(self.relative, op.ranks):
            return there, PCIE_STD
        seconds, std = self.measured.op_s(op, cold)
        return seconds * there / datasheet_s(self.relative, op, dtype), math.hypot(std, TRANSFER_STD.get(op.kind, 0.25))


def kernels_of(profile: Profile) -> Profile:
    """The rows of a profile that carry over: single kernels. What was measured of engines and whole passes stays where it was."""
    kept = Profile(profile.device, profile.stack, origin=profile.origin, provenance=profile.provenance, folder=profile.folder)
    kept.add(row for row in profile.rows.values() if row.kind in OP_KINDS)
    return kept
