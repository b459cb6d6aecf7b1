"""Options, their types and what commands share of them. `opt` describes one, `options` gives a
command several under one heading of its --help."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from archsearch.acceptance.estimator import DOMAINS, TRAININGS
from archsearch.architecture.catalogue import stems
from archsearch.cli import completion
from archsearch.engine_facts import ENGINES, engine_facts, runnable_engine
from archsearch.engine_rounds import known_engines
from archsearch.errors import ArchsearchError
from archsearch.paths import STORAGE_VARIABLE
from archsearch.workload import (
    MEMORY_FRACTION,
    OBJECTIVES,
    LoadRequest,
    WorkloadRequest,
    dtype_name,
    served_name,
)

Function = Callable[..., None]
Decorator = Callable[[Function], Function]
Spec = tuple[list[str], dict[str, object]]


class Option(click.Option):
    """An option that knows its heading in --help."""

    def __init__(self, *args: Any, heading: str = "", **more: Any) -> None:
        super().__init__(*args, **more)
        self.heading = heading


REPEATED: Final = ("engine", "draft", "gamma")
"""Options that some commands take several times and others once."""


class Command(click.Command):
    """A command whose --help lists its options under their headings, and which takes none of
    REPEATED twice that it takes once."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises UsageError where the last of two values would silently count."""
        *_, given = self.make_parser(ctx).parse_args(list(args))
        for one in () if ctx.resilient_parsing else given:  # a shell completes it
            if one.name in REPEATED and given.count(one) > 1 and not one.multiple:
                raise click.UsageError(f"{one.opts[0]} takes one value; it is given twice", ctx)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One list a heading, in the order of the options."""
        lists: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                lists.setdefault(getattr(parameter, "heading", "") or "Options", []).append(record)
        for heading, records in lists.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def opt(
    flags: str, words: str, kind: object = None, default: object = None, **more: object
) -> Spec:
    """An option: its flags and, where it differs, its name in Python; a bool `kind` is a switch."""
    if kind is bool:
        more["is_flag"] = True
    else:
        more["type"] = kind
    if default is not None:  # to click, None is a default too
        more |= {"default": default, "show_default": True}
    return flags.split(), {"help": words, **more}


def storage_opt(words: str, **more: object) -> Spec:
    """`--storage`, or ARCHSEARCH_STORAGE: a password on a command line is seen by everybody."""
    words += " A URL with a password: in ARCHSEARCH_STORAGE."
    return opt("--storage", words, URL, envvar=STORAGE_VARIABLE, **more)


def options(heading: str, *made: Spec) -> Decorator:
    """A command gets these options, under `heading`."""

    def decorate(function: Function) -> Function:
        for flags, more in reversed(made):
            function = click.option(*flags, cls=Option, heading=heading, **more)(function)
        return function

    return decorate


def taken(kind: type, values: dict[str, object]) -> dict[str, Any]:
    """The options that are fields of the dataclass `kind`, out of `values`."""
    return {each.name: values.pop(each.name) for each in fields(kind) if each.name in values}


def _folded(function: Function, into: str, kind: type) -> Function:
    """The options that are fields of the dataclass `kind` come as one argument, named `into`."""

    @functools.wraps(function)
    def command(**values: object) -> None:
        function(**{into: kind(**taken(kind, values))}, **values)

    return command


class Value(click.ParamType):
    """Text that `read` checks and turns into a value. `known`: what a shell offers, besides files
    where `paths`."""

    def __init__(
        self,
        name: str,
        read: Callable[[str], object] = str,
        known: completion.Names | None = None,
        paths: bool = False,
    ) -> None:
        self.name, self._read, self._known, self._paths = name, read, known, paths

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """`read` of what was typed; a default that is a value already stays."""
        return self._read(value) if isinstance(value, str) else value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """The known names that begin so."""
        return completion.items(self._known() if self._known else (), self._paths, incomplete)


def seconds(text: str) -> float:
    """`90`, `90s`, `10m`, `1.5h` -> seconds."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        found = float(number) * units[unit]
    except ValueError:
        found = -1.0
    if not 0 < found < math.inf:
        raise click.BadParameter(f"{text!r} is no duration; write 90s, 10m or 1.5h")
    return found


def training_time(text: str) -> float:
    """`30m`, `24h` -> device-seconds. A bare number is refused: `--max-training`, which this
    replaces, took exaFLOP."""
    words = f"{text!r} is no training budget; write device-hours as 24h, minutes of a CPU as 30m"
    if text[-1:] not in ("s", "m", "h"):
        raise click.BadParameter(words)
    try:
        return seconds(text)
    except click.BadParameter:
        raise click.BadParameter(words) from None


def alpha_choice(text: str) -> str:
    """A row of `acceptance.registry.CHOICES`, or a number between 0 and 1."""
    from archsearch.acceptance.registry import CHOICES

    if text == "supernet":
        raise click.BadParameter(
            "the supernet was removed: it ranked shapes worse than short trainings of the same"
            " cost; use distilled"
        )
    if text in CHOICES:
        if CHOICES[text].trains and click.get_current_context().info_name != "search":
            raise click.BadParameter(
                f"{text} trains drafts, which only search does; use prior or a number between 0"
                " and 1"
            )
        return text
    try:
        if 0.0 <= float(text) <= 1.0:
            return text
    except ValueError:
        pass
    raise click.BadParameter(
        f"{text!r} is neither {', '.join(CHOICES)} nor a number between 0 and 1"
    )


def priced_engine(name: str) -> str:
    """The name of an engine whose rounds can be priced."""
    known = [each for each, row in ENGINES.items() if row.make or each in known_engines()]
    if name not in known:
        raise ArchsearchError(f"unknown engine {name!r}; choose one of {', '.join(known)}")
    return engine_facts(name).name


def interpreter(text: str) -> Path:
    """An absolute path, links kept: a bare `python` would otherwise be looked for on the PATH."""
    return Path(os.path.abspath(os.path.expanduser(text)))


def named(name: str, kind: click.ParamType) -> click.ParamType:
    """The type under the name that --help shows for its value."""
    kind.name = name
    return kind


class PromptFile(click.Path):
    """A file of prompts, or the one of a data set of the hub, named owner/name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from archsearch.text.prompt_files import dataset_file, dataset_name

        path = super().convert(value, param, ctx)
        named = Path(os.fsdecode(path))
        return dataset_file(str(named)) if dataset_name(named) else path


class Number(click.FloatRange):
    """A range of floats that is without NaN, which click's lets through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value} is not a number.", param, ctx)
        return number


class Count(click.IntRange):
    """Whole numbers from `min` on; more than MOST is a slip of the hand."""

    MOST: Final = 10**9

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number > self.MOST:
            self.fail(f"{value} is more than {self.MOST:,}.", param, ctx)
        return number


COUNT: Final = named("n", Count(min=1))
WHOLE: Final = named("n", Count(min=0))
GAMMA: Final = named("n", click.IntRange(min=1, max=16))
LIMIT: Final = named("f", Number(min=0.0, min_open=True, max=1e18))
FILE: Final = named("file", click.Path(path_type=Path, dir_okay=False))
PROMPTS: Final = named("file", PromptFile(path_type=Path, dir_okay=False))
FOLDER: Final = named("dir", click.Path(path_type=Path, file_okay=False))
URL: Final = Value("url")
TIME: Final = Value("time", seconds)
TARGET: Final = Value("t", known=stems, paths=True)
DRAFT: Final = Value("d", known=completion.drafts, paths=True)
DEVICE: Final = Value("name", known=completion.devices)
SPACE: Final = Value("s", known=completion.spaces, paths=True)
FAMILY: Final = Value("f", known=completion.families)
PRICED: Final = Value("e", priced_engine, ENGINES.keys)
RUN_ENGINE: Final = Value("e", lambda name: runnable_engine(name).name, ENGINES.keys)
DTYPE: Final = Value("d", dtype_name)
DRAFT_DTYPES: Final = Value(
    "d[,d]", lambda text: ",".join(dict.fromkeys(map(served_name, text.split(","))))
)
SERVED: Final = Value("d", served_name)
MODE: Final = click.Choice(["eager", "graph"])

TARGET_WORDS: Final = "Catalogue name, folder with config.json (and weights), GGUF file, or hub id."
target_opt = opt("--target", TARGET_WORDS, TARGET, required=True)
drafts_opt = opt(
    "--draft drafts",
    "A draft (catalogue name, folder, hub id), a family (eagle3, ngram, ...), or a head: its"
    " folder, eagle3:HUB_ID; repeat.",
    DRAFT,
    required=True,
    multiple=True,
)
gamma_opt = opt(
    "--gamma",
    "Draft tokens a round (default: the best of 1 to 16).",
    named("n", click.IntRange(1, 128)),
)


def prompts_opt(default: str) -> Spec:
    """--prompts, with what is run without them."""
    words = (
        "Your prompts: JSON lines, a JSON array, CSV or Parquet of prompt, OpenAI messages or"
        " ShareGPT conversations, with an optional category; or a data set of the hub, owner/name"
    )
    return opt("--prompts", f"{words} (default: {default}).", PROMPTS)


gpu_opt = opt(
    "--gpu",
    "cpu, or a device of `archsearch list devices`. No GPU is needed, only its profile.",
    DEVICE,
)
profile_opt = opt("--profile", "A profile folder, instead of --gpu.", FOLDER)
mode_opt = opt(
    "--mode",
    "graph: CUDA graphs, as serving engines run on GPUs; eager: as transformers runs (default: the"
    " engine's).",
    MODE,
)
domain_opt = opt(
    "--domain",
    "Which text the prior is for; narrow: one kind of task, mixed: chat, code and documents"
    " together (default: chat; narrow where a search is given prompts or trains).",
    click.Choice(DOMAINS),
)
seed_opt = opt("--seed", "Of what is drawn at random.", int, 0)
run_opt = opt("--run", "Run folder; continues what it holds.", FOLDER)
json_opt = opt(
    "--json as_json",
    "Last line of stdout: one JSON object. Progress goes to stderr.",
    bool,
    expose_value=False,
    callback=lambda context, _, value: context.meta.update(json=value),
)
explain_opt = opt(
    "--explain",
    "Behind the answer all that it rests on: latency, prior, rounds, every rank and why.",
    bool,
)
json_option = options("", json_opt)

training_opts = (
    opt(
        "--training",
        "How the draft was trained: for this target, shared: through the same vendor's training as"
        " the target, other: neither (default: as the catalogue says; target for an unknown"
        " draft).",
        click.Choice(TRAININGS),
    ),
    opt(
        "--trained-tokens",
        "Tokens of the target's text that the draft or head was trained on, repeats included"
        " (3e8).",
        LIMIT,
    ),
    opt(
        "--tau",
        "Instead of --alpha: published tokens a round at --gamma, the target's own included, over"
        " all rounds.",
        named("f", Number(min=1)),
    ),
)
budget_opt = opt(
    "--training-budget --max-training training_budget_s",
    "Device-hours of the searched device for text, teacher and training of a drafter: what every"
    " alpha of one that is to be trained assumes (default: 24h; on a CPU 30m, or the"
    " --time-budget).",
    Value("time", training_time),
)
python_opt = opt(
    "--engine-python python",
    "Interpreter of the engine's own environment (default: the one `archsearch engine install`"
    " made).",
    Value("path", interpreter),
)
rank_opt = opt("--rank", "Which candidate of the run.", COUNT, 1)
rank_option = options("", rank_opt)

_WHO: Final = "vllm, transformers, llama.cpp, openvino (CPU), sglang, tensorrt-llm (GPU)"
_SERVES: Final = f"Who serves (default: vllm on a GPU, transformers on a CPU): {_WHO}."
_VERSION: Final = (
    "Its version, on a GPU (default: the installed one, else the newest known): how drafts are"
    " launched changes."
)


def common(several_engines: bool, *acceptance: Spec, one_batch: bool = True) -> Decorator:
    """Options of every command that scores: which latency and workload, as `asked`, and acceptance,
    with more options of that. Several engines come as `engines` and `engine_versions`; without
    `one_batch` a load says how many requests run at once."""
    if several_engines:
        engine = (
            opt("--engine engines", f"{_SERVES} Repeat to compare.", PRICED, multiple=True),
            opt(
                "--engine-version engine_versions",
                f"{_VERSION} Of several: vllm=0.16.0.",
                Value("v"),
                multiple=True,
            ),
        )
    else:
        engine = (opt("--engine", _SERVES, PRICED), opt("--engine-version", _VERSION, Value("v")))
    device = options(
        "Device and engine",
        gpu_opt,
        profile_opt,
        opt(
            "--tensor-parallel",
            "Devices that share the target (default: the fewest that hold it), and the draft where"
            " the engine shards it.",
            COUNT,
        ),
        opt(
            "--draft-tensor-parallel",
            "Devices that share the draft: 1, or as many as the target (default: as the engine does"
            " it).",
            COUNT,
        ),
        opt(
            "--memory-fraction",
            "Of each device's memory, for weights, caches and activations.",
            named("f", Number(min=0.0, max=1.0, min_open=True)),
            MEMORY_FRACTION,
        ),
        opt(
            "--dtype",
            "Default: by the profile, the one of 16 or 32 bits in which the target decodes fastest;"
            " of equals, verifies cheapest.",
            SERVED,
        ),
        opt(
            "--draft-dtype",
            "Of drafts and heads; of several (q8_0,float16) `search` takes the fastest; `estimate`"
            " takes int4, nvfp4, ... of a draft's weights too (default: 16 bits on a GPU beside"
            " fewer, as engines keep them, or as their config says; else the target's).",
            DRAFT_DTYPES,
        ),
        mode_opt,
        *engine,
        opt(
            "--engine-option engine_options",
            "A switch of the engine that matters to a round: VLLM_USE_V2_MODEL_RUNNER,"
            " async_scheduling, enforce_eager, kv_cache_dtype, max_cudagraph_capture_size, ...",
            Value("name=value"),
            multiple=True,
        ),
        opt(
            "--host",
            "How fast the engine's host launches kernels: fast, usual, slow (a cloud notebook), or"
            " the factor that `archsearch profile --host` prints (default: not known, a wide"
            " band).",
            Value("speed"),
        ),
    )
    batch = (
        opt("--batch-size", "Sequences in one pass.", COUNT, 1),
        opt("--context context_len", "Tokens in the KV cache.", WHOLE, 256),
    )
    load = options(
        "Load",
        *(batch if one_batch else ()),
        opt(
            "--temperature",
            "0: greedy; above: sampling.",
            named("f", click.types.FloatParamType()),
            0.0,
        ),
    )
    prior = options(
        "Acceptance",
        opt(
            "--alpha",
            "Acceptance: prior, or a number; search also takes distilled (trains drafts).",
            Value("a", alpha_choice),
            "prior",
        ),
        (domain_opt[0], domain_opt[1] | ({"default": "chat"} if several_engines else {})),
        *acceptance,
        opt(
            "--routing-skew",
            "Of a mixture of experts: experts are chosen in proportion to rank^-F; 0: evenly"
            " (default: 0.7, which servers of gpt-oss-120b imply).",
            named("f", Number(min=0.0)),
        ),
    )

    def decorate(function: Function) -> Function:
        return device(load(prior(_folded(function, "asked", WorkloadRequest))))

    return decorate


_LOAD: Final = (
    opt(
        "--workload",
        "YAML: a mix of kinds of requests with weights, lengths, concurrency or rate, limits and"
        " objective (docs/serving.md).",
        FILE,
    ),
    opt(
        "--objective",
        "What is to be made best over the load (default: the workload's, else speedup).",
        click.Choice(OBJECTIVES),
    ),
    opt(
        "--max-tpot max_tpot_ms",
        "Limit: milliseconds per output token, in every part of the load.",
        LIMIT,
    ),
    opt(
        "--max-ttft max_ttft_ms",
        "Limit: mean milliseconds to the first token, in every part of the load.",
        LIMIT,
    ),
    opt(
        "--max-memory max_memory_gib",
        "Limit: GiB of the draft's weights and caches, over all devices.",
        LIMIT,
    ),
    opt("--max-parameters", "Limit: parameters of the draft.", LIMIT),
)


def load_options(function: Function) -> Function:
    """What is asked of a load, as one argument `load`: a mix from a file, the objective, limits."""
    return options("Load", *_LOAD)(_folded(function, "load", LoadRequest))


def as_json() -> bool:
    """Whether the running command was given --json, which `emit` asks."""
    return bool(click.get_current_context().meta["json"])


def set_by_user(name: str) -> bool:
    """Whether an option of the running command was given, not left at its default."""
    source = click.get_current_context().get_parameter_source(name)
    return source not in (None, ParameterSource.DEFAULT)


def check_said_once(file: Path | None, **more: str) -> None:
    """Raise ArchsearchError where a workload or trace was given, and an option that says the same
    of one kind of request; `more`: such options besides --batch-size and --context, by their names
    in Python."""
    given = {"batch_size": "--batch-size", "context_len": "--context", **more}
    if file is not None and (twice := [flag for name, flag in given.items() if set_by_user(name)]):
        raise ArchsearchError(
            f"{twice[0]} is of one kind of request, and {file} says it of its own; leave one out"
        )


def run_argument(function: Function) -> Function:
    """Adds the argument RUN, a run folder: the latest in runs/ where it is left out."""

    def found(context: click.Context, _: click.Parameter, value: Path | None) -> Path | None:
        return latest_runs(1)[0] if value is None and not context.resilient_parsing else value

    run = click.argument("run", required=False, type=completion.RunPath(), callback=found)
    return run(function)


def latest_runs(count: int, besides: tuple[Path, ...] = ()) -> list[Path]:
    """The latest runs in runs/ other than `besides`, named on stderr: which they are must be seen.
    Raises ArchsearchError where there are fewer."""
    from archsearch.runs.run import list_runs

    taken = {path.resolve() for path in besides}
    found = [run.path for run in list_runs() if run.path.resolve() not in taken][:count]
    if len(found) < count:
        holds = "only one run" if found else "no other run" if besides else "no run"
        where = Path("runs").resolve()
        raise ArchsearchError(
            f"RUN was left out, and {where} holds {holds}; name one, or make one: archsearch search"
        )
    click.echo(f"Latest run: {', '.join(map(str, found))}", err=True)
    return found
