"""Heads on hidden states of the target: EAGLE-1 and -3, MTP, P-EAGLE, DFlash (what they
run: `archsearch.architecture.heads`); and Medusa, whose heads read the last state only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Final, Self, cast

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.heads import (
    FeatureHead,
    HeadKind,
    HeadRows,
    first_pass_ops,
    head_parameters,
    head_weight_bytes,
    later_step_ops,
)
from archsearch.architecture.ops import AllReduce, Elementwise, Gemm, Op, PassOps
from archsearch.architecture.published_drafters import (
    AUXILIARY_STATES,
    BLOCK_LAYERS,
    PublishedDrafter,
    head_of,
    usual_head,
)
from archsearch.drafters.drafter import Chosen, Drafter, RoundKind, RoundPlan, RoundRows
from archsearch.drafters.models import PARALLEL_ROWS
from archsearch.errors import InvalidShapeError
from archsearch.speedup import Tree


@dataclass(frozen=True)
class FeatureDrafter(Drafter):
    """A head on the target's hidden states. `states`: how many of them it reads; `own_embedding`:
    it brings its own table."""

    target_hidden_size: int = 0
    states: int = 1
    own_embedding: bool = False

    rounds: ClassVar[RoundKind] = "feature_head"
    own_rows: ClassVar[bool] = False  # of its head, which may be trimmed

    @classmethod
    def from_head(cls, head: FeatureHead) -> Self:
        """The drafter with the shape of `head`, whose kind is this family's."""
        return cls(head.decoder, head.target_hidden_size, head.states, head.own_embedding)

    @property
    def head(self) -> FeatureHead:
        """What it runs, as a list of ops."""
        kind = cast(HeadKind, self.family)
        return FeatureHead(
            kind, self.architecture, self.target_hidden_size, self.states, self.own_embedding
        )

    @property
    def states_read(self) -> int:
        return self.states

    @classmethod
    def usual(cls, target: Architecture) -> Self:
        return cls.from_head(usual_head(target, cast(HeadKind, cls.family)))

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
        made = cls(layers, target.hidden_size, int(chosen.get("states", usual.states)), narrow)
        _ = made.head  # refuses widths that cannot be
        return made

    @classmethod
    def published(cls, row: PublishedDrafter, target: Architecture) -> Self:
        return cls.from_head(head_of(row, target, cast(HeadKind, cls.family)))

    def plan(self, rows: RoundRows) -> RoundPlan:
        """One pass over the gamma + 1 rows that the target verified: of P-EAGLE with gamma - 1
        masks; of DFlash after their keys and values, all layers see the cache and the block."""
        whole = first_pass_ops(self.head, _rows(rows, rows.gamma + 1))
        return RoundPlan(whole, None, 0, rows.batch * rows.gamma, whole.layers, 1)

    def idle(self, rows: RoundRows) -> PassOps | None:
        """The catch-up pass over the one row that the target has written, without the head (vLLM,
        at gamma 0 of a schedule)."""
        headless = replace(self, architecture=self.architecture.replace(draft_vocab_size=1))
        return headless.plan(replace(rows, gamma=1)).first

    def parameters(self) -> int:
        return head_parameters(self.head)

    def weight_bytes(self, dtype_bytes: float) -> int:
        return head_weight_bytes(self.head, dtype_bytes)

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
        wide = _rows(replace(rows, batch=rows.batch * width), 1)
        step = None if alone else later_step_ops(self.head, wide)
        verified = self.tree.tokens if self.tree is not None and width > 1 else None
        first, more = super().plan(rows), rows.gamma - 1
        return replace(first, step=step, steps=more, launched=rows.gamma, verified=verified)

    def label(self) -> str:
        if self.tree is None:
            return super().label()
        return f"{super().label()} tree {self.tree.topk},{self.tree.steps},{self.tree.tokens}"

    def to_dict(self) -> dict[str, object]:
        tree = self.tree
        own = super().to_dict() | {"tree": None if tree is None else asdict(tree)}
        return {name: value for name, value in own.items() if name != "tree" or value}

    @classmethod
    def from_fields(cls, architecture: Architecture, data: Mapping[str, Any]) -> Self:
        made = super().from_fields(architecture, {**data, "tree": None})
        return replace(made, tree=Tree(**data["tree"])) if data.get("tree") else made


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
        block = int(chosen.get("block", made.block))
        return cls(
            made.architecture, made.target_hidden_size, made.states, made.own_embedding, block
        )

    @property
    def most(self) -> int:
        return self.block - 1

    def label(self) -> str:
        return f"{super().label()} block {self.block}"


def _rows(rows: RoundRows, tokens: int) -> HeadRows:
    """The rows of a pass over so many tokens of each sequence."""
    return HeadRows(rows.batch, rows.context, tokens, rows.ranks, rows.fused, rows.scattered)


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
        ops: Counter[Op] = Counter()
        ops[Gemm(m, width, width)] += self.residual * rows.gamma
        ops[Elementwise("act", m * width)] += self.residual * rows.gamma
        ops[Elementwise("add", m * width)] += self.residual * rows.gamma
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

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        return 0

    def label(self) -> str:
        return f"{self.heads} Medusa heads, " + (
            "the target's rows" if self.shared_head else "rows of their own"
        )
