"""Which attention kernels a GPU profile holds, and how far those of serving engines lie from them.

Attention is the kernel in which frameworks differ most: the same shape on the same GPU takes them times that are 7 to 18 % apart.
A profile that was measured under CUDA graphs holds torch's kernels; an imported one those of the framework that ran.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from archsearch.profiles import Profile

FLASH: Final = "FlashAttention 2"


@dataclass(frozen=True)
class Serving:
    """The attention that vLLM picks on GPUs of one generation, and the relative std between frameworks there."""

    generation: str
    kernel: str
    std: float


SERVING: Final[dict[int, Serving]] = {
    8: Serving("Ampere", FLASH, 0.18),
    9: Serving("Hopper", "FlashAttention 3", 0.17),
    10: Serving("Blackwell", "FlashInfer's TensorRT-LLM kernels", 0.07),
}
"""By major compute capability. From the shipped profiles (aiconfigurator-core 0.12.0): `kernel_sources` of vLLM 0.14 on A100
and 0.24 on H100, H200 and B200, and `row_relative_std`: vLLM against TensorRT-LLM and SGLang on the same shapes."""
UNKNOWN: Final = Serving("this GPU", "a kernel of its own choice", 0.18)
KERNELS: Final = {  # as importers name them
    "vllm_flash_attn": FLASH,
    "vllm_flash_attn_fa3": "FlashAttention 3",
    "vllm_flash_attn_fa4": "FlashAttention 4",
    "vllm_flashinfer_trtllmdecode": "FlashInfer's TensorRT-LLM kernels",
}


def serving_attention(profile: Profile) -> Serving:
    """What vLLM would run on the profile's GPU."""
    major = str(profile.device.get("compute_capability") or "").partition(".")[0]
    return SERVING.get(int(major), UNKNOWN) if major.isdigit() else UNKNOWN


def measured_kernels(profile: Profile, mode: str) -> list[str]:
    """The kernels that the profile's attention rows of `mode` say they ran, most rows first; [] where rows do not say."""
    found = Counter(row.kernel for row in profile.rows.values() if row.kind == "attention" and row.mode == mode and row.kernel)
    return [name for name, _ in found.most_common()]


def attention_words(profile: Profile, mode: str) -> str:
    """Whose attention the profile's rows are, in a clause; "" where that says nothing (a CPU, rows that do not say)."""
    if profile.device.get("kind") != "gpu":
        return ""
    if profile.imported:
        sources = profile.provenance.get("kernel_sources", {}).get("decode", [])
        names = " and ".join(KERNELS.get(name, name) for name in sources)
        std = profile.provenance.get("row_relative_std", {}).get("attention")
        differ = f", frameworks differ by {std:.0%}" if std else ""
        return f"attention: {names}{differ}" if names else ""
    names = " and ".join(measured_kernels(profile, mode))
    if mode != "graph":
        return f"attention: {names}" if names else ""
    serving = serving_attention(profile)
    return (
        f"graph mode: torch SDPA ({names or FLASH}) attention; vLLM runs {serving.kernel} on {serving.generation}, "
        f"frameworks differ by {serving.std:.0%}"
    )
