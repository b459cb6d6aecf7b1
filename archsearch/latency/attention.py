"""Whose kernels a prediction rests on: attention, experts and quantised weights, in words; and how
far the attention of serving engines lies from the kernels that a GPU profile holds.

Attention is the kernel in which frameworks differ most: the same shape on the same GPU takes them
times that are 7 to 18 % apart. A profile that was measured under CUDA graphs holds torch's kernels;
an imported one those of the framework that ran.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.experts import ROUTING_SKEW
from archsearch.architecture.ops import Attention, Op
from archsearch.hardware.device import Device
from archsearch.latency.constants import constants
from archsearch.latency.datasheet import FORMAT_SHARE, FORMAT_STD, KERNEL_S, datasheet_s
from archsearch.latency.ops import SHORT, VERIFY_STD, Answer
from archsearch.profiles import Profile
from archsearch.workload import DTYPE_BYTES, WEIGHT_BYTES

FLASH: Final = "FlashAttention 2"


@dataclass(frozen=True)
class Serving:
    """The attention that vLLM picks on GPUs of one generation, and the relative std between
    frameworks there."""

    generation: str
    kernel: str
    std: float


_KNOWN: Final = constants()["attention"]
SERVING: Final = {each["major"]: Serving(*each["serving"]) for each in _KNOWN["generations"]}
UNKNOWN: Final = Serving("this GPU", "a kernel of its own choice", 0.18)
KERNELS: Final = {  # as importers name them
    "vllm_flash_attn": FLASH,
    "vllm_flash_attn_fa3": "FlashAttention 3",
    "vllm_flash_attn_fa4": "FlashAttention 4",
    "vllm_flashinfer_trtllmdecode": "FlashInfer's TensorRT-LLM kernels",
}


def serving_attention(compute_capability: str | None) -> Serving:
    """What vLLM would run on such a GPU."""
    major = (compute_capability or "").partition(".")[0]
    return SERVING.get(major, UNKNOWN)


def attention_words(profile: Profile, mode: str) -> str:
    """Whose attention the profile's rows are, in a clause; "" where that says nothing (a CPU, rows
    that do not say)."""
    if profile.device.get("kind") != "gpu":
        return ""
    if profile.imported:
        sources = profile.provenance.get("kernel_sources", {}).get("decode", [])
        names = " and ".join(KERNELS.get(name, name) for name in sources)
        std = profile.provenance.get("row_relative_std", {}).get("attention")
        differ = f", frameworks differ by {std:.0%}" if std else ""
        return f"attention: {names}{differ}" if names else ""
    ran = Counter(
        row.kernel
        for row in profile.rows.values()
        if row.kind == "attention" and row.mode == mode and row.kernel
    )
    names = " and ".join(name for name, _ in ran.most_common())  # most rows first
    if mode != "graph":
        return f"attention: {names}" if names else ""
    serving = serving_attention(profile.device.get("compute_capability"))
    return (
        f"graph mode: torch SDPA ({names or FLASH}) attention; vLLM runs {serving.kernel} on"
        f" {serving.generation}, frameworks differ by {serving.std:.0%}"
    )


# Query rows of a thread block of FlashAttention 2 against a paged cache.
TILE: Final = 64
KEY_S: Final[float] = _KNOWN["unsplit_key_s"]


def unpacks(compute_capability: str | None, engine: str | None, cache: str) -> bool:
    """Whether `engine` runs FlashAttention 2 on a `cache` of such a GPU: vLLM on all but Hopper and
    Blackwell of data centres. It takes 16 bits; SGLang (FlashInfer) and TensorRT-LLM
    pack several query rows."""
    runs = serving_attention(compute_capability).kernel == FLASH
    return engine == "vllm" and runs and DTYPE_BYTES[cache] == 2


def unpacked(op: Op) -> bool:
    """Whether the kernel handles `op` by its path for prompts: several query rows and a cache."""
    return isinstance(op, Attention) and 1 < op.tokens <= TILE and op.context > 0


def _waves(op: Attention, multiprocessors: int) -> tuple[int, float]:
    """Waves of the blocks of all query heads and sequences, one to a multiprocessor (128 take an
    A100 twice as long as 8), and how often the cache is read: heads of a group that run at the same
    time read their KV head once."""
    group = op.q_heads / op.kv_heads
    reads = group / min(group, max(1.0, multiprocessors / op.batch))
    return math.ceil(op.batch * op.q_heads / multiprocessors), reads


def unpacked_s(device: Device, op: Attention, cache: str) -> float:
    """`UnpackedQueries` where no rows are: a block's tile at its multiprocessor's share of the
    peak, and KEY_S."""
    multiprocessors = device.multiprocessors or 108
    waves, reads = _waves(op, multiprocessors)
    tile_s = 4.0 * TILE * op.head_dim * multiprocessors / device.peak_flops_per_s(cache)
    return max(
        datasheet_s(device, op, cache),
        KERNEL_S + waves * op.keys() * (tile_s + KEY_S),
        reads * datasheet_s(device, _decode(op), cache),
    )


def _decode(op: Attention) -> Attention:
    return Attention(op.batch, 1, max(1, op.keys() - 1), op.q_heads, op.kv_heads, op.head_dim)


class UnpackedQueries:
    """Kernels of an engine whose attention handles several query rows by FlashAttention 2's path
    for prompts; all else as `priced` says.

    For one row that kernel packs the query heads of a KV head into a block and splits the keys over
    blocks; for more it does neither (flash_api.cpp, mha_varlen_fwd: "only apply split-k for
    decoding" under `seqlenq_ngroups_swapped`, which asks for one row; so until 2026-08). Each query
    head's block then walks over all keys alone, computing a tile of TILE rows:

        seconds = max(start + waves of blocks x one block, decode x how often the cache is read)

    One block: the table's row of one head and one sequence, unsplit and unpacked too. Blocks are
    started by sequence and then by head.
    """

    def __init__(self, priced: Any, multiprocessors: int) -> None:
        self.priced, self.multiprocessors = priced, multiprocessors

    def prepare(self, ops: Iterable[Op], cold: bool) -> None:
        ops = list(ops)
        parts = [part for op in ops if unpacked(op) for part in self._parts(op)]
        self.priced.prepare([*ops, *parts], cold)

    def op_s(self, op: Op, cold: bool) -> Answer:
        """Seconds and relative std of one op."""
        seconds, std = self.priced.op_s(op, cold)
        if not unpacked(op):
            return seconds, std
        assert isinstance(op, Attention)
        (start, _), (block, block_std), (decode, decode_std) = (
            self.priced.op_s(part, cold) for part in self._parts(op)
        )
        waves, reads = _waves(op, self.multiprocessors)
        walked = start + waves * (block - start), math.hypot(block_std, VERIFY_STD)
        return max((seconds, std), walked, (reads * decode, math.hypot(decode_std, VERIFY_STD)))

    def _parts(self, op: Any) -> tuple[Attention, Attention, Attention]:
        """One head of one sequence over hardly any key and over all, and a decode of the batch."""
        decode = _decode(op)
        block = Attention(1, 1, decode.context, 1, 1, op.head_dim)
        return replace(block, context=min(SHORT, decode.context)), block, decode


def kernel_words(profile: Profile, target: Architecture, dtype: str) -> str:
    """In a clause how the target's experts and its latent attention are priced; "" for a target
    without either."""
    words = ""
    if target.num_experts:
        asked = "bfloat16" if target.expert_format and dtype == "float16" else dtype
        rows = [
            row.sizes()
            for row in profile.rows.values()
            if row.kind == "experts" and row.dtype == asked
        ]
        shapes = {(row["hidden"], row["experts"], row["format"]) for row in rows}
        own = (target.hidden_size, target.num_experts, target.expert_format) in shapes
        whose = "rows of this shape" if own else "rows of other shapes"
        if not shapes:
            whose = "no rows in this dtype, priced as plain GEMMs that move as many bytes (30 %)"
        skew = ROUTING_SKEW if target.routing_skew is None else target.routing_skew
        words += f"; experts: {whose}, routing skew {skew:g}"
    if target.kv_lora_rank:
        known = any(
            row.kind == "latent_attention" and row.dtype == dtype for row in profile.rows.values()
        )
        several = "several tokens at once are modelled"
        none = "no rows, priced as its projections and one wide KV head (30 %)"
        words += f"; latent attention: {several if known else none}"
    return words


def format_words(profile: Profile | None, target: Architecture) -> str:
    """In a clause how weights in a format of their own are priced (`profile` None: by a datasheet);
    "" for weights in the dtype of the pass."""
    name = target.weight_format
    if not name:
        return ""
    rows = profile.rows.values() if profile is not None else ()
    known = any(row.kind == "gemm" and row.sizes().get("format") == name for row in rows)
    whose = "rows of such kernels"
    if not known:
        whose = (
            f"modelled from their bytes at {FORMAT_SHARE[name]:.0%} of the bandwidth that 16-bit"
            f" kernels reach (a GEMM within {FORMAT_STD[name]:.0%})"
        )
    return (
        f"; weights in {name}, {WEIGHT_BYTES[name]:g} bytes each: {whose}; cache, embedding and"
        " head in 16 bits"
    )
