"""The training budget that every alpha of a drafter that is to be trained assumes, and what other
budgets would buy: the best drafter of each family beside what exists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.hardware.device import Device
from archsearch.latency.training_cost import training_budget
from archsearch.needs import Needs, TrainingBudget
from archsearch.report.phrases import AskedBudget
from archsearch.runs.tables import BudgetDrafter, BudgetRow, Budgets
from archsearch.search.objective import Score, Scorer

GPU_HOURS: Final = (1.0, 10.0, 100.0, 1000.0)
CPU_HOURS: Final = (0.5, 2.0, 8.0, 24.0)
CANDIDATES: Final = 24
"""Shapes of a family that are scored again for each budget: the best of each width and depth."""
GPU_BUDGET_S: Final = 24 * 3600.0
"""A day of one GPU. DSpark's head for an 8B took 15.5 GPU-hours, FastDraft's draft fewer than 192,
EAGLE's head for a 70B 96 to 192."""
CPU_BUDGET_S: Final = 30 * 60.0
"""Half an hour of this processor, as a climb has it."""


def budget_s(asked: float | None, device: Device) -> float:
    """Device-seconds that were asked for, else what is usual on the device."""
    return asked or (CPU_BUDGET_S if device.kind == "cpu" else GPU_BUDGET_S)


def with_budget(scorer: Scorer, target: Architecture, device: Device, seconds: float) -> Scorer:
    """The scorer whose alphas assume a training of so many device-seconds."""
    budget = training_budget(scorer.latency, target, device, scorer.workload, seconds / 3600.0)
    return scorer.with_acceptance(scorer.acceptance, replace(scorer.context, budget=budget))


def asked_budget(budget: TrainingBudget | None, asked: bool) -> AskedBudget | None:
    """A budget as an answer repeats it; None for none. `asked`: it is no default."""
    if budget is None:
        return None
    costs = (budget.text_hours_per_token, budget.teacher_hours_per_token)
    return AskedBudget(budget.hours, asked, *costs, budget.hours_per_parameter_token, budget.source)


def what_budgets_buy(
    scorer: Scorer,
    device: Device,
    ranked: Sequence[Score],
    scored: Sequence[Score],
    besides: Sequence[Score],
) -> Budgets:
    """The drafters that 0 and more device-hours buy.

    `ranked`: the ranking, of which those that exist count; `scored`: all that the search scored,
    best first, of which shapes that are to be trained are scored again under each budget;
    `besides`: drafters other than those of its spaces.
    """
    budget = scorer.context.budget
    there = [
        score for score in ranked if _kind(score) == "exists" and score.alpha.source == "measured"
    ]
    there += [score for score in besides if _kind(score) == "exists"]
    there += _best_by_family(score for score in (*ranked, *scored) if _kind(score) == "nothing")
    rows = [_row(0.0, there)]
    if budget is None:
        return Budgets(device.key, tuple(rows))
    shapes = _candidates([score for score in scored if _kind(score) == "training"])
    for hours in CPU_HOURS if device.kind == "cpu" else GPU_HOURS:
        context = replace(scorer.context, budget=replace(budget, hours=hours))
        bought = scorer.with_acceptance(scorer.acceptance, context)
        found = []
        for score in shapes:
            try:
                found.append(bought(score.proposer))
            except ArchsearchError:
                continue
        made = [
            score
            for score in besides
            if score.needs is not None and 0 < score.needs.gpu_hours <= hours
        ]
        rows.append(_row(hours, [*there, *made, *_best_by_family(found)]))
    return Budgets(device.key, tuple(rows))


def _kind(score: Score) -> str:
    return "" if score.needs is None else score.needs.kind


def _best_by_family(scores: Iterable[Score]) -> list[Score]:
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
    found = []
    for score in sorted(scores, key=lambda score: -score.ranked_by):
        what = (score.family, score.proposer.label(), score.needs or Needs("nothing"))
        found.append(BudgetDrafter(*what, score.gamma, score.alpha, score.speedup))
    return BudgetRow(hours, tuple(found))
