"""The picture of `estimate --sweep`: speed-up and throughput of several drafts over one axis."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.errors import ArchsearchError
from archsearch.files import atomic_path
from archsearch.report.chart_files import STYLE
from archsearch.report.charts import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS: Final = (".svg", ".png", ".pdf")
LABELS: Final = {
    "batch": "requests in flight",
    "context": "tokens in the KV cache",
    "gamma": "gamma, draft tokens a round",
    "alpha": "alpha, acceptance",
}
ON_WHITE: Final = "#222222"


def check_plot(path: Path) -> None:
    """Raise ArchsearchError for a file name that names no kind of picture."""
    if path.suffix.lower() not in FORMATS:
        raise ArchsearchError(f"--plot {path}: the name must end with {', '.join(FORMATS)}")


def plot_curves(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture: speed-up above (band: 5 to 95 %; dotted: alpha = 1), throughput below (dashed: without a draft)."""
    import matplotlib
    from matplotlib.figure import Figure

    check_plot(path)
    axis = result["sweep"]
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    style: Any = {**STYLE, **dict.fromkeys(inked, ON_WHITE)}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.0, 7.0), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        engines = len({item["served"] for item in result["curves"]})
        for number, item in enumerate(result["curves"]):
            name = item["draft"] + (f", {item['engine']} {item['engine_version'] or ''}".rstrip() if engines > 1 else "")
            _draw(above, below, item, SERIES[number % len(SERIES)], name)
        above.axhline(1.0, color=ON_WHITE, linewidth=1.0, linestyle=(0, (4, 3)))
        above.set(ylabel="speed-up, x", title=f"{result['target']} on {result['device']}")
        below.set(ylabel="tokens per second, all requests", xlabel=LABELS[axis])
        if axis in ("batch", "context"):
            below.set_xscale("log", base=2)
            below.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        above.legend(title="band: 5 to 95 %; dotted: every token accepted", title_fontsize=8)
        below.legend(title="dashed: without a draft", title_fontsize=8)
        with atomic_path(path) as unfinished:
            figure.savefig(unfinished, format=path.suffix[1:].lower(), metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw(above: Axes, below: Axes, item: Mapping[str, Any], colour: str, name: str) -> None:
    points = item["points"]
    xs = [point["x"] for point in points]
    gains = [point["speedup"] for point in points]
    above.plot(xs, [gain["value"] for gain in gains], color=colour, label=name, marker="." if len(xs) < 40 else "")
    above.fill_between(
        xs,
        [gain.get("low") or gain["value"] for gain in gains],
        [gain.get("high") or gain["value"] for gain in gains],
        color=colour,
        alpha=0.15,
        linewidth=0.0,
    )
    above.plot(xs, [point["ideal"] for point in points], color=colour, linestyle=":", linewidth=1.2)
    below.plot(xs, [point["tokens_per_s"]["value"] for point in points], color=colour, label=name)
    below.plot(xs, [point["plain_tokens_per_s"]["value"] for point in points], color=colour, linestyle="--", linewidth=1.0)
