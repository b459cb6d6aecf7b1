"""The section of one measurement under load: predicted beside measured at each number of requests
in flight."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from archsearch.engine_facts import engine_title
from archsearch.report.charts import MARK, SERIES, Chart, Series
from archsearch.report.phrases import slowdown_words
from archsearch.report.reading import Shown
from archsearch.report.section import Cell, Section, Table, text_cell, value_cell
from archsearch.runs.load import LoadRecord, LoadRow, ScheduleRun
from archsearch.runs.terms import REST
from archsearch.schedule import ranges_words

SCHEDULE: Final = "schedule"  # the name of the variant that follows the schedule
_TERM_HEADS: Final = {
    "decode_s": "target alone",
    "draft_s": "draft",
    "verify_s": "verify",
    "overhead_s": "overhead",
    "tau": "tau",
    REST: "rest",
}


def section_load(item: Shown, load: LoadRecord) -> Section:
    """Tables and a plot of load-<engine>.json of one candidate."""
    facts = [
        item.score.label(),
        load.dtype,
        f"context {load.context}" if load.context is not None else "",
        f"{load.repeats} repeats, interleaved" if load.repeats is not None else "",
    ]
    doubts = [acceptance_words(load)]
    if load.is_stale(item.score.alpha):
        doubts.append(
            "Alpha on held-out text has changed since; the predictions here are from before."
        )
    parts = []
    if any(row.error_by_term and row.relative_error is not None for row in load.rows):
        title = "What each term brings to the error of the speed-up"
        parts.append(
            Section(
                title,
                tables=[_terms_table(load)],
                notes=[_TERM_NOTE + slowdown_words(load.slowdown)],
            )
        )
    if load.schedule is not None:
        parts.append(_schedule_part(load.schedule))
    notes = [_TABLE + (_SYNTHETIC_BAND if load.synthetic else "") + _error_words(load)]
    return Section(
        f"Under load in {engine_title(load.engine)} {load.engine_version}: rank {item.rank}",
        ["; ".join(fact for fact in facts if fact) + "."],
        [_speedup_table(load)],
        [_load_chart(item, load)],
        [*notes, *([f"Predicted from: {load.latency}."] if load.latency else [])],
        doubts,
        parts=parts,
    )


_TABLE: Final = (
    "In flight: requests served together. Measured: median over repeats of the ratio to the target"
    " alone in the same repeat, 5-95 % of the bootstrap below it. Predicted: ± one standard"
    " deviation. Error: predicted / measured - 1; the next column is with the tau the engine"
    " counted, which leaves the error of the times. tokens/s: all requests together. "
)
_SYNTHETIC_BAND: Final = (
    "The predicted deviation holds what is not known about acceptance, too, which synthetic"
    " acceptance takes out of the measured side. "
)
_TERM_NOTE: Final = (
    "Each row adds up to the error of the speed-up (predicted / measured - 1). Positive: the term"
    " makes the prediction too high. Below it: predicted, measured; times are medians over steps at"
    " full batch, draft: all passes of a round, overhead: what is neither draft nor verify. Rest:"
    " the speed-up is a median of ratios, which medians of terms do not give exactly."
)


def acceptance_words(load: LoadRecord) -> str:
    """One sentence or two: whether acceptance was synthetic, and what that leaves unproved."""
    if not load.synthetic:
        return "Acceptance was real: the target checked the tokens of the trained draft."
    rates = ", ".join(f"{share:.2f}" for share in load.asked_acceptance_by_position)
    by_position = f" ({rates} by position)" if rates else ""
    return (
        "Acceptance was synthetic: draft tokens were accepted by chance at the predicted"
        f" rates{by_position} and the draft's weights were random. The times are the engine's own;"
        " the text is not the target's. That a draft of this shape reaches these rates is not"
        " shown here."
    )


def _error_words(load: LoadRecord) -> str:
    summary = load.summary
    if not summary.get("cases") or "median_absolute_error" not in summary:
        return ""
    shares = [
        f"{summary[name]:.0%} within {limit} %"
        for name, limit in (("within_5_percent", 5), ("within_10_percent", 10))
        if name in summary
    ]
    cases = f"{summary['cases']:.0f} cases" if summary["cases"] != 1 else "1 case"
    return (
        f"{cases}: median absolute error {summary['median_absolute_error']:.1%}"
        + "".join(f", {share}" for share in shares)
        + "."
    )


def _speedup_table(load: LoadRecord) -> Table:
    rows: list[list[Cell | str]] = []
    for row in load.rows:
        seen = row.speedup
        measured = Cell(f"{seen.value:.2f}x", f"{row.interval[0]:.2f}x to {row.interval[1]:.2f}x")
        rows.append(
            [
                text_cell(row.variant),
                str(row.concurrency),
                _gamma(row.gamma),
                value_cell(row.predicted_speedup, 2, unit="x"),
                measured,
                _percent(row.relative_error),
                _percent(row.relative_error_at_measured_tau),
                f"{row.measured.tau:.2f}" if row.gamma else "-",
                f"{row.baseline_tokens_per_s:.1f}",
                f"{row.measured.tokens_per_s:.1f}",
            ]
        )
    header = (
        "served with",
        "in flight",
        "gamma",
        "speed-up, predicted",
        "measured",
        "error",
        "with counted tau",
        "tau, tokens",
        "tokens/s alone",
        "with draft",
    )
    return Table(header, rows)


def _terms_table(load: LoadRecord) -> Table:
    rows: list[list[Cell | str]] = []
    for row in load.rows:
        if row.error_by_term is None or row.relative_error is None:
            continue
        terms = row.error_by_term
        shares = terms.shares(row.relative_error)
        cells: list[Cell | str] = [text_cell(row.variant), str(row.concurrency)]
        for name in _TERM_HEADS:
            if name == REST:
                continue
            predicted, measured = getattr(terms.predicted, name), getattr(terms.measured, name)
            scale, unit = 1.0 if name == "tau" else 1e3, "" if name == "tau" else " ms"
            digits = 2 if name == "tau" else 1
            pair = f"{scale * predicted:.{digits}f}, {scale * measured:.{digits}f}{unit}"
            cells.append(Cell(_percent(shares[name]), pair))
        rows.append([*cells, _percent(shares[REST]), _percent(row.relative_error)])
    header = ("served with", "in flight", *_TERM_HEADS.values(), "error of the speed-up")
    return Table(header, rows)


def _schedule_part(schedule: ScheduleRun) -> Section:
    title = "Gamma by batch size against a fixed gamma"
    words = [f"Schedule that was run: {ranges_words(schedule.ranges)}."] if schedule.ranges else []
    if schedule.verdict:
        rows: list[list[Cell | str]] = [
            [
                str(row.concurrency),
                _gamma(row.gamma),
                value_cell(row.speedup, 2, unit="x"),
                text_cell(row.best_other),
                value_cell(row.best_other_speedup, 2, unit="x"),
                text_cell("yes" if row.holds else "NO"),
            ]
            for row in schedule.verdict
        ]
        header = (
            "in flight",
            "gamma of the schedule",
            "speed-up, schedule",
            "best other",
            "speed-up, best other",
            "not shown to be worse",
        )
        note = (
            "Best other: the fastest of off (1.0) and every fixed gamma that was run. Not shown to"
            " be worse: not slower by more than two standard deviations of the difference; a"
            " smaller loss would not be seen."
        )
        return Section(title, words, [Table(header, rows)], notes=[note])
    return Section(title, words)


def _gamma(gamma: int) -> str:
    return str(gamma) if gamma else "off"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _load_chart(item: Shown, load: LoadRecord) -> Chart:
    series: list[Series] = []
    names = [name for name in load.variants if name != SCHEDULE]
    names += [name for name in load.variants if name == SCHEDULE]
    for number, name in enumerate(names):
        colour = MARK if name == SCHEDULE else SERIES[number % len(SERIES)]
        rows = sorted(
            (row for row in load.rows if row.variant == name), key=lambda row: row.concurrency
        )
        # side by side, so that intervals at one concurrency do not hide each other
        shift = 2.0 ** (0.09 * (number - (len(names) - 1) / 2))
        if name != SCHEDULE:  # its prediction is that of the gamma it runs
            series += _predicted(name, rows, colour)
        series.append(
            Series(
                name,
                tuple(shift * row.concurrency for row in rows),
                tuple(row.speedup.value for row in rows),
                "line" if name == SCHEDULE else "points",
                colour,
                tuple(min(row.interval[0], row.speedup.value) for row in rows),
                tuple(max(row.interval[1], row.speedup.value) for row in rows),
                symbol="diamond" if name == SCHEDULE else "circle",
                notes=tuple(
                    f"{name}, {row.concurrency} in flight<br>{row.speedup.value:.2f}x measured"
                    for row in rows
                ),
            )
        )
    caption = (
        f"Rank {item.rank} in {engine_title(load.engine)}. Points: measured, bars 5-95 %"
        + (" (acceptance synthetic)" if load.synthetic else "")
        + ". Dashed with band: predicted ± one standard deviation."
        + (" Diamonds: the schedule." if SCHEDULE in names else "")
        + " Dashed at 1.0: no gain."
    )
    key = re.sub(r"[^A-Za-z0-9-]", "-", f"load-{item.rank}-{load.engine}")
    return Chart(
        key,
        "Speed-up against requests in flight",
        caption,
        "requests in flight",
        "speed-up, x",
        tuple(series),
        x_scale="log2",
        y_from_zero=True,
        level=1.0,
        ticks=tuple(map(float, sorted(load.concurrencies))),
    )


def _predicted(name: str, rows: Sequence[LoadRow], colour: str) -> list[Series]:
    priced = [
        (float(row.concurrency), row.predicted_speedup)
        for row in rows
        if row.predicted_speedup is not None
    ]
    if not priced:
        return []
    if len(priced) == 1:  # a band of no width would not be seen
        place, value = priced[0]
        priced = [(place / 1.3, value), (place * 1.3, value)]
    gains = [value for _, value in priced]
    return [
        Series(
            f"{name}, predicted",
            tuple(x for x, _ in priced),
            tuple(gain.value for gain in gains),
            colour=colour,
            low=tuple(gain.value - gain.std for gain in gains),
            high=tuple(gain.value + gain.std for gain in gains),
            band=True,
            dashed=True,
            symbol=None,
            named=False,
        )
    ]
