"""What `profile` and `doctor` print."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import numpy as np

from archsearch.engines.measure.rounds import RoundsMeasured
from archsearch.estimate import Array
from archsearch.latency.added import AddedFit
from archsearch.latency.model import LatencyModel
from archsearch.profiles import BUSY_SHARE
from archsearch.records import Inline, Maybe, Stored
from archsearch.report.terminal.layout import plus_minus, table

CHECKED: Final = (
    "what | architecture | tokens | context | measured ms | predicted | ± std | error %"
)
MARKS: Final = {"ok": "ok  ", "note": "-   ", "mend": "MEND", "stop": "STOP"}
WIDTH: Final = 110
_INDENT: Final = " " * 16


@dataclass(frozen=True)
class Imported:
    """The answer of `profile --from`."""

    folder: str
    device: str
    rows: int
    origin: str
    provenance: Mapping[str, Any]

    def __str__(self) -> str:
        whose = self.provenance
        lines = [
            f"Profile {self.folder}: {self.rows} rows for {self.device}.",
            f"{self.origin}.",
            f"Licence of the tables: {whose['licence']}, {whose['copyright']}.",
        ]
        if absent := whose.get("not_in_tables"):
            lines.append(f"Not in the tables, so modelled: {'; '.join(absent)}.")
        folder = shlex.quote(self.folder)
        lines += ["", f"Next: archsearch search --target llama-65b --profile {folder}"]
        return "\n".join(lines)


@dataclass(frozen=True)
class SweepEnd:
    """Where the sweep of one mode and dtype of a GPU stopped."""

    new_rows: int
    relative_std: float | None
    stopped: str


@dataclass(frozen=True)
class CheckRow:
    """A pass of a shape that the profile had not seen, measured and predicted."""

    what: str
    architecture: str
    tokens: int
    context: int
    measured_s: float
    predicted_s: float
    predicted_std_s: float
    relative_error: float
    noisy: bool

    def cells(self) -> tuple[str, ...]:
        times = (self.measured_s, self.predicted_s, self.predicted_std_s)
        return (
            self.what,
            self.architecture,
            str(self.tokens),
            str(self.context),
            *(f"{1e3 * each:.2f}" for each in times),
            f"{100 * self.relative_error:+.1f}",
        )


@dataclass(frozen=True)
class CheckErrors:
    """Of such passes, over all of one kind. `reached`: what a check is to reach."""

    cases: int
    median_absolute_error: float
    within_10_percent: float
    within_12_percent: float
    within_two_std: float
    bias: float
    reached: bool


@dataclass(frozen=True)
class Check:
    """How often was checked, and the figures of the newest; all but `rows` are in the profile."""

    checks: int
    draft_step: Annotated[CheckErrors | None, Stored(name="draft step", omit=True)] = None
    verify: Maybe[CheckErrors] = None
    rows: Sequence[CheckRow] = ()


@dataclass(frozen=True)
class CpuPace:
    """How much slower than its quiet reference a CPU was."""

    planned_rows: int
    slowdown_p5: float
    slowdown_median: float
    slowdown_p95: float


@dataclass(frozen=True)
class GpuSweeps:
    """`skipped`: what did not fit the memory; `sweeps`, `rounds`: by dtype and mode."""

    throttled_share: float
    sweeps: Mapping[str, SweepEnd]
    skipped: Sequence[str]
    rounds: Mapping[str, RoundsMeasured]
    provenance: Mapping[str, Any]


@dataclass(frozen=True)
class NoModel:
    """Why nothing can be learnt yet."""

    missing: str


@dataclass(frozen=True)
class Profiled:
    """The answer of `profile`; `models`, `checks`: by dtype, and mode on a GPU."""

    folder: str
    device: str
    rows: int
    new_rows: int
    noisy_share: float
    measured: Inline[CpuPace | GpuSweeps]
    models: Mapping[str, LatencyModel | NoModel]
    checks: Mapping[str, Check]
    known_error: Mapping[str, Any]


ERRORS: Final = (
    "{0}: {1.cases} cases, median absolute error {1.median_absolute_error:.1%},"
    " {1.within_12_percent:.0%} within 12 %, {1.within_two_std:.0%} within two std,"
    " bias {1.bias:+.1%}"
)
OWN_PASSES: Final = (
    "passes as {} ran them: {} rows, {}; beside them it takes {plain_s:.2f} ms a plain step,"
    " {round_s:.2f} ms a round and {token_s:.2f} ms a draft token (measured)."
)
ADDED: Final = (
    "{} (vocabulary {}) adds {plain_s:.2f} ms per plain token, {round_s:.2f} ms per round,"
    " {token_s:.2f} ms per draft token and {layer_s:.3f} ms per layer of it (measured)."
)
ROUNDS: Final = (
    "rounds of class {0.rounds.costs.name}, {0.rounds.measured} measured, median error of the law"
    " {0.median_absolute_error:.1%}; ms, those not determined in brackets: {1}."
)


def _ms(fit: AddedFit) -> dict[str, float]:
    costs = fit.to_dict()
    known = ("plain_s", "round_s", "token_s", "layer_s")
    return {name: 1e3 * costs.get(name, 0.0) for name in known}


def _left_out(errors: Array, percent: int) -> str:
    median, within = float(np.median(errors)), float(np.mean(errors <= percent / 100))
    return f"left out one at a time: median error {median:.1%}, {within:.0%} within {percent} %"


def _learnt_words(model: LatencyModel | NoModel) -> Iterator[str]:
    if isinstance(model, NoModel):
        yield f"no model yet: {model.missing}"
        return
    if (errors := model.left_out_) is not None:
        yield f"whole passes {_left_out(errors, 12)}."
    if (own := model.engine_) is not None:
        words = _left_out(own.left_out_, 10)
        yield OWN_PASSES.format(own.engine, len(own.rows), words, **_ms(own.rest_))
    if (fit := model.round_fit_) is not None:
        costs = []
        for name, cost in fit.costs.items():
            if cost.value or cost.std:
                text = f"{name.replace('_', ' ')} {plus_minus(cost, 1e3)}"
                costs.append(text if name in fit.identified else f"({text})")
        yield ROUNDS.format(fit, ", ".join(costs))
    for (engine, vocabulary), added in model.added_.items():
        yield ADDED.format(engine, vocabulary, **_ms(added))


def _cpu_lines(pace: CpuPace, noisy_share: float) -> list[str]:
    words = (
        "Machine: {0.slowdown_median:.2f} times the quiet reference (5-95 %: {0.slowdown_p5:.2f} to"
        " {0.slowdown_p95:.2f}); divided out of every repeat."
    )
    lines, loud = [words.format(pace)], pace.slowdown_p95 > 1.5 * pace.slowdown_p5
    if loud or noisy_share > BUSY_SHARE:
        lines.append(
            "WARNING: this machine is busy or throttles: stop other work and run the command again,"
            " or trust the numbers less."
        )
    return lines


def _gpu_lines(measured: GpuSweeps) -> list[str]:
    lines = []
    for name, sweep in measured.sweeps.items():
        std = sweep.relative_std or 0.0
        sure = f", a step is predicted to ± {std:.1%} (std of the median pass)" if std else ""
        lines.append(f"{name}: {sweep.new_rows} new rows; stopped: {sweep.stopped}{sure}.")
    if throttled := measured.throttled_share:
        lines.append(
            f"WARNING: the clock dropped by more than 10 % during {throttled:.0%}"
            " of the rows: check cooling and power limit, then run the command again."
        )
    lines += [f"Skipped, out of memory: {point}" for point in measured.skipped]
    for name, rounds in measured.rounds.items():
        lines.append(f"{name}: {rounds.new_rows} rounds measured in the engine.")
        if rounds.left:
            left = "; ".join(rounds.left)
            lines.append(f"Left for want of time (the same command goes on): {left}")
        lines += [f"Not measured: {case}: {words}" for case, words in rounds.failed.items()]
    return lines


def profile_text(result: Profiled, asked: str, budget_s: float) -> str:
    """What `profile` prints; `asked`: the target, and the engine where it is another one."""
    first = "Profile {0.folder}: {0.rows} rows, {0.new_rows} new, {0.noisy_share:.0%} noisy."
    lines = [first.format(result)]
    if isinstance(result.measured, CpuPace):
        lines += _cpu_lines(result.measured, result.noisy_share)
    else:
        lines += _gpu_lines(result.measured)
    for dtype, model in result.models.items():
        lines += [f"{dtype}: {words}" for words in _learnt_words(model)]
    for dtype, check in result.checks.items():
        title = f"Check {dtype}: shapes the profile has not seen"
        lines += ["", title, table([row.cells() for row in check.rows], CHECKED)]
        kinds = (("draft step", check.draft_step), ("verify", check.verify))
        lines += [ERRORS.format(*each) for each in kinds if each[1]]
    after, folder = f"search --target {asked} --profile", shlex.quote(result.folder)
    if all(isinstance(model, NoModel) for model in result.models.values()):
        lines.append("Too little was measured to price anything: the command below goes on.")
        minutes = max(5, math.ceil(2 * budget_s / 60))
        after = f"profile --gpu {result.device} --target {asked} --budget {minutes}m --output"
    return "\n".join([*lines, "", f"Next: archsearch {after} {folder}"])


Level = Literal["ok", "note", "mend", "stop"]
"""`ok`: as it should be; `note`: worth knowing; `mend`: something is worse than it could be;
`stop`: nothing can run so."""


@dataclass(frozen=True)
class Finding:
    """One thing that `doctor` looked at. `command`: how to mend it, "" where there is nothing to
    mend."""

    topic: str = field(default="", kw_only=True)
    level: Level
    text: str
    command: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The answer of `doctor`; its `archsearch` is the version. `runs`: whether anything can run
    here."""

    archsearch: str
    findings: tuple[Finding, ...]
    runs: bool

    def __str__(self) -> str:
        lines, before = [], ""
        for finding in self.findings:
            topic = finding.topic if finding.topic != before else ""
            before = finding.topic
            start = f"{topic:<9} {MARKS[finding.level]}  "
            lines += textwrap.wrap(
                finding.text,
                WIDTH,
                initial_indent=start,
                subsequent_indent=_INDENT,
                break_on_hyphens=False,
            )
            if finding.command:
                lines.append(f"{_INDENT}$ {finding.command}")
        stop, mend = (
            sum(each.level == level for each in self.findings) for level in ("stop", "mend")
        )
        if not self.runs:
            verdict = f"Nothing can run here until what is marked STOP ({stop}) is mended."
        elif mend:
            verdict = f"archsearch runs here; {mend} thing{'s' if mend > 1 else ''} to mend (MEND)."
        else:
            verdict = "archsearch runs here; nothing to mend."
        return "\n".join([*lines, f"\n{verdict}"])
