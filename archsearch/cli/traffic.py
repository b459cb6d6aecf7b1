"""`archsearch traffic`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from archsearch.cli.app import main
from archsearch.cli.options import check_said_once, common, json_option, load_options, training_option
from archsearch.cli.output import emit
from archsearch.workload import LoadRequest


@main.command()
@click.option("--target", required=True, metavar="T", help="Catalogue name, folder with config.json, or hub id.")
@click.option("--draft", "drafts", required=True, multiple=True, metavar="D", help="A draft, as `estimate` takes it; repeat.")
@load_options
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Requests that were served: vLLM's bench serve JSON, Mooncake's JSON lines, BurstGPT's CSV.",
)
@click.option(
    "--requests-per-second",
    "rates",
    type=float,
    multiple=True,
    metavar="R",
    help="A rate of requests that arrive at random; repeat.",
)
@click.option("--prompt-tokens", default=512, show_default=True, type=click.IntRange(min=0), help="With --requests-per-second.")
@click.option("--output-tokens", default=256, show_default=True, type=click.IntRange(min=1), help="With --requests-per-second.")
@click.option(
    "--simulate", "simulated", default=800, show_default=True, type=click.IntRange(min=0), metavar="N",
    help="Requests of the event-by-event simulation beside the closed form; 0: none.",
)  # fmt: skip
@click.option(
    "--gamma", type=click.IntRange(min=1), metavar="N", help="Draft tokens per verification (default: the best of 1 to 16)."
)
@training_option
@partial(common, several_engines=True)
@json_option
def traffic(as_json: bool, load: LoadRequest, **options: Any) -> None:
    """Drafts under a load: requests that run at once, time per token and to the first, and the rate above which to stop drafting.

    \b
    archsearch traffic --target llama-3.1-70b --draft llama-3.2-1b --gpu h100 --requests-per-second 1 --requests-per-second 4
    archsearch traffic --target llama-3.1-70b --draft llama-3.2-1b --draft eagle3 --gpu h100 --trace mooncake.jsonl
    archsearch traffic --target llama-3.1-70b --draft llama-3.2-1b --gpu h100 --workload mix.yaml --objective throughput
    """
    from archsearch.pipeline.estimate import EstimateRequest
    from archsearch.pipeline.traffic import TrafficRequest, drafts_under_load
    from archsearch.report.terminal.traffic import traffic_text

    options["domain"] = options["domain"] or EstimateRequest.domain
    check_said_once(load.workload or options["trace"], prompt_tokens="--prompt-tokens", output_tokens="--output-tokens")
    own = {name: options.pop(name) for name in ("trace", "rates", "prompt_tokens", "output_tokens", "simulated")}
    asked = TrafficRequest(EstimateRequest(**options), load.workload, **own, objective=load.objective, load=load)
    result = drafts_under_load(asked)
    emit(result, traffic_text(result), as_json)
