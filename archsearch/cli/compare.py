"""`archsearch compare`."""

from __future__ import annotations

from pathlib import Path

import click

from archsearch.cli.app import main
from archsearch.cli.completion import RunPath
from archsearch.cli.options import FILE, json_option, latest_runs, opt, options
from archsearch.cli.output import emit


@main.command()
@click.argument("runs", nargs=-1, metavar="[RUN RUN ...]", type=RunPath())
@options(
    "",
    opt("--html", "Write it as a page as well.", FILE),
    opt(
        "--report in_report",
        "Make it a section of the first run's report as well (compare.json there).",
        bool,
    ),
)
@json_option
def compare(runs: tuple[Path, ...], html: Path | None, in_report: bool, as_json: bool) -> None:
    """What differs between runs and why another draft won: each condition of the first swapped for
    the other's, term by term.

    \b
    archsearch compare                               the two latest runs
    archsearch compare runs/h100 runs/a100
    archsearch compare runs/batch-1 runs/batch-8 runs/batch-64 --json
    """
    from archsearch.pipeline.compare import compare_runs, write_into_report
    from archsearch.report import write_comparison
    from archsearch.report.compare import compare_section
    from archsearch.report.terminal.layout import section_text

    if len(runs) < 2:
        runs = (*runs, *latest_runs(2 - len(runs), runs))
    data = compare_runs(runs).to_dict()
    if html is not None:
        write_comparison(html, data)
    if in_report:
        write_into_report(runs[0], data)
    emit(data, section_text(compare_section(data)), as_json)
