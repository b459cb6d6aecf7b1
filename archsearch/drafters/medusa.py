"""Medusa: K heads on the target's last hidden state, each for one token further; they do not see
each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Self

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import AllReduce, Elementwise, Gemm, Op, PassOps
from archsearch.architecture.published_drafters import PublishedDrafter
from archsearch.drafters.drafter import (
    Choice,
    Drafter,
    Family,
    RoundKind,
    RoundPlan,
    RoundRows,
    only,
)

USUAL_HEADS: Final = (
    4  # Medusa-1 and -2 (arXiv 2401.10774) train five, of which the last is hardly ever accepted
)


@dataclass(frozen=True)
class Medusa(Drafter):
    """`heads` heads of `residual` layers h -> h each, and a head to the vocabulary, their own or
    (`shared_head`) the target's.

    gamma tokens take the first gamma heads; a head that is not asked for is not run.
    """

    heads: int = USUAL_HEADS
    residual: int = 1
    shared_head: bool = False

    family: ClassVar[Family] = "medusa"
    title: ClassVar[str] = "Medusa heads"
    rounds: ClassVar[RoundKind] = "medusa"
    acceptance: ClassVar[str] = "medusa"
    has_layers: ClassVar[bool] = False
    choices: ClassVar[Mapping[str, tuple[Choice, ...]]] = {
        "heads": (1, 2, 3, 4, 5),
        "residual_layers": (1,),
        "shared_head": (False, True),
    }

    @classmethod
    def usual(cls, target: Architecture) -> Self:
        return cls(target)

    @classmethod
    def of(
        cls, target: Architecture, decoder: Architecture | None, chosen: Mapping[str, Choice]
    ) -> Self:
        only(chosen, cls.choices, cls.family)
        heads, residual = (
            int(chosen.get("heads", USUAL_HEADS)),
            int(chosen.get("residual_layers", 1)),
        )
        return cls(target, heads, residual, bool(chosen.get("shared_head", False)))

    @classmethod
    def published(cls, row: PublishedDrafter, target: Architecture) -> Self:
        return cls(target, dict(row.changes).get("heads", USUAL_HEADS))

    def gammas(self, asked: Sequence[int]) -> tuple[int, ...]:
        return tuple(gamma for gamma in asked if gamma <= self.heads)

    def plan(self, rows: RoundRows) -> RoundPlan:
        """gamma heads on the last accepted row of each sequence, one after the other (vLLM loops
        over them); no cache."""
        width, vocabulary, m = (
            self.architecture.hidden_size,
            self.architecture.vocab_size,
            rows.batch,
        )
        ops: Counter[Op] = Counter()
        ops[Gemm(m, width, width)] += self.residual * rows.gamma
        ops[Elementwise("act", m * width)] += self.residual * rows.gamma
        ops[Elementwise("add", m * width)] += self.residual * rows.gamma
        ops[Gemm(m, -(-vocabulary // rows.ranks), width)] += rows.gamma
        if rows.ranks > 1:
            ops[AllReduce(m * vocabulary // 2, rows.ranks)] += (
                rows.gamma
            )  # the gather of logits, as in `ops.head_ops`
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
