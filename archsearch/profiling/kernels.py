"""Callables for single ops, as transformers runs them: what the timer times for `gemm`, `attention` and `elementwise` rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch.nn import functional

from archsearch.architecture.ops import Attention, Elementwise, Gemm
from archsearch.profiling.timer import WeightPool

WARM_BYTES = 2 << 20
Run = Callable[[], object]


def gemm(op: Gemm, pool: WeightPool, working_set_bytes: int) -> Run:
    """x [m, k] times a weight [n, k] transposed; the weight rotates over `working_set_bytes`."""
    weights = itertools.cycle(pool.matrices(op.n, op.k, working_set_bytes))
    x = torch.randn(1, op.m, op.k).to(pool.flat.dtype)
    return lambda: functional.linear(x, next(weights))


def attention(op: Attention, pool: WeightPool, working_set_bytes: int) -> Run:
    """Append to the KV cache, repeat KV heads and attend, as transformers' DynamicCache and SDPA path do.

    query [batch, q_heads, tokens, head_dim]; cache [batch, kv_heads, context, head_dim]. A window cuts the cache it reads.
    """
    dtype = pool.flat.dtype
    kept = op.keys() - op.tokens
    per_copy = max(1, 2 * op.batch * op.kv_heads * max(1, kept) * op.head_dim)
    copies = max(1, min(working_set_bytes // (per_copy * pool.itemsize), 64))
    caches = []
    for _ in range(copies):
        both = torch.empty(2, op.batch, op.kv_heads, kept, op.head_dim, dtype=dtype)
        if both.numel():
            pool.fill(both)
        caches.append(both)
    rotation = itertools.cycle(caches)
    query = torch.randn(op.batch, op.q_heads, op.tokens, op.head_dim).to(dtype)
    new = torch.randn(2, op.batch, op.kv_heads, op.tokens, op.head_dim).to(dtype)
    mask = None
    if op.tokens > 1:
        positions = torch.arange(op.tokens)[:, None] + kept
        mask = (torch.arange(kept + op.tokens)[None, :] <= positions)[None, None]

    def run() -> object:
        cache = next(rotation)
        key, value = torch.cat([cache[0], new[0]], dim=-2), torch.cat([cache[1], new[1]], dim=-2)
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=op.q_heads != op.kv_heads)

    return run


def elementwise(op: Elementwise, pool: WeightPool) -> Run:
    """The chains of small kernels between GEMMs, on `elements` numbers."""
    dtype = pool.flat.dtype
    x = torch.randn(1, 1, op.elements).to(dtype)
    y = torch.randn(1, 1, op.elements).to(dtype)
    if op.name == "norm":  # LlamaRMSNorm.forward, line by line: upcast, variance, scale, downcast

        def norm() -> object:
            wide = x.to(torch.float32)
            variance = wide.pow(2).mean(-1, keepdim=True)
            return y * (wide * torch.rsqrt(variance + 1e-5)).to(dtype)

        return norm
    if op.name == "act":
        return lambda: functional.silu(x) * y
    if op.name == "add":
        return lambda: x + y
    if op.name == "rope":
        half = op.elements // 2

        def rope() -> object:
            return x * y + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * y

        return rope
    if op.name == "embed":
        table = pool.matrices(1024, op.elements, 16 << 20)[0]
        index = torch.randint(0, 1024, (1, 1))
        return lambda: functional.embedding(index, table)
    raise ValueError(f"no kernel for elementwise op {op.name!r}")
