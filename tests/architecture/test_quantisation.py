"""Every way in use to write a quantised checkpoint is read in its own width, or named where nobody
prices it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from archsearch.architecture import catalogue
from archsearch.architecture.counts import parameters, weight_bytes
from archsearch.architecture.hf_config import from_hf_config, read_architecture
from archsearch.architecture.hf_families import weight_format
from archsearch.workload import WEIGHT_BYTES

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def compressed(
    layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> dict[str, Any]:
    """As llm-compressor writes it."""
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


FLOAT8 = {
    "num_bits": 8,
    "type": "float",
    "strategy": "channel",
    "symmetric": True,
    "dynamic": False,
}
FLOAT4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
IN_USE: list[tuple[str, dict[str, Any], str]] = [
    (
        "fp8 in blocks",
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
        "float8_e4m3fn",
    ),
    ("fbgemm", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "float8_e4m3fn"),
    ("RedHat fp8", compressed("float-quantized", FLOAT8, TOKEN), "float8_e4m3fn"),
    ("RedHat nvfp4", compressed("nvfp4-pack-quantized", FLOAT4, FLOAT4), "nvfp4"),
    ("RedHat w4a16", compressed("pack-quantized", INT4, None), "int4"),
    (
        "RedHat w8a8",
        compressed("int-quantized", INT8, {**INT8, "strategy": "token", "dynamic": True}),
        "int8",
    ),
    (
        "ModelOpt fp8",
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        "float8_e4m3fn",
    ),
    (
        "ModelOpt nvfp4",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        "nvfp4",
    ),
    ("ModelOpt groups", {**compressed("", FLOAT4, FLOAT4), "quant_method": "modelopt"}, "nvfp4"),
    (
        "AutoAWQ",
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "zero_point": True,
            "version": "gemm",
        },
        "int4",
    ),
    (
        "GPTQ",
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True},
        "int4",
    ),
    ("GPTQ 8", {"quant_method": "gptq", "bits": 8, "group_size": 32}, "int8"),
    (
        "AutoRound",
        {
            "quant_method": "auto-round",
            "bits": 4,
            "data_type": "int",
            "packing_format": "auto_round:auto_gptq",
        },
        "int4",
    ),
    (
        "bitsandbytes",
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "nf4",
    ),
    ("mxfp4", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4"),
    (
        "Quark",
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}},
        "float8_e4m3fn",
    ),
]
NOT_PRICED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}, "hqq"),
    ({"quant_method": "torchao", "quant_type": "int4wo"}, "torchao"),
    ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION"),
    ({"bits": 4}, "without quant_method"),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": FLOAT4}, "group_1": {"weights": FLOAT8}},
        },
        "groups in float8_e4m3fn and nvfp4",
    ),
]


@pytest.mark.parametrize(
    ("config", "expected"), [row[1:] for row in IN_USE], ids=[row[0] for row in IN_USE]
)
def test_a_checkpoint_is_read_in_the_width_it_was_written_in(
    config: dict[str, Any], expected: str
) -> None:
    assert weight_format(config) == expected
    arch = from_hf_config({**LLAMA, "quantization_config": config})
    assert arch.served_dtype == expected
    plain = from_hf_config(LLAMA)
    kept = weight_bytes(arch.in_format(expected), 2)
    outside = (2 * arch.vocab_size + 161) * arch.hidden_size  # tables and norms stay in 16 bits
    layers = (parameters(plain) - outside) * WEIGHT_BYTES[expected]
    assert kept == pytest.approx(2 * outside + layers, rel=1e-6)
    assert kept < 0.56 * weight_bytes(plain, 2)


@pytest.mark.parametrize(("config", "words"), NOT_PRICED, ids=[row[1] for row in NOT_PRICED])
def test_a_method_that_nobody_prices_is_named(config: dict[str, Any], words: str) -> None:
    found = from_hf_config({**LLAMA, "quantization_config": config}).served_dtype
    assert words in found and found not in WEIGHT_BYTES


def test_side_files_of_older_tools_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_architecture(tmp_path).served_dtype == ""
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps(
            {
                "producer": {"name": "modelopt"},
                "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
            }
        )
    )
    assert read_architecture(tmp_path).served_dtype == "nvfp4"
    (tmp_path / "hf_quant_config.json").unlink()
    (tmp_path / "quantize_config.json").write_text(
        json.dumps({"bits": 4, "group_size": 128, "desc_act": False})
    )
    assert read_architecture(tmp_path).served_dtype == "int4"


def test_mxfp4_of_a_mixture_is_of_its_experts_alone() -> None:
    arch = catalogue.load("gpt-oss-120b").architecture
    assert (arch.expert_format, arch.served_dtype, arch.weight_format) == ("mxfp4", "", "")
    qwen = catalogue.load("qwen3-30b-a3b").architecture.in_format("int4")
    assert qwen.expert_format == "int4" and qwen.in_format("").expert_format == ""
    assert arch.in_format("nvfp4").expert_format == "mxfp4"
