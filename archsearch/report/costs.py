"""Speed-up by what it costs to have: every drafter that a training budget buys, those that exist at
zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from archsearch.report.answer import amount, gain_words, hours_words
from archsearch.report.charts import INK, SERIES, Chart, Series, bounds
from archsearch.report.families import title_of
from archsearch.report.section import Cell, Section, Table, text_cell, value_cell
from archsearch.runs.budgets import BudgetDrafter, Budgets

NEXT_FAMILIES: Final = 2  # of each budget, besides the best, in the table


def section_costs(budgets: Budgets | None, unit: str) -> Section:
    """The figure and, folded, the table of what each budget buys; `unit`: GPU or CPU. Empty without
    budgets.json."""
    rows = [row for row in budgets.rows if row.drafters] if budgets is not None else []
    if budgets is None or not rows:
        return Section()
    cells: list[list[Cell | str]] = []
    for row in rows:
        best, *others = row.drafters
        rivals: dict[str, BudgetDrafter] = {}
        for drafter in others:
            if drafter.family != best.family:
                rivals.setdefault(drafter.family, drafter)
        beside = ", ".join(
            f"{title_of(name)} {each.speedup.value:.2f}x"
            for name, each in list(rivals.items())[:NEXT_FAMILIES]
        )
        cells.append(
            [
                text_cell("nothing" if not row.gpu_hours else hours_words(row.gpu_hours, unit)),
                value_cell(best.speedup, 2, unit="x"),
                text_cell(_name(best), wrap=True),
                text_cell(_needs(best, unit)),
                str(best.gamma),
                value_cell(best.alpha),
                text_cell(beside or "-", wrap=True),
            ]
        )
    header = (
        "for",
        "speed-up",
        "best drafter",
        "it needs",
        "gamma",
        "alpha",
        "the best of other families",
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


def _needs(drafter: BudgetDrafter, unit: str) -> str:
    needs = drafter.needs
    if needs.kind == "training":
        return f"{hours_words(needs.gpu_hours, unit)}, {amount(needs.tokens or 0.0)} tokens"
    return "a download" if needs.kind == "exists" else "nothing"


def _chart(budgets: Budgets, unit: str) -> Chart:
    hours = [row.gpu_hours for row in budgets.rows if row.gpu_hours]
    free = min(hours, default=1.0) / 10  # where zero stands on an axis that is logarithmic
    found: dict[tuple[str, str, str | None, float], BudgetDrafter] = {}
    for row in budgets.rows:
        for drafter in row.drafters:
            found.setdefault(
                (drafter.family, drafter.label, drafter.needs.hub_id, drafter.needs.gpu_hours),
                drafter,
            )
    families = list(
        dict.fromkeys(
            drafter.family
            for drafter in sorted(found.values(), key=lambda each: -each.speedup.value)
        )
    )
    series = [_best_line(budgets, free)]
    for number, family in enumerate(families):
        own = [drafter for drafter in found.values() if drafter.family == family]
        trained = [drafter for drafter in own if drafter.needs.kind == "training"]
        there = [drafter for drafter in own if drafter.needs.kind != "training"]
        for drafters, symbol in ((there, "circle"), (trained, "ring")):
            if drafters:
                series.append(
                    Series(
                        title_of(family),
                        tuple(each.needs.gpu_hours or free for each in drafters),
                        tuple(each.speedup.value for each in drafters),
                        "points",
                        SERIES[number % len(SERIES)],
                        symbol="ring" if symbol == "ring" else "circle",
                        size=10.0,
                        named=drafters is there or not there,
                        notes=tuple(
                            f"{_name(each)}<br>{gain_words(each.speedup)}, gamma {each.gamma}<br>"
                            f"needs {_needs(each, unit)}"
                            for each in drafters
                        ),
                    )
                )
    caption = (
        "One mark a drafter: filled, it exists or needs no training; a ring, it is trained for so"
        " many hours, text included. Line: the best for each budget, in the order of the ranking,"
        " with its 5 to 95 %. Predicted. Dashed across: no gain."
    )
    return Chart(
        "costs",
        "Speed-up by what it costs to have",
        caption,
        f"{unit}-hours on {budgets.device}",
        "speed-up, x",
        tuple(series),
        x_scale="log",
        level=1.0,
        ticks=(free, *hours),
        tick_names=("0", *(f"{hour:,g}" for hour in hours)),
    )


def _best_line(budgets: Budgets, free: float) -> Series:
    rows = [row for row in budgets.rows if row.drafters]
    best: Sequence[BudgetDrafter] = [row.drafters[0] for row in rows]
    low, high = bounds([drafter.speedup for drafter in best])
    return Series(
        "best for its budget",
        tuple(row.gpu_hours or free for row in rows),
        tuple(each.speedup.value for each in best),
        colour=INK,
        low=low,
        high=high,
        band=True,
        dashed=True,
        symbol=None,
    )
