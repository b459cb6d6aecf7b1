"""Heads on hidden states of the target, a few layers as the list of ops that they run; and Medusa,
whose heads read the last state only.

| family | what it runs | published as |
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Final, Self

from archsearch.architecture import counts
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import (
    AllReduce,
    Elementwise,
    Gemm,
    Op,
    PassOps,
    head_ops,
    layer_ops,
    shard_kv_heads,
)
from archsearch.architecture.published_drafters import PublishedDrafter
from archsearch.drafters.drafter import Chosen, Drafter, RoundKind, RoundPlan, RoundRows
from archsearch.drafters.models import PARALLEL_ROWS
from archsearch.errors import InvalidShapeError
from archsearch.speedup import Tree

# rows of 24 of 27 public EAGLE-3 configurations (SpecForge, configs/*.json)
DRAFT_VOCABULARY: Final = 32_000
AUXILIARY_STATES: Final = 3  # EAGLE-3: a low, a middle and a high layer (arXiv 2503.01840)
PARALLEL_LAYERS: Final = 4  # P-EAGLE (SpecForge, configs/*.json: the one of its kind)
# DFlash on Qwen3-4B and 8B, and as many hidden states (SpecForge, configs/qwen3-4b-dflash.json)
BLOCK_LAYERS: Final = 5


@dataclass(frozen=True)
class FeatureDrafter(Drafter):
    """A head on the target's hidden states, `target_hidden_size` wide. `states`: how many of them
    it reads; `own_embedding`: it brings its own table, as it must where it is not as wide as the
    target."""

    target_hidden_size: int = 0
    states: int = 1
    own_embedding: bool = False

    rounds: ClassVar[RoundKind] = "feature_head"
    # several states through fc; layer 0 reads [embedding, that]; a head of its own, maybe trimmed
    own_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.target_hidden_size < 1 or self.states < 1:
            raise InvalidShapeError(
                f"a head reads at least one hidden state of at least one number, got {self.states}"
                f" of {self.target_hidden_size}"
            )
        if self.states > 1 and not self.choices:
            raise InvalidShapeError(
                f"a head of kind {self.family} reads one hidden state, got {self.states}"
            )
        width = self.architecture.hidden_size
        if width != self.target_hidden_size and not (self.own_rows and self.own_embedding):
            raise InvalidShapeError(
                f"a head of width {width} cannot share embedding or head of a target of width"
                f" {self.target_hidden_size}: only eagle3 and peagle with an embedding of their own"
                " may differ"
            )

    @property
    def fc_inputs(self) -> int:
        """Numbers that fc turns into one of the head's own hidden states."""
        beside = 0 if self.choices else self.architecture.hidden_size
        return beside + self.states * self.target_hidden_size

    @property
    def states_read(self) -> int:
        return self.states

    @classmethod
    def usual_states(cls) -> int:
        """How many hidden states heads of the family read as a rule."""
        return int(cls.choices.get("states", (1,))[0])

    @classmethod
    def usual(cls, target: Architecture) -> Self:
        """Of the target's own width, FFN and heads: plain Llama layers whatever the target is
        (speculators and SpecForge train them so); `mtp` is a layer of the target's own type."""
        return cls(_usual_layers(cls, target), target.hidden_size, cls.usual_states())

    @classmethod
    def of(cls, target: Architecture, decoder: Architecture | None, chosen: Chosen) -> Self:
        cls.only(chosen)
        usual = cls.usual(target)
        if decoder is None:
            return usual
        # A head's layers are plain Llama's whatever the target is; its rows are its own or the
        # target's.
        layers = decoder.replace(qk_norm=usual.architecture.qk_norm, tie_word_embeddings=False)
        if not cls.own_rows and layers.trimmed:
            raise InvalidShapeError(f"the {cls.title} shares the target's head, which has all rows")
        narrow = layers.hidden_size != target.hidden_size
        return cls(layers, target.hidden_size, int(chosen.get("states", usual.states)), narrow)

    @classmethod
    def published(cls, row: PublishedDrafter, target: Architecture) -> Self:
        """The usual one but for what the row says."""
        usual = cls.usual(target)
        fields = {name: v for name, v in row.changes if hasattr(usual.architecture, name)}
        layers = usual.architecture.replace(**fields)
        return replace(usual, architecture=layers, own_embedding=row.own_embedding)

    def plan(self, rows: RoundRows) -> RoundPlan:
        """One pass over the gamma + 1 rows that the target verified: of P-EAGLE with gamma - 1
        masks; of DFlash after their keys and values, all layers see the cache and the block."""
        whole = self.first_pass(rows)
        return RoundPlan(whole, None, 0, rows.batch * rows.gamma, whole.layers, 1)

    def first_pass(self, rows: RoundRows) -> PassOps:
        """The pass over the rows that the target has just verified, with which a round of drafting
        begins: gamma + 1 tokens where rejected ones are read again, as engines do. The head runs
        on the last row of each sequence.

        Raises InvalidShapeError where the head does not divide by the ranks.
        """
        tokens = rows.gamma + 1
        return self.chain_pass(rows, tokens, rows.batch * tokens, rows.batch)

    def chain_pass(self, rows: RoundRows, tokens: int, read: int | None, drafted: int) -> PassOps:
        """A pass over `tokens` rows of each sequence, of which fc makes `read` in all (None: they
        are the head's own hidden states), and the choice of `drafted` tokens."""
        m, width, layers = rows.batch * tokens, self.architecture.hidden_size, self.architecture
        norm = Elementwise("norm", m * width)
        before, after = self._ends(rows, m, drafted)
        outside = Counter(before)
        if self.family == "mtp":
            outside.update([norm, Elementwise("norm", m * self.target_hidden_size)])
        if read is not None:  # joining the inputs in memory, then fc
            outside[Elementwise("add", read * self.fc_inputs)] += 1
            outside[Gemm(read, width, self.fc_inputs)] += 1
        # EAGLE-1 has no final norm: what is left of the residual is added by a kernel of its own
        outside[Elementwise("add", m * width) if self.family == "eagle" else norm] += 1
        outside.update(after)
        in_layers: Counter[Op] = Counter()
        first, *others = layers.windows()
        in_layers.update(self._first_layer(self.layer(rows, tokens, first), m))
        for window, count in Counter(others).items():
            for op in self.layer(rows, tokens, window):
                in_layers[op] += count
        return PassOps(in_layers, outside, layers.num_hidden_layers, rows.ranks)

    def layer(self, rows: RoundRows, tokens: int, window: int | None, seen: int = 0) -> list[Op]:
        """Ops of one plain layer; `seen`: tokens in the cache beyond the context."""
        return layer_ops(
            self.architecture,
            batch=rows.batch,
            tokens=tokens,
            context=rows.context + seen,
            window=window,
            ranks=rows.ranks,
            fused=rows.fused,
        )

    def _first_layer(self, ops: list[Op], m: int) -> list[Op]:
        """Layer 0 of a chain, from the plain layer's ops for m rows."""
        width = self.architecture.hidden_size
        if self.family == "eagle":
            return ops[1:]  # without its first norm
        if not self.own_rows:
            return ops
        # after q, k, v
        first = next(i for i, op in enumerate(ops) if not isinstance(op, Gemm) and i > 0)
        wide = [replace(op, k=2 * op.k) if isinstance(op, Gemm) else op for op in ops[:first]]
        # one norm each for embedding and hidden state, and the copy that joins them
        joined = [Elementwise("norm", m * width), Elementwise("add", 2 * m * width)]
        return [*joined, *wide, *ops[first:]]

    def _ends(self, rows: RoundRows, m: int, drafted: int) -> tuple[list[Op], list[Op]]:
        """Embedding of m rows; logits of `drafted` rows and the choice of a token from each."""
        layers, ranks = self.architecture, rows.ranks
        ops = head_ops(layers, batch=1, tokens=m, ranks=ranks, head_tokens=drafted)
        norm = 1 + (ranks > 1)
        read = layers.vocab_size if rows.scattered else layers.head_rows
        if rows.scattered and layers.trimmed:
            ops.append(Elementwise("add", drafted * read))
        return ops[:norm], [*ops[norm + 1 :], Elementwise("sample", drafted * read, read)]

    def idle(self, rows: RoundRows) -> PassOps | None:
        """The catch-up pass over the one row that the target has written, without the head (vLLM,
        at gamma 0 of a schedule)."""
        headless = replace(self, architecture=self.architecture.replace(draft_vocab_size=1))
        return headless.first_pass(replace(rows, gamma=1))

    def parameters(self) -> int:
        layers, norm = self.architecture, counts.norm_params(self.architecture)
        count = self.fc_inputs * layers.hidden_size
        count += layers.num_hidden_layers * counts.layer_params(layers)
        if self.family == "eagle":
            count -= norm  # layer 0 has one norm
        elif self.own_rows:
            # layer 0: a norm more, and twice the inputs of q, k and v; then the final norm and the
            # head
            count += layers.hidden_size * (layers.q_size + 2 * layers.kv_size) + 2 * norm
            count += layers.head_rows * layers.hidden_size
            # what replaces the states of a mask row
            count += self.fc_inputs if self.family == "peagle" else 0
        else:  # mtp: norms of embedding and state, final norm; dflash: norm of the states, final
            count += (3 if self.family == "mtp" else 2) * norm
        return count + (counts.embedding_params(layers) if self.own_embedding else 0)

    def weight_bytes(self, dtype_bytes: float) -> int:
        """Most heads are kept in 16 bits on 8-bit targets too."""
        layers = self.architecture
        saved = counts.parameters(layers) * dtype_bytes - counts.weight_bytes(layers, dtype_bytes)
        return int(self.parameters() * dtype_bytes - saved)

    def body_parameters(self) -> int:
        decoder = self.architecture
        rows = decoder.head_rows * decoder.hidden_size if self.own_rows else 0
        own = decoder.vocab_size * decoder.hidden_size if self.own_embedding else 0
        return self.parameters() - rows - own

    def label(self) -> str:
        states = f" from {self.states} states" if self.states > 1 else ""
        return f"{self.architecture.label()}{states}"

    def check(self, target: Architecture) -> None:
        """Raise InvalidShapeError where width, vocabulary or the number of states are those of
        another target."""
        super().check(target)
        if self.target_hidden_size != target.hidden_size:
            raise InvalidShapeError(
                f"this {self.title} reads hidden states of width {self.target_hidden_size}, the"
                f" target's have {target.hidden_size}: it was made for another target"
            )
        if self.states > target.num_hidden_layers:
            raise InvalidShapeError(
                f"this {self.title} reads {self.states} hidden states, the target has"
                f" {target.num_hidden_layers} layers"
            )


@lru_cache(maxsize=64)  # asked for every shape of a search
def _usual_layers(made: type[FeatureDrafter], target: Architecture) -> Architecture:
    kind = made.family
    decoder = (target.in_format("") if kind == "mtp" else target.dense()).replace(
        first_dense_layers=0,
        num_hidden_layers={"dflash": BLOCK_LAYERS, "peagle": PARALLEL_LAYERS}.get(kind, 1),
        draft_vocab_size=min(DRAFT_VOCABULARY, target.vocab_size) if made.own_rows else None,
        tie_word_embeddings=False,
        window_pattern="L",
        sliding_window=None,
    )
    if kind == "mtp":
        return decoder
    return decoder.replace(attention_bias=False, qk_norm=kind == "dflash")


@dataclass(frozen=True)
class ChainHead(FeatureDrafter):
    """A head that drafts token by token: a chain, or a `tree`."""

    tree: Tree | None = None

    def gammas(self, asked: Sequence[int]) -> tuple[int, ...]:
        return super().gammas(asked) if self.tree is None else (self.tree.steps,)

    def plan(self, rows: RoundRows) -> RoundPlan:
        """The first pass, then gamma - 1 steps; of a tree each runs the `topk` rows that it goes on
        from."""
        width = 1 if self.tree is None else self.tree.topk
        alone = isinstance(rows.gamma, int) and rows.gamma < 2  # of many gammas some go on
        step = None if alone else _step(self, replace(rows, batch=rows.batch * width, gamma=1))
        verified = self.tree.tokens if self.tree is not None and width > 1 else None
        first, more = super().plan(rows), rows.gamma - 1
        return replace(first, step=step, steps=more, launched=rows.gamma, verified=verified)

    def label(self) -> str:
        if self.tree is None:
            return super().label()
        return f"{super().label()} tree {self.tree.topk},{self.tree.steps},{self.tree.tokens}"

    def to_dict(self) -> dict[str, object]:
        own = {name: value for name, value in super().to_dict().items() if name != "tree"}
        return own if self.tree is None else own | {"tree": asdict(self.tree)}

    @classmethod
    def from_fields(cls, architecture: Architecture, data: Mapping[str, Any]) -> Self:
        made = super().from_fields(architecture, {**data, "tree": None})
        return replace(made, tree=Tree(**data["tree"])) if data.get("tree") else made


@lru_cache(maxsize=64)  # asked again for every gamma of a round
def _step(head: ChainHead, rows: RoundRows) -> PassOps:
    """One further step of a chain: a token a sequence, on the head's own hidden state."""
    read = None if head.family == "eagle3" else rows.batch
    return head.chain_pass(rows, 1, read, rows.batch)


@dataclass(frozen=True)
class Eagle(ChainHead):
    """EAGLE-1 and -2."""

    family = "eagle"
    title = "EAGLE-1 head"
    acceptance = "eagle1"


@dataclass(frozen=True)
class Eagle3(ChainHead):
    """EAGLE-3."""

    family = "eagle3"
    title = "EAGLE-3 head"
    acceptance = "eagle3"
    training_rows = 7.0  # steps that are unrolled (SpecForge, --ttt-length)
    choices = {"states": (AUXILIARY_STATES,)}
    own_rows = True


@dataclass(frozen=True)
class Mtp(ChainHead):
    """The layer that a target was trained with to predict a token further, used again for each
    step."""

    family = "mtp"
    title = "MTP layer"
    acceptance = "mtp"
    has_layers = False
    trains = False

    @classmethod
    def lacking(cls, target: Architecture) -> str:
        words = f"its checkpoint ({target.model_type}) holds no MTP layer"
        return "" if target.mtp_layers else words


@dataclass(frozen=True)
class PEagle(FeatureDrafter):
    """P-EAGLE: an EAGLE-3 head that drafts all tokens in one pass. `most`: the tokens that it was
    trained to draft."""

    most: int = 8

    family = "peagle"
    title = "P-EAGLE head"
    rounds = "parallel_head"
    acceptance = "parallel_head"
    training_rows = PARALLEL_ROWS
    choices = {"states": (AUXILIARY_STATES,)}
    own_rows = True

    def first_pass(self, rows: RoundRows) -> PassOps:
        """With a mask row for every draft token but the first; the head runs on those and the last
        row before them."""
        drafted = rows.batch * rows.gamma
        return self.chain_pass(rows, 2 * rows.gamma, rows.batch * (rows.gamma + 1), drafted)


@dataclass(frozen=True)
class DFlash(FeatureDrafter):
    """DFlash: a block of masks filled in one pass. `block`: the token known and the most that it
    drafts."""

    block: int = 16

    family = "dflash"
    title = "DFlash head"
    rounds = "block"
    acceptance = "block"
    # 512 blocks of 16 in 2,048 tokens (SpecForge, example of Qwen3.6-27B)
    training_rows = 4.0
    choices = {"states": (BLOCK_LAYERS,), "block": (16,)}

    @classmethod
    def published(cls, row: PublishedDrafter, target: Architecture) -> Self:
        made = super().published(row, target)
        return replace(made, block=dict(row.changes).get("block", made.block))

    @classmethod
    def of(cls, target: Architecture, decoder: Architecture | None, chosen: Chosen) -> Self:
        """Engines share the target's tables with it: it is as wide as the target."""
        made = super().of(target, decoder, chosen)
        return replace(made, block=int(chosen.get("block", made.block)))

    def first_pass(self, rows: RoundRows) -> PassOps:
        """Keys and values of all layers from the target's rows in one GEMM, then one pass over the
        block.

        The block of gamma + 1 is the token known and gamma masks, on which the head runs; it sees
        the cache, the verified rows and itself.
        """
        layers, tokens = self.architecture, rows.gamma + 1
        m, width, count = rows.batch * tokens, layers.hidden_size, layers.num_hidden_layers
        kv_size = shard_kv_heads(layers.num_key_value_heads, rows.ranks) * layers.head_dim
        before, after = self._ends(rows, m, rows.batch * rows.gamma)
        outside = Counter(before)
        outside.update(
            [
                Elementwise("add", m * self.fc_inputs),
                Gemm(m, width, self.fc_inputs),
                Gemm(m, 2 * count * kv_size, width),
                Elementwise("rope", m * count * kv_size),
                *[Elementwise("norm", m * width)] * 2,  # of the states and the final one
            ]
        )
        if layers.qk_norm:
            outside[Elementwise("norm", m * count * kv_size)] += 1
        outside.update(after)
        in_layers: Counter[Op] = Counter()
        for window, times in layers.layers_by_window().items():
            for op in self.layer(rows, tokens, window, seen=tokens):
                in_layers[op] += times
        return PassOps(in_layers, outside, count, rows.ranks)

    @property
    def most(self) -> int:
        return self.block - 1

    def label(self) -> str:
        return f"{super().label()} block {self.block}"


# Medusa-1 and -2 (arXiv 2401.10774) train five, of which the last is hardly ever accepted
USUAL_HEADS: Final = 4


@dataclass(frozen=True)
class Medusa(Drafter):
    """`heads` heads of `residual` layers h -> h each, and a head to the vocabulary, their own or
    (`shared_head`) the target's.

    gamma tokens take the first gamma heads; a head that is not asked for is not run.
    """

    heads: int = USUAL_HEADS
    residual: int = 1
    shared_head: bool = False

    family = "medusa"
    title = "Medusa heads"
    rounds = "medusa"
    acceptance = "medusa"
    has_layers = False
    choices = {"heads": (1, 2, 3, 4, 5), "residual_layers": (1,), "shared_head": (False, True)}

    @classmethod
    def of(cls, target: Architecture, decoder: Architecture | None, chosen: Chosen) -> Self:
        cls.only(chosen)
        heads, residual = chosen.get("heads", USUAL_HEADS), chosen.get("residual_layers", 1)
        return cls(target, int(heads), int(residual), bool(chosen.get("shared_head", False)))

    @classmethod
    def published(cls, row: PublishedDrafter, target: Architecture) -> Self:
        return cls(target, dict(row.changes).get("heads", USUAL_HEADS))

    @property
    def most(self) -> int:
        return self.heads

    def plan(self, rows: RoundRows) -> RoundPlan:
        """gamma heads on the last accepted row of each sequence, one after the other (vLLM loops
        over them); no cache."""
        width, vocabulary = self.architecture.hidden_size, self.architecture.vocab_size
        m = rows.batch
        small = (Elementwise(name, m * width) for name in ("act", "add"))
        layer: list[Op] = [Gemm(m, width, width), *small]
        ops = Counter(dict.fromkeys(layer, self.residual * rows.gamma))
        ops[Gemm(m, -(-vocabulary // rows.ranks), width)] += rows.gamma
        if rows.ranks > 1:
            # the gather of logits, as in `ops.head_ops`
            ops[AllReduce(m * vocabulary // 2, rows.ranks)] += rows.gamma
        ops[Elementwise("sample", m * vocabulary, vocabulary)] += rows.gamma
        return RoundPlan(
            PassOps(Counter(), ops, 0, rows.ranks), None, 0, m * rows.gamma, 0, rows.gamma
        )

    @property
    def sharded(self) -> Architecture | None:
        return None

    def parameters(self) -> int:
        width = self.architecture.hidden_size
        own = 0 if self.shared_head else width * self.architecture.vocab_size
        return self.heads * (self.residual * (width * width + width) + own)

    def label(self) -> str:
        return f"{self.heads} Medusa heads, " + (
            "the target's rows" if self.shared_head else "rows of their own"
        )
