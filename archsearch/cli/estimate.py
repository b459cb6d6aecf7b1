"""`archsearch estimate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from archsearch.cli.app import main
from archsearch.cli.options import (
    common,
    json_option,
)
from archsearch.cli.output import emit, plus_minus, table
from archsearch.workload import Mode


@main.command()
@click.option("--target", required=True, metavar="T", help="Catalogue name, folder with config.json, or hub id.")
@click.option("--draft", "drafts", required=True, multiple=True, metavar="D", help="A draft that exists; repeat for more.")
@click.option(
    "--gamma", type=click.IntRange(min=1), metavar="N", help="Draft tokens per verification (default: the best of 1 to 8)."
)
@common
@json_option
def estimate(
    target: str,
    drafts: tuple[str, ...],
    gamma: int | None,
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
    as_json: bool,
) -> None:
    """Price drafts that exist: does this draft pay, at which gamma, and from which acceptance on.

    \b
    archsearch estimate --target llama-65b --draft wide-796m --draft sheared-llama-1.3b --gpu a100 --tensor-parallel 4
    archsearch estimate --target smollm2-135m --draft ./my-draft --gpu cpu --alpha 0.7
    """
    from archsearch.pipeline.estimate import EstimateRequest, estimate_drafts
    from archsearch.workload import WorkloadRequest

    asked = WorkloadRequest(gpu, profile, batch_size, context, temperature, tensor_parallel, dtype, mode, engine)
    result = estimate_drafts(EstimateRequest(target, drafts, asked, alpha, gamma, domain))
    emit(result, estimate_text(result), as_json)


def estimate_text(result: dict[str, Any]) -> str:
    rows = []
    for entry in result["drafts"]:
        rows.append(
            (
                entry["draft"],
                f"{entry['parameters'] / 1e6:,.0f}M",
                str(entry["gamma"]),
                plus_minus(entry["alpha"]),
                plus_minus(entry["tau"]),
                plus_minus(entry["draft_s"], 1e3),
                plus_minus(entry["verify_s"], 1e3),
                plus_minus(entry["break_even_alpha"]),
                plus_minus(entry["speedup"]),
                "yes" if entry["pays"] else "no",
                str(entry["group"]),
            )
        )
    workload = result["workload"]
    first = result["drafts"][0]
    lines = [
        f"Target {result['target']} on {result['device']}, {workload['dtype']}, {workload['mode']} mode, "
        f"batch size {workload['batch_size']}, context {workload['context_len']}, tensor parallel {workload['tensor_parallel']}.",
        f"Latency: {result['latency']}.",
        "Acceptance: " + ("given" if result["prior"] == "given" else f"the prior ({result['prior']})") + ". "
        f"Target decode step {1e3 * first['decode_s']['value']:.2f} ms.",
        "",
        table(
            rows,
            (
                "draft",
                "parameters",
                "gamma",
                "alpha",
                "tau",
                "draft ms",
                "verify ms",
                "break-even alpha",
                "speed-up",
                "pays",
                "group",
            ),
        ),
    ]
    lines += [f"Note: {entry['draft']}: {note}" for entry in result["drafts"] for note in entry["notes"]]
    lines += [
        "",
        "Drafts of one group cannot be told apart by these error bars. draft ms: all gamma tokens of a round.",
        "Next: measure alpha with your own text (archsearch search --confirm 1), or give it with --alpha.",
    ]
    return "\n".join(lines)
