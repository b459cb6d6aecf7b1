"""`archsearch train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from archsearch.cli import options as o
from archsearch.cli.app import main
from archsearch.cli.output import emit
from archsearch.errors import ArchsearchError


@main.command()
@o.run_argument
@o.rank_option
@o.options("", o.opt("--budget", "Training time to add.", o.TIME, "30m"))
@o.options(
    "A head",
    o.opt(
        "--family",
        "What to train: the ranked draft (independent), or a head: eagle3, peagle (all tokens in"
        " one pass), medusa.",
        o.FAMILY,
        "independent",
    ),
    o.opt(
        "--gamma",
        "Draft tokens a round to train for (default: as the run's head was, else 3).",
        o.GAMMA,
    ),
    o.opt(
        "--head-rows", "Tokens of the vocabulary it keeps. Default: 4096, 2048 (medusa).", o.COUNT
    ),
    o.opt(
        "--layers", "Of an EAGLE-3 or P-EAGLE head. Default: 1 and 2.", click.IntRange(min=1, max=4)
    ),
    o.opt(
        "--aux-layers",
        "Of an EAGLE-3 or P-EAGLE head: the target's layers whose inputs it reads. Default: 2, half"
        " of all, the third last.",
        metavar="I,J,K",
    ),
)
@o.json_option
def train(run: Path, rank: int, budget: float, family: str, as_json: bool, **of_head: Any) -> None:
    """Distil one candidate further, on text the target wrote. Resumes; every candidate of a run
    trains on the same sequences.

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
                f"--{named[0].replace('_', '-')} is for heads; add --family eagle3, peagle or"
                " medusa, or leave it out"
            )
        from archsearch.pipeline import train_rank
        from archsearch.report.terminal.train import train_text

        result = train_rank(run, rank, budget)
        emit(result, train_text(result, run, rank), as_json)
        return
    from archsearch.pipeline.heads import head_plan
    from archsearch.pipeline.train import train_family
    from archsearch.report.terminal.train import head_text

    result = train_family(run, head_plan(family, **of_head, run=run), budget)
    emit(result, head_text(result, run), as_json)
