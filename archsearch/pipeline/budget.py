"""The training budget that every alpha of a drafter that is to be trained assumes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.hardware.device import Device
from archsearch.latency.training_cost import training_budget
from archsearch.needs import TrainingBudget
from archsearch.search.objective import Scorer

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


def budget_data(budget: TrainingBudget | None, asked: bool) -> dict[str, Any] | None:
    """A budget for --json: device-hours, whether they were asked for (else a default), and what a
    token costs; None for none."""
    if budget is None:
        return None
    return {
        "gpu_hours": budget.hours,
        "asked": asked,
        "text_hours_per_token": budget.text_hours_per_token,
        "teacher_hours_per_token": budget.teacher_hours_per_token,
        "hours_per_parameter_token": budget.hours_per_parameter_token,
        "source": budget.source,
    }
