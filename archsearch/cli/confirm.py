"""`archsearch confirm`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from archsearch.cli.app import main
from archsearch.cli.options import duration, engine_python_option, json_option, optional_engine, rank_option, run_argument
from archsearch.cli.output import emit
from archsearch.errors import ArchsearchError


@main.command()
@run_argument
@rank_option
@click.option(
    "--engine",
    "name",
    metavar="E",
    callback=optional_engine,
    help="transformers, vllm or openvino (default: the one of the search).",
)
@click.option(
    "--gamma",
    "gammas",
    multiple=True,
    type=click.IntRange(min=1, max=16),
    help="Gamma to run (default: the score's; under load the best at each concurrency); repeat for more.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Prompts to run (default: the run's held-out ones).",
)
@click.option("--count", default=24, show_default=True, type=click.IntRange(min=1), help="How many prompts.")
@click.option(
    "--synthetic",
    is_flag=True,
    help="Random weights, draft tokens accepted by chance at the predicted rates: proves the shape before it is trained.",
)
@click.option(
    "--concurrency",
    "concurrencies",
    multiple=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Requests in flight; repeat for a curve. Engines that batch: vllm, openvino.",
)
@click.option("--schedule", is_flag=True, help="Also run gamma by batch size against always off and every fixed gamma (vllm).")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1), help="Interleaved repeats under load.")
@click.option("--tokens", default=64, show_default=True, type=click.IntRange(min=8), help="New tokens a request under load.")
@click.option(
    "--family",
    "families",
    multiple=True,
    metavar="F",
    help="Compare drafters prompt by prompt: independent; eagle3, peagle, medusa (trained before; vllm); ngram (vllm, "
    "transformers); early_exit (transformers); repeatable.",
)
@engine_python_option("python")
@click.option("--server-url", metavar="URL", help="A running vLLM server with the draft, instead of starting the engine.")
@click.option("--baseline-url", metavar="URL", help="A running vLLM server of the same target without a draft.")
@click.option(
    "--timeout",
    "timeout_s",
    default="10m",
    show_default=True,
    callback=duration,
    help="Longest wait for one answer of the engine.",
)
@json_option
def confirm(run: Path, rank: int, count: int, as_json: bool, **options: Any) -> None:
    """Run target alone and target + draft in a real engine, interleaved, and compare with the prediction.

    \b
    archsearch confirm runs/demo
    archsearch confirm runs/demo --gamma 2 --gamma 4 --gamma 6 --count 40
    archsearch confirm runs/demo --engine vllm
    archsearch confirm runs/llama --rank 2 --engine vllm --synthetic
    archsearch confirm runs/demo --engine vllm --concurrency 1 --concurrency 4 --concurrency 8 --schedule
    archsearch confirm runs/demo --engine vllm --family eagle3 --family medusa --family ngram --family independent
    archsearch confirm runs/demo --family ngram --family independent
    archsearch confirm runs/demo --engine vllm --server-url http://gpu1:8000 --baseline-url http://gpu1:8001
    """
    from archsearch.engine_facts import engines_that
    from archsearch.pipeline import EngineChoice, LoadRequest, SearchSession, confirm_load, confirm_rank
    from archsearch.report.terminal.confirm import confirm_text
    from archsearch.report.terminal.load import load_text
    from archsearch.runs.lock import run_lock

    click.get_current_context().with_resource(run_lock(run, "archsearch confirm"))
    choice = EngineChoice(**{name: options.pop(name) for name in EngineChoice.__dataclass_fields__})
    if bool(choice.server_url) != bool(choice.baseline_url):
        raise ArchsearchError(
            "a server cannot be asked to leave its draft out: give --server-url (with the draft) and --baseline-url (without)"
        )
    if choice.server_url and choice.name is None:
        choice = replace(choice, name=engines_that(lambda row: row.server)[0])
    session = SearchSession.reopen(run)
    families = options.pop("families")
    if families:
        if options["synthetic"] or options["concurrencies"] or options["schedule"]:
            raise ArchsearchError(
                "--family compares trained drafters one request at a time; leave --synthetic, --concurrency and --schedule out"
            )
        from archsearch.pipeline.confirm_families import FamilyRequest, confirm_families, with_gamma
        from archsearch.report.terminal.heads import families_text

        request = FamilyRequest(families, rank=rank, count=count, prompts=options["prompts"])
        compared = confirm_families(session, with_gamma(request, options["gammas"]), choice)
        emit(compared, families_text(compared, run), as_json)
        return
    if options["synthetic"] or options["concurrencies"] or options["schedule"]:
        options["concurrencies"] = options["concurrencies"] or ((1, 2, 4, 8) if options["schedule"] else (1,))
        loaded = confirm_load(session, LoadRequest(rank, **options), choice)
        emit(loaded.to_dict(), load_text(loaded, run, rank), as_json)
        return
    result = confirm_rank(session, rank, gammas=options["gammas"], prompt_count=count, prompts=options["prompts"], choice=choice)
    emit(result, confirm_text(result, run, rank), as_json)
