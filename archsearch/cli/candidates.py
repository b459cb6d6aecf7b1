"""`archsearch train`, `confirm`, `export` and `report`: what is done with a ranked candidate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from archsearch.cli.app import main
from archsearch.cli.options import (
    duration,
    engine_choice,
    json_option,
    rank_option,
    run_argument,
)
from archsearch.cli.output import emit, plus_minus, table
from archsearch.progress import human_time


@main.command()
@run_argument
@rank_option
@click.option("--budget", default="30m", show_default=True, callback=duration, help="Training time to add.")
@json_option
def train(run: Path, rank: int, budget: float, as_json: bool) -> None:
    """Distil one candidate further, on text the target wrote. Resumes; every candidate of a run trains on the same sequences.

    \b
    archsearch train runs/demo --budget 30m
    archsearch train runs/demo --rank 2 --budget 10m
    """
    from archsearch.pipeline import train_rank

    result = train_rank(run, rank, budget)
    before, after, training = result["before"], result["after"], result["training"]
    categories = ", ".join(f"{name} {plus_minus(value)}" for name, value in result["alpha_by_category"].items() if name)
    emit(
        result,
        "\n".join(
            [
                f"Rank {rank}: alpha {plus_minus(before['alpha'], digits=3)} ({before['alpha']['source']}) -> "
                f"{plus_minus(after['alpha'], digits=3)} "
                f"(measured on held-out text{'; ' + categories if categories else ''}).",
                f"Trained {human_time(training['seconds'])} in all, {training['tokens']:,} tokens at "
                f"{training['tokens_per_s']:,.0f} tokens/s.",
                f"Modeled speed-up {plus_minus(before['speedup'])} -> {plus_minus(after['speedup'])} at gamma {after['gamma']}.",
                "",
                f"Next: archsearch confirm {run} --rank {rank}",
            ]
        ),
        as_json,
    )


@main.command()
@run_argument
@rank_option
@click.option("--engine", default="transformers", show_default=True, metavar="E", callback=engine_choice)
@click.option(
    "--gamma",
    "gammas",
    multiple=True,
    type=click.IntRange(min=1, max=8),
    help="Gamma to run (default: the score's); repeat for more.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Prompts to run (default: the run's held-out ones).",
)
@click.option("--count", default=24, show_default=True, type=click.IntRange(min=1), help="How many prompts.")
@json_option
def confirm(run: Path, rank: int, engine: str, gammas: tuple[int, ...], prompts: Path | None, count: int, as_json: bool) -> None:
    """Run target alone and target + draft in a real engine, interleaved, and compare with the prediction.

    \b
    archsearch confirm runs/demo
    archsearch confirm runs/demo --gamma 2 --gamma 4 --gamma 6 --count 40
    """
    from archsearch.pipeline import SearchSession, confirm_rank

    result = confirm_rank(SearchSession.reopen(run), rank, gammas=gammas, prompt_count=count, prompts=prompts)
    emit(result, confirm_text(result, run, rank), as_json)


def confirm_text(result: dict[str, Any], run: Path, rank: int) -> str:
    rows = []
    for row in sorted([result, *result["other_gammas"]], key=lambda row: row["gamma"]):
        rows.append(
            (
                str(row["gamma"]),
                plus_minus(row["alpha"], digits=3),
                plus_minus(row["tau"]),
                f"{row['baseline_tokens_per_s']:.1f}",
                f"{row['tokens_per_s']:.1f}",
                plus_minus(row["speedup"]),
                f"{row['predicted_speedup']:.2f}",
                f"{100 * row['relative_error']:+.1f}",
                f"{100 * row['relative_error_at_measured_tau']:+.1f}",
                f"{1e3 * row['round_s']:.1f}",
                f"{1e3 * row['predicted_round_s']:.1f}",
            )
        )
    same, exact = result["identical_output"], result["identical_output_float32"]
    remarks = []
    if result.get("slowdown") is not None:
        slower = f"{result['slowdown']:.2f} times slower than the profile's reference"
        remarks.append(f"The machine ran {slower}, which predicted times are for; a speed-up does not feel it.")
    if any(row.get("disturbed") for row in [result, *result["other_gammas"]]):
        remarks.append("WARNING: the machine was disturbed while this ran (pooled and median speed-up differ): confirm again.")
    lines = [
        f"{result['engine']} {result['engine_version']}, {result['dtype']}, {result['prompts']} held-out prompts, "
        f"draft {result['architecture']}.",
        "",
        table(
            rows,
            (
                "gamma",
                "alpha",
                "tau",
                "alone tok/s",
                "with draft",
                "speed-up",
                "predicted",
                "error %",
                "error % at measured tau",
                "round ms",
                "predicted",
            ),
        ),
        "",
        *remarks,
        f"Same output as the target alone: {same['identical']} of {same['prompts']} in {result['dtype']}"
        + (
            f" (largest gap of the two logits where they part: {max(d['logit_gap'] or 0 for d in same['differences']):.3f})"
            if same["differences"]
            else ""
        )
        + (f", {exact['identical']} of {exact['prompts']} in float32." if exact else "."),
        "",
        f"Next: archsearch export {run} --rank {rank} --output my-draft"
        if result["speedup"]["value"] > 1
        else f"Speculation does not pay here. More training may help: archsearch train {run} --rank {rank} --budget 30m",
    ]
    return "\n".join(lines)


@main.command()
@run_argument
@rank_option
@click.option("--output", required=True, type=click.Path(path_type=Path), metavar="DIR")
@json_option
def export(run: Path, rank: int, output: Path, as_json: bool) -> None:
    """Write a folder that engines load: config, weights, tokenizer, gamma, vLLM's speculative_config, a model card.

    \b
    archsearch export runs/demo --output my-draft
    """
    from archsearch.pipeline import export_rank

    result = export_rank(run, rank, output)
    emit(
        result,
        f"Draft of rank {rank} exported to {result['output']} (gamma {result['gamma']}).\n{result['note']}\n"
        f"Next: see {result['output']}/README.md",
        as_json,
    )


@main.command()
@run_argument
@json_option
def report(run: Path, as_json: bool) -> None:
    """Write report.html of a run again and print its summary.

    \b
    archsearch report runs/demo
    """
    from archsearch.pipeline import write_report
    from archsearch.report import summary_text
    from archsearch.runs import open_run

    opened = open_run(run)
    page = write_report(opened)
    emit({"run": str(run), "report": str(page)}, f"{summary_text(opened)}\n\nReport: {page}", as_json)
