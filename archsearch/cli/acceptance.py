"""`archsearch acceptance`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from archsearch.acceptance.estimator import DOMAINS
from archsearch.cli.app import main
from archsearch.cli.options import dtype_choice, json_option, training_option
from archsearch.cli.output import emit


@main.command()
@click.option("--target", required=True, metavar="T", help="Catalogue name, folder with config.json and weights, or hub id.")
@click.option(
    "--draft",
    required=True,
    metavar="D",
    help="Draft folder, hub id or catalogue name (--explain: any config.json); or ngram, ngram:2-5, suffix, early_exit:8,16.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Your prompts, JSON lines: prompt, OpenAI messages or ShareGPT conversations, with an optional category.",
)
@click.option("--temperature", default=0.0, show_default=True, metavar="F", help="0: greedy; above: sampling.")
@click.option("--top-p", default=1.0, show_default=True, metavar="F", help="Nucleus of target and draft, when sampling.")
@click.option("--max-prompts", default=64, show_default=True, type=click.IntRange(min=1), metavar="N")
@click.option("--answer-tokens", default=128, show_default=True, type=click.IntRange(min=2), metavar="N")
@click.option("--dtype", default="float32", show_default=True, metavar="D", callback=dtype_choice, help="Of target and draft.")
@click.option("--explain", is_flag=True, help="Also what the prior thinks of this shape, term by term. Needs no weights.")
@click.option(
    "--domain", type=click.Choice(DOMAINS), help="Which text this is, for the prior (default: narrow, chat without prompts)."
)
@training_option
@click.option("--gpu", metavar="NAME", help="Also the modelled speed-up at each gamma on this device.")
@click.option("--profile", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="A profile, instead of --gpu.")
@click.option("--batch-size", default=1, show_default=True, type=click.IntRange(min=1), metavar="N", help="For the speed-up.")
@click.option("--mode", type=click.Choice(["eager", "graph"]), help="For the speed-up (default: vllm's on a GPU).")
@click.option("--cache", type=click.Path(path_type=Path, file_okay=False), help="Folder for the target's text (kept there).")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write the figures as JSON.")
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write the trace (.npz).")
@click.option("--seed", default=0, show_default=True, help="Of the text that the target samples.")
@json_option
def acceptance(as_json: bool, **options: Any) -> None:
    """Measure how much of a draft its target accepts: alpha, and tokens per round (tau) at each gamma, on your own prompts.

    The target writes an answer to every prompt once (kept in a cache; another draft then takes seconds), the draft runs beside
    the text once, and the trace is replayed for every gamma. Intervals are over prompts. N-gram lookup and suffix decoding need
    no model: what they draft on the text is replayed as vLLM would; an early exit is the target's own first layers.

    \b
    archsearch acceptance --target smollm2-135m --draft runs/demo/best/1 --prompts mine.jsonl --gpu cpu
    archsearch acceptance --target smollm2-135m --draft runs/demo/best/1 --temperature 0.7 --top-p 0.9
    archsearch acceptance --target llama-65b --draft wide-796m --explain
    archsearch acceptance --target smollm2-135m --draft ngram --prompts mine.jsonl --gpu cpu
    """
    from archsearch.pipeline.acceptance import AcceptanceRequest, measure_acceptance
    from archsearch.report.terminal.acceptance import acceptance_text
    from archsearch.workload import WorkloadRequest

    options["domain"] = options["domain"] or ""
    asked = WorkloadRequest(**{name: options.pop(name) for name in ("gpu", "profile", "batch_size", "temperature", "mode")})
    result = measure_acceptance(AcceptanceRequest(asked=asked, **options))
    emit(result, acceptance_text(result), as_json)
