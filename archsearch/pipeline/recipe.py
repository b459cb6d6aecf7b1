"""`archsearch recipe`: the answer of a run as a folder that a library for training on GPUs
takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from archsearch.acceptance.estimator import GivenAcceptance
from archsearch.capacity import fits
from archsearch.engine_rounds import newest_version
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.models.files import has_weights
from archsearch.models.targets import TargetRef, resolve_target
from archsearch.needs import Needs, TrainingBudget
from archsearch.pipeline.rounds_explained import remedied
from archsearch.pipeline.session import SearchSession
from archsearch.recipes.folder import write_recipe
from archsearch.recipes.plan import (
    LONGEST,
    SHARED_MEMORY,
    STAGES,
    Recipe,
    Stage,
    choose_library,
    share_gpus,
)
from archsearch.report.terminal.layout import plus_minus
from archsearch.report.terminal.run import MadeRecipe
from archsearch.runs.run import open_run
from archsearch.runs.tables import longest_of
from archsearch.search.objective import Score, Scorer

ONLINE = ("speculators", "specforge")
"""Whose trainer asks the target for its states while it runs: what they take on disk would be
terabytes."""


@dataclass(frozen=True)
class RecipeRequest:
    """What `archsearch recipe` was asked. `library` None: the first that trains the family; `gpus`:
    of one machine; `prompts` None: the run's."""

    run: Path
    output: Path
    rank: int = 1
    library: str | None = None
    gpus: int = 8
    prompts: Path | None = None


def make_recipe(request: RecipeRequest) -> MadeRecipe:
    """Write the folder that trains a rank of a run. Raises ArchsearchError for a rank that needs no
    training, a library that does not train its family or shape, too few GPUs; MissingDataError for
    a target of which neither a hub id nor a folder is known."""
    run = open_run(request.run)
    score = run.score(request.rank)
    needs = _training(score, request.run, run.scores())
    library = choose_library(request.library, score.family)
    ref = resolve_target(run.arguments["target"])
    name = _target_name(ref, library.name)
    session = SearchSession.reopen(request.run)
    budget = session.scorer.context.budget
    if budget is None:
        raise ArchsearchError(
            f"{request.run} was searched without a training budget; search again (--training-budget"
            " 24h)"
        )
    facts = session.request.asked
    asked = run.arguments.get("prompts")
    prompts = request.prompts.absolute() if request.prompts else asked or "prompts.jsonl"
    own_version = facts.engine_version if facts.engine == "vllm" else None
    scorer = session.scorer_of(score)
    target, stages = scorer.target, _stages(scorer, score, needs, budget)
    learnt, beyond = stages[-1].alpha, ""
    if learnt and learnt.value > score.alpha.value + 0.01:
        beyond = (
            f"At the run's context of {scorer.context.context_len:,} tokens alpha"
            f" {plus_minus(score.alpha)} is expected: beyond the at most {LONGEST:,} tokens that it"
            " learns from the drafter accepts less."
        )
    priced, gamma = run.priced_as, score.gamma
    better = remedied(session.source.rounds, scorer, score)
    if better is not None and better.switches:  # what the search advises
        gamma = better.gamma
        priced["switches"] = f"{priced['switches']} {better.switches}".strip()
    half = replace(session.scorer.workload, batch_size=1, memory_fraction=SHARED_MEMORY)
    recipe = Recipe(
        library,
        score.proposer,
        target,
        name,
        gamma,
        needs,
        stages,
        share_gpus(
            request.gpus,
            session.scorer.workload.tensor_parallel,
            needs,
            online=library.name in ONLINE,
            halves=fits(target, None, half, session.source.device),
        ),
        own_version or newest_version("vllm"),
        str(request.run),
        request.rank,
        session.source.device.key,
        str(prompts),
        hub_start=needs.init if "/" in needs.init else "",
        dtype=session.source.dtype,
        held=longest_of(run.path, request.rank),
        beyond=beyond,
        **priced,
    )
    trimmed = score.architecture.trimmed and score.family != "independent"
    here = ref.folder is not None and has_weights(ref.folder)
    weights = recipe.initialised and here and not trimmed
    made = write_recipe(recipe, request.output, weights=weights)
    return MadeRecipe(recipe, made, recipe.hours, weights)


def _training(score: Score, run: Path, every: list[Score]) -> Needs:
    """Raises ArchsearchError where there is none to do."""
    needs, name = score.needs, f"rank {score.rank} of {run} ({score.family})"
    trains = [each for each in every if each.needs_kind == "training"]
    other = f"; rank {trains[0].rank} is to be trained: --rank {trains[0].rank}" if trains else ""
    if needs is None:
        raise ArchsearchError(f"{name}: the run says nothing of its training; search again")
    if needs.kind == "exists":
        raise ArchsearchError(f"{name} exists already: {needs.hub_id}{other}")
    if needs.kind == "nothing":
        raise ArchsearchError(f"{name} needs no training{other}")
    return needs


def _target_name(ref: TargetRef, library: str) -> str:
    """What the scripts load. Raises MissingDataError where nobody has the target's weights."""
    if ref.folder is not None:
        if not has_weights(ref.folder):
            raise MissingDataError(
                f"no weights in {ref.folder}, and the training reads them; put model.safetensors"
                " there"
            )
        return str(ref.folder)
    if ref.hub_id is None:
        if library == "archsearch" and ref.weights:
            return ref.name
        raise MissingDataError(
            f"target {ref.name!r} has no weights that {library} can load (neither a hub id nor a"
            " folder); search with a folder"
        )
    return ref.hub_id


def _stages(
    scorer: Scorer, score: Score, needs: Needs, budget: TrainingBudget
) -> tuple[Stage, ...]:
    """The training in parts: what each took and what alpha it should have on the text that it
    learns from. The last one's is the score's where the run's context is no longer."""
    assert needs.tokens is not None
    given = isinstance(scorer.acceptance, GivenAcceptance)
    # the mean place in texts of at most LONGEST tokens
    learnt = replace(scorer.context, context_len=min(scorer.context.context_len, LONGEST // 2))
    found = []
    for share in STAGES:
        tokens, last = share * needs.tokens, share == 1.0
        hours = budget.cost(score.proposer.training_parameters, tokens).gpu_hours
        alpha = score.alpha if last else None
        if not given and (learnt != scorer.context if last else not needs.init):
            context = learnt if last else replace(learnt, trained_tokens=tokens)
            alpha = scorer.predicted_acceptance(score.proposer, context).acceptance.alpha
        found.append(Stage(tokens, hours, alpha))
    return tuple(found)
