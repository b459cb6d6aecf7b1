"""`archsearch traffic`."""

from __future__ import annotations

from typing import Any

import click

from archsearch.cli import options as o
from archsearch.cli.app import main
from archsearch.cli.output import emit
from archsearch.workload import LoadRequest


@main.command()
@o.options("What is priced", o.target_opt, o.drafts_opt, o.gamma_opt)
@o.options(
    "Load",
    o.opt(
        "--trace",
        "Requests that were served: vLLM's bench serve JSON, Mooncake's JSON lines, BurstGPT's"
        " CSV.",
        o.FILE,
    ),
    o.opt(
        "--requests-per-second rates",
        "A rate of requests that arrive at random; repeat.",
        float,
        multiple=True,
        metavar="R",
    ),
    o.opt("--prompt-tokens", "With --requests-per-second.", o.WHOLE, 512),
    o.opt("--output-tokens", "With --requests-per-second.", o.COUNT, 256),
    o.opt(
        "--simulate simulated",
        "Requests of the event-by-event simulation beside the closed form; 0: none.",
        o.named("n", click.IntRange(0, 10**6)),
        800,
    ),
)
@o.load_options
@o.common(True, o.training_opts[0], o.budget_opt)
@o.json_option
def traffic(as_json: bool, load: LoadRequest, **options: Any) -> None:
    """Drafts under a load: requests that run at once, time per token and to the first, and the rate
    above which to stop drafting.

    \b
    archsearch traffic --target llama-3.1-70b --draft llama-3.2-1b --gpu h100 \\
        --requests-per-second 1 --requests-per-second 4
    archsearch traffic --target llama-3.1-70b --draft llama-3.2-1b --draft eagle3 --gpu h100 \\
        --trace mooncake.jsonl
    archsearch traffic --target llama-3.1-70b --draft llama-3.2-1b --gpu h100 \\
        --workload mix.yaml --objective throughput
    """
    from archsearch.pipeline.estimate import EstimateRequest
    from archsearch.pipeline.traffic import TrafficRequest, drafts_under_load
    from archsearch.report.terminal.traffic import traffic_text

    options["domain"] = options["domain"] or EstimateRequest.domain
    o.check_said_once(
        load.workload or options["trace"],
        prompt_tokens="--prompt-tokens",
        output_tokens="--output-tokens",
    )
    own = o.taken(TrafficRequest, options)
    result = drafts_under_load(TrafficRequest(EstimateRequest(**options), load=load, **own))
    emit(result, traffic_text(result), as_json)
