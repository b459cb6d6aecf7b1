"""`archsearch estimate`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from archsearch.cli.app import main
from archsearch.cli.options import check_said_once, common, json_option, load_options, training_option
from archsearch.cli.output import emit
from archsearch.errors import ArchsearchError
from archsearch.workload import LoadRequest

if TYPE_CHECKING:
    from archsearch.pipeline.estimate import EstimateRequest


@main.command()
@click.option("--target", required=True, metavar="T", help="Catalogue name, folder with config.json, or hub id.")
@click.option(
    "--draft",
    "drafts",
    required=True,
    multiple=True,
    metavar="D",
    help="A draft (catalogue name, folder, hub id), a family (eagle3, ngram, ...), or a head: its folder, eagle3:HUB_ID; repeat.",
)
@click.option(
    "--gamma", type=click.IntRange(min=1), metavar="N", help="Draft tokens per verification (default: the best of 1 to 16)."
)
@click.option(
    "--sweep",
    type=click.Choice(["batch", "context", "gamma", "alpha"]),
    help="A curve over this instead of one workload: best gamma, speed-up, time per token, throughput, where it stops paying.",
)
@click.option("--range", "span", metavar="LOW:HIGH[:POINTS]", help="Of --sweep (default: 1:256, 128:32768, 1:16, 0.05:1).")
@click.option(
    "--csv", "csv_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="All points of --sweep, as CSV."
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The picture of --sweep, all drafts in one: .svg, .png or .pdf.",
)
@load_options
@training_option
@partial(common, several_engines=True)
@json_option
def estimate(
    as_json: bool,
    load: LoadRequest,
    sweep: str | None,
    span: str | None,
    csv_file: Path | None,
    plot: Path | None,
    **options: Any,
) -> None:
    """Price drafts that exist, of any family: does this draft pay, at which gamma, from which acceptance on, and in which engine.

    \b
    archsearch estimate --target llama-65b --draft wide-796m --draft sheared-llama-1.3b --gpu a100 --tensor-parallel 4
    archsearch estimate --target qwen3-32b --draft qwen3-1.7b --gpu h100 --engine vllm --engine sglang --alpha 0.8
    archsearch estimate --target qwen3-32b --draft qwen3-1.7b --gpu h100 --engine-version vllm=0.16.0 --engine-version vllm=0.30.0
    archsearch estimate --target llama-3.1-8b --draft eagle3 --draft llama-3.2-1b --draft ngram --gpu h100 --engine vllm
    archsearch estimate --target smollm2-135m --draft ./my-draft --gpu cpu --alpha 0.7
    archsearch estimate --target llama-3.1-70b --draft llama-3.2-1b --draft eagle3 --gpu h100 --sweep batch --plot batch.svg
    archsearch estimate --target llama-3.1-70b --draft llama-3.2-1b --gpu h100 --workload mix.yaml --objective throughput
    """
    from archsearch.pipeline.estimate import EstimateRequest, estimate_drafts
    from archsearch.pipeline.mixes import asked_mix
    from archsearch.report.terminal.estimate import estimate_text

    options["domain"] = options["domain"] or EstimateRequest.domain
    if sweep is not None and load.asks:
        raise ArchsearchError("--sweep prices one condition at a time; leave out --workload, --objective and the limits")
    check_said_once(load.workload)
    mix, options["asked"] = asked_mix(load, options["asked"])
    request = EstimateRequest(**options, mix=mix)
    if sweep is not None:
        return _sweep(request, as_json, (sweep, span), csv_file, plot)
    if span or csv_file or plot:
        raise ArchsearchError("--range, --csv and --plot belong to --sweep; add --sweep batch, context, gamma or alpha")
    result = estimate_drafts(request)
    emit(result, estimate_text(result), as_json)


def _sweep(
    request: EstimateRequest, as_json: bool, over: tuple[str, str | None], csv_file: Path | None, plot: Path | None
) -> None:
    """The curves, and the files that were asked for."""
    from archsearch.pipeline.curves import estimate_curves, write_curves
    from archsearch.report.curves import check_plot, plot_curves
    from archsearch.report.terminal.curves import curves_text

    if plot is not None:
        check_plot(plot)
    result = estimate_curves(request, *over)
    if csv_file is not None:
        write_curves(result, csv_file)
    if plot is not None:
        plot_curves(result, plot)
    emit(result, curves_text(result), as_json)
