"""What `confirm` under load prints."""

from __future__ import annotations

from pathlib import Path

from archsearch.estimate import Estimate
from archsearch.progress import human_time
from archsearch.report.terminal.layout import plus_minus, table
from archsearch.runs.load import LoadRecord, LoadRow, ScheduleRun
from archsearch.runs.terms import TERMS, TermErrors


def load_text(result: LoadRecord, run: Path, rank: int) -> str:
    """What `confirm` under load says."""
    header = (
        "in flight",
        "variant",
        "tau",
        "alone tok/s",
        "with draft",
        "speed-up",
        "predicted",
        "error %",
        "error by term, %",
    )
    how = "synthetic acceptance at the predicted rates" if result.synthetic else "real drafts"
    lines = [
        (
            f"{result.engine} {result.engine_version}, {result.dtype}, {how}, draft"
            f" {result.architecture}, {result.repeats} interleaved repeats,"
            f" {human_time(result.seconds)}."
        ),
        f"Predicted from {result.latency}.",
        "",
        table([_cells(row) for row in result.rows], header),
        "",
    ]
    summary = result.summary
    if summary["cases"]:
        lines.append(
            f"Predicted against measured: {summary['cases']}"
            f" {'case' if summary['cases'] == 1 else 'cases'}, median error"
            f" {summary['median_absolute_error']:.1%}, {summary['within_10_percent']:.0%} within"
            " 10 %."
        )
    lines += _schedule_lines(result.schedule) if result.schedule is not None else []
    if result.slowdown is not None:
        lines.append(
            f"The machine ran {result.slowdown:.2f} times slower than the profile's reference; that"
            " is taken out of the terms."
        )
    if result.synthetic:
        lines.append(
            "The text is not the target's: times are real, acceptance is what was predicted."
        )
        lines += ["", f"Next: archsearch train {run} --rank {rank} --budget 30m"]
    else:
        lines += ["", f"Next: archsearch export {run} --rank {rank} --output my-draft"]
    return "\n".join(lines)


def _cells(row: LoadRow) -> tuple[str, ...]:
    return (
        str(row.concurrency),
        row.variant,
        f"{row.measured.tau:.2f}",
        f"{row.baseline_tokens_per_s:.1f}",
        f"{row.measured.tokens_per_s:.1f}",
        _estimate(row.speedup),
        _estimate(row.predicted_speedup) if row.gamma else "off",
        "" if row.relative_error is None else f"{100 * row.relative_error:+.1f}",
        _biggest_share(row.error_by_term),
    )


def _schedule_lines(schedule: ScheduleRun) -> list[str]:
    """The schedule that ran, against the best other setting at each concurrency and over all of
    them."""
    lines = [
        "Schedule (first batch size, last, gamma):"
        f" {', '.join(str(list(entry)) for entry in schedule.ranges)}."
    ]
    for row in schedule.verdict:
        lost = "" if row.margin is None else f" (it may lose up to {row.margin:.2f}x unseen)"
        other = "always off" if row.best_other == "off" else f"fixed {row.best_other}"
        lines.append(
            f"  {row.concurrency} in flight: schedule {_estimate(row.speedup)} (gamma {row.gamma}),"
            f" best other {_estimate(row.best_other_speedup)} ({other}):"
            f" {f'not shown to be worse{lost}' if row.holds else 'WORSE'}."
        )
    overall = sorted(schedule.overall.items(), key=lambda item: -item[1])
    return [
        *lines,
        (
            "Over these loads (geometric mean):"
            f" {', '.join(f'{name} {value:.2f}' for name, value in overall)}."
        ),
    ]


def _estimate(value: Estimate | None) -> str:
    return plus_minus(None if value is None else value.to_dict())


def _biggest_share(terms: TermErrors | None) -> str:
    """The terms that bring at least a percent of the error, largest first: `draft +3.1, verify
    -1.2`."""
    if terms is None:
        return ""
    errors = {name.removesuffix("_s"): getattr(terms.log_error, name) for name in TERMS}
    largest = sorted(errors, key=lambda name: -abs(errors[name]))
    return ", ".join(
        f"{name} {100 * errors[name]:+.1f}" for name in largest if abs(errors[name]) >= 0.01
    )
