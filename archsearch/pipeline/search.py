"""`archsearch search`: score, rank, train the finalists, confirm the best; or, where nobody named a
device and this machine would not serve the target, rank on each GPU whose kernels ship."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Final

from archsearch.acceptance.known import known_drafts
from archsearch.architecture.counts import parameters
from archsearch.drafts.records import TrainedDraft
from archsearch.drafts.trainer import DraftTrainer
from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.files import write_json
from archsearch.hardware.device import load_device
from archsearch.hardware.identify import identify_cpu, visible_gpus
from archsearch.models.files import HEAD_FAMILIES
from archsearch.models.targets import resolve_target
from archsearch.needs import Needs
from archsearch.pipeline.candidates import served, write_best, write_report
from archsearch.pipeline.climb.belief import Belief
from archsearch.pipeline.climb.climb import Climb
from archsearch.pipeline.climb.plan import (
    COMPARISON_COST,
    affordable_prompts,
    make_plan,
    plan_text,
    summary,
    trial_rows,
    write_texts,
)
from archsearch.pipeline.climb.trainings import Trainings
from archsearch.pipeline.confirm import confirm_rank
from archsearch.pipeline.engine_ways import write_engines
from archsearch.pipeline.families import (
    EXISTING,
    INDEPENDENT,
    alternatives,
    family_rows,
    within_budget,
)
from archsearch.pipeline.heads import head_rungs, keep_states, write_family_table
from archsearch.pipeline.in_engine import EngineChoice
from archsearch.pipeline.next_steps import next_steps
from archsearch.pipeline.rounds_explained import (
    drawn_greedily,
    free_layers,
    too_long,
    warnings_of,
)
from archsearch.pipeline.scoring import hopeless, none_within, score_spaces, write_pareto
from archsearch.pipeline.session import SearchRequest, SearchSession
from archsearch.pipeline.shared_work import Job, SharedWork
from archsearch.pipeline.side_by_side import FamilyRequest, confirm_families
from archsearch.pipeline.train import text_verdict
from archsearch.pipeline.training_budget import asked_budget, what_budgets_buy
from archsearch.pipeline.untrained import with_replays
from archsearch.pipeline.workers import can_confirm_beside, confirm_job, workers_beside
from archsearch.profiles import find_profile, list_profiles, profile_roots
from archsearch.progress import ProgressLine, human_time, say
from archsearch.records import as_data, save
from archsearch.report.answer import at_hand_switched
from archsearch.report.phrases import latency_warning, shell_path
from archsearch.report.reading import read_run
from archsearch.report.terminal.search import (
    Brought,
    Climbed,
    MeasuredDraft,
    Searched,
    Survey,
    SurveyRow,
)
from archsearch.runs.confirmed import Confirmed
from archsearch.runs.lock import run_lock
from archsearch.runs.run import RUNGS_FILE
from archsearch.runs.state import StateFile
from archsearch.runs.tables import BUDGETS_FILE, TextVerdict
from archsearch.search import study
from archsearch.search.objective import Score, Scorer, best_first
from archsearch.search.ranking import best_of_each, led_by_need, rivals
from archsearch.search.rungs import Plan


def search(request: SearchRequest, *, anyway: bool = False) -> Searched:
    """Score, rank and, with `confirm`, train drafts, run the best in the engine; all is written
    into the run folder.

    With `confirm` the target writes its text first: the search then knows how much of it a trimmed
    head covers. Trained in full are those that short trainings leave, or, without a `climb`, the
    prior's best `finalists`. Where nothing that would be trained can be expected to pay, it only
    ranks, and says why as `refused`, unless `anyway`.
    """
    start = time.monotonic()
    session = SearchSession.start(request)
    with run_lock(session.run.path, "archsearch search"):
        if not request.confirm:
            return rank_only(session)
        if not anyway and (why := hopeless(session)):
            return replace(rank_only(session), refused=why)
        return train_and_confirm(session, start)


def rank_only(session: SearchSession) -> Searched:
    """The ranking by what is known beforehand; nothing is trained."""
    session, replays = with_replays(session)
    with workers_beside(session):
        result = score_spaces(session)
    session.run.write_trials(result.trials)
    session = replace(session, besides=tuple(alternatives(session)))
    ranked = write_ranked(session, [], result.best)
    return replace(outcome(session, result, ranked, []), replayed=replays)


def train_and_confirm(session: SearchSession, start: float) -> Searched:
    """Text, rung 0, trainings by the plan of `climb`, confirmation; `start`: when the command
    began (monotonic seconds)."""
    request, run = session.request, session.run
    file = StateFile(run.path / RUNGS_FILE, request.time_budget_s, start, climbs=request.climb)
    state = file.state
    plan = make_plan(session, file)
    say(plan_text(plan))
    if plan.stay:
        state.notes = [f"rung 0 only: {plan.stay}"]
        file.save()
        return replace(rank_only(session), rungs=(), notes=tuple(state.notes), plan=plan)
    trainer = session.trainer()
    keep_states(session, trainer)
    write_texts(trainer, file, plan)
    coverage = trainer.texts.coverage()
    session = replace(session, scorer=session.scorer.with_coverage(coverage))
    known = [
        draft.observation
        for draft in known_drafts(request.target, asked=session.asked_text, exclude=run.path)
    ]
    file.note(f"prior: {session.prior_words}")
    with workers_beside(session) as shared:
        begin = time.monotonic()
        result = score_spaces(session)
        state.steps.setdefault("search", time.monotonic() - begin)
        ascent = Climb(
            session.families.spaces[0],
            plan,
            Trainings(trainer, file, request.seed, shared),
            Belief(session.scorer, known),
            {score.architecture: None for score in result.best},
            head_rungs(session, trainer),
            max(1, request.confirm),
            request.finalists,
        )
        trained = ascent.climb()
        run.write_trials(trial_rows(result.trials, state))
        if not plan.climbs and state.finalists is not None:
            decided = as_data(state.finalists)  # of rungs.json what scripts know
            own = ("shapes", "tokens", "foreseen", "longer")
            kept = {name: decided[name] for name in own if name in decided}
            write_json(run.path / "finalists.json", kept | {"notes": list(state.notes)})
        session = replace(session, besides=tuple(alternatives(session)))
        others = ascent.standings() if plan.climbs else result.best
        ranked = write_ranked(session, trained, others)
        text = text_result(session.scorer, trainer, ranked, trained)
        # Before the engine, which runs each family at the gamma that this table names.
        families = write_family_table(session, trainer, trained) if trained else []
        head = best_head([row.family for row in families], request.engine)
        beside = COMPARISON_COST if head and plan.compares else 0.0
        confirming = Confirming(session, trainer, file, plan)
        count = min(request.confirm, len(trained))
        confirmed = confirming.ranks(count, shared, later=beside)
    if head and confirmed:
        confirming.best_head(head)
    answer = outcome(session, result, ranked, confirmed)
    if families:
        answer = replace(answer, families=tuple(families))
    file.save()
    seconds = file.elapsed_s()
    say(f"all of it took {human_time(seconds)} of {human_time(request.time_budget_s)}")
    known_now = {"rungs": tuple(summary(state)), "notes": tuple(state.notes), "plan": plan}
    return Climbed(
        **vars(answer) | known_now,
        heads=tuple(state.heads),
        seconds=seconds,
        steps=state.steps,
        prompts=trainer.prompts.source,
        measured=tuple(
            _measured(draft, ascent.measured(draft), coverage.share(draft.architecture.head_rows))
            for draft in trained
        ),
        text=text,
    )


def _measured(draft: TrainedDraft, score: Score, coverage: float) -> MeasuredDraft:
    shape = draft.architecture
    return MeasuredDraft(
        label=shape.label(),
        shape=shape,
        alpha=draft.alpha,
        alpha_by_category=draft.alpha_by_category,
        gamma=score.gamma,
        tau=score.tau,
        tau_by_gamma=draft.tau,
        speedup=score.speedup,
        coverage=coverage,
        head_rows=shape.head_rows,
    )


def text_result(
    scorer: Scorer, trainer: DraftTrainer, ranked: Sequence[Score], trained: Sequence[TrainedDraft]
) -> TextVerdict | None:
    """The verdict on the run's text by its best trained draft; None where none was trained."""
    drafts = {draft.architecture: draft for draft in trained}
    shapes = (score.architecture for score in ranked)
    best = next((drafts[shape] for shape in shapes if shape in drafts), None)
    return None if best is None else text_verdict(scorer, trainer, best)


def write_ranked(
    session: SearchSession, trained: Sequence[TrainedDraft], ranked: Sequence[Score]
) -> list[Score]:
    """best/ of the run: trained drafts by what was measured of them, then the best of the rest and
    of the drafters besides."""
    besides = [each.score for each in session.besides if within_budget(session, each.score)]
    measured = [
        replace(draft.score(session.scorer), needs=Needs("exists", str(draft.folder)))
        for draft in trained
    ]
    measured.sort(key=lambda score: -score.worth)
    shapes = {score.architecture for score in measured}
    rest = [score for score in ranked if score.architecture not in shapes]
    everything = [*measured, *best_first([*rest, *besides])]
    chosen = everything[: max(session.request.top, len(trained))]
    have = [score for score in besides if score.needs_kind == "exists"]
    for score in [*best_of_each(everything), *have[:EXISTING]]:  # however far behind
        chosen += [] if score in chosen else [score]
    others = best_first(score for score in chosen if score not in measured)
    scores = [*measured, *led_by_need(session.groups(others))]
    best = [score.with_rank(rank) for rank, score in enumerate(scores, start=1)]
    write_best(session, best, {draft.architecture: draft for draft in trained})
    return best


def outcome(
    session: SearchSession,
    result: study.SearchResult,
    ranked: Sequence[Score],
    confirmed: Sequence[Confirmed],
) -> Searched:
    """What `search` returns; writes the report."""
    pareto = write_pareto(session, result.best) if session.request.pareto else None
    besides = [each.score for each in session.besides]
    scorer, source, request = session.scorer, session.source, session.request
    budgets = what_budgets_buy(scorer, source.device, ranked, result.best, besides)
    save(session.run.path / BUDGETS_FILE, budgets)  # before the report, which draws it
    write_engines(session)
    report = write_report(session.run, session)
    groups = session.groups(ranked)
    unprofiled = filter(None, [latency_warning(source.words, session.target.name)])
    reach = scorer.workload.context_len if request.mix is None else request.mix.longest
    reading = read_run(session.run)
    better = reading.remedied
    option, switched = at_hand_switched(reading.candidates, better)
    if option is not None and switched is not None:  # as the answer serves it
        config = served(session, replace(option.score, gamma=switched.gamma), option.hub_id)
        session.run.write_best(option.score, speculative_config=config or None)
    quicker = {each.rank for each in better if each.rate > ranked[0].speedup.value}
    told = [score for score in ranked if score is ranked[0] or score.rank in quicker]
    priced = [(f"rank {score.rank}", session.scorer_of(score), score) for score in told]
    advice = warnings_of(source.rounds, source.words, priced)
    if session.run.temperature:
        kinds = {score.family for score in ranked}
        advice += drawn_greedily(source.engine, source.version, kinds)
    over = [
        f"{space.family} is left out: {none_within(session, [counted])}"
        for space, counted in zip(session.families.spaces, result.spaces, strict=True)
        if all(score.family != space.family for score in ranked)
    ]
    return Searched(
        run=session.run.path,
        target=session.target.name,
        device=source.device.key,
        by=(source.running(ranked[0].proposer.rounds) if ranked else source).by,
        free_layers=free_layers(scorer, ranked[0]) if ranked else None,
        warnings=(*too_long(scorer, reach), *unprofiled, *advice),
        latency=source.words,
        dtype=source.dtype,
        weights=source.profile.get("weights"),
        workload=scorer.workload,
        mix=request.mix,
        prior=session.prior_words,
        earlier=session.earlier(),
        space=", ".join(space.name for space in session.families.spaces),
        families=tuple(family_rows(ranked)),
        left_out=(*session.families.left_out, *over),
        trials=result.finished,
        invalid=result.invalid,
        scored=result.spaces,
        regrets=result.regrets,
        remedied=better,
        best=tuple(ranked),
        rivals=() if request.confirm else tuple(rivals(scorer, result.best)),
        next=() if confirmed else tuple(next_steps(session, in_run(result.best, ranked))),
        training_budget=asked_budget(scorer.context.budget, request.training_budget_s is not None),
        budgets=budgets,
        indistinguishable=tuple(
            tuple(sorted(score.rank or 0 for score in group)) for group in groups
        ),
        cheapest=tuple(min(group, key=lambda score: score.parameters).rank for group in groups),
        pareto=pareto,
        confirmed=tuple(confirmed),
        report=report,
    )


def in_run(scored: Sequence[Score], ranked: Sequence[Score]) -> list[Score]:
    """The ranks of a run, then what was scored besides; best first."""
    kept = {(score.proposer, score.needs) for score in ranked}
    rest = [score for score in scored if (score.proposer, score.needs) not in kept]
    after = itertools.count(len(ranked) + 1)
    both = [*ranked, *(score.with_rank(next(after)) for score in rest)]
    return best_first(both)


def best_head(families: Sequence[str], engine: str) -> str:
    """The first head of `families` that archsearch runs in `engine`; "" for none."""
    runs = engine_facts(engine).confirms
    return next((name for name in families if name in HEAD_FAMILIES and name in runs), "")


@dataclass(frozen=True)
class Confirming:
    """The last step of a search that trained: the best in the engine, each on as many prompts as
    there is time for."""

    session: SearchSession
    trainer: DraftTrainer
    file: StateFile
    plan: Plan

    def prompts(self, drafts: float) -> int:
        """Prompts for each of so many that are still to be confirmed."""
        return affordable_prompts(self.session, self.file, self.plan, drafts)

    def ranks(
        self, count: int, shared: SharedWork | None = None, later: float = 0.0
    ) -> list[Confirmed]:
        """The first `count` ranks; those of several GPUs at once. What was confirmed before is not
        again. `later`: confirmations that follow and need time too."""
        session, file, run = self.session, self.file, self.session.run
        done, begin = file.state.confirmed, time.monotonic()

        def missing() -> list[int]:
            ranks = range(1, count + 1)
            return [rank for rank in ranks if rank not in done or run.confirmed(rank) is None]

        if shared is not None and len(missing()) > 1 and can_confirm_beside(session):
            prompts = self.prompts(len(missing()) + later)
            jobs = [
                Job("confirm", run.score(rank).architecture, rank=rank, prompts=prompts)
                for rank in missing()
            ]
            shared.finish(jobs, lambda job: confirm_job(session, job, self.trainer))
            done += [job.rank for job in jobs if job.rank not in done]
            file.save()
        for rank in missing():
            prompts = self.prompts(count - rank + 1 + later)
            confirm_rank(session, rank, trainer=self.trainer, prompt_count=prompts)
            done += [] if rank in done else [rank]
            file.save()
        file.step("confirm", time.monotonic() - begin)
        return [found for found in map(run.confirmed, range(1, count + 1)) if found is not None]

    def best_head(self, head: str) -> None:
        """Run the best head beside the best draft, once, if the plan has time; else a note says
        how."""
        session, file = self.session, self.file
        if not self.plan.compares:
            file.note(
                f"confirmed was the best independent draft; the {head} head beside it: archsearch"
                f" confirm {shell_path(session.run.path)} --engine {session.request.engine}"
                f" --family {head} --family {INDEPENDENT}"
            )
            return
        if file.state.compared:
            return
        begin = time.monotonic()
        prompts = self.prompts(COMPARISON_COST)
        try:
            confirm_families(
                session, FamilyRequest((head, INDEPENDENT), count=prompts, exact=4), EngineChoice()
            )
        except ArchsearchError as error:  # no reason to lose a search
            file.note(f"the {head} head was not run beside the draft: {error}")
        file.state.compared = True
        file.step("the best head beside the draft", time.monotonic() - begin)
        file.save()


LEAST_PARAMETERS: Final = 4e9
"""A target with fewer is taken to be meant for this CPU, which then wants a profile."""


def surveyed_devices(request: SearchRequest) -> tuple[str, ...]:
    """The GPUs to answer for; () where the search is for one that was named, that is here, or this
    CPU. Raises ArchsearchError for an unknown target."""
    asked = request.asked
    if asked.gpu is not None or asked.profile is not None or request.confirm or visible_gpus():
        return ()
    count, cpu = parameters(resolve_target(request.target).architecture), identify_cpu()
    if count < LEAST_PARAMETERS:
        return ()
    with suppress(MissingDataError):  # without a profile this CPU is none to answer for
        find_profile(cpu.key)
        if 2.0 * count < 0.8 * cpu.memory_bytes:  # it holds the weights in 16 bits
            return ()
    shipped = (
        path.parent.name for path in list_profiles() if path.is_relative_to(profile_roots()[-1])
    )
    keys = sorted(set(shipped), key=lambda key: load_device(key).bandwidth_bytes_per_s)
    return tuple(key for key in keys if not load_device(key).is_cpu)


def survey(request: SearchRequest, devices: Sequence[str]) -> Survey:
    """The best to be had today and within the training budget on each of `devices`, as `search`
    ranks them; a device that cannot hold the target has an `error`. No run folder is left."""
    rows: list[SurveyRow] = []
    with (
        ProgressLine("search on the GPUs that ship") as line,
        tempfile.TemporaryDirectory(prefix="archsearch-") as folder,
    ):
        for number, key in enumerate(devices):
            line(key, float(number), float(len(devices)))
            asked = replace(request.asked, gpu=key)
            try:
                with redirect_stderr(StringIO()):  # one bar for all of them
                    found = search(replace(request, asked=asked, run=Path(folder) / key))
            except ArchsearchError as error:
                rows.append(SurveyRow(key, error=str(error)))
                continue
            rows.append(SurveyRow(key, _brought(found)))
    return Survey(request.target, tuple(rows))


def _brought(found: Searched) -> Brought:
    def first(trains: bool) -> Score | None:
        kinds = ("training", "") if trains else ("exists", "nothing")
        return next((score for score in found.best if score.needs_kind in kinds), None)

    return Brought(
        engine=found.by.served,
        tensor_parallel=found.workload.tensor_parallel,
        dtype=found.dtype,
        today=first(False),
        trained=first(True),
        training_budget=found.training_budget,
        warnings=found.warnings,
    )
