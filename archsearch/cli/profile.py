"""`archsearch profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from archsearch.cli.app import main
from archsearch.cli.options import (
    duration,
    engine_choice,
    engine_python_option,
    json_option,
)
from archsearch.cli.output import emit, table
from archsearch.errors import ArchsearchError


@main.command()
@click.option(
    "--gpu", required=True, metavar="NAME", help="Device to measure: cpu, or a GPU that must be the one in this machine."
)
@click.option("--target", metavar="T", help="Also measure what this target needs: catalogue name, folder or hub id.")
@click.option(
    "--space",
    default=None,
    metavar="S",
    help="Search space whose shapes to cover (default: demo for small targets, else default).",
)
@click.option(
    "--dtype", "dtypes", multiple=True, metavar="D", help="bfloat16, float32, ... (default: both, the device's native one first)."
)
@click.option(
    "--mode",
    "modes",
    type=click.Choice(["eager", "graph"]),
    multiple=True,
    help="eager as transformers, graph (CUDA graphs) as vLLM; default: both on a GPU, eager on a CPU.",
)
@click.option(
    "--tensor-parallel",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Also measure the shards of a target over N GPUs.",
)
@click.option(
    "--from",
    "source",
    type=click.Choice(["aiconfigurator"]),
    help="Import a GPU's measured kernel tables instead of measuring: no GPU needed.",
)
@click.option(
    "--tables",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="With --from: the tables' folder (default: the installed package).",
)
@click.option(
    "--framework",
    type=click.Choice(["vllm", "trtllm", "sglang"]),
    default="vllm",
    show_default=True,
    help="With --from: whose kernels.",
)
@click.option("--budget", default="5m", show_default=True, callback=duration, help="Time for the sweep: 90s, 5m, 1h.")
@click.option(
    "--check", default=0, metavar="N", help="Then measure N whole drafts the profile has not seen, predicted beside measured."
)
@click.option("--threads", type=int, help="CPU threads (default: all this process may use). Part of the profile's identity.")
@click.option(
    "--engine",
    default="transformers",
    show_default=True,
    metavar="E",
    callback=engine_choice,
    help="Engine that will serve: vllm, openvino. Its own passes are measured in it, with --target.",
)
@engine_python_option
@click.option("--no-engine", is_flag=True, help="Do not measure what the engine adds to each round.")
@click.option("--allow-busy", is_flag=True, help="Measure a GPU although another process uses it; the numbers may be wrong.")
@click.option("--seed", default=0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder (default: profiles/<device>/<stack>).")
@json_option
def profile(
    gpu: str,
    target: str | None,
    space: str | None,
    dtypes: tuple[str, ...],
    modes: tuple[str, ...],
    tensor_parallel: int,
    source: str | None,
    tables: Path | None,
    framework: str,
    budget: float,
    check: int,
    threads: int | None,
    engine: str,
    engine_python: Path | None,
    no_engine: bool,
    allow_busy: bool,
    seed: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure ops, decoder layers and whole models on this device into a profile that searches read.

    Continues where an earlier run stopped; more budget measures more. Every repeat is bracketed by a reference probe, so a busy
    machine is corrected for, and said to be busy.

    \b
    archsearch profile --gpu cpu --target smollm2-135m
    archsearch profile --gpu cpu --target smollm2-135m --budget 2m --check 20
    archsearch profile --gpu cpu --target smollm2-135m --engine vllm
    archsearch profile --gpu h200 --target llama-3.1-8b --check 20
    archsearch profile --gpu a100 --from aiconfigurator
    """
    from archsearch.models.targets import resolve_target
    from archsearch.pipeline import ProfileRequest, default_space, import_tables, profile_device
    from archsearch.search.space import load_space

    if source is not None:
        imported = import_tables(gpu, framework=framework, tables=tables, dtypes=dtypes, output=output)
        emit(imported, import_text(imported), as_json)
        return
    if tables is not None:
        raise ArchsearchError("--tables names imported tables; add --from aiconfigurator")
    ref = resolve_target(target) if target else None
    architecture = ref.architecture if ref else None
    request = ProfileRequest(
        gpu,
        architecture,
        load_space(space or (default_space(architecture) if architecture else "demo")),
        dtypes,
        budget,
        check,
        threads,
        output,
        engine=not no_engine,
        seed=seed,
        modes=modes,
        tensor_parallel=tensor_parallel,
        allow_busy=allow_busy,
        engine_name=engine,
        engine_python=engine_python,
        target_ref=ref,
    )
    result = profile_device(request)
    emit(result, profile_text(result), as_json)


def import_text(result: dict[str, Any]) -> str:
    provenance = result["provenance"]
    lines = [
        f"Profile {result['folder']}: {result['rows']} rows for {result['device']}.",
        f"{result['origin']}.",
        f"Licence of the tables: {provenance['licence']}, {provenance['copyright']}.",
    ]
    if provenance.get("not_in_tables"):
        lines.append(f"Not in the tables, so modelled: {'; '.join(provenance['not_in_tables'])}.")
    lines += ["", f"Next: archsearch search --target llama-65b --profile {result['folder']}"]
    return "\n".join(lines)


def cpu_lines(result: dict[str, Any]) -> list[str]:
    lines = [
        f"Machine: {result['slowdown_median']:.2f} times the quiet reference (5-95 %: {result['slowdown_p5']:.2f} to "
        f"{result['slowdown_p95']:.2f}); divided out of every repeat."
    ]
    if result["slowdown_p95"] > 1.5 * result["slowdown_p5"] or result["noisy_share"] > 0.25:
        lines.append(
            "WARNING: this machine is busy or throttles: stop other work and run the command again, or trust the numbers less."
        )
    return lines


def gpu_lines(result: dict[str, Any]) -> list[str]:
    lines = []
    for name, sweep in result["sweeps"].items():
        sure = f", a step is predicted to ± {sweep['relative_std']:.1%} (std of the median pass)" if sweep["relative_std"] else ""
        lines.append(f"{name}: {sweep['new_rows']} new rows; stopped: {sweep['stopped']}{sure}.")
    if result["throttled_share"]:
        lines.append(
            f"WARNING: the clock dropped by more than 10 % during {result['throttled_share']:.0%} of the rows: check cooling and "
            "power limit, then run the command again."
        )
    for point in result["skipped"]:
        lines.append(f"Skipped, out of memory: {point}")
    return lines


def profile_text(result: dict[str, Any]) -> str:
    lines = [f"Profile {result['folder']}: {result['rows']} rows, {result['new_rows']} new, {result['noisy_share']:.0%} noisy."]
    if "sweeps" in result:
        lines += gpu_lines(result)
    else:
        lines += cpu_lines(result)
    for dtype, learnt in result["models"].items():
        if "missing" in learnt:
            lines.append(f"{dtype}: no model yet: {learnt['missing']}")
        else:
            if learnt.get("leave_one_out_median") is not None:
                lines.append(
                    f"{dtype}: whole passes left out one at a time: median error {learnt['leave_one_out_median']:.1%}, "
                    f"{learnt['leave_one_out_within_12_percent']:.0%} within 12 %."
                )
            own = learnt.get("engine_passes")
            if own:
                rest = own["rest"]
                lines.append(
                    f"{dtype}: passes as {own['engine']} ran them: {own['rows']} rows, left out one at a time: median error "
                    f"{own['leave_one_out_median']:.1%}, {own['leave_one_out_within_10_percent']:.0%} within 10 %; beside them "
                    f"it takes {1e3 * rest.get('plain_s', 0):.2f} ms a plain step, {1e3 * rest.get('round_s', 0):.2f} ms a round "
                    f"and {1e3 * rest.get('token_s', 0):.2f} ms a draft token (measured)."
                )
            for engine, parts in learnt["engines"].items():
                lines.append(
                    f"{dtype}: {engine} adds {1e3 * parts['plain_s']:.2f} ms per plain token, "
                    f"{1e3 * parts['round_s']:.2f} ms per round, {1e3 * parts['token_s']:.2f} ms per draft token "
                    f"and {1e3 * parts['layer_s']:.3f} ms per layer of it (measured)."
                )
    for dtype, check in result["checks"].items():
        rows = [
            (
                row["what"],
                row["architecture"],
                str(row["tokens"]),
                str(row["context"]),
                f"{1e3 * row['measured_s']:.2f}",
                f"{1e3 * row['predicted_s']:.2f}",
                f"{1e3 * row['predicted_std_s']:.2f}",
                f"{100 * row['relative_error']:+.1f}",
            )
            for row in check["rows"]
        ]
        lines += [
            "",
            f"Check {dtype}: shapes the profile has not seen",
            table(rows, ("what", "architecture", "tokens", "context", "measured ms", "predicted", "± std", "error %")),
        ]
        for what in ("draft step", "verify"):
            if what in check:
                part = check[what]
                lines.append(
                    f"{what}: {part['cases']} cases, median absolute error {part['median_absolute_error']:.1%}, "
                    f"{part['within_12_percent']:.0%} within 12 %, {part['within_two_std']:.0%} within two std, "
                    f"bias {part['bias']:+.1%}"
                )
    lines += ["", f"Next: archsearch search --target T --profile {result['folder']}"]
    return "\n".join(lines)
