"""What a row of the expert tables timed: the rules of routing, the formats, and rows that are left
out."""

from __future__ import annotations

import pandas as pd
import pytest

from archsearch.architecture.ops import Experts
from archsearch.hardware.device import load_device
from archsearch.importers.experts import (
    badly_tuned,
    experts_of,
    formats_of,
    latent_of,
    latent_wanted,
    touched_by_rule,
    wanted,
)

H200, B200 = load_device("h200"), load_device("b200")


@pytest.mark.parametrize(
    ("rule", "experts", "top_k", "tokens", "touched"),
    [
        # counted with the collector's own code (torch), mean of five draws for power laws
        ("balanced", 128, 8, 4, 32),
        ("balanced", 128, 8, 32, 128),
        ("balanced", 256, 8, 16, 128),
        ("power_law_1.2", 128, 8, 8, 44),
        ("power_law_1.2", 128, 8, 16, 59),
        ("power_law_1.01", 128, 8, 16, 65),
        ("power_law_1.2", 128, 4, 32, 59),
        ("power_law_1.01", 256, 8, 8, 64),
    ],
)
def test_experts_that_a_rule_touches(
    rule: str, experts: int, top_k: int, tokens: int, touched: float
) -> None:
    found, pairs = touched_by_rule(rule, experts, top_k, tokens, 1)
    assert found == pytest.approx(touched, rel=0.06) and pairs == tokens * top_k


def test_the_busiest_of_several_ranks() -> None:
    found, pairs = touched_by_rule("power_law_1.2", 128, 8, 8, 4)
    assert found <= 32 and pairs >= 8 * 8 / 4  # more than its share
    assert touched_by_rule("balanced", 128, 8, 16, 4) == (32, 32)
    with pytest.raises(ValueError, match="zipf"):
        touched_by_rule("zipf", 8, 2, 1, 1)


def columns(**changes: object) -> pd.DataFrame:
    row = {
        "num_tokens": 4.0,
        "hidden_size": 2048.0,
        "inter_size": 768.0,
        "topk": 8.0,
        "num_experts": 128.0,
        "moe_tp_size": 2.0,
        "moe_ep_size": 1.0,
        "moe_dtype": "bfloat16",
        "distribution": "balanced",
        "kernel_source": "k",
    } | changes
    return pd.DataFrame([row])


def test_a_row_is_one_ranks_share() -> None:
    op = experts_of(columns().iloc[0], formats_of(H200, "bfloat16", "vllm"))
    assert op == Experts(tokens=4, hidden=2048, inter=384, experts=128, pairs=32, touched=32.0)


MXFP4 = {"moe_dtype": "w4a16_mxfp4", "hidden_size": 2880.0, "inter_size": 2880.0, "topk": 4.0}


@pytest.mark.parametrize(
    ("changes", "dtype", "framework", "kept"),
    [
        ({}, "bfloat16", "vllm", True),
        ({}, "float8_e4m3fn", "vllm", False),
        ({"moe_dtype": "fp8"}, "float8_e4m3fn", "vllm", False),  # per tensor: badly tuned
        ({"moe_dtype": "fp8_block"}, "float8_e4m3fn", "vllm", True),
        (MXFP4, "bfloat16", "vllm", True),
        (MXFP4, "bfloat16", "sglang", False),  # reads 16-bit weights on Hopper
        (
            {"hidden_size": 7168.0, "inter_size": 2048.0, "num_experts": 256.0},
            "bfloat16",
            "vllm",
            False,
        ),  # routed by groups
        (
            {"hidden_size": 7168.0, "inter_size": 2048.0, "num_experts": 256.0},
            "bfloat16",
            "trtllm",
            True,
        ),
        ({"kernel_source": "moe_torch_flow_min_latency"}, "bfloat16", "trtllm", False),
        (
            {"num_tokens": 48.0},
            "bfloat16",
            "vllm",
            False,
        ),  # not among those that a compact profile keeps
    ],
)
def test_rows_that_say_what_their_labels_say(
    changes: dict, dtype: str, framework: str, kept: bool
) -> None:
    assert list(wanted(columns(**changes), dtype, framework, H200, compact=True)) == [kept]


def test_blackwell_multiplies_four_bits_with_eight() -> None:
    assert formats_of(B200, "bfloat16", "trtllm")["w4a8_mxfp4_mxfp8"] == "mxfp4"
    assert "w4a8_mxfp4_mxfp8" not in formats_of(B200, "bfloat16", "vllm")


def test_kernels_far_below_the_bandwidth_are_named() -> None:
    def rows(share: float, inter: int) -> dict[Experts, float]:
        ops = [
            Experts(m, 2048, inter, 128, 8 * m, float(touched))
            for m, touched in ((1, 8), (2, 16), (4, 30), (8, 50), (16, 80))
        ]
        return {
            op: 20e-6 + 2 * op.weight_elements() / (share * H200.bandwidth_bytes_per_s)
            for op in ops
        }

    good, bad = rows(0.85, 768), rows(0.2, 384)
    assert badly_tuned(good | bad, H200, "bfloat16") == set(bad)


def test_rows_of_latent_blocks() -> None:
    row = {
        "batch_size": 8.0,
        "isl": 1.0,
        "step": 4096.0,
        "num_heads": 16.0,
        "gemm_type": "fp8_block",
        "kv_cache_dtype": "fp8",
        "architecture": "DeepseekV3ForCausalLM",
    }
    frame = pd.DataFrame([row])
    other = frame.assign(architecture="KimiK25")
    assert list(latent_wanted(frame, "float8_e4m3fn", compact=True)) == [True]
    assert list(latent_wanted(frame, "bfloat16", compact=True)) == [False]
    assert list(latent_wanted(other, "float8_e4m3fn", compact=False)) == [False]
    op = latent_of(frame.iloc[0])
    assert (op.batch, op.tokens, op.context, op.heads, op.latent) == (8, 1, 4096, 16, 576)
