"""What `estimate --sweep` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from archsearch.report.phrases import dtype_words
from archsearch.report.terminal.layout import plus_minus, table

LEGEND: Final = (
    "±: one standard deviation. ideal: every draft token accepted. tokens/s: all requests that fit."
)
ROWS: Final = 14
"""Rows of a table; CSV and JSON hold all points."""
WORDS: Final = {"batch": "batch size", "context": "context", "gamma": "gamma", "alpha": "alpha"}


def curves_text(result: Mapping[str, Any]) -> str:
    """What `estimate --sweep` prints."""
    workload, axis = result["workload"], result["sweep"]
    fixed = [
        f"batch size {workload['batch_size']}" if axis != "batch" else "",
        f"context {workload['context_len']}" if axis != "context" else "",
        f"gamma {result['gamma']}" if result["gamma"] and axis != "gamma" else "",
        f"tensor parallel {workload['tensor_parallel']}",
    ]
    given = "given" if result["prior"] == "given" else f"the prior ({result['prior']})"
    lines = [
        f"Target {result['target']} on {result['device']}, {dtype_words(result)},"
        f" {', '.join(filter(None, fixed))}; over {WORDS[axis]}.",
        f"Latency: {result['latency']}.",
        f"Acceptance: {'swept' if axis == 'alpha' else given}.",
    ]
    for item in result["curves"]:
        lines += ["", *_one(item, axis)]
    return "\n".join([*lines, "", LEGEND])


def _one(item: Mapping[str, Any], axis: str) -> list[str]:
    header = (
        f"{WORDS[axis]}{' | gamma' * (axis != 'gamma')} | tau | speed-up | ideal | ms a token |"
        " without | tokens/s | without | pays"
    )
    rows = []
    for point in thinned(item["points"]):
        x = f"{point['x']:.2f}" if axis == "alpha" else f"{point['x']:,.0f}"
        row = [
            x,
            str(point["gamma"]),
            f"{point['tau']['value']:.2f}",
            plus_minus(point["speedup"]),
            f"{point['ideal']:.2f}",
            f"{1e3 * point['tpot_s']['value']:.2f}",
            f"{1e3 * point['plain_tpot_s']['value']:.2f}",
            f"{point['tokens_per_s']['value']:,.0f}",
            f"{point['plain_tokens_per_s']['value']:,.0f}",
            "yes" if point["pays"] else "no",
        ]
        rows.append([row[0], *row[2:]] if axis == "gamma" else row)
    lines = [
        f"{item['draft']}, served by {item['served']}",
        table(rows, header),
        *_verdict(item, axis),
    ]
    return lines + [f"Note: {note}" for note in item["notes"]]


def thinned(points: Sequence[Mapping[str, Any]], count: int = ROWS) -> list[Mapping[str, Any]]:
    """About `count` of the points, first and last among them: nearest to even steps of their
    order."""
    if len(points) <= count + 2:
        return list(points)
    return [points[round(i * (len(points) - 1) / (count - 1))] for i in range(count)]


def _verdict(item: Mapping[str, Any], axis: str) -> list[str]:
    """Where it pays, and what memory says."""
    name, points = WORDS[axis], item["points"]
    found = []
    if item["starts"] is not None and axis in ("alpha", "gamma"):
        found.append(f"Pays from {name} {_number(item['starts'], axis)} on.")
    if item["stops"] is not None:
        low, high = item["stops_between"]
        ends = [_number(end, axis) if end is not None else None for end in (low, high)]
        span = f" (5 to 95 %: {ends[0] or 'before'} to {ends[1] or 'beyond'})"
        between, again = span if low != high else "", ""
        if item["starts"] is not None and item["starts"] >= item["stops"]:
            again = f", and would pay again from {_number(item['starts'], axis)} on"
        found.append(f"Stops paying at {name} {_number(item['stops'], axis)}{between}{again}.")
    elif all(point["pays"] for point in points):
        found.append("Pays over the whole range.")
    elif not any(point["pays"] for point in points):
        found.append("Pays nowhere in the range.")
    if item["ideal_stops"] is not None:
        found.append(
            f"With every token accepted it would stop at {_number(item['ideal_stops'], axis)}."
        )
    return [" ".join(found), *_memory(item)]


def _memory(item: Mapping[str, Any]) -> list[str]:
    memory = item["memory"]
    if memory is None:
        return []
    with_draft, alone = memory["with_draft"], memory["alone"]
    where = "shared by all ranks" if memory["draft_ranks"] > 1 else "on one device"
    weights = (with_draft["target_weight_bytes"] + with_draft["draft_weight_bytes"]) / 2**30
    if not with_draft["requests"]:
        return [
            f"Memory: {weights:.1f} GiB of weights a device leave no room for one request of"
            f" {memory['context']:,} tokens: raise --tensor-parallel."
        ]
    lines = [
        f"Memory: weights {weights:.1f} GiB a device (draft {where}), activations"
        f" {with_draft['activation_bytes'] / 2**30:.1f}; holds {with_draft['requests']:,} requests"
        f" of {memory['context']:,} tokens at once, {alone['requests']:,} without the draft;"
        f" longest context {with_draft['longest']:,}."
    ]
    if item["memory_stops"] is not None:
        lines.append(
            f"From batch size {_number(item['memory_stops'], 'batch')} on, requests wait for memory"
            " with the draft loaded."
        )
    return lines


def _number(value: float, axis: str) -> str:
    return f"{value:.2f}" if axis == "alpha" else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
