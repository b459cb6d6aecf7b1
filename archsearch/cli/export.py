"""`archsearch export`."""

from __future__ import annotations

from pathlib import Path

from archsearch.cli.app import main
from archsearch.cli.options import (
    FAMILY,
    FILE,
    FOLDER,
    GAMMA,
    json_option,
    opt,
    options,
    rank_option,
    run_argument,
)
from archsearch.cli.output import emit
from archsearch.errors import ArchsearchError


@main.command()
@run_argument
@rank_option
@options(
    "",
    opt("--output", "Where it is written.", FOLDER, required=True),
    opt(
        "--for engines",
        "transformers, vllm, sglang, tensorrt-llm, llama.cpp (writes a GGUF) or speculators; repeat"
        " for more. Default: the first four, which load the same folder.",
        multiple=True,
        metavar="ENGINE",
    ),
    opt(
        "--schedule",
        "JSON with gamma by batch size (default: the candidate's own schedule.json).",
        FILE,
    ),
    opt(
        "--gamma",
        "Draft tokens a round for engines without a schedule (default: the schedule's at the run's"
        " batch size, the confirmed one, the score's).",
        GAMMA,
    ),
    opt("--family", "A trained head instead: eagle3, peagle or medusa.", FAMILY, "independent"),
    opt("--allow-untrained", "Export a candidate without weights: its shape only.", bool),
)
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
    """Write a folder that engines load: config, weights, tokenizer, gamma, the command line of each
    engine, a model card.

    \b
    archsearch export runs/demo --output my-draft
    archsearch export runs/demo --output my-draft --for vllm --for llama.cpp
    archsearch export runs/demo --family eagle3 --output my-head
    """
    if family != "independent":
        if engines or allow_untrained:
            raise ArchsearchError(
                "a head is exported for all engines that run it; leave --for and"
                " --allow-untrained out"
            )
        from archsearch.pipeline.export import export_family

        made = export_family(run, family, output, gamma=gamma, schedule=schedule)
        words = (
            f"{family} head exported to {made['output']} (gamma {made['gamma']}) for"
            f" {', '.join(made['engines'])}."
        )
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
        f"Draft of rank {rank} exported to {result['output']} (gamma {result['gamma']}) for"
        f" {', '.join(result['engines'])}.\n{result['note']}\nNext: see"
        f" {result['output']}/README.md",
        as_json,
    )
