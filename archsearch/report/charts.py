"""A chart as data, before anything draws it: `chart_page` makes a figure of the page of it,
`chart_files` SVG, PNG and CSV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from archsearch.estimate import Estimate

Kind = Literal["line", "points", "bar"]
Symbol = Literal["circle", "ring", "diamond", "cross"]
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
    `right`: on the scale at the right. `notes`: what a reader sees who points at a point.
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

    def drawn_in(self, ink: str) -> str:
        """Its colour; `ink` is that of text."""
        return ink if self.colour == INK else self.colour

    @property
    def reach(self) -> tuple[list[float], list[float]]:
        """How far each point's error bar reaches down and up."""
        down = [max(0.0, y - low) for low, y in zip(self.low, self.y, strict=True)]
        return down, [max(0.0, high - y) for high, y in zip(self.high, self.y, strict=True)]


@dataclass(frozen=True)
class Chart:
    """A figure with its axes. `key`: its name in page and files; `level`: a dashed line across,
    where nothing is gained."""

    key: str
    title: str
    caption: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_scale: Scale = "linear"
    y_from_zero: bool = False
    y_range: tuple[float, float] | None = None
    right_label: str = ""
    level: float | None = None
    stacked: bool = False
    ticks: tuple[float, ...] = ()
    tick_names: tuple[str, ...] = ()
    legend_title: str = ""


def parts(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of #rrggbb."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:], 16)


def depth_colour(position: float) -> str:
    """0..1 -> a colour out of DEPTHS, mixed linearly."""
    place = max(0.0, min(1.0, position)) * (len(DEPTHS) - 1)
    left = min(int(place), len(DEPTHS) - 2)
    ends = zip(parts(DEPTHS[left]), parts(DEPTHS[left + 1]), strict=True)
    return "#" + "".join(f"{round(a + (place - left) * (b - a)):02x}" for a, b in ends)


def colour(number: int) -> str:
    """Of the series of that number."""
    return SERIES[number % len(SERIES)]


def line(
    name: str,
    points: Iterable[tuple[float | str, float | Estimate]],
    bars: Literal["", "std", "bounds"] = "",
    /,
    **look: Any,
) -> Series:
    """A series of (x, y). `bars`: how far each y that is an Estimate reaches, its `std` or its
    `bounds`; `look`: the other fields of Series."""
    xs, ys = zip(*points, strict=True)
    if bars:
        bare = [replace(y, low=None, high=None) for y in ys] if bars == "std" else ys
        look["low"], look["high"] = zip(*(y.bounds for y in bare), strict=True)
    return Series(name, xs, tuple(y.value if isinstance(y, Estimate) else y for y in ys), **look)


def gain_chart(
    key: str, title: str, caption: str, x_label: str, series: Sequence[Series], **more: Any
) -> Chart:
    """A chart of speed-ups, with a line where nothing is gained."""
    return Chart(key, title, caption, x_label, "speed-up, x", series, level=1.0, **more)
