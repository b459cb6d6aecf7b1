"""`archsearch recipe`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from archsearch.cli import options as o
from archsearch.cli.app import main
from archsearch.cli.output import emit

LIBRARIES = ("speculators", "specforge", "trl", "archsearch")


@main.command()
@o.run_argument
@o.rank_option
@o.options(
    "",
    o.opt("--output", "Where it is written.", o.FOLDER, Path("recipe")),
    o.opt(
        "--with library",
        "The library that trains (default: the first of these that trains the family).",
        click.Choice(LIBRARIES),
    ),
    o.opt("--gpus", "Of the machine that trains.", o.COUNT, 8),
    o.opt("--prompts", "JSON lines that the target answers (default: the run's).", o.FILE),
)
@o.json_option
def recipe(as_json: bool, **asked: Any) -> None:
    """Write a folder that trains the answer on GPUs with a library made for it: configs, first
    weights, scripts, expectations.

    \b
    archsearch recipe runs/llama --rank 2
    archsearch recipe runs/llama --rank 2 --with specforge --gpus 8 --output eagle3-recipe
    """
    from archsearch.pipeline.recipe import RecipeRequest, make_recipe
    from archsearch.report.terminal.recipe import recipe_text

    made = make_recipe(RecipeRequest(**asked))
    emit(made, recipe_text(made), as_json)
