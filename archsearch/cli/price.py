"""The commands that price drafts, and those that measure what the price rests on: `estimate`,
`traffic`, `acceptance`, `bench-serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from archsearch.cli import options as o
from archsearch.cli.app import emit, main
from archsearch.errors import ArchsearchError
from archsearch.progress import ProgressLine
from archsearch.workload import LoadRequest, WorkloadRequest

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
        return _sweep(request, (sweep, span), csv_file, plot)
    if span or csv_file or plot:
        raise ArchsearchError(
            "--range, --csv and --plot belong to --sweep; add --sweep batch, context, gamma or"
            " alpha"
        )
    result = estimate_drafts(request)
    emit(result, estimate_text(result, explain=explain))


def _sweep(
    request: EstimateRequest, over: tuple[str, str | None], csv_file: Path | None, plot: Path | None
) -> None:
    from archsearch.pipeline.curves import estimate_curves, write_curves
    from archsearch.report.terminal.curves import check_plot, plot_curves

    if plot is not None:
        check_plot(plot)
    result = estimate_curves(request, *over)
    if csv_file is not None:
        write_curves(result, csv_file)
    if plot is not None:
        plot_curves(result, plot)
    emit(result)


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
@o.common(True, o.training_opts[0], o.budget_opt, one_batch=False)
@o.json_option
def traffic(load: LoadRequest, **options: Any) -> None:
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

    o.check_said_once(
        load.workload or options["trace"],
        prompt_tokens="--prompt-tokens",
        output_tokens="--output-tokens",
    )
    own = o.taken(TrafficRequest, options)
    emit(drafts_under_load(TrafficRequest(EstimateRequest(**options), load=load, **own)))


@main.command()
@o.options(
    "What is measured",
    o.target_opt,
    o.opt(
        "--draft",
        "Draft folder, hub id or catalogue name (--explain: any config.json); or ngram, ngram:2-5,"
        " suffix, early_exit:8,16.",
        o.DRAFT,
        required=True,
    ),
    o.prompts_opt("the demo's"),
    o.opt("--temperature", "0: greedy; above: sampling.", float, 0.0),
    o.opt("--top-p", "Nucleus of target and draft, when sampling.", float, 1.0),
    o.opt("--max-prompts", "At most so many.", o.COUNT, 64),
    o.opt("--answer-tokens", "Of each answer.", click.IntRange(min=2), 128),
    o.opt("--dtype", "Of target and draft.", o.DTYPE, "float32"),
    o.seed_opt,
)
@o.options(
    "The prior",
    o.opt(
        "--explain",
        "Also what the prior thinks of this shape, term by term. Needs no weights.",
        bool,
    ),
    o.domain_opt,
    *o.training_opts,
    o.opt("--gamma", "Of --tau.", o.COUNT),
)
@o.options(
    "The modelled speed-up at each gamma",
    o.gpu_opt,
    o.profile_opt,
    o.opt("--batch-size", "Sequences in one pass.", o.COUNT, 1),
    o.mode_opt,
)
@o.options(
    "",
    o.opt("--cache", "Folder for the target's text (kept there).", o.FOLDER),
    o.opt("--output", "Write the figures as JSON.", o.FILE),
    o.opt("--trace", "Write the trace (.npz).", o.FILE),
)
@o.json_option
def acceptance(**options: Any) -> None:
    """Measure how much of a draft its target accepts: alpha, and tokens per round (tau) at each
    gamma, on your own prompts.

    The target writes an answer to every prompt once (kept in a cache; another draft then takes
    seconds), the draft runs beside the text once, and the trace is replayed for every gamma.
    Intervals are over prompts. N-gram lookup and suffix decoding need no model: what they draft on
    the text is replayed as vLLM would; an early exit is the target's own first layers.

    \b
    archsearch acceptance --target smollm2-135m --draft runs/demo/best/1 --prompts mine.jsonl \\
        --gpu cpu
    archsearch acceptance --target smollm2-135m --draft runs/demo/best/1 --temperature 0.7 \\
        --top-p 0.9
    archsearch acceptance --target llama-65b --draft wide-796m --explain
    archsearch acceptance --target smollm2-135m --draft ngram --prompts mine.jsonl --gpu cpu
    """
    from archsearch.pipeline.acceptance import AcceptanceRequest, measure_acceptance

    dtype = options.pop("dtype")  # of both models, not of what is priced
    asked = WorkloadRequest(**o.taken(WorkloadRequest, options))
    emit(measure_acceptance(AcceptanceRequest(asked=asked, dtype=dtype, **options)))


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
@o.common(True, o.training_opts[0], one_batch=False)
@o.json_option
def bench_serve(**options: Any) -> None:
    """Drive a running server with a load, with a draft and without, beside the prediction.

    \b
    archsearch bench-serve --server-url http://127.0.0.1:8000 \\
        --baseline-url http://127.0.0.1:8001 --requests-per-second 2 \\
        --target qwen3-32b --draft qwen3-1.7b --gpu h100 --gamma 4 --prompts my-prompts.jsonl
    archsearch bench-serve --server-url http://127.0.0.1:8000 --concurrency 16
    """
    from archsearch.pipeline.estimate import EstimateRequest
    from archsearch.pipeline.traffic import BenchRequest, bench_serve

    own = o.taken(BenchRequest, options)
    target, draft = options.pop("target"), options.pop("draft")
    if (target is None) != (draft is None):
        raise ArchsearchError("give both --target and --draft, to predict the load, or neither")
    estimate = None
    if target is not None:
        estimate = EstimateRequest(target=target, drafts=(draft,), **options)
    request = BenchRequest(**own, estimate=estimate, temperature=options["asked"].temperature)
    with ProgressLine("bench-serve", quiet=o.as_json()) as progress:
        result = bench_serve(request, progress)
    emit(result)
