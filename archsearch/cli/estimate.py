"""`archsearch estimate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from archsearch.cli import options as o
from archsearch.cli.app import main
from archsearch.cli.output import emit
from archsearch.errors import ArchsearchError
from archsearch.workload import LoadRequest

if TYPE_CHECKING:
    from archsearch.pipeline.estimate import EstimateRequest


@main.command()
@o.options(
    "What is priced",
    o.target_opt,
    o.drafts_opt,
    o.gamma_opt,
    o.opt(
        "--tree",
        "Heads draft trees, as SGLang's do by default: top-k, steps and tokens verified (4,5,8).",
        o.Value("topk,steps,tokens"),
    ),
)
@o.common(True, *o.training_opts, o.budget_opt)
@o.load_options
@o.options(
    "A curve",
    o.opt(
        "--sweep",
        "A curve over this instead of one workload: best gamma, speed-up, time per token,"
        " throughput, where it stops paying.",
        click.Choice(["batch", "context", "gamma", "alpha"]),
    ),
    o.opt(
        "--range span",
        "Of --sweep (default: 1:256, 128:32768, 1:16, 0.05:1).",
        o.Value("low:high[:points]"),
    ),
    o.opt("--csv csv_file", "All points of --sweep, as CSV.", o.FILE),
    o.opt("--plot", "The picture of --sweep, all drafts in one: .svg, .png or .pdf.", o.FILE),
)
@o.options("", o.explain_opt, o.json_opt)
def estimate(
    as_json: bool,
    explain: bool,
    load: LoadRequest,
    sweep: str | None,
    span: str | None,
    csv_file: Path | None,
    plot: Path | None,
    **options: Any,
) -> None:
    """Price drafts that exist, of any family: does this draft pay, at which gamma, from which
    acceptance on, and in which engine.

    \b
    archsearch estimate --target llama-65b --draft wide-796m --draft sheared-llama-1.3b \\
        --gpu a100 --tensor-parallel 4
    archsearch estimate --target qwen3-32b --draft qwen3-1.7b --gpu h100 --engine vllm \\
        --engine sglang --alpha 0.8
    archsearch estimate --target qwen3-32b --draft qwen3-1.7b --gpu h100 \\
        --engine-version vllm=0.16.0 --engine-version vllm=0.30.0
    archsearch estimate --target llama-3.1-8b --draft eagle3 --draft llama-3.2-1b \\
        --draft ngram --gpu h100 --engine vllm
    archsearch estimate --target smollm2-135m --draft ./my-draft --gpu cpu --alpha 0.7
    archsearch estimate --target llama-3.1-70b --draft llama-3.2-1b --draft eagle3 --gpu h100 \\
        --sweep batch --plot batch.svg
    archsearch estimate --target llama-3.1-70b --draft llama-3.2-1b --gpu h100 \\
        --workload mix.yaml --objective throughput
    """
    from archsearch.pipeline.estimate import EstimateRequest, estimate_drafts
    from archsearch.pipeline.serving import asked_mix
    from archsearch.report.terminal.estimate import estimate_text

    options["domain"] = options["domain"] or EstimateRequest.domain
    if sweep is not None and load.asks:
        raise ArchsearchError(
            "--sweep prices one condition at a time; leave out --workload, --objective and the"
            " limits"
        )
    o.check_said_once(load.workload)
    mix, options["asked"] = asked_mix(load, options["asked"])
    request = EstimateRequest(**options, mix=mix)
    if sweep in ("alpha", "gamma") and request.tau is not None:
        raise ArchsearchError(
            f"--tau is of one gamma and one alpha; leave out --sweep {sweep}, or --tau"
        )
    if sweep is not None and request.tree is not None:
        raise ArchsearchError("--tree is priced in one condition; leave out --sweep, or --tree")
    if sweep is not None:
        return _sweep(request, as_json, (sweep, span), csv_file, plot)
    if span or csv_file or plot:
        raise ArchsearchError(
            "--range, --csv and --plot belong to --sweep; add --sweep batch, context, gamma or"
            " alpha"
        )
    result = estimate_drafts(request)
    emit(result, estimate_text(result, explain=explain), as_json)


def _sweep(
    request: EstimateRequest,
    as_json: bool,
    over: tuple[str, str | None],
    csv_file: Path | None,
    plot: Path | None,
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
