"""The section of schedule.json: the best gamma at each batch size, as predicted."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from archsearch.engine_facts import engine_title
from archsearch.report.figures import INK, MARK, canvas, count_axis, figure_html, shade, styled
from archsearch.report.reading import Shown
from archsearch.report.tables import Cell, html_note, html_table, value_cell
from archsearch.schedule import GammaSchedule, ranges_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def section_schedule(item: Shown, schedule: GammaSchedule) -> str:
    """Table and plot of the gammas of one candidate by batch size."""
    name = engine_title(schedule.engine)
    rows: list[list[Cell | str]] = [
        [str(point.batch_size), str(point.gamma) if point.gamma else "off",
         value_cell(point.tau) if point.gamma and point.tau else "-", value_cell(point.speedup, 2, unit="x")]
        for point in schedule.points if point.speedup
    ]  # fmt: skip
    figure, caption = styled(_plot_schedule, item, schedule)
    source = f" Predicted from: {schedule.latency}." if schedule.latency else ""
    return "\n".join([
        f"<h2>Gamma by batch size, predicted for {html.escape(name)}: rank {item.rank}</h2>",
        f"<p>Schedule: {html.escape(ranges_words(schedule.ranges))}.</p>",
        html_table(("batch size", "gamma", "tau, tokens", "speed-up, predicted"), rows),
        html_note("Off: drafting nothing is faster than any gamma; a speed-up below 1 is then what a draft costs that the engine "
                  f"runs all the same. ± one standard deviation. Nothing here was measured in {name}.{source}"),
        figure_html(figure, f"schedule{item.rank}", caption),
    ])  # fmt: skip


def _plot_schedule(item: Shown, schedule: GammaSchedule) -> tuple[Figure, str]:
    figure, axes = canvas()
    gammas = sorted({gamma for point in schedule.points for gamma in point.by_gamma})
    for number, gamma in enumerate(gammas):
        line = [(p.batch_size, p.by_gamma[gamma].value) for p in schedule.points if gamma in p.by_gamma]
        colour = shade(number / max(len(gammas) - 1, 1))
        axes.plot([x for x, _ in line], [y for _, y in line], color=colour, linewidth=1.4, marker=".", label=f"{gamma}")
    chosen = [(point.batch_size, point.speedup.value) for point in schedule.points if point.speedup]
    axes.plot([x for x, _ in chosen], [y for _, y in chosen], linestyle="none", marker="o", markersize=9, markerfacecolor="none",
              markeredgecolor=MARK, markeredgewidth=1.6, label="best")  # fmt: skip
    axes.axhline(1.0, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set(xlabel="batch size", ylabel="speed-up, x")
    count_axis(axes, [point.batch_size for point in schedule.points])
    axes.legend(title="gamma", loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, title_fontsize=8.5)
    caption = (
        f"Predicted speed-up of every gamma against batch size, rank {item.rank} in {engine_title(schedule.engine)}. Ring: the "
        "schedule's choice; a ring on no line: off. Dashed: no gain."
    )
    return figure, caption
