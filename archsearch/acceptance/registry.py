"""What `--alpha` may name: one row per acceptance estimator. A new one is a file with the three
methods of `AcceptanceEstimator` and a row here; nothing heavy is imported until it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from archsearch.engine_facts import load

if TYPE_CHECKING:
    from archsearch.acceptance.estimator import AcceptanceEstimator

_PRIOR: Final = "archsearch.acceptance.prior:PriorAcceptance"


@dataclass(frozen=True, slots=True)
class AlphaChoice:
    """`estimator`: "module:class", made without arguments: what a search begins with, fitted to
    what earlier runs measured. `trains`: a search then trains drafts to know more; commands that
    train nothing refuse it."""

    estimator: str
    words: str
    trains: bool = False

    def make(self) -> AcceptanceEstimator:
        return cast("AcceptanceEstimator", load(self.estimator)())


CHOICES: Final[dict[str, AlphaChoice]] = {
    "prior": AlphaChoice(_PRIOR, "expected from published drafts of like shape"),
    "distilled": AlphaChoice(_PRIOR, "short trainings of the shapes that could win", trains=True),
}


def trains(choice: str) -> bool:
    """Whether a search with this `--alpha` trains drafts by itself; a number does not."""
    return choice in CHOICES and CHOICES[choice].trains
