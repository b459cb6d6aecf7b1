"""Options and parsers that commands share."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from archsearch.acceptance.estimator import DOMAINS, TRAININGS
from archsearch.errors import ArchsearchError
from archsearch.workload import MEMORY_FRACTION, OBJECTIVES, LoadRequest, WorkloadRequest, dtype_name


def duration(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    """`90`, `90s`, `10m`, `1.5h` -> seconds."""
    if value is None:
        return None
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (value[:-1], value[-1]) if value[-1:] in units else (value, "s")
    try:
        seconds = float(number) * units[unit]
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise click.BadParameter(f"{value!r} is no duration; write 90s, 10m or 1.5h")
    return seconds


def alpha_choice(context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """A row of `acceptance.registry.CHOICES`, or a number between 0 and 1."""
    from archsearch.acceptance.registry import CHOICES

    if value in CHOICES:
        if CHOICES[value].trains and context.info_name != "search":
            raise click.BadParameter(f"{value} trains drafts, which only search does; use prior or a number between 0 and 1")
        return value
    try:
        if 0.0 <= float(value) <= 1.0:
            return value
    except ValueError:
        pass
    raise click.BadParameter(f"{value!r} is neither {', '.join(CHOICES)} nor a number between 0 and 1")


def dtype_choice(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """A dtype's canonical name; `bf16` and other aliases are accepted."""
    return None if value is None else dtype_name(value)


def engine_choice(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """The name of an engine that archsearch runs."""
    from archsearch.engine_facts import runnable_engine

    return runnable_engine(value).name


def optional_engine(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """The name of an engine that archsearch runs, or None."""
    return None if value is None else engine_choice(context, parameter, value)


def priced_engine(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """The name of an engine whose rounds can be priced, or None."""
    from archsearch.engine_facts import ENGINES, engine_facts
    from archsearch.engine_rounds import known_engines

    if value is None:
        return None
    known = [name for name, row in ENGINES.items() if row.make or name in known_engines()]
    if value not in known:
        raise ArchsearchError(f"unknown engine {value!r}; choose one of {', '.join(known)}")
    return engine_facts(value).name


def priced_engines(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Names of engines whose rounds can be priced."""
    return tuple(str(priced_engine(context, parameter, value)) for value in values)


def absolute(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path | None:
    """An absolute path, links kept: a bare `python` would otherwise be looked for on the PATH when it is run."""
    return None if value is None else Path(os.path.abspath(value.expanduser()))


def engine_python_option(name: str = "engine_python") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """--engine-python, handed to the command as `name`."""
    return click.option(
        "--engine-python",
        name,
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="PATH",
        callback=absolute,
        help="Interpreter of the engine's own environment (default: the one `archsearch engine install` made).",
    )


training_option = click.option(
    "--training",
    type=click.Choice(TRAININGS),
    help="How the draft was trained: for this target, shared: through the same vendor's training as the target, other: neither "
    "(default: as the catalogue says; target for an unknown draft).",
)


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --json."""
    return click.option("--json", "as_json", is_flag=True, help="Last line of stdout: one JSON object. Progress goes to stderr.")(
        function
    )


def folded(into: str, kind: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A command gets the options that are fields of the dataclass `kind` as one argument, named `into`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(**values: Any) -> Any:
            taken = {field.name: values.pop(field.name) for field in fields(kind) if field.name in values}
            return function(**{into: kind(**taken)}, **values)

        return command

    return decorate


def engine_options(several: bool) -> list[Any]:
    """Which engine serves, of which version and with which switches; with `several` as `engines` and `engine_versions`."""
    who = "vllm, transformers, openvino (CPU), sglang, tensorrt-llm, llama.cpp (GPU)"
    which = "Its version, on a GPU (default: the installed one, else the newest known): how drafts are launched changes."
    if several:
        engine = click.option(
            "--engine", "engines", metavar="E", multiple=True, callback=priced_engines,
            help=f"Who serves (default: vllm on a GPU, transformers on a CPU); repeat to compare: {who}.",
        )  # fmt: skip
        version = click.option(
            "--engine-version", "engine_versions", metavar="V", multiple=True, help=f"{which} Of several engines: vllm=0.16.0."
        )
    else:
        engine = click.option(
            "--engine", metavar="E", callback=priced_engine,
            help=f"Who serves (default: vllm on a GPU, transformers on a CPU): {who}.",
        )  # fmt: skip
        version = click.option("--engine-version", metavar="V", help=which)
    switch = click.option(
        "--engine-option",
        "engine_options",
        multiple=True,
        metavar="NAME=VALUE",
        help="A switch of the engine that matters to a round: VLLM_USE_V2_MODEL_RUNNER, async_scheduling, enforce_eager, ...",
    )
    return [engine, version, switch]


def common(function: Callable[..., Any], several_engines: bool = False) -> Callable[..., Any]:
    """Options of every command that scores: which latency and workload (`asked`), and `alpha` and `domain`."""
    options = [
        click.option(
            "--gpu", metavar="NAME", help="cpu, or a device of `archsearch list devices`. No GPU is needed, only its profile."
        ),
        click.option(
            "--profile",
            type=click.Path(path_type=Path, file_okay=False),
            metavar="DIR",
            help="A profile folder, instead of --gpu.",
        ),
        click.option("--batch-size", default=1, show_default=True, type=click.IntRange(min=1), metavar="N"),
        click.option(
            "--context",
            "context_len",
            default=256,
            show_default=True,
            type=click.IntRange(min=0),
            metavar="N",
            help="Tokens in the KV cache.",
        ),
        click.option("--temperature", default=0.0, show_default=True, metavar="F"),
        click.option(
            "--tensor-parallel",
            type=click.IntRange(min=1),
            metavar="N",
            help="Devices that share the target (default: the fewest that hold it), and the draft where the engine shards it.",
        ),
        click.option(
            "--draft-tensor-parallel",
            type=click.IntRange(min=1),
            metavar="N",
            help="Devices that share the draft: 1, or as many as the target (default: as the engine does it).",
        ),
        click.option(
            "--memory-fraction",
            type=click.FloatRange(min=0.0, max=1.0, min_open=True),
            default=MEMORY_FRACTION,
            show_default=True,
            metavar="F",
            help="Of each device's memory, for weights, caches and activations.",
        ),
        click.option(
            "--dtype",
            metavar="D",
            callback=dtype_choice,
            help="Default: by the profile, the one in which the target decodes fastest; of equals, verifies cheapest.",
        ),
        click.option(
            "--mode",
            type=click.Choice(["eager", "graph"]),
            help="graph: CUDA graphs, as serving engines run on GPUs; eager: as transformers runs (default: the engine's).",
        ),
        click.option(
            "--alpha",
            default="prior",
            show_default=True,
            callback=alpha_choice,
            metavar="A",
            help="Acceptance: prior, or a number; search also takes distilled (trains) and supernet (trains one draft for all "
            "shapes first).",
        ),
        click.option(
            "--domain",
            type=click.Choice(DOMAINS),
            help="Which text the prior is for; narrow: one kind of task, mixed: chat, code and documents together "
            "(default: chat; narrow where a search is given prompts or trains).",
        ),
        click.option(
            "--routing-skew",
            type=click.FloatRange(min=0.0),
            metavar="F",
            help="Of a mixture of experts: experts are chosen in proportion to rank^-F; 0: evenly (default: 0.7, which "
            "servers of gpt-oss-120b imply).",
        ),
        *engine_options(several_engines),
    ]
    function = folded("asked", WorkloadRequest)(function)
    for option in reversed(options):
        function = option(function)
    return function


def load_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """What is asked of a load, as one argument `load`: a mix from a file, the objective, limits."""
    options = [
        click.option(
            "--workload",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="YAML: a mix of kinds of requests with weights, lengths, concurrency or rate, limits and objective "
            "(docs/serving.md).",
        ),
        click.option(
            "--objective",
            type=click.Choice(OBJECTIVES),
            help="What is to be made best over the load (default: the workload's, else speedup).",
        ),
        limit_option("--max-tpot", "max_tpot_ms", "MS", "Milliseconds per output token, in every part of the load."),
        limit_option("--max-ttft", "max_ttft_ms", "MS", "Milliseconds to the first token, in every part of the load."),
        limit_option("--max-memory", "max_memory_gib", "GIB", "GiB of the draft's weights and caches, over all devices."),
        limit_option("--max-parameters", "max_parameters", "N", "Parameters of the draft."),
        limit_option(
            "--max-training", "max_training_exaflop", "EXAFLOP", "What training the draft takes, 6 a parameter and token."
        ),
    ]
    function = folded("load", LoadRequest)(function)
    for option in reversed(options):
        function = option(function)
    return function


def set_by_user(name: str) -> bool:
    """Whether an option of the running command was given, not left at its default."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def check_said_once(file: Path | None, **more: str) -> None:
    """Raise ArchsearchError where a workload or trace was given, and an option that says the same of one kind of request; `more`:
    such options besides --batch-size and --context, by their names in Python."""
    given = {"batch_size": "--batch-size", "context_len": "--context", **more}
    if file is not None and (twice := [option for name, option in given.items() if set_by_user(name)]):
        raise ArchsearchError(f"{twice[0]} is of one kind of request, and {file} says it of its own; leave one out")


def limit_option(flag: str, name: str, unit: str, words: str) -> Any:
    """A limit that a draft must keep."""
    return click.option(flag, name, type=click.FloatRange(min=0.0, min_open=True), metavar=unit, help=f"Limit: {words}")


def run_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the argument RUN, a run folder."""
    return click.argument("run", type=click.Path(path_type=Path, file_okay=False))(function)


rank_option = click.option("--rank", default=1, show_default=True, type=click.IntRange(min=1), help="Which candidate of the run.")
