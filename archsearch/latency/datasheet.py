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
from archsearch.workload import DTYPE_BYTES

# bytes / (0.8 bandwidth) + 3 us fits measured decode GEMMs of A100, H100, H200 and B200 to 14-21 %
BANDWIDTH_SHARE: Final = 0.8
PEAK_SHARE: Final = 0.7
KERNEL_S: Final = 3e-6
# The same under ROCm, from one published latency: DeepSeek-V3 on eight MI300X, SGLang 0.5.0, one
# request of 3,200 and 800 tokens: 17.3 s, so 21.4 ms a step (10.5 with 3 us).
AMD_KERNEL_S: Final = 7.5e-6
# Kernels of an op that is several. Whatever the bytes, experts take 15 to 40 us (t0 of the fits of
# t0 + b x experts touched, four GPUs), a block of latent attention 50 us in TensorRT-LLM and about
# 110 in vLLM at batch 1 on an H200 (aiconfigurator-core 0.12.0).
KERNELS: Final = {"experts": 10, "latent_attention": 25}
# Share of the speed at which 16-bit kernels read memory that kernels of a narrow format reach, in
# GEMMs of 1 to 64 tokens and at least 8M weights, next to vLLM's 16-bit rows of the same GPU:
# TensorRT-LLM's W4A16 0.40, W8A16 0.70 and W8A8 0.85 on an A100; NVFP4 0.40, 0.25 and 0.50 (vLLM,
# TensorRT-LLM, SGLang) on a B200, 0.50 and 0.60 on an RTX PRO 6000 (aiconfigurator-core 0.12.0).
# Published for Marlin, vLLM's kernel for int4, mxfp4 and 8 bits on Ampere: near 1 (arXiv
# 2408.11743), so int4 lies between. nf4: assumed.
FORMAT_SHARE: Final = {
    "float8_e4m3fn": 0.75,
    "int8": 0.75,
    "int4": 0.65,
    "mxfp4": 0.65,
    "nvfp4": 0.45,
    "nf4": 0.4,
}
# Relative std of a GEMM priced so: what the shapes of those tables scatter by, and frameworks
# differ by.
FORMAT_STD: Final = {
    "float8_e4m3fn": 0.25,
    "int8": 0.3,
    "int4": 0.35,
    "mxfp4": 0.35,
    "nvfp4": 0.4,
    "nf4": 0.5,
}
LINK_LATENCY_S: Final = 5e-6
# By compute capability: 16 lanes of PCIe 4 from Ampere on (Ada too), of PCIe 5 from Hopper on, at
# what NCCL takes as reachable (graph/topo.h: 12 GB/s for generation 3, doubled with each).
PCIE_BYTES_PER_S: Final = {"8": 24e9, "9": 48e9, "10": 48e9, "12": 48e9}
OLD_PCIE_BYTES_PER_S: Final = 12e9
# Start, seconds per step and share of the bandwidth of a ring over PCIe: NCCL's protocols LL and
# Simple (graph/tuning.cc, baseLatencies and hwLatencies; LL moves a flag with every word). NCCL
# takes the quicker of the two.
PCIE_PROTOCOLS: Final = ((6.6e-6, 1.0e-6, 0.5), (8.4e-6, 5.7e-6, 1.0))


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
    link = PCIE_BYTES_PER_S.get(generation, OLD_PCIE_BYTES_PER_S)
    return min(
        start + 2 * (op.ranks - 1) * step + moved / (share * link)
        for start, step, share in PCIE_PROTOCOLS
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
