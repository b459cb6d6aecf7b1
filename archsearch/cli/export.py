"""`archsearch export`."""

from __future__ import annotations

from pathlib import Path

import click

from archsearch.cli.app import main
from archsearch.cli.options import json_option, rank_option, run_argument
from archsearch.cli.output import emit
from archsearch.errors import ArchsearchError


@main.command()
@run_argument
@rank_option
@click.option("--output", required=True, type=click.Path(path_type=Path), metavar="DIR")
@click.option(
    "--for",
    "engines",
    multiple=True,
    metavar="ENGINE",
    help="transformers, vllm, sglang, tensorrt-llm, llama.cpp (writes a GGUF) or speculators; repeat for more. "
    "Default: the first four, which load the same folder.",
)
@click.option(
    "--schedule",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="JSON with gamma by batch size (default: the candidate's own schedule.json).",
)
@click.option(
    "--gamma",
    type=click.IntRange(min=1, max=16),
    help="Draft tokens a round where there is no schedule (default: the schedule's at batch 1, the confirmed one, the score's).",
)
@click.option(
    "--family", default="independent", show_default=True, metavar="F", help="A trained head instead: eagle3, peagle or medusa."
)
@click.option("--allow-untrained", is_flag=True, help="Export a candidate without weights: its shape only.")
@json_option
def export(
    run: Path,
    rank: int,
    output: Path,
    engines: tuple[str, ...],
    schedule: Path | None,
    gamma: int | None,
    family: str,
    allow_untrained: bool,
    as_json: bool,
) -> None:
    """Write a folder that engines load: config, weights, tokenizer, gamma, the command line of each engine, a model card.

    \b
    archsearch export runs/demo --output my-draft
    archsearch export runs/demo --output my-draft --for vllm --for llama.cpp
    archsearch export runs/demo --family eagle3 --output my-head
    """
    if family != "independent":
        if engines or allow_untrained:
            raise ArchsearchError("a head is exported for all engines that run it; leave --for and --allow-untrained out")
        from archsearch.pipeline.heads import export_family

        made = export_family(run, family, output, gamma=gamma, schedule=schedule)
        words = f"{family} head exported to {made['output']} (gamma {made['gamma']}) for {', '.join(made['engines'])}."
        emit(made, f"{words}\nNext: see {made['output']}/README.md", as_json)
        return
    from archsearch.export import DEFAULT_ENGINES
    from archsearch.pipeline import export_rank

    result = export_rank(
        run,
        rank,
        output,
        engines=engines or DEFAULT_ENGINES,
        gamma=gamma,
        schedule=schedule,
        allow_untrained=allow_untrained,
    )
    emit(
        result,
        f"Draft of rank {rank} exported to {result['output']} (gamma {result['gamma']}) for {', '.join(result['engines'])}.\n"
        f"{result['note']}\n"
        f"Next: see {result['output']}/README.md",
        as_json,
    )
