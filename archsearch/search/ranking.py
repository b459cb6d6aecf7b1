"""The order of a ranking whose first places are tied: what one has, or has cheapest, first; and why
the first won: its best rivals of another width and depth, and what decides between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from archsearch.acceptance.prior import PriorAcceptance
from archsearch.needs import Needs
from archsearch.search.objective import Score, Scorer, best_first, difference_std


def best_of_each(
    ranked: Iterable[Score], what: Callable[[Score], object] = lambda score: score.family
) -> list[Score]:
    """The first score of each family (or of whatever `what` says), in the order of the ranking."""
    first: dict[object, Score] = {}
    for score in ranked:
        first.setdefault(what(score), score)
    return list(first.values())


def size_of(score: Score) -> tuple[str, int, int]:
    """Its family, width and depth: what sets drafts apart most."""
    shape = score.architecture
    return score.family, shape.hidden_size, shape.num_hidden_layers


def effort(needs: Needs | None) -> tuple[int, float]:
    """What it takes to have a drafter, for sorting: first those that exist, then those that need
    nothing, then the fewest device-hours; what nobody priced last."""
    if needs is None:
        return 3, 0.0
    return {"exists": 0, "nothing": 1, "training": 2}[needs.kind], round(needs.gpu_hours, 6)


def led_by_need(groups: Sequence[Sequence[Score]]) -> list[Score]:
    """The scores of `groups` in their order; inside a group the one that takes least to have leads,
    of equals the best, unless its acceptance is assumed beside one that is known to pay, or a later
    group holds a better one for as little: a wide error alone tied it. The others follow as they
    stand."""
    found: list[Score] = []
    for number, group in enumerate(groups):
        ranked = best_first(group)
        known = [score for score in ranked if not score.assumed]
        able = known if any(score.pays for score in known) else ranked
        leader = min(able, key=lambda score: (*effort(score.needs), *score.sort_key))
        later = itertools.chain.from_iterable(groups[number + 1 :])
        own, worth = effort(leader.needs), leader.ranked_by
        if any(effort(each.needs) <= own and each.ranked_by > worth for each in later):
            leader = ranked[0]
        found += [leader, *(score for score in ranked if score is not leader)]
    return found


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


def rivals(scorer: Scorer, scores: Sequence[Score]) -> list[Rival]:
    """Of scores, best first: what the lead wins by against the best of another hidden size and of
    another number of layers."""
    if not scores or scores[0].drafter is not None:
        return []  # its dimensions are no draft's; the best of each family is shown instead
    scores = [score for score in scores if score.drafter is None]
    lead, found = scores[0], []
    for dimension in ("hidden_size", "num_hidden_layers"):
        size = getattr(lead.architecture, dimension)
        others = (item for item in scores if getattr(item.architecture, dimension) != size)
        other = next(others, None)
        if other is None:
            continue
        tokens = math.log(lead.tau.value / other.tau.value)
        time = math.log(lead.speedup.value / other.speedup.value) - tokens
        std = difference_std(lead, other, scorer.acceptance, lambda score: scorer.context)
        own = (other.architecture.label(), other.gamma, other.speedup.value)
        found.append(Rival(dimension, *own, tokens, time, std, _terms(scorer, lead, other)))
    return found


def _terms(scorer: Scorer, lead: Score, other: Score) -> tuple[DecidingTerm, ...]:
    prior = scorer.acceptance
    if not isinstance(prior, PriorAcceptance):
        return ()
    first, second = (
        {part.term: part.contribution for part in prior.parts(item.architecture, scorer.context)}
        for item in (lead, other)
    )
    gaps = [
        DecidingTerm(name, first.get(name, 0.0) - second.get(name, 0.0), prior.rows_of(name))
        for name in {**first, **second}
    ]
    large = [gap for gap in gaps if abs(gap.difference) >= LEAST_TOLD]
    return tuple(sorted(large, key=lambda gap: -abs(gap.difference))[:TERMS_TOLD])
