"""A chart as a figure of the page: data for Plotly (its basic bundle, embedded once), which
web/page.js draws."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

from archsearch.report.charts import Chart, Series, parts

PLOTLY_FILE: Final = "plotly-basic.min.js"
INK_TOKEN: Final = "@ink"  # page.js puts the page's text colour in its place
_SYMBOLS: Final = {"ring": "circle-open", "cross": "x-thin-open"}


@cache
def web_file(name: str) -> str:
    """A file of the page: plotly, its drawing, its style."""
    return (files("archsearch.report") / "web" / name).read_text(encoding="utf-8")


def scripts(charts: Sequence[Chart], nonce: str) -> str:
    """Everything that draws `charts`: their data, plotly, and what puts them together. Data of
    files cannot end a script."""
    if not charts:
        return ""
    figures = {chart.key: plotly_figure(chart) for chart in charts}
    data = json.dumps(figures, separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    code = web_file(PLOTLY_FILE).replace("</script", "<\\/script")
    return (
        f'<script type="application/json" id="chart-data" nonce="{nonce}">{data}</script>\n<script'
        f' nonce="{nonce}">{code}</script>\n<script nonce="{nonce}">{web_file("page.js")}</script>'
    )


def plotly_figure(chart: Chart) -> dict[str, object]:
    """{"data", "layout"} as Plotly takes it, and the title of the legend, which page.js writes;
    colours of text and lines are left to the page."""
    data: list[dict[str, Any]] = []
    for series in chart.series:
        if series.band and series.low:
            data += _band(series)
        data.append(_trace(series))
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": _text(chart.x_label)}, **_x_axis(chart)},
        "yaxis": {"title": {"text": _text(chart.y_label)}},
    }
    if chart.y_from_zero:
        layout["yaxis"]["rangemode"] = "tozero"
    if chart.y_range is not None:
        layout["yaxis"]["range"] = list(chart.y_range)
    if chart.stacked:
        layout["barmode"] = "stack"
    if chart.right_label:
        beside = {"overlaying": "y", "side": "right", "showgrid": False, "tickmode": "auto"}
        layout["yaxis2"] = {"title": {"text": _text(chart.right_label)}, **beside}
    if chart.level is not None:
        line = {"color": INK_TOKEN, "width": 1, "dash": "dash"}
        across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1}
        layout["shapes"] = [{**across, "y0": chart.level, "y1": chart.level, "line": line}]
    return {"data": data, "layout": layout, "legend": chart.legend_title}


def _x_axis(chart: Chart) -> dict[str, object]:
    axis: dict[str, object] = {"type": "log"} if chart.x_scale != "linear" else {}
    if chart.ticks:
        axis |= {"tickmode": "array", "tickvals": list(chart.ticks), "ticktext": tick_names(chart)}
    if chart.series and isinstance(chart.series[0].x[0], str):
        axis |= {"type": "category", "showgrid": False}
    return axis


def _trace(series: Series) -> dict[str, object]:
    name, colour = _text(series.name), series.drawn_in(INK_TOKEN)
    trace: dict[str, object] = {"name": name, "x": _numbers(series.x), "y": _numbers(series.y)}
    trace |= {"showlegend": series.named, "legendgroup": name}
    if series.notes:
        trace |= {"text": list(map(_text, series.notes)), "hovertemplate": "%{text}<extra></extra>"}
    if series.low and not series.band:
        below, above = series.reach
        reach = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
        trace["error_y"] = {**reach, "thickness": 1, "width": 3, "color": colour}
    if series.right:
        trace["yaxis"] = "y2"
    if series.kind == "bar":
        return {**trace, "type": "bar", "marker": {"color": colour}}
    mode = "lines" if series.symbol is None else "lines+markers"
    mode = "markers" if series.kind == "points" else mode
    symbol = _SYMBOLS.get(series.symbol or "circle", series.symbol or "circle")
    marker = {"color": colour, "size": series.size, "symbol": symbol}
    if series.symbol in ("ring", "cross"):
        marker["line"] = {"width": 1.5, "color": colour}
    line = {"color": colour, "width": 1.6, **({"dash": "dash"} if series.dashed else {})}
    opacity = {"opacity": 0.45} if series.faint else {}
    return {**trace, "type": "scatter", "mode": mode, "marker": marker, "line": line, **opacity}


def _band(series: Series) -> list[dict[str, object]]:
    line = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    base = {"x": _numbers(series.x), **line, "showlegend": False, "legendgroup": _text(series.name)}
    red, green, blue = parts(series.colour if series.colour.startswith("#") else "#888888")
    fill = {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.15)"}
    return [{**base, "y": _numbers(series.low)}, {**base, "y": _numbers(series.high), **fill}]


def _text(words: str) -> str:
    """Plotly reads tags in its texts; a name out of a file must show as it is written."""
    return html.escape(words, quote=False)


def _numbers(values: Sequence[float | str]) -> list[object]:
    """Rounded to six digits (a page of 2,000 trials is mostly numbers), what is no number left
    open; names broken at commas."""

    def shown(value: float | str) -> str | float | None:
        if isinstance(value, str):
            return _text(value).replace(", ", ",<br>")
        return float(f"{value:.6g}") if math.isfinite(value) else None

    return list(map(shown, values))


def tick_names(chart: Chart) -> list[str]:
    """The words at the ticks of a chart: 4096 as `4k`, 0.5 as `0.5`."""
    return [*chart.tick_names] or [
        f"{tick / 1024:g}k" if tick >= 1024 and tick % 1024 == 0 else f"{tick:g}"
        for tick in chart.ticks
    ]
