"""`archsearch confirm --family`: drafters of several kinds beside one another in a real engine,
prompt by prompt.

Every prompt runs with the target alone and with each drafter, back to back. Beside each measured
speed-up stands the one foretold from the profile and held-out text, and beside the order of the
drafters the order foretold. A head's acceptance in the engine is checked against what held-out text
foretold: an engine that reads other layers than the head was trained on says nothing and accepts
less.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.drafters.lookup import NGram
from archsearch.drafts.heads import head_folder, load_head, trained_heads
from archsearch.drafts.records import load_trained
from archsearch.drafts.trainer import DraftTrainer
from archsearch.engine_facts import engine_facts, engine_title
from archsearch.engines.engine import EnginePrompt, ExitAfter, Sampling, drafter_family
from archsearch.errors import ArchsearchError, MissingDataError, RunFailed
from archsearch.estimate import Estimate
from archsearch.files import write_json
from archsearch.models.drafters import head_family_of
from archsearch.models.files import has_weights
from archsearch.pipeline.candidates import write_report
from archsearch.pipeline.confirm_prompts import check_tokenizer, confirming_prompts, outcome_row
from archsearch.pipeline.engine_choice import (
    EngineChoice,
    check_choice,
    engine_settings,
    engine_target,
    serving_scorer,
)
from archsearch.pipeline.heads import head_score, served_gamma
from archsearch.pipeline.lookups import lookup_in, replayed, texts_at_hand
from archsearch.pipeline.session import SearchSession, check_weights
from archsearch.pipeline.untrained import Untrained, exit_shape
from archsearch.progress import ProgressLine
from archsearch.runs.run import open_run
from archsearch.search.objective import Score, Scorer

if TYPE_CHECKING:
    from archsearch.engines.measure.results import Confirmation

USUAL_GAMMA: Final = 3
NEAR: Final = (
    0.05  # of the foretold acceptance at position 1, besides what counting few rounds leaves open
)


@dataclass(frozen=True)
class FamilyRequest:
    """What runs: `families` (independent, eagle3, peagle, medusa, ngram, early_exit); `gamma` for
    all of them (None: what each was scored or trained for); `rank`: the independent draft; `count`
    held-out prompts, or those of a file; `exact`: so many of them in float32 besides."""

    families: tuple[str, ...]
    gamma: int | None = None
    rank: int = 1
    count: int = 24
    prompts: Path | None = None
    exact: int = 8


@dataclass(frozen=True)
class _Candidate:
    """One drafter: what the engine takes, its gamma, and the acceptance by position that held-out
    text foretold (() for none)."""

    family: str
    source: Any
    gamma: int
    foretold: tuple[float, ...] = ()


def confirm_families(
    session: SearchSession, request: FamilyRequest, choice: EngineChoice
) -> dict[str, Any]:
    """Run the target alone and every drafter in one engine; write
    heads/<family>/confirmed-<engine>.json and heads/comparison-<engine>.json. Where the run's dtype
    is not float32, identity is checked in float32 besides.

    Raises ArchsearchError or MissingDataError, before anything runs, for a family that the engine
    is not started with, a head or draft that is not trained or not of this target, a gamma beyond a
    head's.
    """
    name = choice.name or session.request.engine
    check_weights(session.target)
    check_choice(choice, name)
    if choice.server_url:
        raise ArchsearchError(
            "a running server has one drafter; leave --server-url or --family out"
        )
    candidates = [
        _candidate(session, family, request, name) for family in dict.fromkeys(request.families)
    ]
    trainer = session.trainer()
    for candidate in candidates:
        if isinstance(candidate.source, Path):
            check_tokenizer(trainer.tokenizer, candidate.source)
    asked = confirming_prompts(trainer, request.prompts, request.count)
    sampling = Sampling(
        session.request.answer_tokens,
        temperature=session.request.temperature,
        seed=session.request.seed,
    )
    dtype = session.source.dtype
    found = _measured(session, trainer, choice, name, candidates, asked, sampling, dtype)
    exact = (
        found
        if dtype == "float32"
        else _exact(session, trainer, choice, name, candidates, asked[: request.exact])
    )
    scorer, words = serving_scorer(session, name)
    length = statistics.fmean(len(prompt.token_ids) for prompt in asked)
    scorer = scorer.at_context(round(length + sampling.max_new_tokens / 2))
    scores = [_foretold_score(session, scorer, candidate, request.rank) for candidate in candidates]
    rows = [
        _row(candidate, score, found.get(candidate.family), exact.get(candidate.family))
        for candidate, score in zip(candidates, scores, strict=True)
    ]
    result = {
        "run": str(session.run.path),
        "engine": name,
        "dtype": dtype,
        "prompts": len(asked),
        "threads": session.source.threads,
        "baseline_tokens_per_s": next(
            (row["baseline_tokens_per_s"] for row in rows if "baseline_tokens_per_s" in row), None
        ),
        "rows": rows,
        "order": order_of(rows),
        "latency": words,
    }
    _write(session.run.path, name, result)
    return result


def _candidate(
    session: SearchSession, family: str, request: FamilyRequest, engine: str
) -> _Candidate:
    facts, path = engine_facts(engine), session.run.path
    if family not in facts.confirms:
        raise ArchsearchError(
            f"{engine_title(engine)} is not started with {family} drafters here, only with"
            f" {', '.join(facts.confirms)}; name another --engine or --family"
        )
    if family == "ngram":
        return _Candidate(family, lookup_in(engine, family), request.gamma or USUAL_GAMMA)
    if family == "early_exit":
        known = _exit(session)
        return _Candidate(
            family, ExitAfter(known.architecture.num_hidden_layers), request.gamma or known.gamma
        )
    if family == "independent":
        folder = session.run.best_dir(request.rank)
        if not has_weights(folder):
            raise MissingDataError(
                f"rank {request.rank} of {path} has no weights; train it first: archsearch train"
                f" {path} --rank {request.rank}"
            )
        return _Candidate(family, folder, request.gamma or session.run.score(request.rank).gamma)
    head = head_family_of(family)
    if head not in trained_heads(path):
        raise MissingDataError(
            f"{path} has no trained {family} head; train it first: archsearch train {path} --family"
            f" {family}"
        )
    return _head(session, request, head_folder(path, head))


def _exit(session: SearchSession) -> Score:
    """The best exit: of the run's ranks where one is among them, else of all that the search would
    look at, by the prior."""
    for score in session.run.scores():
        if score.family == "early_exit":
            return score
    target = session.scorer.target
    exits = Untrained("early_exit").layers(target.num_hidden_layers)
    found = [session.scorer(exit_shape(target, layers)) for layers in exits]
    return max(found, key=lambda score: score.speedup.value)


def _head(session: SearchSession, request: FamilyRequest, folder: Path) -> _Candidate:
    from archsearch.training.heads.folder import TargetFacts, check_head

    trained = load_head(folder)
    check_head(folder, TargetFacts.of(session.target.architecture, session.target.name))
    gamma = request.gamma or served_gamma(session.run.path, trained)
    if gamma > trained.plan.gamma:
        raise ArchsearchError(
            f"the {trained.plan.family} head was trained for gamma {trained.plan.gamma}, got gamma"
            f" {gamma}"
        )
    replay = trained.replays.get(gamma)
    return _Candidate(
        trained.plan.family, folder, gamma, replay.accepted_by_position if replay else ()
    )


def _measured(
    session: SearchSession,
    trainer: DraftTrainer,
    choice: EngineChoice,
    name: str,
    candidates: Sequence[_Candidate],
    asked: Sequence[EnginePrompt],
    sampling: Sampling,
    dtype: str,
) -> Mapping[str, Confirmation]:
    from archsearch.engines.measure.by_prompt import confirmations
    from archsearch.engines.measure.turns import Plan, Variant, run_plan
    from archsearch.engines.registry import make_engine

    longest = max(len(prompt.token_ids) for prompt in asked) + sampling.max_new_tokens
    settings = engine_settings(session, choice, concurrency=1, max_len=longest, dtype=dtype)
    inside = engine_facts(name).in_process
    variants = [
        Variant(
            candidate.family,
            _loaded(candidate.source, dtype) if inside else candidate.source,
            candidate.gamma,
        )
        for candidate in candidates
    ]
    target = trainer.model(dtype) if inside else engine_target(session.target)
    plan = Plan(
        target,
        variants,
        asked,
        sampling,
        apart=not inside and _too_many(session, len(candidates) + 1),
    )
    with ProgressLine(f"confirm in {name}") as line:
        return run_plan(
            lambda _: make_engine(name, settings, trainer.tokenizer),
            plan,
            confirmations,
            progress=line,
        )


def _loaded(source: Any, dtype: str) -> Any:
    """What an engine in this process takes in the place of a draft: a module for the folder of a
    draft model."""
    from archsearch.models.drafts import load_draft

    return (
        load_draft(source, dtype)
        if isinstance(source, Path) and drafter_family(source) == "independent"
        else source
    )


def _too_many(session: SearchSession, engines: int) -> bool:
    from archsearch.pipeline.engine_choice import take_turns

    return take_turns(session, session.target.architecture, engines, 1)


def _exact(
    session: SearchSession,
    trainer: DraftTrainer,
    choice: EngineChoice,
    name: str,
    candidates: Sequence[_Candidate],
    asked: Sequence[EnginePrompt],
) -> Mapping[str, Confirmation]:
    """A short greedy run in float32, where every answer must be the target's own; {} where it
    failed."""
    if session.request.temperature:
        return {}
    short = Sampling(min(64, session.request.answer_tokens), seed=session.request.seed)
    try:
        return _measured(session, trainer, choice, name, candidates, asked, short, "float32")
    except RunFailed:  # what was measured stands without it
        return {}


def _foretold_score(
    session: SearchSession, scorer: Scorer, candidate: _Candidate, rank: int
) -> Score | None:
    """The score of a drafter at its gamma, its tokens a round as held-out text has them; None where
    that text is not there."""
    gamma, target = candidate.gamma, session.target.architecture
    try:
        if candidate.family == "ngram":
            known = replayed(texts_at_hand(session), candidate.source, [gamma])
            assert known.share is not None and known.taus is not None
            drafter = NGram(target, candidate.source.shortest).with_share(known.share.value)
            return scorer.measured(drafter, known.acceptance.alpha, known.taus, gammas=[gamma])
        if candidate.family == "early_exit":
            best = _exit(session)
            return best if best.gamma == gamma else None
        if candidate.family == "independent":
            draft = load_trained(session.run.score(rank).architecture, session.run.best_dir(rank))
            return scorer.measured(draft.architecture, draft.alpha, draft.tau, gammas=[gamma])
        head = load_head(candidate.source)
        return head_score(session, head, {gamma: head.replays[gamma].estimate()}, scorer)
    except (ArchsearchError, KeyError):  # no held-out text, or none long enough for such a round
        return None


def order_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The drafters by speed-up as foretold and as measured, and the pairs that came out the other
    way round: `inside` where the two speed-ups lie no further apart than their error bars, foretold
    or measured. None with fewer than two to compare."""
    known = [row for row in rows if row.get("predicted_speedup") is not None and "speedup" in row]
    if len(known) < 2:
        return None
    told = {
        row["family"]: Estimate(row["predicted_speedup"], row["predicted_std"], "modelled")
        for row in known
    }
    seen = {
        row["family"]: Estimate(row["speedup"]["value"], row["speedup"]["std"], "measured")
        for row in known
    }
    swapped = []
    for one, other in itertools.combinations(told, 2):
        if (told[one].value - told[other].value) * (seen[one].value - seen[other].value) < 0:
            inside = any(
                abs(found[one].value - found[other].value)
                <= math.hypot(found[one].std, found[other].std)
                for found in (told, seen)
            )
            swapped.append({"pair": [one, other], "inside": inside})
    names = {"predicted": told, "measured": seen}
    by_gain = {
        name: sorted(found, key=lambda family: -found[family].value)
        for name, found in names.items()
    }
    return {**by_gain, "swapped": swapped}


def _row(
    candidate: _Candidate,
    score: Score | None,
    outcome: Confirmation | None,
    exact: Confirmation | None,
) -> dict[str, Any]:
    """One drafter as it stands in the comparison."""
    row: dict[str, Any] = {
        "family": candidate.family,
        "gamma": candidate.gamma,
        "foretold_by_position": list(candidate.foretold),
    }
    if score is not None:
        row |= {"predicted_tau": score.tau.to_dict(), "predicted_std": score.speedup.std}
    if outcome is None:
        return row | {"note": "proposed nothing on these prompts"}
    identical = (
        None
        if exact is None
        else {
            "prompts": exact.identical_output.prompts,
            "identical": exact.identical_output.identical,
        }
    )
    warning = suspicious(candidate.foretold, outcome.accepted_by_position, outcome.rounds or 0)
    data = outcome_row(outcome, None if score is None else score.speedup.value)
    return row | data | {"identical_output_float32": identical, "warning": warning}


def suspicious(foretold: Sequence[float], counted: Sequence[float], rounds: int) -> str | None:
    """Why an engine's acceptance at position 1 does not fit what held-out text foretold; None where
    it does, or nothing did.

    What is left open by counting: two standard deviations of a share of `rounds`, twice as wide as
    for independent ones.
    """
    if not foretold or not counted:
        return None
    expected, seen = foretold[0], counted[0]
    open_ = NEAR + 4.0 * math.sqrt(max(expected * (1 - expected), 0.01) / max(rounds, 1))
    if seen >= expected - open_:
        return None
    return (
        f"the engine accepts {seen:.2f} at position 1 where held-out text foretold {expected:.2f}:"
        " it may read other layers than the head was trained on"
        " (eagle_aux_hidden_state_layer_ids), or norm in another order (norm_before_residual)"
    )


def _write(run: Path, engine: str, result: dict[str, Any]) -> None:
    folder = run / "heads"
    for row in result["rows"]:
        if row["family"] != "independent":
            write_json(
                folder / row["family"] / f"confirmed-{engine}.json",
                {**row, "dtype": result["dtype"]},
            )
    write_json(folder / f"comparison-{engine}.json", result)
    write_report(open_run(run))


def with_gamma(request: FamilyRequest, gammas: Sequence[int]) -> FamilyRequest:
    """The request at the one gamma that was asked for. Raises ArchsearchError for several: families
    are compared at one each."""
    if len(gammas) > 1:
        raise ArchsearchError(
            f"families are compared at one gamma each, got {list(gammas)}; run them one after the"
            " other"
        )
    return replace(request, gamma=gammas[0] if gammas else None)
