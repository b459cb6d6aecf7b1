"""`archsearch train`."""

from __future__ import annotations

from pathlib import Path

import click

from archsearch.cli.app import main
from archsearch.cli.options import duration, json_option, rank_option, run_argument
from archsearch.cli.output import emit


@main.command()
@run_argument
@rank_option
@click.option("--budget", default="30m", show_default=True, callback=duration, help="Training time to add.")
@json_option
def train(run: Path, rank: int, budget: float, as_json: bool) -> None:
    """Distil one candidate further, on text the target wrote. Resumes; every candidate of a run trains on the same sequences.

    \b
    archsearch train runs/demo --budget 30m
    archsearch train runs/demo --rank 2 --budget 10m
    """
    from archsearch.pipeline import train_rank
    from archsearch.report.terminal.train import train_text

    result = train_rank(run, rank, budget)
    emit(result, train_text(result, run, rank), as_json)
