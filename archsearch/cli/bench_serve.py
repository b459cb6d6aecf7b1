"""`archsearch bench-serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archsearch.cli import options as o
from archsearch.cli.app import main
from archsearch.cli.output import emit
from archsearch.errors import ArchsearchError


@main.command("bench-serve")
@o.options(
    "The servers and their load",
    o.opt(
        "--server-url",
        "An OpenAI-compatible server that drafts: http://127.0.0.1:8000.",
        o.URL,
        required=True,
    ),
    o.opt("--baseline-url", "The same target without a draft, on a server of its own.", o.URL),
    o.opt("--requests-per-second rate", "Requests that arrive at random.", float, metavar="R"),
    o.opt("--concurrency", "Requests in flight at all times.", o.COUNT),
    o.opt("--trace", "Requests at a trace's arrivals, as `traffic` reads it.", o.FILE),
    o.opt("--requests", "How many are sent.", o.COUNT, 100),
    o.opt("--prompt-tokens", "Of made-up prompts, about.", o.COUNT, 512),
    o.opt("--output-tokens", "Written to each prompt.", o.COUNT, 128),
    o.prompts_opt("made-up text"),
    o.opt("--timeout timeout_s", "For one request.", o.TIME, "10m"),
    o.opt("--output", "Every request, as it ends.", o.FILE, Path("bench-serve.json")),
)
@o.options(
    "To predict it",
    o.opt("--target", o.TARGET_WORDS, o.TARGET),
    o.opt("--draft", "What drafts: as in `estimate`.", o.DRAFT),
    o.gamma_opt,
)
@o.common(True, o.training_opts[0])
@o.json_option
def bench_serve(as_json: bool, **options: Any) -> None:
    """Drive a running server with a load, with a draft and without, beside the prediction.

    \b
    archsearch bench-serve --server-url http://127.0.0.1:8000 \\
        --baseline-url http://127.0.0.1:8001 --requests-per-second 2 \\
        --target qwen3-32b --draft qwen3-1.7b --gpu h100 --gamma 4 --prompts my-prompts.jsonl
    archsearch bench-serve --server-url http://127.0.0.1:8000 --concurrency 16
    """
    from archsearch.pipeline.bench_serve import BenchRequest, bench_serve
    from archsearch.pipeline.estimate import EstimateRequest
    from archsearch.progress import ProgressLine
    from archsearch.report.terminal.bench_serve import bench_text

    own = o.taken(BenchRequest, options)
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
