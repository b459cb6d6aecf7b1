"""The time of one op from a GPU's datasheet: bytes over bandwidth or FLOPs over peak, and a
constant per kernel.

All-reduces: over the device's own link where it joins that many devices, else over PCIe as NCCL's
tuner reckons.
"""

from __future__ import annotations

from typing import Final

from archsearch.architecture.op_kinds import OP_KINDS
from archsearch.architecture.ops import AllReduce, Gemm, Op
from archsearch.hardware.device import Device
from archsearch.latency.constants import constants
from archsearch.workload import DTYPE_BYTES

_KNOWN: Final = constants()["datasheet"]
BANDWIDTH_SHARE, PEAK_SHARE = map(float, (_KNOWN["bandwidth_share"], _KNOWN["peak_share"]))
KERNEL_S, AMD_KERNEL_S = map(float, (_KNOWN["kernel_s"], _KNOWN["amd_kernel_s"]))
KERNELS: Final[dict[str, int]] = _KNOWN["kernels"]
FORMAT_SHARE: Final[dict[str, float]] = _KNOWN["format_share"]
FORMAT_STD: Final[dict[str, float]] = _KNOWN["format_relative_std"]
LINK_LATENCY_S: Final[float] = _KNOWN["link_latency_s"]
PCIE_BYTES_PER_S: Final[dict[str, float]] = _KNOWN["pcie_bytes_per_s"]


def over_link(device: Device, ranks: int) -> bool:
    """Whether `ranks` devices reach one another over the device's own link. A bridge joins two
    cards, a switch all."""
    return device.link_bytes_per_s > 0 and (device.link_ranks is None or ranks <= device.link_ranks)


def all_reduce_s(device: Device, op: AllReduce, width: int) -> float:
    """Seconds of an all-reduce of numbers of `width` bytes: a ring moves 2 (r - 1) / r of the bytes
    in 2 (r - 1) steps."""
    moved = 2 * (op.ranks - 1) / op.ranks * op.elements * width
    if over_link(device, op.ranks):
        return moved / device.link_bytes_per_s + LINK_LATENCY_S
    generation = (device.compute_capability or "").split(".")[0]
    link = PCIE_BYTES_PER_S.get(generation, PCIE_BYTES_PER_S["older"])
    return min(
        start + 2 * (op.ranks - 1) * step + moved / (share * link)
        for start, step, share in _KNOWN["pcie_protocols"]
    )


def datasheet_s(device: Device, op: Op, dtype: str) -> float:
    """Seconds of one op; ArchsearchError where the device does not compute in `dtype`."""
    width = DTYPE_BYTES[dtype]
    if isinstance(op, AllReduce):
        return all_reduce_s(device, op, int(width))
    kind = OP_KINDS[op.kind]
    elements = kind.elements(op)
    if isinstance(op, Gemm) and op.format:
        elements += op.weight_elements() * (1.0 / FORMAT_SHARE[op.format] - 1.0)
        width = max(width, 2)  # counted in numbers of 16 bits
    memory = elements * width / (BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)
    computed = kind.flops(op) / (peak_share(device) * device.peak_flops_per_s(dtype))
    kernel_s = AMD_KERNEL_S if device.vendor == "AMD" else KERNEL_S
    return max(memory, computed) + KERNELS.get(op.kind, 1) * kernel_s


def peak_share(device: Device) -> float:
    """Share of the datasheet's peak that GEMMs reach: where the best of them was published
    (`sustained_flops_per_s`: 51 % on an MI300X), no more than that."""
    known = device.sustained_flops_per_s.items()
    return min((PEAK_SHARE, *(rate / device.flops_per_s[dtype] for dtype, rate in known)))
