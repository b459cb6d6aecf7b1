"""What `profile` and `doctor` print."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from archsearch.estimate import Estimate
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


ERRORS: Final = (
    "{what}: {cases} cases, median absolute error {median_absolute_error:.1%},"
    " {within_12_percent:.0%} within 12 %, {within_two_std:.0%} within two std, bias {bias:+.1%}"
)
LEFT_OUT: Final = (
    "whole passes left out one at a time: median error {leave_one_out_median:.1%},"
    " {leave_one_out_within_12_percent:.0%} within 12 %."
)
OWN_PASSES: Final = (
    "passes as {engine} ran them: {rows} rows, left out one at a time: median error"
    " {leave_one_out_median:.1%}, {leave_one_out_within_10_percent:.0%} within 10 %; beside them it"
    " takes {plain_s:.2f} ms a plain step, {round_s:.2f} ms a round and {token_s:.2f} ms a draft"
    " token (measured)."
)
ADDED: Final = (
    "{engine} adds {plain_s:.2f} ms per plain token, {round_s:.2f} ms per round, {token_s:.2f} ms"
    " per draft token and {layer_s:.3f} ms per layer of it (measured)."
)
ROUNDS: Final = (
    "rounds of class {class}, {rows} measured, median error of the law {median_absolute_error:.1%};"
    " ms, those not determined in brackets: {words}."
)


def import_text(result: Imported) -> str:
    """What `profile --from` prints."""
    provenance = result.provenance
    lines = [
        f"Profile {result.folder}: {result.rows} rows for {result.device}.",
        f"{result.origin}.",
        f"Licence of the tables: {provenance['licence']}, {provenance['copyright']}.",
    ]
    if absent := provenance.get("not_in_tables"):
        lines.append(f"Not in the tables, so modelled: {'; '.join(absent)}.")
    lines += ["", f"Next: archsearch search --target llama-65b --profile {result.folder}"]
    return "\n".join(lines)


def _ms(costs: Mapping[str, float]) -> dict[str, float]:
    """What an engine adds, in ms; 0 of what was not measured."""
    known = ("plain_s", "round_s", "token_s", "layer_s")
    return {name: 1e3 * costs.get(name, 0.0) for name in known}


def _learnt_words(learnt: Mapping[str, Any]) -> Iterator[str]:
    """How right the model of one dtype is (`LatencyModel.summary`), and what engines add."""
    if "missing" in learnt:
        yield f"no model yet: {learnt['missing']}"
        return
    if "leave_one_out_median" in learnt:
        yield LEFT_OUT.format(**learnt)
    if own := learnt.get("engine_passes"):
        yield OWN_PASSES.format(**own, **_ms(own["rest"]))
    if rounds := learnt.get("rounds"):
        words = []
        for name, cost in rounds["costs"].items():
            if cost["value"] or cost["std"]:
                text = f"{name.replace('_', ' ')} {plus_minus(Estimate.from_dict(cost), 1e3)}"
                words.append(text if name in rounds["identified"] else f"({text})")
        yield ROUNDS.format(**rounds, words=", ".join(words))
    for engine, costs in learnt["engines"].items():
        yield ADDED.format(engine=engine, **_ms(costs))


def _cpu_lines(result: Mapping[str, Any]) -> list[str]:
    """How quiet the machine was, of a CPU's profile."""
    words = (
        "Machine: {slowdown_median:.2f} times the quiet reference (5-95 %: {slowdown_p5:.2f} to"
        " {slowdown_p95:.2f}); divided out of every repeat."
    )
    lines, loud = [words.format(**result)], result["slowdown_p95"] > 1.5 * result["slowdown_p5"]
    if loud or result["noisy_share"] > 0.25:
        lines.append(
            "WARNING: this machine is busy or throttles: stop other work and run the command again,"
            " or trust the numbers less."
        )
    return lines


def _gpu_lines(result: Mapping[str, Any]) -> list[str]:
    """What each sweep of a GPU measured, and whether its clock dropped."""
    lines = []
    for name, sweep in result["sweeps"].items():
        std = sweep.relative_std or 0.0
        sure = f", a step is predicted to ± {std:.1%} (std of the median pass)" if std else ""
        lines.append(f"{name}: {sweep.new_rows} new rows; stopped: {sweep.stopped}{sure}.")
    if throttled := result["throttled_share"]:
        lines.append(
            f"WARNING: the clock dropped by more than 10 % during {throttled:.0%}"
            " of the rows: check cooling and power limit, then run the command again."
        )
    lines += [f"Skipped, out of memory: {point}" for point in result["skipped"]]
    for name, measured in result["rounds"].items():
        lines.append(f"{name}: {measured.new_rows} rounds measured in the engine.")
        if measured.left:
            left = "; ".join(measured.left)
            lines.append(f"Left for want of time (the same command goes on): {left}")
        lines += [f"Not measured: {case}: {words}" for case, words in measured.failed.items()]
    return lines


def profile_text(result: Mapping[str, Any], asked: str) -> str:
    """What `profile` prints of a summary; `asked`: the target, and the engine where it is another
    one."""
    first = "Profile {folder}: {rows} rows, {new_rows} new, {noisy_share:.0%} noisy."
    lines = [first.format(**result), *(_gpu_lines if "sweeps" in result else _cpu_lines)(result)]
    for dtype, learnt in result["models"].items():
        lines += [f"{dtype}: {words}" for words in _learnt_words(learnt)]
    for dtype, check in result["checks"].items():
        title = f"Check {dtype}: shapes the profile has not seen"
        lines += ["", title, table([row.cells() for row in check["rows"]], CHECKED)]
        kinds = [what for what in ("draft step", "verify") if what in check]
        lines += [ERRORS.format(what=what, **check[what]) for what in kinds]
    next_ = f"Next: archsearch search --target {asked} --profile {result['folder']}"
    return "\n".join([*lines, "", next_])


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
