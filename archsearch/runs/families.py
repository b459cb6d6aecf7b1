"""families.json, the best drafter of each family after a search that trained, and
heads/comparison-<engine>.json, drafters side by side in an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from archsearch import files
from archsearch.estimate import Estimate, number
from archsearch.runs.fields import as_estimate, optional_number, read_or_raise

FAMILIES_FILE: Final = "families.json"
COMPARISON_FILES: Final = "heads/comparison-*.json"


@dataclass(frozen=True)
class FamilyRow:
    """The best drafter of a family on a run's held-out text (`measured_on`, in words). `rank`: of
    an independent draft; `gamma`: what it runs best with, `speedup`: foretold at that; `seconds`:
    of training, `states_s`: of reading the text's states besides.
    """

    family: str
    label: str
    rank: int | None
    gamma: int
    tau: Estimate
    speedup: Estimate
    measured_on: str
    seconds: float
    states_s: float
    note: str

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(
            str(data["family"]),
            str(data["label"]),
            None if data["rank"] is None else int(data["rank"]),
            int(data["gamma"]),
            as_estimate(data["tau"]),
            as_estimate(data["speedup"]),
            str(data["measured_on"]),
            number(data["seconds"]),
            number(data["states_s"]),
            str(data["note"]),
        )


@dataclass(frozen=True)
class ComparedRow:
    """One drafter in an engine beside the target alone. `foretold`, `foretold_tau`: None where
    nothing foretold them; `identical`: (answers that are the target's own in float32, answers),
    None where nobody looked."""

    family: str
    gamma: int
    tau: Estimate
    speedup: Estimate
    tokens_per_s: float
    round_s: float
    foretold: Estimate | None
    foretold_tau: Estimate | None
    identical: tuple[int, int] | None
    warning: str

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        told, told_tau, same = (
            data.get(name)
            for name in ("predicted_speedup", "predicted_tau", "identical_output_float32")
        )
        return cls(
            str(data["family"]),
            int(data["gamma"]),
            as_estimate(data["tau"]),
            as_estimate(data["speedup"]),
            number(data["tokens_per_s"]),
            number(data["round_s"]),
            None
            if told is None
            else Estimate(number(told), number(data["predicted_std"]), "modelled"),
            None if told_tau is None else as_estimate(told_tau),
            None if same is None else (int(same["identical"]), int(same["prompts"])),
            str(data.get("warning") or ""),
        )


@dataclass(frozen=True)
class EngineComparison:
    """Drafters of several families in one engine, each on every prompt. `alone`: tokens/s of the
    target; `swapped`: pairs that came out the other way round than foretold, and whether their
    error bars allow it; None where there were none to order."""

    engine: str
    dtype: str
    prompts: int
    alone: float | None
    rows: tuple[ComparedRow, ...]
    swapped: tuple[tuple[str, str, bool], ...] | None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        order = data.get("order")
        swapped = None if order is None else tuple(_swap(item) for item in order["swapped"])
        rows = tuple(
            ComparedRow.from_dict(row) for row in data["rows"] if "tau" in row
        )  # one that never proposed has none
        alone = optional_number(data.get("baseline_tokens_per_s"))
        return cls(
            str(data["engine"]), str(data["dtype"]), int(data["prompts"]), alone, rows, swapped
        )


def _swap(data: Mapping[str, Any]) -> tuple[str, str, bool]:
    one, other = data["pair"]
    return str(one), str(other), bool(data["inside"])


def write_families(run: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """families.json of a run."""
    files.write_json(run / FAMILIES_FILE, {"families": list(rows)})


def families_of(data: Any) -> tuple[FamilyRow, ...]:
    """What `write_families` wrote."""
    return tuple(FamilyRow.from_dict(row) for row in data["families"])


def gamma_of_family(run: Path, family: str) -> int | None:
    """The gamma that a run's last table names for a family; None where it has none. ArchsearchError
    for a broken file."""
    rows = read_or_raise(run / FAMILIES_FILE, "families of the run", families_of) or ()
    return next((row.gamma for row in rows if row.family == family), None)
