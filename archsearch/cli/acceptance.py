"""`archsearch acceptance`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from archsearch.acceptance.estimator import DOMAINS
from archsearch.cli.app import main
from archsearch.cli.options import dtype_choice, json_option
from archsearch.cli.output import emit, plus_minus, table


@main.command()
@click.option("--target", required=True, metavar="T", help="Catalogue name, folder with config.json and weights, or hub id.")
@click.option("--draft", required=True, metavar="D", help="Draft folder, hub id or catalogue name (--explain: any config.json).")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Your prompts, JSON lines: prompt, OpenAI messages or ShareGPT conversations, with an optional category.",
)
@click.option("--temperature", default=0.0, show_default=True, metavar="F", help="0: greedy; above: sampling.")
@click.option("--top-p", default=1.0, show_default=True, metavar="F", help="Nucleus of target and draft, when sampling.")
@click.option("--max-prompts", default=64, show_default=True, type=click.IntRange(min=1), metavar="N")
@click.option("--answer-tokens", default=128, show_default=True, type=click.IntRange(min=2), metavar="N")
@click.option("--dtype", default="float32", show_default=True, metavar="D", callback=dtype_choice, help="Of target and draft.")
@click.option("--explain", is_flag=True, help="Also what the prior thinks of this shape, term by term. Needs no weights.")
@click.option(
    "--domain", type=click.Choice(DOMAINS), default="narrow", show_default=True, help="Which text this is, for the prior."
)
@click.option("--gpu", metavar="NAME", help="Also the modelled speed-up at each gamma on this device.")
@click.option("--profile", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="A profile, instead of --gpu.")
@click.option("--batch-size", default=1, show_default=True, type=click.IntRange(min=1), metavar="N", help="For the speed-up.")
@click.option("--mode", type=click.Choice(["eager", "graph"]), default="eager", show_default=True, help="For the speed-up.")
@click.option("--cache", type=click.Path(path_type=Path, file_okay=False), help="Folder for the target's text (kept there).")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write the figures as JSON.")
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write the trace (.npz).")
@click.option("--seed", default=0, show_default=True, help="Of the text that the target samples.")
@json_option
def acceptance(as_json: bool, **options: Any) -> None:
    """Measure how much of a draft its target accepts: alpha, and tokens per round (tau) at each gamma, on your own prompts.

    The target writes an answer to every prompt once (kept in a cache; another draft then takes seconds), the draft runs beside
    the text once, and the trace is replayed for every gamma. Intervals are over prompts.

    \b
    archsearch acceptance --target smollm2-135m --draft runs/demo/best/1 --prompts mine.jsonl --gpu cpu
    archsearch acceptance --target smollm2-135m --draft runs/demo/best/1 --temperature 0.7 --top-p 0.9
    archsearch acceptance --target llama-65b --draft wide-796m --explain
    """
    from archsearch.pipeline.acceptance import AcceptanceRequest, measure_acceptance
    from archsearch.workload import WorkloadRequest

    asked = WorkloadRequest(**{name: options.pop(name) for name in ("gpu", "profile", "batch_size", "temperature", "mode")})
    result = measure_acceptance(AcceptanceRequest(asked=asked, **options))
    emit(result, acceptance_text(result), as_json)


def acceptance_text(result: dict[str, Any]) -> str:
    how = "greedy" if result["temperature"] == 0 else f"temperature {result['temperature']:g}, top-p {result['top_p']:g}"
    lines = [f"Draft {result['draft']} ({result['shape']}) for {result['target']}, {how}."]
    if "alpha" in result:
        lines += _measured_lines(result)
    if "explanation" in result:
        lines += _explanation_lines(result["explanation"])
    return "\n".join(lines)


def _interval(values: Any, digits: int = 3) -> str:
    return "-" if values is None else f"{values[0]:.{digits}f} to {values[1]:.{digits}f}"


def _measured_lines(result: dict[str, Any]) -> list[str]:
    intervals = result["intervals"]
    what = "share of tokens on which both agree" if result["temperature"] == 0 else "mean overlap, sum of min(p, q)"
    lines = [
        f"Measured on {result['tokens']} tokens of {result['prompts']} answers that the target wrote, {result['dtype']}.",
        "",
        f"alpha {plus_minus(result['alpha'], digits=3)} ({what})",
        f"  90 % {_interval(intervals['alpha']['90'])}, 95 % {_interval(intervals['alpha']['95'])}, over prompts",
    ]
    if result["temperature"] > 0:
        lines.append(f"  the most likely token is the same for {result['argmax_agreement']:.3f} of the tokens")
    gains = result.get("speedup", {})
    rows = []
    for number, (gamma, tau) in enumerate(result["tau"].items()):
        position = result["accepted_by_position"]
        rows.append((
            gamma, plus_minus(tau), _interval(intervals["tau"][gamma]["90"], 2), _interval(intervals["tau"][gamma]["95"], 2),
            f"{position[number]:.3f}" if number < len(position) else "-",
            *((plus_minus(gains[gamma]),) if gains else ()),
        ))  # fmt: skip
    header = ("gamma", "tau", "90 %", "95 %", "position accepted", *(("speed-up",) if gains else ()))
    lines += ["", table(rows, header)]
    if gains:
        best = result["best_gamma"]
        verdict = f"Best gamma {best}." if best else "The draft does not pay at any gamma: run the target alone."
        lines += ["", f"{verdict} Speed-up modelled with the measured tau; latency: {result['latency']}."]
    if result["by_category"]:
        lines += ["", _category_table(result)]
    lines += ["", *(f"Note: {note}." for note in result["notes"])]
    lines.append(f"tau: tokens per round, bonus included. Position accepted: share of rounds, at gamma {len(result['tau'])}.")
    return lines


def _category_table(result: dict[str, Any]) -> str:
    rows = []
    for name, part in result["by_category"].items():
        tau = part["tau"].get("4")
        best = part.get("best_gamma")
        rows.append((
            name, str(part["prompts"]), str(part["tokens"]), plus_minus(part["alpha"], digits=3),
            _interval(part["intervals"]["alpha"]["95"]), plus_minus(tau), *((str(best),) if "speedup" in result else ()),
        ))  # fmt: skip
    header = ("category", "prompts", "tokens", "alpha", "95 %", "tau, gamma 4", *(("best gamma",) if "speedup" in result else ()))
    return table(rows, header)


def _explanation_lines(explanation: dict[str, Any]) -> list[str]:
    rows = [
        # The space keeps evidence that begins with a number from being set to the right as one.
        (row["term"], f"{row['contribution']:+.2f}", f"± {row['std']:.2f}", f" {row['evidence']}")
        for row in explanation["terms"]
        if abs(row["contribution"]) >= 0.005 or row["std"] >= 0.005
    ]
    silent = len(explanation["terms"]) - len(rows)
    return [
        "",
        f"The prior expects alpha {plus_minus(explanation['alpha'])} for this shape. Its terms add up in logit(alpha):",
        "",
        table(rows, ("term", "logit", "std", " evidence")),
        *([f"({silent} more terms say nothing about this shape: --json has them.)"] if silent else []),
    ]
