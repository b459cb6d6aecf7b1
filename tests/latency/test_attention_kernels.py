"""Whose attention a profile holds is said, in the words of each kind of profile."""

from __future__ import annotations

import pytest

from archsearch.hardware.device import load_device
from archsearch.latency.attention import attention_words, serving_attention
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
    assert serving_attention(measured("rtx5090", [])).std == 0.18


def test_eager_rows_say_what_transformers_called() -> None:
    profile = measured("h200", rows("eager", "cuDNN attention"))
    assert attention_words(profile, "eager") == "attention: cuDNN attention"
    assert attention_words(measured("h200", rows("eager", "")), "eager") == ""
    assert attention_words(Profile({"kind": "cpu"}, {}), "eager") == ""
