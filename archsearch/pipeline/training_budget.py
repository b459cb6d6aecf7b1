"""The training budget that every alpha of a drafter that is to be trained assumes, and what other
budgets would buy: the best drafter of each family beside what exists.

The target writes the text and passes over it once more for its probabilities or hidden states, both
priced by the latency model (of an engine that serves); the drafter's own passes, by their
operations. Within a factor of 2 of most publications (docs/choose-a-draft.md,
benchmarks/training_costs.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import pass_parameters
from archsearch.capacity import fits
from archsearch.errors import ArchsearchError, InvalidShapeError
from archsearch.hardware.device import Device
from archsearch.latency.draft_passes import LatencyOfRounds
from archsearch.needs import Needs, TrainingBudget
from archsearch.pipeline.latency import DTYPE_PREFERENCE, RANKS
from archsearch.report.phrases import AskedBudget
from archsearch.runs.tables import BudgetDrafter, BudgetRow, Budgets
from archsearch.search.objective import Score, Scorer, best_first
from archsearch.search.ranking import best_of_each, size_of
from archsearch.workload import Workload

WRITING_BATCH: Final = 512  # sequences in flight (Apertus' runs, training_costs of DSpark)
WRITING_CONTEXT: Final = 1024  # tokens in the cache in mid-answer: assumed
# Tokens/s of a writing run / those of decode steps alone: prompts are read, batches fill and drain.
# Apertus-8B on GH200: 25, 27 and 35 GPU-hours a 1e9 tokens, 15.8 by decode steps of an H200.
WRITING_SHARE: Final = 0.55
TEACHER_TOKENS: Final = 2048  # in a pass of the teacher
# Of the device's peak that a training reaches: AMD-135M .18 of an MI250, TinyLlama-1.1B .51 of an
# A100 (their tokens and hours, 6 operations a parameter and token).
TRAINING_SHARE: Final = 0.3
# Of a CPU's peak that the target reaches as archsearch lets it write, prompts read: .18 of two
# threads of a Xeon, whose trainings reached .25 (benchmarks/results/2026-11-25-demo-budget).
CPU_WRITING_SHARE: Final = 0.2
# Tokens seen / distinct tokens written of twelve searches on CPUs, 10 to 45 minutes long: 5 to 29,
# median 14 (benchmarks/results/2026-11-22-searches to 2026-11-26-mixed).
CPU_EPOCHS: Final = 14.0


def training_budget(
    latency: LatencyOfRounds, target: Architecture, device: Device, workload: Workload, hours: float
) -> TrainingBudget:
    """What `hours` device-hours of `device` buy, for drafters of `target`. `latency`: its
    `decode_s` and `verify_s` of the target are asked. The target is served on as many devices as
    make a token cheapest; `workload` says the dtype and mode, and how many devices where no number
    of RANKS holds it."""
    if device.is_cpu:  # archsearch's trainer, which keeps what the writer's passes say
        quickest = max(device.flops_per_s.values(), default=training_peak(device))
        write = 2.0 * pass_parameters(target) / (CPU_WRITING_SHARE * quickest)
        teach, epochs = 0.0, CPU_EPOCHS
    else:
        served = _served(target, device, workload)
        (write, teach), epochs = min((_per_token(latency, target, w) for w in served), key=sum), 1.0
    return TrainingBudget(
        hours,
        text_hours_per_token=write / 3600.0,
        teacher_hours_per_token=teach / 3600.0,
        hours_per_parameter_token=6.0 / (TRAINING_SHARE * training_peak(device)) / 3600.0,
        epochs=epochs,
    )


def training_peak(device: Device) -> float:
    """Operations a second of the dtype that a drafter is trained in."""
    names = DTYPE_PREFERENCE[::-1] if device.is_cpu else DTYPE_PREFERENCE
    known = (device.flops_per_s[name] for name in names if name in device.flops_per_s)
    # A profile without peaks: as slow as its memory, an operation a byte.
    return next(known, device.bandwidth_bytes_per_s)


def _served(target: Architecture, device: Device, workload: Workload) -> list[Workload]:
    """The target on 1, 2, ... devices with the largest batch that memory holds."""
    sizes = [WRITING_BATCH >> halved for halved in range(WRITING_BATCH.bit_length())]
    found = list[Workload]()
    for ranks in RANKS:
        each = (_at(workload, ranks, batch) for batch in sizes)
        able = (served for served in each if fits(target, None, served, device))
        with suppress(InvalidShapeError):  # heads do not divide
            found += itertools.islice(able, 1)
    return found or [_at(workload, workload.tensor_parallel, workload.batch_size)]


def _at(workload: Workload, ranks: int, batch: int) -> Workload:
    return Workload(batch, WRITING_CONTEXT, ranks, workload.dtype, workload.mode)


def _per_token(
    latency: LatencyOfRounds, target: Architecture, served: Workload
) -> tuple[float, float]:
    """Device-seconds of writing a token, and of the teacher's pass over one."""
    ranks = served.tensor_parallel
    decode_s = latency.decode_s(target, served).value
    write = ranks * decode_s / (served.batch_size * WRITING_SHARE)
    reading = Workload(1, 0, ranks, served.dtype, served.mode)
    whole = latency.verify_s(target, reading, TEACHER_TOKENS - 1).value
    teach = ranks * whole / TEACHER_TOKENS
    return write, min(teach, write) if math.isfinite(teach) else write


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
    return asked or (CPU_BUDGET_S if device.is_cpu else GPU_BUDGET_S)


def with_budget(scorer: Scorer, device: Device, seconds: float) -> Scorer:
    """The scorer whose alphas assume a training of so many device-seconds."""
    priced = scorer.latency, scorer.target, device, scorer.workload
    budget = training_budget(*priced, seconds / 3600.0)
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
    """The drafters that 0 and more device-hours buy. `ranked`: the ranking, of which those that
    exist count; `scored`: all that the search scored, best first, of which shapes to be trained are
    scored again under each budget; `besides`: drafters other than those of its spaces."""
    budget = scorer.context.budget
    exist = [score for score in ranked if score.needs_kind == "exists" and not score.is_found]
    exist += [score for score in besides if score.needs_kind == "exists"]
    free = (score for score in (*ranked, *scored) if score.needs_kind == "nothing")
    there = [*exist, *_best_by_family(free)]
    rows = [_row(0.0, there)]
    if budget is None:
        return Budgets(device.key, tuple(rows))
    shapes = _candidates([score for score in scored if score.needs_kind == "training"])
    for hours in CPU_HOURS if device.is_cpu else GPU_HOURS:
        context = replace(scorer.context, budget=replace(budget, hours=hours))
        bought = scorer.with_acceptance(scorer.acceptance, context)
        found = []
        for score in shapes:
            with suppress(ArchsearchError):
                found.append(bought(score.proposer))
        made = [
            score
            for score in besides
            if score.needs is not None and 0 < score.needs.gpu_hours <= hours
        ]
        rows.append(_row(hours, [*there, *made, *_best_by_family(found)]))
    return Budgets(device.key, tuple(rows))


def _best_by_family(scores: Iterable[Score]) -> list[Score]:
    return best_of_each(best_first(scores))


def _candidates(scored: Sequence[Score]) -> list[Score]:
    """Of each family the best of each width and depth, at most CANDIDATES."""
    taken: dict[str, list[Score]] = {}
    for score in best_of_each(scored, size_of):
        taken.setdefault(score.family, []).append(score)
    return [score for scores in taken.values() for score in scores[:CANDIDATES]]


def _row(hours: float, scores: Sequence[Score]) -> BudgetRow:
    found = []
    for score in best_first(scores):
        what = (score.family, score.proposer.label(), score.needs or Needs("nothing"))
        found.append(BudgetDrafter(*what, score.gamma, score.alpha, score.speedup))
    return BudgetRow(hours, tuple(found))
