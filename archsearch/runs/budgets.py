"""budgets.json: the best drafters that each training budget buys, from none at all (what exists or
needs no training) upwards.

Worked out when a run is ranked, and also the key `budgets` of what a search returns. Everything in
it is predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from archsearch import files
from archsearch.estimate import Estimate, number
from archsearch.needs import Needs
from archsearch.runs.fields import as_estimate

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

    def to_dict(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "label": self.label,
            "needs": self.needs.to_dict(),
            "gamma": self.gamma,
            "alpha": self.alpha.to_dict(),
            "speedup": self.speedup.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BudgetDrafter:
        """Raises one of WRONG_SHAPE."""
        needs, alpha, speedup = (
            Needs.from_dict(data["needs"]),
            as_estimate(data["alpha"]),
            as_estimate(data["speedup"]),
        )
        return cls(
            str(data["family"]), str(data["label"]), needs, int(data["gamma"]), alpha, speedup
        )


@dataclass(frozen=True)
class BudgetRow:
    """What at most `gpu_hours` device-hours of training buy: `drafters`, best first, those that
    exist or need nothing among them."""

    gpu_hours: float
    drafters: tuple[BudgetDrafter, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "gpu_hours": self.gpu_hours,
            "drafters": [drafter.to_dict() for drafter in self.drafters],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BudgetRow:
        """Raises one of WRONG_SHAPE."""
        return cls(
            number(data["gpu_hours"]),
            tuple(BudgetDrafter.from_dict(row) for row in data["drafters"]),
        )


@dataclass(frozen=True)
class Budgets:
    """All of one run: `rows`, hours ascending from 0. Hours are of the searched device (`device`,
    its key), a GPU or a CPU."""

    device: str
    rows: tuple[BudgetRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """budgets.json, and the key `budgets` of a search: estimates as {"value", "std",
        "source"}."""
        return {"device": self.device, "rows": [row.to_dict() for row in self.rows]}

    @classmethod
    def from_dict(cls, data: Any) -> Budgets:
        """Raises one of WRONG_SHAPE."""
        return cls(str(data["device"]), tuple(BudgetRow.from_dict(row) for row in data["rows"]))


def write_budgets(run: Path, budgets: Budgets) -> None:
    """budgets.json of a run."""
    files.write_json(run / BUDGETS_FILE, budgets.to_dict())
