"""What a plan shows that keeps several requests in flight: medians over turns, term by term.

A speed-up is the ratio inside one turn. Times come from the engine's steps at full batch that read
no prompt (from whole requests where an engine does not report its steps).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from archsearch.engines.measure.results import LoadResult, ScheduleVerdict
from archsearch.engines.measure.turns import Case, Trace, Turn, Variant, bootstrap, pass_times
from archsearch.errors import RunFailed
from archsearch.estimate import Estimate
from archsearch.latency.engine_passes import START_STD

Results = dict[Case, LoadResult]


def load_results(trace: Trace) -> Results:
    """Every variant at every concurrency."""
    return {
        (variant.name, number): _result(trace, variant, number)
        for variant in trace.plan.variants
        for number in trace.plan.concurrencies
    }


def token_s(turn: Turn) -> float:
    """Seconds a token of one request in a turn. Raises RunFailed where nothing shows them."""
    if turn.full:
        seconds = sum(step.seconds for step in turn.full)
        return seconds / sum(step.written for step in turn.full) * turn.concurrency
    if any(turn.calls):
        raise RunFailed(
            f"no step with all {turn.concurrency} requests in it was seen; answers are too short or"
            " differ too much in length: allow more new tokens or a lower concurrency"
        )
    tokens = sum(result.decode_tokens for result in turn.results)
    if not tokens:
        raise RunFailed(
            "every answer ended in its first round: nothing to time; use prompts with longer"
            " answers"
        )
    return sum(result.decode_seconds for result in turn.results) / tokens


def _result(trace: Trace, variant: Variant, concurrency: int) -> LoadResult:
    turns = trace.turns[variant.name, concurrency]
    times = np.array([token_s(turn) for turn in turns])
    speedup = interval = None
    drafts = variant.draft is not None
    if drafts:
        ratios = np.array(
            [token_s(turn) for turn in trace.turns[trace.plan.alone.name, concurrency]]
        )
        ratios = ratios / times
        _, medians = bootstrap(ratios, trace.plan.seed)
        low, high = np.quantile(medians, [0.05, 0.95])
        speedup = Estimate(float(np.median(ratios)), float(medians.std()), "measured")
        interval = (float(low), float(high))
    results = [result for turn in turns for result in turn.results]
    steps = [step for turn in turns for step in turn.full]
    rounds, accepted, rejected = (
        sum(getattr(result, name) for result in results)
        for name in ("rounds", "accepted", "rejected")
    )
    width = max((len(result.accepted_by_position) for result in results), default=0)
    by_position = np.zeros(width)
    for result in results:
        by_position[: len(result.accepted_by_position)] += result.accepted_by_position
    timed = sum(step.batch for step in steps)
    tau = sum(step.written for step in steps) / timed if timed else 1.0 + accepted / max(1, rounds)
    draft_s, target_s, rest_s = pass_times(steps)
    one_gamma = drafts and not variant.schedule and accepted + rejected > 0
    return LoadResult(
        variant=variant.name,
        concurrency=concurrency,
        gamma=variant.gamma_at(concurrency) if drafts else 0,
        engine_version=trace.version,
        repeats=len(times),
        batch_steps=len(steps),
        tokens_per_s=concurrency / float(np.median(times)),
        tau=float(tau) if drafts else 1.0,
        alpha=accepted / (accepted + rejected) if one_gamma else None,
        accepted_by_position=tuple(map(float, by_position / rounds)) if rounds else (),
        speedup=speedup,
        speedup_interval=interval,
        step_s=float(np.median([step.seconds for step in steps] or times)),
        target_s=target_s,
        draft_s=draft_s,
        rest_s=rest_s,
        repeats_s=tuple(map(float, times)),
    )


def schedule_verdict(
    results: Results, schedule: str, fixed: Sequence[str], concurrencies: Sequence[int]
) -> list[ScheduleVerdict]:
    """For each concurrency the schedule against the best of always off (1.0) and every fixed gamma.

    Each setting is a process of its own, so START_STD is in the margin: the same gamma in two
    starts differs by that much.
    """
    rows = []
    for number in concurrencies:
        measured = {name: results[name, number].speedup for name in (schedule, *fixed)}
        others = {"off": Estimate(1.0, 0.0, "measured")}
        others |= {name: speedup for name, speedup in measured.items() if speedup is not None}
        own = others.pop(schedule)
        best = max(others, key=lambda name: others[name].value)
        starts = START_STD * own.value * (1.0 if best == "off" else 2.0**0.5)
        margin = 2.0 * float(np.hypot(np.hypot(own.std, others[best].std), starts))
        holds = own.value >= others[best].value - margin
        gamma = results[schedule, number].gamma
        rows.append(ScheduleVerdict(number, gamma, own, best, others[best], margin, holds))
    return rows


def overall_speedups(
    results: Results, names: Sequence[str], concurrencies: Sequence[int]
) -> dict[str, float]:
    """The geometric mean of each variant's speed-up over the concurrencies, and `off` = 1: one
    setting for all loads."""
    means = {"off": 1.0}
    for name in names:
        speedups = (results[name, number].speedup for number in concurrencies)
        logs = [np.log(speedup.value) for speedup in speedups if speedup is not None]
        means[name] = float(np.exp(np.mean(logs)))
    return means
