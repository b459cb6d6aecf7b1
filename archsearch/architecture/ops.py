"""The one list of what a forward pass runs.

Ops are keyed by what the hardware sees (kind and sizes), never by model name, so one measured table
prices any architecture. The sweep asks this list what to measure and the step latency asks it what
to add up; the two cannot drift apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.experts import ROUTING_SKEW, busiest_rank, expert_layout
from archsearch.errors import InvalidShapeError
from archsearch.workload import WEIGHT_BYTES


@dataclass(frozen=True, slots=True)
class Gemm:
    """[m, k] x [k, n], weights of n*k elements. `format`: of the weights where it is not the dtype
    of the pass (WEIGHT_BYTES)."""

    m: int
    n: int
    k: int
    format: str = ""
    kind = "gemm"

    def weight_elements(self) -> int:
        """Weights read; of a format of their own counted in numbers of 16 bits."""
        if self.format:
            return round(self.n * self.k * WEIGHT_BYTES[self.format] / 2)
        return self.n * self.k

    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Attention:
    """`tokens` new queries per sequence against `context` cached plus `tokens` new keys; `window`
    limits what is read."""

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
    """A memory-bound chain of small kernels (`name`: norm, rope, act, add, embed, sample) that
    touches `elements` numbers.

    `width`: length of a row where the kernel runs along rows and it matters (sample: the logits of
    one token).
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


@dataclass(frozen=True, slots=True)
class Experts:
    """One rank's experts of a layer, from the router's logits to the weighted sum: `tokens` rows
    (of all ranks), `pairs` of a token and one of the rank's `experts` (of `inter` columns), of
    which `touched` distinct ones are read.

    `format`: of the experts' weights where it is not the dtype of the rest ("mxfp4").
    """

    tokens: int
    hidden: int
    inter: int
    experts: int
    pairs: int
    touched: float
    format: str = ""
    kind = "experts"

    def weight_elements(self) -> int:
        """Weights read, counted in numbers of 16 bits where the experts have a format of their
        own."""
        share = WEIGHT_BYTES[self.format] / 2 if self.format else 1.0
        return round(3 * self.hidden * self.inter * self.touched * share)

    def flops(self) -> int:
        return 6 * self.pairs * self.hidden * self.inter


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """A whole block of multi-head latent attention on one rank of `heads` heads: its projections,
    their absorbed parts, attention over the latent cache of `latent` numbers a token (of which
    `rope` are rotated), and the output projection.

    `tokens` new ones per sequence against `context` cached. `q_rank`: width of the queries' own
    latent, 0 for none.
    """

    batch: int
    tokens: int
    context: int
    heads: int
    hidden: int
    q_rank: int
    latent: int
    rope: int
    head_dim: int
    v_dim: int
    kind = "latent_attention"

    def keys(self) -> int:
        """Cached and new tokens that a query may see."""
        return self.context + self.tokens

    def weight_elements(self) -> int:
        """Weights of all projections; with `heads` of one rank, the parts that ranks hold in full
        are counted in full."""
        rank = self.latent - self.rope
        queries = self.heads * self.head_dim
        down = self.hidden * (self.q_rank + self.latent)
        up = (self.q_rank or self.hidden) * queries
        return (
            down
            + up
            + rank * self.heads * (self.head_dim - self.rope + self.v_dim)
            + self.heads * self.v_dim * self.hidden
        )

    def cache_elements(self) -> int:
        """Numbers of the cache that are read: all heads share one latent."""
        return self.batch * self.keys() * self.latent

    def attention_flops(self) -> int:
        """Of the absorbed attention: scores over the latent, values over its unrotated part; of a
        prompt, with plain heads."""
        width = 2 * self.latent - self.rope if self.context else self.head_dim + self.v_dim
        return 2 * self.batch * self.tokens * self.heads * self.keys() * width

    def flops(self) -> int:
        return 2 * self.batch * self.tokens * self.weight_elements() + self.attention_flops()


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences of one kind in a step: `batch` of them, `tokens` new ones each against `context`
    cached.

    `logits`: tokens per sequence whose logits are computed (a prefill needs the last one only);
    None means all.
    """

    batch: int
    tokens: int
    context: int
    logits: int | None = None


Op = Gemm | Attention | Elementwise | AllReduce | Experts | LatentAttention


@dataclass(frozen=True, slots=True)
class PassOps:
    """What one pass runs on each of `ranks` devices: ops of its `layers` and ops outside them, with
    how often each runs.

    It says all that a latency model needs, whatever the network is: a whole model, a head on a
    target's hidden states.
    """

    in_layers: Counter[Op]
    outside: Counter[Op]
    layers: int
    ranks: int = 1

    @property
    def of_grid(self) -> bool:
        """Whether sizes and counts are arrays (`architecture.grid`)."""
        return not isinstance(self.layers, int)

    def all_reduces(self) -> int:
        """How often the ranks wait for one another."""
        return sum(count for op, count in self._counts() if isinstance(op, AllReduce))

    def weight_elements(self) -> int:
        """Weights that the pass reads from memory, per rank."""
        reads = Gemm | Experts | LatentAttention
        return sum(n * op.weight_elements() for op, n in self._counts() if isinstance(op, reads))

    def _counts(self) -> Iterable[tuple[Op, int]]:
        return chain(self.in_layers.items(), self.outside.items())


def shard_size(size: int, ranks: int, what: str) -> int:
    """One rank's share of heads or FFN columns; `what` names them in the InvalidShapeError where
    they do not divide. Of arrays (`architecture.grid`), which were checked before, it is not asked
    whether they divide."""
    if ranks == 1:
        return size
    if isinstance(size, int) and size % ranks:
        fitting = ", ".join(
            str(count) for count in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64) if size % count == 0
        )
        raise InvalidShapeError(
            f"{what} ({size}) does not divide by tensor_parallel={ranks}; it does by {fitting}"
        )
    return size // ranks


def shard_kv_heads(heads: int, ranks: int) -> int:
    """KV heads of one rank: a share of them, or one that several ranks replicate.

    Raises InvalidShapeError where heads and ranks do not divide one another.
    """
    if ranks == 1:
        return heads
    if not isinstance(heads, int):  # an array (`architecture.grid`)
        return (heads // ranks).clip(1)
    if max(heads, ranks) % min(heads, ranks):
        raise InvalidShapeError(
            f"num_key_value_heads ({heads}) and tensor_parallel={ranks} do not divide one another"
        )
    return max(1, heads // ranks)


def check_shards(arch: Architecture, ranks: int) -> None:
    """Raise InvalidShapeError where heads, KV heads or the FFN of `arch` do not divide by
    `ranks`."""
    if ranks > 1:
        shard_size(arch.num_attention_heads, ranks, "num_attention_heads")
        shard_kv_heads(arch.num_key_value_heads, ranks)
        if arch.moe_layers < arch.num_hidden_layers:
            shard_size(arch.intermediate_size, ranks, "intermediate_size")
        if arch.num_experts:
            expert_layout(arch, ranks)
            shard_size(arch.shared_expert_size, ranks, "shared_expert_size")


def layer_ops(
    arch: Architecture,
    *,
    batch: int,
    tokens: int,
    context: int,
    window: int | None,
    ranks: int = 1,
    fused: bool = False,
) -> list[Op]:
    """Ops of one decoder layer.

    `fused`: QKV and gate/up are one GEMM each and the residual is added inside the next norm, as
    serving engines (vLLM, TensorRT-LLM, SGLang) run them; transformers does not. The write into the
    KV cache belongs to `Attention`.

    With tensor parallelism over `ranks`, heads and FFN are split and each half-layer ends in an
    all-reduce; KV heads fewer than the ranks are replicated, as engines do. Raises as
    `check_shards`.
    """
    m = batch * tokens
    hidden = arch.hidden_size
    # before attention or FFN, and behind it
    norms = [Elementwise("norm", m * hidden)] * (2 if arch.sandwich_norms else 1)
    ends: list[Op] = [AllReduce(m * hidden, ranks)] if ranks > 1 else []
    if not fused:
        ends.append(Elementwise("add", m * hidden))
    attention = _attention_ops(arch, (batch, tokens, context), window, ranks, fused)
    ffn = (
        _expert_ops(arch, m, ranks, fused)
        if arch.num_experts
        else _ffn_ops(arch, m, arch.intermediate_size, ranks, fused)
    )
    return [*norms, *attention, *ends, *norms, *ffn, *ends]


def _attention_ops(
    arch: Architecture, asked: tuple[int, int, int], window: int | None, ranks: int, fused: bool
) -> list[Op]:
    """Projections and attention of one layer; `asked`: batch, tokens and context."""
    m, hidden = asked[0] * asked[1], arch.hidden_size
    q_heads = shard_size(arch.num_attention_heads, ranks, "num_attention_heads")
    if arch.kv_lora_rank:
        return [
            LatentAttention(
                *asked,
                heads=q_heads,
                hidden=hidden,
                q_rank=arch.q_lora_rank,
                latent=arch.kv_numbers,
                rope=arch.qk_rope_head_dim,
                head_dim=arch.head_dim,
                v_dim=arch.v_head_dim,
            )
        ]
    kv_heads = shard_kv_heads(arch.num_key_value_heads, ranks)
    q_size, kv_size = q_heads * arch.head_dim, kv_heads * arch.head_dim
    widths = [q_size + 2 * kv_size] if fused else [q_size, kv_size, kv_size]
    kept = arch.weight_format
    ops: list[Op] = [Gemm(m, width, hidden, kept) for width in widths]
    if arch.qk_norm:
        ops.append(Elementwise("norm", m * (q_size + kv_size)))
    if not arch.learned_positions:
        ops.append(Elementwise("rope", m * (q_size + kv_size)))
    return [
        *ops,
        Attention(*asked, q_heads, kv_heads, arch.head_dim, window),
        Gemm(m, hidden, q_size, kept),
    ]


def _ffn_ops(arch: Architecture, m: int, columns: int, ranks: int, fused: bool) -> list[Op]:
    """A plain FFN of `columns` over all ranks."""
    hidden, ffn = arch.hidden_size, shard_size(columns, ranks, "intermediate_size")
    widths = [ffn] if not arch.gated_mlp else [2 * ffn] if fused else [ffn, ffn]
    kept = arch.weight_format
    ops = [Gemm(m, width, hidden, kept) for width in widths]
    return [*ops, Elementwise("act", m * ffn), Gemm(m, hidden, ffn, kept)]


def _expert_ops(arch: Architecture, m: int, ranks: int, fused: bool) -> list[Op]:
    """Router, experts and, where there are some, shared experts."""
    layout = expert_layout(arch, ranks)
    skew = ROUTING_SKEW if arch.routing_skew is None else arch.routing_skew
    touched = busiest_rank(arch.num_experts, arch.num_experts_per_tok, m, layout.expert_ranks, skew)
    experts = Experts(
        tokens=m,
        hidden=arch.hidden_size,
        inter=arch.moe_intermediate_size // layout.tensor_ranks,
        experts=arch.num_experts // layout.expert_ranks,
        pairs=-(-m * arch.num_experts_per_tok // layout.expert_ranks),
        touched=round(touched, 2),
        format=arch.expert_format,
    )
    shared = (
        _ffn_ops(arch, m, arch.shared_expert_size, ranks, fused) if arch.shared_expert_size else []
    )
    return [Gemm(m, arch.num_experts, arch.hidden_size), experts, *shared]


def layer_groups(arch: Architecture) -> list[tuple[Architecture, Mapping[int | None, int]]]:
    """Layers that run the same but for their windows: (an architecture of such layers, how many
    have each window). Of a model with experts the first `first_dense_layers` have none."""
    if not arch.num_experts or not arch.first_dense_layers:
        return [(arch, arch.layers_by_window())]
    windows, dense = arch.windows(), arch.first_dense_layers
    kinds = ((arch.without_experts(), windows[:dense]), (arch, windows[dense:]))
    return [(layers, Counter(each)) for layers, each in kinds if each]


def head_ops(
    arch: Architecture, *, batch: int, tokens: int, ranks: int = 1, head_tokens: int | None = None
) -> list[Op]:
    """Ops outside the layers: embedding lookup, final norm, language-model head.

    head_tokens: tokens per sequence whose logits are wanted (default all; a prefill wants one).

    With several `ranks` the embedding is split by vocabulary, so its result is summed over the
    ranks, and every rank needs the logits of all: an all-gather of m x head_rows numbers moves what
    an all-reduce of half as many does ((r - 1) / r against 2 (r - 1) / r of the numbers per rank).
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
    """What an engine runs after the logits to choose tokens (greedy: an argmax over them); not part
    of the forward pass."""
    return Elementwise("sample", batch * tokens * arch.head_rows, arch.head_rows)


def model_pass(
    arch: Architecture,
    parts: Sequence[Part],
    *,
    ranks: int = 1,
    fused: bool = False,
    choose: bool = True,
) -> PassOps:
    """What one step of a whole model over all `parts` runs, `choose`: with the choice of the next
    tokens. GEMMs, norms and all-reduces run once over the tokens of all parts, attention for
    each."""
    total = sum(part.batch * part.tokens for part in parts)
    wanted = sum(
        part.batch * (part.tokens if part.logits is None else part.logits) for part in parts
    )
    in_layers: Counter[Op] = Counter()
    for layer, windows in layer_groups(arch):
        layers = sum(windows.values())
        for op in layer_ops(
            layer, batch=total, tokens=1, context=0, window=None, ranks=ranks, fused=fused
        ):
            if not isinstance(op, Attention | LatentAttention):
                in_layers[op] += layers
                continue
            for part in parts:
                own = replace(op, batch=part.batch, tokens=part.tokens, context=part.context)
                for window, count in windows.items():
                    seen = own if isinstance(own, LatentAttention) else replace(own, window=window)
                    in_layers[seen] += count
    outside: Counter[Op] = Counter(
        head_ops(arch, batch=1, tokens=total, ranks=ranks, head_tokens=wanted)
    )
    if choose:
        outside[sample_op(arch, batch=1, tokens=wanted)] += 1
    return PassOps(in_layers, outside, arch.num_hidden_layers, ranks)


def forward_ops(
    arch: Architecture,
    *,
    batch: int,
    tokens: int,
    context: int,
    ranks: int = 1,
    fused: bool = False,
) -> Counter[Op]:
    """Every op of one forward pass with how often it runs."""
    part = Part(batch, tokens, context)
    ops = model_pass(arch, [part], ranks=ranks, fused=fused, choose=False)
    return ops.in_layers + ops.outside
