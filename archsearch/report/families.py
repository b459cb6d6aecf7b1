"""Drafters of several families: what was predicted of each, what it cost to train, and what an
engine measured beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from archsearch.drafters.models import Independent
from archsearch.drafters.registry import family as family_class
from archsearch.engine_facts import ENGINES, engine_title
from archsearch.models.files import HEAD_FAMILIES
from archsearch.progress import human_time
from archsearch.report.charts import SERIES, Chart, line
from archsearch.report.headline import Headline, where_words
from archsearch.report.phrases import exported_for, shell_path, speedup_words, unprofiled_words
from archsearch.report.section import Cell, Rows, Section, Table, text_cell, value_cell
from archsearch.runs.run import Run
from archsearch.runs.tables import EngineComparison, FamilyRow, Rival, Silent

INDEPENDENT: Final = Independent.family
_FOUND: Final = "family | best | training | gamma | tokens a round, held-out | speed-up, predicted"
_COMPARED: Final = (
    "drafter | gamma | tokens a round, predicted | measured | speed-up, predicted | measured"
    " | tokens/s | round, ms | same text"
)


def section_families(rows: Sequence[FamilyRow], compared: Sequence[EngineComparison]) -> Section:
    """The best of each family and, engine by engine, drafters side by side; empty where there is
    neither."""
    parts = [found_section(rows)] if len(rows) > 1 else []
    return Section(
        "Families of drafters",
        parts=[*parts, *(compared_section(item) for item in compared if item.rivals)],
    )


def with_heads(
    head: Headline, run: Run, rows: Sequence[FamilyRow], compared: Sequence[EngineComparison]
) -> Headline:
    """The headline with the best head of a run that trained any, compared with the draft. Where
    the head leads, its commands come before the draft's."""
    best = next((row for row in rows if row.family in HEAD_FAMILIES), None)
    draft = next((row for row in rows if row.family == INDEPENDENT), None)
    if best is None or draft is None:
        return head
    words = (
        f"The best head: {title_of(best.family)}, {best.speedup.words('x')} predicted with gamma"
        f" {best.gamma}"
    )
    words += f", the best draft {draft.speedup.words('x')}."
    measured = list(filter(None, (_measured_words(item, best.family) for item in compared)))
    lines = [*head.lines, " ".join([words, *measured])]
    if best.speedup.value <= draft.speedup.value:
        return replace(head, lines=lines)
    path, family = shell_path(run.path), f"--family {best.family}"
    steps = [
        _written(run, best.family),
        (
            "Train it further; more of its tokens may be right",
            f"archsearch train {path} {family} --budget 30m",
        ),
    ]
    if not measured:
        words = "A head is above the draft on held-out text; run both in an engine"
        both = f"--engine {engine_of(run, best.family)} {family} --family {INDEPENDENT}"
        steps.insert(0, (words, f"archsearch confirm {path} {both}"))
    return replace(head, lines=lines, next=[*steps, *head.next])


def led_by_rival(head: Headline, run: Run, compared: Sequence[EngineComparison]) -> Headline:
    """The headline of what ran beside the target alone in the run's engine, a head or a chain say,
    where that pays and no rank was measured to bring as much."""
    here = (run.arguments.get("engine") or "transformers", run.dtype)
    ran = [row for item in compared if (item.engine, item.dtype) == here for row in item.rivals]
    ran = [row for row in ran if row.undecided is None]
    best, lead = max(ran, key=lambda row: row.speedup.value, default=None), head.lead
    if best is None or lead is None or best.family == INDEPENDENT or best.interval[0] <= 1.0:
        return head
    if lead.measured and lead.gain.value >= best.speedup.value:
        return head
    title, (low, high) = title_of(best.family), best.interval
    lines = [
        f"Measured in {engine_title(best.engine)} {best.engine_version} on {best.prompts} prompts,"
        f" interleaved: {best.baseline_tokens_per_s:.1f} tokens/s alone, {best.tokens_per_s:.1f}"
        f" with it; 5-95 % of the bootstrap over prompts {low:.2f}x to {high:.2f}x.",
        *([f"{title}: {best.note}."] if best.note else []),
        f"Without it, rank {lead.rank}: {head.title}",
    ]
    steps, engine = [], exported_for(best)
    if best.family in HEAD_FAMILIES:
        steps = [_written(run, best.family, engine)]
    elif best.rank is not None and ENGINES[best.engine].gguf:
        words = "Write its draft as a folder that the engine loads, with the options above"
        what = f"--rank {best.rank} --output {best.family}{engine}"
        steps = [(words, f"archsearch export {shell_path(run.path)} {what}")]
    first = f"Speculation pays {where_words(run)}: {speedup_words(best)}, with {title} at gamma"
    answer = f"{first} {best.gamma}."
    steps = list(dict.fromkeys([*steps, *head.next]))
    return replace(head, title=answer, lines=[*lines, *head.lines], next=steps)


def _written(run: Run, family: str, engine: str = "") -> tuple[str, str]:
    what = f"--family {family} --output head-{family}{engine}"
    command = f"archsearch export {shell_path(run.path)} {what}"
    return f"Write the {title_of(family)} as a folder that engines load", command


def engine_of(run: Run, family: str) -> str:
    """The run's engine, where archsearch starts it with such a head, else vLLM."""
    engine = str(run.arguments.get("engine") or "")
    return engine if engine in ENGINES and family in ENGINES[engine].confirms else "vllm"


def _measured_words(item: EngineComparison, family: str) -> str:
    found = {row.family: row for row in item.rivals}
    if family not in found or INDEPENDENT not in found:
        return ""
    one, other = found[family], found[INDEPENDENT]
    return (
        f"In {engine_title(item.engine)} {one.speedup.words('x')} (gamma {one.gamma}) beside"
        f" {other.speedup.words('x')} (gamma {other.gamma}), {item.prompts} prompts."
    )


def title_of(name: str) -> str:
    """A family in words."""
    return family_class(name).title


def found_section(rows: Sequence[FamilyRow]) -> Section:
    """The best of each family after training, with what it cost."""
    cells: Rows = [
        [
            text_cell(title_of(row.family), f"rank {row.rank}" if row.rank else ""),
            text_cell(row.label),
            _training(row),
            str(row.gamma),
            value_cell(row.tau),
            value_cell(row.speedup, unit="x"),
        ]
        for row in rows
    ]
    words = f"Acceptance measured on {rows[0].measured_on}, time predicted, by predicted speed-up."
    states = (
        " States: reading the target's states of the text, once for all heads that read the same"
        " layers."
    )
    note = words + (states if any(row.states_s >= 1.0 for row in rows) else "")
    own = [f"{title_of(row.family)}: {row.note}." for row in rows if row.note]
    return Section("The best of each family", tables=[Table(_FOUND, cells, 0)], notes=[note, *own])


def _training(row: FamilyRow) -> Cell:
    if not row.seconds:
        return Cell("none")
    return Cell(
        human_time(row.seconds), f"states {human_time(row.states_s)}" if row.states_s >= 1.0 else ""
    )


def compared_section(item: EngineComparison) -> Section:
    """Drafters side by side in one engine, and what is to be said of single ones."""
    engine = engine_title(item.engine)
    cells: Rows = [
        [
            text_cell(title_of(row.family)),
            str(row.gamma),
            value_cell(row.predicted_tau),
            _tokens(row),
            value_cell(row.predicted, unit="x"),
            value_cell(row.speedup, unit="x"),
            f"{row.tokens_per_s:.1f}",
            f"{1e3 * (row.round_s or 0.0):.1f}",
            "-" if (same := row.identical_output_float32) is None else same.words(" of "),
        ]
        for row in item.rivals
    ]
    alone = item.baseline_tokens_per_s
    rate = "" if alone is None else f" The target alone: {alone:.1f} tokens/s."
    note = (
        f"{item.prompts} prompts in {engine}, {item.dtype}, each with every drafter in turn.{rate}"
        f" {order_words(item)} {unprofiled_words(item)}"
    )
    own = [f"{title_of(row.family)}: {words}." for row in item.rows if (words := _row_words(row))]
    return Section(
        f"Side by side in {engine}",
        tables=[Table(_COMPARED, cells)],
        charts=_charts(item, engine),
        notes=[note.strip(), *own],
    )


def _tokens(row: Rival) -> Cell | str:
    """Tokens a pass as predictions count them: also where a lookup finds nothing."""
    counted = row.tokens_per_step if row.family in ("ngram", "chain") else None
    return value_cell(row.tau) if counted is None else f"{counted:.2f}"


def _row_words(row: Rival | Silent) -> str:
    if isinstance(row, Silent):
        return row.note
    share = row.drafting_share if row.family in ("ngram", "chain") else None
    parts = (
        "" if share is None else f"proposed in {share:.0%} of the steps; acceptance is of those",
        row.note,
        row.warning or "",
    )
    return "; ".join(filter(None, parts))


def order_words(item: EngineComparison) -> str:
    """Whether they came out in the order predicted."""
    if item.order is None:
        return ""
    pairs = (
        f"{' and '.join(map(title_of, swap.pair))} came out the other way round than predicted, "
        f"{'inside' if swap.inside else 'outside'} their error bars."
        for swap in item.order.swapped
    )
    return " ".join(pairs) or "They came out in the order predicted."


def _charts(item: EngineComparison, engine: str) -> list[Chart]:
    found = [
        (title_of(row.family), row.predicted, row.speedup)
        for row in item.rivals
        if row.predicted is not None
    ]
    if not found:
        return []
    bars = {
        ("predicted", SERIES[4]): [(name, gain) for name, gain, _ in found],
        (f"measured in {engine}", SERIES[0]): [(name, gain) for name, _, gain in found],
    }
    series = [
        line(name, gains, "bounds", kind="bar", colour=colour)
        for (name, colour), gains in bars.items()
    ]
    caption = (
        "Speed-up over the target alone, predicted from profile and held-out text, and measured;"
        " bars are one standard deviation."
    )
    key, title = f"families-{item.engine}", f"Families side by side in {engine}"
    return [Chart(key, title, caption, "drafter", "speed-up", series, y_from_zero=True, level=1.0)]
