"""The commands that train and run the drafts of a run: `train`, `confirm`, `schedule`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from archsearch.cli import options as o
from archsearch.cli.app import emit, main
from archsearch.engine_facts import engines_that
from archsearch.errors import ArchsearchError


@main.command()
@o.run_argument
@o.rank_option
@o.options(
    "",
    o.opt("--budget", "Training time to add.", o.TIME, "30m"),
    o.opt(
        "--weights",
        "A folder with what another trainer made of the rank (a recipe's trained/): measured, and"
        " kept as its weights.",
        o.FOLDER,
    ),
    o.opt(
        "--prompts",
        "Of --weights: those that its trainer held out (a recipe's data/heldout-prompts.jsonl).",
        o.PROMPTS,
    ),
    o.opt(
        "--curve",
        "Of --weights: JSON lines of tokens and alpha while it was trained (a recipe's"
        " checkpoints/alpha.jsonl).",
        o.FILE,
    ),
)
@o.options(
    "A head",
    o.opt(
        "--family",
        "What to train: the ranked draft (independent), or a head: eagle3, peagle (all tokens in"
        " one pass), medusa.",
        o.FAMILY,
        "independent",
    ),
    o.opt(
        "--gamma",
        "Draft tokens a round to train for (default: as the run's head was, else 3).",
        o.GAMMA,
    ),
    o.opt(
        "--head-rows", "Tokens of the vocabulary it keeps. Default: 4096, 2048 (medusa).", o.COUNT
    ),
    o.opt(
        "--layers", "Of an EAGLE-3 or P-EAGLE head. Default: 1 and 2.", click.IntRange(min=1, max=4)
    ),
    o.opt(
        "--aux-layers",
        "Of an EAGLE-3 or P-EAGLE head: the target's layers whose inputs it reads. Default: 2, half"
        " of all, the third last.",
        metavar="I,J,K",
    ),
)
@o.json_option
def train(
    run: Path,
    rank: int,
    budget: float,
    weights: Path | None,
    prompts: Path | None,
    curve: Path | None,
    family: str,
    **of_head: Any,
) -> None:
    """Distil one candidate further, on text the target wrote. Resumes; every candidate of a run
    trains on the same sequences.

    \b
    archsearch train runs/demo --budget 30m
    archsearch train runs/demo --rank 2 --budget 10m
    archsearch train runs/demo --weights recipe/trained --prompts recipe/data/heldout-prompts.jsonl
    archsearch train runs/demo --family eagle3 --gamma 3 --budget 10m
    archsearch train runs/demo --family peagle --gamma 5 --budget 10m
    archsearch train runs/demo --family medusa --budget 2m
    """
    from archsearch.runs.lock import run_lock

    click.get_current_context().with_resource(run_lock(run, "archsearch train"))
    if family == "independent":
        named = [name for name, value in of_head.items() if value is not None]
        if named:
            raise ArchsearchError(
                f"--{named[0].replace('_', '-')} is for heads; add --family eagle3, peagle or"
                " medusa, or leave it out"
            )
        from archsearch.pipeline.train import Taken, train_rank

        taken = Taken(weights, prompts, curve) if weights and prompts else None
        if (taken is None and (weights or prompts or curve)) or (taken and o.set_by_user("budget")):
            raise ArchsearchError(
                "--weights and --prompts go together, --curve only with them, --budget without"
            )
        return emit(train_rank(run, rank, budget, taken))
    if weights or prompts or curve:
        raise ArchsearchError("--weights goes with --rank, whose family it has; leave --family out")
    from archsearch.pipeline.heads import head_plan
    from archsearch.pipeline.train import train_family

    emit(train_family(run, head_plan(family, **of_head, run=run), budget))


@main.command()
@o.run_argument
@o.options(
    "What is run",
    o.rank_opt,
    o.opt(
        "--gamma gammas",
        "Gamma to run (default: the score's, on a CPU also up to two predicted within 3 % of"
        " it; under load the best at each concurrency); repeat for more.",
        o.GAMMA,
        multiple=True,
    ),
    o.opt(
        "--family families",
        "Compare drafters prompt by prompt: independent; eagle3 (trained before; vllm, openvino,"
        " llama.cpp); peagle, medusa (vllm); ngram (vllm, transformers, llama.cpp); early_exit"
        " (transformers); chain (n-gram, then the rank's draft; transformers, llama.cpp);"
        " repeatable.",
        o.FAMILY,
        multiple=True,
    ),
    o.prompts_opt("the run's held-out ones"),
    o.opt("--count", "How many prompts.", o.COUNT, 24),
    o.opt(
        "--synthetic",
        "Random weights, draft tokens accepted by chance at the predicted rates: proves an"
        " independent draft before it is trained.",
        bool,
    ),
)
@o.options(
    "Under load",
    o.opt(
        "--concurrency concurrencies",
        "Requests in flight; repeat for a curve. Not transformers.",
        o.COUNT,
        multiple=True,
    ),
    o.opt(
        "--schedule",
        "Also run gamma by batch size against always off and every fixed gamma (vllm).",
        bool,
    ),
    o.opt("--repeats", "Interleaved repeats under load.", o.COUNT, 5),
    o.opt("--tokens", "New tokens a request under load.", click.IntRange(min=8), 64),
)
@o.options(
    "The engine",
    o.opt(
        "--engine name",
        "transformers, vllm, openvino or llama.cpp (default: the one of the search).",
        o.RUN_ENGINE,
    ),
    o.opt(
        "--dtype",
        "Precision other than the run's: llama.cpp also q8_0, q4_0, ... and that of a GGUF target.",
        o.DTYPE,
    ),
    o.opt(
        "--draft-dtype",
        "llama.cpp: precision of the draft (default: the target's, else q8_0).",
        o.DTYPE,
    ),
    o.python_opt,
    o.opt(
        "--engine-path path",
        "llama.cpp: a llama-server of yours (a build for this CPU, or for a GPU).",
        o.Value("path", o.interpreter),
    ),
    o.opt(
        "--server-url",
        "A running vLLM server with the draft, instead of starting the engine.",
        o.URL,
    ),
    o.opt("--baseline-url", "A running vLLM server of the same target without a draft.", o.URL),
    o.opt("--timeout timeout_s", "Longest wait for one answer of the engine.", o.TIME, "10m"),
)
@o.json_option
def confirm(run: Path, rank: int, count: int, **options: Any) -> None:
    """Run target alone and target + draft in a real engine, interleaved, and compare with the
    prediction.

    \b
    archsearch confirm runs/demo
    archsearch confirm runs/demo --gamma 2 --gamma 4 --gamma 6 --count 40
    archsearch confirm runs/demo --engine vllm
    archsearch confirm runs/llama --rank 2 --engine vllm --synthetic
    archsearch confirm runs/demo --engine vllm --concurrency 1 --concurrency 4 \\
        --concurrency 8 --schedule
    archsearch confirm runs/demo --engine vllm --family eagle3 --family medusa --family ngram \\
        --family independent
    archsearch confirm runs/demo --family chain --family ngram --family independent
    archsearch confirm runs/demo --engine vllm --server-url http://gpu1:8000 \\
        --baseline-url http://gpu1:8001
    """
    from archsearch.models.files import HEAD_FAMILIES
    from archsearch.pipeline import (
        EngineChoice,
        LoadRequest,
        SearchSession,
        confirm_load,
        confirm_rank,
    )
    from archsearch.pipeline.side_by_side import FamilyRequest, confirm_families
    from archsearch.report.terminal.run import confirm_text, engines_text, families_text, load_text
    from archsearch.runs.lock import run_lock

    click.get_current_context().with_resource(run_lock(run, "archsearch confirm"))
    choice = EngineChoice(**o.taken(EngineChoice, options))
    if bool(choice.server_url) != bool(choice.baseline_url):
        raise ArchsearchError(
            "a server cannot be asked to leave its draft out: give --server-url (with the draft)"
            " and --baseline-url (without)"
        )
    if choice.server_url and choice.name is None:
        choice = replace(choice, name=engines_that(lambda row: row.server)[0])
    session = SearchSession.reopen(run)
    families, gammas, prompts = options.pop("families"), options["gammas"], options["prompts"]
    if not families and (score := session.run.score(rank)).family in HEAD_FAMILIES:
        if score.alpha.source == "measured":  # the run has it: `train` took it back
            families, gammas = (score.family,), gammas or (score.gamma,)
    loaded = options["synthetic"] or options["concurrencies"] or options["schedule"]
    if families and loaded:
        raise ArchsearchError(
            "--family compares trained drafters one request at a time; leave --synthetic,"
            " --concurrency and --schedule out"
        )
    if families:
        request = FamilyRequest(families, gammas, rank, count, prompts)
        compared = confirm_families(session, request, choice)
        emit(compared, families_text(compared, run) + engines_text(run))
    elif loaded:
        usual = (1, 2, 4, 8) if options["schedule"] else (1,)
        options["concurrencies"] = options["concurrencies"] or usual
        record = confirm_load(session, LoadRequest(rank, **options), choice)
        emit(record, load_text(record, run, rank))
    else:
        asked = {"gammas": gammas, "prompt_count": count, "prompts": prompts, "choice": choice}
        # on a GPU an engine would load the target again for each
        close = session.run.on_cpu and choice.server_url is None
        result = confirm_rank(session, rank, close=close, **asked)
        emit(result, confirm_text(result, run, rank) + engines_text(run))


@main.command()
@o.run_argument
@o.rank_option
@o.options(
    "",
    o.opt("--engine", "Whose latencies (default: the search's).", o.PRICED),
    o.opt("--batch-size batch_sizes", "Default: 1, 2, 4, ..., 256.", o.COUNT, multiple=True),
    o.opt("--family", "A trained head of the run instead.", o.FAMILY, "independent"),
)
@o.json_option
def schedule(
    run: Path, rank: int, engine: str | None, batch_sizes: tuple[int, ...], family: str
) -> None:
    """The best gamma of a candidate at each batch size, and where speculation should be off; export
    writes it for the engines.

    \b
    archsearch schedule runs/llama --engine vllm
    archsearch schedule runs/demo --engine vllm --batch-size 1 --batch-size 4 --batch-size 16
    archsearch schedule runs/demo --engine vllm --family eagle3
    """
    from archsearch.pipeline import SearchSession, schedule_rank
    from archsearch.pipeline.schedule import schedule_head

    session = SearchSession.reopen(run)
    if family != "independent":
        return emit(schedule_head(session, family, engine, batch_sizes))
    emit(schedule_rank(session, rank, engine, batch_sizes))
