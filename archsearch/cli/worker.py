"""`archsearch worker`."""

from __future__ import annotations

from pathlib import Path

from archsearch.cli.app import main
from archsearch.cli.options import FOLDER, json_option, opt, options, storage_opt
from archsearch.cli.output import emit


@main.command()
@options(
    "",
    storage_opt("Where the search keeps its trials, as it was given.", required=True),
    opt("--run name", "Name of its run folder.", required=True, metavar="NAME"),
    opt(
        "--profile",
        "The profile that the search uses, where it lies elsewhere on this machine.",
        FOLDER,
    ),
    opt(
        "--folder",
        "The run folder, where this machine sees it elsewhere: trainings are done in it.",
        FOLDER,
    ),
)
@json_option
def worker(
    storage: str, name: str, profile: Path | None, folder: Path | None, as_json: bool
) -> None:
    """Score and train along with a search that runs, from this or any other machine that reaches
    its storage.

    \b
    archsearch search --target llama-3.1-8b --gpu h100 \\
        --storage postgresql+psycopg2://me@db/as --run runs/a --workers 1
    archsearch worker --storage postgresql+psycopg2://me@db/as --run a
    archsearch worker --storage postgresql+psycopg2://me@db/as --run a --folder /mnt/shared/runs/a
    archsearch worker --storage runs/a/journal.log --run a
    """
    from archsearch.pipeline.workers import join

    data = join(storage, name, profile, folder)
    text = f"{data['scored_here']} of {data['trials']} trials of {name} were scored here"
    if data["folder"] is not None:
        text += f", {data['trained_here']} of its trainings and confirmations done"
    emit(data, text + ".", as_json)
