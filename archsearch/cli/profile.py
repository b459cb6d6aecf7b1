"""`archsearch profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from archsearch.cli import options as o
from archsearch.cli.app import main
from archsearch.cli.output import emit
from archsearch.errors import ArchsearchError


@main.command()
@o.options(
    "What is measured",
    o.opt(
        "--gpu", "Device to measure: cpu, or a GPU that must be the one in this machine.", o.DEVICE
    ),
    o.opt("--target", f"Also what this target needs. {o.TARGET_WORDS}", o.TARGET),
    o.opt(
        "--space",
        "Search space whose shapes to cover (default: demo for small targets, else default).",
        o.SPACE,
    ),
    o.opt(
        "--dtype dtypes",
        "bfloat16, float32, ... (default: both, the device's native one first; llama.cpp: float16"
        " and q8_0).",
        multiple=True,
        metavar="D",
    ),
    o.opt(
        "--mode modes",
        "eager as transformers, graph (CUDA graphs) as vLLM; default: both on a GPU, eager on a"
        " CPU.",
        o.MODE,
        multiple=True,
    ),
    o.opt("--tensor-parallel", "Also measure the shards of a target over N GPUs.", o.COUNT, 1),
    o.opt(
        "--threads",
        "CPU threads (default: all this process may use). Part of the profile's identity.",
        int,
    ),
    o.opt(
        "--host",
        "Only measure how fast this machine's host launches kernels, for --host of estimate and"
        " search (a minute at most).",
        bool,
    ),
)
@o.options(
    "How long, and checks",
    o.opt("--budget budget_s", "Time for the sweep: 90s, 5m, 1h.", o.TIME, "5m"),
    o.opt(
        "--quick", "With --engine llama.cpp: about a minute, one precision and two drafts.", bool
    ),
    o.opt(
        "--check",
        "Then measure N whole drafts the profile has not seen, predicted beside measured.",
        int,
        0,
    ),
    o.opt(
        "--allow-busy",
        "Measure a GPU although another process uses it; the numbers may be wrong.",
        bool,
    ),
    o.seed_opt,
)
@o.options(
    "The engine",
    o.opt(
        "--engine engine_name",
        "Engine that will serve: vllm, openvino, llama.cpp. Its own passes are measured in it, with"
        " --target.",
        o.RUN_ENGINE,
        "transformers",
    ),
    (["--engine-python"], o.python_opt[1]),
    o.opt("--no-engine", "Do not measure what the engine adds to each round.", bool),
)
@o.options(
    "Import instead of measuring",
    o.opt(
        "--from source",
        "A GPU's measured kernel tables: no GPU needed.",
        click.Choice(["aiconfigurator"]),
    ),
    o.opt(
        "--tables", "With --from: the tables' folder (default: the installed package).", o.FOLDER
    ),
    o.opt(
        "--framework",
        "With --from: whose kernels.",
        click.Choice(["vllm", "trtllm", "sglang"]),
        "vllm",
    ),
)
@o.options(
    "", o.opt("--output", "Folder (default: profiles/<device>/<stack>).", o.FOLDER), o.json_opt
)
def profile(
    gpu: str | None,
    host: bool,
    target: str | None,
    space: str | None,
    source: str | None,
    tables: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure ops, decoder layers and whole models on this device into a profile that searches
    read.

    Continues where an earlier run stopped; more budget measures more. Every repeat is bracketed by
    a reference probe, so a busy machine is corrected for, and said to be busy.

    \b
    archsearch profile --gpu cpu --target smollm2-135m
    archsearch profile --gpu cpu --target smollm2-135m --budget 2m --check 20
    archsearch profile --gpu cpu --target smollm2-135m --engine vllm
    archsearch profile --gpu cpu --target smollm2-135m --engine llama.cpp --quick
    archsearch profile --gpu h200 --target llama-3.1-8b --check 20
    archsearch profile --gpu a100 --from aiconfigurator
    archsearch profile --host
    """
    from archsearch.models.targets import resolve_target
    from archsearch.pipeline import ProfileRequest, default_space, import_tables, profile_device
    from archsearch.report.terminal.profile import import_text, profile_text
    from archsearch.search.space import load_space

    if host:
        from archsearch.pipeline.profile import profile_host

        speed = profile_host(min(60.0, options["budget_s"]))
        emit(speed, speed["words"], as_json)
        return
    if gpu is None:
        raise ArchsearchError("name the device to measure: --gpu cpu, or the GPU of this machine")
    framework = options.pop("framework")
    if source is not None:
        imported = import_tables(
            gpu,
            framework=framework,
            tables=tables,
            dtypes=options["dtypes"],
            output=options["output"],
        )
        emit(imported, import_text(imported), as_json)
        return
    if tables is not None:
        raise ArchsearchError("--tables names imported tables; add --from aiconfigurator")
    ref = resolve_target(target) if target else None
    architecture = ref.architecture if ref else None
    covered = load_space(space or (default_space(architecture) if architecture else "demo"))
    engine = not options.pop("no_engine")
    result = profile_device(
        ProfileRequest(gpu, architecture, covered, engine=engine, target_ref=ref, **options)
    )
    emit(result, profile_text(result), as_json)
