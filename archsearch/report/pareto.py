"""A Pareto set as a picture (SVG, nothing else needed) and as rows of a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 400, 64, 48


def pareto_rows(data: Mapping[str, Any]) -> tuple[list[list[str]], list[str]]:
    """(rows, header) of the set: each draft with its goals, its group, and whether it was confirmed."""
    goals = list(data["goals"])
    rows = []
    for number, member in enumerate(data["members"], start=1):
        values = [shown(name, member["values"][name], data["goals"][name]["unit"]) for name in goals]
        tie = f"{member['group']}{', cheapest' if member['cheapest'] else ''}"
        measured = "not confirmed" if member["measured"] is None else f"{member['measured']:.2f}x"
        rows.append([str(number), member["label"], *values, tie, measured])
    return rows, ["#", "draft", *goals, "group", "measured"]


def shown(name: str, value: float, unit: str) -> str:
    """A goal's value: `1.83x`, `12.3M`, `0.42 ms`."""
    if name == "speedup":
        return f"{value:.2f}x"
    if unit == "s":
        return f"{1e3 * value:.2f} ms"
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"


def pareto_svg(data: Mapping[str, Any]) -> str:
    """The first two goals against one another (the second one logarithmic): bars are one std of the speed-up, a filled point was
    confirmed, a ring is the cheapest of those that cannot be told apart."""
    goals, members = list(data["goals"]), data["members"]
    y, x = ("speedup", next(name for name in goals if name != "speedup")) if "speedup" in goals else (goals[0], goals[1])
    points = [(_log(member["values"][x]), member["values"][y], member) for member in members]
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' font-family='sans-serif' font-size='12'>",
        "<style>text{fill:#555}.p{stroke:#2563eb;stroke-width:2;fill:none}.f{fill:#2563eb}.g{stroke:#888}</style>",
    ]
    if points:
        across = _scale([point[0] for point in points], LEFT, WIDTH - 20)
        stds = [member["score"]["speedup"]["std"] if y == "speedup" else 0.0 for *_, member in points]
        ends = [point[1] + side * std for point, std in zip(points, stds, strict=True) for side in (-1, 1)]
        up = _scale(ends, HEIGHT - BOTTOM, 16)
        for (at, value, member), std in zip(points, stds, strict=True):
            cx, cy = across(at), up(value)
            parts.append(f"<line class='g' x1='{cx:.1f}' x2='{cx:.1f}' y1='{up(value - std):.1f}' y2='{up(value + std):.1f}'/>")
            kind = "p f" if member["measured"] is not None else "p"
            ring = f"<circle class='p' cx='{cx:.1f}' cy='{cy:.1f}' r='8'/>" if member["cheapest"] else ""
            title = f"<title>{escape(member['label'])}</title>"
            parts.append(f"<g>{title}{ring}<circle class='{kind}' cx='{cx:.1f}' cy='{cy:.1f}' r='4'/></g>")
        for values, place in ((sorted(point[0] for point in points), "x"), (sorted(ends), "y")):
            for value in (values[0], values[-1]):
                parts.append(_tick(place, value, (across, up), data["goals"], (x, y)))
    parts.append(f"<line class='g' x1='{LEFT}' x2='{WIDTH - 12}' y1='{HEIGHT - BOTTOM}' y2='{HEIGHT - BOTTOM}'/>")
    parts.append(f"<line class='g' x1='{LEFT}' x2='{LEFT}' y1='8' y2='{HEIGHT - BOTTOM}'/>")
    parts.append(f"<text x='{WIDTH / 2}' y='{HEIGHT - 8}' text-anchor='middle'>{escape(x)}</text>")
    parts.append(f"<text x='14' y='{HEIGHT / 2}' transform='rotate(-90 14 {HEIGHT / 2})' text-anchor='middle'>{escape(y)}</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _log(value: float) -> float:
    return math.log10(max(value, 1e-12))


def _scale(values: Sequence[float], first: float, last: float) -> Any:
    low, high = min(values), max(values)
    if high - low < 1e-12:
        return lambda value: (first + last) / 2
    return lambda value: first + (value - low) / (high - low) * (last - first)


def _tick(place: str, value: float, scales: tuple[Any, Any], goals: Mapping[str, Any], names: tuple[str, str]) -> str:
    if place == "x":
        text = shown(names[0], 10.0**value, goals[names[0]]["unit"])
        return f"<text x='{scales[0](value):.1f}' y='{HEIGHT - BOTTOM + 18}' text-anchor='middle'>{text}</text>"
    text = shown(names[1], value, goals[names[1]]["unit"])
    return f"<text x='{LEFT - 6}' y='{scales[1](value) + 4:.1f}' text-anchor='end'>{text}</text>"
