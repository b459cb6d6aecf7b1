"""The time of one op from a GPU's datasheet: bytes over bandwidth or FLOPs over peak, and a constant per kernel.

All-reduces: over the device's own link where it joins that many devices, else over PCIe as NCCL's tuner reckons.
"""

from __future__ import annotations

from typing import Final

from archsearch.architecture.op_kinds import OP_KINDS
from archsearch.architecture.ops import AllReduce, Op
from archsearch.hardware.device import Device
from archsearch.workload import DTYPE_BYTES

BANDWIDTH_SHARE: Final = 0.8  # bytes / (0.8 bandwidth) + 3 us fits measured decode GEMMs of A100, H100, H200 and B200 to 14-21 %
PEAK_SHARE: Final = 0.7
KERNEL_S: Final = 3e-6
LINK_LATENCY_S: Final = 5e-6
PCIE_BYTES_PER_S: Final = {"8": 24e9, "9": 48e9, "10": 48e9, "12": 48e9}
"""By compute capability: 16 lanes of PCIe 4 from Ampere on (Ada too), of PCIe 5 from Hopper on, at what NCCL takes as reachable
(graph/topo.h: 12 GB/s for generation 3, doubled with each)."""
OLD_PCIE_BYTES_PER_S: Final = 12e9
PCIE_PROTOCOLS: Final = ((6.6e-6, 1.0e-6, 0.5), (8.4e-6, 5.7e-6, 1.0))
"""Start, seconds per step and share of the bandwidth of a ring over PCIe: NCCL's protocols LL and Simple (graph/tuning.cc,
baseLatencies and hwLatencies; LL moves a flag with every word). NCCL takes the quicker of the two."""


def over_link(device: Device, ranks: int) -> bool:
    """Whether `ranks` devices reach one another over the device's own link. A bridge joins two cards, a switch all."""
    return device.link_bytes_per_s > 0 and (device.link_ranks is None or ranks <= device.link_ranks)


def pcie_bytes_per_s(device: Device) -> float:
    """PCIe of the device's generation, per direction."""
    return PCIE_BYTES_PER_S.get((device.compute_capability or "").split(".")[0], OLD_PCIE_BYTES_PER_S)


def all_reduce_s(device: Device, op: AllReduce, width: int) -> float:
    """Seconds of an all-reduce of numbers of `width` bytes: a ring moves 2 (r - 1) / r of the bytes in 2 (r - 1) steps."""
    moved = 2 * (op.ranks - 1) / op.ranks * op.elements * width
    if over_link(device, op.ranks):
        return moved / device.link_bytes_per_s + LINK_LATENCY_S
    link = pcie_bytes_per_s(device)
    return min(start + 2 * (op.ranks - 1) * step + moved / (share * link) for start, step, share in PCIE_PROTOCOLS)


def datasheet_s(device: Device, op: Op, dtype: str) -> float:
    """Seconds of one op; ArchsearchError where the device does not compute in `dtype`."""
    width = DTYPE_BYTES[dtype]
    if isinstance(op, AllReduce):
        return all_reduce_s(device, op, width)
    kind = OP_KINDS[op.kind]
    memory = kind.elements(op) * width / (BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)
    return max(memory, kind.flops(op) / (PEAK_SHARE * device.peak_flops_per_s(dtype))) + KERNEL_S
