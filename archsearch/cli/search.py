"""`archsearch search`, and `worker`, which scores and trains along with one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from archsearch.cli import options as o
from archsearch.cli.app import emit, main
from archsearch.errors import ArchsearchError
from archsearch.workload import LoadRequest, WorkloadRequest


def goals(text: str) -> tuple[str, ...]:
    """`speedup,kv_bytes` -> their names, checked."""
    from archsearch.search.pareto import check_goals

    return check_goals([name.strip() for name in text.split(",") if name.strip()])


@main.command()
@o.options(
    "What is searched",
    o.target_opt,
    o.opt(
        "--space",
        "Space name or YAML file (default: by the target's size, and one for each family).",
        o.SPACE,
    ),
    o.opt(
        "--family families",
        "Kind of drafter: independent, eagle3, ngram, ... (repeat; default: all that the engine"
        " runs if nothing is trained).",
        o.FAMILY,
        multiple=True,
    ),
    o.opt(
        "--trials",
        "Distinct shapes to score; where all of a space are scored, to record.",
        o.COUNT,
        300,
    ),
    o.opt(
        "--sampler",
        "auto scores every shape where the space allows that (up to 5 million combinations, of"
        " heads 5,000); elsewhere Optuna's TPE proposes, with --pareto NSGA-II.",
        click.Choice(["auto", "tpe", "nsga2", "random"]),
        "auto",
    ),
    o.opt(
        "--pareto",
        "The set that no other draft beats in all of: speedup, training_cost, parameters, kv_bytes,"
        " memory, draft_s (two or more, with commas).",
        o.Value("goals", goals),
        (),
    ),
    o.seed_opt,
    o.opt("--top", "How many candidates to write.", o.COUNT, 5),
)
@o.common(False, o.budget_opt)
@o.load_options
@o.options(
    "Text, training, confirming",
    o.opt(
        "--time-budget",
        "How far to climb: 2m ranks, 15m trains a few shapes, 45m more and longer. Text, training"
        " and confirming included (default with --confirm: 13m).",
        o.TIME,
    ),
    o.prompts_opt("the demo's"),
    o.opt(
        "--heldout",
        "Prompts to measure on (default: every 20th, of few prompts up to a quarter).",
        o.PROMPTS,
    ),
    o.opt("--text", "Plain text to train on as well.", o.FILE),
    o.opt("--answer-tokens", "Longest answer the target writes.", click.IntRange(min=8), 96),
    o.opt(
        "--finalists",
        "Train this many of the prior's best, without a climb; at most so many at the end of one.",
        o.COUNT,
        3,
    ),
    o.opt(
        "--confirm confirm_count",
        "Train drafts and run the best K in the engine (default with --time-budget: 1).",
        o.WHOLE,
        metavar="K",
    ),
    o.opt(
        "--confirm-prompts",
        "Prompts that each is run on; with --time-budget fewer, down to 8, where its minutes hold"
        " no more.",
        o.COUNT,
        24,
    ),
    o.opt("--no-confirm", "Rank only (the default).", bool),
    o.opt(
        "--anyway",
        "Train also where nothing that would be trained can be expected to pay (else only ranked).",
        bool,
    ),
)
@o.options(
    "Many processes and machines",
    o.storage_opt(
        "Optuna storage (default: a journal file in the run folder). Many searches may share one:"
        " each question has a study of its own."
    ),
    o.opt(
        "--workers",
        "Processes that score and train; others may join with `archsearch worker` (default: this"
        " one alone, and none may).",
        o.WHOLE,
        0,
    ),
    o.opt(
        "--executor",
        "Where the --workers run: processes here, or tasks of a Ray cluster that runs already.",
        click.Choice(["local", "ray"]),
        "local",
    ),
)
@o.options("", o.run_opt, o.explain_opt, o.json_opt)
def search(
    target: str,
    asked: WorkloadRequest,
    load: LoadRequest,
    confirm_count: int | None,
    no_confirm: bool,
    time_budget: float | None,
    explain: bool,
    anyway: bool,
    **options: Any,
) -> None:
    """Find the draft architecture that makes the target fastest: width, depth, attention,
    vocabulary, and gamma for each.

    Alone: seconds, no weights needed; alpha comes from the published prior. With --time-budget the
    search climbs: the target writes text for your prompts, shapes that could still win are trained
    a little, the best in full, and it runs in the engine beside the target alone. The same command
    continues what was interrupted.

    \b
    archsearch search --target smollm2-135m --gpu cpu
    archsearch search --target smollm2-135m --gpu cpu --time-budget 45m --run runs/mine
    archsearch search --target llama-65b --gpu a100 --tensor-parallel 4 --mode graph
    archsearch search --target llama-3.1-8b --gpu h100 --family eagle3 --family independent
    archsearch search --target smollm2-135m --gpu cpu --engine vllm --family independent \\
        --family eagle3 --confirm 1
    archsearch search --target ./my-model --gpu cpu --prompts my.jsonl --time-budget 1h \\
        --confirm 2
    archsearch search --target llama-3.1-8b --gpu h100 --workload mix.yaml \\
        --objective throughput --max-ttft 500
    """
    from archsearch import pipeline
    from archsearch.pipeline.search import survey, surveyed_devices
    from archsearch.pipeline.serving import asked_mix
    from archsearch.report.terminal.search import search_text

    if no_confirm and confirm_count:
        raise ArchsearchError(
            f"--confirm {confirm_count} and --no-confirm contradict each other; leave one out"
        )
    options["domain"] = options["domain"] or ""
    for name in ("alpha", "finalists"):  # a default is no wish: the search may choose
        options[name] = options[name] if o.set_by_user(name) else None
    o.check_said_once(load.workload)
    mix, asked = asked_mix(load, asked)
    request, note = pipeline.SearchRequest.decide(
        target,
        asked,
        mix=mix,
        confirm=0 if no_confirm else confirm_count,
        time_budget_s=time_budget,
        **options,
    )
    if devices := surveyed_devices(request):
        return emit(survey(request, devices))
    result = pipeline.search(request, anyway=anyway)
    if note:
        unused = f"nothing is trained, the time budget is not used: {note}"
        result = replace(result, warnings=(unused, *result.warnings))
    emit(result, search_text(result, explain=explain))
    if result.refused:
        raise ArchsearchError(result.refused)


@main.command()
@o.options(
    "",
    o.storage_opt("Where the search keeps its trials, as it was given.", required=True),
    o.opt("--run name", "Name of its run folder.", required=True, metavar="NAME"),
    o.opt(
        "--profile",
        "The profile that the search uses, where it lies elsewhere on this machine.",
        o.FOLDER,
    ),
    o.opt(
        "--folder",
        "The run folder, where this machine sees it elsewhere: trainings are done in it.",
        o.FOLDER,
    ),
)
@o.json_option
def worker(storage: str, name: str, profile: Path | None, folder: Path | None) -> None:
    """Score and train along with a search that runs, from this or any other machine that reaches
    its storage.

    \b
    archsearch search --target llama-3.1-8b --gpu h100 \\
        --storage postgresql+psycopg2://me@db/as --run runs/a --workers 1
    archsearch worker --storage postgresql+psycopg2://me@db/as --run a
    archsearch worker --storage postgresql+psycopg2://me@db/as --run a --folder /mnt/shared/runs/a
    archsearch worker --storage runs/a/journal.log --run a
    """
    from archsearch.pipeline.workers import join

    data = join(storage, name, profile, folder)
    text = f"{data['scored_here']} of {data['trials']} trials of {name} were scored here"
    if data["folder"] is not None:
        text += f", {data['trained_here']} of its trainings and confirmations done"
    emit(data, text + ".")
