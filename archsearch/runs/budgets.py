"""budgets.json: the best drafters that each training budget buys, from none at all (what exists or
needs no training) upwards.

Worked out when a run is ranked, and also the key `budgets` of what a search returns. Everything in
it is predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from archsearch import records
from archsearch.estimate import Estimate
from archsearch.needs import Needs

BUDGETS_FILE: Final = "budgets.json"


@dataclass(frozen=True)
class BudgetDrafter:
    """A drafter that a budget buys: the best of its family, or one that exists. `alpha`, `gamma`
    and `speedup` are of a drafter that has had what `needs` says."""

    family: str
    label: str
    needs: Needs
    gamma: int
    alpha: Estimate
    speedup: Estimate


@dataclass(frozen=True)
class BudgetRow:
    """What at most `gpu_hours` device-hours of training buy: `drafters`, best first, those that
    exist or need nothing among them."""

    gpu_hours: float
    drafters: tuple[BudgetDrafter, ...]


@dataclass(frozen=True)
class Budgets:
    """All of one run: `rows`, hours ascending from 0. Hours are of the searched device (`device`,
    its key), a GPU or a CPU."""

    device: str
    rows: tuple[BudgetRow, ...]


def write_budgets(run: Path, budgets: Budgets) -> None:
    """budgets.json of a run."""
    records.save(run / BUDGETS_FILE, budgets)
