"""What `compare` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from archsearch.report.phrases import millions
from archsearch.report.terminal.layout import table
from archsearch.report.terminal.summary import wrap


def compare_text(data: Mapping[str, Any]) -> str:
    """Conditions that differ, the winners, and each pair by term and by condition, from `Comparison.to_dict`."""
    same = [name for name in data["conditions"] if name not in data["differing"]]
    differing = differing_rows(data)
    lines = ["What differs:", table(differing, ["", *data["runs"]]), ""] if differing else [NOTHING_DIFFERS, ""]
    told = [f"{name} {data['conditions'][name][0]}" for name in same if data["conditions"][name][0]]
    lines += wrap(f"The same in all: {', '.join(told)}.", 100) if told else []
    lines += ["", "Winners:", table(winner_rows(data), WINNER), ""]
    lines += [line for note in data["notes"] for line in wrap(f"Note: {note}.", 100)]
    for pair in data["pairs"]:
        lines += [*wrap(pair["words"], 100), ""]
        if pair["here"] is not None:
            lines += [table(lead_rows(pair), LEAD), ""]
    return "\n".join(lines).rstrip()


NOTHING_DIFFERS = "Nothing that was asked differs."
WINNER = ("run", "draft", "params", "gamma", "alpha", "tau", "draft ms", "verify ms", "plain ms", "predicted", "measured")
LEAD = ("conditions", "first's", "second's", "lead", "tokens", "drafting", "verifying", "engine")


def differing_rows(data: Mapping[str, Any]) -> list[list[str]]:
    """A row a condition that differs, a column a run."""
    return [[name, *(value or "-" for value in data["conditions"][name])] for name in data["differing"]]


def winner_rows(data: Mapping[str, Any]) -> list[list[str]]:
    """A row a run, as WINNER says."""
    return [
        [
            run, w["label"], millions(w["parameters"]), str(w["gamma"]), f"{w['alpha']:.2f}", f"{w['tau']:.2f}",
            *(f"{1e3 * w[name]:.2f}" for name in ("draft_s", "verify_s", "decode_s")), f"{w['speedup']:.2f}x±{w['std']:.2f}",
            "-" if w["measured"] is None else f"{w['measured']:.2f}x",
        ]
        for run, w in zip(data["runs"], data["winners"], strict=True)
    ]  # fmt: skip


def lead_rows(pair: Mapping[str, Any]) -> list[list[str]]:
    """Rows as LEAD says: the first run's conditions, those with one of the second's in place, the second's."""
    rows = [_lead_row(f"{pair['first']}'s", pair["here"], "")]
    for swap in pair["swaps"]:
        what = f"  {swap['factor']} {swap['after'] or '-'}"
        rows.append(_lead_row(what, swap["lead"], swap["why"]))
    return [*rows, _lead_row(f"{pair['second']}'s", pair["there"], "")]


def _lead_row(what: str, lead: Mapping[str, Any] | None, why: str) -> list[str]:
    if lead is None:
        return [what, "-", "-", why[:60], "", "", "", ""]
    terms = lead["terms"]
    parts = (lead["total"], terms["tau"], terms["draft_s"], terms["verify_s"], terms["overhead_s"])
    return [what, f"{lead['first']:.2f}x", f"{lead['second']:.2f}x", *_percents(parts)]


def _percents(logs: Sequence[float]) -> list[str]:
    return [f"{100 * math.expm1(value):+.1f} %" for value in logs]
