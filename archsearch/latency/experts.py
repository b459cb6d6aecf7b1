"""What is said of the time of experts, of latent attention and of quantised weights: whose rows it
comes from."""

from __future__ import annotations

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.experts import ROUTING_SKEW
from archsearch.latency.datasheet import FORMAT_SHARE, FORMAT_STD
from archsearch.latency.model import LatencyModel
from archsearch.profiles import Profile
from archsearch.workload import WEIGHT_BYTES


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
        whose = (
            "rows of this shape"
            if own
            else (
                "rows of other shapes"
                if shapes
                else "no rows in this dtype, priced as plain GEMMs that move as many bytes (30 %)"
            )
        )
        skew = ROUTING_SKEW if target.routing_skew is None else target.routing_skew
        words += f"; experts: {whose}, routing skew {skew:g}"
    if target.kv_lora_rank:
        known = any(
            row.kind == "latent_attention" and row.dtype == dtype for row in profile.rows.values()
        )
        several = (
            "several tokens at once are modelled"
            if known
            else "no rows, priced as its projections and one wide KV head (30 %)"
        )
        words += f"; latent attention: {several}"
    return words


def format_words(latency: object, target: Architecture) -> str:
    """In a clause how weights in a format of their own are priced; "" for weights in the dtype of
    the pass."""
    name = target.weight_format
    if not name:
        return ""
    known = isinstance(latency, LatencyModel) and any(
        row.kind == "gemm" and row.sizes().get("format") == name
        for row in latency.profile.rows.values()
    )
    whose = (
        "rows of such kernels"
        if known
        else (
            f"modelled from their bytes at {FORMAT_SHARE[name]:.0%} of the bandwidth that 16-bit"
            f" kernels reach (a GEMM within {FORMAT_STD[name]:.0%})"
        )
    )
    return (
        f"; weights in {name}, {WEIGHT_BYTES[name]:g} bytes each: {whose}; cache, embedding and"
        " head in 16 bits"
    )
