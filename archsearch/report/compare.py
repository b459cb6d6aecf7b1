"""A comparison of runs: what `compare` prints, a section of a report, and a page of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from archsearch.estimate import number as number_of
from archsearch.report.charts import Chart, colour, line
from archsearch.report.phrases import millions
from archsearch.report.section import Section, Table, columns, text_cell

_TERMS: Final = {
    "tau": "tokens a round",
    "draft_s": "drafting",
    "verify_s": "verification",
    "overhead_s": "what the engine adds",
}
_WINNER: Final = columns(
    "run | draft | params | gamma | alpha | tau | draft ms | verify ms | plain ms | predicted |"
    " measured"
)
_LEAD: Final = columns(
    "conditions | first's | second's | lead | tokens | drafting | verifying | engine"
)


def checked_comparison(data: Any) -> dict[str, Any]:
    """compare.json of a run, as `Comparison.to_dict` made it. Raises one of WRONG_SHAPE for what is
    none."""
    try:
        compare_section(data)
    except OverflowError as error:
        raise ValueError(f"a lead beyond all numbers ({error})") from error
    return dict(data)


def compare_section(data: Mapping[str, Any]) -> Section:
    """Conditions that differ, the winners, and each pair by term and by condition, from
    `Comparison.to_dict`."""
    conditions, differing = data["conditions"], data["differing"]
    same = [
        f"{name} {values[0]}"
        for name, values in conditions.items()
        if name not in differing and values[0]
    ]
    rows = [[name, *(value or "-" for value in conditions[name])] for name in differing]
    pairs = zip(data["runs"], data["winners"], strict=True)
    winners = [_winner(*pair) for pair in pairs]
    notes = [f"{note}." for note in data["notes"]]
    return Section(
        "Runs side by side",
        [] if differing else ["Nothing that was asked differs."],
        [_table(["what differs", *data["runs"]], rows)] if differing else [],
        notes=[f"The same in all: {', '.join(same)}."] if same else [],
        parts=[
            Section("Winners", tables=[_table(_WINNER, winners)], notes=notes),
            *(_pair(pair, place) for place, pair in enumerate(data["pairs"], start=1)),
        ],
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return Table(header, [[text_cell(row[0], wrap=True), *row[1:]] for row in rows])


def _winner(run: str, winner: Mapping[str, Any]) -> list[str]:
    measured = winner["measured"]
    return [
        run,
        winner["label"],
        millions(winner["parameters"]),
        str(winner["gamma"]),
        f"{winner['alpha']:.2f}",
        f"{winner['tau']:.2f}",
        *(f"{1e3 * winner[name]:.2f}" for name in ("draft_s", "verify_s", "decode_s")),
        f"{winner['speedup']:.2f}x±{winner['std']:.2f}",
        "-" if measured is None else f"{measured:.2f}x",
    ]


def _pair(pair: Mapping[str, Any], place: int) -> Section:
    """One run's winner beside another's: under the first's conditions, with one of the second's in
    place, under the second's."""
    if pair["here"] is None:
        return Section(words=[pair["words"]])
    rows = [_lead(*each) for each in _places(pair)]
    table, chart = _table(_LEAD, rows), _chart(pair, place)
    return Section(words=[pair["words"]], tables=[table], charts=[chart])


def _places(pair: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any] | None, str]]:
    """(conditions, how far the second's winner leads under them, why that is not known)."""
    swaps = [
        (f"{swap['factor']} {swap['after'] or '-'}", swap["lead"], swap["why"])
        for swap in pair["swaps"]
    ]
    first, last = f"{pair['first']}'s", f"{pair['second']}'s"
    return [(first, pair["here"], ""), *swaps, (last, pair["there"], "")]


def _lead(what: str, lead: Mapping[str, Any] | None, why: str) -> list[str]:
    if lead is None:
        return [what, "-", "-", why[:60], "", "", "", ""]
    logs = (lead["total"], *(lead["terms"][name] for name in _TERMS))
    percents = [f"{100 * math.expm1(value):+.1f} %" for value in logs]
    return [what, f"{lead['first']:.2f}x", f"{lead['second']:.2f}x", *percents]


def _chart(pair: Mapping[str, Any], place: int) -> Chart:
    """By condition how far the second run's winner leads, a bar a term."""
    places = [(name, lead) for name, lead, _ in _places(pair) if lead is not None]
    series = []
    for number, (key, term) in enumerate(_TERMS.items()):
        leads = [(name, 100.0 * math.expm1(number_of(lead["terms"][key]))) for name, lead in places]
        series.append(line(term, leads, kind="bar", colour=colour(number)))
    return Chart(
        f"compare-{place}",
        f"What leads where: {pair['second']}'s winner before {pair['first']}'s",
        "By how much each term of a round sets the second winner's speed-up above the first's:"
        " under the first run's conditions, with one of the second's in their place, under the"
        " second's. Below the line: it is behind there. Predicted.",
        "conditions",
        "lead, %",
        tuple(series),
        level=0.0,
    )
