"""`archsearch report`."""

from __future__ import annotations

from pathlib import Path

import click

from archsearch.cli.app import main
from archsearch.cli.options import json_option, opt, options, run_argument
from archsearch.cli.output import emit


@main.command()
@run_argument
@options(
    "",
    opt("--open show", "Open the page in your browser.", bool),
    opt(
        "--figures",
        "Also write its figures (SVG, PNG, CSV) and tables (CSV) into figures/ of the run.",
        bool,
    ),
)
@json_option
def report(run: Path, show: bool, figures: bool, as_json: bool) -> None:
    """Write report.html of a run again and print its summary.

    One page without other files: the answer, figures to zoom and ask, tables, how to reproduce it.

    \b
    archsearch report --open                         of the latest run
    archsearch report runs/demo
    archsearch report runs/demo --figures
    """
    from archsearch.pipeline import write_report
    from archsearch.report import summary_text, write_figures
    from archsearch.runs.run import open_run

    opened = open_run(run)
    page = write_report(opened)
    written = write_figures(opened) if figures else []
    lines = [summary_text(opened), "", f"Report: {page}"]
    if written:
        lines.append(f"Figures and tables: {len(written)} files in {written[0].parent}")
    emit(
        {"run": str(run), "report": str(page), "figures": [str(path) for path in written]},
        "\n".join(lines),
        as_json,
    )
    if show and click.launch(page.resolve().as_uri()) != 0:
        click.echo(
            f"No browser could be started; open {page.resolve().as_uri()} yourself.", err=True
        )
