"""What a draft is worth over a range of batch sizes, contexts, gammas or acceptances: the curve,
and where it stops paying.

A point says what `estimate` says of one workload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Literal, get_args

import numpy as np

from archsearch import speedup as speculation
from archsearch.acceptance.estimator import Acceptance, GivenAcceptance
from archsearch.acceptance.families import FamilyAcceptance, acceptance_of
from archsearch.drafters.drafter import Draft, Drafter
from archsearch.drafters.registry import as_drafter
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate, weakest_source
from archsearch.search.objective import Scorer
from archsearch.workload import Workload

Axis = Literal["batch", "context", "gamma", "alpha"]
AXES: Final[tuple[Axis, ...]] = get_args(Axis)
POINTS: Final = 64
MOST_POINTS: Final = 4096
RANGES: Final[dict[Axis, tuple[float, float]]] = {
    "batch": (1, 256),
    "context": (128, 32768),
    "gamma": (1, speculation.MAX_GAMMA),
    "alpha": (0.05, 1.0),
}
LIMITS: Final[dict[Axis, tuple[float, float]]] = {
    "batch": (1, 65536),
    "context": (0, 1e7),
    "gamma": (1, 64),
    "alpha": (0, 1),
}

Held = Callable[[Workload, Drafter | None], int | None]
"""How many requests of a workload's context memory holds at once, with a drafter or without; None:
nobody says."""


def at(scorer: Scorer, drafter: Drafter, axis: Axis, x: float) -> Scorer:
    """The scorer at one place of an axis."""
    if axis == "batch":
        return scorer.at_batch(int(x))
    if axis == "context":
        return scorer.at_context(int(x))
    if axis == "gamma":
        return scorer.with_gammas((int(x),))
    known = scorer.predicted_acceptance(drafter)
    # as counted; alpha is another one, as sure as it is given
    if known.taus is not None and getattr(drafter, "tree", None) is None:
        sure, drift = Estimate(x, 0.0, "given"), replace(known.acceptance.drift, std=0.0)
        taus = {gamma: speculation.tau_estimate(sure, gamma, drift) for gamma in known.taus}
        own = FamilyAcceptance(Acceptance(sure, drift), taus=taus)
    else:
        given = acceptance_of(drafter, GivenAcceptance(x), scorer.context)
        own = replace(given, share=known.share)
    return scorer.with_families({drafter.family: own})


def speedup_when_off(scorer: Scorer, draft: Draft) -> Estimate:
    """Speed-up of serving with the draft loaded and gamma 0: 1, or less where the engine runs the
    draft all the same."""
    decode, idle = scorer.decode_s, scorer.latency.idle_s(scorer.target, draft, scorer.workload)
    both = decode.value + idle.value
    value = decode.value / both
    # An error of the idle pass d moves the ratio by d / (decode + idle), relative to it.
    std = value * idle.std / both
    return Estimate(value, std, weakest_source(decode.source, idle.source))


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is varied, and at which values, ascending."""

    axis: Axis
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One point. `gamma`: the best that drafts, also where it does not pay; `speedup`: at it, over
    plain steps of as many requests; `speedup_off`: with the draft loaded and nothing drafted;
    `ideal`: were every draft token accepted.
    `running` and `plain_running`: requests that run at once with the draft and without, fewer than
    are in flight where memory is full; `tpot_s`, `plain_tpot_s`, `tokens_per_s` and
    `plain_tokens_per_s` are theirs."""

    x: float
    gamma: int
    alpha: Estimate
    tau: Estimate
    speedup: Estimate
    speedup_off: float
    ideal: float
    tpot_s: Estimate
    plain_tpot_s: Estimate
    tokens_per_s: Estimate
    plain_tokens_per_s: Estimate
    running: int
    plain_running: int
    ALSO: ClassVar = ("pays", "throughput_gain")

    @property
    def pays(self) -> bool:
        return self.throughput_gain > 1.0

    @property
    def throughput_gain(self) -> float:
        """Throughput with the draft over that without: the speed-up, less what the draft costs in
        requests that fit."""
        return self.tokens_per_s.value / self.plain_tokens_per_s.value


@dataclass(frozen=True, slots=True)
class Curve:
    """One drafter over a sweep. `stops`: where its speed-up falls to 1 (None: nowhere in the
    range), `stops_between` where its 5 and 95 % bounds do (None: beyond the range); `starts`: where
    it rises to 1; `memory_stops`: from where memory holds fewer requests than are in flight, with
    the draft loaded."""

    starts: float | None
    stops: float | None
    stops_between: tuple[float | None, float | None]
    ideal_stops: float | None
    memory_stops: float | None
    points: tuple[CurvePoint, ...]


def sweep_of(axis: str, text: str | None, most_context: int) -> Sweep:
    """`LOW:HIGH` or `LOW:HIGH:POINTS` along `axis`; None: the usual range. Raises ArchsearchError
    for what is no range."""
    if axis not in AXES:
        raise ArchsearchError(f"--sweep {axis}: choose one of {', '.join(AXES)}")
    low, high = RANGES[axis]
    if axis == "context":
        high = max(low + 1, min(high, most_context))
    count = POINTS
    if text is not None:
        low, high, count = _range(axis, text)
    if axis == "alpha":
        return Sweep(axis, tuple(float(value) for value in np.linspace(low, high, count)))
    start, end = max(low, 1.0), max(high, 1.0)
    # each whole number of a short range, else evenly in logarithms
    spread = np.arange(low, high + 1) if high - low < count else np.geomspace(start, end, count)
    return Sweep(axis, tuple(sorted({float(round(value)) for value in (low, high, *spread)})))


def _range(axis: Axis, text: str) -> tuple[float, float, int]:
    example = "0.4:0.9" if axis == "alpha" else "1:512"
    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or not all(math.isfinite(value) for value in numbers):
        raise ArchsearchError(
            f"--range {text!r} is no LOW:HIGH or LOW:HIGH:POINTS; write for instance {example}"
        )
    low, high, count = (*numbers, POINTS)[:3]
    least, most = LIMITS[axis]
    if not least <= low < high <= most:
        raise ArchsearchError(
            f"--range {text}: LOW must lie below HIGH, both between {least:g} and {most:g}"
        )
    if axis != "alpha" and (low != round(low) or high != round(high)):
        raise ArchsearchError(f"--range {text}: a {axis} is a whole number")
    if not 2 <= (points := int(count)) <= MOST_POINTS:
        raise ArchsearchError(f"--range {text}: between 2 and {MOST_POINTS} points, not {points}")
    return low, high, points


def curve(scorer: Scorer, draft: Draft, sweep: Sweep, held: Held | None = None) -> Curve:
    """The drafter of `scorer`'s workload over `sweep`; `held`: how many requests memory holds.
    Gammas that it cannot draft are left out."""
    drafter = as_drafter(draft)
    values = [x for x in sweep.values if sweep.axis != "gamma" or drafter.gammas((int(x),))]
    return _with_crossings([_point(scorer, drafter, sweep.axis, x, held) for x in values], sweep)


def _point(scorer: Scorer, drafter: Drafter, axis: Axis, x: float, held: Held | None) -> CurvePoint:
    local = at(scorer, drafter, axis, x)
    flight, asked = local.workload.batch_size, scorer.workload.batch_size

    def fitting(each: Drafter | None) -> int:
        most = held(replace(local.workload, batch_size=asked), each) if held else None
        return flight if most is None else max(1, min(flight, most))

    running, alone = fitting(drafter), fitting(None)
    # the server without the draft may hold more requests at once
    plain = local if alone == flight else local.at_batch(alone)
    if running != flight:
        local = at(scorer.at_batch(running), drafter, axis, running if axis == "batch" else x)
    score = local(drafter)
    share = local.predicted_acceptance(drafter).share
    most = share.value if share is not None else 1.0
    gain = score.speedup
    if gain.low is None and score.round_s is not None:  # acceptance is given: the times' own doubt
        gain = gain.between(
            speculation.speedup_interval(gain, score.tau, score.gamma, score.round_s)
        )
    # every draft token accepted, in as many rounds as have any
    certain = {gamma: Estimate(1.0 + most * gamma, 0.0, "given") for gamma in local.gammas}
    return CurvePoint(
        x=float(x),
        gamma=score.gamma,
        alpha=replace(score.alpha, low=None, high=None),
        tau=score.tau,
        speedup=gain,
        speedup_off=speedup_when_off(local, drafter.model or drafter).value,
        ideal=local.measured(score.proposer, score.alpha, certain).speedup.value,
        tpot_s=score.tpot_s,
        plain_tpot_s=plain.decode_s,
        tokens_per_s=_rate(running, score.tpot_s),
        plain_tokens_per_s=_rate(alone, plain.decode_s),
        running=running,
        plain_running=alone,
    )


def _rate(batch: int, tpot: Estimate) -> Estimate:
    value = batch / tpot.value
    return Estimate(value, value * tpot.relative_std, tpot.source)


def _with_crossings(points: Sequence[CurvePoint], sweep: Sweep) -> Curve:
    xs = [point.x for point in points]
    low, high = ([_bound(point, side) for point in points] for side in ("low", "high"))
    short = [point.x for point in points if sweep.axis == "batch" and point.running < point.x]
    logs = sweep.axis in ("batch", "context")
    gains = [point.throughput_gain for point in points]

    def stops(gains: Sequence[float], rising: bool = False) -> float | None:
        return speculation.crossing(xs, speculation.levels(gains), rising=rising, logs=logs)

    return Curve(
        starts=stops(gains, rising=True),
        stops=stops(gains),
        stops_between=(stops(low), stops(high)),
        ideal_stops=stops([point.ideal for point in points]),
        memory_stops=short[0] if short else None,
        points=tuple(points),
    )


def _bound(point: CurvePoint, side: str) -> float:
    value = getattr(point.speedup, side)
    return point.throughput_gain * float(1.0 if value is None else value / point.speedup.value)
