"""What each training budget buys: the best drafter of each family beside what exists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from archsearch.errors import ArchsearchError
from archsearch.needs import Needs
from archsearch.pipeline.existing import alternatives
from archsearch.runs.budgets import BudgetDrafter, BudgetRow, Budgets
from archsearch.search.objective import Score

if TYPE_CHECKING:
    from archsearch.pipeline.session import SearchSession

GPU_HOURS: Final = (1.0, 10.0, 100.0, 1000.0)
CPU_HOURS: Final = (0.5, 2.0, 8.0, 24.0)
CANDIDATES: Final = 24
"""Shapes of a family that are scored again for each budget: the best of each width and depth."""


def what_budgets_buy(
    session: SearchSession, ranked: Sequence[Score], scored: Sequence[Score]
) -> Budgets:
    """The drafters that 0 and more device-hours buy.

    `ranked`: the ranking, of which those that exist count; `scored`: all that the search scored,
    best first, of which shapes that are to be trained are scored again under each budget.
    """
    budget, device = session.scorer.context.budget, session.source.device
    besides = [each.score for each in alternatives(session)]
    there = [
        score for score in ranked if _kind(score) == "exists" and score.alpha.source == "measured"
    ]
    there += [score for score in besides if _kind(score) == "exists"]
    there += _best_of_each(score for score in (*ranked, *scored) if _kind(score) == "nothing")
    rows = [_row(0.0, there)]
    if budget is None:
        return Budgets(device.key, tuple(rows))
    shapes = _candidates([score for score in scored if _kind(score) == "training"])
    for hours in CPU_HOURS if device.kind == "cpu" else GPU_HOURS:
        context = replace(session.scorer.context, budget=replace(budget, hours=hours))
        scorer = session.scorer.with_acceptance(session.scorer.acceptance, context)
        found = []
        for score in shapes:
            try:
                found.append(scorer(score.proposer))
            except ArchsearchError:
                continue
        made = [
            score
            for score in besides
            if score.needs is not None and 0 < score.needs.gpu_hours <= hours
        ]
        rows.append(_row(hours, [*there, *made, *_best_of_each(found)]))
    return Budgets(device.key, tuple(rows))


def _kind(score: Score) -> str:
    return "" if score.needs is None else score.needs.kind


def _best_of_each(scores: Iterator[Score] | Sequence[Score]) -> list[Score]:
    found: dict[str, Score] = {}
    for score in scores:
        if score.family not in found or score.ranked_by > found[score.family].ranked_by:
            found[score.family] = score
    return list(found.values())


def _candidates(scored: Sequence[Score]) -> list[Score]:
    """Of each family the best of each width and depth, at most CANDIDATES."""
    first: dict[tuple[str, int, int], Score] = {}
    for score in scored:
        shape = score.architecture
        first.setdefault((score.family, shape.hidden_size, shape.num_hidden_layers), score)
    taken: dict[str, list[Score]] = {}
    for score in first.values():
        taken.setdefault(score.family, []).append(score)
    return [score for scores in taken.values() for score in scores[:CANDIDATES]]


def _row(hours: float, scores: Sequence[Score]) -> BudgetRow:
    best = sorted(scores, key=lambda score: -score.ranked_by)
    return BudgetRow(hours, tuple(_drafter(score) for score in best))


def _drafter(score: Score) -> BudgetDrafter:
    needs = score.needs or Needs("nothing")
    label = score.proposer.label()
    return BudgetDrafter(score.family, label, needs, score.gamma, score.alpha, score.speedup)
