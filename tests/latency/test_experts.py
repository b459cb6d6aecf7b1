"""Experts and latent attention: priced from rows between which a law holds, and from other kernels
where there are none."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import archsearch.architecture.catalogue as catalogue
from archsearch.architecture.ops import Attention, Experts, Gemm, LatentAttention, layer_ops
from archsearch.latency.attention import kernel_words
from archsearch.latency.ops import OpModel, stand_ins
from archsearch.profiles import Measurement, Profile
from tests.latency.test_op_model import attention_s, decodes, gemm_s, gemms, profile_of, row

BANDWIDTH = 3e12
V3 = catalogue.load("deepseek-v3").architecture
BLOCK = layer_ops(V3, batch=8, tokens=1, context=4096, window=None, ranks=8)
DEEPSEEK = next(op for op in BLOCK if isinstance(op, LatentAttention))


def experts_s(op: Experts) -> float:
    """20 us and the experts touched at 85 % of the bandwidth."""
    return 20e-6 + 2 * op.weight_elements() / (0.85 * BANDWIDTH)


def latent_s(op: LatentAttention) -> float:
    return 50e-6 + 2 * (op.weight_elements() + op.cache_elements()) / (0.8 * BANDWIDTH)


def mixture(hidden: int, inter: int, tokens: int, touched: float, experts: int = 128) -> Experts:
    return Experts(tokens, hidden, inter, experts, 8 * tokens, touched)


def expert_rows() -> list[Measurement]:
    sizes = [(2048, 768), (2048, 384), (4096, 1536), (4096, 768)]
    counts = [
        (1, 8.0),
        (2, 16.0),
        (4, 30.0),
        (8, 50.0),
        (16, 80.0),
        (32, 110.0),
        (8, 64.0),
        (16, 60.0),
    ]
    random = np.random.default_rng(0)
    ops = [mixture(*size, *count) for size in sizes for count in counts]
    return [row(op, experts_s(op) * math.exp(0.02 * random.standard_normal())) for op in ops]


@pytest.fixture(scope="module")
def plain() -> list[Measurement]:
    return [row(op, gemm_s(op)) for op in gemms()] + [row(op, attention_s(op)) for op in decodes()]


@pytest.fixture(scope="module")
def model(plain: list[Measurement]) -> OpModel:
    latent = [
        replace(DEEPSEEK, batch=batch, context=length - 1, heads=heads)
        for batch in (1, 4, 16, 64)
        for length in (17, 512, 4096, 32768)
        for heads in (16, 128)
    ]
    return OpModel(
        profile_of([*plain, *expert_rows(), *(row(op, latent_s(op)) for op in latent)]),
        "bfloat16",
        "graph",
    )


def test_experts_between_the_rows_follow_what_is_touched(model: OpModel) -> None:
    """Counts that no row has: what uniform routing touches at token counts between the rows'."""
    asked = [
        mixture(h, i, m, 128 * (1 - (1 - 8 / 128) ** m))
        for h, i in ((2048, 768), (4096, 1536))
        for m in (3, 5, 7, 12, 24)
    ]
    errors = [abs(model.op_s(op, True)[0] / experts_s(op) - 1) for op in asked]
    assert max(errors) < 0.08 and np.median(errors) < 0.03
    assert model.source(asked[0]) == "modelled"


def test_another_shape_is_told_from_its_bytes(model: OpModel) -> None:
    asked = mixture(3072, 1024, 8, 51.6)
    assert model.op_s(asked, True)[0] == pytest.approx(experts_s(asked), rel=0.2)


def test_latent_attention_of_several_tokens_costs_more_than_one_and_less_than_as_many(
    model: OpModel,
) -> None:
    one = model.op_s(DEEPSEEK, True)[0]
    several = [model.op_s(replace(DEEPSEEK, tokens=n), True)[0] for n in (2, 4, 8)]
    assert (
        one <= several[0] <= several[1] <= several[2] < 2 * one
    )  # 1 to 1.6 times one: rows of 16 and of 128 heads bound it
    assert model.op_s(replace(DEEPSEEK, tokens=8), True)[1] >= 0.25


def test_without_rows_other_kernels_stand_in(plain: list[Measurement]) -> None:
    bare = OpModel(profile_of(plain), "bfloat16", "graph")
    for op in (mixture(4096, 1536, 8, 52.0), DEEPSEEK):
        seconds, std = bare.op_s(op, True)
        assert std >= 0.3 and seconds > 2 * op.weight_elements() / BANDWIDTH
    found = stand_ins(mixture(4096, 1536, 8, 52.0))
    assert (
        sum(op.weight_elements() for op in found if isinstance(op, Gemm))
        == mixture(4096, 1536, 8, 52.0).weight_elements()
    )
    weights = sum(op.weight_elements() for op in stand_ins(DEEPSEEK) if isinstance(op, Gemm))
    assert weights == DEEPSEEK.weight_elements()
    assert (
        sum(op.kv_elements() for op in stand_ins(DEEPSEEK) if isinstance(op, Attention))
        == DEEPSEEK.cache_elements()
    )


def test_four_bits_are_read_as_a_quarter() -> None:
    op = mixture(2880, 2880, 4, 15.0)
    assert replace(op, format="mxfp4").weight_elements() == pytest.approx(
        op.weight_elements() * 0.53125 / 2, abs=1
    )


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("qwen3-30b-a3b", "rows of this shape"),
        ("mixtral-8x7b", "rows of other shapes"),
        ("phi-4", ""),
    ],
)
def test_words_say_whose_rows(plain: list[Measurement], target: str, words: str) -> None:
    profile: Profile = profile_of([*plain, *expert_rows()])
    told = kernel_words(profile, catalogue.load(target).architecture, "bfloat16")
    assert words in told and bool(told) == bool(words)
    assert "routing skew 0.2" in kernel_words(
        profile, catalogue.load("mixtral-8x7b").architecture.replace(routing_skew=0.2), "bfloat16"
    )
    assert "no rows" in kernel_words(
        profile, catalogue.load("deepseek-v3").architecture, "bfloat16"
    )


def test_more_tokens_take_no_less() -> None:
    """DeepSeek-V3's attention on a B200 is of two kernels: for one token the tables say 10.6 ms a
    pass, for four 8.9."""
    from archsearch.pipeline.latency import choose_latency
    from archsearch.workload import WorkloadRequest

    source, workload = choose_latency(
        WorkloadRequest(gpu="b200", engine="tensorrt-llm", tensor_parallel=8), V3
    )
    one, *more = (source.latency.verify_s(V3, workload, gamma).value for gamma in range(5))
    assert all(seconds >= one for seconds in more)
