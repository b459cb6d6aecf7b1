"""What drafters cost: speed-up by the training it takes, of every drafter that a budget buys and of
those that exist, and the Pareto set of several goals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from archsearch.estimate import Estimate
from archsearch.report.answer import gain_words, hours_words, needs_words
from archsearch.report.charts import INK, Chart, colour, gain_chart, line
from archsearch.report.families import title_of
from archsearch.report.section import Rows, Section, Table, text_cell, value_cell
from archsearch.runs.tables import BudgetDrafter, Budgets
from archsearch.search.pareto import Goal, Member

NEXT_FAMILIES: Final = 2  # of each budget, besides the best, in the table


def section_costs(budgets: Budgets | None, unit: str) -> Section:
    """The figure and, folded, the table of what each budget buys; `unit`: GPU or CPU. Empty without
    budgets.json."""
    rows = [row for row in budgets.rows if row.drafters] if budgets is not None else []
    if budgets is None or not rows:
        return Section()
    cells: Rows = []
    for row in rows:
        best, *others = row.drafters
        rivals = {each.family: each for each in reversed(others) if each.family != best.family}
        first = sorted(rivals.values(), key=others.index)[:NEXT_FAMILIES]
        beside = ", ".join(f"{title_of(x.family)} {x.speedup.value:.2f}x" for x in first)
        cells.append(
            [
                text_cell("nothing" if not row.gpu_hours else hours_words(row.gpu_hours, unit)),
                value_cell(best.speedup, unit="x"),
                text_cell(_name(best), wrap=True),
                text_cell(needs_words(best.needs, unit)),
                str(best.gamma),
                value_cell(best.alpha),
                text_cell(beside or "-", wrap=True),
            ]
        )
    header = (
        "for | speed-up | best drafter | needs (tokens) | gamma | alpha | best of other families"
    )
    note = (
        "Best first in the ranking's order, in which what is assumed counts by its lower end."
        f" Hours of {budgets.device}: writing the target's text, its passes over it, and the"
        " training."
    )
    rows_of = Section(
        "The same as a table", tables=[Table(header, cells)], notes=[note], folded=True
    )
    return Section("What a training budget buys", charts=[_chart(budgets, unit)], parts=[rows_of])


def _name(drafter: BudgetDrafter) -> str:
    return f"{title_of(drafter.family)}: {drafter.needs.hub_id or drafter.label}"


def _chart(budgets: Budgets, unit: str) -> Chart:
    hours = [row.gpu_hours for row in budgets.rows if row.gpu_hours]
    free = min(hours, default=1.0) / 10  # where zero is drawn on a logarithmic axis
    found: dict[tuple[str, str, str | None, float], BudgetDrafter] = {}
    for row in budgets.rows:
        for drafter in row.drafters:
            found.setdefault(
                (drafter.family, drafter.label, drafter.needs.hub_id, drafter.needs.gpu_hours),
                drafter,
            )
    by_gain = sorted(found.values(), key=lambda each: -each.speedup.value)
    best = [
        (row.gpu_hours or free, row.drafters[0].speedup) for row in budgets.rows if row.drafters
    ]
    dashes = {"colour": INK, "band": True, "dashed": True, "symbol": None}
    series = [line("best for its budget", best, "bounds", **dashes)]
    for number, family in enumerate(dict.fromkeys(drafter.family for drafter in by_gain)):
        own = [drafter for drafter in found.values() if drafter.family == family]
        there = [drafter for drafter in own if drafter.needs.kind != "training"]
        trained = [drafter for drafter in own if drafter.needs.kind == "training"]
        for drafters, symbol in ((there, "circle"), (trained, "ring")):
            notes = tuple(
                f"{_name(each)}<br>{gain_words(each.speedup)}, gamma {each.gamma}<br>"
                f"needs {needs_words(each.needs, unit)}"
                for each in drafters
            )
            look = {"kind": "points", "colour": colour(number), "symbol": symbol, "size": 10.0}
            named = drafters is there or not there
            places = [(each.needs.gpu_hours or free, each.speedup.value) for each in drafters]
            if drafters:
                series.append(line(title_of(family), places, named=named, notes=notes, **look))
    caption = (
        "One mark a drafter: filled, it exists or needs no training; a ring, it is trained for so"
        " many hours, text included. Line: the best for each budget, in the order of the ranking,"
        " with its 5 to 95 %. Predicted. Dashed across: no gain."
    )
    names = ("0", *(f"{hour:,g}" for hour in hours))
    look = {"x_scale": "log", "ticks": (free, *hours), "tick_names": names}
    title, axis = "Speed-up by what it costs to have", f"{unit}-hours on {budgets.device}"
    return gain_chart("costs", title, caption, axis, series, **look)


@dataclass(frozen=True)
class ParetoSet:
    """pareto.json: `exact` names the spaces of which all shapes were looked at."""

    goals: Mapping[str, Goal]
    exact: tuple[str, ...]
    members: tuple[Member, ...]


def pareto_section(found: ParetoSet) -> Section:
    """Each draft with its goals, its group, and whether it was confirmed."""
    rows: Rows = []
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
        look: dict[str, object] = {"symbol": "ring", "size": 12.0} if ring else {}
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
