"""What `archsearch doctor` found, for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any, Final

MARKS: Final = {"ok": "ok  ", "note": "-   ", "mend": "MEND", "stop": "STOP"}
WIDTH: Final = 110
_INDENT: Final = " " * 16


def doctor_text(result: Mapping[str, Any]) -> str:
    """One line a finding, below it the command that mends it; the verdict last."""
    lines, before = [], ""
    for finding in result["findings"]:
        topic = finding["topic"] if finding["topic"] != before else ""
        before = finding["topic"]
        start = f"{topic:<9} {MARKS[finding['level']]}  "
        lines += textwrap.wrap(
            finding["text"],
            WIDTH,
            initial_indent=start,
            subsequent_indent=_INDENT,
            break_on_hyphens=False,
        )
        if finding["command"]:
            lines.append(f"{_INDENT}$ {finding['command']}")
    counts = {
        level: sum(finding["level"] == level for finding in result["findings"]) for level in MARKS
    }
    if not result["runs"]:
        lines.append(
            f"\nNothing can run here until what is marked STOP ({counts['stop']}) is mended."
        )
    elif counts["mend"]:
        lines.append(
            f"\narchsearch runs here; {counts['mend']} thing{'s' if counts['mend'] > 1 else ''} to"
            " mend (MEND)."
        )
    else:
        lines.append("\narchsearch runs here; nothing to mend.")
    return "\n".join(lines)
