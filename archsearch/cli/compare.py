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
@json_option
def compare(runs: tuple[Path, ...], html: Path | None, as_json: bool) -> None:
    """What differs between runs and why another draft won: each condition of the first swapped for the other's, term by term.

    \b
    archsearch compare runs/h100 runs/a100
    archsearch compare runs/batch-1 runs/batch-8 runs/batch-64 --json
    """
    from archsearch.files import write_text
    from archsearch.pipeline.compare import compare_runs
    from archsearch.report.compare import compare_section
    from archsearch.report.terminal.compare import compare_text

    data = compare_runs(runs).to_dict()
    if html is not None:
        head = "<!doctype html><meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>Runs</title>"
        head += "<style>body{font-family:sans-serif;margin:1rem}.wide{overflow-x:auto}td,th{padding:.2rem .6rem}</style>"
        write_text(html, f"{head}{compare_section(data)}\n")
    emit(data, compare_text(data), as_json)
