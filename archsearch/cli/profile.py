"""`archsearch profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from archsearch.cli.app import main
from archsearch.cli.options import duration, engine_choice, engine_python_option, json_option
from archsearch.cli.output import emit
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
@click.option("--budget", "budget_s", default="5m", show_default=True, callback=duration, help="Time for the sweep: 90s, 5m, 1h.")
@click.option(
    "--check", default=0, metavar="N", help="Then measure N whole drafts the profile has not seen, predicted beside measured."
)
@click.option("--threads", type=int, help="CPU threads (default: all this process may use). Part of the profile's identity.")
@click.option(
    "--engine",
    "engine_name",
    default="transformers",
    show_default=True,
    metavar="E",
    callback=engine_choice,
    help="Engine that will serve: vllm, openvino. Its own passes are measured in it, with --target.",
)
@engine_python_option()
@click.option("--no-engine", is_flag=True, help="Do not measure what the engine adds to each round.")
@click.option("--allow-busy", is_flag=True, help="Measure a GPU although another process uses it; the numbers may be wrong.")
@click.option("--seed", default=0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder (default: profiles/<device>/<stack>).")
@json_option
def profile(
    gpu: str, target: str | None, space: str | None, source: str | None, tables: Path | None, as_json: bool, **options: Any
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
    from archsearch.report.terminal.profile import import_text, profile_text
    from archsearch.search.space import load_space

    framework = options.pop("framework")
    if source is not None:
        imported = import_tables(gpu, framework=framework, tables=tables, dtypes=options["dtypes"], output=options["output"])
        emit(imported, import_text(imported), as_json)
        return
    if tables is not None:
        raise ArchsearchError("--tables names imported tables; add --from aiconfigurator")
    ref = resolve_target(target) if target else None
    architecture = ref.architecture if ref else None
    covered = load_space(space or (default_space(architecture) if architecture else "demo"))
    engine = not options.pop("no_engine")
    result = profile_device(ProfileRequest(gpu, architecture, covered, engine=engine, target_ref=ref, **options))
    emit(result, profile_text(result), as_json)
