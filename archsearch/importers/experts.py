"""Rows of mixtures of experts and of latent attention out of the tables of aiconfigurator-core.

A row of moe_perf.parquet is one rank's experts under a rule of routing; its time follows how many
distinct experts the rule touches, which is counted here by the rules of the package's own
collectors (collector/helper.py, `balanced_logits` and `power_law_logits_v3`, commit 095f58a5). Not
in a row: the router's GEMM, shared experts, all-reduces.

Left out, since they say something else than their labels: kernels that run at less than a third of
the memory's speed (badly tuned, as vLLM's per-tensor fp8 on Hopper), SGLang's MXFP4 on Hopper
(reads 16-bit weights), `balanced` rows of grouped routing (DeepSeek in vLLM and SGLang: half the
groups are never chosen), TensorRT-LLM's min-latency kernel (always grouped).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from archsearch.architecture.ops import Experts, LatentAttention
from archsearch.hardware.device import Device
from archsearch.workload import DTYPE_BYTES, WEIGHT_BYTES

if TYPE_CHECKING:
    from pandas import DataFrame, Series

MOE_DTYPES: Final = {
    "bfloat16": {"bfloat16": "", "w4a16_mxfp4": "mxfp4"},
    "float8_e4m3fn": {"fp8_block": ""},
}
"""Labels of the table and the experts' own format, by the dtype of the pass. Per-tensor fp8 is the
badly tuned one."""
BLACKWELL: Final = MOE_DTYPES | {"bfloat16": {"bfloat16": "", "w4a8_mxfp4_mxfp8": "mxfp4"}}
"""On Blackwell TensorRT-LLM and SGLang (flashinfer_mxfp4_moe_precision=default) multiply MXFP4
weights with 8-bit activations; TensorRT-LLM's kernels for 16-bit ones reach 18 % there. vLLM does
so where VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8 is set; its table has the 16-bit ones."""
EIGHT_BIT_FRAMEWORKS: Final = ("trtllm", "sglang")
GPT_OSS_HIDDEN: Final = 2880  # the only models whose experts are served in MXFP4 by that kernel
GROUPED: Final = (7168, 256)  # hidden size and experts of models routed by groups
LEAST_SHARE: Final = 0.35  # of the memory's bandwidth, in the slope of time over experts touched
SIZES: Final = "num_tokens hidden_size inter_size topk num_experts moe_tp_size moe_ep_size"
DRAWS: Final = 8
# tokens of power-law rows: beyond, all experts are touched and only their loads differ
MOST_DRAWN: Final = 128
COMPACT_TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
COMPACT_SHAPES: Final = (
    (2048, 768, 8, 128),  # Qwen3-30B-A3B
    (4096, 1536, 8, 128),  # Qwen3-235B-A22B
    (4096, 14336, 2, 8),  # Mixtral-8x7B
    (2880, 2880, 4, 32),  # gpt-oss-20b
    (2880, 2880, 4, 128),  # gpt-oss-120b
    (5120, 8192, 1, 16),  # Llama-4 Scout
    (7168, 2048, 8, 256),  # DeepSeek-V3
)
COMPACT_RANKS: Final = (1, 2, 4, 8)
DEEPSEEK: Final = {
    "hidden": 7168,
    "q_rank": 1536,
    "latent": 576,
    "rope": 64,
    "head_dim": 192,
    "v_dim": 128,
}
LATENT_GEMM: Final = {"bfloat16": ("bfloat16",), "float8_e4m3fn": ("fp8_block",)}
LATENT_CACHE: Final = {"bfloat16": "bfloat16", "float8_e4m3fn": "fp8"}
COMPACT_LENGTHS: Final = (16, 128, 512, 2048, 4096, 8192, 32768)
COMPACT_HEADS: Final = (16, 32, 64, 128)


def _load(
    size: int, tokens: int, top_k: int, ranks: int, alpha: float, random: np.random.Generator
) -> NDArray[np.int64]:
    """Tokens of each expert in one draw of the collector's power law, the busiest rank first.
    [experts]."""
    low, high = (1.0, tokens * 0.8) if tokens * top_k > size else (0.01, 2.0)
    power = 1.0 - alpha
    weights = ((high**power - low**power) * random.random(size) + low**power) ** (1.0 / power)
    counts = np.rint(weights / weights.sum() * tokens * top_k).astype(np.int64)
    counts = np.minimum(counts, tokens)
    each = size // ranks
    missing, rank = tokens * top_k - int(counts.sum()), 0
    while missing:  # one token at a time, to or from each rank in turn
        part = counts[rank * each : (rank + 1) * each]
        place = int(np.argmin(part) if missing > 0 else np.argmax(part))
        if 0 <= part[place] + np.sign(missing) <= tokens:
            part[place] += np.sign(missing)
            missing -= int(np.sign(missing))
        rank = (rank + 1) % ranks
    loads = counts.reshape(ranks, each)
    return np.roll(loads, -int(loads.sum(1).argmax()), axis=0).reshape(-1)


@lru_cache(maxsize=65536)
def touched_by_rule(
    distribution: str, experts: int, top_k: int, tokens: int, ranks: int
) -> tuple[float, float]:
    """(distinct experts, pairs of token and expert) of the rank that a row times, by the
    collector's rule of that name.

    Raises: ValueError for a rule that is not known.
    """
    each = experts // ranks
    if distribution == "balanced":
        stride = -(-experts // top_k)
        token, place = np.arange(tokens)[:, None], np.arange(top_k)[None, :] * stride
        chosen = ((token if tokens >= stride else token * stride / tokens) + place) % experts
        local = chosen.astype(np.int64)[chosen.astype(np.int64) < each]
        return float(len(np.unique(local))), float(len(local))
    if not distribution.startswith("power_law_"):
        raise ValueError(f"unknown rule of routing {distribution}")
    random = np.random.default_rng(0)
    draws = [
        _load(experts, tokens, top_k, ranks, float(distribution.rpartition("_")[2]), random)[:each]
        for _ in range(DRAWS)
    ]
    touched = statistics.fmean(float((draw > 0).sum()) for draw in draws)
    return touched, statistics.fmean(float(draw.sum()) for draw in draws)


def formats_of(device: Device, dtype: str, framework: str) -> Mapping[str, str]:
    """The experts' own format by label of the table, of the labels that `framework` serves on
    `device` in a pass in `dtype`."""
    blackwell = str(device.compute_capability or "").startswith("1")
    return (BLACKWELL if blackwell and framework in EIGHT_BIT_FRAMEWORKS else MOE_DTYPES).get(
        dtype, {}
    )


def wanted(frame: DataFrame, dtype: str, framework: str, device: Device, compact: bool) -> Series:
    """The rows (a mask) of a moe table that say what their labels say, for a pass in `dtype`."""
    formats = formats_of(device, dtype, framework)
    kept = frame.moe_dtype.isin(formats) & ~frame.kernel_source.str.contains("min_latency")
    own = frame.moe_dtype.isin([label for label, kind in formats.items() if kind])
    hopper = str(device.compute_capability or "").startswith("9")
    kept &= ~own | ((frame.hidden_size == GPT_OSS_HIDDEN) & ~(framework == "sglang" and hopper))
    balanced = frame.distribution == "balanced"
    grouped = (frame.hidden_size == GROUPED[0]) & (frame.num_experts == GROUPED[1])
    if framework != "trtllm":
        kept &= ~(balanced & grouped)
    drawn = frame.distribution.str.startswith("power_law_") & (frame.num_tokens <= MOST_DRAWN)
    kept &= balanced | drawn
    return kept & _kept(frame, balanced, grouped) if compact else kept


def _kept(frame: DataFrame, balanced: Series, grouped: Series) -> Series:
    """Whether a compact profile holds a row: known targets, up to eight ranks, tokens or experts
    split but not both."""
    shapes = zip(frame.hidden_size, frame.inter_size, frame.topk, frame.num_experts, strict=True)
    known = np.array([shape in COMPACT_SHAPES for shape in shapes], dtype=bool)
    ranks, groups = frame.moe_tp_size, frame.moe_ep_size
    split = ranks.isin(COMPACT_RANKS) & groups.isin(COMPACT_RANKS) & ((ranks == 1) | (groups == 1))
    drawn = (frame.distribution == "power_law_1.2") & ((frame.num_tokens <= 64) | grouped)
    return known & frame.num_tokens.isin(COMPACT_TOKENS) & split & (balanced | drawn)


def experts_of(row: Any, formats: Mapping[str, str]) -> Experts:
    """The op that a row timed; `formats` as `formats_of` says."""
    sizes = (getattr(row, name) for name in SIZES.split())
    tokens, hidden, inter, top_k, experts, split, ranks = map(int, sizes)
    touched, pairs = touched_by_rule(row.distribution, experts, top_k, tokens, ranks)
    return Experts(
        tokens=tokens,
        hidden=hidden,
        inter=inter // split,
        experts=experts // ranks,
        pairs=max(1, round(pairs)),
        touched=max(1.0, round(touched, 2)),
        format=formats[row.moe_dtype],
    )


def badly_tuned(times_s: Mapping[Experts, float], device: Device, dtype: str) -> set[Experts]:
    """Rows of shapes whose time over the experts touched (up to 64 tokens) rises slower than
    LEAST_SHARE of the bandwidth."""
    shapes: dict[tuple[Any, ...], list[Experts]] = {}
    for op in times_s:
        shapes.setdefault((op.hidden, op.inter, op.experts, op.format), []).append(op)
    bad: set[Experts] = set()
    for (hidden, inter, _, kept), ops in shapes.items():
        small = [op for op in ops if op.tokens <= 64]
        touched = np.array([op.touched for op in small])
        if len(small) < 4 or np.ptp(touched) < 2:
            continue
        slope = float(np.polyfit(touched, [times_s[op] for op in small], 1)[0])
        weights = 3 * hidden * inter * (WEIGHT_BYTES[kept] if kept else DTYPE_BYTES[dtype])
        least = weights / device.bandwidth_bytes_per_s
        if slope > least / LEAST_SHARE:
            bad.update(ops)
    return bad


def latent_of(row: Any) -> LatentAttention:
    """The block of DeepSeek-V3's attention that a row of an MLA module table timed."""
    batch, tokens, step, heads = map(int, (row.batch_size, row.isl, row.step, row.num_heads))
    return LatentAttention(batch=batch, tokens=tokens, context=step, heads=heads, **DEEPSEEK)


def latent_wanted(frame: DataFrame, dtype: str, compact: bool) -> Series:
    """Rows (a mask) of an MLA module table of DeepSeek-V3 in `dtype`; a compact profile holds every
    fourth power of two of its lengths."""
    kept = frame.gemm_type.isin(LATENT_GEMM.get(dtype, ()))
    kept &= frame.kv_cache_dtype == LATENT_CACHE.get(dtype)
    kept &= frame.architecture.str.contains("DeepseekV3")
    if compact:
        kept &= frame.num_heads.isin(COMPACT_HEADS) & ~(frame.batch_size > 256)
        kept &= frame[["step", "isl"]].max(axis=1).isin(COMPACT_LENGTHS)
    return kept
