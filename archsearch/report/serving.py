"""What was measured under load (load-<engine>.json) and what is planned by batch size (schedule.json), read and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from archsearch.estimate import Estimate
from archsearch.runs.fields import as_estimate, number, optional_number
from archsearch.schedule import Ranges

LOAD_FILES: Final = "load-*.json"
SCHEDULE_FILE: Final = "schedule.json"
TERMS: Final = ("decode_s", "draft_s", "verify_s", "overhead_s", "tau")
REST: Final = "rest"


@dataclass(frozen=True)
class Term:
    """A term of the speed-up: seconds (tau: tokens) predicted and measured; `log_error`: its part of ln(predicted / measured)."""

    predicted: float
    measured: float
    log_error: float


def read_terms(data: Any) -> dict[str, Term] | None:
    """`error_by_term` of a file; None where the engine did not tell every term."""
    if data is None:
        return None
    return {name: Term(*(number(data[name][key]) for key in ("predicted", "measured", "log_error"))) for name in TERMS}


def error_shares(terms: Mapping[str, Term], relative_error: float) -> dict[str, float]:
    """What each term and the rest bring to `relative_error` of the speed-up (predicted / measured - 1); they add up to it.

    The parts of ln(predicted / measured) are scaled by one factor, so that they add up to the error itself. "rest": the measured
    speed-up is a median of ratios, which the medians of the terms do not give exactly.
    """
    total = math.log1p(relative_error)
    logs = {name: terms[name].log_error for name in TERMS}
    logs[REST] = total - math.fsum(logs.values())
    factor = relative_error / total if abs(total) > 1e-9 else 1.0
    return {name: factor * value for name, value in logs.items()}


@dataclass(frozen=True)
class LoadRow:
    """One way to serve at one concurrency. `speedup`, `interval`: measured, 5-95 %; `predicted` None where nothing was priced."""

    variant: str
    concurrency: int
    gamma: int
    tau: float
    tokens_per_s: float
    baseline_tokens_per_s: float
    speedup: Estimate
    interval: tuple[float, float]
    predicted: Estimate | None
    relative_error: float | None
    error_at_measured_tau: float | None
    terms: dict[str, Term] | None


@dataclass(frozen=True)
class ScheduleVerdict:
    """The schedule at one concurrency against the best of always off and every fixed gamma."""

    concurrency: int
    gamma: int
    speedup: Estimate
    best_other: str
    best_other_speedup: Estimate
    holds: bool


@dataclass(frozen=True)
class LoadReport:
    """load-<engine>.json. `synthetic`: draft tokens were accepted by chance at `asked` rates by position; `ranges`: the schedule
    that was run, () without one; `alpha`: what acceptance was predicted from, where the file says it; `slowdown`: of the
    machine against the profile, taken out of the measured times of `terms`."""

    engine: str
    engine_version: str
    synthetic: bool
    rows: tuple[LoadRow, ...]
    asked: tuple[float, ...]
    dtype: str
    context: int | None
    repeats: int | None
    latency: str
    summary: dict[str, float]
    ranges: Ranges
    verdict: tuple[ScheduleVerdict, ...]
    alpha: float | None
    slowdown: float | None

    @property
    def concurrencies(self) -> list[int]:
        return sorted({row.concurrency for row in self.rows})

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(row.variant for row in self.rows))

    def best(self, concurrency: int) -> LoadRow:
        """The fastest row at a concurrency, as measured."""
        return max((row for row in self.rows if row.concurrency == concurrency), key=lambda row: row.speedup.value)

    def headline(self, concurrency: int = 1) -> LoadRow:
        """The fastest row at the concurrency nearest to the one asked for."""
        return self.best(min(self.concurrencies, key=lambda number: (abs(math.log(number / concurrency)), number)))


@dataclass(frozen=True)
class SchedulePoint:
    """One batch size of schedule.json: gamma 0 is off; `by_gamma`: predicted speed-up of every gamma."""

    batch_size: int
    gamma: int
    tau: Estimate
    speedup: Estimate
    by_gamma: dict[int, Estimate]


@dataclass(frozen=True)
class ScheduleReport:
    """schedule.json: the best gamma by batch size, predicted with the latencies of `engine`."""

    engine: str
    latency: str
    ranges: Ranges
    points: tuple[SchedulePoint, ...]


def read_load(data: Any) -> LoadReport:
    """A LoadReport out of the file's content; raises one of WRONG_SHAPE for anything else."""
    rows = tuple(_load_row(row) for row in data["rows"])
    if not rows:
        raise ValueError("no rows")
    schedule = data.get("schedule") or {}
    alpha = data.get("alpha")
    return LoadReport(
        engine=str(data["engine"]),
        engine_version=str(data.get("engine_version", "")),
        synthetic=bool(data["synthetic"]),
        rows=rows,
        asked=tuple(number(share) for share in data.get("asked_acceptance_by_position") or ()),
        dtype=str(data.get("dtype", "")),
        context=None if data.get("context") is None else int(data["context"]),
        repeats=None if data.get("repeats") is None else int(data["repeats"]),
        latency=str(data.get("latency", "")),
        summary={name: number(value) for name, value in (data.get("summary") or {}).items()},
        ranges=_ranges(schedule.get("ranges") or ()),
        verdict=tuple(_schedule_verdict(row) for row in schedule.get("verdict") or ()),
        alpha=None if alpha is None else number(alpha["value"] if isinstance(alpha, Mapping) else alpha),
        slowdown=optional_number(data.get("slowdown")),
    )


def _load_row(data: Mapping[str, Any]) -> LoadRow:
    speedup = as_estimate(data["speedup"])
    interval = data.get("speedup_interval") or (speedup.value - 1.645 * speedup.std, speedup.value + 1.645 * speedup.std)
    low, high = (number(value) for value in interval)
    if int(data["concurrency"]) < 1 or speedup.value <= 0:
        raise ValueError(f"concurrency {data['concurrency']}, speed-up {speedup.value}")
    return LoadRow(
        variant=str(data["variant"]),
        concurrency=int(data["concurrency"]),
        gamma=int(data["gamma"]),
        tau=number(data["tau"]),
        tokens_per_s=number(data["tokens_per_s"]),
        baseline_tokens_per_s=number(data["baseline_tokens_per_s"]),
        speedup=speedup,
        interval=(low, high),
        predicted=None if data.get("predicted_speedup") is None else as_estimate(data["predicted_speedup"]),
        relative_error=optional_number(data.get("relative_error")),
        error_at_measured_tau=optional_number(data.get("relative_error_at_measured_tau")),
        terms=read_terms(data.get("error_by_term")),
    )


def _schedule_verdict(data: Mapping[str, Any]) -> ScheduleVerdict:
    other = as_estimate(data["best_other_speedup"])
    own = as_estimate(data["speedup"])
    return ScheduleVerdict(int(data["concurrency"]), int(data["gamma"]), own, str(data["best_other"]), other, bool(data["holds"]))


def read_schedule(data: Any) -> ScheduleReport:
    """A ScheduleReport out of the file's content; raises one of WRONG_SHAPE for anything else."""
    points = tuple(
        SchedulePoint(
            int(point["batch_size"]),
            int(point["gamma"]),
            as_estimate(point["tau"]),
            as_estimate(point["speedup"]),
            {int(gamma): as_estimate(value) for gamma, value in point["by_gamma"].items()},
        )
        for point in data["points"]
    )
    if not points or min(point.batch_size for point in points) < 1:
        raise ValueError("no points, or a batch size below 1")
    return ScheduleReport(str(data["engine"]), str(data.get("latency", "")), _ranges(data["ranges"]), points)


def ranges_words(ranges: Ranges) -> str:
    """ "1-3: 5, 4-8: 3, 9-256: off"."""
    spans = [(f"{first}-{last}" if last > first else str(first), gamma or "off") for first, last, gamma in ranges]
    return ", ".join(f"{span}: {gamma}" for span, gamma in spans)


def _ranges(data: Sequence[Sequence[int]]) -> Ranges:
    return tuple((int(first), int(last), int(gamma)) for first, last, gamma in data)
