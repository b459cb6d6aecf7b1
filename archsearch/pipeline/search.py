"""`archsearch search`: score, rank, train the finalists, confirm the best."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from archsearch.drafts.records import TrainedDraft
from archsearch.drafts.trainer import DraftTrainer
from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError
from archsearch.models.drafters import HEAD_FAMILIES
from archsearch.needs import Needs
from archsearch.pipeline.budget import budget_data
from archsearch.pipeline.budgets import what_budgets_buy
from archsearch.pipeline.candidates import write_best, write_report
from archsearch.pipeline.confirm_families import FamilyRequest, confirm_families
from archsearch.pipeline.confirm_prompts import confirm_rank
from archsearch.pipeline.engine_choice import EngineChoice
from archsearch.pipeline.existing import EXISTING, alternatives, within_budget
from archsearch.pipeline.families import INDEPENDENT, best_of_each, family_rows, trials_of
from archsearch.pipeline.family_results import (
    climbing_share,
    family_results,
    head_rungs,
    train_heads,
    with_replays,
)
from archsearch.pipeline.finalists import finalist_notes, train_finalists
from archsearch.pipeline.hopeless import hopeless
from archsearch.pipeline.next_steps import next_steps
from archsearch.pipeline.pareto import write_pareto
from archsearch.pipeline.rounds_explained import engine_data, free_layers, warnings_of
from archsearch.pipeline.session import SearchRequest, SearchSession
from archsearch.pipeline.shared_work import Job
from archsearch.pipeline.text_verdict import text_verdict
from archsearch.pipeline.workers import can_confirm_beside, confirm_job, workers_beside
from archsearch.progress import ProgressLine, human_time, say
from archsearch.records import as_data
from archsearch.runs.budgets import write_budgets
from archsearch.runs.families import write_families
from archsearch.runs.lock import run_lock
from archsearch.runs.run import RUNGS_FILE
from archsearch.runs.state import StateFile
from archsearch.search import study
from archsearch.search.objective import Score
from archsearch.search.ranking import led_by_need
from archsearch.search.rungs import TEXT_SHARE_ALONE
from archsearch.search.space import SearchSpace
from archsearch.search.why import rivals

if TYPE_CHECKING:
    from archsearch.pipeline.climb import Climb


def search(request: SearchRequest, *, anyway: bool = False) -> dict[str, Any]:
    """Score, rank and, with `confirm`, train drafts, run the best in the engine and write
    everything into the run folder.

    With `confirm` the target writes its text first, so that the search knows how much of it a
    trimmed head covers. Then either the prior's best `finalists` are trained, or, with `climb`,
    those that short trainings leave (`pipeline.climb`). Where nothing that would be trained can be
    expected to pay, it only ranks, and says why as `refused`, unless `anyway`.
    """
    start = time.monotonic()
    session = SearchSession.start(request)
    with run_lock(session.run.path, "archsearch search"):
        if not request.confirm:
            return rank_only(session)
        if not anyway and (why := hopeless(session)):
            return rank_only(session) | {"refused": why}
        return climb_search(session, start) if request.climb else finalist_search(session)


def rank_only(session: SearchSession) -> dict[str, Any]:
    """The ranking by what is known beforehand; nothing is trained."""
    replays = with_replays(session)
    with workers_beside(session):
        result = score_spaces(session)
    session.run.write_trials(result.trials)
    return outcome(session, result, write_ranked(session, [], result.best), []) | {
        "replayed": replays
    }


def finalist_search(session: SearchSession) -> dict[str, Any]:
    """Text, ranking, full training of the prior's best, confirmation; the time budget is for text
    and training."""
    start, whole = time.monotonic(), session.request.time_budget_s
    session.request = request = beside_heads(session.request)
    trainer = session.trainer()
    trainer.texts.write_training_once(TEXT_SHARE_ALONE * request.time_budget_s)
    session.scorer = session.scorer.with_coverage(trainer.texts.coverage())
    with workers_beside(session) as shared:
        result = score_spaces(session)
        session.run.write_trials(result.trials)
        trained = train_finalists(session, trainer, result.best, shared)
    ranked = write_ranked(session, trained, result.best)
    text = text_result(session, trainer, ranked, trained)
    confirmed = [
        confirm_rank(session, rank, trainer=trainer)
        for rank in range(1, min(request.confirm, len(trained)) + 1)
    ]
    notes = (finalist_notes(session) if trained else []) + train_heads(
        session, trainer, trained, start + whole
    )
    families = family_table(session, trainer, trained)  # before the report, which shows them
    return outcome(session, result, ranked, confirmed) | families | {"notes": notes, "text": text}


def beside_heads(request: SearchRequest) -> SearchRequest:
    """The request with the minutes that independent drafts have beside the heads that were asked
    for."""
    return replace(request, time_budget_s=climbing_share(request.families) * request.time_budget_s)


def family_table(
    session: SearchSession, trainer: DraftTrainer, trained: Sequence[TrainedDraft]
) -> dict[str, Any]:
    """The best of each family on the run's text, as part of a result and as families.json."""
    if not trained:
        return {}
    rows = [result.to_dict() for result in family_results(session, trainer, trained)]
    write_families(session.run.path, rows)
    return {"families": rows}


def text_result(
    session: SearchSession,
    trainer: DraftTrainer,
    ranked: Sequence[Score],
    trained: Sequence[TrainedDraft],
) -> dict[str, Any] | None:
    """The verdict on the run's text by its best trained draft; None where none was trained."""
    drafts = {draft.architecture: draft for draft in trained}
    best = next(
        (drafts[score.architecture] for score in ranked if score.architecture in drafts), None
    )
    return None if best is None else text_verdict(session, trainer, best).to_dict()


def write_ranked(
    session: SearchSession, trained: Sequence[TrainedDraft], ranked: Sequence[Score]
) -> list[Score]:
    """best/ of the run: trained drafts by what was measured of them, then the best of the rest; as
    many as were asked for."""
    besides = [each for each in alternatives(session) if within_budget(session, each.score)]
    session.contexts = {(each.score.proposer, each.score.needs): each.context for each in besides}
    measured, rest = with_measured(session, trained, ranked)
    rest = sorted([*rest, *(each.score for each in besides)], key=lambda score: -score.ranked_by)
    everything = [*measured, *rest]
    chosen = everything[: max(session.request.top, len(trained))]
    have = [
        each.score
        for each in besides
        if each.score.needs is not None and each.score.needs.kind == "exists"
    ]
    for score in [*best_of_each(everything), *have[:EXISTING]]:  # however far behind
        chosen += [] if score in chosen else [score]
    others = sorted(
        (score for score in chosen if score not in measured), key=lambda score: -score.ranked_by
    )
    scores = [*measured, *led_by_need(session.groups(others))]
    best = [score.with_rank(rank) for rank, score in enumerate(scores, start=1)]
    write_best(session, best, {draft.architecture: draft for draft in trained})
    return best


def score_spaces(session: SearchSession) -> study.SearchResult:
    """Rung 0: the studies over all shapes of each family, scored without training any, as one
    result; beside whoever scores along."""
    with ProgressLine("search") as line:
        return study.merged([_study_of(session, space, line) for space in session.families.spaces])


def _study_of(session: SearchSession, space: SearchSpace, line: ProgressLine) -> study.SearchResult:
    """The study over the shapes of one family."""
    request = session.request
    name = "" if space.family == INDEPENDENT else f"{space.family}, "

    def progress(p: study.SearchProgress) -> None:
        line(
            f"{name}best {p.best.speedup.value:.2f}x" if p.best else name,
            float(p.done),
            float(p.total),
        )

    return study.search(
        space,
        session.scorer,
        trials=trials_of(space, request.trials),
        seed=request.seed,
        storage=request.storage or session.run.storage_file,
        about=session.about(),
        progress=progress,
        how=study.How(
            request.sampler, shared=request.workers > 0, regret=True, goals=request.pareto
        ),
    )


def with_measured(
    session: SearchSession, trained: Sequence[TrainedDraft], ranked: Sequence[Score]
) -> tuple[list[Score], list[Score]]:
    """The measured scores of trained drafts, best first, and the predicted ones of the rest."""
    measured = []
    for draft in trained:
        score = session.scorer.measured(draft.architecture, draft.alpha, draft.tau)
        measured.append(replace(score, needs=Needs("exists", str(draft.folder))))
    measured.sort(key=lambda score: -score.worth)
    shapes = {score.architecture for score in measured}
    return measured, [score for score in ranked if score.architecture not in shapes]


def outcome(
    session: SearchSession,
    result: study.SearchResult,
    ranked: Sequence[Score],
    confirmed: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """What `search` returns; writes the report."""
    pareto = write_pareto(session, result.best) if session.request.pareto else None
    budgets = what_budgets_buy(session, ranked, result.best)
    write_budgets(session.run.path, budgets)  # before the report, which draws it
    report = write_report(session.run, session)
    groups = session.groups(ranked)
    return {
        "run": str(session.run.path),
        "target": session.target.name,
        "device": session.source.device.key,
        **engine_data(session.source),
        "free_layers": free_layers(session.scorer, ranked[0]) if ranked else None,
        "warnings": warnings_of(
            session.source, [("", session.scorer_of(score), score) for score in ranked[:1]]
        ),
        "latency": session.source.words,
        "dtype": session.source.dtype,
        "weights": session.source.profile.get("weights"),
        "workload": asdict(session.scorer.workload),
        "mix": None if session.request.mix is None else session.request.mix.to_dict(),
        "prior": session.prior_words,
        "earlier": session.earlier(),
        "space": ", ".join(space.name for space in session.families.spaces),
        "families": family_rows(ranked),
        "left_out": list(session.families.left_out),
        "trials": result.finished,
        "invalid": result.invalid,
        "scored": [space.to_dict() for space in result.spaces],
        "regrets": [regret.to_dict() for regret in result.regrets],
        "best": [score.to_dict() for score in ranked],
        "rivals": (
            [rival.to_dict() for rival in rivals(session.scorer, result.best)]
            if not session.request.confirm
            else []
        ),
        "next": (
            []
            if confirmed
            else [step.to_dict() for step in next_steps(session, in_run(result.best, ranked))]
        ),
        "training_budget": budget_data(session.scorer.context.budget, session.budget_asked),
        "budgets": as_data(budgets),
        "indistinguishable": [sorted(s.rank or 0 for s in group) for group in groups],
        "cheapest": [min(group, key=lambda score: score.parameters).rank for group in groups],
        "pareto": pareto,
        "confirmed": list(confirmed),
        "report": str(report),
    }


def in_run(scored: Sequence[Score], ranked: Sequence[Score]) -> list[Score]:
    """The ranks of a run, drafters that exist among them, then what was scored besides; best
    first."""
    kept = {(score.proposer, score.needs) for score in ranked}
    rest = [score for score in scored if (score.proposer, score.needs) not in kept]
    after = itertools.count(len(ranked) + 1)
    both = [*ranked, *(score.with_rank(next(after)) for score in rest)]
    return sorted(both, key=lambda score: -score.ranked_by)


def best_head(families: Sequence[Mapping[str, Any]], engine: str) -> str:
    """The family of the head that stands best and that archsearch runs in `engine`; "" for none."""
    runs = engine_facts(engine).confirms
    return next(
        (
            row["family"]
            for row in families
            if row["family"] in HEAD_FAMILIES and row["family"] in runs
        ),
        "",
    )


def compare_best(ascent: Climb, head: str) -> None:
    """Run the best head beside the best draft, where the plan has time for that; else a note says
    with which command."""
    from archsearch.pipeline import climb

    session, file, plan = ascent.session, ascent.file, ascent.plan
    if not plan.compares:
        file.note(
            f"confirmed was the best independent draft; the {head} head beside it: archsearch"
            f" confirm {session.run.path} --engine {session.request.engine} --family {head}"
            f" --family {INDEPENDENT}"
        )
        return
    if file.state.compared:
        return
    begin = time.monotonic()
    prompts = climb.affordable_prompts(session, file, plan, climb.COMPARISON_COST)
    try:
        confirm_families(
            session, FamilyRequest((head, INDEPENDENT), count=prompts, exact=4), EngineChoice()
        )
    except ArchsearchError as error:  # no reason to lose a search
        file.note(f"the {head} head was not run beside the draft: {error}")
    file.state.compared = True
    file.step("the best head beside the draft", time.monotonic() - begin)
    file.save()


def confirm_trained(ascent: Climb, count: int, later: float = 0.0) -> list[dict[str, Any]]:
    """The first `count` ranks in the engine, each on as many prompts as the time that is left
    allows; those of several GPUs at once. What was confirmed before a kill is not again. `later`:
    confirmations that follow and need time too."""
    from archsearch.pipeline import climb

    session, file, run = ascent.session, ascent.file, ascent.session.run
    state, begin = file.state, time.monotonic()

    def missing() -> list[int]:
        return [
            rank
            for rank in range(1, count + 1)
            if rank not in state.confirmed or run.confirmed(rank) is None
        ]

    if ascent.shared is not None and len(missing()) > 1 and can_confirm_beside(session):
        prompts = climb.affordable_prompts(session, file, ascent.plan, len(missing()) + later)
        jobs = [
            Job("confirm", run.score(rank).architecture, rank=rank, prompts=prompts)
            for rank in missing()
        ]
        ascent.shared.finish(jobs, lambda job: confirm_job(session, job, ascent.trainer))
        state.confirmed += [job.rank for job in jobs if job.rank not in state.confirmed]
        file.save()
    for rank in missing():
        prompts = climb.affordable_prompts(session, file, ascent.plan, count - rank + 1 + later)
        confirm_rank(session, rank, trainer=ascent.trainer, prompt_count=prompts)
        state.confirmed += [] if rank in state.confirmed else [rank]
        file.save()
    file.step("confirm", time.monotonic() - begin)
    return [found for found in map(run.confirmed, range(1, count + 1)) if found is not None]


def climb_search(session: SearchSession, start: float) -> dict[str, Any]:
    """The search that climbs: text, rung 0, short trainings, full training, confirmation, all
    inside the time budget."""
    from archsearch.acceptance.known import known_observations
    from archsearch.pipeline import climb

    request, run = session.request, session.run
    file = StateFile(run.path / RUNGS_FILE, request.time_budget_s, start)
    state = file.state
    plan = climb.make_plan(session, file)
    say(climb.plan_text(plan))
    if plan.stay:
        state.notes = [f"rung 0 only: {plan.stay}"]
        file.save()
        return rank_only(session) | {"rungs": [], "notes": state.notes, "plan": plan.to_dict()}
    trainer = session.trainer()
    climb.write_texts(trainer, file, plan)
    coverage = trainer.texts.coverage()
    session.scorer = session.scorer.with_coverage(coverage)
    known = known_observations(request.target, asked=session.asked_text, exclude=run.path)
    file.note(f"prior: {session.prior_words}")
    with workers_beside(session) as shared:
        begin = time.monotonic()
        result = score_spaces(session)
        state.steps.setdefault("search", time.monotonic() - begin)
        ascent = climb.start_climb(
            session, file, plan, trainer, result.best, known, head_rungs(session, trainer)
        )
        ascent.shared = shared
        trained = ascent.climb()
        run.write_trials(climb.trial_rows(result.trials, state))
        ranked = write_ranked(session, trained, ascent.standings())
        text = text_result(session, trainer, ranked, trained)
        families = family_table(
            session, trainer, trained
        )  # before the engine, which runs each at the gamma that it tells
        head = best_head(families.get("families", []), request.engine)
        beside = climb.COMPARISON_COST if head and plan.compares else 0.0
        confirmed = confirm_trained(ascent, min(request.confirm, len(trained)), beside)
    if head and confirmed:
        compare_best(ascent, head)
    data = outcome(session, result, ranked, confirmed) | families
    file.save()
    seconds = file.elapsed_s()
    say(f"all of it took {human_time(seconds)} of {human_time(request.time_budget_s)}")
    measured = [climb.measured_row(session, draft, coverage) for draft in trained]
    return data | {
        "rungs": climb.summary(state),
        "heads": [entry.to_dict() for entry in state.heads],
        "notes": state.notes,
        "plan": plan.to_dict(),
        "seconds": seconds,
        "steps": state.steps,
        "prompts": trainer.prompts.source,
        "measured": measured,
        "text": text,
    }
