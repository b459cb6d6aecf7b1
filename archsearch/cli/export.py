"""`archsearch export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archsearch.cli import options as o
from archsearch.cli.app import main
from archsearch.cli.output import emit
from archsearch.errors import ArchsearchError


@main.command()
@o.run_argument
@o.rank_option
@o.options(
    "",
    o.opt("--output", "Where it is written.", o.FOLDER, required=True),
    o.opt(
        "--for engines",
        "transformers, vllm, sglang, tensorrt-llm, llama.cpp (writes a GGUF) or speculators; repeat"
        " for more. Default: the first four, which load the same folder.",
        multiple=True,
        metavar="ENGINE",
    ),
    o.opt(
        "--schedule",
        "JSON with gamma by batch size (default: the candidate's own schedule.json).",
        o.FILE,
    ),
    o.opt(
        "--gamma",
        "Draft tokens a round for engines without a schedule (default: the schedule's at the run's"
        " batch size, the confirmed one, the score's).",
        o.GAMMA,
    ),
    o.opt(
        "--draft-dtype",
        "Of a GGUF: float16 (the default), q8_0, q4_0, ...",
        o.DTYPE,
    ),
    o.opt("--family", "A trained head instead: eagle3, peagle or medusa.", o.FAMILY, "independent"),
    o.opt("--allow-untrained", "Export a candidate without weights: its shape only.", bool),
)
@o.json_option
def export(
    run: Path,
    rank: int,
    output: Path,
    engines: tuple[str, ...],
    schedule: Path | None,
    gamma: int | None,
    draft_dtype: str | None,
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
    archsearch export runs/demo --family eagle3 --output my-head --for llama.cpp
    """
    from archsearch.export import DEFAULT_ENGINES

    asked: dict[str, Any] = {"gamma": gamma, "schedule": schedule, "draft_dtype": draft_dtype}
    if family != "independent":
        if allow_untrained:
            raise ArchsearchError(
                "a head is exported with its weights; leave --allow-untrained out"
            )
        from archsearch.pipeline.export import export_family

        made = export_family(run, family, output, engines=engines or DEFAULT_ENGINES, **asked)
    else:
        from archsearch.pipeline import export_rank

        asked["allow_untrained"] = allow_untrained
        made = export_rank(run, rank, output, engines=engines or DEFAULT_ENGINES, **asked)
    what = f"{family} head" if family != "independent" else f"Draft of rank {rank}"
    lines = [
        f"{what} exported to {made['output']} (gamma {made['gamma']}) for"
        f" {', '.join(made['engines'])}.",
        *([made["note"]] if "note" in made else []),
        f"Next: see {made['output']}/README.md",
    ]
    emit(made, "\n".join(lines), as_json)
