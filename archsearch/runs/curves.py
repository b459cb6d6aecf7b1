"""curves.json: what the best candidates would gain at other batch sizes, contexts, alphas and
gammas, and where their time goes.

Worked out when a run is written, so that its report needs no profile. Everything in it is
predicted. Times in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from archsearch.estimate import Estimate
from archsearch.search.ranking import Rival

CURVES_FILE: Final = "curves.json"
FORMAT: Final = 1
Swept = Literal["batch", "context", "alpha", "gamma"]
SWEPT: Final[tuple[Swept, ...]] = get_args(Swept)


@dataclass(frozen=True)
class Point:
    """The speed-up at `x` (sequences, tokens, or a share, by what is swept), with the gamma that
    gives it."""

    x: float
    gamma: int
    speedup: Estimate


@dataclass(frozen=True)
class Curve:
    """The speed-up of the candidate of one rank along one quantity, x ascending; gamma is the best
    at each x."""

    rank: int
    label: str
    points: tuple[Point, ...]

    def crossing(self, edge: bool = False) -> float | None:
        """Where the speed-up passes 1, between two points by a straight line; None where it never
        does. Of several the first. `edge`: where the lower end of its interval does (5 %, or one
        standard deviation where that is all that is known)."""

        def above(gain: Estimate) -> float:
            low = gain.value - gain.std if gain.low is None else gain.low
            return (low if edge else gain.value) - 1.0

        for left, right in zip(self.points, self.points[1:], strict=False):
            first, second = above(left.speedup), above(right.speedup)
            if first != second and (first > 0.0) != (second > 0.0):
                return left.x + (right.x - left.x) * first / (first - second)
        return None


@dataclass(frozen=True)
class Bar:
    """Where the time of one pass, layer or round goes: seconds by term, and the whole as
    predicted."""

    name: str
    terms: Mapping[str, float]
    total: Estimate


@dataclass(frozen=True)
class Curves:
    """All of one run.

    `state`: what the scores were when this was worked out; `at`: batch size, context and gamma of
    the bars; `sweeps`: by what is swept; `passes`, `layers`, `rounds`: bars, draft beside target;
    `rivals`: what the first rank wins by; `notes`: what is missing, and why.
    """

    state: str
    at: Mapping[str, int]
    sweeps: Mapping[str, tuple[Curve, ...]]
    passes: tuple[Bar, ...] = ()
    layers: tuple[Bar, ...] = ()
    rounds: tuple[Bar, ...] = ()
    rivals: tuple[Rival, ...] = ()
    notes: tuple[str, ...] = ()
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(
                f"format {self.format}, this archsearch reads {FORMAT}; write it again: archsearch"
                " report"
            )
