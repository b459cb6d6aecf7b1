"""The section of schedule.json: the best gamma at each batch size, as predicted."""

from __future__ import annotations

import html

from archsearch.engine_facts import engine_title
from archsearch.report.charts import MARK, Chart, Figures, Series, depth_colour
from archsearch.report.reading import Shown
from archsearch.report.tables import Cell, html_note, html_table, value_cell
from archsearch.schedule import GammaSchedule, ranges_words


def section_schedule(item: Shown, schedule: GammaSchedule, figures: Figures) -> str:
    """Table and plot of the gammas of one candidate by batch size."""
    name = engine_title(schedule.engine)
    rows: list[list[Cell | str]] = [
        [str(point.batch_size), str(point.gamma) if point.gamma else "off",
         value_cell(point.tau) if point.gamma and point.tau else "-", value_cell(point.speedup, 2, unit="x")]
        for point in schedule.points if point.speedup
    ]  # fmt: skip
    source = f" Predicted from: {schedule.latency}." if schedule.latency else ""
    return "\n".join([
        f"<h2>Gamma by batch size, predicted for {html.escape(name)}: rank {item.rank}</h2>",
        f"<p>Schedule: {html.escape(ranges_words(schedule.ranges))}.</p>",
        html_table(("batch size", "gamma", "tau, tokens", "speed-up, predicted"), rows),
        html_note("Off: drafting nothing is faster than any gamma; a speed-up below 1 is then what a draft costs that the engine "
                  f"runs all the same. ± one standard deviation. Nothing here was measured in {name}.{source}"),
        figures.grid([_schedule_chart(item, schedule)]),
    ])  # fmt: skip


def _schedule_chart(item: Shown, schedule: GammaSchedule) -> Chart:
    series: list[Series] = []
    gammas = sorted({gamma for point in schedule.points for gamma in point.by_gamma})
    for number, gamma in enumerate(gammas):
        line = [(float(p.batch_size), p.by_gamma[gamma].value) for p in schedule.points if gamma in p.by_gamma]
        colour = depth_colour(number / max(len(gammas) - 1, 1))
        series.append(Series(f"{gamma}", tuple(x for x, _ in line), tuple(y for _, y in line), colour=colour, size=4.0))
    chosen = [(float(point.batch_size), point.speedup.value) for point in schedule.points if point.speedup]
    series.append(
        Series("best", tuple(x for x, _ in chosen), tuple(y for _, y in chosen), "points", MARK, symbol="ring", size=11.0)
    )
    caption = (
        f"Predicted speed-up of every gamma against batch size, rank {item.rank} in {engine_title(schedule.engine)}. Ring: the "
        "schedule's choice; a ring on no line: off. Dashed: no gain."
    )
    return Chart(
        f"schedule-{item.rank}", "Every gamma by batch size", caption, "batch size", "speed-up, x", tuple(series), x_scale="log2",
        level=1.0, ticks=tuple(float(point.batch_size) for point in schedule.points), legend_title="gamma",
    )  # fmt: skip
