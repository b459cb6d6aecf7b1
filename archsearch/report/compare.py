"""A comparison of runs: a section of a report, and a page of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from archsearch.report.charts import SERIES, Chart, Figures, Series
from archsearch.report.tables import html_note, html_table, text_cell
from archsearch.report.terminal.compare import LEAD, NOTHING_DIFFERS, WINNER, differing_rows, lead_rows, winner_rows
from archsearch.runs.fields import number

_TERMS: Final = {"tau": "tokens a round", "draft_s": "drafting", "verify_s": "verification", "overhead_s": "what the engine adds"}


def checked_comparison(data: Any) -> dict[str, Any]:
    """compare.json of a run, as `Comparison.to_dict` made it. Raises one of WRONG_SHAPE for what is none."""
    try:
        compare_section(data, Figures())
    except OverflowError as error:
        raise ValueError(f"a lead beyond all numbers ({error})") from error
    return dict(data)


def compare_section(data: Mapping[str, Any], figures: Figures | None = None) -> str:
    """`<section>` of what `Comparison.to_dict` says; every name in it is escaped. `figures`: of the page it stands in."""
    differing = differing_rows(data)
    parts = ["<section id='compare'><h2>Runs side by side</h2>"]
    parts.append(_table(["", *data["runs"]], differing) if differing else f"<p>{NOTHING_DIFFERS}</p>")
    parts += ["<h3>Winners</h3>", _table(WINNER, winner_rows(data))]
    parts += [html_note(f"{note}.") for note in data["notes"]]
    for place, pair in enumerate(data["pairs"], start=1):
        parts.append(f"<p>{escape(pair['words'])}</p>")
        if pair["here"] is not None:
            parts.append(_table(LEAD, lead_rows(pair)))
            parts.append("" if figures is None else figures.add(_chart(pair, place)))
    return "\n".join([*filter(None, parts), "</section>"])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return html_table(header, [[text_cell(row[0], wrap=True), *row[1:]] for row in rows])


def _chart(pair: Mapping[str, Any], place: int) -> Chart:
    """By condition how far the second run's winner leads, a bar a term."""
    swaps = [(f"{swap['factor']} {swap['after'] or '-'}", swap["lead"]) for swap in pair["swaps"] if swap["lead"] is not None]
    places = [(f"{pair['first']}'s", pair["here"]), *swaps, (f"{pair['second']}'s", pair["there"])]
    names = tuple(name for name, _ in places)
    series = tuple(
        Series(term, names, tuple(100.0 * math.expm1(number(lead["terms"][key])) for _, lead in places), "bar", colour)
        for (key, term), colour in zip(_TERMS.items(), SERIES, strict=False)
    )
    return Chart(
        f"compare-{place}", f"What leads where: {pair['second']}'s winner before {pair['first']}'s",
        "By how much each term of a round sets the second winner's speed-up above the first's: under the first run's conditions, "
        "with one of the second's in their place, under the second's. Below the line: it is behind there. Predicted.",
        "conditions", "lead, %", series, level=0.0,
    )  # fmt: skip
