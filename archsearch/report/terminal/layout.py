"""What every text is laid out with: tables, sections, and values with their std."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Final

from archsearch.estimate import Estimate
from archsearch.report.section import Section, Table, columns

WIDTH: Final = 100


def wrap(text: str, width: int = WIDTH) -> list[str]:
    """Lines of at most `width` characters, the later ones indented."""
    return textwrap.wrap(
        text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def wrapped(texts: Iterable[str]) -> list[str]:
    """`wrap` of each."""
    return [line for text in texts for line in wrap(text)]


def indented(text: str) -> list[str]:
    """Its lines, below what they belong to."""
    return [f"  {line}" for line in wrap(text, WIDTH - 4)]


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Aligned columns; numbers to the right. `header`: as `columns` takes it."""
    named = columns(header)
    widths = [max(map(len, column)) for column in zip(named, *rows, strict=True)]

    def number(text: str) -> bool:
        return text[:1].isdigit() or text[:1] in "+-≥"

    def line(row: Sequence[str], *, head: bool = False) -> str:
        cells = zip(row, widths, strict=True)
        aligned = (c.rjust(w) if number(c) and not head else c.ljust(w) for c, w in cells)
        return "  ".join(aligned).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(named, head=True), rule, *map(line, rows)])


def plus_minus(value: Estimate | None, scale: float = 1.0, digits: int = 2) -> str:
    """`1.52 ± 0.20`; a dash for none."""
    if value is None:
        return "-"
    return f"{scale * value.value:.{digits}f} ± {scale * value.std:.{digits}f}"


def section_lines(section: Section) -> list[str]:
    """A section for the terminal, a blank line after each block; charts are the page's."""
    if not section:
        return []
    blocks = [
        [f"{section.title}:"] if section.title else [],
        wrapped([*section.doubts, *section.words]),
        *(_table_lines(each) for each in section.tables),
        wrapped(section.notes),
        [line for why, command in section.commands for line in (f"  {why}:", f"    {command}")],
        *(section_lines(part)[:-1] for part in section.parts),
    ]
    kept = [block for block in blocks if block]
    if section.title and len(kept) > 1:  # no blank line between a title and what it is of
        kept = [kept[0] + kept[1], *kept[2:]]
    return [line for block in kept for line in (*block, "")]


def section_text(section: Section) -> str:
    """A section as one text."""
    return "\n".join(section_lines(section)[:-1])


def _table_lines(shown: Table) -> list[str]:
    """As many of its brief columns as fit, in the order of the table."""
    texts = [list(shown.names), *([cell.text for cell in row] for row in shown.cells)]
    widths = {name: max(len(row[i]) for row in texts) for i, name in enumerate(shown.names)}
    kept: set[str] = set()
    for name in columns(shown.brief):
        if sum(widths[each] + 2 for each in kept) + widths.get(name, WIDTH) <= WIDTH:
            kept.add(name)
    chosen = [i for i, name in enumerate(shown.names) if name in kept or not shown.brief]
    rows = [[row[i] for i in chosen] for row in texts]
    # A space before words that begin with a number keeps them to the left.
    left = [i for i, cell in enumerate(shown.cells[0]) if cell.left] if shown.rows else []
    for row in rows:
        row[:] = [f" {text}" if chosen[i] in left and i else text for i, text in enumerate(row)]
    return table(rows[1:], rows[0]).splitlines()
