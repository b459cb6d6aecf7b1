"""`archsearch worker`."""

from __future__ import annotations

from pathlib import Path

import click

from archsearch.cli.app import main
from archsearch.cli.options import json_option
from archsearch.cli.output import emit


@main.command()
@click.option("--storage", required=True, metavar="URL", help="Where the search keeps its trials, as it was told.")
@click.option("--run", "name", required=True, metavar="NAME", help="Name of its run folder.")
@click.option(
    "--profile",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="The profile that the search uses, where it lies elsewhere on this machine.",
)
@json_option
def worker(storage: str, name: str, profile: Path | None, as_json: bool) -> None:
    """Score along with a search that runs, from this or any other machine that reaches its storage.

    \b
    archsearch search --target llama-3.1-8b --gpu h100 --storage postgresql://me@db/as --run runs/a --workers 1
    archsearch worker --storage postgresql://me@db/as --run a
    archsearch worker --storage runs/a/journal.log --run a
    """
    from archsearch.pipeline.search import score_spaces
    from archsearch.pipeline.workers import join

    data = join(storage, name, score_spaces, profile)
    emit(data, f"{data['scored_here']} of {data['trials']} trials of {name} were scored here.", as_json)
