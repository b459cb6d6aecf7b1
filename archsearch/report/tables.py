"""Tables and notes of the page."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from archsearch.estimate import Estimate


@dataclass(frozen=True)
class Cell:
    """A table cell: text, a smaller line below, and whether it is text (left) or a number (right)."""

    text: str
    below: str = ""
    left: bool = False
    wrap: bool = False

    def html(self) -> str:
        kind = " ".join(name for name, on in (("text", self.left), ("wrap", self.wrap)) if on)
        below = f"<small>{html.escape(self.below)}</small>" if self.below else ""
        opening = f'<td class="{kind}">' if kind else "<td>"
        # Where a column must be narrow, a value and its std take two lines, each whole.
        text = html.escape(self.text)
        if not self.left:
            text = re.sub(r"([^ ]+(?: (?!±)[^ ]+)+)", r"<span>\1</span>", text)
        return f"{opening}{text}{below}</td>"


def text_cell(value: Any, below: str = "", wrap: bool = False) -> Cell:
    """A cell of words, at the left."""
    return Cell(str(value), below, left=True, wrap=wrap)


def value_cell(estimate: Estimate | None, digits: int = 2, scale: float = 1.0, unit: str = "") -> Cell:
    """A number with its std, times `scale`, and its source below; `-` for None."""
    if estimate is None:
        return Cell("-")
    spread = f" ± {scale * estimate.std:.{digits}f}" if estimate.std else ""
    return Cell(f"{scale * estimate.value:.{digits}f}{unit}{spread}", estimate.source)


def html_table(header: Sequence[str], rows: Sequence[Sequence[Cell | str]], lead: int | None = None) -> str:
    """Columns whose first row is text are left-aligned; `lead` is the row to stress."""
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    left = [bool(cells) and cells[0][column].left for column in range(len(header))]
    heads = ['<th class="text">' if side else "<th>" for side in left]
    top = "".join(f"{head}{html.escape(name)}</th>" for head, name in zip(heads, header, strict=True))
    lines = ["".join(cell.html() for cell in row) for row in cells]
    rows_html = [f'<tr class="lead">{line}</tr>' if number == lead else f"<tr>{line}</tr>" for number, line in enumerate(lines)]
    body = "\n".join(rows_html)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>'


def html_command(text: str) -> str:
    """Lines to type; too long, they break between options."""
    words = re.sub(r"(?<= )(--[a-z-]+)", r"<span>\1</span>", html.escape(text))
    return f"<pre><code>{words}</code></pre>"


def html_note(text: str) -> str:
    """A paragraph in small print."""
    return f'<p class="note">{html.escape(text)}</p>'
