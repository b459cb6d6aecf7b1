"""`archsearch confirm --concurrency`: a candidate under load, beside its prediction, term by term.

Several requests in flight, medians over interleaved repeats; for a draft without weights with
random ones and synthetic acceptance at the predicted rates, so that a shape is proved before it is
trained.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from archsearch.architecture.architecture import Architecture
from archsearch.engine_facts import engine_facts
from archsearch.engines.engine import EnginePrompt, Sampling
from archsearch.engines.measure.turns import ALONE, Plan, Variant, run_plan
from archsearch.engines.measure.under_load import (
    Results,
    load_results,
    overall_speedups,
    schedule_verdict,
    token_s,
)
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.estimate import Estimate
from archsearch.files import write_json
from archsearch.models.files import has_weights
from archsearch.pipeline.comparison import error_summary, explain, measured_terms, predicted_terms
from archsearch.pipeline.engine_choice import (
    PARTIAL_FILE,
    EngineChoice,
    check_choice,
    engine_settings,
    keep_partial,
    serving_scorer,
    take_turns,
)
from archsearch.pipeline.families import check_independent
from archsearch.pipeline.latency import machine_slowdown
from archsearch.pipeline.schedule import Rates, acceptance_of, schedule_points, speedup_when_off
from archsearch.pipeline.session import SearchSession
from archsearch.pipeline.stand_ins import DraftFolders
from archsearch.progress import ProgressLine
from archsearch.runs.load import LOAD_FILE, LoadRecord, LoadRow, ScheduleRun
from archsearch.schedule import Ranges, SchedulePoint, largest_gamma, schedule_from_points
from archsearch.search.objective import Score, Scorer
from archsearch.text.prompt_set import spread_prompts

if TYPE_CHECKING:
    from archsearch.engines.engine import ModelSource

RIVAL_GAMMAS: Final = (1, 3, 5)
SCHEDULED: Final = "schedule"  # the name of the variant that follows the schedule


@dataclass(frozen=True)
class LoadRequest:
    """What is confirmed under load: `gammas` (empty: the best at each concurrency), `synthetic`
    acceptance (always for a draft without weights), the `schedule` against each fixed gamma,
    `tokens` new ones per request."""

    rank: int = 1
    gammas: tuple[int, ...] = ()
    concurrencies: tuple[int, ...] = (1,)
    synthetic: bool = False
    schedule: bool = False
    repeats: int = 5
    tokens: int = 64
    prompts: Path | None = None


@dataclass(frozen=True)
class _Case:
    """One measurement under load: the candidate, the engine, what acceptance is predicted to be,
    and what is run.

    `folder`: of the rank; `points`: best gamma by batch size, as predicted; `ranges`: the schedule,
    () where none is asked for; `rates`: acceptance by position for each gamma, as predicted;
    `synthetic`: the engine accepts by chance, at these rates.
    """

    session: SearchSession
    request: LoadRequest
    choice: EngineChoice
    engine: str
    score: Score
    folder: Path
    scorer: Scorer
    latency_words: str
    alpha: Estimate
    taus: dict[int, Estimate]
    rates: Rates
    synthetic: bool
    points: dict[int, SchedulePoint]
    ranges: Ranges = ()

    @property
    def concurrencies(self) -> list[int]:
        return sorted(set(self.request.concurrencies))

    @property
    def architecture(self) -> Architecture:
        return self.score.architecture


def confirm_load(
    session: SearchSession, request: LoadRequest, choice: EngineChoice | None = None
) -> LoadRecord:
    """Run a candidate at several concurrencies and write load-<engine>.json: predicted beside
    measured, term by term.

    With synthetic acceptance the engine accepts by chance at the predicted rates: times are real,
    the text is not the target's.
    """
    case = _case(session, request, choice or EngineChoice())
    gammas = _gammas(case)
    folders = DraftFolders(session, case.engine)
    draft, target, dummy = (
        folders.draft(case.architecture, case.folder, case.synthetic),
        *folders.target(case.synthetic),
    )
    if case.ranges:
        # An engine takes one set of rates, for the largest gamma. The fixed gammas get the same, so
        # that only times differ.
        common = case.rates[max([*gammas, *(gamma for _, _, gamma in case.ranges)])]
        case = replace(
            case, rates={gamma: common[:gamma] for gamma in case.rates if gamma <= len(common)}
        )
    variants = _variants(case, gammas, draft)
    asked = load_prompts(session, case.scorer, request, case.synthetic)
    started = time.monotonic()
    slowdowns = [machine_slowdown(session.source)]
    plan = Plan(target, variants, asked, _sampling(case), case.concurrencies, case.request.repeats)
    results = _measure(case, plan, dummy, folders.inside)
    slowdowns.append(machine_slowdown(session.source))
    known = [value for value in slowdowns if value is not None]
    context = round(
        statistics.fmean(len(prompt.token_ids) for prompt in asked) + request.tokens / 2
    )
    measured = _Measured(results, context, statistics.fmean(known) if known else None)
    rows = tuple(
        _load_row(case, measured, variant, number)
        for variant in variants
        for number in case.concurrencies
    )
    record = LoadRecord(
        engine=case.engine,
        engine_version=results[ALONE, case.concurrencies[0]].engine_version,
        rank=request.rank,
        architecture=case.architecture.label(),
        dtype=session.source.dtype,
        synthetic=case.synthetic,
        alpha=case.alpha,
        asked_acceptance_by_position=tuple(case.rates[max(gammas)]) if case.synthetic else (),
        context=context,
        slowdown=measured.slowdown,
        repeats=request.repeats,
        latency=case.latency_words,
        baseline=tuple(results[ALONE, number] for number in case.concurrencies),
        rows=rows,
        summary=error_summary(rows),
        seconds=time.monotonic() - started,
        schedule=_schedule_run(case, variants, results) if case.ranges else None,
    )
    write_json(case.folder / LOAD_FILE.format(engine=case.engine), record.to_dict())
    return record


def _case(session: SearchSession, request: LoadRequest, choice: EngineChoice) -> _Case:
    """What is to be run, refused where the engine cannot or the memory does not hold it. Loads
    nothing."""
    name = choice.name or session.request.engine
    score, folder = session.run.score(request.rank), session.run.best_dir(request.rank)
    check_independent(score, "confirming", session.run.path)
    synthetic = request.synthetic or not has_weights(folder)
    concurrencies = sorted(set(request.concurrencies))
    check_choice(
        choice, name, synthetic=synthetic, schedule=request.schedule, concurrency=concurrencies[-1]
    )
    scorer, words = serving_scorer(session, name)
    engine_facts(name).check_draft(score.architecture, scorer.workload.tensor_parallel)
    alpha, taus, rates = acceptance_of(scorer, score, folder)
    device = session.source.device
    sizes = (
        sorted({1, *concurrencies}) if request.schedule else concurrencies
    )  # a schedule begins at batch size 1
    points = {
        point.batch_size: point
        for point in schedule_points(scorer, score.architecture, alpha, taus, device, sizes)
    }
    missing = [number for number in concurrencies if number not in points]
    if missing:
        raise ArchsearchError(
            f"target and draft at {missing[0]} requests do not fit {device.key}; lower"
            " --concurrency or --context"
        )
    ranges = (
        schedule_from_points([(number, points[number].gamma) for number in sizes])
        if request.schedule
        else ()
    )
    return _Case(
        session,
        request,
        choice,
        name,
        score,
        folder,
        scorer,
        words,
        alpha,
        taus,
        rates,
        synthetic,
        points,
        ranges,
    )


def _gammas(case: _Case) -> list[int]:
    """The fixed gammas that run: as asked, else the best at each concurrency. ArchsearchError for
    one of unknown acceptance."""
    # A schedule is held against fixed gammas below and above its own too.
    usual = {gamma for gamma in RIVAL_GAMMAS if gamma in case.taus} if case.ranges else set()
    best = {max(1, case.points[number].gamma) for number in case.concurrencies}
    gammas = sorted(set(case.request.gammas)) or sorted(best | usual)
    beyond = [
        gamma
        for gamma in gammas
        if gamma not in case.taus or (case.synthetic and gamma not in case.rates)
    ]
    if beyond:
        known = min(max(case.taus), max(case.rates)) if case.synthetic else max(case.taus)
        raise ArchsearchError(
            f"acceptance is known for gamma 1 to {known}, not for {beyond[0]}; use a smaller"
            " --gamma"
        )
    return gammas


def _variants(case: _Case, gammas: Sequence[int], draft: ModelSource) -> list[Variant]:
    """The draft with each fixed gamma, and with the schedule where one is asked for."""
    rates = case.rates if case.synthetic else {}
    variants = [
        Variant(f"gamma {gamma}", draft, gamma, tuple(rates.get(gamma, ()))) for gamma in gammas
    ]
    if not case.ranges:
        return variants
    largest = largest_gamma(case.ranges, 0)
    if not largest:
        raise ArchsearchError(
            "no gamma pays at any of these batch sizes, so the schedule is off and there is no"
            " draft to serve; leave --schedule out, or train further"
        )
    return [
        *variants,
        Variant(SCHEDULED, draft, largest, tuple(rates.get(largest, ())), case.ranges),
    ]


def _sampling(case: _Case) -> Sampling:
    request = case.session.request
    temperature = 0.0 if case.synthetic else request.temperature
    return Sampling(
        case.request.tokens, temperature=temperature, seed=request.seed, ignore_end=case.synthetic
    )


def _measure(case: _Case, plan: Plan, dummy: bool, inside: bool) -> Results:
    """Run the plan in the engine. `dummy`: the target has random weights; `inside`: the engine runs
    in this process. An engine's failure keeps the repeats that were whole."""
    from archsearch.engines.registry import make_engine

    session, request, name = case.session, case.request, case.engine
    most, longest = (
        plan.concurrencies[-1],
        max(len(prompt.token_ids) for prompt in plan.prompts) + request.tokens,
    )
    settings = engine_settings(
        session, case.choice, concurrency=most, max_len=longest, dtype=session.source.dtype
    )
    settings = replace(settings, dummy_weights=dummy)
    tokenizer = None if case.synthetic else session.trainer().tokenizer
    own_process = case.choice.server_url is None and not inside
    plan = replace(
        plan,
        starts=request.repeats,
        # every held-out prompt at least once over the repeats: tau differs more between prompts
        # than times do
        per_request=(
            1 if case.synthetic else max(2, math.ceil(len(plan.prompts) / (request.repeats * most)))
        ),
        apart=own_process and take_turns(session, case.architecture, len(plan.variants) + 1, most),
        seed=session.request.seed,
    )
    try:
        with ProgressLine(f"{name} under load") as line:
            return run_plan(
                lambda _: make_engine(name, settings, tokenizer),
                plan,
                load_results,
                look=token_s,
                progress=line,
            )
    except RunFailed as error:
        raise keep_partial(
            error, case.folder / PARTIAL_FILE.format(what="load", engine=name), "whole repeats"
        ) from error


@dataclass(frozen=True)
class _Measured:
    """What came out. `context`: tokens in the KV cache in mid-answer; `slowdown`: of the machine,
    None where it is not known."""

    results: Results
    context: int
    slowdown: float | None


def _load_row(case: _Case, seen: _Measured, variant: Variant, concurrency: int) -> LoadRow:
    """Predicted beside measured of one variant at one concurrency.

    The machine's slowdown, of which predicted times know nothing, is taken out of the terms and
    leaves the speed-up as it is. With synthetic acceptance tau is what was asked for.
    """
    gamma = variant.gamma_at(concurrency)
    measured, alone = seen.results[variant.name, concurrency], seen.results[ALONE, concurrency]
    assert measured.speedup is not None
    local, arch = case.scorer.at_context(seen.context).at_batch(concurrency), case.architecture
    if not gamma:  # the schedule is off here: what is left of the draft is its idle pass
        off = speedup_when_off(local, arch)
        error = off.value / measured.speedup.value - 1.0
        return LoadRow(measured, alone.tokens_per_s, alone.step_s, off, error, None, None)
    tau = case.taus[gamma]
    if variant.synthetic:
        tau = replace(tau, value=1.0 + sum(variant.synthetic[:gamma]))
    predicted = local.measured(arch, case.alpha, {gamma: tau}, gammas=[gamma])
    counted = local.measured(
        arch, case.alpha, {gamma: Estimate(measured.tau, 0.0, "measured")}, gammas=[gamma]
    )
    overhead = local.latency.round(local.target, arch, local.workload, gamma).overhead_s
    told = measured_terms(
        measured.tau, alone.step_s, measured.draft_s, measured.target_s, measured.rest_s
    )
    return LoadRow(
        measured,
        alone.tokens_per_s,
        alone.step_s,
        predicted.speedup,
        predicted.speedup.value / measured.speedup.value - 1.0,
        counted.speedup.value / measured.speedup.value - 1.0,
        explain(predicted_terms(predicted, overhead), told, seen.slowdown or 1.0),
    )


def _schedule_run(case: _Case, variants: Sequence[Variant], results: Results) -> ScheduleRun:
    """The schedule against always off and every fixed gamma."""
    fixed = [variant.name for variant in variants if not variant.schedule]
    verdict = schedule_verdict(results, SCHEDULED, fixed, case.concurrencies)
    return ScheduleRun(
        case.ranges,
        tuple(verdict),
        overall_speedups(results, [SCHEDULED, *fixed], case.concurrencies),
    )


def load_prompts(
    session: SearchSession, scorer: Scorer, request: LoadRequest, synthetic: bool
) -> list[EnginePrompt]:
    """Held-out prompts, or (synthetic) made-up ones that put the workload's context in mid-run."""
    if not synthetic:
        from archsearch.text.prompts import read_prompts

        trainer = session.trainer()
        chosen = read_prompts(request.prompts) if request.prompts else trainer.prompts.confirming
        encoded = spread_prompts(trainer.texts.encode(chosen), 24)
        return [
            EnginePrompt(item.id or str(i), item.token_ids, item.category or None)
            for i, item in enumerate(encoded)
        ]
    rng = random.Random(session.request.seed)
    length = max(8, session.request.context - request.tokens // 2)
    most = min(1000, scorer.target.vocab_size)
    return [
        EnginePrompt(str(i), tuple(rng.randrange(most) for _ in range(length)))
        for i in range(max(request.concurrencies))
    ]
