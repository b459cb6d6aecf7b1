"""What `bench-serve` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from archsearch.report.terminal.layout import table

ROWS: Final = (
    ("tpot_s", "ms a token, mean", 1e3, 2),
    ("tpot_median_s", "ms a token, median", 1e3, 2),
    ("ttft_s", "first token ms, mean", 1e3, 0),
    ("ttft_median_s", "first token ms, median", 1e3, 0),
    ("ttft_p99_s", "first token ms, 99 %", 1e3, 0),
    ("tokens_per_s", "tokens/s", 1.0, 1),
    ("running", "requests decoding", 1.0, 2),
    ("tokens_per_piece", "tokens a piece", 1.0, 2),
    ("failed", "failed", 1.0, 0),
)


def bench_text(result: Mapping[str, Any]) -> str:
    """What `bench-serve` prints."""
    names = [name for name in ("with_draft", "without") if name in result]
    predicted = result.get("predicted")
    header = [""]
    rows = [[title] for _, title, _, _ in ROWS]
    for name in names:
        columns = {"with the draft" if name == "with_draft" else "without": result[name]}
        for title, values in (
            columns | ({"predicted": predicted[name]} if predicted else {})
        ).items():
            header.append(title)
            for row, (key, _, scale, digits) in zip(rows, ROWS, strict=True):
                value = values.get(key)
                shown = "-" if value is None else f"{scale * value:,.{digits}f}"
                row.append("no end" if value is not None and not math.isfinite(value) else shown)
    lines = [f"{result['load']}; text {result['text']}.", "", table(rows, header), ""]
    if "speedup" in result:
        beside = f", predicted {predicted['speedup']:.2f}x" if predicted is not None else ""
        lines.append(f"Speed-up by time per token: {result['speedup']:.2f}x{beside}.")
    if predicted is not None:
        lines.append(
            f"Predicted for {predicted['served']}, gamma {predicted['gamma']}, tau"
            f" {predicted['tau']:.2f}."
        )
    if result["text"] == "made up":
        lines.append(
            "Note: acceptance depends on the text, and this one was made up: give yours with"
            " --prompts."
        )
    return "\n".join([*lines, f"Every request: {result['output']}."])
