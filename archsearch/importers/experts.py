"""Rows of mixtures of experts and of latent attention out of the tables of aiconfigurator-core.

A row of moe_perf.parquet is one rank's experts under a rule of routing; what its time follows is
how many distinct experts the rule touches, which no column says. It is counted here by the rules of
the package's own collectors (collector/helper.py, `balanced_logits` and `power_law_logits_v3`,
commit 095f58a5). Not in a row: the router's GEMM, shared experts, all-reduces.

Left out, since they say something else than their labels: kernels that run at less than a third of
the memory's speed (badly tuned, as vLLM's per-tensor fp8 on Hopper), SGLang's MXFP4 on Hopper
(reads 16-bit weights), `balanced` rows of grouped routing (DeepSeek in vLLM and SGLang: half the
groups are never chosen), TensorRT-LLM's min-latency kernel (always grouped).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from archsearch.architecture.ops import Experts, LatentAttention
from archsearch.hardware.device import Device
from archsearch.workload import DTYPE_BYTES, WEIGHT_BYTES

MOE_DTYPES: Final = {
    "bfloat16": {"bfloat16": "", "w4a16_mxfp4": "mxfp4"},
    "float8_e4m3fn": {"fp8_block": ""},
}
"""Labels of the table and the experts' own format, by the dtype of the pass. Per-tensor fp8 is the
badly tuned one."""
BLACKWELL: Final = {
    "bfloat16": {"bfloat16": "", "w4a8_mxfp4_mxfp8": "mxfp4"},
    "float8_e4m3fn": {"fp8_block": ""},
}
"""On Blackwell TensorRT-LLM and SGLang (flashinfer_mxfp4_moe_precision=default) multiply MXFP4
weights with 8-bit activations; TensorRT-LLM's kernels for 16-bit ones reach 18 % there. vLLM does
so where VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8 is set; its table has the 16-bit ones."""
EIGHT_BIT_FRAMEWORKS: Final = ("trtllm", "sglang")
GPT_OSS_HIDDEN: Final = 2880  # the only models whose experts are served in MXFP4 by that kernel
GROUPED: Final = (7168, 256)  # hidden size and experts of models routed by groups
LEAST_SHARE: Final = 0.35  # of the memory's bandwidth, in the slope of time over experts touched
DRAWS: Final = 8
MOST_DRAWN: Final = (
    128  # tokens of power-law rows: beyond, all experts are touched and only their loads differ
)
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
    return statistics.fmean(float((draw > 0).sum()) for draw in draws), statistics.fmean(
        float(draw.sum()) for draw in draws
    )


def formats_of(device: Device, dtype: str, framework: str) -> Mapping[str, str]:
    """The experts' own format by label of the table, of the labels that `framework` serves on
    `device` in a pass in `dtype`."""
    blackwell = str(device.compute_capability or "").startswith("1")
    return (BLACKWELL if blackwell and framework in EIGHT_BIT_FRAMEWORKS else MOE_DTYPES).get(
        dtype, {}
    )


def wanted(
    columns: Mapping[str, Sequence[Any]], dtype: str, framework: str, device: Device, compact: bool
) -> list[int]:
    """The rows of a moe table that say what their labels say, for a pass in `dtype`."""
    formats = formats_of(device, dtype, framework)
    hopper = str(device.compute_capability or "").startswith("9")
    found = []
    for row, label in enumerate(columns["moe_dtype"]):
        if label not in formats or "min_latency" in str(columns["kernel_source"][row]):
            continue
        hidden, inter = columns["hidden_size"][row], columns["inter_size"][row]
        experts, top_k = columns["num_experts"][row], columns["topk"][row]
        if formats[label] and (hidden != GPT_OSS_HIDDEN or (framework == "sglang" and hopper)):
            continue
        rule = str(columns["distribution"][row])
        if rule == "balanced" and (hidden, experts) == GROUPED and framework != "trtllm":
            continue
        if rule != "balanced" and columns["num_tokens"][row] > MOST_DRAWN:
            continue
        if compact and not _kept((hidden, inter, top_k, experts), columns, row, rule):
            continue
        found.append(row)
    return found


def _kept(
    shape: tuple[float, ...], columns: Mapping[str, Sequence[Any]], row: int, rule: str
) -> bool:
    """Whether a compact profile holds the row: known targets, up to eight ranks, tokens or experts
    split but not both."""
    ranks, groups = columns["moe_tp_size"][row], columns["moe_ep_size"][row]
    tokens = columns["num_tokens"][row]
    known = shape in COMPACT_SHAPES and tokens in COMPACT_TOKENS
    split = ranks in COMPACT_RANKS and groups in COMPACT_RANKS and min(ranks, groups) == 1
    return (
        known
        and split
        and rule
        in (
            ("balanced",)
            if tokens > 64 and (shape[0], shape[3]) != GROUPED
            else ("balanced", "power_law_1.2")
        )
    )


def experts_of(
    columns: Mapping[str, Sequence[Any]], row: int, formats: Mapping[str, str]
) -> Experts:
    """The op that a row timed; `formats` as `formats_of` says. Raises ValueError where its sizes
    make no sense."""
    numbers = {}
    for name in (
        "num_tokens",
        "hidden_size",
        "inter_size",
        "topk",
        "num_experts",
        "moe_tp_size",
        "moe_ep_size",
    ):
        value = columns[name][row]
        if not value >= 1 or value != int(value):
            raise ValueError(f"{name} is {value}")
        numbers[name] = int(value)
    ranks, experts = numbers["moe_ep_size"], numbers["num_experts"]
    touched, pairs = touched_by_rule(
        str(columns["distribution"][row]), experts, numbers["topk"], numbers["num_tokens"], ranks
    )
    return Experts(
        tokens=numbers["num_tokens"],
        hidden=numbers["hidden_size"],
        inter=numbers["inter_size"] // numbers["moe_tp_size"],
        experts=experts // ranks,
        pairs=max(1, round(pairs)),
        touched=max(1.0, round(touched, 2)),
        format=formats[str(columns["moe_dtype"][row])],
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


def latent_of(columns: Mapping[str, Sequence[Any]], row: int) -> LatentAttention:
    """The block of DeepSeek-V3's attention that a row of an MLA module table timed; ValueError for
    sizes that make no sense."""
    values = [columns[name][row] for name in ("batch_size", "isl", "step", "num_heads")]
    if any(value != int(value) or value < 0 for value in values):
        raise ValueError(f"sizes {values}")
    batch, tokens, step, heads = map(int, values)
    return LatentAttention(batch=batch, tokens=tokens, context=step, heads=heads, **DEEPSEEK)


def latent_wanted(columns: Mapping[str, Sequence[Any]], dtype: str, compact: bool) -> list[int]:
    """Rows of an MLA module table of DeepSeek-V3 in `dtype`; a compact profile holds every fourth
    power of two of its lengths."""
    found = []
    for row, gemm in enumerate(columns["gemm_type"]):
        if (
            gemm not in LATENT_GEMM.get(dtype, ())
            or columns["kv_cache_dtype"][row] != LATENT_CACHE[dtype]
        ):
            continue
        if "DeepseekV3" not in str(columns["architecture"][row]):
            continue
        length = max(columns["step"][row], columns["isl"][row])
        spare = columns["num_heads"][row] not in COMPACT_HEADS or columns["batch_size"][row] > 256
        if compact and (spare or length not in (16, 128, 512, 2048, 4096, 8192, 32768)):
            continue
        found.append(row)
    return found
