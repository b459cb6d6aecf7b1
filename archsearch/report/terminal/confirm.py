"""What `confirm` prints: by prompt, under load, families side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from archsearch.estimate import Estimate
from archsearch.progress import human_time
from archsearch.records import from_data
from archsearch.report.confirmed import pace_words, stopping_words
from archsearch.report.engines import fastest_lines, run_dtype, ways_of
from archsearch.report.families import order_words, title_of
from archsearch.report.phrases import unprofiled_words
from archsearch.report.reading import read_run
from archsearch.report.terminal.layout import table
from archsearch.runs.confirmed import Confirmed, ConfirmedGamma
from archsearch.runs.families import EngineComparison, Rival, Silent
from archsearch.runs.load import LoadRecord, LoadRow, ScheduleRun
from archsearch.runs.run import open_run
from archsearch.runs.terms import TERMS, TermErrors


def confirm_text(data: dict[str, Any], run: Path, rank: int) -> str:
    """A confirmation by prompt, as `confirm_rank` returns it."""
    found = from_data(Confirmed, data)
    gammas: list[ConfirmedGamma] = sorted([found, *found.other_gammas], key=lambda row: row.gamma)
    same, exact = found.identical_output, found.identical_output_float32
    remarks = [] if found.slowdown is None else [pace_words(found.slowdown)]
    if words := unprofiled_words(found):
        remarks.append(f"WARNING: {words}")
    if found.identical_output_unchecked:
        remarks.append(
            f"WARNING: identity in float32 was not checked: {found.identical_output_unchecked}"
        )
    remarks += [
        f"NOT DECIDED at gamma {row.gamma}: {row.undecided}. Confirm again with nothing else"
        " running."
        for row in (found, *found.other_gammas)
        if row.undecided
    ]
    remarks += [found.kept_earlier] if found.kept_earlier else []
    remarks += [words] if (words := stopping_words(found)) else []
    identity = (
        f"Same output as the target alone: {same.identical} of {same.prompts} in {found.dtype}"
    )
    if same.differences:
        gap = max(abs(each.logit_gap or 0) for each in same.differences)
        identity += f" (largest gap of the two logits where they part: {gap:.3f})"
    if exact and found.dtype != "float32":
        identity += f", {exact.words(' of ')} in float32"
    in_dtype = f" in {found.draft_dtype}" if found.draft_dtype else ""
    header = (
        "gamma | alpha | tau | alone tok/s | with draft | speed-up | pooled | predicted | error %"
        " | error % at measured tau | round ms | predicted"
    )
    return "\n".join(
        [
            f"{found.engine} {found.engine_version}, {found.dtype}, {found.prompts} held-out"
            f" prompts, draft {found.architecture}{in_dtype}, {human_time(found.seconds)}.",
            "",
            table([_gamma_cells(row) for row in gammas], header),
            "",
            *remarks,
            identity + ".",
            "",
            _next(found, run, rank),
        ]
    )


def engines_text(run: Path) -> str:
    """The fastest engine here, behind what one of them measured; "" where there is one."""
    opened = open_run(run)
    lines = fastest_lines(ways_of(read_run(opened)), run_dtype(opened))
    return "".join(f"\n{line}" for line in ["", *lines]) if lines else ""


def _gamma_cells(row: ConfirmedGamma) -> tuple[str, ...]:
    return (
        str(row.gamma),
        _estimate(row.alpha, 3),
        _estimate(row.tau),
        f"{row.baseline_tokens_per_s:.1f}",
        f"{row.tokens_per_s:.1f}",
        _estimate(row.speedup),
        f"{row.speedup_pooled:.2f}",
        f"{row.predicted_speedup:.2f}",
        _percent(row.relative_error),
        _percent(row.relative_error_at_measured_tau),
        f"{1e3 * (row.round_s or 0.0):.1f}",
        f"{1e3 * (row.predicted_round_s or 0.0):.1f}",
    )


def _estimate(value: Estimate | None, digits: int = 2) -> str:
    """`1.52 ± 0.20`; a dash for none."""
    return "-" if value is None else f"{value.value:.{digits}f} ± {value.std:.{digits}f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:+.1f}"


def _next(found: Confirmed, run: Path, rank: int) -> str:
    """What to do after a confirmation: it pays only where its whole interval lies above 1."""
    if found.undecided:
        again = (
            f"archsearch confirm {run} --rank {rank} --gamma {found.gamma} --engine {found.engine}"
        )
        return f"Next, with nothing else running: {again}"
    low, high = found.interval
    if low > 1:
        return f"Next: archsearch export {run} --rank {rank} --output my-draft"
    answer = (
        "Speculation does not pay here"
        if high < 1
        else "Too close to call: 1x lies within the error"
    )
    return f"{answer}. More training may help: archsearch train {run} --rank {rank} --budget 30m"


def load_text(found: LoadRecord, run: Path, rank: int) -> str:
    """A measurement under load."""
    how = "synthetic acceptance at the predicted rates" if found.synthetic else "real drafts"
    header = (
        "in flight | variant | tau | alone tok/s | with draft | speed-up | predicted | error %"
        " | error by term, %"
    )
    lines = [
        f"{found.engine} {found.engine_version}, {found.dtype}, {how}, draft {found.architecture},"
        f" {found.repeats} interleaved repeats, {human_time(found.seconds)}.",
        f"Predicted from {found.latency}.",
        "",
        table([_load_cells(row) for row in found.rows], header),
        "",
    ]
    summary = found.summary
    if summary.cases:
        lines.append(
            f"Predicted against measured: {summary.cases}"
            f" {'case' if summary.cases == 1 else 'cases'}, median error"
            f" {summary.median_absolute_error:.1%}, {summary.within_10_percent:.0%} within 10 %."
        )
    lines += _schedule_lines(found.schedule) if found.schedule is not None else []
    if found.slowdown is not None:
        lines.append(
            f"The machine ran {found.slowdown:.2f} times slower than the profile's reference; that"
            " is taken out of the terms."
        )
    after = f"export {run} --rank {rank} --output my-draft"
    if found.synthetic:
        lines.append(
            "The text is not the target's: times are real, acceptance is what was predicted."
        )
        after = f"train {run} --rank {rank} --budget 30m"
    return "\n".join([*lines, "", f"Next: archsearch {after}"])


def _load_cells(row: LoadRow) -> tuple[str, ...]:
    return (
        str(row.concurrency),
        row.variant,
        f"{row.tau:.2f}",
        f"{row.baseline_tokens_per_s:.1f}",
        f"{row.tokens_per_s:.1f}",
        _estimate(row.speedup),
        _estimate(row.predicted_speedup) if row.gamma else "off",
        _percent(row.relative_error),
        _biggest_shares(row.error_by_term),
    )


def _schedule_lines(schedule: ScheduleRun) -> list[str]:
    """The schedule that ran, against the best other setting at each concurrency and over all of
    them."""
    ranges = ", ".join(str(list(entry)) for entry in schedule.ranges)
    lines = [f"Schedule (first batch size, last, gamma): {ranges}."]
    for row in schedule.verdict:
        lost = "" if row.margin is None else f" (it may lose up to {row.margin:.2f}x unseen)"
        other = "always off" if row.best_other == "off" else f"fixed {row.best_other}"
        lines.append(
            f"  {row.concurrency} in flight: schedule {_estimate(row.speedup)} (gamma {row.gamma}),"
            f" best other {_estimate(row.best_other_speedup)} ({other}):"
            f" {f'not shown to be worse{lost}' if row.holds else 'WORSE'}."
        )
    overall = sorted(schedule.overall.items(), key=lambda item: -item[1])
    means = ", ".join(f"{name} {value:.2f}" for name, value in overall)
    return [*lines, f"Over these loads (geometric mean): {means}."]


def _biggest_shares(terms: TermErrors | None) -> str:
    """The terms that bring at least a percent of the error, largest first: `draft +3.1, verify
    -1.2`."""
    if terms is None:
        return ""
    errors = {name.removesuffix("_s"): getattr(terms.log_error, name) for name in TERMS}
    largest = sorted(errors, key=lambda name: -abs(errors[name]))
    return ", ".join(
        f"{name} {100 * errors[name]:+.1f}" for name in largest if abs(errors[name]) >= 0.01
    )


def families_text(found: EngineComparison, run: Path) -> str:
    """The target alone and every drafter, one line each."""
    header = (
        "drafter | gamma | tokens/step | accepted by position | round | tokens/s | speed-up"
        " | predicted | identical"
    )
    alone = found.baseline_tokens_per_s
    rate = f"{alone:.1f}" if alone else "-"
    cells: list[Sequence[str]] = [("target alone", "-", "1", "-", "-", rate, "1", "-", "-")]
    notes = []
    for row in found.rows:
        title = title_of(row.family)
        if isinstance(row, Silent):
            notes.append(f"{title}: {row.note}.")
            continue
        cells.append(_rival_cells(row))
        notes += [f"{title}: {row.note}."] if row.note else []
        if row.family == "ngram" and row.drafting_share is not None:
            notes.append(
                f"{title} proposed in {row.drafting_share:.0%} of the steps; acceptance is of"
                " those."
            )
        if row.warning:
            notes.append(f"{title}: {row.warning}.")
    head = (
        f"{found.prompts} prompts in {found.engine}, {found.dtype}, each with every drafter in"
        " turn:"
    )
    notes += [words] if (words := order_words(found)) else []
    notes += [f"WARNING: {words}"] if (words := unprofiled_words(found)) else []
    return "\n".join([head, "", table(cells, header), *notes, "", f"Kept in {run / 'heads'}."])


def _rival_cells(row: Rival) -> tuple[str, ...]:
    exact = row.identical_output_float32
    return (
        title_of(row.family),
        str(row.gamma),
        f"{row.tokens_per_step or row.tau.value:.2f}",
        " ".join(f"{share:.2f}" for share in row.accepted_by_position),
        f"{1e3 * (row.round_s or 0.0):.1f} ms",
        f"{row.tokens_per_s:.1f}",
        _estimate(row.speedup),
        _estimate(row.predicted),
        exact.words() if exact else "-",
    )
