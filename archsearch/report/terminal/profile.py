"""What `profile` and `doctor` print."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from archsearch.estimate import Estimate
from archsearch.records import Endless, Stored, from_data
from archsearch.report.terminal.layout import table

CHECKED: Final = (
    "what | architecture | tokens | context | measured ms | predicted | ± std | error %"
)
MARKS: Final = {"ok": "ok  ", "note": "-   ", "mend": "MEND", "stop": "STOP"}
WIDTH: Final = 110
_INDENT: Final = " " * 16


@dataclass(frozen=True)
class Provenance:
    """Whose tables were imported, of what the profile keeps of them."""

    licence: str
    copyright: str
    not_in_tables: tuple[str, ...] = ()


@dataclass(frozen=True)
class Imported:
    """The answer of `profile --from`."""

    folder: str
    device: str
    rows: int
    origin: str
    provenance: Mapping[str, object]


@dataclass(frozen=True)
class SweepEnd:
    """Where the sweep of one mode and dtype of a GPU stopped."""

    new_rows: int
    relative_std: float | None
    stopped: str


@dataclass(frozen=True)
class EngineRounds:
    """What was measured in an engine on a GPU. `left`: for want of time; `failed`: why."""

    new_rows: int
    left: tuple[str, ...]
    failed: Mapping[str, str]


@dataclass(frozen=True)
class RoundFit:
    """Costs fitted to the rounds of an engine. `identified`: those that rows determine."""

    name: Annotated[str, Stored("class")]
    rows: int
    costs: Mapping[str, Estimate]
    identified: tuple[str, ...]
    median_absolute_error: Endless

    def words(self) -> str:
        """The costs in ms; those that no row determines in brackets."""
        words = []
        for name, cost in self.costs.items():
            if cost.value or cost.std:
                text = f"{name.replace('_', ' ')} {1e3 * cost.value:.2f} ± {1e3 * cost.std:.2f}"
                words.append(text if name in self.identified else f"({text})")
        return (
            f"rounds of class {self.name}, {self.rows} measured, median error of the law"
            f" {self.median_absolute_error:.1%}; ms, those not determined in brackets:"
            f" {', '.join(words)}."
        )


@dataclass(frozen=True)
class Costs:
    """Seconds that an engine adds."""

    plain_s: float = 0.0
    round_s: float = 0.0
    token_s: float = 0.0
    layer_s: float = 0.0


@dataclass(frozen=True)
class OwnPasses:
    """Passes as an engine ran them. `rest`: what it takes beside them."""

    engine: str
    rows: int
    leave_one_out_median: Endless
    leave_one_out_within_10_percent: Endless
    rest: Costs


@dataclass(frozen=True)
class Learnt:
    """How right the model of one dtype is, and what engines add. `missing`: why there is none."""

    missing: str = ""
    leave_one_out_median: Endless | None = None
    leave_one_out_within_12_percent: Endless | None = None
    engine_passes: OwnPasses | None = None
    rounds: RoundFit | None = None
    engines: Mapping[str, Costs] = field(default_factory=dict)

    def words(self) -> Iterator[str]:
        if self.missing:
            yield f"no model yet: {self.missing}"
            return
        if self.leave_one_out_median is not None:
            yield (
                "whole passes left out one at a time: median error"
                f" {self.leave_one_out_median:.1%},"
                f" {self.leave_one_out_within_12_percent:.0%} within 12 %."
            )
        if (own := self.engine_passes) is not None:
            rest = own.rest
            yield (
                f"passes as {own.engine} ran them: {own.rows} rows, left out one at a time:"
                f" median error {own.leave_one_out_median:.1%},"
                f" {own.leave_one_out_within_10_percent:.0%} within 10 %; beside them it"
                f" takes {1e3 * rest.plain_s:.2f} ms a plain step, {1e3 * rest.round_s:.2f} ms a"
                f" round and {1e3 * rest.token_s:.2f} ms a draft token (measured)."
            )
        if self.rounds is not None:
            yield self.rounds.words()
        for engine, parts in self.engines.items():
            yield (
                f"{engine} adds {1e3 * parts.plain_s:.2f} ms per plain token,"
                f" {1e3 * parts.round_s:.2f} ms per round, {1e3 * parts.token_s:.2f} ms per draft"
                f" token and {1e3 * parts.layer_s:.3f} ms per layer of it (measured)."
            )


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
        return (
            self.what,
            self.architecture,
            str(self.tokens),
            str(self.context),
            f"{1e3 * self.measured_s:.2f}",
            f"{1e3 * self.predicted_s:.2f}",
            f"{1e3 * self.predicted_std_s:.2f}",
            f"{100 * self.relative_error:+.1f}",
        )


@dataclass(frozen=True)
class CheckSummary:
    """How far predictions lay from such passes of one kind."""

    cases: int
    median_absolute_error: float
    within_12_percent: float
    within_two_std: float
    bias: float

    def words(self, what: str) -> str:
        return (
            f"{what}: {self.cases} cases, median absolute error"
            f" {self.median_absolute_error:.1%}, {self.within_12_percent:.0%} within"
            f" 12 %, {self.within_two_std:.0%} within two std, bias {self.bias:+.1%}"
        )


@dataclass(frozen=True)
class Check:
    """The check of one dtype."""

    rows: tuple[CheckRow, ...]
    step: Annotated[CheckSummary | None, Stored("draft step")] = None
    verify: CheckSummary | None = None


@dataclass(frozen=True)
class Profiled:
    """The answer of `profile`: `sweeps`, `skipped`, `rounds` of a GPU, `slowdown_...` of a CPU."""

    folder: str
    rows: int
    new_rows: int
    noisy_share: float
    models: Mapping[str, Learnt]
    checks: Mapping[str, Check]
    sweeps: Mapping[str, SweepEnd] | None = None
    throttled_share: float = 0.0
    skipped: tuple[str, ...] = ()
    rounds: Mapping[str, EngineRounds] = field(default_factory=dict)
    slowdown_p5: float = 1.0
    slowdown_median: float = 1.0
    slowdown_p95: float = 1.0


def import_text(result: Imported) -> str:
    """What `profile --from` prints."""
    provenance = from_data(Provenance, result.provenance)
    lines = [
        f"Profile {result.folder}: {result.rows} rows for {result.device}.",
        f"{result.origin}.",
        f"Licence of the tables: {provenance.licence}, {provenance.copyright}.",
    ]
    if provenance.not_in_tables:
        lines.append(f"Not in the tables, so modelled: {'; '.join(provenance.not_in_tables)}.")
    lines += ["", f"Next: archsearch search --target llama-65b --profile {result.folder}"]
    return "\n".join(lines)


def _cpu_lines(result: Profiled) -> list[str]:
    """How quiet the machine was, of a CPU's profile."""
    lines = [
        f"Machine: {result.slowdown_median:.2f} times the quiet reference (5-95 %:"
        f" {result.slowdown_p5:.2f} to {result.slowdown_p95:.2f}); divided out of every repeat."
    ]
    if result.slowdown_p95 > 1.5 * result.slowdown_p5 or result.noisy_share > 0.25:
        lines.append(
            "WARNING: this machine is busy or throttles: stop other work and run the command again,"
            " or trust the numbers less."
        )
    return lines


def _gpu_lines(result: Profiled, sweeps: Mapping[str, SweepEnd]) -> list[str]:
    """What each sweep of a GPU measured, and whether its clock dropped."""
    lines = []
    for name, sweep in sweeps.items():
        std = sweep.relative_std or 0.0
        sure = f", a step is predicted to ± {std:.1%} (std of the median pass)" if std else ""
        lines.append(f"{name}: {sweep.new_rows} new rows; stopped: {sweep.stopped}{sure}.")
    if result.throttled_share:
        lines.append(
            f"WARNING: the clock dropped by more than 10 % during {result.throttled_share:.0%}"
            " of the rows: check cooling and power limit, then run the command again."
        )
    lines += [f"Skipped, out of memory: {point}" for point in result.skipped]
    for name, measured in result.rounds.items():
        lines.append(f"{name}: {measured.new_rows} rounds measured in the engine.")
        if measured.left:
            left = "; ".join(measured.left)
            lines.append(f"Left for want of time (the same command goes on): {left}")
        lines += [f"Not measured: {case}: {words}" for case, words in measured.failed.items()]
    return lines


def profile_text(data: Mapping[str, object], asked: str = "T") -> str:
    """What `profile` prints; `asked`: the target, and the engine where it is another one."""
    result = from_data(Profiled, data)
    lines = [
        f"Profile {result.folder}: {result.rows} rows, {result.new_rows} new,"
        f" {result.noisy_share:.0%} noisy.",
        *(_cpu_lines(result) if result.sweeps is None else _gpu_lines(result, result.sweeps)),
    ]
    for dtype, learnt in result.models.items():
        lines += [f"{dtype}: {words}" for words in learnt.words()]
    for dtype, check in result.checks.items():
        title = f"Check {dtype}: shapes the profile has not seen"
        lines += ["", title, table([row.cells() for row in check.rows], CHECKED)]
        for what, part in (("draft step", check.step), ("verify", check.verify)):
            lines += [] if part is None else [part.words(what)]
    lines += ["", f"Next: archsearch search --target {asked} --profile {result.folder}"]
    return "\n".join(lines)


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


def doctor_text(result: Diagnosis) -> str:
    """One line a finding, below it the command that mends it; the verdict last."""
    lines, before = [], ""
    for finding in result.findings:
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
        sum(each.level == level for each in result.findings) for level in ("stop", "mend")
    )
    if not result.runs:
        verdict = f"Nothing can run here until what is marked STOP ({stop}) is mended."
    elif mend:
        verdict = f"archsearch runs here; {mend} thing{'s' if mend > 1 else ''} to mend (MEND)."
    else:
        verdict = "archsearch runs here; nothing to mend."
    return "\n".join([*lines, f"\n{verdict}"])
