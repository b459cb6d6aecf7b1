"""load-<engine>.json: what an engine did with a candidate under load, beside what was predicted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from archsearch.engines.measure.results import LoadResult, ScheduleVerdict
from archsearch.estimate import Estimate, number
from archsearch.runs.fields import as_estimate, optional_number
from archsearch.runs.terms import TermErrors, optional_terms
from archsearch.schedule import Ranges

LOAD_FILE: Final = "load-{engine}.json"
LOAD_FILES: Final = "load-*.json"


@dataclass(frozen=True)
class LoadRow:
    """One way to serve at one concurrency: what was `measured`, the target alone beside it
    (`decode_s`: seconds of one of its steps), and the speed-up that was predicted, None where
    nothing was priced."""

    measured: LoadResult
    baseline_tokens_per_s: float
    decode_s: float | None
    predicted_speedup: Estimate | None
    relative_error: float | None
    relative_error_at_measured_tau: float | None
    error_by_term: TermErrors | None

    @property
    def variant(self) -> str:
        return self.measured.variant

    @property
    def concurrency(self) -> int:
        return self.measured.concurrency

    @property
    def gamma(self) -> int:
        return self.measured.gamma

    @property
    def speedup(self) -> Estimate:
        assert self.measured.speedup is not None  # the target alone is no row
        return self.measured.speedup

    @property
    def interval(self) -> tuple[float, float]:
        """5-95 % of the measured speed-up; of a normal distribution where the file lacks it."""
        spread = 1.645 * self.speedup.std
        return self.measured.speedup_interval or (
            self.speedup.value - spread,
            self.speedup.value + spread,
        )

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        measured = data.pop("measured")
        return (
            measured
            | data
            | {
                "error_by_term": self.error_by_term.to_dict()
                if self.error_by_term is not None
                else None
            }
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LoadRow:
        """Raises one of WRONG_SHAPE."""
        measured = _result(data)
        if measured.concurrency < 1 or measured.speedup is None or measured.speedup.value <= 0:
            raise ValueError(f"concurrency {data['concurrency']}, speed-up {data.get('speedup')}")
        predicted = data.get("predicted_speedup")
        return cls(
            measured,
            number(data["baseline_tokens_per_s"]),
            optional_number(data.get("decode_s")),
            None if predicted is None else as_estimate(predicted),
            optional_number(data.get("relative_error")),
            optional_number(data.get("relative_error_at_measured_tau")),
            optional_terms(data.get("error_by_term")),
        )


def _result(data: Mapping[str, Any]) -> LoadResult:
    """The measured part of a row; fields that only describe how it was measured may be missing."""
    low_high = data.get("speedup_interval")
    return LoadResult(
        variant=str(data["variant"]),
        concurrency=int(data["concurrency"]),
        gamma=int(data["gamma"]),
        engine_version=str(data.get("engine_version", "")),
        repeats=int(data.get("repeats") or 0),
        batch_steps=int(data.get("batch_steps") or 0),
        tokens_per_s=number(data["tokens_per_s"]),
        tau=number(data["tau"]),
        alpha=optional_number(data.get("alpha")),
        accepted_by_position=_numbers(data.get("accepted_by_position")),
        speedup=None if data.get("speedup") is None else as_estimate(data["speedup"]),
        speedup_interval=None if low_high is None else (number(low_high[0]), number(low_high[1])),
        step_s=number(data.get("step_s") or 0.0),
        target_s=optional_number(data.get("target_s")),
        draft_s=optional_number(data.get("draft_s")),
        rest_s=optional_number(data.get("rest_s")),
        repeats_s=_numbers(data.get("repeats_s")),
    )


@dataclass(frozen=True)
class ScheduleRun:
    """The schedule that was run: its `ranges`, the verdict at each concurrency, and for each
    setting (`off`, `schedule`, a fixed gamma) the geometric mean of its speed-ups over all of
    them."""

    ranges: Ranges = ()
    verdict: tuple[ScheduleVerdict, ...] = ()
    overall: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ranges": [list(entry) for entry in self.ranges],
            "verdict": [dataclasses.asdict(row) for row in self.verdict],
            "overall": dict(self.overall),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ScheduleRun:
        """Raises one of WRONG_SHAPE."""
        ranges = tuple(
            (int(first), int(last), int(gamma)) for first, last, gamma in data.get("ranges") or ()
        )
        overall = {name: number(value) for name, value in (data.get("overall") or {}).items()}
        return cls(ranges, tuple(_verdict(row) for row in data.get("verdict") or ()), overall)


def _verdict(data: Mapping[str, Any]) -> ScheduleVerdict:
    return ScheduleVerdict(
        int(data["concurrency"]),
        int(data["gamma"]),
        as_estimate(data["speedup"]),
        str(data["best_other"]),
        as_estimate(data["best_other_speedup"]),
        optional_number(data.get("margin")),
        bool(data["holds"]),
    )


@dataclass(frozen=True)
class LoadRecord:
    """load-<engine>.json.

    `synthetic`: draft tokens were accepted by chance, at `asked_acceptance_by_position`; `alpha`:
    what acceptance was predicted from, where the file says it; `context`: tokens in the KV cache in
    mid-answer; `slowdown`: of the machine against the profile, taken out of the measured times of
    `error_by_term`; `latency`: where predicted times come from; `baseline`: the target alone at
    each concurrency; `schedule`: None where none was run; `seconds`: what all of it took.
    """

    engine: str
    engine_version: str
    rank: int | None
    architecture: str
    dtype: str
    synthetic: bool
    alpha: Estimate | None
    asked_acceptance_by_position: tuple[float, ...]
    context: int | None
    slowdown: float | None
    repeats: int | None
    latency: str
    baseline: tuple[LoadResult, ...]
    rows: tuple[LoadRow, ...]
    summary: Mapping[str, float]
    seconds: float
    schedule: ScheduleRun | None = None

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
        return self.best(
            min(
                self.concurrencies, key=lambda number: (abs(math.log(number / concurrency)), number)
            )
        )

    def is_stale(self, alpha: Estimate) -> bool:
        """Whether alpha was measured anew after this was predicted from another one; False where
        the file does not tell."""
        return (
            self.alpha is not None
            and alpha.source == "measured"
            and abs(self.alpha.value - alpha.value) > 1e-9
        )

    def to_dict(self) -> dict[str, Any]:
        data = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "schedule"
        }
        data |= {
            "alpha": self.alpha.to_dict() if self.alpha is not None else None,
            "asked_acceptance_by_position": list(self.asked_acceptance_by_position) or None,
            "baseline": [dataclasses.asdict(result) for result in self.baseline],
            "rows": [row.to_dict() for row in self.rows],
            "summary": dict(self.summary),
        }
        return data | ({"schedule": self.schedule.to_dict()} if self.schedule is not None else {})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LoadRecord:
        """Raises one of WRONG_SHAPE for anything but the file's content."""
        rows = tuple(LoadRow.from_dict(row) for row in data["rows"])
        if not rows:
            raise ValueError("no rows")
        return cls(
            engine=str(data["engine"]),
            engine_version=str(data.get("engine_version", "")),
            rank=None if data.get("rank") is None else int(data["rank"]),
            architecture=str(data.get("architecture", "")),
            dtype=str(data.get("dtype", "")),
            synthetic=bool(data["synthetic"]),
            alpha=None if data.get("alpha") is None else as_estimate(data["alpha"]),
            asked_acceptance_by_position=_numbers(data.get("asked_acceptance_by_position")),
            context=None if data.get("context") is None else int(data["context"]),
            slowdown=optional_number(data.get("slowdown")),
            repeats=None if data.get("repeats") is None else int(data["repeats"]),
            latency=str(data.get("latency", "")),
            baseline=tuple(_result(result) for result in data.get("baseline") or ()),
            rows=rows,
            summary={name: number(value) for name, value in (data.get("summary") or {}).items()},
            seconds=number(data.get("seconds") or 0.0),
            schedule=None if not data.get("schedule") else ScheduleRun.from_dict(data["schedule"]),
        )


def _numbers(values: Sequence[Any] | None) -> tuple[float, ...]:
    return tuple(number(value) for value in values or ())
