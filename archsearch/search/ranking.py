"""The order of a ranking whose first places are tied: what one has, or has cheapest, first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from archsearch.acceptance.estimator import AcceptanceContext
from archsearch.acceptance.families import context_for
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.needs import Needs
from archsearch.search.objective import Score, Scorer, difference_std, grouped, speedup_gap_std

Contexts = Callable[[Score], AcceptanceContext]


def effort(needs: Needs | None) -> tuple[int, float]:
    """What it takes to have a drafter, for sorting: first those that exist, then those that need
    nothing, then the fewest device-hours; what nobody priced last."""
    if needs is None:
        return 3, 0.0
    return {"exists": 0, "nothing": 1, "training": 2}[needs.kind], round(needs.gpu_hours, 6)


def groups_of(scorer: Scorer, scores: Sequence[Score], contexts: Contexts) -> list[list[Score]]:
    """`objective.grouped` of scores that acceptance was asked about in different `contexts` (drafts
    that were made in different ways)."""

    def std_of(first: Score, second: Score) -> float:
        one, other = contexts(first), contexts(second)
        prior = scorer.acceptance
        measured = "measured" in (first.alpha.source, second.alpha.source)
        if one == other or measured or not isinstance(prior, PriorAcceptance):
            return difference_std(first, second, prior, one)
        pair = [
            (score.architecture, context_for(score.proposer, context))
            for score, context in ((first, one), (second, other))
        ]
        return speedup_gap_std(first, second, prior.gap_std(*pair))

    return grouped(scores, std_of)


def led_by_need(groups: Sequence[Sequence[Score]]) -> list[Score]:
    """The scores of `groups` in their order; inside a group the one that takes least to have leads,
    of equals the best, and the others follow as they stand."""
    found: list[Score] = []
    for group in groups:
        ranked = sorted(group, key=lambda score: -score.ranked_by)
        leader = min(ranked, key=lambda score: (*effort(score.needs), -score.ranked_by))
        found += [leader, *(score for score in ranked if score is not leader)]
    return found
