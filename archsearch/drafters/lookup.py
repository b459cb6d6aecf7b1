"""Drafters without weights: n-gram (prompt lookup) copies what followed the last tokens earlier,
suffix decoding what its trees hold.

They propose only where they find a match: `share` of the rounds. A round without a match is a plain
step of the target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Final, Self

from archsearch.architecture.architecture import Architecture
from archsearch.drafters.drafter import Chosen, Drafter, Family, RoundPlan, RoundRows
from archsearch.errors import InvalidShapeError

# What the host takes to look for a match: a call, and a linear pass over the tokens of each
# sequence. The call and a sequence are assumed. A token: 70.3 ms for 512 sequences of 129,536
# tokens, vLLM's proposer on one thread (its pull request 56732); below 8,192 tokens it runs on one.
CALL_S: Final = 5e-5
SEQUENCE_S: Final = 1e-6
TOKEN_S: Final = 1.06e-9
TREE_FACTOR: Final = 2.0  # suffix trees instead of a scan: assumed


@dataclass(frozen=True)
class NGram(Drafter):
    """Prompt lookup: the longest of the last `max_n` to `min_n` tokens that occurred before, and
    what followed it there."""

    min_n: int = 2
    max_n: int = 5
    share: float | None = None  # of rounds that draft at all; None: not known yet

    family: ClassVar[Family] = "ngram"
    title = "n-gram lookup"
    rounds = "lookup"
    acceptance = "ngram"
    has_layers = False
    trains = False
    choices = {"min_n": (2,), "max_n": (5,)}
    factor: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= self.max_n:
            raise InvalidShapeError(
                f"{self.title} needs 1 <= min_n <= max_n, got {self.min_n} and {self.max_n}"
            )
        if self.share is not None and not 0.0 <= self.share <= 1.0:
            raise InvalidShapeError(
                f"the share of rounds that draft lies between 0 and 1, got {self.share}"
            )

    @classmethod
    def of(cls, target: Architecture, decoder: Architecture | None, chosen: Chosen) -> Self:
        cls.only(chosen)
        return cls(target, int(chosen.get("min_n", cls.min_n)), int(chosen.get("max_n", cls.max_n)))

    @property
    def drafts_share(self) -> float:
        return 1.0 if self.share is None else self.share

    def with_share(self, share: float) -> Self:
        return replace(self, share=share)

    def plan(self, rows: RoundRows) -> RoundPlan:
        """Nothing on the device: a search through the tokens of each sequence on the host."""
        seconds = CALL_S + rows.batch * (SEQUENCE_S + TOKEN_S * rows.context)
        return RoundPlan(None, None, 0, 0, 0, 0, self.factor * seconds)

    @property
    def sharded(self) -> Architecture | None:
        return None

    def parameters(self) -> int:
        return 0

    def label(self) -> str:
        return f"n-gram of {self.min_n} to {self.max_n}"


@dataclass(frozen=True)
class Suffix(NGram):
    """Suffix decoding: trees over prompt and earlier answers; drafts as many tokens as the match is
    long, at most gamma."""

    max_n: int = 24

    family = "suffix"
    title = "suffix decoding"
    acceptance = "suffix"
    choices = {"max_n": (24,)}
    factor: ClassVar[float] = TREE_FACTOR

    def label(self) -> str:
        return f"suffix trees {self.max_n} deep"
