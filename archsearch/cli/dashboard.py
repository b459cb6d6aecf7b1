"""`archsearch dashboard`."""

from __future__ import annotations

from pathlib import Path

import click

from archsearch.cli.app import main
from archsearch.cli.options import opt, options, run_argument, storage_opt


@main.command()
@run_argument
@options(
    "",
    opt("--port", "0: any that is free.", click.IntRange(0, 65535), 8080),
    storage_opt("The storage the search was given, if it was given one."),
    opt("--open show", "Open the page in your browser.", bool),
)
def dashboard(run: Path, port: int, storage: str | None, show: bool) -> None:
    """Optuna's dashboard on the studies of a run: every trial, its history and parameters. Ctrl-C
    ends it.

    It answers this machine only (127.0.0.1). Needs: pip install "archsearch[dashboard]"

    \b
    archsearch dashboard runs/demo
    archsearch dashboard runs/demo --port 0 --open
    """
    from archsearch.pipeline.workers import serve_dashboard

    def ready(address: str) -> None:
        click.echo(f"Dashboard of {run}: {address} (Ctrl-C ends it)")
        if show:
            click.launch(address)

    serve_dashboard(run, port, ready, storage=storage)
