"""The summary of a run for a terminal of 100 columns."""

from __future__ import annotations

from typing import Final

from archsearch.report.best import section_ranks
from archsearch.report.engines import whole_headline
from archsearch.report.learning import learning_lines
from archsearch.report.phrases import shell_path
from archsearch.report.reading import Reading, read_run
from archsearch.report.section import Section
from archsearch.report.terminal.layout import section_lines, wrap
from archsearch.runs.run import Run

BEST_SHOWN: Final = 12


def summary_text(run: Run, reading: Reading | None = None) -> str:
    """The headline, a table of the best and what to do next; `reading`: the run's, where it was
    read."""
    reading = reading or read_run(run)
    found = reading.candidates
    head = whole_headline(run, reading)
    said = [*head.lines, *(f"WARNING: {problem}" for problem in reading.problems)]
    lines = [head.title, *(f"  {line}" for text in said for line in wrap(text, 96)), ""]
    if found:
        ranks = section_ranks(found[:BEST_SHOWN]).tables
        notes = ["Ranks of one group cannot be told apart. ± one standard deviation."]
        if any(item.undecided is not None for item in found[:BEST_SHOWN]):
            notes.append("? decides nothing: confirm it again.")
        if len(found) > BEST_SHOWN:
            notes = [
                f"... and {len(found) - BEST_SHOWN} more in {shell_path(run.path / 'best')}",
                *notes,
            ]
        lines += section_lines(Section(tables=ranks, notes=notes))
    lines += section_lines(Section("Learning curve", learning_lines(reading)))
    return "\n".join([*lines, *section_lines(Section("Next", commands=head.next))[:-1]])
