"""Kernels compute what they claim to time; forward runs and layer stacks are the model's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import Attention, Elementwise, Gemm
from archsearch.models.drafts import build_draft
from archsearch.profiling import kernels, layers
from archsearch.profiling.timer import WeightPool

ARCH = Architecture(64, 128, 3, 4, 2, 16, 96)


@pytest.fixture(scope="module")
def pool() -> WeightPool:
    return WeightPool(4 << 20, torch.float32)


def captured(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple]:
    """What a functional is called with."""
    seen: list[tuple] = []
    original = getattr(torch.nn.functional, name)

    def spy(*args, **kwargs):
        seen.append((args, kwargs))
        return original(*args, **kwargs)

    monkeypatch.setattr(kernels.functional, name, spy)
    return seen


@pytest.mark.parametrize("m", [1, 5])
def test_gemm(pool: WeightPool, monkeypatch: pytest.MonkeyPatch, m: int) -> None:
    seen = captured(monkeypatch, "linear")
    run = kernels.gemm(Gemm(m, 48, 64), pool, 1 << 20)
    outputs = [run() for _ in range(3)]
    for ((x, weight), _), output in zip(seen, outputs, strict=True):
        assert x.shape == (1, m, 64) and weight.shape == (48, 64) and output.shape == (1, m, 48)
        assert torch.allclose(output[0], x[0] @ weight.T, atol=1e-5)
    assert len({weight.data_ptr() for (_, weight), _ in seen}) == 3  # the weight rotates


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_attention_is_softmax_attention(
    pool: WeightPool,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    window: int | None,
    heads: tuple[int, int],
) -> None:
    seen = captured(monkeypatch, "scaled_dot_product_attention")
    op = Attention(2, tokens, 20, *heads, 16, window)
    output = kernels.attention(op, pool, 1)()
    (query, key, value), options = seen[0]
    # As transformers: under a mask (several tokens) KV heads are repeated, grouped ones would run
    # the slow kernel on a GPU.
    kv_heads = heads[1] if tokens == 1 else heads[0]
    assert options["enable_gqa"] == (tokens == 1 and heads[0] != heads[1])
    assert (
        key.shape == value.shape == (2, kv_heads, op.keys(), 16)
    )  # what a window of the cache holds, and the new tokens
    assert op.keys() == (20 + tokens if window is None else 7 + tokens)
    repeat = heads[0] // kv_heads
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(16)
    for new in range(tokens):  # a new token sees the cache, itself and the new ones before it
        scores[:, :, new, op.keys() - tokens + new + 1 :] = -torch.inf
    assert torch.allclose(output, scores.softmax(-1) @ value, atol=1e-5)


def test_attention_rotates_over_copies(pool: WeightPool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = captured(monkeypatch, "scaled_dot_product_attention")
    run = kernels.attention(Attention(1, 1, 31, 2, 2, 16), pool, 4 * 2 * 2 * 31 * 16 * 4)
    for _ in range(5):
        run()
    first = [call[0][1] for call in seen]
    assert not torch.equal(first[0], first[1]) and torch.equal(first[0], first[4])


def test_attention_without_a_cache(pool: WeightPool) -> None:
    assert kernels.attention(Attention(1, 1, 0, 2, 2, 16), pool, 1)().shape == (1, 2, 1, 16)


@pytest.mark.parametrize("name", ["norm", "act", "add", "rope", "embed"])
def test_elementwise_kernels_give_as_many_numbers(pool: WeightPool, name: str) -> None:
    assert kernels.elementwise(Elementwise(name, 130), pool)().shape == (1, 1, 130)


def test_unknown_elementwise_is_a_bug(pool: WeightPool) -> None:
    with pytest.raises(ValueError, match="no kernel"):
        kernels.elementwise(Elementwise("tanh", 8), pool)


# -- whole layers and models
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arch", [ARCH, ARCH.replace(window_pattern="S", sliding_window=8)], ids=["full", "sliding"]
)
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_forward_run_leaves_the_cache_as_it_was(arch: Architecture, tokens: int) -> None:
    """Any number of passes: the same length, the same keys, the same logits."""
    model = build_draft(arch)
    with torch.inference_mode():
        run = layers.ForwardRun(model, batch=1, context=20)
        before = [layer.keys.clone() for layer in run.cache.layers]
        step = run.step(tokens)
        logits = [step().logits for _ in range(3)]
    assert run.cache.get_seq_length() == 20
    for old, layer in zip(before, run.cache.layers, strict=True):
        # A sliding layer may show less of the past once it has recorded more than its window; what
        # it reads must be equal.
        shown = min(old.shape[-2], layer.keys.shape[-2])
        assert shown >= (20 if arch.sliding_window is None else arch.sliding_window - 1)
        assert torch.equal(old[..., -shown:, :], layer.keys[..., -shown:, :])
    assert logits[0].shape[:2] == (1, tokens)
    assert torch.allclose(logits[0], logits[1], atol=1e-5) and torch.allclose(
        logits[0], logits[2], atol=1e-5
    )


def read_into(cache: DynamicCache, model: Any, context: torch.Tensor) -> None:
    """The context's own keys and values, in the places of those that stand for them."""
    read = DynamicCache(config=model.config)
    for layer in read.layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    model(context, past_key_values=read, use_cache=True)
    for mine, theirs in zip(cache.layers, read.layers, strict=True):
        assert mine.keys.shape == theirs.keys.shape and mine.values.shape == theirs.values.shape
        mine.keys.copy_(theirs.keys)
        mine.values.copy_(theirs.values)


@pytest.mark.parametrize(
    "arch", [ARCH, ARCH.replace(window_pattern="S", sliding_window=8)], ids=["full", "sliding"]
)
def test_a_forward_run_is_the_model_s_pass(arch: Architecture) -> None:
    """Against the same tokens in one pass without a cache, the context read in its place."""
    model = build_draft(arch)
    context = torch.randint(0, 96, (1, 10))
    with torch.inference_mode():
        run = layers.ForwardRun(model, batch=1, context=10)
        read_into(run.cache, model, context)
        torch.manual_seed(3)
        new = run.step(3)().logits
        torch.manual_seed(3)
        ids = torch.randint(0, 96, (1, 3))
        whole = model(torch.cat([context, ids], dim=1)).logits[:, -3:]
    assert torch.allclose(new, whole, atol=1e-5)


def test_a_forward_run_without_context_and_a_trimmed_draft(pool: WeightPool) -> None:
    model = layers.build_model(ARCH.replace(draft_vocab_size=32), pool)
    with torch.inference_mode():
        run = layers.ForwardRun(model, batch=2, context=0)
        output = run.step(2)()
    assert output.logits.shape == (2, 2, 96) and run.cache.get_seq_length() == 0
    assert int(torch.isfinite(output.logits[0, 0]).sum()) == 32


def test_build_model_writes_every_weight(pool: WeightPool) -> None:
    model = layers.build_model(ARCH, pool)
    for name, parameter in model.named_parameters():
        assert float((parameter != 0).float().mean()) > 0.99, name


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_layer_stack_is_the_model_s_layers(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Its output equals the same layers inside the whole model, fed the same hidden states and
    past."""
    kept: dict[str, Any] = {}
    original = layers.build_model

    def build(arch: Architecture, pool: WeightPool) -> torch.nn.Module:
        kept["model"] = original(arch, pool)
        return kept["model"]

    def filled(*args: Any) -> DynamicCache:
        kept["cache"] = original_cache(*args)
        return kept["cache"]

    original_cache = layers._cache
    monkeypatch.setattr(layers, "build_model", build)
    monkeypatch.setattr(layers, "_cache", filled)
    ids = torch.randint(0, 64, (1, 12))
    pool = WeightPool(4 << 20, torch.float32)
    with torch.inference_mode():
        torch.manual_seed(1)
        run = layers.layer_stack(ARCH, pool, batch=1, context=12, tokens=tokens)
        inner = kept["model"].model
        read_into(kept["cache"], inner, ids)
        first, second = run(), run()
        torch.manual_seed(1)
        hidden = torch.randn(1, tokens, 64)
        inner.norm = torch.nn.Identity()  # the stack ends before the final norm
        embedded = torch.cat([inner.embed_tokens(ids), hidden], dim=1)
        expected = inner(inputs_embeds=embedded, use_cache=False).last_hidden_state[:, -tokens:]
    assert len(inner.layers) == 3
    assert torch.allclose(first, expected, atol=1e-4) and torch.equal(first, second)


def test_the_flusher_reads_its_block() -> None:
    assert float(layers.cache_flusher(4000)()) == 1000.0
