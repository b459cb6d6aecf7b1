"""`archsearch train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from archsearch.cli.app import main
from archsearch.cli.options import duration, json_option, rank_option, run_argument
from archsearch.cli.output import emit
from archsearch.errors import ArchsearchError


@main.command()
@run_argument
@rank_option
@click.option("--budget", default="30m", show_default=True, callback=duration, help="Training time to add.")
@click.option(
    "--family",
    default="independent",
    show_default=True,
    metavar="F",
    help="What to train: the ranked draft (independent), or a head: eagle3, peagle (all tokens in one pass), medusa.",
)
@click.option(
    "--gamma",
    type=click.IntRange(min=1, max=16),
    help="Of a head: draft tokens a round to train for (default: as the run's head was, else 3).",
)
@click.option(
    "--head-rows",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of a head: tokens of the vocabulary it keeps. Default: 4096, 2048 (medusa).",
)
@click.option("--layers", type=click.IntRange(min=1, max=4), help="Of an EAGLE-3 or P-EAGLE head. Default: 1 and 2.")
@click.option(
    "--aux-layers",
    metavar="I,J,K",
    help="Of an EAGLE-3 or P-EAGLE head: the target's layers whose inputs it reads. Default: 2, half of all, the third last.",
)
@json_option
def train(run: Path, rank: int, budget: float, family: str, as_json: bool, **of_head: Any) -> None:
    """Distil one candidate further, on text the target wrote. Resumes; every candidate of a run trains on the same sequences.

    \b
    archsearch train runs/demo --budget 30m
    archsearch train runs/demo --rank 2 --budget 10m
    archsearch train runs/demo --family eagle3 --gamma 3 --budget 10m
    archsearch train runs/demo --family peagle --gamma 5 --budget 10m
    archsearch train runs/demo --family medusa --budget 2m
    """
    from archsearch.runs.lock import run_lock

    click.get_current_context().with_resource(run_lock(run, "archsearch train"))
    if family == "independent":
        named = [name for name, value in of_head.items() if value is not None]
        if named:
            raise ArchsearchError(
                f"--{named[0].replace('_', '-')} is for heads; add --family eagle3, peagle or medusa, or leave it out"
            )
        from archsearch.pipeline import train_rank
        from archsearch.report.terminal.train import train_text

        result = train_rank(run, rank, budget)
        emit(result, train_text(result, run, rank), as_json)
        return
    from archsearch.pipeline.heads import head_plan, train_family
    from archsearch.report.terminal.heads import head_text

    result = train_family(run, head_plan(family, **of_head, run=run), budget)
    emit(result, head_text(result, run), as_json)
