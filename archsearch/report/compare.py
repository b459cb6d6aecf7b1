"""A comparison of runs as a section of an HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from archsearch.report.terminal.compare import LEAD, WINNER, differing_rows, lead_rows, winner_rows


def compare_section(data: Mapping[str, Any]) -> str:
    """`<section>` of what `Comparison.to_dict` says; every name in it is escaped."""
    parts = ["<section id='compare'><h2>Runs side by side</h2>", _table(["", *data["runs"]], differing_rows(data))]
    parts += ["<h3>Winners</h3>", _table(WINNER, winner_rows(data))]
    parts += [f"<p class='note'>{escape(note)}.</p>" for note in data["notes"]]
    for pair in data["pairs"]:
        parts.append(f"<p>{escape(pair['words'])}</p>")
        if pair["here"] is not None:
            parts.append(_table(LEAD, lead_rows(pair)))
    return "\n".join([*parts, "</section>"])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
