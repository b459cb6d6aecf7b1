"""Targets of 2025: their config.json as published, held against the published counts, or refused by
the part not modelled."""

from __future__ import annotations

from typing import Any

import pytest

from archsearch.architecture import catalogue
from archsearch.architecture.counts import parameters
from archsearch.architecture.hf_config import from_hf_config
from archsearch.architecture.hf_families import NOT_MODELLED
from archsearch.errors import InvalidShapeError
from benchmarks.search_speed import active_parameters

GLM_AIR: dict[str, Any] = {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "head_dim": 128,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
GLM = GLM_AIR | {
    "first_k_dense_replace": 3,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_hidden_layers": 92,
    "use_qk_norm": True,
}
KIMI: dict[str, Any] = {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
}
MAVERICK: dict[str, Any] = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "vocab_size": 202048,
        "attention_chunk_size": 8192,
    },
}
# As google/gemma-3-4b-it has it: neither the vocabulary nor the heads.
GEMMA: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
}


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [(GLM_AIR, 106, 12), (GLM, 355, 32), (KIMI, 1026, 32), (MAVERICK, 400, 17), (GEMMA, 3.9, 3.9)],
    ids=["GLM-4.5-Air", "GLM-4.5", "Kimi-K2", "Llama-4-Maverick", "Gemma-3-4B"],
)
def test_parameters_are_those_that_are_published(
    config: dict[str, Any], billions: float, active: float
) -> None:
    arch = from_hf_config(config)
    assert parameters(arch) / 1e9 == pytest.approx(billions, rel=0.012)
    assert active_parameters(arch) / 1e9 == pytest.approx(
        active, rel=0.13
    )  # with embedding and head, which not all count


def test_every_second_layer_with_experts_runs_as_much_as_half_of_them_first() -> None:
    arch = from_hf_config(MAVERICK)
    assert (arch.first_dense_layers, arch.moe_layers, arch.windows().count(None)) == (24, 24, 12)
    listed = MAVERICK["text_config"] | {
        "moe_layers": list(range(1, 48, 2)),
        "interleave_moe_layer_step": 1,
    }
    assert from_hf_config({**MAVERICK, "text_config": listed}) == arch


def test_kimi_is_served_in_the_fp8_it_was_published_in() -> None:
    assert (
        from_hf_config(KIMI).served_dtype == "float8_e4m3fn"
        and from_hf_config(KIMI).kv_lora_rank == 512
    )


@pytest.mark.parametrize("model_type", sorted(NOT_MODELLED))
def test_what_is_not_modelled_is_named(model_type: str) -> None:
    with pytest.raises(InvalidShapeError, match=r"has .*(attention|layers|streams).*not modelled"):
        from_hf_config({"model_type": model_type, "hidden_size": 2048})


def test_qwen3_coder_has_the_shape_of_qwen3_30b() -> None:
    coder, base = (
        catalogue.load(name).architecture for name in ("qwen3-coder-30b-a3b", "qwen3-30b-a3b")
    )
    assert (
        coder.replace(
            max_position_embeddings=base.max_position_embeddings, rope_theta=base.rope_theta
        )
        == base
    )
