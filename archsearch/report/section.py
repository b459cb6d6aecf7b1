"""What is shown of one thing, before anything shows it: `page` makes HTML of it, `terminal.layout`
lines of text, `chart_files` CSV of its tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from archsearch.estimate import Estimate
from archsearch.report.charts import Chart


@dataclass(frozen=True)
class Cell:
    """A table cell: text, a smaller line below, and whether it is text (left) or a number (right);
    `wrap`: long text, which may break anywhere."""

    text: str
    below: str = ""
    left: bool = False
    wrap: bool = False


Rows = list[list[Cell | str]]


def text_cell(value: object, below: str = "", wrap: bool = False) -> Cell:
    """A cell of words, at the left."""
    return Cell(str(value), below, left=True, wrap=wrap)


def value_cell(
    estimate: Estimate | None, digits: int = 2, scale: float = 1.0, unit: str = ""
) -> Cell:
    """A number with its std, times `scale`, and its source below; `-` for None."""
    if estimate is None:
        return Cell("-")
    spread = f" ± {scale * estimate.std:.{digits}f}" if estimate.std else ""
    return Cell(f"{scale * estimate.value:.{digits}f}{unit}{spread}", estimate.source)


def columns(header: Sequence[str]) -> tuple[str, ...]:
    """Of the header of a table: `"draft | gamma | alpha"`, or one by one."""
    return tuple(header.split(" | ") if isinstance(header, str) else header)


@dataclass(frozen=True)
class Table:
    """Rows under a header (see `columns`); `lead`: the row to stress; `brief`: the columns that a
    terminal has room for (default: all)."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    lead: int | None = None
    brief: Sequence[str] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of its columns."""
        return columns(self.header)

    @property
    def cells(self) -> list[list[Cell]]:
        """Every row, a bare number as a cell."""
        return [
            [each if isinstance(each, Cell) else Cell(each) for each in row] for row in self.rows
        ]


@dataclass(frozen=True)
class Section:
    """`words`: sentences; `notes`: the small print below tables and charts; `doubts`: sentences
    that must not be missed; `commands`: (why, what to type); `parts`: sections of it; `folded`:
    opened by who asks for it. One without any content is false, and shown by nobody."""

    title: str = ""
    words: Sequence[str] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    notes: Sequence[str] = ()
    doubts: Sequence[str] = ()
    commands: Sequence[tuple[str, str]] = ()
    parts: Sequence[Section] = ()
    folded: bool = False

    def __bool__(self) -> bool:
        own = (self.words, self.tables, self.charts, self.notes, self.doubts, self.commands)
        return any(own) or any(self.parts)

    def all_parts(self) -> Iterator[Section]:
        """Itself and every section in it, in the order of the page."""
        yield self
        for part in self.parts:
            yield from part.all_parts()


def charts_of(sections: Sequence[Section]) -> list[Chart]:
    """Every chart, in the order of the page."""
    return [chart for each in sections for part in each.all_parts() for chart in part.charts]
