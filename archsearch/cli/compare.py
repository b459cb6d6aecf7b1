"""`archsearch compare`."""

from __future__ import annotations

from pathlib import Path

import click

from archsearch.cli.app import main
from archsearch.cli.options import json_option
from archsearch.cli.output import emit


@main.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN ...", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write it as a page as well.",
)
@click.option(
    "--report", "in_report", is_flag=True, help="Make it a section of the first run's report as well (compare.json there)."
)
@json_option
def compare(runs: tuple[Path, ...], html: Path | None, in_report: bool, as_json: bool) -> None:
    """What differs between runs and why another draft won: each condition of the first swapped for the other's, term by term.

    \b
    archsearch compare runs/h100 runs/a100
    archsearch compare runs/batch-1 runs/batch-8 runs/batch-64 --json
    """
    from archsearch.pipeline.compare import compare_runs, write_into_report
    from archsearch.report import write_comparison
    from archsearch.report.terminal.compare import compare_text

    data = compare_runs(runs).to_dict()
    if html is not None:
        write_comparison(html, data)
    if in_report:
        write_into_report(runs[0], data)
    emit(data, compare_text(data), as_json)
