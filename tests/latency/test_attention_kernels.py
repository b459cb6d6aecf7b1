"""Whose attention a profile holds is said, in the words of each kind of profile."""

from __future__ import annotations

import pytest

from archsearch.architecture.catalogue import load
from archsearch.architecture.ops import Attention, Part
from archsearch.engine_rounds import engine_rounds
from archsearch.hardware.device import load_device
from archsearch.latency.attention import attention_words, serving_attention, unpacked_s
from archsearch.latency.roofline import RooflineLatency
from archsearch.paths import data_dir
from archsearch.profiles import Measurement, Profile, freeze_shape

SHAPE = {
    "batch": 1,
    "tokens": 1,
    "context": 100,
    "q_heads": 8,
    "kv_heads": 2,
    "head_dim": 64,
    "window": None,
}


def rows(mode: str, *kernels: str) -> list[Measurement]:
    return [
        Measurement(
            "attention",
            freeze_shape(SHAPE | {"context": 100 + i}),
            "bfloat16",
            mode,
            "cold",
            (1e-5,),
            kernel=kernel,
        )
        for i, kernel in enumerate(kernels)
    ]


def measured(device: str, found: list[Measurement]) -> Profile:
    profile = Profile(load_device(device).to_dict(), {"torch": "0"})
    profile.add(found)
    return profile


@pytest.mark.parametrize(
    ("device", "kernel", "share"),
    [
        ("a100", "FlashAttention 2", "18%"),
        ("h100", "FlashAttention 3 and FlashAttention 4", "16%"),
        ("b200", "FlashInfer", "7%"),
    ],
)
def test_imported_tables_name_the_kernels_of_their_framework(
    device: str, kernel: str, share: str
) -> None:
    words = attention_words(
        Profile.load(next((data_dir("profiles") / load_device(device).key).iterdir())), "graph"
    )
    assert words.startswith(f"attention: {kernel}") and words.endswith(
        f"frameworks differ by {share}"
    )


def test_a_measured_gpu_says_that_engines_run_others() -> None:
    words = attention_words(
        measured("h200", rows("graph", "math attention", "FlashAttention 2", "FlashAttention 2")),
        "graph",
    )
    assert (
        words == "graph mode: torch SDPA (FlashAttention 2 and math attention) attention; vLLM runs"
        " FlashAttention 3 on Hopper, frameworks differ by 17%"
    )
    assert "(FlashAttention 2) attention" in attention_words(
        measured("h200", []), "graph"
    )  # made before rows said it
    assert "FlashInfer" in attention_words(measured("b200", []), "graph")
    assert serving_attention("12.0").std == 0.18


def test_eager_rows_say_what_transformers_called() -> None:
    profile = measured("h200", rows("eager", "cuDNN attention"))
    assert attention_words(profile, "eager") == "attention: cuDNN attention"
    assert attention_words(measured("h200", rows("eager", "")), "eager") == ""
    assert attention_words(Profile({"kind": "cpu"}, {}), "eager") == ""


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "keys", "ms"),
    [
        (32, 8, 128, 32_768, 1.336),
        (12, 2, 256, 4_096, 0.375),
        (12, 2, 256, 32_768, 2.9393),
        (12, 2, 256, 200_000, 15.7886),
    ],
)
def test_flash_attention_2_over_several_rows_takes_what_was_published(
    heads: int, kv_heads: int, head_dim: int, keys: int, ms: float
) -> None:
    """vllm-project/flash-attention pull 193: 8 query rows on an RTX 3090, which no profile holds;
    one row took 21 and 27 times less at the two longest."""
    op = Attention(1, 8, keys - 8, heads, kv_heads, head_dim)
    assert unpacked_s(load_device("rtx3090"), op, "bfloat16") == pytest.approx(ms / 1e3, rel=0.15)


@pytest.mark.parametrize("gpu", ["a10", "l4", "l40s", "rtx3090", "rtx4090", "rtx5090", "gb10"])
def test_vllm_runs_flash_attention_2_on_every_card_but_data_centres_new_ones(gpu: str) -> None:
    """As on the A100: no keys are split for several rows, which cost a long cache's pass more than
    its bytes; a token at a time, and in SGLang, costs the bytes."""
    target, device = load("qwen3-32b").architecture, load_device(gpu)

    def taken(engine: str, tokens: int) -> float:
        latency = RooflineLatency(device, "bfloat16", "graph", engine)
        found = latency.pass_s(target, (Part(1, tokens, 32_768), True), 4)
        assert found.std >= 0.3 * found.value
        return found.value

    assert taken("vllm", 1) == pytest.approx(taken("sglang", 1), rel=0.02)
    assert taken("vllm", 5) > 1.05 * taken("sglang", 5)


def test_a_cache_in_8_bits_is_none_of_flash_attention_2() -> None:
    op = Attention(1, 5, 32_768, 16, 2, 128)
    narrow = engine_rounds("vllm", options={"kv_cache_dtype": "fp8"})
    wide, packed = (
        RooflineLatency(load_device("l40s"), "bfloat16", "graph", "vllm", rounds).op_s(op)
        for rounds in (None, narrow)
    )
    assert wide > 5 * packed
