"""What `search` prints where nobody named a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from archsearch.estimate import Estimate
from archsearch.report.answer import gain_words, hours_words
from archsearch.report.terminal.layout import table, wrapped
from archsearch.search.objective import Score

LONGEST = 46


def survey_text(result: Mapping[str, Any]) -> str:
    """Two lines for each GPU (today, trained), and how to ask for one."""
    rows = [cells for row in result["survey"] if "error" not in row for cells in _cells(row)]
    refused = [f"{row['device']}: {row['error']}." for row in result["survey"] if "error" in row]
    target = result["target"]
    above = [
        f"No GPU is here and {target} is not for this CPU. What speculation would bring on the GPUs"
        " whose kernels ship:",
        _assumed(result),
    ]
    header = "GPUs that hold it | best |  drafter | speed-up, 5 to 95 %"
    lines = [*wrapped(above), ""]
    lines += [table(rows, header), ""] if rows else []
    known = [row["device"] for row in result["survey"] if "error" not in row]
    lines += wrapped(refused)
    lines += [
        "All of one GPU:",
        f"  archsearch search --target {target} --gpu {known[0] if known else 'NAME'}",
    ]
    return "\n".join(lines)


def _assumed(result: Mapping[str, Any]) -> str:
    """The regime, and the training that drafters to be trained are given."""
    row = next((row for row in result["survey"] if row.get("training_budget")), None)
    if row is None:
        return "Batch 1."
    return (
        f"{row['engine']}; drafters to be trained are given"
        f" {hours_words(row['training_budget']['gpu_hours'], 'GPU')}."
    )


def _cells(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """What one can have today, and the best within the training budget: a line each."""
    where = f"{row['tensor_parallel']} x {row['device']}"
    return [(where, "today", *_best(row["today"])), ("", "trained", *_best(row["trained"]))]


def _best(data: Mapping[str, Any] | None) -> tuple[str, str]:
    if data is None:
        return " none known", "-"
    score = Score.from_dict(dict(data))
    hub = score.needs.hub_id if score.needs is not None else None
    name = f"{score.family}: {hub or score.proposer.label()}"
    gain: Estimate = score.speedup
    return f" {name if len(name) <= LONGEST else name[: LONGEST - 1] + '…'}", gain_words(gain)
