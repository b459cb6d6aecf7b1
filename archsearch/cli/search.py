"""`archsearch search`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from archsearch.cli.app import main
from archsearch.cli.options import (
    common,
    duration,
    json_option,
)
from archsearch.cli.output import emit
from archsearch.errors import ArchsearchError


@main.command()
@click.option("--target", required=True, metavar="T", help="Catalogue name, folder with config.json (and weights), or hub id.")
@common
@click.option("--space", metavar="S", help="Space name or YAML file (default: by the target's size).")
@click.option("--trials", default=300, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="JSON lines of your prompts (default: the demo's).",
)
@click.option(
    "--heldout",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Prompts to measure on (default: every 20th).",
)
@click.option("--text", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Plain text to train on as well.")
@click.option(
    "--answer-tokens", default=96, show_default=True, type=click.IntRange(min=8), help="Longest answer the target writes."
)
@click.option(
    "--confirm",
    "confirm_count",
    type=click.IntRange(min=0),
    metavar="K",
    help="Train finalists and run the best K in the engine.",
)
@click.option("--no-confirm", is_flag=True, help="Rank only (the default).")
@click.option("--finalists", default=3, show_default=True, type=click.IntRange(min=1), help="How many drafts --confirm trains.")
@click.option(
    "--time-budget",
    default="13m",
    show_default=True,
    callback=duration,
    help="With --confirm: time for writing text and training.",
)
@click.option("--storage", metavar="URL", help="Optuna storage (default: a journal file in the run folder).")
@click.option(
    "--run",
    "run_path",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Run folder; continues what it holds.",
)
@click.option("--seed", default=0, show_default=True)
@click.option("--top", default=5, show_default=True, type=click.IntRange(min=1), help="How many candidates to write.")
@json_option
def search(
    target: str,
    gpu: str | None,
    profile: Path | None,
    batch_size: int,
    context: int,
    temperature: float,
    tensor_parallel: int,
    dtype: str | None,
    mode: str,
    alpha: str,
    domain: str,
    engine: str,
    space: str | None,
    trials: int,
    prompts: Path | None,
    heldout: Path | None,
    text: Path | None,
    answer_tokens: int,
    confirm_count: int | None,
    no_confirm: bool,
    finalists: int,
    time_budget: float,
    storage: str | None,
    run_path: Path | None,
    seed: int,
    top: int,
    as_json: bool,
) -> None:
    """Find the draft architecture that makes the target fastest: width, depth, attention, vocabulary, and gamma for each.

    Without --confirm: seconds, no weights needed; alpha comes from the published prior. With --confirm: the target writes text
    for your prompts, finalists are distilled on it and measured, and the best runs in the engine beside the target alone.

    \b
    archsearch search --target smollm2-135m --gpu cpu
    archsearch search --target smollm2-135m --gpu cpu --confirm 1 --run runs/mine
    archsearch search --target llama-65b --gpu a100 --tensor-parallel 4 --mode graph
    archsearch search --target ./my-model --gpu cpu --prompts my.jsonl --confirm 1 --time-budget 40m
    """
    from archsearch import pipeline

    if no_confirm and confirm_count:
        raise ArchsearchError(f"--confirm {confirm_count} and --no-confirm contradict each other; leave one out")
    wanted = confirm_count if confirm_count is not None else int(alpha == "distilled" and not no_confirm)
    request = pipeline.SearchRequest(
        target=target,
        gpu=gpu,
        profile=profile,
        space=space,
        batch_size=batch_size,
        context=context,
        temperature=temperature,
        tensor_parallel=tensor_parallel,
        dtype=dtype,
        mode=mode,
        trials=trials,
        alpha=alpha,
        domain=domain,
        prompts=prompts,
        heldout=heldout,
        text=text,
        answer_tokens=answer_tokens,
        confirm=wanted,
        finalists=max(finalists, wanted),
        time_budget_s=time_budget,
        engine=engine,
        storage=storage,
        run=run_path,
        seed=seed,
        top=top,
    )
    result = pipeline.search(request)
    emit(result, search_text(result), as_json)


def search_text(result: dict[str, Any]) -> str:
    from archsearch.report import summary_text
    from archsearch.runs import open_run

    lines = [f"Latency: {result['latency']}.", f"{result['trials']} trials in space {result['space']}.", ""]
    return "\n".join(lines) + summary_text(open_run(Path(result["run"])))
