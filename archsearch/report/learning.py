"""What training did: learning curves, the ladder of each finalist from prior to confirmed, and the
rounds of a climb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from archsearch.estimate import Estimate
from archsearch.progress import human_time
from archsearch.records import WRONG_SHAPE
from archsearch.report.charts import MARK, Chart, Series, colour, gain_chart, line
from archsearch.report.phrases import count_words
from archsearch.report.reading import Reading, Shown
from archsearch.report.section import Cell, Rows, Section, Table, text_cell, value_cell
from archsearch.runs.candidate import TrainingLook, TrainingRecord
from archsearch.runs.state import ClimbState, RungRow

DRAFTS_TOLD: Final = 3
NOTE: Final = (
    "Distinct: tokens of text that the target wrote for training; seen: with repetitions and"
    " prompts. Alpha on texts that no draft is trained on, as training looked at it; the alpha of"
    " the tables is measured afterwards. A loss that falls while alpha does not rise is text learnt"
    " by heart: more epochs bring nothing, more text does."
)
# Held-out alpha below its best by more than this, while the training loss fell, is learning by
# heart. Two looks at one draft differ by about 0.01.
BY_HEART: Final = 0.015


def trained(reading: Reading) -> list[TrainingRecord]:
    """One record a shape: of the ranked candidates, then of finalists that are not ranked."""
    found: dict[str, TrainingRecord] = {}
    ranked = [item.trained_by for item in reading.candidates if item.trained_by is not None]
    for record in (*ranked, *reading.finalists):
        if record.looks or record.tokens:
            found.setdefault(record.architecture.label(), record)
    return list(found.values())


def learning_lines(reading: Reading) -> list[str]:
    """One sentence a trained draft, for the terminal."""
    records = trained(reading)
    more = len(records) - DRAFTS_TOLD
    lines = [f"{each.architecture.label()}: {curve_words(each)}" for each in records[:DRAFTS_TOLD]]
    return [*lines, *([f"{more} more in report.html"] if more > 0 else [])]


def curve_words(record: TrainingRecord) -> str:
    """`24k distinct tokens, 5.8M seen (104 epochs); training loss 2.20 -> 0.18; held-out alpha .327
    at 620k tokens, kept`."""
    epochs = f" ({epochs_words(record.epochs)})" if record.epochs else ""
    seen = f"{count_words(record.tokens)} seen{epochs}"
    if record.distinct_tokens:
        seen = f"{count_words(record.distinct_tokens)} distinct tokens, {seen}"
    parts = [seen]
    losses = [look.loss for look in record.looks if look.loss is not None]
    if len(losses) > 1:
        parts.append(f"training loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    if record.looks:
        parts.append(_alpha_words(record))
    if record.stopped:
        parts.append(f"stopped: {record.stopped}")
    return "; ".join(parts)


def _alpha_words(record: TrainingRecord) -> str:
    best, last = max(record.looks, key=lambda look: look.alpha), record.looks[-1]
    kept = record.kept
    text = f"held-out alpha {(kept or last).alpha:.3f}"
    if kept is not None and kept.tokens < last.tokens:
        end = f"{last.alpha:.3f} at the end"
        return f"{text} at {count_words(kept.tokens)} tokens, whose weights are kept ({end})"
    if kept is None and best.alpha - last.alpha > BY_HEART:
        there = f"{best.alpha:.3f} at {count_words(best.tokens)} tokens"
        return f"{text} at the end, {there}: the rest was learnt by heart"
    return f"{text} at the end"


def section_learning(reading: Reading) -> Section:
    """A table of the trained drafts; empty where none was trained. The picture of them is among the
    others."""
    records = trained(reading)
    if not records:
        return Section()
    rows: Rows = []
    for record in records:
        losses = [look.loss for look in record.looks if look.loss is not None]
        best = max((look.alpha for look in record.looks), default=None)
        rows.append(
            [
                text_cell(record.architecture.label()),
                count_words(record.distinct_tokens) if record.distinct_tokens else "-",
                count_words(record.tokens),
                f"{record.epochs:.1f}" if record.epochs else "-",
                f"{losses[0]:.2f} to {losses[-1]:.2f}" if losses else "-",
                "-" if best is None else f"{best:.3f}",
                _look_cell(record.kept),
                _look_cell(record.looks[-1] if record.looks else None),
                human_time(record.seconds),
                text_cell(record.stopped or "-", wrap=True),
            ]
        )
    header = (
        "shape | distinct tokens | seen | epochs | training loss | best alpha | kept at |"
        " at the end | time | stopped"
    )
    return Section("Learning curve", tables=[Table(header, rows)], notes=[NOTE])


def _look_cell(look: TrainingLook | None) -> Cell:
    if look is None:
        return Cell("-")
    return Cell(f"{look.alpha:.3f}", _seen_words(look))


def _seen_words(look: TrainingLook) -> str:
    epochs = f", {epochs_words(look.epochs)}" if look.epochs else ""
    return f"{count_words(look.tokens)} tokens{epochs}"


def plot_learning(records: Sequence[TrainingRecord]) -> Chart | None:
    """Held-out alpha (left, full) and training loss (right, dashed) against tokens seen; None where
    nothing was looked at."""
    shown = [record for record in records if any(look.seconds > 0 for look in record.looks)]
    if not shown:
        return None
    in_tokens = all(record.tokens for record in shown)

    def at(look: TrainingLook) -> float:
        return float(look.tokens) if in_tokens else look.seconds

    alphas, losses = [], []
    for number, record in enumerate(shown):
        hue, label = colour(number), record.architecture.label()
        looks = [look for look in record.looks if at(look) > 0]
        notes = tuple(
            f"{label}<br>alpha {look.alpha:.3f} after {_seen_words(look)}" for look in looks
        )
        seen = [(at(look), look.alpha) for look in looks]
        alphas.append(line(label, seen, colour=hue, size=4.0, notes=notes))
        fell = [(at(look), float(look.loss)) for look in looks if look.loss is not None]
        unseen = {"dashed": True, "symbol": None, "faint": True, "right": True, "named": False}
        if fell:
            losses.append(line(f"{label}, loss", fell, colour=hue, **unseen))
        if record.kept is not None and at(record.kept) > 0:
            mark = {"kind": "points", "symbol": "diamond", "size": 9.0, "named": False}
            place = (at(record.kept), record.kept.alpha)
            alphas.append(line(f"{label}, kept", [place], colour=MARK, **mark))
    kept = any(record.kept is not None for record in shown)
    caption = (
        "Alpha on texts that are not trained on (full lines) and training loss (dashed, right"
        " scale) against the"
        f" {'tokens seen, repetitions included' if in_tokens else 'seconds of training'} (measured;"
        f" training.json).{' Red diamond: the weights that were kept.' if kept else ''}"
    )
    return Chart(
        "learning",
        "Learning curve",
        caption,
        "tokens seen in training" if in_tokens else "training time, seconds",
        "held-out alpha",
        (*alphas, *losses),
        x_scale="log",
        right_label="training loss" if losses else "",
    )


def epochs_words(epochs: float | None) -> str:
    """`7.5 epochs`; "" for none."""
    return f"{epochs:.{0 if epochs >= 9.95 else 1}f} epochs" if epochs else ""


FINALISTS_DRAWN: Final = 6
PRIOR, FULL, CONFIRMED = "prior", "full training", "confirmed"
Ladder = dict[str, Estimate]


def ladders(reading: Reading, trials: Sequence[Mapping[str, object]]) -> dict[str, Ladder]:
    """By label, best rank first: the speed-up predicted or measured at each rung that a candidate
    reached."""
    records = [] if reading.climb is None else reading.climb.rungs
    found: dict[str, Ladder] = {}
    for item in reading.candidates[:FINALISTS_DRAWN]:
        ladder: Ladder = {}
        if (prior := _prior(item, records, trials)) is not None:
            ladder[PRIOR] = prior
        for record in records:
            if record.label == item.score.label() and record.rung > 0:
                ladder[_rung(record)] = record.score
        if item.has_weights and FULL not in ladder:
            ladder[FULL] = item.score.speedup
        if item.measured_speedup is not None:
            ladder[CONFIRMED] = item.measured_speedup
        if len(ladder) > 1:
            found[item.score.label()] = ladder
    return found


def _rung(record: RungRow) -> str:
    return f"short training {record.round}" if record.rung == 1 else FULL


def _prior(
    item: Shown, records: Sequence[RungRow], trials: Sequence[Mapping[str, Any]]
) -> Estimate | None:
    for record in records:
        if record.label == item.score.label() and record.rung == 0:
            return record.score
    for row in trials:
        if row.get("drafter") == item.score.label() and not float(row.get("rung") or 0):
            try:
                return Estimate(
                    float(row["speedup"]), float(row.get("speedup_std") or 0.0), "modelled"
                )
            except WRONG_SHAPE:
                return None
    return None


def section_ladder(reading: Reading, trials: Sequence[Mapping[str, object]]) -> Section:
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
    rows: Rows = [
        [text_cell(label), *(value_cell(ladder.get(rung), unit="x") for rung in rungs)]
        for label, ladder in found.items()
    ]
    note = (
        "Prior: before anything was trained. Trainings: alpha as expected at their end, after what"
        " was measured. Confirmed: run in the engine beside the target alone."
    )
    table = Table(("shape", *rungs), rows)
    return Section("The ladder of each finalist", tables=[table], charts=[chart], notes=[note])


def section_rungs(state: ClimbState | None) -> Section:
    """What a climb trained, round by round, and what it predicted after each; empty for runs that
    did not climb."""
    trained = [] if state is None else [record for record in state.rungs if record.rung > 0]
    if state is None or not trained:
        return Section()
    rows: Rows = [
        [
            text_cell(_rung(record)),
            text_cell(record.label),
            count_words(record.tokens),
            human_time(record.seconds),
            "-" if record.measured is None else f"{record.measured.alpha:.3f}",
            value_cell(record.alpha),
            value_cell(record.score, unit="x"),
            text_cell(f"{record.state}: {record.why}" if record.why else record.state, wrap=True),
        ]
        for record in trained
    ]
    header = (
        "round | shape | tokens | time | alpha then | alpha at the end | speed-up at the end |"
        " outcome"
    )
    spent = ", ".join(f"{name} {human_time(seconds)}" for name, seconds in state.steps.items())
    words = f"Time budget {human_time(state.budget_s)}; spent: {spent}. " + " ".join(
        f"{note}." for note in state.notes
    )
    note = (
        "alpha then: measured after that many tokens, on answers kept out of training, the same"
        f" for all shapes. At the end: expected after the full training. {words}"
    )
    brief = "round | shape | speed-up at the end | tokens | time | alpha then"
    return Section("The climb", tables=[Table(header, rows, brief=brief)], notes=[note])


def _series(label: str, ladder: Ladder, rungs: Sequence[str], number: int) -> Series:
    steps = [(place, ladder[rung]) for place, rung in enumerate(rungs) if rung in ladder]
    notes = tuple(f"{label}<br>{rungs[place]}: {value.words('x')}" for place, value in steps)
    # side by side, so that bars do not hide each other
    places = [(place + 0.04 * number, value) for place, value in steps]
    return line(label, places, "std", colour=colour(number), notes=notes)
