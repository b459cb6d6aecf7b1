"""The sections of many requests in flight: a measurement under load, predicted beside measured, and
the best gamma at each batch size, as predicted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from archsearch.engine_facts import engine_title
from archsearch.estimate import Estimate
from archsearch.report.charts import MARK, SERIES, Chart, Series, depth_colour, gain_chart, line
from archsearch.report.section import Cell, Rows, Section, Table, text_cell, value_cell
from archsearch.runs.confirmed import REST, SCHEDULED, LoadRecord, LoadRow, ScheduleRun
from archsearch.schedule import GammaSchedule, ranges_words

_TABLE: Final = (
    "In flight: requests served together. Measured: median over repeats of the ratio to the target"
    " alone in the same repeat, 5-95 % of the bootstrap below it. Predicted: ± one standard"
    " deviation. Error: predicted / measured - 1; with counted tau (in the report): of the times"
    " alone. tokens/s: all requests together. "
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
_VERDICT: Final = (
    "Best other: the fastest of off (1.0) and every fixed gamma that was run. Not shown to be"
    " worse: not slower by more than two standard deviations of the difference; a smaller loss"
    " would not be seen."
)


def section_load(load: LoadRecord, rank: int, label: str, alpha: Estimate | None = None) -> Section:
    """Tables and a plot of load-<engine>.json of one candidate; `alpha`: as it is known now."""
    facts = [
        label,
        load.dtype,
        f"context {load.context}" if load.context is not None else "",
        f"{load.repeats} repeats, interleaved" if load.repeats is not None else "",
    ]
    doubts = [acceptance_words(load)]
    if alpha is not None and load.is_stale(alpha):
        doubts.append(
            "Alpha on held-out text has changed since; the predictions here are from before."
        )
    notes = [_TABLE + (_SYNTHETIC_BAND if load.synthetic else "") + _error_words(load)]
    return Section(
        f"Under load in {engine_title(load.engine)} {load.engine_version}: rank {rank}",
        ["; ".join(fact for fact in facts if fact) + "."],
        [_speedup_table(load)],
        [_load_chart(rank, load)],
        [*notes, *([f"Predicted from: {load.latency}."] if load.latency else [])],
        doubts,
        parts=[_terms_part(load), _schedule_part(load.schedule)],
    )


def acceptance_words(load: LoadRecord) -> str:
    """One sentence or two: whether acceptance was synthetic, and what that leaves unproved."""
    if not load.synthetic:
        return "Acceptance was real: the target checked the tokens of the trained draft."
    rates = ", ".join(f"{share:.2f}" for share in load.asked_acceptance_by_position or ())
    by_position = f" ({rates} by position)" if rates else ""
    return (
        "Acceptance was synthetic: draft tokens were accepted by chance at the predicted"
        f" rates{by_position} and the draft's weights were random. The times are the engine's own;"
        " the text is not the target's. That a draft of this shape reaches these rates is not"
        " shown here."
    )


def _error_words(load: LoadRecord) -> str:
    found = load.summary
    if not found.cases or found.median_absolute_error is None:
        return ""
    cases = f"{found.cases} cases" if found.cases != 1 else "1 case"
    words = f"{cases}: median absolute error {found.median_absolute_error:.1%}"
    for share, limit in ((found.within_5_percent, 5), (found.within_10_percent, 10)):
        words += "" if share is None else f", {share:.0%} within {limit} %"
    return words + "."


def _speedup_table(load: LoadRecord) -> Table:
    rows: Rows = [
        [
            text_cell(row.variant),
            str(row.concurrency),
            str(row.gamma or "off"),
            value_cell(row.predicted_speedup, unit="x"),
            Cell(
                value_cell(row.speedup, unit="x").text, "{:.2f}x to {:.2f}x".format(*row.interval)
            ),
            _percent(row.relative_error),
            _percent(row.relative_error_at_measured_tau),
            f"{row.tau:.2f}" if row.gamma else "-",
            f"{row.baseline_tokens_per_s:.1f}",
            f"{row.tokens_per_s:.1f}",
        ]
        for row in load.rows
    ]
    header = (
        "served with | in flight | gamma | speed-up, predicted | measured | error"
        " | with counted tau | tau, tokens | tokens/s alone | with draft"
    )
    brief = (
        "served with | in flight | measured | speed-up, predicted | error | tau, tokens |"
        " tokens/s alone | with draft"
    )
    return Table(header, rows, brief=brief)


def _terms_part(load: LoadRecord) -> Section:
    rows: Rows = []
    for row in load.rows:
        if row.error_by_term is None or row.relative_error is None:
            continue
        terms, cells = row.error_by_term, [text_cell(row.variant), Cell(str(row.concurrency))]
        shares = terms.shares(row.relative_error)
        for name in ("decode_s", "draft_s", "verify_s", "overhead_s", "tau"):
            pair = getattr(terms.predicted, name), getattr(terms.measured, name)
            below = (
                "{:.2f}, {:.2f}".format(*pair)
                if name == "tau"
                else "{:.1f}, {:.1f} ms".format(*(1e3 * each for each in pair))
            )
            cells.append(Cell(_percent(shares[name]), below))
        rows.append([*cells, _percent(shares[REST]), _percent(row.relative_error)])
    if not rows:
        return Section()
    header = (
        "served with | in flight | target alone | draft | verify | overhead | tau | rest"
        " | error of the speed-up"
    )
    return Section(
        "What each term brings to the error of the speed-up",
        tables=[Table(header, rows)],
        notes=[_TERM_NOTE, *load.pace_words],
    )


def _schedule_part(schedule: ScheduleRun | None) -> Section:
    if schedule is None:
        return Section()
    title = "Gamma by batch size against a fixed gamma"
    words = [f"Schedule that was run: {ranges_words(schedule.ranges)}."] if schedule.ranges else []
    rows: Rows = [
        [
            str(row.concurrency),
            str(row.gamma or "off"),
            value_cell(row.speedup, unit="x"),
            text_cell(row.best_other),
            value_cell(row.best_other_speedup, unit="x"),
            text_cell(
                "yes" if row.holds else "NO",
                f"may lose up to {row.margin:.2f}x unseen"
                if row.holds and row.margin is not None
                else "",
            ),
        ]
        for row in schedule.verdict
    ]
    header = (
        "in flight | gamma of the schedule | speed-up, schedule | best other"
        " | speed-up, best other | not shown to be worse"
    )
    best = sorted(schedule.overall.items(), key=lambda item: -item[1])
    means = ", ".join(f"{name} {value:.2f}" for name, value in best)
    notes = [f"Over these loads (geometric mean): {means}."] if best else []
    tables = [Table(header, rows)] if rows else []
    return Section(title, words, tables, notes=[*notes, _VERDICT] if rows else notes)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _load_chart(rank: int, load: LoadRecord) -> Chart:
    series: list[Series] = []
    names = sorted(load.variants, key=lambda name: name == SCHEDULED)
    for number, name in enumerate(names):
        follows = name == SCHEDULED
        colour = MARK if follows else SERIES[number % len(SERIES)]
        rows = sorted(
            (row for row in load.rows if row.variant == name), key=lambda row: row.concurrency
        )
        # side by side, so that intervals at one concurrency do not hide each other
        shift = 2.0 ** (0.09 * (number - (len(names) - 1) / 2))
        if not follows:  # its prediction is that of the gamma it runs
            series += _predicted(name, rows, colour)
        notes = tuple(
            f"{name}, {row.concurrency} in flight<br>{row.speedup.value:.2f}x measured"
            for row in rows
        )
        look = {"symbol": "diamond" if follows else "circle", "notes": notes, "colour": colour}
        places = [(shift * row.concurrency, _with_interval(row)) for row in rows]
        series.append(line(name, places, "bounds", kind="line" if follows else "points", **look))
    caption = (
        f"Rank {rank} in {engine_title(load.engine)}. Points: measured, bars 5-95 %"
        + (" (acceptance synthetic)" if load.synthetic else "")
        + ". Dashed with band: predicted ± one standard deviation."
        + (" Diamonds: the schedule." if SCHEDULED in names else "")
        + " Dashed at 1.0: no gain."
    )
    key = re.sub(r"[^A-Za-z0-9-]", "-", f"load-{rank}-{load.engine}")
    ticks, title = tuple(map(float, load.concurrencies)), "Speed-up against requests in flight"
    axis, scale = "requests in flight", {"x_scale": "log2", "ticks": ticks}
    return gain_chart(key, title, caption, axis, series, y_from_zero=True, **scale)


def _with_interval(row: LoadRow) -> Estimate:
    gain, (low, high) = row.speedup, row.interval
    return replace(gain, low=min(low, gain.value), high=max(high, gain.value))


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
    look = {"colour": colour, "band": True, "dashed": True, "symbol": None, "named": False}
    return [line(f"{name}, predicted", priced, "std", **look)]


def section_schedule(rank: int, schedule: GammaSchedule) -> Section:
    """Table and plot of the gammas of one candidate by batch size."""
    name = engine_title(schedule.engine)
    rows: Rows = [
        [
            str(point.batch_size),
            str(point.gamma or "off"),
            value_cell(point.tau) if point.gamma and point.tau else "-",
            value_cell(point.speedup, unit="x"),
        ]
        for point in schedule.points
        if point.speedup
    ]
    source = f" Predicted from: {schedule.latency}." if schedule.latency else ""
    note = (
        "Off: drafting nothing is faster than any gamma; a speed-up below 1 is then what a draft"
        " costs that the engine runs all the same. ± one standard deviation. Nothing here was"
        f" measured in {name}.{source}"
    )
    return Section(
        f"Gamma by batch size, predicted for {name}: rank {rank}",
        [f"Schedule: {ranges_words(schedule.ranges)}."],
        [Table(("batch size", "gamma", "tau, tokens", "speed-up, predicted"), rows)],
        [_schedule_chart(rank, schedule)],
        [note],
    )


def _schedule_chart(rank: int, schedule: GammaSchedule) -> Chart:
    gammas = sorted({gamma for point in schedule.points for gamma in point.by_gamma})
    series = []
    for number, gamma in enumerate(gammas):
        points = [
            (float(point.batch_size), point.by_gamma[gamma].value)
            for point in schedule.points
            if gamma in point.by_gamma
        ]
        hue = depth_colour(number / max(len(gammas) - 1, 1))
        series.append(line(f"{gamma}", points, colour=hue, size=4.0))
    chosen = [(float(p.batch_size), p.speedup.value) for p in schedule.points if p.speedup]
    ring = {"kind": "points", "colour": MARK, "symbol": "ring", "size": 11.0}
    series.append(line("best", chosen, **ring))
    caption = (
        f"Predicted speed-up of every gamma against batch size, rank {rank} in"
        f" {engine_title(schedule.engine)}. Ring: the schedule's choice; a ring on no line: off."
        " Dashed: no gain."
    )
    ticks = tuple(float(point.batch_size) for point in schedule.points)
    look = {"x_scale": "log2", "ticks": ticks, "legend_title": "gamma"}
    title = "Every gamma by batch size"
    return gain_chart(f"schedule-{rank}", title, caption, "batch size", series, **look)
