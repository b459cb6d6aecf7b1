"""Charts as SVG and PNG (matplotlib, imported on first use), their numbers and the page's tables as
CSV."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from archsearch import files
from archsearch.report.chart_page import tick_names
from archsearch.report.charts import Chart, Series
from archsearch.report.section import Section, Table, charts_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEXT: Final = "#1d2430"
STYLE: Final[dict[Any, object]] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 10.0,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": TEXT,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.title_fontsize": 8.5,
    "axes.linewidth": 0.8,
    "axes.titlesize": 11.0,
    "text.parse_math": False,
}
_MARKERS: Final = {"circle": "o", "ring": "o", "diamond": "D", "cross": "x"}
DPI: Final = 150
LONG_NAME: Final = 40


def write_files(folder: Path, sections: Sequence[Section]) -> list[Path]:
    """Every chart as .svg, .png and .csv, every table as .csv; the paths."""
    written = []
    for chart in charts_of(sections):
        figure = drawn(chart)
        pictures = (folder / f"{chart.key}.{kind}" for kind in ("svg", "png"))
        written += [write_picture(path, figure) for path in pictures]
        path = folder / f"{chart.key}.csv"
        files.write_text(path, chart_csv(chart))
        written.append(path)
    for name, table in named_tables(sections):
        path = folder / f"table-{name}.csv"
        rows = [
            [" | ".join(filter(None, (cell.text, cell.below))) for cell in row]
            for row in table.cells
        ]
        files.write_text(path, _csv([table.names, *rows]))
        written.append(path)
    return written


def named_tables(sections: Sequence[Section]) -> list[tuple[str, Table]]:
    """Every table with a file name by the heading above it, that of a section where its part has
    none; a name that two share is numbered."""
    counts: Counter[str] = Counter()
    named = []
    for section in sections:
        for part in section.all_parts():
            heading = part.title if part.title and not part.folded else section.title
            name = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")[:60] or "table"
            for table in part.tables:
                counts[name] += 1
                named.append((name if counts[name] == 1 else f"{name}-{counts[name]}", table))
    return named


def write_picture(path: Path, figure: Figure) -> Path:
    """The figure as SVG, PNG or PDF, by the path's ending."""
    import matplotlib

    metadata = {"Date": None} if path.suffix == ".svg" else {}
    with (
        matplotlib.rc_context({**STYLE, "svg.hashsalt": path.stem}),
        files.atomic_path(path) as temporary,
    ):
        figure.savefig(
            temporary, format=path.suffix[1:].lower(), dpi=DPI, facecolor="white", metadata=metadata
        )
    return path


def drawn(*charts: Chart, size: tuple[float, float] = (6.4, 4.4)) -> Figure:
    """The charts, one below the other, as a matplotlib figure; `size` in inches."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(STYLE):
        figure = Canvas(figsize=size, layout="constrained")
        for place, chart in enumerate(charts, start=1):
            _draw_chart(figure.add_subplot(len(charts), 1, place), chart)
    return figure


def _draw_chart(axes: Axes, chart: Chart) -> None:
    right = axes.twinx() if chart.right_label else axes
    _draw_all(axes, right, chart)
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label, title=chart.title)
    if chart.right_label:
        right.grid(visible=False)
        right.spines["right"].set_visible(True)
        right.set_ylabel(chart.right_label)
    if chart.level is not None:
        axes.axhline(chart.level, color=TEXT, linewidth=1.0, linestyle=(0, (4, 3)))
    _scales(axes, chart)
    names = [series.name for series in chart.series if series.named]
    if len(names) > 1:
        # two long ones leave the axes no room
        columns = 2 if max(map(len, names)) < LONG_NAME else 1
        axes.legend(
            title=chart.legend_title or None,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.16),
            ncols=columns,
        )


def _scales(axes: Axes, chart: Chart) -> None:
    if chart.x_scale != "linear":
        axes.set_xscale("log", **({"base": 2} if chart.x_scale == "log2" else {}))
        axes.xaxis.set_major_formatter("{x:g}")
    if chart.ticks:
        axes.set_xticks(list(chart.ticks), labels=tick_names(chart))
        axes.minorticks_off()
    if chart.y_range is not None:
        axes.set_ylim(*chart.y_range)
    elif chart.y_from_zero:
        axes.set_ylim(bottom=0)


def _draw_all(axes: Axes, right: Axes, chart: Chart) -> None:
    bars = [series for series in chart.series if series.kind == "bar"]
    names = list(dict.fromkeys(str(name) for series in bars for name in series.x))
    heights = np.zeros(len(names))  # of the bars that the next ones are stacked on
    for series in chart.series:
        place = right if series.right else axes
        if series.kind != "bar":
            _draw(place, series)
            continue
        number, count = (0, 1) if chart.stacked else (bars.index(series), len(bars))
        spots = np.array([names.index(str(name)) for name in series.x])
        place.bar(
            spots + 0.8 * ((number + 0.5) / count - 0.5),
            series.y,
            bottom=heights[spots],
            yerr=series.reach if series.low else None,
            width=0.6 if chart.stacked else 0.8 / count,
            color=series.drawn_in(TEXT),
            label=series.name,
            capsize=2.5,
        )
        heights[spots] += series.y if chart.stacked else 0.0
    if bars:
        axes.set_xticks(range(len(names)), labels=names)


def _draw(axes: Axes, series: Series) -> None:
    colour, alpha = series.drawn_in(TEXT), 0.45 if series.faint else 1.0
    if series.band and series.low:
        axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.13, linewidth=0)
    error = series.reach if series.low and not series.band else None
    line = "none" if series.kind == "points" else "--" if series.dashed else "-"
    marker = (
        ""
        if series.symbol is None and series.kind == "line"
        else _MARKERS[series.symbol or "circle"]
    )
    axes.errorbar(
        series.x,
        series.y,
        yerr=error,
        color=colour,
        alpha=alpha,
        linestyle=line,
        linewidth=1.6,
        marker=marker,
        markersize=0.8 * series.size,
        markerfacecolor="none" if series.symbol == "ring" else colour,
        elinewidth=1.0,
        capsize=2.5,
        label=series.name if series.named else None,
    )


def chart_csv(chart: Chart) -> str:
    """The numbers of a chart, one row a point."""
    rows = [["series", chart.x_label, chart.y_label, "low", "high", "note"]]
    for series in chart.series:
        for number, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
            low, high = (
                f"{part[number]:.6g}" if part else "" for part in (series.low, series.high)
            )
            note = series.notes[number].replace("<br>", "; ") if series.notes else ""
            rows.append(
                [series.name, x if isinstance(x, str) else f"{x:.6g}", f"{y:.6g}", low, high, note]
            )
    return _csv(rows)


def _csv(rows: Sequence[Sequence[str]]) -> str:
    """Cells that a spreadsheet would run as a formula begin with a quote; numbers stay numbers."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [f"'{cell}" if re.match(r"[=@\t\r]|[+-](?![\d.]|$)", cell) else cell for cell in row]
        for row in rows
    )
    return text.getvalue()
