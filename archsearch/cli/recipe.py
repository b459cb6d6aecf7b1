"""`archsearch recipe`."""

from __future__ import annotations

from pathlib import Path

import click

from archsearch.cli.app import main
from archsearch.cli.options import (
    COUNT,
    FILE,
    FOLDER,
    json_option,
    opt,
    options,
    rank_option,
    run_argument,
)
from archsearch.cli.output import emit

LIBRARIES = ("speculators", "specforge", "trl", "archsearch")


@main.command()
@run_argument
@rank_option
@options(
    "",
    opt("--output", "Where it is written.", FOLDER, Path("recipe")),
    opt(
        "--with library",
        "The library that trains (default: the first of these that trains the family).",
        click.Choice(LIBRARIES),
    ),
    opt("--gpus", "Of the machine that trains.", COUNT, 8),
    opt("--prompts", "JSON lines that the target answers (default: the run's).", FILE),
)
@json_option
def recipe(
    run: Path,
    rank: int,
    output: Path,
    library: str | None,
    gpus: int,
    prompts: Path | None,
    as_json: bool,
) -> None:
    """Write a folder that trains the answer on GPUs with a library made for it: configs, first
    weights, scripts, expectations.

    \b
    archsearch recipe runs/llama --rank 2
    archsearch recipe runs/llama --rank 2 --with specforge --gpus 8 --output eagle3-recipe
    """
    from archsearch.pipeline.recipe import RecipeRequest, make_recipe
    from archsearch.report.terminal.recipe import recipe_text

    made = make_recipe(RecipeRequest(run, output, rank, library, gpus, prompts))
    emit(made, recipe_text(made), as_json)
