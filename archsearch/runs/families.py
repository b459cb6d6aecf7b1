"""families.json, the best drafter of each family after a search that trained, and
heads/comparison-<engine>.json, drafters side by side in an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from archsearch.estimate import Estimate
from archsearch.needs import Needs
from archsearch.records import Maybe, from_data, load
from archsearch.runs.confirmed import Exact, Judged
from archsearch.search.objective import Score

FAMILIES_FILE: Final = "families.json"
COMPARISON_FILE: Final = "heads/comparison-{engine}.json"
COMPARISON_FILES: Final = "heads/comparison-*.json"


@dataclass(frozen=True, kw_only=True)
class Represented:
    """A family by its best drafter. `rank`: None where the run does not rank it; `gamma`: what it
    runs best with, `speedup`: predicted at that; `assumed`: why its acceptance is no more than a
    belief."""

    family: str
    rank: int | None = None
    label: str
    parameters: int = 0
    gamma: int
    alpha: Maybe[Estimate] = None
    tau: Estimate
    speedup: Estimate
    trains: bool = True
    assumed: str = ""

    @classmethod
    def of(cls, score: Score, **more: Any) -> Self:
        """Of a score; `more`: other fields."""
        own = {name: getattr(score, name) for name in _OF_SCORE}
        drafter = score.proposer
        return cls(**{**own, "label": drafter.label(), "trains": drafter.trains} | more)


_OF_SCORE: Final = "family rank parameters gamma alpha tau speedup assumed".split()


@dataclass(frozen=True, kw_only=True)
class RankedFamily(Represented):
    """In a ranking. `trains`: whether it is still to be trained."""

    needs: Needs | None


@dataclass(frozen=True, kw_only=True)
class FamilyRow(Represented):
    """On a run's held-out text (`measured_on`, in words). `seconds`: of training, `states_s`: of
    reading the text's states besides; `note`: where the engine does not run it."""

    measured_on: str
    seconds: float = 0.0
    states_s: float = 0.0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Rival(Judged):
    """One drafter in an engine beside the target alone. `foretold_by_position`: its acceptance on
    held-out text; `predicted_std`: of the speed-up. `identical_output_float32`: None where nobody
    looked; `warning`: why its acceptance does not fit; `note`: what else was replayed of it."""

    family: str
    foretold_by_position: tuple[float, ...] = ()
    predicted_tau: Maybe[Estimate] = None
    predicted_std: Maybe[float] = None
    identical_output_float32: Exact | None = None
    warning: str | None = None
    note: str = ""

    @property
    def predicted(self) -> Estimate | None:
        """The speed-up that was predicted; None where held-out text said nothing."""
        if self.predicted_speedup is None or self.predicted_std is None:
            return None
        return Estimate(self.predicted_speedup, self.predicted_std, "modelled")


@dataclass(frozen=True, kw_only=True)
class Silent:
    """A drafter that proposed nothing."""

    family: str
    gamma: int
    foretold_by_position: tuple[float, ...] = ()
    predicted_tau: Maybe[Estimate] = None
    predicted_std: Maybe[float] = None
    note: str = "proposed nothing on these prompts"


@dataclass(frozen=True)
class Swap:
    """Two drafters that came out the other way round than predicted; `inside`: their speed-ups lie
    no further apart than their error bars, predicted or measured."""

    pair: tuple[str, str]
    inside: bool


@dataclass(frozen=True)
class Order:
    """The families by speed-up, as predicted and as measured."""

    predicted: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    swapped: tuple[Swap, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EngineComparison:
    """Drafters of several families in one engine, each on every prompt. `baseline_tokens_per_s`: of
    the target alone; `order`: None where there were none to order; `profile_first`: the command
    that measures what the predictions do without."""

    run: str = ""
    engine: str
    dtype: str
    prompts: int
    threads: int | None = None
    baseline_tokens_per_s: float | None = None
    rows: tuple[Rival | Silent, ...]
    order: Order | None = None
    latency: str = ""
    profile_first: str | None = None

    @property
    def rivals(self) -> list[Rival]:
        """Those that drafted."""
        return [row for row in self.rows if isinstance(row, Rival)]


def families_of(data: Any) -> tuple[FamilyRow, ...]:
    """The rows of families.json."""
    return tuple(from_data(FamilyRow, row) for row in data["families"])


def gamma_of_family(run: Path, family: str) -> int | None:
    """The gamma that a run's last table names for a family; None where it has none. ArchsearchError
    for a broken file."""
    rows = load(run / FAMILIES_FILE, "families of the run", families_of) or ()
    return next((row.gamma for row in rows if row.family == family), None)
