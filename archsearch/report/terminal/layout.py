"""What every text is laid out with: tables, and values with their std."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Aligned columns; numbers to the right."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def number(text: str) -> bool:
        return text[:1].isdigit() or text[:1] in "+-≥"

    lines = []
    for index, row in enumerate(cells):
        lines.append(
            "  ".join(
                cell.rjust(w) if index and number(cell) else cell.ljust(w) for cell, w in zip(row, widths, strict=True)
            ).rstrip()
        )
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def plus_minus(value: dict[str, Any] | None, scale: float = 1.0, digits: int = 2) -> str:
    """`1.52 ± 0.20`; a dash for none."""
    return "-" if value is None else f"{scale * value['value']:.{digits}f} ± {scale * value['std']:.{digits}f}"
