"""The best gamma of a candidate at each batch size: what a server should do when more requests are
in flight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from packaging.version import Version

from archsearch.capacity import fits
from archsearch.drafters.drafter import Draft, Drafter
from archsearch.drafters.forms import vllm_drafter_config
from archsearch.drafts.heads import run_head
from archsearch.drafts.records import acceptance_of
from archsearch.engine_facts import engine_facts, shared_by
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.export.engines import Priced, schedule_words
from archsearch.files import write_json
from archsearch.hardware.device import Device
from archsearch.models.files import has_weights
from archsearch.models.targets import resolve_drafter
from archsearch.pipeline.in_engine import serving_scorer
from archsearch.pipeline.rounds_explained import warnings_of
from archsearch.pipeline.serving import check_batch
from archsearch.pipeline.session import SearchSession
from archsearch.records import save
from archsearch.report.terminal.run import Adaptive, AdaptivePoint, Scheduled
from archsearch.runs.tables import SCHEDULE_FILE
from archsearch.schedule import (
    GammaSchedule,
    SchedulePoint,
    largest_gamma,
    merged,
    refined,
    schedule_from_points,
)
from archsearch.search.objective import Scorer
from archsearch.speedup import alpha_from_tau, tokens_by_budget
from archsearch.traffic.curve import speedup_when_off

FORECAST: Final = (0.31, 0.10)
"""Share of acceptance's variance that the draft's own confidence forecasts, and its std: a logistic
on logit(largest probability), as vLLM fits it, held out on 30 texts of a trained draft (0.27 and
0.35)."""
ADAPTING_COSTS: Final = (0.12, 0.06)
"""Share of throughput that adaptive verification costs where it trims next to nothing: 5 to 8 % in
one run at 4 to 32 requests, 14 to 20 % in another (vLLM pull request 52362, MI355X), each counted
once."""
WORTH_BEING_SAFE: Final = 0.15
"""Share of throughput given up, at most, for what does not collapse (a choice)."""

BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def usual_batches(scorer: Scorer, device: Device) -> list[int]:
    """Batch sizes that are looked at: up to twice the largest that was measured; 1 alone where an
    engine runs one request at a time on a GPU."""
    if not device.is_cpu and not engine_facts(scorer.latency.engine).batches:
        return [1]
    largest = scorer.latency.largest_batch
    return [size for size in BATCH_SIZES if largest is None or size <= max(1, 2 * largest)]


def schedule_points(
    scorer: Scorer,
    draft: Draft,
    alpha: Estimate,
    taus: dict[int, Estimate],
    device: Device,
    batch_sizes: Iterable[int] = BATCH_SIZES,
) -> list[SchedulePoint]:
    """The best gamma at each batch size that fits the device's memory, ascending; 0 where none is
    faster than drafting nothing. tau does not depend on the batch. Raises ArchsearchError where not
    even the smallest batch fits."""
    points = []
    for batch in sorted(set(batch_sizes)):
        served = replace(scorer.workload, batch_size=batch)
        if not fits(scorer.target, draft, served, device):
            break
        points.append(schedule_point(scorer, draft, alpha, taus, batch))
    if not points:
        raise ArchsearchError(
            f"target and draft do not fit {device.key} even at batch size {min(batch_sizes)}; lower"
            " --context"
        )
    return points


def schedule_point(
    scorer: Scorer, draft: Draft, alpha: Estimate, taus: dict[int, Estimate], batch: int
) -> SchedulePoint:
    """The same at one batch size."""
    local = scorer.at_batch(batch)
    scores = {
        gamma: local.measured(draft, alpha, taus, gammas=[gamma])
        for gamma in scorer.gammas
        if gamma in taus
    }
    best = max(scores.values(), key=lambda score: score.speedup.value)
    by_gamma = {gamma: score.speedup for gamma, score in scores.items()}
    off = speedup_when_off(local, draft)
    if best.speedup.value > off.value:
        return SchedulePoint(batch, best.gamma, best.tau, best.speedup, by_gamma)
    return SchedulePoint(batch, 0, Estimate(1.0, 0.0, off.source), off, by_gamma)


def adaptive_speedup(scorer: Scorer, draft: Draft, tokens: Estimate, gamma: int) -> Estimate:
    """Speed-up of drafting `gamma` tokens for every request and verifying as many of all of them as
    bring the most tokens a second, the likeliest first: vLLM's adaptive verification. `tokens`: tau
    where all are verified. Its doubt is the caller's; the std here is that of what the engine can
    forecast and of what choosing costs."""
    latency, target, work = scorer.latency, scorer.target, scorer.workload

    served, graph, roomy = latency.rounds, None, latency
    if served is not None:  # graphs are of the rows that are verified, not of all that were drafted
        graph, served = served.costs.largest_graph, replace(served, remedy=None)
        wide = served.for_rows(work.batch_size * (gamma + 1)).remedied()
        roomy = latency.with_rounds(wide) if wide is not None else latency

    def round_s(verified: int) -> float:
        timed = roomy if work.batch_size * (verified + 1) <= (graph or 0) else latency
        read = latency.verify_s(target, work, verified)
        return float(timed.round(target, draft, work, gamma, read).round_s.value)

    # fewer rows take no longer (as in vLLM's own table)
    seconds = np.maximum.accumulate([round_s(verified) for verified in range(gamma + 1)])
    alpha = alpha_from_tau(tokens.value, gamma)

    def best(known: float) -> float:
        gained = tokens_by_budget(alpha, gamma, known)
        budgets = np.linspace(0.0, gamma, len(gained))
        rate = float(np.max(gained / np.interp(budgets, np.arange(gamma + 1), seconds)))
        return rate * scorer.decode_s.value * (1.0 - ADAPTING_COSTS[0])

    known, doubt = FORECAST
    value = best(known)
    unsure = np.hypot(0.5 * (best(known + doubt) - best(known - doubt)), value * ADAPTING_COSTS[1])
    return Estimate(value, float(unsure), "modelled")


def _adaptive(
    asked: _Asked, draft: Draft, taus: Mapping[int, Estimate], schedule: GammaSchedule
) -> Adaptive | None:
    """Adaptive verification beside the schedule, with the gamma that loses least on it at its worst
    batch size. None where the engine does not start with it for such a drafter: of an older
    version, under other switches, without CUDA graphs (so on any CPU)."""
    facts, rounds = engine_facts(asked.engine), asked.scorer.latency.rounds
    most = largest_gamma(schedule.ranges, 0)
    able = [gamma for gamma in sorted(schedule.points[0].by_gamma) if 0 < gamma <= most]
    if asked.drafter.family not in facts.adaptive or rounds is None or rounds.eager or not able:
        return None
    if Version(rounds.version) < Version(facts.adaptive_since):
        return None
    if any(rounds.options.get(name) == value for name, value in facts.not_adaptive.items()):
        return None
    places = [(point, asked.scorer.at_batch(point.batch_size)) for point in schedule.points]

    def gains_of(speeds: Sequence[Estimate]) -> list[float]:
        tables = [point.speedup.value if point.speedup else 1.0 for point, _ in places]
        return [speed.value / table for speed, table in zip(speeds, tables, strict=True)]

    found = {
        gamma: [adaptive_speedup(local, draft, taus[gamma], gamma) for _, local in places]
        for gamma in able
    }
    fixed = {gamma: [point.by_gamma[gamma] for point, _ in places] for gamma in able}
    gamma, one = (max(of, key=lambda each: min(gains_of(of[each]))) for of in (found, fixed))
    points, gains = list[AdaptivePoint](), gains_of(found[gamma])
    for (point, _), speed in zip(places, found[gamma], strict=True):
        # the doubt of acceptance and kernels is that of the same gamma for all requests
        std = float(np.hypot(speed.std, speed.value * point.by_gamma[gamma].relative_std))
        points.append(AdaptivePoint(point.batch_size, Estimate(speed.value, std, "modelled")))
    plain, use = gains_of(fixed[one]), "the table if it holds in a test under load"
    safe = [each for each in (gains, plain) if min(each) >= 1.0 - WORTH_BEING_SAFE]
    if safe:
        adapts = max(safe, key=sum) is gains
        switch = ' and "enable_adaptive_verification": true' if adapts else ""
        use = (
            f"{'it' if adapts else f'gamma {one}'}, since the table has been seen to collapse under"
            ' load: in vLLM\'s --speculative-config "num_speculative_tokens":'
            f" {gamma if adapts else one}{switch} in place of the table that export writes"
        )
    words = (
        f"Beside this table adaptive verification, gamma {gamma} for all, brings {_span(gains)} %,"
        f" gamma {one} for all without it {_span(plain)} %"
    )
    return Adaptive(gamma, tuple(points), use, f"{words}. Use {use}")


def _span(gains: Sequence[float]) -> str:
    """`-13 to -12`, per cent."""
    low, high = (f"{100.0 * (gain - 1.0):+.0f}" for gain in (min(gains), max(gains)))
    return f"{low} to {high}"


def schedule_rank(
    session: SearchSession, rank: int, engine: str | None = None, batch_sizes: Sequence[int] = ()
) -> Scheduled:
    """The best gamma at each batch size of a candidate, by the latencies of `engine`; written to
    best/<rank>/schedule.json and vLLM's speculative_config.json of the rank. Without `batch_sizes`:
    up to 256, on a CPU up to twice the largest batch of which passes were measured. Raises
    ArchsearchError where the engine takes one gamma for such a drafter."""
    score, folder = session.run.score(rank), session.run.best_dir(rank)
    otherwise = f"rank {rank} with gamma {score.gamma}, or choose a rank of another family"
    asked = _Asked(session, engine, score.proposer, otherwise)
    alpha, taus, _ = acceptance_of(asked.scorer, score, folder)
    draft = (score.drafter or score.architecture, alpha, taus)
    planned = asked.plan(
        draft, score.gamma, batch_sizes, folder, rank=rank, architecture=score.label()
    )
    ranges = planned.schedule.ranges
    largest = largest_gamma(ranges, 0)
    if engine_facts(asked.engine).speculative_config and largest:
        ranks = asked.scorer.workload.tensor_parallel if score.drafter is None else None
        model = score.loaded_from(folder, has_weights(folder))
        how = largest, ranges, ranks, Priced(**session.run.priced_as).drafts_at
        config = vllm_drafter_config(score.proposer, model, *how)
        write_json(folder / "speculative_config.json", config)
    return planned


def schedule_head(
    session: SearchSession, family: str, engine: str | None = None, batch_sizes: Sequence[int] = ()
) -> Scheduled:
    """The same of a trained head of the run, with tokens a round as they were replayed; written to
    heads/<family>/schedule.json. Raises ArchsearchError where the run has no such head, or the
    engine takes no schedule for it."""
    trained = run_head(session.run.path, family)
    most, name = trained.plan.gamma, trained.plan.family
    drafter = resolve_drafter(str(trained.folder), session.target).drafter
    asked = _Asked(session, engine, drafter, f"the head with gamma {most}")
    taus = {each: tau for each, tau in trained.taus.items() if each <= most}
    return asked.plan(
        (drafter, trained.alpha, taus),
        asked.scorer.measured(drafter, trained.alpha, taus).gamma,
        batch_sizes,
        trained.folder,
        rank=None,
        family=name,
        architecture=f"{name} head",
    )


Known = tuple[Draft, Estimate, dict[int, Estimate]]
"""A draft with its alpha, and tau by gamma."""


class _Asked:
    """The engine that is asked for a schedule of a drafter, its latencies in words, and the scorer
    with them. Raises ArchsearchError where it takes one gamma for all batch sizes."""

    def __init__(
        self, session: SearchSession, engine: str | None, drafter: Drafter, otherwise: str
    ) -> None:
        self.session, self.drafter = session, drafter
        self.engine = engine or session.request.engine
        self.scorer, self.words = serving_scorer(session, self.engine)
        facts, workload = engine_facts(self.engine), self.scorer.workload
        version, kind = self.scorer.latency.engine_version, self.scorer.target.model_type
        facts.check_drafter(drafter, shared_by(workload), version, target=kind)
        if why := facts.unscheduled_words(drafter.family):
            raise ArchsearchError(f"{why}; serve {otherwise}")

    def plan(
        self,
        draft: Known,
        gamma: int,
        batch_sizes: Sequence[int],
        folder: Path,
        **who: Any,
    ) -> Scheduled:
        """The schedule of a draft, written to `folder`."""
        schedule, note = self._planned(draft, batch_sizes)
        at = {each.batch_size: self.scorer.at_batch(each.batch_size) for each in schedule.points}
        priced = [(f"batch size {size}", by, by.measured(*draft)) for size, by in at.items()]
        save(folder / SCHEDULE_FILE, schedule)
        return Scheduled(
            run=self.session.run.path,
            schedule=schedule,
            note=note,
            as_engine=schedule_words(self.engine, self.drafter.family, schedule.ranges, gamma),
            warning=engine_facts(self.engine).schedule_doubt,
            warnings=tuple(warnings_of(self.scorer.latency.rounds, self.words, priced)),
            adaptive=_adaptive(self, draft[0], draft[2], schedule),
            **who,
        )

    def _planned(self, draft: Known, batch_sizes: Sequence[int]) -> tuple[GammaSchedule, str]:
        scorer, device, facts = self.scorer, self.session.source.device, engine_facts(self.engine)
        one_by_one = not device.is_cpu and not facts.batches
        if one_by_one:
            check_batch(facts, device, max(batch_sizes, default=1))
        flight = self.session.scorer.workload.batch_size
        # a schedule begins at batch size 1
        sizes = {1, *(batch_sizes or usual_batches(scorer, device))}
        measured = batch_sizes or scorer.latency.largest_batch is not None
        if flight <= max(sizes) or not measured:  # beyond the usual ones gammas turn more than once
            sizes |= {flight, *range(BATCH_SIZES[-1] + 128, flight, 128)}
        points = schedule_points(scorer, *draft, device, sizes)
        known = {point.batch_size: point for point in points}

        def gamma_of(batch: int) -> int:
            known.setdefault(batch, schedule_point(scorer, *draft, batch))
            return known[batch].gamma

        between = refined([(point.batch_size, point.gamma) for point in points], gamma_of)
        chosen = merged([known[batch] for batch, _ in between], kept=flight)
        most, largest = points[-1].batch_size, scorer.latency.largest_batch
        note = f"{facts.title} runs one request at a time." if one_by_one else ""
        if over := [size for size in sizes if size > most]:
            note = f"At batch size {min(over)} the KV caches do not fit {device.key}."
        elif not batch_sizes and largest is not None:
            above = f"above {most} nothing is predicted"
            note = f"Passes were measured up to batch size {largest}; {above}."
        slow = ", ".join(
            str(each.batch_size) for each in points if each.speedup and each.speedup.value < 1.0
        )
        if slow:
            slow = f"Without the draft loaded a server is faster at batch size {slow}."
        ranges = schedule_from_points(chosen)
        schedule = GammaSchedule(ranges, tuple(points), self.engine, self.words)
        return schedule, " ".join(filter(None, (note, slow)))
