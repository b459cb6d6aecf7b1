"""`archsearch schedule`."""

from __future__ import annotations

from pathlib import Path

import click

from archsearch.cli.app import main
from archsearch.cli.options import json_option, priced_engine, rank_option, run_argument
from archsearch.cli.output import emit


@main.command()
@run_argument
@rank_option
@click.option(
    "--engine",
    metavar="E",
    callback=priced_engine,
    help="Whose latencies: vllm, transformers, openvino (CPU), sglang, tensorrt-llm, llama.cpp (GPU; default: the search's).",
)
@click.option(
    "--batch-size", "batch_sizes", multiple=True, type=click.IntRange(min=1), metavar="N", help="Default: 1, 2, 4, ..., 256."
)
@click.option("--family", default="independent", show_default=True, metavar="F", help="A trained head of the run instead.")
@json_option
def schedule(run: Path, rank: int, engine: str | None, batch_sizes: tuple[int, ...], family: str, as_json: bool) -> None:
    """The best gamma of a candidate at each batch size, and where speculation should be off; export writes it for the engines.

    \b
    archsearch schedule runs/llama --engine vllm
    archsearch schedule runs/demo --engine vllm --batch-size 1 --batch-size 4 --batch-size 16
    archsearch schedule runs/demo --engine vllm --family eagle3
    """
    from archsearch.pipeline import SearchSession, schedule_rank
    from archsearch.pipeline.schedule import schedule_head
    from archsearch.report.terminal.schedule import schedule_text

    if family != "independent":
        result = schedule_head(SearchSession.reopen(run), family, engine, batch_sizes)
        emit(result, schedule_text(result, run, rank), as_json)
        return
    result = schedule_rank(SearchSession.reopen(run), rank, engine, batch_sizes)
    emit(result, schedule_text(result, run, rank), as_json)
