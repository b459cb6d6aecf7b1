"""`archsearch estimate`."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from archsearch.cli.app import main
from archsearch.cli.options import common, json_option, training_option
from archsearch.cli.output import emit


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
@training_option
@partial(common, several_engines=True)
@json_option
def estimate(as_json: bool, **options: Any) -> None:
    """Price drafts that exist, of any family: does this draft pay, at which gamma, from which acceptance on, and in which engine.

    \b
    archsearch estimate --target llama-65b --draft wide-796m --draft sheared-llama-1.3b --gpu a100 --tensor-parallel 4
    archsearch estimate --target qwen3-32b --draft qwen3-1.7b --gpu h100 --engine vllm --engine sglang --alpha 0.8
    archsearch estimate --target qwen3-32b --draft qwen3-1.7b --gpu h100 --engine-version vllm=0.16.0 --engine-version vllm=0.30.0
    archsearch estimate --target llama-3.1-8b --draft eagle3 --draft llama-3.2-1b --draft ngram --gpu h100 --engine vllm
    archsearch estimate --target smollm2-135m --draft ./my-draft --gpu cpu --alpha 0.7
    """
    from archsearch.pipeline.estimate import EstimateRequest, estimate_drafts
    from archsearch.report.terminal.estimate import estimate_text

    options["domain"] = options["domain"] or EstimateRequest.domain
    result = estimate_drafts(EstimateRequest(**options))
    emit(result, estimate_text(result), as_json)
