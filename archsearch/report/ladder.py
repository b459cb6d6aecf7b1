"""The ladder of each finalist: its speed-up by the prior, after each short training, after the full
one, and as confirmed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from archsearch.estimate import Estimate
from archsearch.progress import human_time
from archsearch.records import WRONG_SHAPE, from_data
from archsearch.report.charts import Series, colour, gain_chart, line
from archsearch.report.learning import count_words
from archsearch.report.reading import Reading, Shown
from archsearch.report.section import Cell, Section, Table, columns, text_cell, value_cell

FINALISTS_DRAWN: Final = 6
PRIOR, FULL, CONFIRMED = "prior", "full training", "confirmed"
Ladder = dict[str, Estimate]


def ladders(reading: Reading, trials: Sequence[Mapping[str, Any]]) -> dict[str, Ladder]:
    """By label, best rank first: the speed-up predicted or measured at each rung that a candidate
    reached."""
    records = [record for record in reading.climb.get("rungs", []) if record.get("score")]
    found: dict[str, Ladder] = {}
    for item in reading.candidates[:FINALISTS_DRAWN]:
        ladder: Ladder = {}
        if (prior := _prior(item, records, trials)) is not None:
            ladder[PRIOR] = prior
        for record in records:
            if record["label"] == item.score.label() and record["rung"] > 0:
                ladder[_rung(record)] = from_data(Estimate, record["score"])
        if item.has_weights and FULL not in ladder:
            ladder[FULL] = item.score.speedup
        if item.measured_speedup is not None:
            ladder[CONFIRMED] = item.measured_speedup
        if len(ladder) > 1:
            found[item.score.label()] = ladder
    return found


def _rung(record: Mapping[str, Any]) -> str:
    return f"short training {record['round']}" if record["rung"] == 1 else FULL


def _prior(
    item: Shown, records: Sequence[Mapping[str, Any]], trials: Sequence[Mapping[str, Any]]
) -> Estimate | None:
    """The speed-up predicted before anything was trained: from the climb's own record, or the
    search's trial."""
    for record in records:
        if record["label"] == item.score.label() and record["rung"] == 0:
            return from_data(Estimate, record["score"])
    for row in trials:
        if row.get("drafter") == item.score.label() and not row.get("rung"):
            try:
                return Estimate(
                    float(row["speedup"]), float(row.get("speedup_std") or 0.0), "modelled"
                )
            except WRONG_SHAPE:
                return None
    return None


def section_ladder(reading: Reading, trials: Sequence[Mapping[str, Any]]) -> Section:
    """Chart and table of the ladders; empty where nothing reached more than one rung."""
    found = ladders(reading, trials)
    if not found:
        return Section()
    seen = {rung for ladder in found.values() for rung in ladder}
    rungs = [PRIOR, *sorted(rung for rung in seen if rung.startswith("short")), FULL, CONFIRMED]
    rungs = [rung for rung in rungs if rung in seen]
    caption = (
        "The speed-up as known at each rung, one line a finalist, with one standard"
        " deviation: the band narrows as the draft itself is measured. Dashed across: no gain."
    )
    chart = gain_chart(
        "ladder",
        "From prior to confirmed",
        caption,
        "",
        [_series(*item, rungs, number) for number, item in enumerate(found.items())],
        ticks=tuple(map(float, range(len(rungs)))),
        # `short 2` of `short training 2`: six rungs stand side by side on a phone
        tick_names=tuple(rung.replace(" training", "") for rung in rungs),
    )
    rows: list[list[Cell | str]] = [
        [text_cell(label), *(value_cell(ladder.get(rung), 2, unit="x") for rung in rungs)]
        for label, ladder in found.items()
    ]
    note = (
        "Prior: before anything was trained. Trainings: alpha as expected at their end, after what"
        " was measured. Confirmed: run in the engine beside the target alone."
    )
    table = Table(("shape", *rungs), rows)
    return Section("The ladder of each finalist", tables=[table], charts=[chart], notes=[note])


def section_rungs(state: Mapping[str, Any]) -> Section:
    """What a climb trained, round by round, and what it predicted after each; empty for runs that
    did not climb."""
    rows: list[list[Cell | str]] = []
    for record in state.get("rungs", []):
        if record["rung"] == 0:
            continue
        measured = (record.get("measured") or {}).get("alpha")
        fate = f"{record['state']}: {record['why']}" if record["why"] else record["state"]
        rows.append(
            [
                text_cell(_rung(record)),
                text_cell(record["label"]),
                count_words(record["tokens"]),
                human_time(record["seconds"]),
                "-" if measured is None else f"{measured:.3f}",
                value_cell(from_data(Estimate, record["alpha"])),
                value_cell(from_data(Estimate, record["score"]), 2, unit="x"),
                text_cell(fate, wrap=True),
            ]
        )
    if not rows:
        return Section()
    header = columns(
        "round | shape | tokens | time | alpha then | alpha at the end | speed-up at the end |"
        " outcome"
    )
    spent = ", ".join(
        f"{name} {human_time(seconds)}" for name, seconds in state.get("steps", {}).items()
    )
    words = f"Time budget {human_time(state['budget_s'])}; spent: {spent}. " + " ".join(
        f"{note}." for note in state["notes"]
    )
    note = (
        "alpha then: measured after that many tokens, on answers kept out of training, the same"
        f" for all shapes. At the end: expected after the full training. {words}"
    )
    brief = columns("round | shape | speed-up at the end | tokens | time | alpha then")
    return Section("The climb", tables=[Table(header, rows, brief=brief)], notes=[note])


def _series(label: str, ladder: Ladder, rungs: Sequence[str], number: int) -> Series:
    steps = [(place, ladder[rung]) for place, rung in enumerate(rungs) if rung in ladder]
    notes = tuple(
        f"{label}<br>{rungs[place]}: {value.value:.2f}x ± {value.std:.2f}" for place, value in steps
    )
    # side by side, so that bars do not hide each other
    places = [(place + 0.04 * number, value) for place, value in steps]
    return line(label, places, "std", colour=colour(number), notes=notes)
