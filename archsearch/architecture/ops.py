"""The one list of what a forward pass runs.

Ops are keyed by what the hardware sees (kind and sizes), never by model name, so one measured table prices any architecture. The
sweep asks this list what to measure and the step latency asks it what to add up; the two cannot drift apart.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from archsearch.architecture.architecture import Architecture
from archsearch.errors import InvalidShapeError


@dataclass(frozen=True, slots=True)
class Gemm:
    """[m, k] x [k, n], weights of n*k elements."""

    m: int
    n: int
    k: int
    kind = "gemm"

    def weight_elements(self) -> int:
        return self.n * self.k

    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Attention:
    """`tokens` new queries per sequence against `context` cached plus `tokens` new keys; `window` limits what is read."""

    batch: int
    tokens: int
    context: int
    q_heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    kind = "attention"

    def keys(self) -> int:
        """Keys read per query block: the cache plus the new tokens, cut by the window."""
        total = self.context + self.tokens
        return min(total, self.window + self.tokens - 1) if self.window else total

    def kv_elements(self) -> int:
        return 2 * self.batch * self.keys() * self.kv_heads * self.head_dim

    def flops(self) -> int:
        return 4 * self.batch * self.tokens * self.keys() * self.q_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Elementwise:
    """A memory-bound chain of small kernels (`name`: norm, rope, act, add, embed) that touches `elements` numbers."""

    name: str
    elements: int
    kind = "elementwise"


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Sum of `elements` numbers over `ranks` devices."""

    elements: int
    ranks: int
    kind = "all_reduce"


Op = Gemm | Attention | Elementwise | AllReduce


def _shard(size: int, ranks: int, what: str) -> int:
    if size % ranks:
        raise InvalidShapeError(f"{what} ({size}) does not divide by tensor_parallel={ranks}")
    return size // ranks


def layer_ops(
    arch: Architecture, *, batch: int, tokens: int, context: int, window: int | None, ranks: int = 1, fused: bool = False
) -> list[Op]:
    """Ops of one decoder layer. `fused`: QKV and gate/up as one GEMM each, as serving engines run them; transformers does not.

    With tensor parallelism over `ranks`, heads and FFN are split and each half-layer ends in an all-reduce; KV heads fewer than
    the ranks are replicated, as engines do.
    """
    m = batch * tokens
    hidden = arch.hidden_size
    q_heads = _shard(arch.num_attention_heads, ranks, "num_attention_heads")
    kv_heads = arch.num_key_value_heads // ranks if arch.num_key_value_heads % ranks == 0 else 1
    ffn = _shard(arch.intermediate_size, ranks, "intermediate_size")
    q_size, kv_size = q_heads * arch.head_dim, kv_heads * arch.head_dim
    ops: list[Op] = [Elementwise("norm", m * hidden)]
    ops += (
        [Gemm(m, q_size + 2 * kv_size, hidden)]
        if fused
        else [Gemm(m, q_size, hidden), Gemm(m, kv_size, hidden), Gemm(m, kv_size, hidden)]
    )
    if arch.qk_norm:
        ops.append(Elementwise("norm", m * (q_size + kv_size)))
    if not arch.learned_positions:
        ops.append(Elementwise("rope", m * (q_size + kv_size)))
    ops += [
        Attention(batch, tokens, context, q_heads, kv_heads, arch.head_dim, window),
        Gemm(m, hidden, q_size),
    ]
    if ranks > 1:
        ops.append(AllReduce(m * hidden, ranks))
    ops += [Elementwise("add", m * hidden), Elementwise("norm", m * hidden)]
    if not arch.gated_mlp:
        ops += [Gemm(m, ffn, hidden)]
    elif fused:
        ops += [Gemm(m, 2 * ffn, hidden)]
    else:
        ops += [Gemm(m, ffn, hidden), Gemm(m, ffn, hidden)]
    ops += [Elementwise("act", m * ffn), Gemm(m, hidden, ffn)]
    if ranks > 1:
        ops.append(AllReduce(m * hidden, ranks))
    ops.append(Elementwise("add", m * hidden))
    return ops


def head_ops(arch: Architecture, *, batch: int, tokens: int, ranks: int = 1) -> list[Op]:
    """Ops outside the layers: embedding lookup, final norm, language-model head."""
    m = batch * tokens
    rows = -(-arch.head_rows // ranks)
    return [
        Elementwise("embed", m * arch.hidden_size),
        Elementwise("norm", m * arch.hidden_size),
        Gemm(m, rows, arch.hidden_size),
    ]


def forward_ops(arch: Architecture, *, batch: int, tokens: int, context: int, ranks: int = 1, fused: bool = False) -> Counter[Op]:
    """Every op of one forward pass with how often it runs."""
    counts: Counter[Op] = Counter()
    for window, layers in Counter(arch.windows()).items():
        for op in layer_ops(arch, batch=batch, tokens=tokens, context=context, window=window, ranks=ranks, fused=fused):
            counts[op] += layers
    for op in head_ops(arch, batch=batch, tokens=tokens, ranks=ranks):
        counts[op] += 1
    return counts
