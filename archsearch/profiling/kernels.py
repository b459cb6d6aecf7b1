"""Callables for single ops: what the timer times for `gemm`, `attention` and `elementwise` rows.

`gemm`, `attention`, `elementwise`: as transformers runs them, one callable that rotates its
operands at every call. `graph_calls`: as serving engines run them inside a CUDA graph, one callable
per copy of the operands; a graph captures all.
"""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch.nn import functional

from archsearch.architecture.op_kinds import OP_KINDS
from archsearch.architecture.ops import AllReduce, Attention, Elementwise, Gemm, Op
from archsearch.engine_facts import load
from archsearch.errors import MissingDataError
from archsearch.profiling.fused import Fused, attend, lower_right_mask
from archsearch.profiling.timer import Run, WeightPool, copies_of

# Calls of one graph at least, so that its launch is a small share.
GRAPH_CALLS = 32
# And at most: copies of a weight so small that these do not exceed the L2 are launches, whose bytes
# take no time.
MAX_GRAPH_CALLS = 2048


def eager_call(op: Op, pool: WeightPool, working_set_bytes: int) -> Run:
    """The call that times `op`, made by the kernel of its kind (see `OpKind.kernel`)."""
    return load(OP_KINDS[op.kind].kernel)(op, pool, working_set_bytes)


def not_measured(op: Op, pool: WeightPool, working_set_bytes: int) -> Run:
    """Kernels whose rows are imported: raises MissingDataError, for archsearch does not time them
    itself."""
    raise MissingDataError(
        f"archsearch does not time kernels of kind {op.kind!r}; import them with archsearch profile"
        " --gpu G --from aiconfigurator"
    )


def gemm(op: Gemm, pool: WeightPool, working_set_bytes: int) -> Run:
    """x [m, k] times a weight [n, k] transposed; the weight rotates over `working_set_bytes`."""
    weights = itertools.cycle(pool.matrices(op.n, op.k, working_set_bytes))
    x = torch.randn(1, op.m, op.k).to(pool.flat)
    return lambda: functional.linear(x, next(weights))


def attention(op: Attention, pool: WeightPool, working_set_bytes: int) -> Run:
    """Append to the KV cache and attend, as transformers' DynamicCache and SDPA path do: KV heads
    are repeated where its `use_gqa_in_sdpa` says that grouped heads would fall back to the slow
    kernel (a mask, as verification has one).

    query [batch, q_heads, tokens, head_dim]; cache [batch, kv_heads, context, head_dim]. A window
    cuts the cache it reads.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, use_gqa_in_sdpa

    groups = op.q_heads // op.kv_heads
    kept = op.keys() - op.tokens
    per_copy = max(1, 2 * op.batch * op.kv_heads * max(1, kept) * op.head_dim)
    copies = min(copies_of(per_copy * pool.itemsize, working_set_bytes), 64)
    shape = (2, op.batch, op.kv_heads, kept, op.head_dim)
    caches = [pool.flat.new_empty(shape) for _ in range(copies)]
    for both in caches if kept else ():
        pool.fill(both)
    rotation = itertools.cycle(caches)
    query = torch.randn(op.batch, op.q_heads, op.tokens, op.head_dim).to(pool.flat)
    new = torch.randn(2, op.batch, op.kv_heads, op.tokens, op.head_dim).to(pool.flat)
    mask = None
    if op.tokens > 1:
        mask = lower_right_mask(op.tokens, op.keys(), None, pool.flat.device)[None, None]

    def run() -> object:
        cache = next(rotation)
        key, value = torch.cat([cache[0], new[0]], dim=-2), torch.cat([cache[1], new[1]], dim=-2)
        grouped = groups > 1 and use_gqa_in_sdpa(mask, key, value)
        if not grouped:
            # [batch, q_heads, keys, head_dim]
            key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=grouped
        )

    return run


def elementwise(op: Elementwise, pool: WeightPool, working_set_bytes: int = 1) -> Run:
    """The chains of small kernels between GEMMs, on `elements` numbers that the cache holds. Raises
    ValueError for an op without one."""
    dtype = pool.flat.dtype
    x, y = (torch.randn(1, 1, op.elements).to(pool.flat) for _ in range(2))
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
    return _embed(op, pool, op.elements, (1, 1))


def _embed(op: Elementwise, pool: WeightPool, width: int, shape: tuple[int, ...]) -> Run:
    if op.name != "embed":
        raise ValueError(f"no kernel for elementwise op {op.name!r}")
    table = pool.matrices(1024, width, 16 << 20)[0]
    index = torch.randint(0, 1024, shape).to(pool.flat.device)
    return lambda: functional.embedding(index, table)


# -- as serving engines run them


def graph_calls(op: Op, pool: WeightPool, working_set_bytes: int, fused: Fused) -> list[Run]:
    """GRAPH_CALLS or more calls of `op` whose operands together hold about `working_set_bytes`, for
    one CUDA graph.

    GEMM in float8_e4m3fn: scales per tensor, output in bfloat16; quantising the activations is not
    part of it. Attention writes the new keys and values into a static cache first, as engines do.
    Raises ValueError for an op that runs on no single device, or a float8 GEMM whose sizes are no
    multiples of 16.
    """
    if isinstance(op, Gemm):
        calls = _gemm_calls(op, pool, working_set_bytes)
    elif isinstance(op, Attention):
        calls = _attention_calls(op, pool, working_set_bytes)
    elif isinstance(op, Elementwise):
        calls = [_fused_elementwise(op, pool, fused)]
    elif isinstance(op, AllReduce):
        raise ValueError(f"no kernel on one device for {op}")
    else:
        calls = [eager_call(op, pool, working_set_bytes)]
    # few copies are run in turn until the graph is long enough
    rounds = -(-GRAPH_CALLS // len(calls))
    return (calls * rounds)[:MAX_GRAPH_CALLS]


def _gemm_calls(op: Gemm, pool: WeightPool, size: int) -> list[Run]:
    weights = pool.matrices(op.n, op.k, size)[:MAX_GRAPH_CALLS]
    x = torch.randn(op.m, op.k, device=pool.flat.device).to(pool.flat.dtype)
    if pool.flat.dtype != torch.float8_e4m3fn:
        return [partial(functional.linear, x, weight) for weight in weights]
    if op.n % 16 or op.k % 16:
        raise ValueError(f"a float8 GEMM needs n and k that are multiples of 16, got {op}")
    one = torch.ones((), device=x.device)

    def scaled(weight: torch.Tensor) -> Run:
        return lambda: torch._scaled_mm(
            x, weight.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return [scaled(weight) for weight in weights]


def _attention_calls(op: Attention, pool: WeightPool, size: int) -> list[Run]:
    keys = op.keys()
    per_copy = 2 * op.batch * keys * op.kv_heads * op.head_dim
    copies = min(copies_of(per_copy * pool.itemsize, size), MAX_GRAPH_CALLS)
    caches = pool.flat.new_empty(copies, op.batch, keys, 2, op.kv_heads, op.head_dim)
    pool.fill(caches)

    def drawn(*heads: int) -> torch.Tensor:
        shape = (op.batch, op.tokens, *heads, op.head_dim)
        return torch.randn(shape, device=caches.device).to(caches.dtype)

    query, new = drawn(op.q_heads), drawn(2, op.kv_heads)

    def call(kv: torch.Tensor) -> Run:
        def run() -> object:
            kv[:, keys - op.tokens :].copy_(new)
            return attend(query, kv[:, :, 0], kv[:, :, 1], op.window)

        return run

    return [call(kv) for kv in caches]


def _width(elements: int, limit: int) -> int:
    """A row length for `elements` of a kernel that does not mind rows much: the largest divisor up
    to `limit`."""
    return next(width for width in range(min(elements, limit), 0, -1) if elements % width == 0)


def _fused_elementwise(op: Elementwise, pool: WeightPool, fused: Fused) -> Run:
    width = op.width or _width(op.elements, 160_000 if op.name == "sample" else 8192)
    x = torch.randn(op.elements // width, width, device=pool.flat.device).to(pool.flat.dtype)
    if op.name == "norm":
        weight = torch.ones(width, device=x.device, dtype=x.dtype)
        return lambda: fused.rms_norm(x, weight, 1e-5)
    if op.name == "act":
        gate_up = torch.cat([x, x], dim=-1)
        return lambda: fused.silu_mul(gate_up)
    if op.name == "add":
        y = x.clone()
        return lambda: x + y
    if op.name == "sample":  # greedy: the largest logit of each token
        return lambda: x.argmax(dim=-1)
    if op.name == "rope":
        head = next(size for size in (128, 64, 32, 2, 1) if width % size == 0)
        if head == 1:
            return lambda: x * 1.0
        angle = torch.rand(x.shape[0], head // 2, device=x.device)
        cos, sin = angle.cos(), angle.sin()
        return lambda: fused.rope_(x, cos, sin, width // head)
    return _embed(op, pool, width, (x.shape[0],))
