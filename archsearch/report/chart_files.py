"""Charts as SVG and PNG (matplotlib, imported on first use), their numbers and the page's tables as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch import files
from archsearch.report.chart_page import tick_names
from archsearch.report.charts import INK, Chart, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEXT: Final = "#1d2430"
STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 10.0, "text.color": TEXT, "axes.labelcolor": TEXT,
    "axes.edgecolor": TEXT, "xtick.color": TEXT, "ytick.color": TEXT, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True, "grid.color": TEXT, "grid.alpha": 0.15, "legend.frameon": False, "legend.fontsize": 8.5,
    "legend.title_fontsize": 8.5, "axes.linewidth": 0.8, "axes.titlesize": 11.0, "text.parse_math": False,
}  # fmt: skip
_MARKERS: Final = {"circle": "o", "ring": "o", "diamond": "D", "cross": "x", "square": "s"}
DPI: Final = 150


def write_files(folder: Path, charts: Sequence[Chart], page: str) -> list[Path]:
    """Every chart as .svg, .png and .csv, every table of `page` as .csv; the paths. A name that two tables share is numbered."""
    written = []
    for chart in charts:
        figure = drawn(chart)
        written += [write_picture(folder / f"{chart.key}.svg", figure), write_picture(folder / f"{chart.key}.png", figure)]
        path = folder / f"{chart.key}.csv"
        files.write_text(path, chart_csv(chart))
        written.append(path)
    for name, rows in tables_of(page):
        path = folder / f"table-{name}.csv"
        files.write_text(path, _csv(rows))
        written.append(path)
    return written


def write_picture(path: Path, figure: Figure) -> Path:
    """The figure as SVG or PNG, by the path's ending."""
    import matplotlib

    metadata = {"Date": None} if path.suffix == ".svg" else {}
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": path.stem}), files.atomic_path(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=DPI, facecolor="white", metadata=metadata)
    return path


def drawn(chart: Chart, size: tuple[float, float] = (6.4, 4.4)) -> Figure:
    """The chart as a matplotlib figure."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(STYLE):
        figure = Canvas(figsize=size, layout="constrained")
        axes = figure.add_subplot()
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
        if sum(series.named for series in chart.series) > 1:
            axes.legend(title=chart.legend_title or None, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return figure


def _scales(axes: Axes, chart: Chart) -> None:
    if chart.x_scale != "linear":
        axes.set_xscale("log", **({"base": 2} if chart.x_scale == "log2" else {}))
        axes.xaxis.set_major_formatter("{x:g}")
    if chart.y_scale != "linear":
        axes.set_yscale("log")
    if chart.ticks:
        axes.set_xticks(list(chart.ticks), labels=tick_names(chart))
        axes.minorticks_off()
    if chart.y_range is not None:
        axes.set_ylim(*chart.y_range)
    elif chart.y_from_zero:
        axes.set_ylim(bottom=0)


def _draw_all(axes: Axes, right: Axes, chart: Chart) -> None:
    heights: dict[float | str, float] = {}
    bars = [series for series in chart.series if series.kind == "bar"]
    for series in chart.series:
        place = right if series.right else axes
        if series.kind == "bar":
            _draw_bar(place, series, heights, chart.stacked, (bars.index(series), len(bars)))
        else:
            _draw(place, series)


def _draw_bar(axes: Axes, series: Series, heights: dict[float | str, float], stacked: bool, place: tuple[int, int]) -> None:
    names = list(series.x)
    if stacked:
        below = [heights.get(name, 0.0) for name in names]
        axes.bar(names, series.y, bottom=below, color=_colour(series), label=series.name, width=0.6)
        heights.update({name: base + y for name, base, y in zip(names, below, series.y, strict=True)})
        return
    number, count = place
    spots = [index + 0.8 * ((number + 0.5) / count - 0.5) for index in range(len(names))]
    error = _errors(series) if series.low else None
    axes.bar(spots, series.y, yerr=error, width=0.8 / count, color=_colour(series), label=series.name, capsize=2.5)
    axes.set_xticks(range(len(names)), labels=[str(name) for name in names])


def _errors(series: Series) -> tuple[list[float], list[float]]:
    """How far each point's error bar reaches down and up."""
    down = [max(0.0, y - low) for low, y in zip(series.low, series.y, strict=True)]
    return down, [max(0.0, high - y) for high, y in zip(series.high, series.y, strict=True)]


def _draw(axes: Axes, series: Series) -> None:
    colour, alpha = _colour(series), 0.45 if series.faint else 1.0
    if series.band and series.low:
        axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.13, linewidth=0)
    error = _errors(series) if series.low and not series.band else None
    line = "none" if series.kind == "points" else "--" if series.dashed else "-"
    marker = "" if series.symbol is None and series.kind == "line" else _MARKERS[series.symbol or "circle"]
    axes.errorbar(series.x, series.y, yerr=error, color=colour, alpha=alpha, linestyle=line, linewidth=1.6, marker=marker,
                  markersize=0.8 * series.size, markerfacecolor="none" if series.symbol == "ring" else colour, elinewidth=1.0,
                  capsize=2.5, label=series.name if series.named else None)  # fmt: skip


def _colour(series: Series) -> str:
    return TEXT if series.colour == INK else series.colour


def chart_csv(chart: Chart) -> str:
    """The numbers of a chart, one row a point."""
    rows = [["series", chart.x_label, chart.y_label, "low", "high", "note"]]
    for series in chart.series:
        for number, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
            low, high = (f"{part[number]:.6g}" if part else "" for part in (series.low, series.high))
            note = series.notes[number].replace("<br>", "; ") if series.notes else ""
            rows.append([series.name, x if isinstance(x, str) else f"{x:.6g}", f"{y:.6g}", low, high, note])
    return _csv(rows)


def _csv(rows: Sequence[Sequence[str]]) -> str:
    """Cells that a spreadsheet would run as a formula begin with a quote; numbers stay numbers."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [f"'{cell}" if re.match(r"[=@\t\r]|[+-](?![\d.]|$)", cell) else cell for cell in row] for row in rows
    )
    return text.getvalue()


def tables_of(page: str) -> list[tuple[str, list[list[str]]]]:
    """(name, rows) of every table of a page; named by the heading above it."""
    reader = _Tables()
    reader.feed(page)
    counts: dict[str, int] = {}
    named = []
    for heading, rows in reader.tables:
        name = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")[:60] or "table"
        counts[name] = counts.get(name, 0) + 1
        named.append((name if counts[name] == 1 else f"{name}-{counts[name]}", rows))
    return named


class _Tables(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[str, list[list[str]]]] = []
        self._heading, self._inside, self._quiet = "", "", False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("h2", "h3"):
            self._heading, self._inside = "", tag
        elif tag == "table":
            self.tables.append((self._heading, []))
        elif tag == "tr" and self.tables:
            self.tables[-1][1].append([])
        elif tag in ("td", "th") and self.tables and self.tables[-1][1]:
            self.tables[-1][1][-1].append("")
            self._inside = "cell"
        elif tag == "small" and self._inside == "cell":
            self.tables[-1][1][-1][-1] += " | "
        elif tag in ("script", "style"):
            self._quiet = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("h2", "h3", "td", "th"):
            self._inside = ""
        elif tag in ("script", "style"):
            self._quiet = False

    def handle_data(self, data: str) -> None:
        if self._quiet:
            return
        if self._inside == "cell":
            self.tables[-1][1][-1][-1] += data
        elif self._inside:
            self._heading += data
