"""The best gamma of a candidate at each batch size: what a server should do when more requests are
in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.capacity import memory_bytes, usable_bytes
from archsearch.drafters.drafter import Draft
from archsearch.engine_facts import engine_facts, engine_title, shared_by
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate, weakest_source
from archsearch.export import vllm_config
from archsearch.export.drafters import vllm_drafter_config
from archsearch.export.schedule import schedule_words
from archsearch.files import write_json
from archsearch.hardware.device import Device
from archsearch.models.files import has_weights
from archsearch.pipeline.in_engine import serving_scorer
from archsearch.pipeline.serving import check_batch
from archsearch.pipeline.session import SearchSession
from archsearch.runs.schedule_file import SCHEDULE_FILE, schedule_to_dict, write_schedule
from archsearch.schedule import (
    GammaSchedule,
    SchedulePoint,
    largest_gamma,
    merged,
    refined,
    schedule_from_points,
)
from archsearch.search.objective import Score, Scorer
from archsearch.speedup import drifting_positions
from archsearch.workload import Workload

BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)

Rates = dict[int, list[float]]
"""For each gamma the unconditional acceptance of its positions. A larger gamma starts more rounds
right after a refusal, at hard places, so its first position is accepted less often."""


def acceptance_of(
    scorer: Scorer, score: Score, folder: Path | None = None
) -> tuple[Estimate, dict[int, Estimate], Rates]:
    """alpha, tau by gamma and acceptance by position of a candidate: from its trace where it was
    trained, else as its score foretells."""
    from archsearch.acceptance.measured import Trace
    from archsearch.acceptance.replay import replay_tau
    from archsearch.drafts.records import load_trained
    from archsearch.speedup import accepted_by_position, tau_estimate

    most = max(scorer.gammas)
    if folder is not None and has_weights(folder) and (folder / "trace.npz").is_file():
        trained = load_trained(score.architecture, folder)
        replayed = [gamma for gamma in scorer.gammas if gamma in trained.tau]
        trace = Trace.load(folder / "trace.npz")
        rates = {
            gamma: list(replay_tau(trace, gamma, resamples=0).accepted_by_position)
            for gamma in replayed
        }
        return trained.alpha, trained.tau, rates
    # The score knows alpha best (a climb learns it from short trainings); how it changes along a
    # block is the estimator's.
    known = scorer.believed(score.proposer)
    drift = known.acceptance.drift
    positions = drifting_positions(score.alpha.value, drift.value, most)
    able = score.proposer.gammas(scorer.gammas)
    taus = {gamma: known.tau(tau_estimate(score.alpha, gamma, drift)) for gamma in able}
    reach = accepted_by_position(positions)
    return score.alpha, taus, {gamma: reach[:gamma] for gamma in able}


def schedule_points(
    scorer: Scorer,
    draft: Draft,
    alpha: Estimate,
    taus: dict[int, Estimate],
    device: Device,
    batch_sizes: Sequence[int] = BATCH_SIZES,
) -> list[SchedulePoint]:
    """The best gamma at each batch size that fits the device's memory, ascending.

    gamma 0 where no gamma is faster than drafting nothing. tau does not depend on the batch:
    requests are accepted apart. Raises ArchsearchError where not even the smallest batch fits.
    """
    points = []
    for batch in sorted(set(batch_sizes)):
        if not _fits(scorer.target, draft, replace(scorer.workload, batch_size=batch), device):
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
    """The best gamma at one batch size, 0 where none is faster than drafting nothing."""
    local = scorer.at_batch(batch)
    scores = {
        gamma: local.measured(draft, alpha, taus, gammas=[gamma])
        for gamma in scorer.gammas
        if gamma in taus
    }
    best = max(scores, key=lambda gamma: scores[gamma].speedup.value)
    by_gamma = {gamma: score.speedup for gamma, score in scores.items()}
    off = speedup_when_off(local, draft)
    if by_gamma[best].value > off.value:
        return SchedulePoint(batch, best, scores[best].tau, by_gamma[best], by_gamma)
    return SchedulePoint(batch, 0, Estimate(1.0, 0.0, off.source), off, by_gamma)


def speedup_when_off(scorer: Scorer, draft: Draft) -> Estimate:
    """Speed-up of serving with the draft loaded and gamma 0: 1, or less where the engine runs the
    draft all the same."""
    decode, idle = scorer.decode_s, scorer.latency.idle_s(scorer.target, draft, scorer.workload)
    value = decode.value / (decode.value + idle.value)
    # An error of the idle pass d moves the ratio by d / (decode + idle), relative to it.
    return Estimate(
        value,
        value * idle.std / (decode.value + idle.value),
        weakest_source(decode.source, idle.source),
    )


def _fits(target: Architecture, draft: Draft, workload: Workload, device: Device) -> bool:
    return memory_bytes(target, draft, workload).total_bytes <= usable_bytes(device)


def schedule_rank(
    session: SearchSession, rank: int, engine: str | None = None, batch_sizes: Sequence[int] = ()
) -> dict[str, Any]:
    """The best gamma at each batch size of a candidate, by the latencies of `engine`; written to
    best/<rank>/schedule.json.

    Without `batch_sizes`: up to 256, on a CPU up to twice the largest batch of which passes were
    measured. vLLM's speculative_config.json of the rank gets the schedule too. Raises
    ArchsearchError where the engine takes one gamma for such a drafter.
    """
    name = engine or session.request.engine
    score, folder = session.run.score(rank), session.run.best_dir(rank)
    scorer, words = serving_scorer(session, name)
    facts = engine_facts(name)
    facts.check_drafter(score.proposer, shared_by(scorer.workload), scorer.latency.engine_version)
    if why := facts.unscheduled_words(score.family):
        raise ArchsearchError(
            f"{why}; serve rank {rank} with gamma {score.gamma}, or choose a rank of another family"
        )
    alpha, taus, _ = acceptance_of(scorer, score, folder)
    drafter = score.drafter or score.architecture
    schedule, note = _planned(session, scorer, (drafter, alpha, taus), batch_sizes, (name, words))
    write_schedule(folder / SCHEDULE_FILE, schedule)
    largest_used = largest_gamma(schedule.ranges, 0)
    if facts.speculative_config and largest_used:
        config = vllm_config(
            score.family,
            str(folder),
            largest_used,
            schedule.ranges,
            scorer.workload.tensor_parallel,
        )
        if score.drafter is not None:
            config = vllm_drafter_config(score.drafter, str(folder), largest_used, schedule.ranges)
        write_json(folder / "speculative_config.json", config)
    told = {"run": str(session.run.path), "rank": rank, "architecture": score.label(), "note": note}
    as_engine = schedule_words(name, score.family, schedule.ranges, score.gamma)
    return (
        told
        | schedule_to_dict(schedule)
        | {
            "as_engine": as_engine,
            "warning": facts.schedule_doubt,
        }
    )


def schedule_head(
    session: SearchSession, family: str, engine: str | None = None, batch_sizes: Sequence[int] = ()
) -> dict[str, Any]:
    """The same of a trained head of the run, with tokens a round as they were replayed; written to
    heads/<family>/schedule.json, where `export --family` finds it.

    Raises ArchsearchError where the run has no such head, or the engine takes no schedule for it.
    """
    from archsearch.drafts.heads import head_folder, load_head, trained_heads
    from archsearch.models.drafters import head_family_of
    from archsearch.models.named_drafters import resolve_drafter

    known, name = head_family_of(family), engine or session.request.engine
    if known not in trained_heads(session.run.path):
        raise ArchsearchError(
            f"{session.run.path} has no trained {known} head; train it first: "
            f"archsearch train {session.run.path} --family {known}"
        )
    scorer, words = serving_scorer(session, name)
    trained = load_head(head_folder(session.run.path, known))
    drafter = resolve_drafter(str(trained.folder), session.target).drafter
    engine_facts(name).check_drafter(
        drafter, shared_by(scorer.workload), scorer.latency.engine_version
    )
    if why := engine_facts(name).unscheduled_words(known):
        raise ArchsearchError(f"{why}; serve the head with gamma {trained.plan.gamma}")
    taus = {
        gamma: each.estimate()
        for gamma, each in trained.replays.items()
        if gamma <= trained.plan.gamma
    }
    alpha = Estimate(trained.conditional[0], 0.0, "measured")
    schedule, note = _planned(session, scorer, (drafter, alpha, taus), batch_sizes, (name, words))
    write_schedule(trained.folder / SCHEDULE_FILE, schedule)
    told = {
        "run": str(session.run.path),
        "rank": None,
        "family": known,
        "architecture": f"{known} head",
        "note": note,
    }
    as_engine = schedule_words(name, known, schedule.ranges, trained.plan.gamma)
    doubt = engine_facts(name).schedule_doubt
    return told | schedule_to_dict(schedule) | {"as_engine": as_engine, "warning": doubt}


def _planned(
    session: SearchSession,
    scorer: Scorer,
    draft: tuple[Draft, Estimate, dict[int, Estimate]],
    batch_sizes: Sequence[int],
    engine: tuple[str, str],
) -> tuple[GammaSchedule, str]:
    """The schedule of a draft (with its alpha, and tau by gamma) in an `engine` (its name, its
    latencies in words), and what is to be said of it."""
    name, words = engine
    largest, device = scorer.latency.largest_batch, session.source.device
    one_by_one = device.kind == "gpu" and not engine_facts(name).batches
    if one_by_one:
        check_batch(engine_facts(name), device, max(batch_sizes, default=1))
    usual = [
        size
        for size in BATCH_SIZES
        if size == 1 or not one_by_one and (largest is None or size <= 2 * largest)
    ]
    asked = session.scorer.workload.batch_size
    sizes = sorted({1, *(batch_sizes or usual)})  # a schedule begins at batch size 1
    if asked <= sizes[-1]:
        sizes = sorted({*sizes, asked})
    points = schedule_points(scorer, *draft, device, sizes)
    known = {point.batch_size: point for point in points}

    def gamma_of(batch: int) -> int:
        known.setdefault(batch, schedule_point(scorer, *draft, batch))
        return known[batch].gamma

    between = refined([(point.batch_size, point.gamma) for point in points], gamma_of)
    chosen = merged([known[batch] for batch, _ in between], kept=asked)
    most = points[-1].batch_size
    note = f"{engine_title(name)} runs one request at a time." if one_by_one else ""
    if most < sizes[-1]:
        note = (
            f"At batch size {next(size for size in sizes if size > most)} the KV caches do not fit"
            f" {device.key}."
        )
    elif not batch_sizes and largest is not None:
        note = (
            f"Passes were measured up to batch size {largest}; above {most} nothing is predicted."
        )
    if slow := [
        str(point.batch_size)
        for point in points
        if point.speedup is not None and point.speedup.value < 1.0
    ]:
        listed = ", ".join(slow)
        note = f"{note} Without the draft loaded a server is faster at batch size {listed}.".strip()
    return GammaSchedule(schedule_from_points(chosen), tuple(points), name, words), note
