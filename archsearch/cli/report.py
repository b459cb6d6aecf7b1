"""`archsearch report`."""

from __future__ import annotations

from pathlib import Path

from archsearch.cli.app import main
from archsearch.cli.options import json_option, run_argument
from archsearch.cli.output import emit


@main.command()
@run_argument
@json_option
def report(run: Path, as_json: bool) -> None:
    """Write report.html of a run again and print its summary.

    \b
    archsearch report runs/demo
    """
    from archsearch.pipeline import write_report
    from archsearch.report import summary_text
    from archsearch.runs.run import open_run

    opened = open_run(run)
    page = write_report(opened)
    emit({"run": str(run), "report": str(page)}, f"{summary_text(opened)}\n\nReport: {page}", as_json)
