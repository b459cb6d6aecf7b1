"""Charts of the search: all shapes and their Pareto front, what depth and width cost, gammas,
acceptance by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from archsearch.report.charts import INK, MARK, SERIES, Chart, Series, depth_colour
from archsearch.report.learning import plot_learning, trained
from archsearch.report.reading import Reading, Shown
from archsearch.report.section import Section
from archsearch.runs.confirmed import Confirmed
from archsearch.speedup import accepted_by_position


def section_plots(
    reading: Reading, scored: Sequence[Mapping[str, Any]], lead: Shown | None
) -> Section:
    """All charts of the search, of rows of trials.csv that have a score; empty where there is
    nothing to draw."""
    found, trials = reading.candidates, plotted_trials(scored)
    charts: list[Chart | None] = (
        [_trials_chart(trials, found), _cost_chart(trials)] if trials else []
    )
    charts.append(plot_learning(trained(reading)))
    confirmed = next(
        (item for item in (lead, *found) if item is not None and item.confirmed is not None), None
    )
    if (
        confirmed is not None
        and confirmed.confirmed is not None
        and confirmed.confirmed.other_gammas
    ):
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
    for row in scored:
        try:
            step_s = float(row["draft_s"]) / int(row["gamma"])
            sizes = (int(row["num_hidden_layers"]), int(row["hidden_size"]), int(row["parameters"]))
            label = row.get("drafter") or f"{sizes[0]}x{sizes[1]}"
            family = row.get("family") or "independent"
            trial = PlottedTrial(
                *sizes,
                step_s,
                float(row["speedup"]),
                row.get("feasible") is not False,
                family,
                label,
            )
        except (KeyError, TypeError, ValueError):  # a row without a score
            continue
        found[trial] = None
    return list(found)


def _groups(trials: Sequence[PlottedTrial], by: str) -> list[tuple[str, list[PlottedTrial], str]]:
    """(name, members, colour) by number of layers or hidden size, or by family where there are
    several."""
    if len({trial.family for trial in trials}) > 1:
        names = sorted(
            {trial.family for trial in trials},
            key=lambda name: -sum(t.family == name for t in trials),
        )
        return [
            (name, [t for t in trials if t.family == name], SERIES[i % len(SERIES)])
            for i, name in enumerate(names)
        ]
    values = sorted({getattr(trial, by) for trial in trials})
    return [
        (
            str(value),
            [t for t in trials if getattr(t, by) == value],
            depth_colour(i / max(len(values) - 1, 1)),
        )
        for i, value in enumerate(values)
    ]


def _cloud(
    trials: Sequence[PlottedTrial], name: str, colour: str, points: Sequence[tuple[float, float]]
) -> list[Series]:
    """One colour's points: those within all limits filled, the others as faint crosses."""
    series: list[Series] = []
    for feasible in (True, False):
        chosen = [
            (trial, x, y)
            for trial, (x, y) in zip(trials, points, strict=True)
            if trial.feasible == feasible
        ]
        if chosen:
            notes = tuple(
                f"{t.label}<br>{t.speedup:.2f}x, {t.parameters / 1e6:.0f}M parameters"
                for t, _, _ in chosen
            )
            series.append(
                Series(
                    name,
                    tuple(x for _, x, _ in chosen),
                    tuple(y for _, _, y in chosen),
                    "points",
                    colour,
                    size=5.0,
                    symbol="circle" if feasible else "cross",
                    faint=not feasible,
                    named=not series,
                    notes=notes,
                )
            )
    return series


def pareto_front(trials: Sequence[PlottedTrial]) -> list[PlottedTrial]:
    """Of shapes within all limits those that no smaller or equal one beats, by parameters
    ascending."""
    feasible = sorted((t for t in trials if t.feasible), key=lambda t: (t.parameters, -t.speedup))
    best = accumulate((t.speedup for t in feasible), max)
    before = [float("-inf"), *accumulate((t.speedup for t in feasible), max)]
    return [t for t, top, last in zip(feasible, best, before, strict=False) if top > last]


def _trials_chart(trials: Sequence[PlottedTrial], found: Sequence[Shown]) -> Chart:
    families = len({trial.family for trial in trials}) > 1
    series: list[Series] = []
    for name, members, colour in _groups(trials, "layers"):
        series += _cloud(
            members, name, colour, [(trial.parameters / 1e6, trial.speedup) for trial in members]
        )
    front = pareto_front(trials)
    if len(front) > 1:
        places = (
            tuple(trial.parameters / 1e6 for trial in front),
            tuple(trial.speedup for trial in front),
        )
        series.append(Series("Pareto front", *places, colour=INK, symbol=None, dashed=True))
    best = found[:5]
    if best:
        places = (
            tuple(item.score.parameters / 1e6 for item in best),
            tuple(item.score.speedup.value for item in best),
        )
        notes = tuple(
            f"rank {item.rank}: {item.score.label()}<br>{item.score.speedup.value:.2f}x predicted"
            for item in best
        )
        series.append(
            Series(
                "best ranks",
                *places,
                kind="points",
                colour=INK,
                symbol="ring",
                size=11.0,
                notes=notes,
            )
        )
    seen = [
        (i, i.measured_speedup)
        for i in best
        if i.measured_speedup is not None and i.undecided is None
    ]
    if seen:
        gains = [gain for _, gain in seen]
        series.append(
            Series(
                "measured in the engine",
                tuple(item.score.parameters / 1e6 for item, _ in seen),
                tuple(gain.value for gain in gains),
                "points",
                MARK,
                tuple(g.value - g.std for g in gains),
                tuple(g.value + g.std for g in gains),
                symbol="diamond",
                size=9.0,
            )
        )
    sizes = [trial.parameters for trial in trials if trial.parameters]
    caption = (
        f"Every drafter that was scored ({len(trials)}): speed-up as the search predicted it"
        " (trials.csv), "
    )
    caption += "by family. " if families else "by layers. "
    caption += (
        "Line: those that nothing smaller beats. Rings: the best ranks, as last scored. "
        if found
        else ""
    )
    caption += (
        "Crosses: over a memory or parameter limit. "
        if any(not trial.feasible for trial in trials)
        else ""
    )
    log = bool(sizes) and min(t.parameters for t in trials) > 0 and max(sizes) > 10 * min(sizes)
    return Chart(
        "trials",
        "Speed-up against size",
        f"{caption}Dashed: no gain.",
        "parameters of the draft, millions",
        "speed-up, x",
        tuple(series),
        x_scale="log" if log else "linear",
        level=1.0,
        legend_title="" if families else "layers",
    )


def _cost_chart(trials: Sequence[PlottedTrial]) -> Chart | None:
    trials = [trial for trial in trials if trial.family == "independent"]
    if not trials:
        return None
    series: list[Series] = []
    groups = _groups(trials, "hidden")
    for number, (name, members, colour) in enumerate(groups):
        shift = 0.5 * (number / max(len(groups) - 1, 1) - 0.5)
        series += _cloud(
            members,
            name,
            colour,
            [(trial.layers + shift, 1e3 * trial.draft_step_s) for trial in members],
        )
    caption = (
        "Predicted time of one draft token (draft time / gamma, trials.csv) against layers, hidden"
        " sizes side by side. The spread of one colour comes from the other choices: ffn, heads,"
        " rows of the head."
    )
    ticks = tuple(float(layers) for layers in sorted({trial.layers for trial in trials}))
    return Chart(
        "cost",
        "What depth and width cost",
        caption,
        "layers of the draft",
        "one draft step, ms",
        tuple(series),
        y_from_zero=True,
        ticks=ticks,
        legend_title="hidden size",
    )


def _gammas_chart(rank: int, confirmed: Confirmed) -> Chart:
    rows = sorted([confirmed, *confirmed.other_gammas], key=lambda row: row.gamma)
    gammas = tuple(float(row.gamma) for row in rows)
    seen = [row.speedup for row in rows]
    expected = [
        (float(row.gamma), row.predicted_speedup)
        for row in rows
        if row.predicted_speedup is not None
    ]
    series = [
        Series(
            "measured ± one std",
            gammas,
            tuple(e.value for e in seen),
            colour=MARK,
            low=tuple(e.value - e.std for e in seen),
            high=tuple(e.value + e.std for e in seen),
            symbol="diamond",
        )
    ]
    if expected:
        series.append(
            Series(
                "predicted",
                tuple(x for x, _ in expected),
                tuple(y for _, y in expected),
                dashed=True,
            )
        )
    return Chart(
        "gammas",
        "Speed-up against gamma, measured",
        f"Rank {rank}: only the gammas that were run in the engine.",
        "gamma, draft tokens per verification",
        "speed-up, x",
        tuple(series),
        level=1.0,
        ticks=gammas,
    )


def _positions_chart(item: Shown) -> Chart:
    measured = list(item.confirmed.accepted_by_position) if item.confirmed is not None else []
    alpha = (
        item.confirmed.alpha.value
        if measured and item.confirmed is not None
        else item.score.alpha.value
    )
    replayed = item.replayed_on or item.replayed
    closed = accepted_by_position([alpha] * max(len(measured), len(replayed)))
    series = [
        Series(
            name,
            tuple(float(i) for i in range(1, len(shares) + 1)),
            tuple(shares),
            colour=colour,
            dashed=dashed,
            symbol="circle" if dashed else "diamond",
        )
        for shares, name, colour, dashed in (
            (measured, f"measured in the engine, gamma {len(measured)}", MARK, False),
            (
                list(replayed),
                f"replay of held-out text (measured), gamma {len(replayed)}",
                SERIES[2],
                False,
            ),
            (closed, f"closed form alpha^i, alpha {alpha:.2f}", SERIES[0], True),
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
        tuple(series),
        y_range=(0.0, 1.0),
        ticks=tuple(float(i) for i in range(1, len(closed) + 1)),
    )
