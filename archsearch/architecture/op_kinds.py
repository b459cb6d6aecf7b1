"""The kinds of ops: for each one row with all that sweep, latency model, roofline and profile
reading must know of it (docs/architecture.md, "Add a kernel"; a module of its own may set
`OP_KINDS["its kind"]` too)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import methodcaller
from typing import Any, Final

from archsearch.architecture.ops import (
    AllReduce,
    Attention,
    Elementwise,
    Experts,
    Gemm,
    LatentAttention,
    Op,
)

Sizes = Callable[[Any], list[float]]


@dataclass(frozen=True)
class OpKind:
    """One kind of op. `op`: its frozen dataclass, whose fields are the sizes of a profile row and
    whose `kind` is the key here.

    `base(op)`: what its time is linear in (a constant, memory traffic, arithmetic); `place(op)`:
    log sizes, in which near ops run alike; `elements(op)`, `flops(op)`: numbers moved and
    arithmetic, for the roofline. `kernel`: "module:function", imported when something is measured,
    with function(op, pool, working_set_bytes) -> a callable that runs the op once and rotates over
    operands of that many bytes. `warm_bytes`: such operands for a warm row; `budget_s`: seconds to
    time it; `min_rows`: fewer rows give no fit.
    """

    op: type[Op]
    base: Sizes
    place: Sizes
    elements: Callable[[Any], float]
    kernel: str
    flops: Callable[[Any], float] = methodcaller("flops")
    warm_bytes: int = 1
    budget_s: float = 0.05
    min_rows: int = 6


def _gemm_base(op: Gemm) -> list[float]:
    return [1.0, float(op.weight_elements()), float(op.m * (op.n + op.k))]


def _gemm_place(op: Gemm) -> list[float]:
    """Log sizes, the token count twice as far apart: kernels change with it."""
    return [2.0 * math.log(op.m), math.log(op.n), math.log(op.k)]


def _attention_base(op: Attention) -> list[float]:
    return [1.0, float(op.kv_elements()), float(op.batch * op.tokens * op.q_heads * op.keys())]


def _attention_place(op: Attention) -> list[float]:
    heads = [
        math.log(op.q_heads * op.batch),
        math.log(op.kv_heads * op.batch),
        math.log(op.head_dim),
    ]
    return [math.log(op.tokens), math.log(op.keys()), *heads]


def _line(op: Elementwise | AllReduce) -> list[float]:
    return [1.0, float(op.elements)]


def _log_elements(op: Elementwise | AllReduce) -> list[float]:
    return [math.log(op.elements)]


def _experts_base(op: Experts) -> list[float]:
    """A constant, the weights read, rows in and out, arithmetic."""
    return [
        1.0,
        float(op.weight_elements()),
        float(op.tokens * op.hidden),
        float(op.pairs * op.hidden * op.inter),
    ]


def _experts_place(op: Experts) -> list[float]:
    """Log sizes; the format is kept far apart from the others."""
    sizes = (op.touched, op.pairs, op.experts, op.hidden, op.inter)
    return [*(math.log(size) for size in sizes), 20.0 * len(op.format)]


def _latent_base(op: LatentAttention) -> list[float]:
    """A constant, weights, the cache, arithmetic of projections and of attention."""
    m = op.batch * op.tokens
    return [
        1.0,
        float(op.weight_elements()),
        float(op.cache_elements()),
        float(m * op.weight_elements()),
        float(op.attention_flops()),
    ]


def _latent_place(op: LatentAttention) -> list[float]:
    sizes = (op.batch, op.keys(), op.heads, op.tokens, op.hidden, op.q_rank + 1, op.latent)
    return [math.log(size) for size in sizes]


def row_sizes(op: Op) -> dict[str, object]:
    """The sizes of `op` as a row has them. What a kind learnt later (a width, a format of weights)
    is left out where it says nothing, so that rows made before keep their key."""
    later = {"gemm": "format", "elementwise": "width"}.get(op.kind)
    return {name: value for name, value in asdict(op).items() if name != later or value}


KERNELS: Final = "archsearch.profiling.kernels"
OP_KINDS: Final = {
    "gemm": OpKind(
        Gemm,
        _gemm_base,
        _gemm_place,
        elements=lambda op: op.weight_elements() + op.m * (op.n + op.k),
        kernel=f"{KERNELS}:gemm",
        warm_bytes=2 << 20,
        min_rows=12,
    ),
    "attention": OpKind(
        Attention,
        _attention_base,
        _attention_place,
        elements=lambda op: op.kv_elements() + 2 * op.batch * op.tokens * op.q_heads * op.head_dim,
        kernel=f"{KERNELS}:attention",
    ),
    "elementwise": OpKind(
        Elementwise,
        _line,
        _log_elements,
        elements=lambda op: 3 * op.elements,
        flops=lambda op: 5 * op.elements,
        kernel=f"{KERNELS}:elementwise",
        budget_s=0.03,
    ),
    "experts": OpKind(
        Experts,
        _experts_base,
        _experts_place,
        elements=lambda op: (
            op.weight_elements() + 2 * op.tokens * op.hidden + 3 * op.pairs * op.inter
        ),
        kernel=f"{KERNELS}:not_measured",
        min_rows=12,
    ),
    "latent_attention": OpKind(
        LatentAttention,
        _latent_base,
        _latent_place,
        elements=lambda op: (
            op.weight_elements() + op.cache_elements() + 2 * op.batch * op.tokens * op.hidden
        ),
        kernel=f"{KERNELS}:not_measured",
        min_rows=12,
    ),
    # Priced by the link between GPUs, measured by archsearch.profiling.collectives.
    "all_reduce": OpKind(
        AllReduce,
        _line,
        _log_elements,
        elements=lambda op: op.elements,
        flops=lambda op: op.elements,
        kernel=f"{KERNELS}:all_reduce",
    ),
}
