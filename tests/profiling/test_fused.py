"""The kernels of graph mode compute what the model's own do: lean decoder against the Hugging Face
module, attention and masks against the definition."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import AllReduce, Attention, Elementwise, Gemm, sample_op
from archsearch.models.drafts import build_draft
from archsearch.profiling import kernels, layers
from archsearch.profiling.fused import Fused, agree, attend, fused_for, lower_right_mask
from archsearch.profiling.timer import WeightPool
from tests.doubles.lean_model import lean_of

ARCH = Architecture(64, 128, 3, 4, 2, 16, 96)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pool() -> WeightPool:
    return WeightPool(4 << 20, torch.float32)


# -- attention
# --------------------------------------------------------------------------------------------------


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Softmax attention written out token by token, in float64."""
    batch, tokens, heads, width = query.shape
    keys, group = key.shape[1], heads // key.shape[2]
    out = torch.zeros(batch, tokens, heads, width, dtype=torch.float64)
    for b in range(batch):
        for i in range(tokens):
            last = keys - tokens + i
            first = 0 if window is None else max(0, last - window + 1)
            for h in range(heads):
                k, v = (
                    key[b, first : last + 1, h // group].double(),
                    value[b, first : last + 1, h // group].double(),
                )
                weights = (k @ query[b, i, h].double() / math.sqrt(width)).softmax(0)
                out[b, i, h] = weights @ v
    return out


@pytest.mark.parametrize("tokens", [1, 2, 5, 17])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_of_tokens_to_verify(tokens: int, window: int | None, kv_heads: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, tokens, 4, 16)
    cache = torch.randn(2, 30, 2, kv_heads, 16)  # strided, as the static cache is
    got = attend(query, cache[:, :, 0], cache[:, :, 1], window)
    assert got.shape == query.shape
    assert torch.allclose(
        got.double(), reference(query, cache[:, :, 0], cache[:, :, 1], window), atol=1e-5
    )


@pytest.mark.parametrize("tokens", [1, 3])
def test_grouped_heads_are_packed_and_not_repeated(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a mask grouped heads would run torch's math kernel on CUDA, and repeated ones read the
    cache once a group."""
    seen: list[tuple[Any, ...]] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(query: Any, key: Any, value: Any, **options: Any) -> Any:
        seen.append((tuple(query.shape), tuple(key.shape), options))
        return original(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    attend(torch.randn(2, tokens, 8, 16), torch.randn(2, 30, 2, 16), torch.randn(2, 30, 2, 16))
    query, key, options = seen[0]
    assert query == (2, 2, 4 * tokens, 16) and key == (2, 2, 30, 16) and "enable_gqa" not in options
    assert (options["attn_mask"] is None) == (tokens == 1)


def test_the_mask_is_aligned_to_the_last_key() -> None:
    seen = lower_right_mask(3, 5, None, CPU)
    assert seen.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert lower_right_mask(2, 5, 2, CPU).int().tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


def test_the_flash_call_fits_torch_s_schema() -> None:
    """On the meta device: the arguments bind, and the output has the query's shape."""
    query = torch.empty(2, 5, 8, 64, device="meta", dtype=torch.bfloat16)
    key = torch.empty(2, 100, 2, 64, device="meta", dtype=torch.bfloat16)
    out = torch.ops.aten._flash_attention_forward(
        query,
        key,
        key,
        None,
        None,
        5,
        100,
        0.0,
        True,
        False,
        window_size_left=-1,
        window_size_right=0,
    )
    assert out[0].shape == query.shape


# -- small kernels
# ----------------------------------------------------------------------------------------------


def test_plain_kernels_are_the_definitions() -> None:
    torch.manual_seed(0)
    plain = Fused()
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    total = x + residual
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    kept = residual.clone()
    assert torch.allclose(
        plain.rms_norm(x, weight, 1e-5, kept), expected, atol=1e-6
    ) and torch.equal(kept, total)
    assert torch.allclose(
        plain.silu_mul(torch.cat([x, residual], -1)), x * torch.sigmoid(x) * residual, atol=1e-6
    )
    rows, angle = torch.randn(2, 12), torch.rand(2, 2)  # two heads of 4 to rotate, one to leave
    rotated = rows.clone()
    plain.rope_(rotated, angle.cos(), angle.sin(), 2)
    for row in range(2):
        for head in range(2):
            for i in range(2):
                a, b = rows[row, 4 * head + i], rows[row, 4 * head + 2 + i]
                turned = torch.complex(a, b) * torch.polar(torch.tensor(1.0), angle[row, i])
                assert rotated[row, 4 * head + i] == pytest.approx(turned.real.item(), abs=1e-6)
                assert rotated[row, 4 * head + 2 + i] == pytest.approx(turned.imag.item(), abs=1e-6)
    assert torch.equal(rotated[:, 8:], rows[:, 8:])


def test_agree_can_say_no() -> None:
    class Wrong(Fused):
        def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
            return super().silu_mul(x) * 1.01

    assert agree(Fused(), Fused(), CPU, torch.bfloat16)
    assert not agree(Wrong(), Fused(), CPU, torch.float32)


def test_a_cpu_has_plain_kernels() -> None:
    assert not fused_for(CPU, torch.float32).compiled


@pytest.mark.slow
def test_triton_kernels_compute_the_same() -> None:
    """In Triton's interpreter, which needs no GPU; skipped where Triton is not installed."""
    pytest.importorskip("triton")
    code = (
        "import torch; from archsearch.profiling import triton_kernels; from"
        " archsearch.profiling.fused import Fused, agree;assert all(agree(Fused(triton_kernels),"
        " Fused(), torch.device('cpu'), dtype) for dtype in (torch.float32, torch.bfloat16,"
        " torch.float16))"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "TRITON_INTERPRET": "1"}
    )


# -- the lean decoder
# -------------------------------------------------------------------------------------------

SHAPES = {
    "gqa": ARCH,
    "mqa tied": ARCH.replace(num_key_value_heads=1, tie_word_embeddings=True),
    "mha": ARCH.replace(num_key_value_heads=4),
    "sliding": ARCH.replace(window_pattern="SL", sliding_window=8),
    "qk norm": ARCH.replace(qk_norm=True),
    "attention bias": ARCH.replace(attention_bias=True),
    "mlp bias": ARCH.replace(mlp_bias=True),
    "trimmed": ARCH.replace(draft_vocab_size=40),
    "other rope": ARCH.replace(rope_theta=500000.0),
}


@pytest.mark.parametrize("arch", SHAPES.values(), ids=SHAPES)
def test_the_lean_decoder_is_the_hugging_face_module(arch: Architecture) -> None:
    """A prompt of 20 tokens, then 5 to verify, then one of them again: the same logits as one whole
    pass of the module."""
    torch.manual_seed(0)
    model = build_draft(arch)
    for (
        parameter
    ) in model.parameters():  # far from the tame initialisation, where much would agree by chance
        parameter.data = parameter.data + 0.2 * torch.randn_like(parameter)
    ids = torch.randint(0, 96, (2, 25))
    with torch.inference_mode():
        expected = model(ids).logits[..., : arch.head_rows]
        run = layers.LeanRun(lean_of(model, arch, Fused()), batch=2, capacity=25)
        prompt, verified = run.forward(ids[:, :20], 0), run.forward(ids[:, 20:], 20)
        again = run.forward(ids[:, 22:23], 22)
    assert float(expected.std()) > 0.5
    assert torch.allclose(torch.cat([prompt, verified], dim=1), expected, atol=2e-4)
    assert torch.allclose(again, expected[:, 22:23], atol=2e-4)


def test_a_lean_step_repeats_and_layers_alone_leave_the_input(pool: WeightPool) -> None:
    with torch.inference_mode():
        decoder = layers.LeanDecoder.random(ARCH, pool, Fused())
        run = layers.LeanRun(decoder, batch=2, capacity=12, pool=pool)
        step, stack = run.step(3, 9), run.layer_step(1, 9)
        first, second = step(), step()
        assert first.shape == (2, 3, 96) and torch.equal(first, second)
        assert all(torch.equal(a, b) for a, b in zip(stack(), stack(), strict=True))
    held = sum(
        tensor.numel()
        for layer in decoder.layers
        for tensor in vars(layer).values()
        if isinstance(tensor, torch.Tensor)
    )
    assert held == 3 * (
        64 * (64 + 64 + 64) + 3 * 64 * 128 + 2 * 64
    )  # qkv and out, gate, up and down, two norms


def test_what_the_lean_decoder_cannot_hold() -> None:
    assert layers.lean_supported(ARCH)
    for change in ({"gated_mlp": False}, {"learned_positions": 64}, {"rms_norm": False}):
        assert not layers.lean_supported(ARCH.replace(**change))


# -- calls for a graph
# ------------------------------------------------------------------------------------------


def test_gemm_calls_rotate_over_distinct_weights(pool: WeightPool) -> None:
    cold = kernels.graph_calls(Gemm(2, 48, 64), pool, 1 << 20, Fused())
    weights = {call.args[1].data_ptr() for call in cold if isinstance(call, partial)}
    assert len(cold) == len(weights) == -(-(1 << 20) // (4 * 3072))  # no less than the working set
    warm = kernels.graph_calls(Gemm(2, 48, 64), pool, 1, Fused())
    assert (
        len(warm) == kernels.GRAPH_CALLS
        and len({call.args[1].data_ptr() for call in warm if isinstance(call, partial)}) == 1
    )
    x, weight = warm[0].args if isinstance(warm[0], partial) else (None, None)
    assert torch.allclose(warm[0](), x @ weight.T, atol=1e-5)


def test_small_weights_are_capped_at_what_a_graph_holds() -> None:
    pool = WeightPool(16 << 20, torch.bfloat16)
    assert (
        len(kernels.graph_calls(Gemm(1, 16, 64), pool, 16 << 20, Fused()))
        == kernels.MAX_GRAPH_CALLS
    )


def test_attention_calls_append_and_attend(
    pool: WeightPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def spy(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        seen.append((query, key, value, window))
        return attend(query, key, value, window)

    monkeypatch.setattr(kernels, "attend", spy)
    op = Attention(2, 5, 30, 4, 2, 16)
    calls = kernels.graph_calls(op, pool, 40 * 2 * 2 * 35 * 2 * 16 * 4, Fused())
    assert len(calls) == 40
    for call in calls[:3]:
        assert call().shape == (2, 5, 4, 16)  # type: ignore[attr-defined]
    assert len({key.data_ptr() for _, key, _, _ in seen}) == 3
    assert all(
        torch.equal(key[:, -5:], seen[0][1][:, -5:]) for _, key, _, _ in seen
    )  # the same new keys in every copy
    assert not torch.equal(seen[0][1][:, :-5], seen[1][1][:, :-5])
    assert seen[0][1].shape == (2, op.keys(), 2, 16)


def test_a_window_cuts_the_keys_of_the_call(
    pool: WeightPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    monkeypatch.setattr(
        kernels, "attend", lambda query, key, value, window: lengths.append((key.shape[1], window))
    )
    kernels.graph_calls(Attention(1, 3, 100, 2, 2, 16, window=8), pool, 1, Fused())[0]()
    assert lengths == [(10, 8)]


@pytest.mark.parametrize("name", ["norm", "act", "add", "rope", "embed"])
@pytest.mark.parametrize("elements", [96, 5 * 4096, 17 * 8192, 101])
def test_elementwise_calls(pool: WeightPool, name: str, elements: int) -> None:
    call, *_ = kernels.graph_calls(Elementwise(name, elements), pool, 1, Fused())
    result = call()
    if isinstance(result, torch.Tensor):
        assert result.numel() == elements


def test_row_width_is_a_divisor() -> None:
    assert [kernels._width(elements, 8192) for elements in (17 * 8192, 5 * 4096, 101)] == [
        8192,
        5 * 1024,
        101,
    ]


def test_sampling_takes_the_largest_logit_of_every_token(pool: WeightPool) -> None:
    call, *_ = kernels.graph_calls(Elementwise("sample", 3 * 128256), pool, 1, Fused())
    assert call().shape == (3,)  # type: ignore[attr-defined]


def test_sampling_knows_the_rows_of_several_tokens(pool: WeightPool) -> None:
    """5 x 32000 logits, not one row of 160000."""
    arch = Architecture(64, 128, 1, 2, 2, 32, 32000)
    call, *_ = kernels.graph_calls(sample_op(arch, batch=1, tokens=5), pool, 1, Fused())
    assert call().shape == (5,)  # type: ignore[attr-defined]


def test_float8_gemm() -> None:
    pool = WeightPool(1 << 20, torch.float8_e4m3fn)
    call: Callable[[], torch.Tensor] = kernels.graph_calls(Gemm(3, 48, 64), pool, 1, Fused())[0]  # type: ignore[assignment]
    assert call().shape == (3, 48) and call().dtype == torch.bfloat16
    with pytest.raises(ValueError, match="multiples of 16"):
        kernels.graph_calls(Gemm(3, 40, 64), pool, 1, Fused())
    (large,) = pool.matrices(2048, 1024, 1)
    assert large.dtype == torch.float8_e4m3fn and float((large.float() != 0).float().mean()) > 0.9


def test_an_all_reduce_is_not_one_device_s(pool: WeightPool) -> None:
    with pytest.raises(ValueError, match="one device"):
        kernels.graph_calls(AllReduce(8, 2), pool, 1, Fused())
