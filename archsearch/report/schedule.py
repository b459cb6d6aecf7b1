"""The section of schedule.json: the best gamma at each batch size, as predicted."""

from __future__ import annotations

from archsearch.engine_facts import engine_title
from archsearch.report.charts import MARK, Chart, depth_colour, gain_chart, line
from archsearch.report.section import Cell, Section, Table, value_cell
from archsearch.schedule import GammaSchedule, ranges_words


def section_schedule(rank: int, schedule: GammaSchedule) -> Section:
    """Table and plot of the gammas of one candidate by batch size."""
    name = engine_title(schedule.engine)
    rows: list[list[Cell | str]] = [
        [
            str(point.batch_size),
            str(point.gamma) if point.gamma else "off",
            value_cell(point.tau) if point.gamma and point.tau else "-",
            value_cell(point.speedup, 2, unit="x"),
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
