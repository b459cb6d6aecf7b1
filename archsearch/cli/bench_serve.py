"""`archsearch bench-serve`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from archsearch.cli.app import main
from archsearch.cli.options import common, duration, json_option, training_option
from archsearch.cli.output import emit
from archsearch.errors import ArchsearchError

FILE = click.Path(path_type=Path, dir_okay=False)


@main.command("bench-serve")
@click.option(
    "--server-url", required=True, metavar="URL", help="An OpenAI-compatible server that drafts: http://127.0.0.1:8000."
)
@click.option("--baseline-url", metavar="URL", help="The same target without a draft, on a server of its own.")
@click.option("--requests-per-second", "rate", type=float, metavar="R", help="Requests that arrive at random.")
@click.option("--concurrency", type=click.IntRange(min=1), metavar="N", help="Requests in flight at all times.")
@click.option("--trace", type=FILE, metavar="FILE", help="Requests at a trace's arrivals, as `traffic` reads it.")
@click.option("--requests", default=100, show_default=True, type=click.IntRange(min=1), help="How many are sent.")
@click.option("--prompt-tokens", default=512, show_default=True, type=click.IntRange(min=1), help="Of made-up prompts, about.")
@click.option("--output-tokens", default=128, show_default=True, type=click.IntRange(min=1), help="Written to each prompt.")
@click.option("--prompts", type=FILE, metavar="FILE", help="JSON lines of your prompts (default: made-up text).")
@click.option("--timeout", "timeout_s", default="10m", show_default=True, callback=duration, help="For one request.")
@click.option("--output", default=Path("bench-serve.json"), show_default=True, type=FILE, help="Every request, as it ends.")
@click.option("--target", metavar="T", help="What is served, to predict it: as in `estimate`.")
@click.option("--draft", metavar="D", help="What drafts, to predict it: as in `estimate`.")
@click.option("--gamma", type=click.IntRange(min=1), metavar="N", help="Draft tokens a round (default: the best).")
@training_option
@partial(common, several_engines=True)
@json_option
def bench_serve(as_json: bool, **options: Any) -> None:
    """Drive a running server with a load, with a draft and without, beside the prediction.

    \b
    archsearch bench-serve --server-url http://127.0.0.1:8000 --baseline-url http://127.0.0.1:8001 --requests-per-second 2 \\
        --target qwen3-32b --draft qwen3-1.7b --gpu h100 --gamma 4 --prompts my-prompts.jsonl
    archsearch bench-serve --server-url http://127.0.0.1:8000 --concurrency 16
    """
    from archsearch.pipeline.bench_serve import BenchRequest, bench_serve
    from archsearch.pipeline.estimate import EstimateRequest
    from archsearch.progress import ProgressLine
    from archsearch.report.terminal.bench_serve import bench_text

    names = (
        "server_url", "baseline_url", "rate", "concurrency", "trace", "requests", "prompt_tokens", "output_tokens", "prompts",
        "timeout_s", "output",
    )  # fmt: skip
    own = {name: options.pop(name) for name in names}
    target, draft = options.pop("target"), options.pop("draft")
    if (target is None) != (draft is None):
        raise ArchsearchError("give both --target and --draft, to predict the load, or neither")
    estimate = None
    if target is not None:
        options["domain"] = options["domain"] or EstimateRequest.domain
        estimate = EstimateRequest(target=target, drafts=(draft,), **options)
    request = BenchRequest(**own, estimate=estimate, temperature=options["asked"].temperature)
    with ProgressLine("bench-serve", quiet=as_json) as progress:
        result = bench_serve(request, progress)
    emit(result, bench_text(result), as_json)
