"""Charts of the search: all shapes and their Pareto front, what depth and width cost, gammas,
acceptance by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from archsearch.report.charts import (
    INK,
    MARK,
    SERIES,
    Chart,
    Series,
    colour,
    depth_colour,
    gain_chart,
    line,
)
from archsearch.report.learning import plot_learning, trained
from archsearch.report.reading import Reading, Shown
from archsearch.report.section import Section
from archsearch.runs.confirmed import Confirmed
from archsearch.speedup import accepted_by_position


def section_plots(
    reading: Reading, scored: Sequence[Mapping[str, object]], lead: Shown | None
) -> Section:
    """All charts of the search, of rows of trials.csv that have a score; empty where there is
    nothing to draw."""
    found, trials = reading.candidates, plotted_trials(scored)
    charts = [_trials_chart(trials, found), _cost_chart(trials)] if trials else []
    charts.append(plot_learning(trained(reading)))
    first = [item for item in (lead, *found) if item is not None]
    confirmed = next((item for item in first if item.confirmed is not None), None)
    if confirmed is not None and confirmed.confirmed and confirmed.confirmed.other_gammas:
        charts.append(_gammas_chart(confirmed.rank, confirmed.confirmed))
    positions = confirmed or next((item for item in found if item.replayed), None)
    if positions is not None:
        charts.append(_positions_chart(positions))
    return Section("The search in pictures", charts=list(filter(None, charts)))


@dataclass(frozen=True)
class PlottedTrial:
    """What a chart needs of a row of trials.csv."""

    layers: int
    hidden: int
    parameters: int
    draft_step_s: float
    speedup: float
    feasible: bool
    family: str
    label: str


def plotted_trials(scored: Sequence[Mapping[str, Any]]) -> list[PlottedTrial]:
    """Scored trials, each shape once (a repeated shape is the same point)."""
    found: dict[PlottedTrial, None] = {}
    names = ("num_hidden_layers", "hidden_size", "parameters")
    for row in scored:
        try:
            step_s = float(row["draft_s"]) / float(row["gamma"])
            layers, width, parameters = (int(float(row[name])) for name in names)  # or 7.0
            gain, feasible = float(row["speedup"]), row.get("feasible") != "False"
        except (ArithmeticError, KeyError, TypeError, ValueError):  # a row without a score
            continue
        label = row.get("drafter") or f"{layers}x{width}"
        family = row.get("family") or "independent"
        found[PlottedTrial(layers, width, parameters, step_s, gain, feasible, family, label)] = None
    return list(found)


def _groups(trials: Sequence[PlottedTrial], by: str) -> list[tuple[str, list[PlottedTrial], str]]:
    """(name, members, colour) by number of layers or hidden size, or by family where there are
    several."""
    several = len({trial.family for trial in trials}) > 1
    members: dict[Any, list[PlottedTrial]] = {}
    for trial in trials if several else sorted(trials, key=lambda each: int(getattr(each, by))):
        members.setdefault(trial.family if several else getattr(trial, by), []).append(trial)
    if several:
        ordered = sorted(sorted(members.items()), key=lambda item: -len(item[1]))
        return [(name, own, colour(number)) for number, (name, own) in enumerate(ordered)]
    most = max(len(members) - 1, 1)
    return [
        (str(value), own, depth_colour(number / most))
        for number, (value, own) in enumerate(members.items())
    ]


def _cloud(
    name: str, hue: str, points: Sequence[tuple[PlottedTrial, float, float]]
) -> list[Series]:
    series: list[Series] = []
    for feasible, symbol in ((True, "circle"), (False, "cross")):
        chosen = [point for point in points if point[0].feasible == feasible]
        notes = tuple(
            f"{t.label}<br>{t.speedup:.2f}x, {t.parameters / 1e6:.0f}M parameters"
            for t, _, _ in chosen
        )
        look = {"colour": hue, "size": 5.0, "symbol": symbol, "faint": not feasible, "notes": notes}
        if chosen:
            places = [(x, y) for _, x, y in chosen]
            series.append(line(name, places, kind="points", named=not series, **look))
    return series


def pareto_front(trials: Sequence[PlottedTrial]) -> list[PlottedTrial]:
    """Of shapes within all limits those that no smaller or equal one beats, by parameters
    ascending."""
    feasible = sorted((t for t in trials if t.feasible), key=lambda t: (t.parameters, -t.speedup))
    best = [float("-inf"), *accumulate((t.speedup for t in feasible), max)]
    return [t for t, before in zip(feasible, best, strict=False) if t.speedup > before]


def _trials_chart(trials: Sequence[PlottedTrial], found: Sequence[Shown]) -> Chart:
    families = len({trial.family for trial in trials}) > 1
    series = [
        part
        for name, members, hue in _groups(trials, "layers")
        for part in _cloud(name, hue, [(t, t.parameters / 1e6, t.speedup) for t in members])
    ]
    front = [(trial.parameters / 1e6, trial.speedup) for trial in pareto_front(trials)]
    if len(front) > 1:
        series.append(line("Pareto front", front, colour=INK, symbol=None, dashed=True))
    best = found[:5]
    if best:
        places = [(item.score.parameters / 1e6, item.score.speedup.value) for item in best]
        notes = tuple(
            f"rank {item.rank}: {item.score.label()}<br>{item.score.speedup.value:.2f}x predicted"
            for item in best
        )
        ring = {"kind": "points", "colour": INK, "symbol": "ring", "size": 11.0}
        series.append(line("best ranks", places, notes=notes, **ring))
    seen = [
        (item.score.parameters / 1e6, item.measured_speedup)
        for item in best
        if item.measured_speedup is not None and item.undecided is None
    ]
    if seen:
        mark = {"kind": "points", "colour": MARK, "symbol": "diamond", "size": 9.0}
        series.append(line("measured in the engine", seen, "std", **mark))
    sizes = [trial.parameters for trial in trials if trial.parameters]
    caption = (
        f"Every drafter that was scored ({len(trials)}): speed-up as the search predicted it"
        f" (trials.csv), by {'family' if families else 'layers'}. "
    )
    if found:
        caption += "Line: those that nothing smaller beats. Rings: the best ranks, as last scored. "
    if any(not trial.feasible for trial in trials):
        caption += "Crosses: over a memory or parameter limit. "
    log = bool(sizes) and min(t.parameters for t in trials) > 0 and max(sizes) > 10 * min(sizes)
    look = {"x_scale": "log" if log else "linear", "legend_title": "" if families else "layers"}
    title, axis = "Speed-up against size", "parameters of the draft, millions"
    return gain_chart("trials", title, f"{caption}Dashed: no gain.", axis, series, **look)


def _cost_chart(trials: Sequence[PlottedTrial]) -> Chart | None:
    trials = [trial for trial in trials if trial.family == "independent"]
    if not trials:
        return None
    series: list[Series] = []
    groups = _groups(trials, "hidden")
    for number, (name, members, hue) in enumerate(groups):
        shift = 0.5 * (number / max(len(groups) - 1, 1) - 0.5)
        series += _cloud(name, hue, [(t, t.layers + shift, 1e3 * t.draft_step_s) for t in members])
    caption = (
        "Predicted time of one draft token (draft time / gamma, trials.csv) against layers, hidden"
        " sizes side by side. The spread of one colour comes from the other choices: ffn, heads,"
        " rows of the head."
    )
    return Chart(
        "cost",
        "What depth and width cost",
        caption,
        "layers of the draft",
        "one draft step, ms",
        series,
        y_from_zero=True,
        ticks=tuple(float(layers) for layers in sorted({trial.layers for trial in trials})),
        legend_title="hidden size",
    )


def _gammas_chart(rank: int, confirmed: Confirmed) -> Chart:
    rows = sorted([confirmed, *confirmed.other_gammas], key=lambda row: row.gamma)
    seen = [(float(row.gamma), row.speedup) for row in rows]
    expected = [
        (float(row.gamma), row.predicted_speedup)
        for row in rows
        if row.predicted_speedup is not None
    ]
    series = [line("measured ± one std", seen, "std", colour=MARK, symbol="diamond")]
    series += [line("predicted", expected, dashed=True)] if expected else []
    caption = f"Rank {rank}: only the gammas that were run in the engine."
    title, axis = "Speed-up against gamma, measured", "gamma, draft tokens per verification"
    ticks = tuple(gamma for gamma, _ in seen)
    return gain_chart("gammas", title, caption, axis, series, ticks=ticks)


def _positions_chart(item: Shown) -> Chart:
    measured = item.confirmed.accepted_by_position if item.confirmed is not None else ()
    counted = item.confirmed if measured else None
    alpha = counted.alpha.value if counted is not None else item.score.alpha.value
    replayed = item.replayed_on or item.replayed
    closed = accepted_by_position([alpha] * max(len(measured), len(replayed)))
    replay = f"replay of held-out text (measured), gamma {len(replayed)}"
    series = [
        line(
            name,
            list(enumerate(shares, start=1)),
            colour=hue,
            dashed=symbol == "circle",
            symbol=symbol,
        )
        for shares, name, hue, symbol in (
            (measured, f"measured in the engine, gamma {len(measured)}", MARK, "diamond"),
            (replayed, replay, SERIES[2], "diamond"),
            (closed, f"closed form alpha^i, alpha {alpha:.2f}", SERIES[0], "circle"),
        )
        if shares
    ]
    source = "the engine's count" if measured else "held-out text"
    caption = (
        f"Rank {item.rank}: share of rounds in which a position was accepted. Above the dashed"
        " curve: acceptances come in runs, a block that began well goes on well. Alpha of the"
        f" closed form: {source}."
    )
    return Chart(
        "positions",
        "Acceptance by position",
        caption,
        "position in the block of draft tokens",
        "share of rounds accepted",
        series,
        y_range=(0.0, 1.0),
        ticks=tuple(float(i) for i in range(1, len(closed) + 1)),
    )
