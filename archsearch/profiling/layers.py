"""Whole decoder layers and models, in the real model code: what the sum of ops misses (launches, host time, cost per pass)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from archsearch.architecture.architecture import Architecture
from archsearch.models import build_draft, cheap_initialisation
from archsearch.profiling.timer import WeightPool

Run = Callable[[], object]


def build_model(arch: Architecture, dtype: torch.dtype, pool: WeightPool) -> Any:
    """The Hugging Face module of `arch` with every weight written from the pool, in eval mode."""
    with cheap_initialisation():
        model = build_draft(arch, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                pool.fill(parameter)
    return model.eval()


def _cache(model: Any) -> Any:
    """The cache assisted generation uses: sliding layers keep enough of the past to take rejected tokens back."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    return cache


class ForwardRun:
    """Repeatable forward passes of `tokens` new tokens against a cache of `context`: each call leaves the cache as it was."""

    def __init__(self, model: Any, *, batch: int, context: int) -> None:
        self.model = model
        vocab = model.config.vocab_size
        self.cache = _cache(model)
        if context:
            ids = torch.randint(0, vocab, (batch, context))
            for start in range(0, context, 512):  # in pieces: attention scores of a long prompt would fill memory
                model(ids[:, start : start + 512], past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.batch, self.context = batch, context

    def step(self, tokens: int) -> Run:
        """A callable that runs one pass of `tokens` tokens and takes them back out of the cache."""
        ids = torch.randint(0, self.model.config.vocab_size, (self.batch, tokens))

        def run() -> object:
            output = self.model(ids, past_key_values=self.cache, use_cache=True)
            self.cache.crop(-tokens)
            return output

        return run


def layer_stack(arch: Architecture, dtype: torch.dtype, pool: WeightPool, *, batch: int, context: int, tokens: int) -> Run:
    """One pass through all decoder layers of `arch` without embedding, final norm and head."""
    model = build_model(arch.replace(vocab_size=64, draft_vocab_size=None, tie_word_embeddings=True), dtype, pool).model
    cache = _cache(model)
    if context:
        model(torch.randint(0, 64, (batch, context)), past_key_values=cache, use_cache=True)
    hidden = torch.randn(batch, tokens, arch.hidden_size).to(dtype)
    positions = torch.arange(context, context + tokens)[None]
    rotary = model.rotary_emb(hidden, positions)
    mask = None
    if tokens > 1:
        mask = (torch.arange(context + tokens)[None, :] <= positions[0][:, None])[None, None]

    def run() -> object:
        state = hidden
        for layer in model.layers:
            state = layer(
                state,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                position_embeddings=rotary,
            )
        cache.crop(-tokens)
        return state

    return run


def cache_flusher(size_bytes: int) -> Run:
    """A callable that pushes everything else out of the last-level cache by reading `size_bytes`."""
    block = torch.ones(size_bytes // 4, dtype=torch.float32)
    return lambda: block.sum()
