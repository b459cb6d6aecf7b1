"""`archsearch worker`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="The run folder, where this machine sees it elsewhere: trainings are done in it.",
)
@click.option(
    "--script",
    type=click.Choice(["slurm", "kubernetes"]),
    help="Join nothing: print a script that runs --count workers there (sbatch, kubectl apply -f -).",
)
@click.option("--count", default=1, show_default=True, type=click.IntRange(min=1), metavar="N", help="With --script: workers.")
@click.option("--gpus", is_flag=True, help="With --script: one GPU for each worker.")
@click.option("--image", default="archsearch", show_default=True, help="With --script kubernetes: a container with archsearch.")
@json_option
def worker(storage: str, name: str, profile: Path | None, folder: Path | None, as_json: bool, **script: Any) -> None:
    """Score and train along with a search that runs, from this or any other machine that reaches its storage.

    \b
    archsearch search --target llama-3.1-8b --gpu h100 --storage postgresql+psycopg2://me@db/as --run runs/a --workers 1
    archsearch worker --storage postgresql+psycopg2://me@db/as --run a
    archsearch worker --storage postgresql+psycopg2://me@db/as --run a --folder /mnt/shared/runs/a
    archsearch worker --storage runs/a/journal.log --run a
    archsearch worker --storage postgresql+psycopg2://me@db/as --run a --script slurm --count 16 | sbatch
    """
    if script["script"] is not None:
        from archsearch.pipeline.executors import script_of

        given = {"--storage": storage, "--run": name, "--profile": profile, "--folder": folder}
        command = ["worker", *(part for option, value in given.items() if value is not None for part in (option, str(value)))]
        text = script_of(script["script"], command, script["count"], gpu=script["gpus"], image=script["image"])
        emit({"script": text}, text.rstrip(), as_json)
        return
    from archsearch.pipeline.search import score_spaces
    from archsearch.pipeline.workers import join

    data = join(storage, name, score_spaces, profile, folder)
    text = f"{data['scored_here']} of {data['trials']} trials of {name} were scored here"
    if data["folder"] is not None:
        text += f", {data['trained_here']} of its trainings and confirmations done"
    emit(data, text + ".", as_json)
