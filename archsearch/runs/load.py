"""load-<engine>.json: what an engine did with a candidate under load, beside what was predicted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from archsearch.engines.measure.results import ScheduleVerdict, UnderLoad
from archsearch.estimate import Estimate
from archsearch.records import Maybe
from archsearch.runs.terms import TermErrors
from archsearch.schedule import Ranges

LOAD_FILE: Final = "load-{engine}.json"
LOAD_FILES: Final = "load-*.json"


@dataclass(frozen=True, kw_only=True)
class LoadRow(UnderLoad):
    """One way to serve at one concurrency, the target alone beside it (`decode_s`: seconds of one
    of its steps), and the speed-up that was predicted, None where nothing was priced."""

    speedup: Estimate = field()
    baseline_tokens_per_s: float
    decode_s: float | None = None
    predicted_speedup: Estimate | None = None
    relative_error: float | None = None
    relative_error_at_measured_tau: float | None = None
    error_by_term: TermErrors | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.speedup.value <= 0:
            raise ValueError(f"concurrency {self.concurrency}, speed-up {self.speedup}")


@dataclass(frozen=True)
class ScheduleRun:
    """The schedule that was run: its `ranges`, the verdict at each concurrency, and for each
    setting (`off`, `schedule`, a fixed gamma) the geometric mean of its speed-ups over all of
    them."""

    ranges: Ranges = ()
    verdict: tuple[ScheduleVerdict, ...] = ()
    overall: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ErrorSummary:
    """Over the rows with a draft: the median absolute error of the predicted speed-up, and the
    shares within 5 and 10 %."""

    cases: int = 0
    median_absolute_error: Maybe[float] = None
    within_5_percent: Maybe[float] = None
    within_10_percent: Maybe[float] = None

    @classmethod
    def of(cls, rows: Sequence[LoadRow]) -> ErrorSummary:
        errors = [
            abs(row.relative_error) for row in rows if row.gamma and row.relative_error is not None
        ]
        if not errors:
            return cls()
        within = (statistics.fmean(error <= most for error in errors) for most in (0.05, 0.10))
        return cls(len(errors), statistics.median(errors), *within)


@dataclass(frozen=True, kw_only=True)
class LoadRecord:
    """load-<engine>.json.

    `synthetic`: draft tokens were accepted by chance, at `asked_acceptance_by_position`; `alpha`:
    what acceptance was predicted from, where the file says it; `context`: tokens in the KV cache in
    mid-answer; `slowdown`: of the machine against the profile, taken out of the measured times of
    `error_by_term`; `latency`: where predicted times come from; `baseline`: the target alone at
    each concurrency; `schedule`: None where none was run; `seconds`: what all of it took.
    """

    engine: str
    engine_version: str = ""
    rank: int | None = None
    architecture: str = ""
    dtype: str = ""
    synthetic: bool
    alpha: Estimate | None = None
    asked_acceptance_by_position: tuple[float, ...] | None = None
    context: int | None = None
    slowdown: float | None = None
    repeats: int | None = None
    latency: str = ""
    baseline: tuple[UnderLoad, ...] = ()
    rows: tuple[LoadRow, ...]
    summary: ErrorSummary = ErrorSummary()
    seconds: float = 0.0
    schedule: Maybe[ScheduleRun] = None

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("no rows")

    @property
    def concurrencies(self) -> list[int]:
        return sorted({row.concurrency for row in self.rows})

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(row.variant for row in self.rows))

    def best(self, concurrency: int) -> LoadRow:
        """The fastest row at a concurrency, as measured."""
        return max(
            (row for row in self.rows if row.concurrency == concurrency),
            key=lambda row: row.speedup.value,
        )

    def headline(self, concurrency: int = 1) -> LoadRow:
        """The fastest row at the concurrency nearest to the one asked for."""

        def distance(number: int) -> tuple[float, int]:
            return abs(math.log(number / concurrency)), number

        return self.best(min(self.concurrencies, key=distance))

    def is_stale(self, alpha: Estimate) -> bool:
        """Whether alpha was measured anew after this was predicted from another one; False where
        the file does not tell."""
        return (
            self.alpha is not None
            and alpha.source == "measured"
            and abs(self.alpha.value - alpha.value) > 1e-9
        )
