"""The commands that hand on what a run found: `export`, `recipe`, `report`, `compare`,
`dashboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from archsearch.cli import options as o
from archsearch.cli.app import emit, main
from archsearch.cli.completion import RunPath
from archsearch.errors import ArchsearchError


@main.command()
@o.run_argument
@o.rank_option
@o.options(
    "",
    o.opt("--output", "Where it is written.", o.FOLDER, required=True),
    o.opt(
        "--for engines",
        "transformers, vllm, sglang, tensorrt-llm, llama.cpp (writes a GGUF) or speculators; repeat"
        " for more. Default: the first four, which load the same folder.",
        multiple=True,
        metavar="ENGINE",
    ),
    o.opt(
        "--schedule",
        "JSON with gamma by batch size (default: the candidate's own schedule.json).",
        o.FILE,
    ),
    o.opt(
        "--gamma",
        "Draft tokens a round for engines without a schedule (default: the schedule's at the run's"
        " batch size, the confirmed one, the score's).",
        o.GAMMA,
    ),
    o.opt(
        "--draft-dtype",
        "Of a GGUF: q8_0, q4_0, ... (default: as confirmed last, else float16).",
        o.DTYPE,
    ),
    o.opt("--family", "A trained head instead: eagle3, peagle or medusa.", o.FAMILY, "independent"),
    o.opt("--allow-untrained", "Export a candidate without weights: its shape only.", bool),
)
@o.json_option
def export(
    run: Path,
    rank: int,
    output: Path,
    engines: tuple[str, ...],
    family: str,
    allow_untrained: bool,
    **asked: Any,
) -> None:
    """Write a folder that engines load: config, weights, tokenizer, gamma, the command line of each
    engine, a model card.

    \b
    archsearch export runs/demo --output my-draft
    archsearch export runs/demo --output my-draft --for vllm --for llama.cpp
    archsearch export runs/demo --family eagle3 --output my-head
    archsearch export runs/demo --family eagle3 --output my-head --for llama.cpp
    """
    from archsearch.export.engines import DEFAULT_ENGINES

    if asked["draft_dtype"] is not None and "llama.cpp" not in engines:
        raise ArchsearchError("--draft-dtype is of a GGUF; add --for llama.cpp, or leave it out")
    asked["engines"] = engines or DEFAULT_ENGINES
    if family != "independent":
        if allow_untrained:
            raise ArchsearchError(
                "a head is exported with its weights; leave --allow-untrained out"
            )
        from archsearch.pipeline.export import export_family

        made = export_family(run, family, output, **asked)
    else:
        from archsearch.pipeline import export_rank

        asked["allow_untrained"] = allow_untrained
        made = export_rank(run, rank, output, **asked)
    what = f"{family} head" if family != "independent" else f"Draft of rank {rank}"
    unsure = "".join(
        f"; in {name} up to {most}, stopping below {least:g}"
        for name, (most, least) in made.get("stops", {}).items()
        if name in made["engines"]
    )
    lines = [
        f"{what} exported to {made['output']} (gamma {made['gamma']}{unsure}) for"
        f" {', '.join(made['engines'])}.",
        *([made["note"]] if "note" in made else []),
        f"Next: see {made['output']}/README.md",
    ]
    emit(made, "\n".join(lines))


LIBRARIES = ("speculators", "specforge", "trl", "archsearch")


@main.command()
@o.run_argument
@o.rank_option
@o.options(
    "",
    o.opt("--output", "Where it is written.", o.FOLDER, Path("recipe")),
    o.opt(
        "--with library",
        "The library that trains (default: the first of these that trains the family).",
        click.Choice(LIBRARIES),
    ),
    o.opt("--gpus", "Of the machine that trains.", o.COUNT, 8),
    o.opt("--prompts", "JSON lines that the target answers (default: the run's).", o.FILE),
)
@o.json_option
def recipe(**asked: Any) -> None:
    """Write a folder that trains the answer on GPUs with a library made for it: configs, first
    weights, scripts, expectations.

    \b
    archsearch recipe runs/llama --rank 2
    archsearch recipe runs/llama --rank 2 --with specforge --gpus 8 --output eagle3-recipe
    """
    from archsearch.pipeline.recipe import RecipeRequest, make_recipe

    emit(make_recipe(RecipeRequest(**asked)))


@main.command()
@o.run_argument
@o.options(
    "",
    o.opt("--open show", "Open the page in your browser.", bool),
    o.opt(
        "--figures",
        "Also write its figures (SVG, PNG, CSV) and tables (CSV) into figures/ of the run.",
        bool,
    ),
)
@o.json_option
def report(run: Path, show: bool, figures: bool) -> None:
    """Write report.html of a run again and print its summary.

    One page without other files: the answer, figures to zoom and ask, tables, how to reproduce it.

    \b
    archsearch report --open                         of the latest run
    archsearch report runs/demo
    archsearch report runs/demo --figures
    """
    from archsearch.pipeline.candidates import write_report
    from archsearch.report import summary_text, write_figures
    from archsearch.runs.run import open_run

    opened = open_run(run)
    page = write_report(opened)
    written = write_figures(opened) if figures else []
    lines = [summary_text(opened), "", f"Report: {page}"]
    if written:
        lines.append(f"Figures and tables: {len(written)} files in {written[0].parent}")
    emit({"run": run, "report": page, "figures": written}, "\n".join(lines))
    if show and click.launch(page.resolve().as_uri()) != 0:
        click.echo(
            f"No browser could be started; open {page.resolve().as_uri()} yourself.", err=True
        )


@main.command()
@click.argument("runs", nargs=-1, metavar="[RUN RUN ...]", type=RunPath())
@o.options(
    "",
    o.opt("--html", "Write it as a page as well.", o.FILE),
    o.opt(
        "--report in_report",
        "Make it a section of the first run's report as well (compare.json there).",
        bool,
    ),
)
@o.json_option
def compare(runs: tuple[Path, ...], html: Path | None, in_report: bool) -> None:
    """What differs between runs and why another draft won: each condition of the first swapped for
    the other's, term by term.

    \b
    archsearch compare                               the two latest runs
    archsearch compare runs/h100 runs/a100
    archsearch compare runs/batch-1 runs/batch-8 runs/batch-64 --json
    """
    from archsearch.pipeline.compare import compare_runs, write_into_report
    from archsearch.report import write_comparison
    from archsearch.report.compare import compare_section
    from archsearch.report.terminal.layout import section_text

    if len(runs) < 2:
        runs = (*runs, *o.latest_runs(2 - len(runs), runs))
    found = compare_runs(runs)
    if html is not None:
        write_comparison(html, found)
    if in_report:
        write_into_report(runs[0], found)
    emit(found, section_text(compare_section(found)))


@main.command()
@o.run_argument
@o.options(
    "",
    o.opt("--port", "0: any that is free.", click.IntRange(0, 65535), 8080),
    o.storage_opt("The storage the search was given, if it was given one."),
    o.opt("--open show", "Open the page in your browser.", bool),
)
def dashboard(run: Path, port: int, storage: str | None, show: bool) -> None:
    """Optuna's dashboard on the studies of a run: every trial, its history and parameters. Ctrl-C
    ends it.

    It answers this machine only (127.0.0.1). Needs: pip install "archsearch[dashboard]"

    \b
    archsearch dashboard runs/demo
    archsearch dashboard runs/demo --port 0 --open
    """
    from archsearch.pipeline.workers import serve_dashboard

    def ready(address: str) -> None:
        click.echo(f"Dashboard of {run}: {address} (Ctrl-C ends it)")
        if show:
            click.launch(address)

    serve_dashboard(run, port, ready, storage)
