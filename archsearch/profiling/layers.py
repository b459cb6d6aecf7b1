"""Whole decoder layers and models, in the real model code: what the sum of ops misses (launches,
host time, cost per pass)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from archsearch.architecture.architecture import Architecture
from archsearch.models.drafts import build_draft
from archsearch.models.runtime import cheap_initialisation
from archsearch.profiling.fused import Fused, attend, lower_right_mask
from archsearch.profiling.timer import Run, WeightPool


def build_model(arch: Architecture, pool: WeightPool) -> Any:
    """The Hugging Face module of `arch` with every weight written from the pool, in eval mode."""
    with cheap_initialisation(), pool.flat.device:
        model = build_draft(arch, pool.flat.dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                pool.fill(parameter)
    return model.eval()


def _cache(model: Any, batch: int, context: int) -> Any:
    """The cache assisted generation uses: sliding layers keep enough of the past to take rejected
    tokens back. One token is run and repeated: a pass takes as long (seen on a CPU only)."""
    from transformers import DynamicCache

    cache: Any = DynamicCache(config=model.config)
    for layer in cache.layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    if context:
        first = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        model(first, past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            sides = (layer.keys, layer.values)
            layer.update(*(side.repeat(1, 1, context - 1, 1) for side in sides))
    return cache


class ForwardRun:
    """Repeatable forward passes of `tokens` new tokens against a cache of `context`: each call
    leaves the cache as it was."""

    def __init__(self, model: Any, *, batch: int, context: int) -> None:
        self.model = model
        self.cache = _cache(model, batch, context)
        self.batch, self.context = batch, context

    def step(self, tokens: int) -> Run:
        """A callable that runs one pass of `tokens` tokens and takes them back out of the cache."""
        vocab, device = self.model.config.vocab_size, self.model.device
        ids = torch.randint(0, vocab, (self.batch, tokens), device=device)

        def run() -> object:
            output = self.model(ids, past_key_values=self.cache, use_cache=True)
            self.cache.crop(-tokens)
            return output

        return run


def bare(arch: Architecture) -> Architecture:
    """`arch` with next to no embedding and head, for its layers alone."""
    return arch.replace(vocab_size=64, draft_vocab_size=None, tie_word_embeddings=True)


def layer_stack(
    arch: Architecture, pool: WeightPool, *, batch: int, context: int, tokens: int
) -> Run:
    """One pass through all decoder layers of `arch` without embedding, final norm and head."""
    model = build_model(bare(arch), pool).model
    cache = _cache(model, batch, context)
    device = pool.flat.device
    hidden = torch.randn(batch, tokens, arch.hidden_size).to(pool.flat)
    positions = torch.arange(context, context + tokens, device=device)[None]
    rotary = model.rotary_emb(hidden, positions)
    mask = None
    if tokens > 1:
        mask = lower_right_mask(tokens, context + tokens, None, device)[None, None]

    given = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
    given |= {"use_cache": True, "position_embeddings": rotary}

    def run() -> object:
        state = hidden
        for layer in model.layers:
            state = layer(state, **given)
        cache.crop(-tokens)
        return state

    return run


def cache_flusher(size_bytes: int, device: torch.device | str = "cpu") -> Run:
    """A callable that reads `size_bytes`, taken at its first call: nothing else stays in the
    last-level cache."""
    block = cache(lambda: torch.ones(size_bytes // 4, device=device))
    return lambda: block().sum()


# -- as serving engines run them


def lean_supported(arch: Architecture) -> bool:
    """Whether `LeanDecoder` can hold the shape: Llama, Mistral, Qwen and their like (RMS norm,
    rotary, gated MLP)."""
    return arch.rms_norm and arch.gated_mlp and not arch.learned_positions


@dataclass(frozen=True)
class LeanLayer:
    """Weights of one decoder layer; q, k, v and gate, up each in one matrix [rows, columns]."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    window: int | None


@dataclass(frozen=True, eq=False)
class LeanDecoder:
    """A decoder as a serving engine runs it: fused QKV and gate/up, fused norms, a static KV cache.
    No autograd and no decisions on the host: one pass at a fixed position can be captured in a CUDA
    graph.

    Equal to the Hugging Face module up to rounding (a test). A trimmed head gives logits
    of its own rows only.
    """

    arch: Architecture
    embed: Tensor
    layers: Sequence[LeanLayer]
    norm: Tensor
    head: Tensor
    eps: float
    fused: Fused

    @classmethod
    def random(cls, arch: Architecture, pool: WeightPool, fused: Fused) -> LeanDecoder:
        """`arch` with every weight written from the pool, on its device and in its dtype."""

        def weight(*shape: int) -> Tensor:
            tensor = pool.flat.new_empty(shape)
            pool.fill(tensor)
            return tensor

        def bias(size: int, present: bool) -> Tensor | None:
            return weight(size) if present else None

        hidden, ffn = arch.hidden_size, arch.intermediate_size
        total = arch.q_size + 2 * arch.kv_size
        ones = pool.flat.new_ones(max(hidden, arch.head_dim))
        layers = [
            LeanLayer(
                norm=ones[:hidden],
                qkv=weight(total, hidden),
                qkv_bias=bias(total, arch.attention_bias),
                q_norm=ones[: arch.head_dim] if arch.qk_norm else None,
                k_norm=ones[: arch.head_dim] if arch.qk_norm else None,
                out=weight(hidden, arch.q_size),
                out_bias=bias(hidden, arch.attention_output_bias),
                mlp_norm=ones[:hidden],
                gate_up=weight(2 * ffn, hidden),
                gate_up_bias=bias(2 * ffn, arch.mlp_bias),
                down=weight(hidden, ffn),
                down_bias=bias(hidden, arch.mlp_bias),
                window=window,
            )
            for window in arch.windows()
        ]
        embed = weight(arch.vocab_size, hidden)
        shared = arch.tie_word_embeddings and not arch.trimmed
        head = embed if shared else weight(arch.head_rows, hidden)
        return cls(arch, embed, layers, ones[:hidden], head, 1e-5, fused)


class LeanRun:
    """Passes of a `LeanDecoder` over a static KV cache of `capacity` positions for `batch`
    sequences."""

    def __init__(
        self, model: LeanDecoder, *, batch: int, capacity: int, pool: WeightPool | None = None
    ) -> None:
        arch = model.arch
        self.model, self.batch = model, batch
        shape = (len(model.layers), batch, capacity, 2, arch.num_key_value_heads, arch.head_dim)
        self.cache = torch.zeros(shape, dtype=model.norm.dtype, device=model.norm.device)
        if pool is not None:  # zeros would make the softmax flat, and untouched pages read falsely
            pool.fill(self.cache)
        places = torch.arange(0, arch.head_dim, 2, dtype=torch.float32)
        frequencies = arch.rope_theta ** (-places / arch.head_dim)
        angles = torch.arange(capacity, dtype=torch.float32)[:, None] * frequencies
        self.cos, self.sin = angles.cos().to(self.cache.device), angles.sin().to(self.cache.device)

    def layers(self, hidden: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """hidden [batch * tokens, hidden_size] at positions start.. through all layers -> (last
        block's output, residual to add).

        Overwrites `hidden`, which becomes the residual.
        """
        model, arch, fused = self.model, self.model.arch, self.model.fused
        tokens = hidden.shape[0] // self.batch
        stop, q_size = start + tokens, arch.q_size
        cos, sin = (table[start:stop].repeat(self.batch, 1) for table in (self.cos, self.sin))
        residual, block = hidden, None
        for number, layer in enumerate(model.layers):
            x, before = (residual, None) if block is None else (block, residual)
            normed = fused.rms_norm(x, layer.norm, model.eps, before)
            qkv = functional.linear(normed, layer.qkv, layer.qkv_bias)
            if layer.q_norm is not None and layer.k_norm is not None:
                _norm_heads(qkv[:, :q_size], layer.q_norm, model.eps)
                _norm_heads(qkv[:, q_size : q_size + arch.kv_size], layer.k_norm, model.eps)
            fused.rope_(qkv, cos, sin, arch.num_attention_heads + arch.num_key_value_heads)
            sequences = qkv.view(self.batch, tokens, -1)
            kv, heads = self.cache[number], (2, arch.num_key_value_heads, arch.head_dim)
            kv[:, start:stop].copy_(sequences[..., q_size:].unflatten(-1, heads))
            # The first new token's first key.
            first = 0 if layer.window is None else max(0, start + 1 - layer.window)
            # [batch, tokens, heads, head_dim], as the cache's rows
            query = sequences[..., :q_size].unflatten(-1, (arch.num_attention_heads, arch.head_dim))
            attended = attend(query, kv[:, first:stop, 0], kv[:, first:stop, 1], layer.window)
            block = functional.linear(attended.reshape(-1, q_size), layer.out, layer.out_bias)
            normed = fused.rms_norm(block, layer.mlp_norm, model.eps, residual)
            gate_up = functional.linear(normed, layer.gate_up, layer.gate_up_bias)
            block = functional.linear(fused.silu_mul(gate_up), layer.down, layer.down_bias)
        assert block is not None
        return block, residual

    def forward(self, ids: Tensor, start: int) -> Tensor:
        """ids [batch, tokens] at positions start.. -> logits [batch, tokens, head rows]; writes the
        cache at these positions."""
        model = self.model
        block, residual = self.layers(functional.embedding(ids.flatten(), model.embed), start)
        normed = model.fused.rms_norm(block, model.norm, model.eps, residual)
        return functional.linear(normed, model.head).view(*ids.shape, -1)

    def step(self, tokens: int, start: int) -> Run:
        """A repeatable pass of `tokens` tokens after `start` cached ones, embedding and head
        included."""
        ids = torch.randint(0, self.model.arch.vocab_size, (self.batch, tokens))
        ids = ids.to(self.cache.device)
        return lambda: self.forward(ids, start)

    def layer_step(self, tokens: int, start: int) -> Run:
        """The same through the layers alone."""
        kept = torch.randn(self.batch * tokens, self.model.arch.hidden_size).to(self.cache)
        return lambda: self.layers(kept.clone(), start)


def _norm_heads(rows: Tensor, weight: Tensor, eps: float) -> None:
    """RMS norm of every head of rows [rows, heads * head_dim], in place."""
    heads = rows.unflatten(-1, (-1, weight.shape[0]))
    heads.copy_(functional.rms_norm(heads, (weight.shape[0],), weight, eps))
