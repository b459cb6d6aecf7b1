"""`archsearch search`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from archsearch.cli.app import main
from archsearch.cli.options import check_said_once, common, duration, json_option, load_options, set_by_user
from archsearch.cli.output import emit
from archsearch.errors import ArchsearchError
from archsearch.workload import LoadRequest, WorkloadRequest


def goals(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """`speedup,kv_bytes` -> their names, checked."""
    if value is None:
        return ()
    from archsearch.search.pareto import check_goals

    return check_goals([name.strip() for name in value.split(",") if name.strip()])


@main.command()
@click.option("--target", required=True, metavar="T", help="Catalogue name, folder with config.json (and weights), or hub id.")
@common
@click.option("--space", metavar="S", help="Space name or YAML file (default: by the target's size, and one for each family).")
@click.option(
    "--family",
    "families",
    multiple=True,
    metavar="F",
    help="Kind of drafter: independent, eagle3, ngram, ... (repeat; default: all that the engine runs if nothing is trained).",
)
@click.option(
    "--trials",
    default=300,
    show_default=True,
    type=click.IntRange(min=1),
    help="Distinct shapes to score; where all of a space are scored, to record.",
)
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
    help="Prompts to measure on (default: every 20th, of few prompts up to a quarter).",
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
    help="Train drafts and run the best K in the engine (default with --time-budget: 1).",
)
@click.option(
    "--confirm-prompts",
    default=24,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Prompts that each is run on; with --time-budget fewer, down to 8, where its minutes hold no more.",
)
@click.option("--no-confirm", is_flag=True, help="Rank only (the default).")
@click.option(
    "--finalists",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Train this many of the prior's best, without a climb; at most so many at the end of one.",
)
@click.option(
    "--time-budget",
    metavar="TIME",
    callback=duration,
    help="How far to climb: 2m ranks, 15m trains a few shapes, 45m more and longer. Text, training and confirming included "
    "(default with --confirm: 13m).",
)
@click.option(
    "--storage",
    metavar="URL",
    help="Optuna storage (default: a journal file in the run folder). Many searches may share one: each question has a study "
    "of its own.",
)
@click.option(
    "--sampler",
    type=click.Choice(["auto", "walk", "tpe", "nsga2", "gp", "cmaes", "random"]),
    default="auto",
    show_default=True,
    help="auto scores every shape where the space allows that (up to 5 million combinations) and walks elsewhere.",
)
@click.option(
    "--workers",
    default=0,
    metavar="N",
    type=click.IntRange(min=0),
    help="Processes that score and train; others may join with `archsearch worker` (default: this one alone, and none may).",
)
@click.option(
    "--executor",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Where the --workers run: processes here, or tasks of a Ray cluster that runs already.",
)
@click.option(
    "--share",
    metavar="URL",
    help="With --workers: a copy of the run folder for those that do not see it: s3://, gs://, sftp://, ... as fsspec has them.",
)
@click.option(
    "--run",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Run folder; continues what it holds.",
)
@click.option(
    "--pareto",
    metavar="GOALS",
    callback=goals,
    help="The set that no other draft beats in all of: speedup, training_cost, parameters, kv_bytes, memory, draft_s "
    "(two or more, with commas).",
)
@load_options
@click.option("--seed", default=0, show_default=True)
@click.option("--top", default=5, show_default=True, type=click.IntRange(min=1), help="How many candidates to write.")
@json_option
def search(
    target: str,
    asked: WorkloadRequest,
    load: LoadRequest,
    confirm_count: int | None,
    no_confirm: bool,
    time_budget: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the draft architecture that makes the target fastest: width, depth, attention, vocabulary, and gamma for each.

    Alone: seconds, no weights needed; alpha comes from the published prior. With --time-budget the search climbs: the target
    writes text for your prompts, shapes that could still win are trained a little, the best in full, and it runs in the engine
    beside the target alone. The same command continues what was interrupted.

    \b
    archsearch search --target smollm2-135m --gpu cpu
    archsearch search --target smollm2-135m --gpu cpu --time-budget 45m --run runs/mine
    archsearch search --target llama-65b --gpu a100 --tensor-parallel 4 --mode graph
    archsearch search --target llama-3.1-8b --gpu h100 --family eagle3 --family independent
    archsearch search --target smollm2-135m --gpu cpu --engine vllm --family independent --family eagle3 --confirm 1
    archsearch search --target ./my-model --gpu cpu --prompts my.jsonl --time-budget 1h --confirm 2
    archsearch search --target llama-3.1-8b --gpu h100 --workload mix.yaml --objective throughput --max-ttft 500
    """
    from archsearch import pipeline
    from archsearch.pipeline.mixes import asked_mix
    from archsearch.report.terminal.search import search_text

    if no_confirm and confirm_count:
        raise ArchsearchError(f"--confirm {confirm_count} and --no-confirm contradict each other; leave one out")
    options["domain"] = options["domain"] or ""
    for name in ("alpha", "finalists"):  # a default is no wish: the search may choose
        options[name] = options[name] if set_by_user(name) else None
    check_said_once(load.workload)
    mix, asked = asked_mix(load, asked)
    request, note = pipeline.SearchRequest.decide(
        target, asked, mix=mix, confirm=0 if no_confirm else confirm_count, time_budget_s=time_budget, **options
    )
    result = pipeline.search(request)
    if note:
        result["notes"] = [*result.get("notes", []), f"rung 0 only: {note}"]
    emit(result, search_text(result), as_json)
