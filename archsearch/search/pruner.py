"""Optuna's side of the climb: a pruner that knows how sure a score is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from optuna.pruners import BasePruner

from archsearch.search.rungs import STD_FACTOR, beaten

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

STD_ATTRIBUTE: Final = "relative_std"  # user attribute of a trial: {rung: relative std of its score, without what all share}


class RungPruner(BasePruner):
    """Prunes a trial whose optimistic score lies below the best pessimistic one reported at the same rung or a later one.

    Trials report their score (higher is better) with the rung as the step. Its relative std is the user attribute
    `relative_std` of that rung; a trial without one is taken as exact.
    """

    def __init__(self, k_std: float = STD_FACTOR) -> None:
        if k_std < 0:
            raise ValueError(f"k_std must not be negative, got {k_std}")
        self.k_std = k_std

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        rung = trial.last_step
        if rung is None:
            return False
        value, std = standing(trial, rung)
        others = [
            standing(other, other.last_step)
            for other in study.get_trials(deepcopy=False)
            if other.number != trial.number and other.last_step is not None and other.last_step >= rung
        ]
        return beaten(value, std, others, self.k_std)


def standing(trial: FrozenTrial, rung: int) -> tuple[float, float]:
    """(ln score, its std) of a trial at a rung; a score that is not positive is beaten by anything."""
    value = trial.intermediate_values[rung]
    std = float(trial.user_attrs.get(STD_ATTRIBUTE, {}).get(str(rung), 0.0))
    return (math.log(value) if value > 0 else -math.inf), std
