"""`archsearch train`, `confirm`, `export` and `report`: what is done with a ranked candidate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from archsearch.cli.app import main
from archsearch.cli.options import (
    duration,
    engine_python_option,
    json_option,
    optional_engine,
    rank_option,
    run_argument,
)
from archsearch.cli.output import emit, plus_minus, table
from archsearch.errors import ArchsearchError
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
@click.option(
    "--engine", metavar="E", callback=optional_engine, help="transformers, vllm or openvino (default: the one of the search)."
)
@click.option(
    "--gamma",
    "gammas",
    multiple=True,
    type=click.IntRange(min=1, max=16),
    help="Gamma to run (default: the score's; under load the best at each concurrency); repeat for more.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Prompts to run (default: the run's held-out ones).",
)
@click.option("--count", default=24, show_default=True, type=click.IntRange(min=1), help="How many prompts.")
@click.option(
    "--synthetic",
    is_flag=True,
    help="Random weights, draft tokens accepted by chance at the predicted rates: proves the shape before it is trained.",
)
@click.option(
    "--concurrency",
    "concurrencies",
    multiple=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Requests in flight; repeat for a curve. Engines that batch: vllm, openvino.",
)
@click.option("--schedule", is_flag=True, help="Also run gamma by batch size against always off and every fixed gamma (vllm).")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1), help="Interleaved repeats under load.")
@click.option("--tokens", default=64, show_default=True, type=click.IntRange(min=8), help="New tokens a request under load.")
@engine_python_option
@click.option("--server-url", metavar="URL", help="A running vLLM server with the draft, instead of starting the engine.")
@click.option("--baseline-url", metavar="URL", help="A running vLLM server of the same target without a draft.")
@click.option("--timeout", default="10m", show_default=True, callback=duration, help="Longest wait for one answer of the engine.")
@json_option
def confirm(
    run: Path,
    rank: int,
    engine: str | None,
    gammas: tuple[int, ...],
    prompts: Path | None,
    count: int,
    synthetic: bool,
    concurrencies: tuple[int, ...],
    schedule: bool,
    repeats: int,
    tokens: int,
    engine_python: Path | None,
    server_url: str | None,
    baseline_url: str | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Run target alone and target + draft in a real engine, interleaved, and compare with the prediction.

    \b
    archsearch confirm runs/demo
    archsearch confirm runs/demo --gamma 2 --gamma 4 --gamma 6 --count 40
    archsearch confirm runs/demo --engine vllm
    archsearch confirm runs/llama --rank 2 --engine vllm --synthetic
    archsearch confirm runs/demo --engine vllm --concurrency 1 --concurrency 4 --concurrency 8 --schedule
    archsearch confirm runs/demo --engine vllm --server-url http://gpu1:8000 --baseline-url http://gpu1:8001
    """
    from archsearch.engine_facts import engines_that
    from archsearch.pipeline import EngineChoice, LoadRequest, SearchSession, confirm_load, confirm_rank

    if bool(server_url) != bool(baseline_url):
        raise ArchsearchError(
            "a server cannot be asked to leave its draft out: give --server-url (with the draft) and --baseline-url (without)"
        )
    session = SearchSession.reopen(run)
    servers = engines_that(lambda row: row.server)
    choice = EngineChoice(engine or (servers[0] if server_url else None), engine_python, server_url, baseline_url, timeout)
    if synthetic or concurrencies or schedule:
        request = LoadRequest(
            rank, gammas, concurrencies or ((1, 2, 4, 8) if schedule else (1,)), synthetic, schedule, repeats, tokens, prompts
        )
        loaded = confirm_load(session, request, choice)
        emit(loaded, load_text(loaded, run, rank), as_json)
        return
    result = confirm_rank(session, rank, gammas=gammas, prompt_count=count, prompts=prompts, choice=choice)
    emit(result, confirm_text(result, run, rank), as_json)


def load_text(result: dict[str, Any], run: Path, rank: int) -> str:
    """What `confirm` under load says."""
    rows = []
    for row in result["rows"]:
        predicted, error = row["predicted_speedup"], row["relative_error"]
        rows.append(
            (
                str(row["concurrency"]),
                row["variant"],
                f"{row['tau']:.2f}",
                f"{row['baseline_tokens_per_s']:.1f}",
                f"{row['tokens_per_s']:.1f}",
                plus_minus(row["speedup"]),
                plus_minus(predicted) if row["gamma"] else "off",
                "" if error is None else f"{100 * error:+.1f}",
                _biggest_share(row["error_by_term"]),
            )
        )
    how = "synthetic acceptance at the predicted rates" if result["synthetic"] else "real drafts"
    header = (
        "in flight", "variant", "tau", "alone tok/s", "with draft", "speed-up", "predicted", "error %", "error by term, %"
    )  # fmt: skip
    lines = [
        f"{result['engine']} {result['engine_version']}, {result['dtype']}, {how}, draft {result['architecture']}, "
        f"{result['repeats']} interleaved repeats, {human_time(result['seconds'])}.",
        f"Predicted from {result['latency']}.",
        "",
        table(rows, header),
        "",
    ]
    summary = result["summary"]
    if summary["cases"]:
        lines.append(
            f"Predicted against measured: {summary['cases']} {'case' if summary['cases'] == 1 else 'cases'}, median error "
            f"{summary['median_absolute_error']:.1%}, {summary['within_10_percent']:.0%} within 10 %."
        )
    if "schedule" in result:
        lines.append(f"Schedule (first batch size, last, gamma): {', '.join(map(str, result['schedule']['ranges']))}.")
        for row in result["schedule"]["verdict"]:
            verdict = f"not shown to be worse (it may lose up to {row['margin']:.2f}x unseen)" if row["holds"] else "WORSE"
            other = "always off" if row["best_other"] == "off" else f"fixed {row['best_other']}"
            lines.append(
                f"  {row['concurrency']} in flight: schedule {plus_minus(row['speedup'])} (gamma {row['gamma']}), best other "
                f"{plus_minus(row['best_other_speedup'])} ({other}): {verdict}."
            )
        overall = sorted(result["schedule"]["overall"].items(), key=lambda item: -item[1])
        lines.append(f"Over these loads (geometric mean): {', '.join(f'{name} {value:.2f}' for name, value in overall)}.")
    if result.get("slowdown") is not None:
        lines.append(
            f"The machine ran {result['slowdown']:.2f} times slower than the profile's reference; that is taken out of the terms."
        )
    if result["synthetic"]:
        lines.append("The text is not the target's: times are real, acceptance is what was predicted.")
        lines += ["", f"Next: archsearch train {run} --rank {rank} --budget 30m"]
    else:
        lines += ["", f"Next: archsearch export {run} --rank {rank} --output my-draft"]
    return "\n".join(lines)


def _biggest_share(terms: dict[str, Any] | None) -> str:
    """The terms that bring at least a percent of the error, largest first: `draft +3.1, verify -1.2`."""
    if terms is None:
        return ""
    names = {"tau": "tau", "decode_s": "decode", "draft_s": "draft", "verify_s": "verify", "overhead_s": "overhead"}
    shares = sorted(((abs(value["log_error"]), name) for name, value in terms.items()), reverse=True)
    return ", ".join(f"{names[name]} {100 * terms[name]['log_error']:+.1f}" for size, name in shares if size >= 0.01)


@main.command()
@run_argument
@rank_option
@click.option(
    "--engine",
    metavar="E",
    callback=optional_engine,
    help="Whose latencies: transformers, vllm or openvino (default: the search's).",
)
@click.option(
    "--batch-size", "batch_sizes", multiple=True, type=click.IntRange(min=1), metavar="N", help="Default: 1, 2, 4, ..., 256."
)
@json_option
def schedule(run: Path, rank: int, engine: str | None, batch_sizes: tuple[int, ...], as_json: bool) -> None:
    """The best gamma of a candidate at each batch size, and where speculation should be off; export writes it for the engines.

    \b
    archsearch schedule runs/llama --engine vllm
    archsearch schedule runs/demo --engine vllm --batch-size 1 --batch-size 4 --batch-size 16
    """
    from archsearch.pipeline import SearchSession, schedule_rank

    result = schedule_rank(SearchSession.reopen(run), rank, engine, batch_sizes)
    emit(result, schedule_text(result, run, rank), as_json)


def schedule_text(result: dict[str, Any], run: Path, rank: int) -> str:
    rows = []
    for point in result["points"]:
        best = max(point["by_gamma"].values(), key=lambda value: float(value["value"]))
        rows.append(
            (
                str(point["batch_size"]),
                str(point["gamma"]) if point["gamma"] else "off",
                f"{point['tau']['value']:.2f}",
                plus_minus(point["speedup"] if point["gamma"] else best),
            )
        )
    ranges = ", ".join(f"{first}-{last}: {gamma or 'off'}" for first, last, gamma in result["ranges"])
    return "\n".join(
        [
            f"Draft {result['architecture']}, {result['engine']}. Latencies: {result['latency']}.",
            "",
            table(rows, ("batch size", "gamma", "tau", "speed-up, predicted")),
            "",
            f"Gamma by batch size: {ranges}. {result['note']}".rstrip(),
            "",
            f"Next: archsearch confirm {run} --rank {rank} --engine vllm --schedule",
        ]
    )


def _next_of_confirm(result: dict[str, Any], run: Path, rank: int) -> str:
    """What to do after a confirmation: it pays only where its whole interval lies above 1."""
    if result["undecided"]:
        return f"Next, with nothing else running: archsearch confirm {run} --rank {rank} --gamma {result['gamma']}"
    if result["speedup_interval"][0] > 1:
        return f"Next: archsearch export {run} --rank {rank} --output my-draft"
    answer = (
        "Speculation does not pay here" if result["speedup_interval"][1] < 1 else "Too close to call: 1x lies within the error"
    )
    return f"{answer}. More training may help: archsearch train {run} --rank {rank} --budget 30m"


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
                f"{row['speedup_pooled']:.2f}",
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
    if result.get("identical_output_unchecked"):
        remarks.append(f"WARNING: identity in float32 was not checked: {result['identical_output_unchecked']}")
    doubtful = [row for row in [result, *result["other_gammas"]] if row["undecided"]]
    remarks += [
        f"NOT DECIDED at gamma {row['gamma']}: {row['undecided']}. Confirm again with nothing else running." for row in doubtful
    ]
    lines = [
        f"{result['engine']} {result['engine_version']}, {result['dtype']}, {result['prompts']} held-out prompts, "
        f"draft {result['architecture']}, {human_time(result['seconds'])}.",
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
                "pooled",
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
            f" (largest gap of the two logits where they part: {max(abs(d['logit_gap'] or 0) for d in same['differences']):.3f})"
            if same["differences"]
            else ""
        )
        + (f", {exact['identical']} of {exact['prompts']} in float32." if exact else "."),
        "",
        _next_of_confirm(result, run, rank),
    ]
    return "\n".join(lines)


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
@click.option("--allow-untrained", is_flag=True, help="Export a candidate without weights: its shape only.")
@json_option
def export(
    run: Path,
    rank: int,
    output: Path,
    engines: tuple[str, ...],
    schedule: Path | None,
    gamma: int | None,
    allow_untrained: bool,
    as_json: bool,
) -> None:
    """Write a folder that engines load: config, weights, tokenizer, gamma, the command line of each engine, a model card.

    \b
    archsearch export runs/demo --output my-draft
    archsearch export runs/demo --output my-draft --for vllm --for llama.cpp
    """
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
    from archsearch.runs.run import open_run

    opened = open_run(run)
    page = write_report(opened)
    emit({"run": str(run), "report": str(page)}, f"{summary_text(opened)}\n\nReport: {page}", as_json)
