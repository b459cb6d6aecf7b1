"""A Pareto set as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from archsearch.estimate import Estimate
from archsearch.report.charts import Chart, colour, line
from archsearch.report.section import Cell, Section, Table, text_cell
from archsearch.search.objective import Score


@dataclass(frozen=True)
class ParetoGoal:
    """One goal: its unit."""

    unit: str


@dataclass(frozen=True)
class ParetoMember:
    """A draft that no other beats in all goals, as `search.pareto.Member` writes it."""

    label: str
    score: Score
    values: Mapping[str, float]
    group: int
    cheapest: bool
    measured: float | None = None


@dataclass(frozen=True)
class ParetoSet:
    """pareto.json: `exact` names the spaces of which all shapes were looked at."""

    goals: Mapping[str, ParetoGoal]
    exact: tuple[str, ...]
    members: tuple[ParetoMember, ...]


def pareto_section(found: ParetoSet) -> Section:
    """Each draft with its goals, its group, and whether it was confirmed."""
    rows: list[list[Cell | str]] = []
    for number, member in enumerate(found.members, start=1):
        values = [shown(name, member.values[name], goal.unit) for name, goal in found.goals.items()]
        tie = f"{member.group}{', cheapest' if member.cheapest else ''}"
        measured = "not confirmed" if member.measured is None else f"{member.measured:.2f}x"
        rows.append([str(number), text_cell(member.label), *values, tie, measured])
    of = f", of all shapes of {', '.join(found.exact)}" if found.exact else ""
    table = Table(["#", "draft", *found.goals, "group", "measured"], rows)
    title, chart = f"Pareto set of {', '.join(found.goals)}{of}", pareto_chart(found)
    return Section(title, tables=[table], charts=[chart])


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


def pareto_chart(found: ParetoSet) -> Chart:
    """The speed-up, or the first goal, against the next one (logarithmic): bars are one std of the
    speed-up; confirmed ones and the cheapest of those that are tied stand out."""
    goals, members = list(found.goals), found.members
    y = "speedup" if "speedup" in goals else goals[0]
    x = next(name for name in goals if name != y)
    kinds = {
        "confirmed": [member for member in members if member.measured is not None],
        "not confirmed": [member for member in members if member.measured is None],
        "cheapest of its group": [member for member in members if member.cheapest],
    }
    series = []
    for number, (name, own) in enumerate(kinds.items()):
        ring = number == 2
        look: dict[str, Any] = {"symbol": "ring", "size": 12.0} if ring else {}
        points = []
        for member in own:
            std = member.score.speedup.std if y == "speedup" else 0.0
            place = Estimate(member.values[y], std, "modelled")
            points.append((max(member.values[x], 1e-12), place))
        notes = tuple(member.label for member in own)
        if own:
            look |= {"kind": "points", "colour": colour(number), "notes": notes}
            series.append(line(name, points, "" if ring else "std", **look))
    caption = "Bars: one standard deviation."
    return Chart("pareto", "Pareto set", caption, x, y, tuple(series), "log")
