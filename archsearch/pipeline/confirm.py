"""`archsearch confirm`: a candidate in a real engine beside its prediction, term by term.

By prompt: every prompt runs with and without the draft, back to back. Under load, several requests
in flight and medians over interleaved repeats; without weights at synthetic acceptance of the
predicted rates: a shape is proved before it is trained.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from archsearch.acceptance.measured import Trace
from archsearch.architecture.architecture import Architecture
from archsearch.drafts.records import Rates, TrainedDraft, acceptance_of, load_trained
from archsearch.drafts.trainer import DraftTrainer
from archsearch.engine_facts import engine_facts, engines_that
from archsearch.engines.engine import EnginePrompt, ModelSource, Sampling
from archsearch.engines.measure.figures import (
    Results,
    best_of_gammas,
    overall_speedups,
    schedule_verdict,
    token_s,
    under_load,
)
from archsearch.engines.measure.results import ByPrompt
from archsearch.engines.measure.rows import made_up
from archsearch.engines.measure.turns import ALONE, Plan, Variant
from archsearch.errors import ArchsearchError, MissingDataError, RunFailed
from archsearch.estimate import Estimate
from archsearch.models.files import has_tokenizer, has_weights
from archsearch.pipeline.candidates import write_report
from archsearch.pipeline.chains import Replays
from archsearch.pipeline.engine_ways import write_engines
from archsearch.pipeline.families import check_independent
from archsearch.pipeline.in_engine import (
    Bench,
    EngineChoice,
    at_pace,
    can_run,
    check_choice,
    kept_partial,
    mid_answer,
    profile_first,
    random_draft,
    write_shape,
)
from archsearch.pipeline.schedule import schedule_points
from archsearch.pipeline.session import SearchSession, check_weights
from archsearch.records import load_or_note, save
from archsearch.report.phrases import shell_path
from archsearch.runs.candidate import read_training
from archsearch.runs.confirmed import (
    CONFIRMED_FILE,
    LOAD_FILE,
    SCHEDULED,
    Confirmed,
    ConfirmedGamma,
    ErrorSummary,
    Exact,
    LoadRecord,
    LoadRow,
    ScheduleRun,
    TermErrors,
)
from archsearch.schedule import Ranges, SchedulePoint, largest_gamma, schedule_from_points
from archsearch.search.objective import Score, Scorer
from archsearch.speedup import RoundTerms
from archsearch.text.prompt_set import LEAST_HALF, distinct, spread
from archsearch.text.prompts import read_prompts
from archsearch.traffic.curve import speedup_when_off
from archsearch.workload import GGUF_DTYPES

RIVAL_GAMMAS: Final = (1, 3, 5)
STOPPING: Final = "stopping"  # of the draft that stops where unsure
USUAL_COUNT: Final = 24  # prompts
CLOSE, MOST_CLOSE = 0.03, 2  # how far below the best a gamma may be predicted, how many


@dataclass(frozen=True)
class _Case(Bench):
    """The bench of a candidate."""

    rank: int = 1

    @cached_property
    def score(self) -> Score:
        return self.session.run.score(self.rank)

    @property
    def folder(self) -> Path:
        return self.session.run.best_dir(self.rank)

    @property
    def shape(self) -> Architecture:
        return self.score.architecture

    def check_family(self) -> None:
        """Raise ArchsearchError where the rank's family is confirmed by its name."""
        able = engines_that(lambda row: self.score.family in row.confirms)
        engine = self.name if self.name in able else next(iter(able), self.name)
        check_independent(self.score, "confirm", self.session.run.path, f" --engine {engine}")

    def check(self, **asked: Any) -> None:
        """Raise ArchsearchError for what the engine cannot (`asked`: see `check_choice`)."""
        check_choice(self.choice, self.name, **asked)
        ranks = self.scorer.workload.tensor_parallel
        engine_facts(self.name).check_draft(self.shape, ranks)

    def file(self, name: str) -> Path:
        return self.folder / name.format(engine=self.file_name)


@dataclass(frozen=True)
class _Beside:
    """What was predicted of a round, of the same with the tau that the engine counted, and what the
    engine adds to it."""

    score: Score
    at_measured_tau: float
    overhead_s: Estimate

    @property
    def terms(self) -> RoundTerms:
        score = self.score
        times = (score.decode_s, score.draft_s, score.verify_s, self.overhead_s)
        return RoundTerms(score.tau.value, *(each.value for each in times))

    @classmethod
    def of(
        cls,
        local: Scorer,
        shape: Architecture,
        gamma: int,
        alpha: Estimate,
        taus: Sequence[Estimate],
    ) -> _Beside:
        """`local`: at the batch and context that ran; `taus`: predicted, counted."""
        score, counted = (
            local.measured(shape, alpha, {gamma: tau}, gammas=[gamma]) for tau in taus
        )
        overhead = local.latency.round(local.target, shape, local.workload, gamma).overhead_s
        return cls(score, counted.speedup.value, overhead)

    def error_by_term(
        self, measured: RoundTerms | None, slowdown: float | None
    ) -> TermErrors | None:
        """None where the engine did not report every term. The machine's slowdown, which
        predictions do not know, is taken out of the measured ones."""
        if measured is None:
            return None
        return TermErrors.between(self.terms, measured.slowed(1.0 / (slowdown or 1.0)))


def confirm_rank(
    session: SearchSession,
    rank: int,
    *,
    gammas: Sequence[int] = (),
    close: bool = False,
    prompt_count: int | None = None,
    prompts: Path | None = None,
    trainer: DraftTrainer | None = None,
    choice: EngineChoice | None = None,
) -> Confirmed:
    """Run target alone and target + draft in the engine, interleaved, on held-out prompts; write
    confirmed.json. Where no `gammas` are asked for, those predicted `close` to the score's run too,
    and a draft that gains by stopping where it is unsure, by replay, runs so beside them. Raises
    MissingDataError for a rank without weights."""
    case = _Case(session, choice or EngineChoice(), trainer, rank)
    case.check_family()
    named = f"{shell_path(session.run.path)} --rank {rank}"
    advice = (
        f"train it (archsearch train {named}), or prove its shape without (archsearch confirm"
        f" {named} --synthetic)"
    )
    trained = trained_of(session, rank, advice)
    check_weights(session.target)
    case.check()
    check_tokenizer(case.trainer.tokenizer, case.folder)
    count = prompt_count or session.request.confirm_prompts
    asked = confirming_prompts(case.trainer, prompts, count)
    sampling = answers_of(session)
    wanted = gammas or [case.score.gamma, *(_close_gammas(case, trained) if close else ())]
    trained.check_gammas(wanted)
    started = time.monotonic()
    with kept_partial(case.file("partial-confirmed-{engine}.json"), "prompts"):
        drafters: dict[str, tuple[Any, int]] = {
            f"gamma {gamma}": (case.folder, gamma) for gamma in sorted(set(wanted))
        }
        stops = None
        if not gammas and case.choice.server_url is None:
            with suppress(ArchsearchError):  # an engine that takes none, a trace of other text
                replays = Replays.of(case.scorer, case.name, trained, case.trainer)
                stops = replays.stopping
        if stops is not None:
            drafters[STOPPING] = (stops.source(case.folder), stops.rule.gamma)
        results, slowdown = at_pace(
            session, lambda: case.by_prompt(drafters, asked, sampling, best_of_gammas)
        )
    exact, unchecked = _exactness(case, wanted[0], asked, sampling)
    context = mid_answer(asked, sampling.max_new_tokens)
    stopped, local = results.pop(STOPPING, None), case.scorer.at_context(context)
    rows = []
    for found in results.values():
        taus = (trained.tau[found.gamma], found.tau)
        beside = _Beside.of(local, case.shape, found.gamma, trained.alpha, taus)
        rows.append(_by_prompt(case, beside, found, context, slowdown))
    unsure = gain = None
    if stops is not None and stopped is not None:
        score = replays.score(stops, local)
        assert score.round_s is not None
        passes = score.draft_s.value + score.verify_s.value
        added = replace(score.round_s, value=score.round_s.value - passes)
        tau = stopped.tokens_per_step or stopped.tau.value  # predicted is of all passes
        counted = score.speedup.value * tau / score.tau.value
        stopping = _Beside(score, counted, added)
        unsure = _by_prompt(case, stopping, stopped, context, slowdown, stops.rule.least)
        gain = stops.gain(replays.fixed)
    best = max(rows, key=lambda row: row.speedup.value)
    result = Confirmed(
        **vars(best),
        rank=rank,
        prompts_seen=seen_words(case.trainer, case.folder, prompts),
        prompts_file=str(prompts) if prompts else None,
        architecture=case.shape.label(),
        identical_output_float32=exact,
        identical_output_unchecked=unchecked,
        other_gammas=tuple(row for row in rows if row is not best),
        stopping=unsure,
        stopping_gain=gain,
        seconds=time.monotonic() - started,
    )
    result = _kept(case, result, trained.alpha)
    write_engines(session)
    write_report(session.run)
    return result


def _close_gammas(case: _Case, trained: TrainedDraft) -> list[int]:
    """Other gammas of a draft that are predicted almost as fast as its own: they need no training,
    and an oracle's misses were of one gamma (docs/results.md)."""
    scorer, own = case.scorer, case.score.gamma
    gains = {
        gamma: scorer.measured(case.shape, trained.alpha, trained.tau, gammas=[gamma]).speedup.value
        for gamma in scorer.gammas
        if gamma in trained.tau
    }
    least = (1.0 - CLOSE) * gains.get(own, math.inf)
    near = [each for each, gain in gains.items() if each != own and gain > least]
    return sorted(near, key=lambda each: -gains[each])[:MOST_CLOSE]


def trained_of(session: SearchSession, rank: int, advice: str) -> TrainedDraft:
    """The draft of a rank. MissingDataError, with `advice`, where it has no weights."""
    run, folder = session.run, session.run.best_dir(rank)
    if not has_weights(folder):
        raise MissingDataError(f"rank {rank} of {run.path} has no weights; {advice}")
    return load_trained(run.score(rank).architecture, folder)


def answers_of(session: SearchSession) -> Sampling:
    """How a run's answers are sampled."""
    asked = session.request
    return Sampling(asked.answer_tokens, temperature=asked.temperature, seed=asked.seed)


def confirming_prompts(trainer: DraftTrainer, file: Path | None, count: int) -> list[EnginePrompt]:
    """`count` prompts of `file`, or of the run's held-out ones, as an engine takes them."""
    if file is None:
        trainer.texts.check_prompts()
    chosen = distinct(read_prompts(file))[0] if file else trainer.prompts.confirming
    encoded = spread(trainer.texts.encode(chosen), count)
    return [
        EnginePrompt(item.id or str(number), item.token_ids, item.category or None)
        for number, item in enumerate(encoded)
    ]


def _exactness(
    case: _Case, gamma: int, asked: Sequence[EnginePrompt], sampling: Sampling
) -> tuple[Exact | None, str | None]:
    """Whether greedy output is the target's own in float32, or why that was not checked; None, None
    when sampling."""
    quantised = case.dtype in GGUF_DTYPES  # its answers are another model's than in float32
    if sampling.temperature != 0 or case.choice.server_url is not None or quantised:
        return None, None
    # an engine of its own loads as quickly for all prompts
    few, tokens = (asked[:4], 32) if case.inside else (asked, 64)
    try:
        return case.exactness({"draft": (case.folder, gamma)}, few, tokens)["draft"], None
    except RunFailed as error:  # what was measured holds without it
        return None, str(error)


def _by_prompt(
    case: _Case,
    beside: _Beside,
    found: ByPrompt,
    context: int,
    slowdown: float | None,
    stops_below: float = 0.0,
) -> ConfirmedGamma:
    return ConfirmedGamma.of(
        found,
        beside.score.speedup.value,
        predicted=beside.score,
        predicted_at_measured_tau=beside.at_measured_tau,
        relative_error_at_measured_tau=beside.at_measured_tau / found.speedup.value - 1.0,
        predicted_round_s=(beside.terms.draft_s + beside.terms.verify_s + beside.terms.overhead_s),
        overhead_s=beside.overhead_s,
        error_by_term=beside.error_by_term(found.terms, slowdown),
        context=context,
        slowdown=slowdown,
        dtype=case.dtype,
        draft_dtype=case.draft_dtype or "",
        latency=case.latency_words,
        profile_first=profile_first(case.session, case.scorer, case.name, case.dtype),
        stops_below=stops_below,
    )


def _kept(case: _Case, result: Confirmed, alpha: Estimate) -> Confirmed:
    """Write the confirmation where it belongs and return it; with `kept_earlier` where an earlier
    one keeps its place: what decides nothing, or is slower at other gammas on the same prompts, is
    written beside a decided one of the same weights in the same engine."""
    name = case.name
    own, beside = case.file("confirmed-{engine}.json"), case.file("undecided-{engine}.json")
    slower = case.file("slower-{engine}.json")
    main, last = (
        load_or_note(path, "confirmation", Confirmed, [])  # a broken one is replaced
        for path in (case.folder / CONFIRMED_FILE, own)
    )
    earlier = last or (main if case.own_dtype else None)
    if earlier and earlier.engine == name and not (earlier.undecided or earlier.is_stale(alpha)):
        again = earlier.gamma in (result.gamma, *(row.gamma for row in result.other_gammas))
        loses = not again and result.prompts_file == earlier.prompts_file
        loses &= result.speedup.value < earlier.speedup.value
        if result.undecided or loses:
            why, file = ("decides", beside) if result.undecided else ("is faster", slower)
            words = (
                f"The earlier confirmation in {name} {why} ({earlier.speedup.value:.2f}x at gamma"
                f" {earlier.gamma}) and stays in {own.name}; this one is in {file.name}."
            )
            result = replace(result, kept_earlier=words)
            save(file, result)
            return result
    first = name == case.session.request.engine or main is None or main.engine == name
    if first and case.own_dtype:
        save(case.folder / CONFIRMED_FILE, result)  # the run's own engine keeps this place
    save(own, result)
    for file in (beside, slower):
        file.unlink(missing_ok=True)
    return result


def seen_words(trainer: DraftTrainer, folder: Path, file: Path | None = None) -> str | None:
    """Why the prompts that confirm, those of a `file` or held-out ones, were seen when the draft in
    `folder` was trained or chosen; None where not."""
    prompts, training = trainer.prompts, read_training(folder)
    if file is not None:
        return None if training and training.taken_from else prompts.seen_words(read_prompts(file))
    if training is not None and training.taken_from:
        return (
            "the draft was trained elsewhere, perhaps on these prompts, which flatters it; its"
            f" trainer held out --prompts {training.record.get('prompts')}"
        )
    if not prompts.split:
        return (
            f"the {len(prompts.heldout)} held-out prompts are too few to split (at least"
            f" {2 * LEAST_HALF}): the same ones chose the draft, which flatters it"
        )
    known = trainer.texts.traced(Trace.load(folder / "trace.npz"))
    if known is None or len(known.sequences) > len(prompts.choosing):
        return "the draft may have been chosen on some of them (earlier versions held out others)"
    return None


def check_tokenizer(ours: Any, folder: Path) -> None:
    """Raise ArchsearchError where the draft in `folder` has a tokenizer and it is not the
    target's."""
    from archsearch.models import load

    if has_tokenizer(folder):
        load.check_tokenizer(ours, load.read_tokenizer(folder, folder.name), f"in {folder}")


# --- under load


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
class _Acceptance:
    """What acceptance is predicted to be: alpha, tau and acceptance by position for each gamma;
    `synthetic`: the engine accepts by chance, at these rates."""

    alpha: Estimate
    taus: dict[int, Estimate]
    rates: Rates
    synthetic: bool

    def asked(self, gamma: int) -> tuple[float, ...]:
        """The rates that an engine is given; () where acceptance is real."""
        return tuple(self.rates.get(gamma, ())) if self.synthetic else ()

    def tau(self, variant: Variant, gamma: int) -> Estimate:
        """tau as predicted; with synthetic acceptance what was asked for."""
        asked = variant.synthetic[:gamma]
        return replace(self.taus[gamma], value=1.0 + sum(asked)) if asked else self.taus[gamma]


def confirm_load(
    session: SearchSession, request: LoadRequest, choice: EngineChoice | None = None
) -> LoadRecord:
    """Run a candidate at several concurrencies and write load-<engine>.json: predicted beside
    measured, term by term."""
    synthetic = request.synthetic or not has_weights(session.run.best_dir(request.rank))
    numbers = sorted(set(request.concurrencies))
    case = _Case(session, choice or EngineChoice(), rank=request.rank)
    case.check_family()
    case.check(synthetic=synthetic, schedule=request.schedule, concurrency=numbers[-1])
    known = _Acceptance(*acceptance_of(case.scorer, case.score, case.folder), synthetic)
    points = _points(case, known, numbers, request.schedule)
    ranges: Ranges = ()
    if request.schedule:
        ranges = schedule_from_points(
            [(point.batch_size, point.gamma) for point in points.values()]
        )
    gammas = _gammas(known, request.gammas, [points[number].gamma for number in numbers], ranges)
    if ranges:  # one set of rates for all gammas, so that only times differ
        common = known.rates[max([*gammas, largest_gamma(ranges, 0)])]
        rates = {gamma: common[:gamma] for gamma in known.rates if gamma <= len(common)}
        known = replace(known, rates=rates)
    target, draft, dummy = _models(case, synthetic)
    variants = _variants(known, gammas, draft, ranges)
    vocabulary, tokens = case.scorer.target.vocab_size, request.tokens
    asked = (
        # random tokens: the workload's context is reached in mid-answer
        made_up(
            vocabulary,
            max(8, session.request.asked.context_len - tokens // 2),
            numbers[-1],
            rng=random.Random(session.request.seed),
        )
        if synthetic
        else confirming_prompts(case.trainer, request.prompts, USUAL_COUNT)
    )
    started = time.monotonic()
    # every held-out prompt at least once over the repeats: tau differs more between prompts than
    # times do
    groups = 1 if synthetic else max(2, math.ceil(len(asked) / (request.repeats * numbers[-1])))
    sampling = answers_of(session)
    sampling = replace(sampling, max_new_tokens=tokens, ignore_end=synthetic)
    if synthetic:
        sampling = replace(sampling, temperature=0.0)
    repeats, seed = request.repeats, sampling.seed
    plan = Plan(
        target, variants, asked, sampling, numbers, repeats, groups, starts=repeats, seed=seed
    )
    words = f"{case.name} under load"
    with kept_partial(case.file("partial-load-{engine}.json"), "whole repeats"):
        results, slowdown = at_pace(
            session,
            lambda: case.run(plan, under_load, words, dummy=dummy, look=token_s),
        )
    context = mid_answer(asked, tokens)
    local = case.scorer.at_context(context)
    rows = tuple(
        _load_row(local.at_batch(number), case.shape, known, variant, results, slowdown)
        for variant in variants
        for number in numbers
    )
    alone = tuple(results[ALONE, number] for number in numbers)
    compared = None
    if ranges:  # against always off and every fixed gamma
        fixed = [variant.name for variant in variants if not variant.schedule]
        verdict = schedule_verdict(results, SCHEDULED, fixed, numbers)
        overall = overall_speedups(results, [SCHEDULED, *fixed], numbers)
        compared = ScheduleRun(ranges, tuple(verdict), overall)
    record = LoadRecord(
        engine=case.name,
        engine_version=alone[0].engine_version,
        rank=request.rank,
        architecture=case.shape.label(),
        dtype=case.dtype,
        synthetic=synthetic,
        alpha=known.alpha,
        asked_acceptance_by_position=known.asked(max(gammas)) or None,
        context=context,
        slowdown=slowdown,
        repeats=request.repeats,
        latency=case.latency_words,
        baseline=alone,
        rows=rows,
        summary=ErrorSummary.of(rows),
        seconds=time.monotonic() - started,
        schedule=compared,
    )
    save(case.file(LOAD_FILE), record)
    return record


def _points(
    case: _Case, known: _Acceptance, numbers: Sequence[int], schedule: bool
) -> dict[int, SchedulePoint]:
    """Raises ArchsearchError where the memory does not hold the draft at one of `numbers`."""
    device = case.session.source.device
    sizes = sorted({1, *numbers}) if schedule else numbers  # a schedule begins at batch size 1
    found = schedule_points(case.scorer, case.shape, known.alpha, known.taus, device, sizes)
    points = {point.batch_size: point for point in found}
    missing = [number for number in numbers if number not in points]
    if missing:
        raise ArchsearchError(
            f"target and draft at {missing[0]} requests do not fit {device.key}; lower"
            " --concurrency or --context"
        )
    return points


def _gammas(
    known: _Acceptance, wanted: Sequence[int], best: Sequence[int], ranges: Ranges
) -> list[int]:
    """The fixed gammas that run: as asked, else the best at each concurrency. ArchsearchError for
    one of unknown acceptance."""
    # A schedule is held against fixed gammas below and above its own too.
    usual = {gamma for gamma in RIVAL_GAMMAS if gamma in known.taus} if ranges else set()
    gammas = sorted(set(wanted) or {max(1, gamma) for gamma in best} | usual)
    able = set(known.taus) & set(known.rates) if known.synthetic else set(known.taus)
    beyond = [gamma for gamma in gammas if gamma not in able]
    if beyond:
        raise ArchsearchError(
            f"acceptance is known for gamma 1 to {max(able)}, not for {beyond[0]}; use a smaller"
            " --gamma"
        )
    return gammas


def _models(case: _Case, synthetic: bool) -> tuple[ModelSource, ModelSource, bool]:
    """Target and draft, with random weights where acceptance is synthetic, and whether the target
    is a shape alone, whose weights the engine makes up."""
    session = case.session
    base = session.run.path / "engine"
    if not synthetic:
        check_weights(session.target)
        return case.target(case.dtype), case.draft(case.folder, case.dtype), False
    # outside this process the whole vocabulary
    shape = case.shape if case.inside else case.shape.replace(draft_vocab_size=None)
    draft = random_draft(shape, case.dtype, base, load=case.inside)
    if can_run(case.name, session.target):
        return case.target(case.dtype), draft, False
    return write_shape(session.target.architecture, base / "target"), draft, True


def _variants(
    known: _Acceptance, gammas: Sequence[int], draft: ModelSource, ranges: Ranges
) -> list[Variant]:
    variants = [Variant(f"gamma {gamma}", draft, gamma, known.asked(gamma)) for gamma in gammas]
    if not ranges:
        return variants
    largest = largest_gamma(ranges, 0)
    if not largest:
        raise ArchsearchError(
            "no gamma pays at any of these batch sizes, so the schedule is off and there is no"
            " draft to serve; leave --schedule out, or train further"
        )
    return [*variants, Variant(SCHEDULED, draft, largest, known.asked(largest), ranges)]


def _load_row(
    local: Scorer,
    shape: Architecture,
    known: _Acceptance,
    variant: Variant,
    results: Results,
    slowdown: float | None,
) -> LoadRow:
    number, more = local.workload.batch_size, dict[str, Any]()
    found, alone = results[variant.name, number], results[ALONE, number]
    if found.gamma:
        taus = (known.tau(variant, found.gamma), Estimate(found.tau, 0.0, "measured"))
        beside = _Beside.of(local, shape, found.gamma, known.alpha, taus)
        predicted = beside.score.speedup
        terms = found.round_terms(found.tau, alone.step_s, found.target_s)
        more["error_by_term"] = beside.error_by_term(terms, slowdown)
        more["relative_error_at_measured_tau"] = beside.at_measured_tau / found.gain.value - 1.0
    else:  # the schedule is off here: what is left of the draft is its idle pass
        predicted = speedup_when_off(local, shape)
    return LoadRow(
        **vars(found),
        baseline_tokens_per_s=alone.tokens_per_s,
        decode_s=alone.step_s,
        predicted_speedup=predicted,
        relative_error=predicted.value / found.gain.value - 1.0,
        **more,
    )
