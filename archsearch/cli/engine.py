"""`archsearch engine`: environments of the engines that bring their own torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from archsearch.cli.app import main
from archsearch.cli.options import Value, json_option, opt, options
from archsearch.cli.output import emit
from archsearch.engine_facts import engines_that, has_recipe
from archsearch.records import as_data

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
@options(
    "",
    opt(
        "--python",
        "Interpreter to make the environment with. Default: the one that runs archsearch.",
        Value("path", Path),
    ),
    opt(
        "--device",
        "Which build. Default: gpu where NVML sees one, else cpu.",
        click.Choice(["cpu", "gpu"]),
    ),
)
@json_option
def install_command(
    engine: str, python: Path | None, device: Literal["cpu", "gpu"] | None, as_json: bool
) -> None:
    """Make the environment of an engine: pinned, tested versions, checked by importing it.

    \b
    archsearch engine install vllm
    archsearch engine install openvino
    archsearch engine install vllm --device cpu --python /usr/bin/python3.12

    What is there already is kept. A stopped install is made anew; what pip downloaded is in pip's
    cache.
    """
    from archsearch.engines.environments.environment import install
    from archsearch.progress import ProgressLine, human_time

    with ProgressLine(f"install {engine}", quiet=as_json) as progress:
        done = install(engine, python=python, device=device, progress=progress)
    text = (
        f"{engine} {done.version} ({done.device}) is ready: {done.python}\n"
        f"{done.bytes / 1e9:.1f} GB, installed and checked in {human_time(done.seconds)}"
    )
    emit(as_data(done), text, as_json)


@engine_group.command("list")
@json_option
def list_engines(as_json: bool) -> None:
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
            row["engine"],
            "yes" if row["installed"] else "no",
            row["version"] or "-",
            f"{row['bytes'] / 1e9:.1f} GB" if row["bytes"] else "-",
            row["where"] or "-",
            row["note"],
        )
        for row in rows
    ]
    emit({"engines": rows}, table(cells, header), as_json)


@engine_group.command("check")
@engine_argument
@options(
    "",
    opt(
        "--engine-python",
        "Check this interpreter instead of the installed one.",
        Value("path", Path),
    ),
)
@json_option
def check_command(engine: str, engine_python: Path | None, as_json: bool) -> None:
    """Import an engine in its own interpreter and print its version. A version that is not the
    tested one is a warning.

    \b
    archsearch engine check vllm
    archsearch engine check vllm --engine-python /opt/vllm/bin/python
    """
    from archsearch.engines.environments.environment import check

    facts: dict[str, Any] = check(engine, engine_python)
    if facts["warning"]:
        click.echo(f"Warning: {facts['warning']}", err=True)
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    text = (
        f"{engine} {facts['version']} works: {facts['python']} (Python {facts['python_version']})\n"
        f"{packages}; imported in {facts['seconds']:.1f} s"
    )
    emit(facts, text, as_json)


@engine_group.command("remove")
@engine_argument
@json_option
def remove_command(engine: str, as_json: bool) -> None:
    """Delete the environment that `engine install` made.

    \b
    archsearch engine remove vllm
    """
    from archsearch.engines.environments.environment import remove

    freed = remove(engine)
    emit(
        {"engine": engine, "freed_bytes": freed},
        f"{engine} removed, {freed / 1e9:.1f} GB freed",
        as_json,
    )
