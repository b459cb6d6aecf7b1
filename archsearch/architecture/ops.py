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
    """A memory-bound chain of small kernels (`name`: norm, rope, act, add, embed, sample) that touches `elements` numbers.

    `width`: length of a row where the kernel runs along rows and it matters (sample: the logits of one token).
    """

    name: str
    elements: int
    width: int | None = None
    kind = "elementwise"


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Sum of `elements` numbers over `ranks` devices."""

    elements: int
    ranks: int
    kind = "all_reduce"


Op = Gemm | Attention | Elementwise | AllReduce


@dataclass(frozen=True, slots=True)
class PassOps:
    """What one pass runs on each of `ranks` devices: ops of its `layers` and ops outside them, with how often each runs.

    It says all that a latency model needs, whatever the network is: a whole model, a head on a target's hidden states.
    """

    in_layers: Counter[Op]
    outside: Counter[Op]
    layers: int
    ranks: int = 1

    def all_reduces(self) -> int:
        """How often the ranks wait for one another."""
        return sum(
            count for counts in (self.in_layers, self.outside) for op, count in counts.items() if isinstance(op, AllReduce)
        )

    def weight_elements(self) -> int:
        """Weights that the pass reads from memory, per rank."""
        return sum(
            count * op.weight_elements()
            for counts in (self.in_layers, self.outside)
            for op, count in counts.items()
            if isinstance(op, Gemm)
        )


def shard_size(size: int, ranks: int, what: str) -> int:
    """One rank's share of heads or FFN columns; `what` names them in the InvalidShapeError where they do not divide."""
    if size % ranks:
        raise InvalidShapeError(f"{what} ({size}) does not divide by tensor_parallel={ranks}")
    return size // ranks


def shard_kv_heads(heads: int, ranks: int) -> int:
    """KV heads of one rank: a share of them, or one that several ranks replicate.

    Raises InvalidShapeError where heads and ranks do not divide one another.
    """
    if max(heads, ranks) % min(heads, ranks):
        raise InvalidShapeError(f"num_key_value_heads ({heads}) and tensor_parallel={ranks} do not divide one another")
    return max(1, heads // ranks)


def check_shards(arch: Architecture, ranks: int) -> None:
    """Raise InvalidShapeError where heads, KV heads or the FFN of `arch` do not divide by `ranks`."""
    if ranks > 1:
        shard_size(arch.num_attention_heads, ranks, "num_attention_heads")
        shard_kv_heads(arch.num_key_value_heads, ranks)
        shard_size(arch.intermediate_size, ranks, "intermediate_size")


def layer_ops(
    arch: Architecture, *, batch: int, tokens: int, context: int, window: int | None, ranks: int = 1, fused: bool = False
) -> list[Op]:
    """Ops of one decoder layer.

    `fused`: QKV and gate/up are one GEMM each and the residual is added inside the next norm, as serving engines (vLLM,
    TensorRT-LLM, SGLang) run them; transformers does not. The write into the KV cache belongs to `Attention`.

    With tensor parallelism over `ranks`, heads and FFN are split and each half-layer ends in an all-reduce; KV heads fewer than
    the ranks are replicated, as engines do.

    Raises: InvalidShapeError where heads, KV heads or the FFN do not divide by the ranks.
    """
    m = batch * tokens
    hidden = arch.hidden_size
    q_heads = shard_size(arch.num_attention_heads, ranks, "num_attention_heads")
    kv_heads = shard_kv_heads(arch.num_key_value_heads, ranks)
    ffn = shard_size(arch.intermediate_size, ranks, "intermediate_size")
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
    if not fused:
        ops.append(Elementwise("add", m * hidden))
    ops.append(Elementwise("norm", m * hidden))
    if not arch.gated_mlp:
        ops += [Gemm(m, ffn, hidden)]
    elif fused:
        ops += [Gemm(m, 2 * ffn, hidden)]
    else:
        ops += [Gemm(m, ffn, hidden), Gemm(m, ffn, hidden)]
    ops += [Elementwise("act", m * ffn), Gemm(m, hidden, ffn)]
    if ranks > 1:
        ops.append(AllReduce(m * hidden, ranks))
    if not fused:
        ops.append(Elementwise("add", m * hidden))
    return ops


def head_ops(arch: Architecture, *, batch: int, tokens: int, ranks: int = 1, head_tokens: int | None = None) -> list[Op]:
    """Ops outside the layers: embedding lookup, final norm, language-model head.

    head_tokens: tokens per sequence whose logits are wanted (default all; a prefill wants one).

    With several `ranks` the embedding is split by vocabulary, so its result is summed over the ranks, and every rank needs the
    logits of all: an all-gather of m x head_rows numbers moves what an all-reduce of half as many does ((r - 1) / r against
    2 (r - 1) / r of the numbers per rank). Neither shrinks with the ranks.
    """
    m = batch * tokens
    head_m = m if head_tokens is None else batch * head_tokens
    rows = -(-arch.head_rows // ranks)
    ops: list[Op] = [Elementwise("embed", m * arch.hidden_size)]
    if ranks > 1:
        ops.append(AllReduce(m * arch.hidden_size, ranks))
    ops += [Elementwise("norm", m * arch.hidden_size), Gemm(head_m, rows, arch.hidden_size)]
    if ranks > 1:
        ops.append(AllReduce(head_m * arch.head_rows // 2, ranks))
    return ops


def sample_op(arch: Architecture, *, batch: int, tokens: int) -> Elementwise:
    """What an engine runs after the logits to choose tokens (greedy: an argmax over them); not part of the forward pass."""
    return Elementwise("sample", batch * tokens * arch.head_rows, arch.head_rows)


def forward_ops(arch: Architecture, *, batch: int, tokens: int, context: int, ranks: int = 1, fused: bool = False) -> Counter[Op]:
    """Every op of one forward pass with how often it runs."""
    counts: Counter[Op] = Counter()
    for window, layers in Counter(arch.windows()).items():
        for op in layer_ops(arch, batch=batch, tokens=tokens, context=context, window=window, ranks=ranks, fused=fused):
            counts[op] += layers
    for op in head_ops(arch, batch=batch, tokens=tokens, ranks=ranks):
        counts[op] += 1
    return counts
