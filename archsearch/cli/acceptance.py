"""`archsearch acceptance`."""

from __future__ import annotations

from typing import Any

import click

from archsearch.cli import options as o
from archsearch.cli.app import main
from archsearch.cli.output import emit


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
def acceptance(as_json: bool, **options: Any) -> None:
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
    from archsearch.report.terminal.acceptance import acceptance_text
    from archsearch.workload import WorkloadRequest

    options["domain"] = options["domain"] or ""
    dtype = options.pop("dtype")  # of both models, not of what is priced
    asked = WorkloadRequest(**o.taken(WorkloadRequest, options))
    result = measure_acceptance(AcceptanceRequest(asked=asked, dtype=dtype, **options))
    emit(result, acceptance_text(result), as_json)
