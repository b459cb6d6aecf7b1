"""The picture of `estimate --sweep`: speed-up and throughput of several drafts over one axis."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from archsearch.errors import ArchsearchError
from archsearch.report.charts import SERIES, Chart, Scale, Series

FORMATS: Final = (".svg", ".png", ".pdf")
LABELS: Final = {
    "batch": "requests in flight",
    "context": "tokens in the KV cache",
    "gamma": "gamma, draft tokens a round",
    "alpha": "alpha, acceptance",
}


def check_plot(path: Path) -> None:
    """Raise ArchsearchError for a file name that names no kind of picture."""
    if path.suffix.lower() not in FORMATS:
        raise ArchsearchError(f"--plot {path}: the name must end with {', '.join(FORMATS)}")


def plot_curves(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture: speed-up above (band: 5 to 95 %; dashed: every token accepted), throughput
    below (dashed: without a draft)."""
    from archsearch.report.chart_files import drawn, write_picture

    check_plot(path)
    gains: list[Series] = []
    rates: list[Series] = []
    engines = len({item["served"] for item in result["curves"]})
    for number, item in enumerate(result["curves"]):
        engine = (
            f", {item['engine']} {item['engine_version'] or ''}".rstrip() if engines > 1 else ""
        )
        name, colour = item["draft"] + engine, SERIES[number % len(SERIES)]
        points = item["points"]
        xs = tuple(point["x"] for point in points)
        found = [point["speedup"] for point in points]
        low, high = (
            tuple(gain.get(end) or gain["value"] for gain in found) for end in ("low", "high")
        )
        values = tuple(gain["value"] for gain in found)
        symbol: Any = "circle" if len(xs) < 40 else None
        gains.append(
            Series(name, xs, values, "line", colour, low, high, band=True, symbol=symbol, size=4.0)
        )
        rates.append(Series(name, xs, _values(points, "tokens_per_s"), "line", colour, symbol=None))
        alone = _values(points, "plain_tokens_per_s")
        ideal = tuple(point["ideal"] for point in points)
        for series, dashed in ((gains, ideal), (rates, alone)):
            series.append(
                Series(name, xs, dashed, "line", colour, dashed=True, symbol=None, named=False)
            )
    axis = result["sweep"]
    scale: Scale = "log2" if axis in ("batch", "context") else "linear"
    title = f"{result['target']} on {result['device']}"
    above = Chart(
        "speedup",
        title,
        "",
        LABELS[axis],
        "speed-up, x",
        tuple(gains),
        scale,
        level=1.0,
        legend_title="band: 5 to 95 %; dashed: every token accepted",
    )
    below = Chart(
        "throughput",
        "",
        "",
        LABELS[axis],
        "tokens per second, all requests",
        tuple(rates),
        scale,
        legend_title="dashed: without a draft",
    )
    write_picture(path, drawn(above, below, size=(7.0, 8.4)))


def _values(points: Any, name: str) -> tuple[float, ...]:
    return tuple(point[name]["value"] for point in points)
