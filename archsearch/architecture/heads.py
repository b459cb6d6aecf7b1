"""Drafters that are no models of their own: a few layers on a target's hidden states, as the list
of ops that they run.

| kind | what it runs | published as |
|---|---|---|
| `eagle` | [embedding, hidden] through fc; layer 0 without first norm, no last | EAGLE-1, -2 |
| `eagle3` | the target's states through fc; q, k, v of layer 0 read [embedding, that] | EAGLE-3 |
| `peagle` | as EAGLE-3, in one pass: a mask row for each further draft token | P-EAGLE |
| `mtp` | both normed, fc 2h -> h, a layer like the target's, final norm | DeepSeek-V3 |
| `dflash` | states through fc, as keys and values of each layer; a pass writes a block | DFlash |

`eagle`, `mtp` and `dflash` share the target's embedding and head; `eagle3` and `peagle` have a head
of their own, usually trimmed. A round of a chain is one pass over the rows that the target verified
and gamma - 1 later steps of one token (vLLM's `v1/spec_decode/llm_base_proposer.py`, SGLang's
`draft_extend` and `draft`); `dflash` and `peagle` have the first pass only.

With tensor parallelism layers, embedding and head are split like the target's, fc is not (vLLM's
and SGLang's `llama_eagle3.py`). The choice of the token is part of a pass here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import (
    embedding_params,
    layer_params,
    norm_params,
    parameters,
    weight_bytes,
)
from archsearch.architecture.ops import (
    AllReduce,
    Elementwise,
    Gemm,
    Op,
    PassOps,
    layer_ops,
    shard_kv_heads,
)
from archsearch.errors import InvalidShapeError

HeadKind = Literal["eagle", "eagle3", "mtp", "dflash", "peagle"]
# several states through fc; layer 0 reads [embedding, that]; a head of their own
LIKE_EAGLE3: Final = ("eagle3", "peagle")


@dataclass(frozen=True, slots=True)
class FeatureHead:
    """A drafter on hidden states of its target.

    `decoder`: its layers, width, vocabulary and, as `draft_vocab_size`, the rows of its head.
    `target_hidden_size`: width of a hidden state; `states`: how many of them fc reads.
    `own_embedding`: it brings its own table, as it must where it is not as wide as the target.
    """

    kind: HeadKind
    decoder: Architecture
    target_hidden_size: int
    states: int = 1
    own_embedding: bool = False

    def __post_init__(self) -> None:
        if self.target_hidden_size < 1 or self.states < 1:
            raise InvalidShapeError(
                f"a head reads at least one hidden state of at least one number, got {self.states}"
                f" of {self.target_hidden_size}"
            )
        if self.kind in ("eagle", "mtp") and self.states != 1:
            raise InvalidShapeError(
                f"a head of kind {self.kind} reads one hidden state, got {self.states}"
            )
        narrow = self.decoder.hidden_size != self.target_hidden_size
        if narrow and (self.kind not in LIKE_EAGLE3 or not self.own_embedding):
            raise InvalidShapeError(
                f"a head of width {self.decoder.hidden_size} cannot share embedding or head of a"
                f" target of width {self.target_hidden_size}: only eagle3 and peagle with an"
                " embedding of their own may differ"
            )

    @property
    def fc_inputs(self) -> int:
        """Numbers that fc turns into one of the head's own hidden states."""
        if self.kind in ("eagle", "mtp"):
            return self.decoder.hidden_size + self.target_hidden_size
        return self.states * self.target_hidden_size


def head_parameters(head: FeatureHead) -> int:
    """Parameters that the head adds to its target: shared tables do not count."""
    decoder = head.decoder
    count = head.fc_inputs * decoder.hidden_size + decoder.num_hidden_layers * layer_params(decoder)
    norm = norm_params(decoder)
    if head.kind == "eagle":
        count -= norm  # layer 0 has one norm
    elif head.kind in LIKE_EAGLE3:
        # layer 0: a norm more, and twice the inputs of q, k and v; then the final norm and the head
        count += decoder.hidden_size * (decoder.q_size + 2 * decoder.kv_size) + 2 * norm
        count += decoder.head_rows * decoder.hidden_size
        # what replaces the states of a mask row
        count += head.fc_inputs if head.kind == "peagle" else 0
    else:  # mtp: norms of embedding and state, final norm; dflash: norm of the states, final norm
        count += (3 if head.kind == "mtp" else 2) * norm
    return count + (embedding_params(decoder) if head.own_embedding else 0)


def head_weight_bytes(head: FeatureHead, dtype_bytes: float) -> int:
    """Bytes of the weights that the head adds to its target; most heads are kept in 16 bits on
    8-bit targets too."""
    layers = head.decoder
    saved = parameters(layers) * dtype_bytes - weight_bytes(layers, dtype_bytes)
    return int(head_parameters(head) * dtype_bytes - saved)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The rows of a pass, `tokens` of each of `batch` sequences with `context` tokens in the cache,
    and how it is run. `fused`: as in `layer_ops`. `scattered`: a trimmed head's logits go into a
    row of the whole vocabulary before the token is chosen (`compute_logits` in vLLM's
    `llama_eagle3.py`); others, and vLLM with `use_local_argmax_reduction`, choose among the trimmed
    rows."""

    batch: int
    context: int
    tokens: int = 1
    ranks: int = 1
    fused: bool = True
    scattered: bool = True

    @property
    def m(self) -> int:
        return self.batch * self.tokens

    def layer_ops(self, decoder: Architecture, window: int | None, seen: int = 0) -> list[Op]:
        """Ops of one plain layer; `seen`: tokens in the cache beyond the context."""
        return layer_ops(
            decoder,
            batch=self.batch,
            tokens=self.tokens,
            context=self.context + seen,
            window=window,
            ranks=self.ranks,
            fused=self.fused,
        )


def first_pass_ops(head: FeatureHead, rows: HeadRows) -> PassOps:
    """The pass over the rows that the target has just verified, with which a round of drafting
    begins: gamma + 1 tokens where rejected ones are read again, as engines do.

    The head runs on the last row of each sequence; that of a block drafter on all but the first.
    `peagle` adds tokens - 2 mask rows, and its head runs on those and the last row before them.

    Raises: InvalidShapeError where the head does not divide by the ranks.
    """
    if head.kind == "dflash":
        return _block_ops(head, rows)
    return _chain_ops(head, rows, on_target=True)


@lru_cache(maxsize=64)  # asked again for every gamma of a round
def later_step_ops(head: FeatureHead, rows: HeadRows) -> PassOps:
    """One further step of a chain: a token a sequence, on the head's own hidden state."""
    return _chain_ops(head, rows, on_target=False)


def _chain_ops(head: FeatureHead, rows: HeadRows, *, on_target: bool) -> PassOps:
    through_fc, drafted = rows.m, rows.batch
    if head.kind == "peagle":
        drafted = rows.batch * (rows.tokens - 1)
        # a mask row for every draft token but the first
        rows = replace(rows, tokens=2 * (rows.tokens - 1))
    m, width = rows.m, head.decoder.hidden_size
    outside: Counter[Op] = Counter(_embedding(m, width, rows.ranks))
    if head.kind == "mtp":
        outside[Elementwise("norm", m * width)] += 1
        outside[Elementwise("norm", m * head.target_hidden_size)] += 1
    if on_target or head.kind != "eagle3":  # joining the inputs in memory, then fc
        outside[Elementwise("add", through_fc * head.fc_inputs)] += 1
        outside[Gemm(through_fc, width, head.fc_inputs)] += 1
    # EAGLE-1 has no final norm: what is left of the residual is added by a kernel of its own
    outside[Elementwise("add" if head.kind == "eagle" else "norm", m * width)] += 1
    outside.update(_tokens(head, drafted, rows))
    in_layers: Counter[Op] = Counter()
    first, *others = head.decoder.windows()
    in_layers.update(_first_layer(head, rows.layer_ops(head.decoder, first), m))
    for window, count in Counter(others).items():
        for op in rows.layer_ops(head.decoder, window):
            in_layers[op] += count
    return PassOps(in_layers, outside, head.decoder.num_hidden_layers, rows.ranks)


def _first_layer(head: FeatureHead, ops: list[Op], m: int) -> list[Op]:
    """Layer 0 of a chain, from the plain layer's ops for m rows."""
    width = head.decoder.hidden_size
    if head.kind == "eagle":
        return ops[1:]  # without its first norm
    if head.kind == "mtp":
        return ops
    # after q, k, v
    first = next(place for place, op in enumerate(ops) if not isinstance(op, Gemm) and place > 0)
    wide = [replace(op, k=2 * op.k) if isinstance(op, Gemm) else op for op in ops[:first]]
    # one norm each for embedding and hidden state, and the copy that joins them
    return [Elementwise("norm", m * width), Elementwise("add", 2 * m * width), *wide, *ops[first:]]


def _block_ops(head: FeatureHead, rows: HeadRows) -> PassOps:
    """DFlash: keys and values of all layers from the target's rows in one GEMM, then one pass over
    the block.

    The block of `tokens` is the token known and tokens - 1 masks; it sees the cache, the verified
    rows and itself.
    """
    decoder = head.decoder
    m, width, layers = rows.m, decoder.hidden_size, decoder.num_hidden_layers
    kv_size = shard_kv_heads(decoder.num_key_value_heads, rows.ranks) * decoder.head_dim
    outside: Counter[Op] = Counter(_embedding(m, width, rows.ranks))
    outside.update(
        [
            Elementwise("add", m * head.fc_inputs),
            Gemm(m, width, head.fc_inputs),
            Gemm(m, 2 * layers * kv_size, width),
            Elementwise("rope", m * layers * kv_size),
        ]
    )
    outside[Elementwise("norm", m * width)] += 2  # of the states and the final one
    if decoder.qk_norm:
        outside[Elementwise("norm", m * layers * kv_size)] += 1
    outside.update(_tokens(head, rows.batch * (rows.tokens - 1), rows))
    in_layers: Counter[Op] = Counter()
    for window, count in decoder.layers_by_window().items():
        for op in rows.layer_ops(decoder, window, seen=rows.tokens):
            in_layers[op] += count
    return PassOps(in_layers, outside, layers, rows.ranks)


def _embedding(m: int, width: int, ranks: int) -> Iterable[Op]:
    """The lookup of m rows, split by vocabulary over the ranks."""
    yield Elementwise("embed", m * width)
    if ranks > 1:
        yield AllReduce(m * width, ranks)


def _tokens(head: FeatureHead, m: int, rows: HeadRows) -> Iterable[Op]:
    """Logits of m rows and the choice of a token from each; the gather of logits counts as in
    `ops.head_ops`."""
    decoder = head.decoder
    yield Gemm(m, -(-decoder.head_rows // rows.ranks), decoder.hidden_size)
    if rows.ranks > 1:
        yield AllReduce(m * decoder.head_rows // 2, rows.ranks)
    if rows.scattered and decoder.trimmed:
        yield Elementwise("add", m * decoder.vocab_size)
    read = decoder.vocab_size if rows.scattered else decoder.head_rows
    yield Elementwise("sample", m * read, read)
