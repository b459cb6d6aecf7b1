"""Why the first of a ranking won: its best rivals of another width and of another depth, and what
decides between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from archsearch.acceptance.prior import PriorAcceptance
from archsearch.search.objective import Score, Scorer, difference_std

# Terms of the prior that move logit(alpha) by less than this between two drafts are left out.
LEAST_TOLD: Final = 0.02
TERMS_TOLD: Final = 3


@dataclass(frozen=True)
class DecidingTerm:
    """A term of the prior: by how much it sets logit(alpha) of the lead above its rival's, and how
    many rows it rests on (0: assumed)."""

    term: str
    difference: float
    rows: int


@dataclass(frozen=True)
class Rival:
    """The best draft of another `dimension` than the lead's. ln(speed-up of the lead / its own) is
    `tokens` (tau) + `time` (a round's seconds), with `std`; `terms`: why alpha differs, largest
    first, where the prior says it."""

    dimension: str
    label: str
    gamma: int
    speedup: float
    tokens: float
    time: float
    std: float
    terms: tuple[DecidingTerm, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def rivals(scorer: Scorer, scores: Sequence[Score]) -> list[Rival]:
    """Of scores, best first: what the lead wins by against the best of another hidden size and of
    another number of layers."""
    if not scores or scores[0].drafter is not None:
        return []  # its dimensions are no draft's; the best of each family is shown instead
    scores = [score for score in scores if score.drafter is None]
    lead, found = scores[0], []
    for dimension in ("hidden_size", "num_hidden_layers"):
        own = getattr(lead.architecture, dimension)
        other = next(
            (item for item in scores if getattr(item.architecture, dimension) != own), None
        )
        if other is not None:
            found.append(_rival(scorer, lead, other, dimension))
    return found


def _rival(scorer: Scorer, lead: Score, other: Score, dimension: str) -> Rival:
    tokens = math.log(lead.tau.value / other.tau.value)
    return Rival(
        dimension,
        other.architecture.label(),
        other.gamma,
        other.speedup.value,
        tokens,
        math.log(lead.speedup.value / other.speedup.value) - tokens,
        difference_std(lead, other, scorer.acceptance, scorer.context),
        _terms(scorer, lead, other),
    )


def _terms(scorer: Scorer, lead: Score, other: Score) -> tuple[DecidingTerm, ...]:
    prior = scorer.acceptance
    if not isinstance(prior, PriorAcceptance):
        return ()
    first, second = (prior.explain(item.architecture, scorer.context) for item in (lead, other))
    gaps = [
        DecidingTerm(name, first.get(name, 0.0) - second.get(name, 0.0), prior.rows_of(name))
        for name in {**first, **second}
    ]
    large = [gap for gap in gaps if abs(gap.difference) >= LEAST_TOLD]
    return tuple(sorted(large, key=lambda gap: -abs(gap.difference))[:TERMS_TOLD])
