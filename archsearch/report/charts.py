"""A chart as data, before anything draws it: `chart_page` makes a figure of the page of it,
`chart_files` SVG, PNG and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from archsearch.estimate import Estimate

Kind = Literal["line", "points", "bar"]
Symbol = Literal["circle", "ring", "diamond", "cross", "square"]
Scale = Literal["linear", "log", "log2"]

MARK: Final = "#d1495b"
INK: Final = "ink"  # the text's colour of page or picture, light or dark
# Read on white and on black.
SERIES: Final = (
    "#2f86b5",
    "#d99022",
    "#3f9a6b",
    "#9a6fb8",
    "#8a8f98",
    "#b5672f",
    "#4fb0c6",
    "#c76b98",
)
DEPTHS: Final = ("#2f86b5", "#2f9d8f", "#d99022", "#d1495b", "#9a4fa0")


@dataclass(frozen=True)
class Series:
    """One line, cloud of points or row of bars.

    `x` may be names (bars). `low`, `high`: of each y; a band where `band`, else error bars.
    `right`: on the scale at the right. `notes`: what stands beside each point where a reader asks.
    `named`: in the legend.
    """

    name: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    kind: Kind = "line"
    colour: str = SERIES[0]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    band: bool = False
    dashed: bool = False
    symbol: Symbol | None = "circle"
    size: float = 6.0
    faint: bool = False
    right: bool = False
    named: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chart:
    """A figure with its axes. `key`: its name in page and files; `level`: a dashed line across,
    where nothing is gained."""

    key: str
    title: str
    caption: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    y_from_zero: bool = False
    y_range: tuple[float, float] | None = None
    right_label: str = ""
    level: float | None = None
    stacked: bool = False
    ticks: tuple[float, ...] = ()
    tick_names: tuple[str, ...] = ()
    legend_title: str = ""


def depth_colour(position: float) -> str:
    """0..1 -> a colour out of DEPTHS, mixed linearly."""
    place = max(0.0, min(1.0, position)) * (len(DEPTHS) - 1)
    left = min(int(place), len(DEPTHS) - 2)
    share = place - left

    def parts(colour: str) -> list[int]:
        return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]

    mixed = (
        round(a + share * (b - a))
        for a, b in zip(parts(DEPTHS[left]), parts(DEPTHS[left + 1]), strict=True)
    )
    return "#" + "".join(f"{part:02x}" for part in mixed)


def bounds(estimates: Sequence[Estimate]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(low, high) of estimates: their 5 and 95 % quantiles where they are known, else one standard
    deviation either way."""
    low = tuple(e.value - e.std if e.low is None else e.low for e in estimates)
    return low, tuple(e.value + e.std if e.high is None else e.high for e in estimates)
