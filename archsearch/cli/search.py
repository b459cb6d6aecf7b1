"""`archsearch search`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from archsearch.cli.app import main
from archsearch.cli.options import (
    common,
    duration,
    json_option,
)
from archsearch.cli.output import emit, plus_minus, table
from archsearch.errors import ArchsearchError
from archsearch.workload import Mode, WorkloadRequest


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
    help="Train drafts and run the best K in the engine (default with --time-budget: 1).",
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
    tensor_parallel: int | None,
    dtype: str | None,
    mode: Mode | None,
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
    time_budget: float | None,
    storage: str | None,
    run_path: Path | None,
    seed: int,
    top: int,
    as_json: bool,
) -> None:
    """Find the draft architecture that makes the target fastest: width, depth, attention, vocabulary, and gamma for each.

    Alone: seconds, no weights needed; alpha comes from the published prior. With --time-budget the search climbs: the target
    writes text for your prompts, shapes that could still win are trained a little, the best in full, and it runs in the engine
    beside the target alone. The same command continues what was interrupted.

    \b
    archsearch search --target smollm2-135m --gpu cpu
    archsearch search --target smollm2-135m --gpu cpu --time-budget 45m --run runs/mine
    archsearch search --target llama-65b --gpu a100 --tensor-parallel 4 --mode graph
    archsearch search --target ./my-model --gpu cpu --prompts my.jsonl --time-budget 1h --confirm 2
    """
    from archsearch import pipeline

    if no_confirm and confirm_count:
        raise ArchsearchError(f"--confirm {confirm_count} and --no-confirm contradict each other; leave one out")
    wanted, climb, note = 0 if no_confirm else confirm_count or 0, False, ""
    trains, given = alpha in ("distilled", "supernet"), set_by_user("alpha")
    if confirm_count is None and not no_confirm and (trains or (time_budget is not None and not given)):
        wanted = 1
        if not trains:  # nobody asked for training in so many words: without weights the prior's ranking is the answer
            note = pipeline.cannot_train(target, gpu)
            wanted = 0 if note else 1
    if wanted:
        climb = (trains or not given) and not set_by_user("finalists")
    request = pipeline.SearchRequest(
        target=target,
        asked=WorkloadRequest(gpu, profile, batch_size, context, temperature, tensor_parallel, dtype, mode, engine),
        space=space,
        trials=trials,
        alpha=alpha,
        domain=domain,
        prompts=prompts,
        heldout=heldout,
        text=text,
        answer_tokens=answer_tokens,
        confirm=wanted,
        finalists=max(finalists, wanted),
        time_budget_s=time_budget if time_budget is not None else pipeline.SearchRequest.time_budget_s,
        storage=storage,
        run=run_path,
        seed=seed,
        top=top,
        climb=climb,
    )
    result = pipeline.search(request)
    if note:
        result["notes"] = [*result.get("notes", []), f"rung 0 only: {note}"]
    emit(result, search_text(result), as_json)


def set_by_user(name: str) -> bool:
    """Whether an option of the running command was given, not left at its default."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def search_text(result: dict[str, Any]) -> str:
    from archsearch.report import summary_text
    from archsearch.runs.run import open_run

    workload = result["workload"]
    lines = [
        f"Workload: batch size {workload['batch_size']}, context {workload['context_len']}, tensor parallel "
        f"{workload['tensor_parallel']}, {workload['dtype']}, {workload['mode']} mode, temperature {workload['temperature']:g}.",
        f"Latency: {result['latency']}.",
        f"Acceptance prior: {result['prior']}.",
        f"{result['trials']} trials in space {result['space']}.",
        "",
    ]
    lines += [f"Note: {note}." for note in result.get("notes", [])] + [""] * bool(result.get("notes"))
    if result.get("rungs"):
        lines += [*rung_lines(result), ""]
    return "\n".join(lines) + summary_text(open_run(Path(result["run"])))


def rung_lines(result: dict[str, Any]) -> list[str]:
    """What each rung did: candidates, minutes, its best, what was dropped; and what was measured on which prompts."""
    from archsearch.progress import human_time

    rows = []
    for row in result["rungs"]:
        name = f"rung {row['rung']}, {row['what']}" + (f", round {row['round']}" if row["rung"] == 1 else "")
        tokens = f"{row['tokens'] / 1000:.0f}k" if row["tokens"] else ""
        dropped = ", ".join(item["label"] for item in row["dropped"][:2])
        more = f" and {len(row['dropped']) - 2} more" if len(row["dropped"]) > 2 else ""
        score, shapes = plus_minus(row["score"]), f"{row['candidates']}"
        rows.append((name, shapes, tokens, human_time(row["seconds"]), score, f" {row['best']}", f" {dropped}{more}"))
    lines = [table(rows, ("rung", "shapes", "tokens", "time", "speed-up", " best", " dropped"))]
    spent = human_time(result["seconds"])
    lines.append(f"{spent} of {human_time(result['plan']['budget_s'])}: " + ", ".join(
        f"{name} {human_time(seconds)}" for name, seconds in result["steps"].items()))  # fmt: skip
    lines += ["", f"Measured on {result['prompts']}:"]
    for item in result["measured"]:
        parts = ", ".join(f"{name} {plus_minus(value)}" for name, value in item["alpha_by_category"].items() if name)
        lines.append(
            f"  {item['label']}: alpha {plus_minus(item['alpha'])}" + (f" ({parts})" if parts else "")
            + f", tau {plus_minus(item['tau'])} at gamma {item['gamma']}, "
            + f"{item['head_rows']} head rows cover {item['coverage']:.1%}"
        )  # fmt: skip
    return lines
