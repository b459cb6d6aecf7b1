"""The picture of `estimate --sweep`: speed-up and throughput of several drafts over one axis."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.report.charts import Chart, Scale, Series, colour, gain_chart, line

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
        version = f"{item['engine']} {item['engine_version'] or ''}".rstrip()
        name = item["draft"] + (f", {version}" if engines > 1 else "")
        look = {"colour": colour(number), "symbol": None}
        points = item["points"]
        gain = [(each["x"], Estimate.from_dict(each["speedup"])) for each in points]
        mark = {"symbol": "circle" if len(points) < 40 else None, "size": 4.0, "band": True}
        gains.append(line(name, gain, "bounds", **{**look, **mark}))
        rates.append(line(name, _values(points, "tokens_per_s"), **look))
        ideal = [(each["x"], each["ideal"]) for each in points]
        unnamed = {**look, "dashed": True, "named": False}
        gains.append(line(name, ideal, **unnamed))
        rates.append(line(name, _values(points, "plain_tokens_per_s"), **unnamed))
    axis = result["sweep"]
    scale: Scale = "log2" if axis in ("batch", "context") else "linear"
    title = f"{result['target']} on {result['device']}"
    names = "band: 5 to 95 %; dashed: every token accepted", "dashed: without a draft"
    above = gain_chart(
        "speedup", title, "", LABELS[axis], gains, x_scale=scale, legend_title=names[0]
    )
    rate = "tokens per second, all requests"
    below = Chart(
        "throughput", "", "", LABELS[axis], rate, tuple(rates), scale, legend_title=names[1]
    )
    write_picture(path, drawn(above, below, size=(7.0, 8.4)))


def _values(points: Any, name: str) -> list[tuple[float, float]]:
    return [(point["x"], point[name]["value"]) for point in points]
