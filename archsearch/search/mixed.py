"""What a draft is worth over a mix of work, as part of its score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from archsearch.estimate import N
from archsearch.records import Stored

Positive = Annotated[float, Stored(above=0.0)]


@dataclass(frozen=True, slots=True)
class PartScore:
    """One kind of request. `gamma` 0: none is faster than drafting nothing there. `running`:
    requests that decode at once; seconds, with the prompts that are read in between. `ttft_s`
    None: more arrive than are served."""

    name: str
    weight: float
    context: int
    running: float
    gamma: int
    alpha: float
    tau: float
    speedup: float
    tpot_s: float
    plain_tpot_s: float
    ttft_s: float | None
    tokens_per_s: float
    plain_tokens_per_s: float


def gain_of(objective: str, value: N, plain: N) -> N:
    """With the draft over without; larger is better."""
    return plain / value if objective == "tpot" else value / plain


@dataclass(frozen=True, slots=True)
class MixScore:
    """The objective over a mix: its `value` with the draft and without (`plain`), and each part.
    `broken_limits`: in words."""

    objective: str
    value: Positive
    plain: Positive
    parts: tuple[PartScore, ...]
    broken_limits: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        """With the draft over without; larger is better."""
        return gain_of(self.objective, self.value, self.plain)
