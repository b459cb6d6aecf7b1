"""What a draft is worth over a range of batch sizes, contexts, gammas or acceptances: the curve,
and where it stops paying.

A point says what `estimate` says of one workload: the best gamma, the speed-up with its doubt, time
per token and throughput with the draft and without, and `ideal`, the speed-up were every draft
token accepted (alpha = 1). Where memory holds fewer requests at once than are in flight, throughput
is that of those it holds: a draft's weights and cache take room from the target's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from archsearch import speedup as speculation
from archsearch.acceptance.estimator import GivenAcceptance
from archsearch.acceptance.families import FamilyAcceptance, acceptance_of
from archsearch.drafters.drafter import Draft, Drafter
from archsearch.drafters.registry import as_drafter
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.search.objective import Scorer
from archsearch.traffic.times import RoundTimes, ladder, round_times
from archsearch.workload import Workload

Array = NDArray[np.float64]
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

Held = Callable[[Workload, Drafter | None], int | None]
"""How many requests of a workload's context memory holds at once, with a drafter or without; None:
nobody says."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is varied, and at which values, ascending."""

    axis: Axis
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One point. `gamma`: the best that drafts, also where it does not pay; `speedup`: at it, over
    plain steps of as many requests; `speedup_off`: with the draft loaded and nothing drafted.
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

    @property
    def pays(self) -> bool:
        return self.throughput_gain > 1.0

    @property
    def throughput_gain(self) -> float:
        """Throughput with the draft over that without: the speed-up, less what the draft costs in
        requests that fit."""
        return self.tokens_per_s.value / self.plain_tokens_per_s.value

    def to_dict(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in self.__slots__}
        plain = {
            name: value.to_dict() if isinstance(value, Estimate) else value
            for name, value in told.items()
        }
        return {**plain, "pays": self.pays, "throughput_gain": self.throughput_gain}


@dataclass(frozen=True, slots=True)
class Curve:
    """One drafter over a sweep. `stops`: where its speed-up falls to 1 (None: nowhere in the
    range), `stops_between` where its 5 and 95 % bounds do (None: beyond the range); `starts`: where
    it rises to 1."""

    points: tuple[CurvePoint, ...]
    starts: float | None
    stops: float | None
    stops_between: tuple[float | None, float | None]
    ideal_stops: float | None
    memory_stops: float | None
    """From where memory holds fewer requests than are in flight, with the draft loaded."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "starts": self.starts,
            "stops": self.stops,
            "stops_between": list(self.stops_between),
            "ideal_stops": self.ideal_stops,
            "memory_stops": self.memory_stops,
            "points": [point.to_dict() for point in self.points],
        }


def sweep_of(axis: str, text: str | None, most_context: int) -> Sweep:
    """`LOW:HIGH` or `LOW:HIGH:POINTS` along `axis`; None: the usual range. Raises ArchsearchError
    for what is no range."""
    if axis not in AXES:
        raise ArchsearchError(f"--sweep {axis}: choose one of {', '.join(AXES)}")
    known: Axis = axis  # type: ignore[assignment]
    low, high = RANGES[known]
    if known == "context":
        high = max(low + 1, min(high, most_context))
    count = POINTS
    if text is not None:
        low, high, count = _range(known, text)
    if known == "alpha":
        return Sweep(known, tuple(float(value) for value in np.linspace(low, high, count)))
    start, end = max(low, 1.0), max(high, 1.0)
    spread = np.arange(low, high + 1) if high - low < count else np.geomspace(start, end, count)
    return Sweep(known, tuple(sorted({float(round(value)) for value in (low, high, *spread)})))


def _range(axis: Axis, text: str) -> tuple[float, float, int]:
    parts = text.split(":")
    example = "0.4:0.9" if axis == "alpha" else "1:512"
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or not all(math.isfinite(value) for value in numbers):
        raise ArchsearchError(
            f"--range {text!r} is no LOW:HIGH or LOW:HIGH:POINTS; write for instance {example}"
        )
    low, high, count = numbers[0], numbers[1], int(numbers[2]) if len(numbers) == 3 else POINTS
    least, most = {
        "alpha": (0.0, 1.0),
        "gamma": (1.0, 64.0),
        "batch": (1.0, 65536.0),
        "context": (0.0, 1e7),
    }[axis]
    if not least <= low < high <= most:
        raise ArchsearchError(
            f"--range {text}: LOW must lie below HIGH, both between {least:g} and {most:g}"
        )
    if axis != "alpha" and (low != round(low) or high != round(high)):
        raise ArchsearchError(f"--range {text}: a {axis} is a whole number")
    if not 2 <= count <= MOST_POINTS:
        raise ArchsearchError(f"--range {text}: between 2 and {MOST_POINTS} points, not {count}")
    return low, high, count


def curve(scorer: Scorer, draft: Draft, sweep: Sweep, held: Held | None = None) -> Curve:
    """The drafter of `scorer`'s workload over `sweep`; `held`: how many requests memory holds."""
    drafter = as_drafter(draft)
    holds = _held(scorer, drafter, sweep, held)
    if sweep.axis in ("batch", "context"):
        points = _over_conditions(scorer, drafter, sweep, holds)
    else:
        points = _over_acceptance(scorer, drafter, sweep, holds)
    return _with_crossings(points, sweep)


@dataclass(frozen=True, slots=True)
class _Where:
    """One point: x, the requests that run at once with the draft and without, and a plain step of
    the latter."""

    x: float
    running: int
    plain_running: int
    plain_s: Estimate


def _over_conditions(
    scorer: Scorer, drafter: Drafter, sweep: Sweep, holds: Sequence[tuple[int, int]]
) -> list[CurvePoint]:
    """Over batch sizes, which stop growing where memory is full, or over contexts, each with as
    many requests as memory holds."""
    fixed, share = scorer.workload, _believed(scorer, drafter, scorer.workload).share
    known = drafter.with_share(share.value if share is not None else 1.0)
    low, high = int(sweep.values[0]), int(sweep.values[-1])
    if sweep.axis == "batch":
        at = ladder(min(low, *(min(pair) for pair in holds)), high)
        workloads = [replace(fixed, batch_size=value) for value in at]
        priced = round_times(scorer.latency, scorer.target, known, workloads, at, scorer.gammas)
        times, plain = (
            priced.read([pair[0] for pair in holds]),
            priced.read([pair[1] for pair in holds]),
        )
    else:
        at = ladder(low, high, exact=0)
        running = [np.interp(at, sweep.values, [pair[i] for pair in holds]) for i in (0, 1)]
        of_draft, alone = (
            [
                replace(fixed, context_len=value, batch_size=int(batch))
                for value, batch in zip(at, batches, strict=True)
            ]
            for batches in running
        )
        priced = round_times(scorer.latency, scorer.target, known, of_draft, at, scorer.gammas)
        steps = [scorer.latency.decode_s(scorer.target, workload) for workload in alone]
        decode, std = (
            np.array([getattr(step, name) for step in steps]) for name in ("value", "std")
        )
        times, plain = (
            priced.read(sweep.values),
            replace(priced, decode=decode, decode_std=std).read(sweep.values),
        )
    points, tokens = [], _Tokens(scorer, drafter)
    for row, x in enumerate(sweep.values):
        step = Estimate(float(plain.decode[row]), float(plain.decode_std[row]), plain.source)
        taus = tokens.at(int(x) if sweep.axis == "context" else fixed.context_len)
        points.append(_point(scorer, times, row, taus, _Where(x, *holds[row], step)))
    return points


def _over_acceptance(
    scorer: Scorer, drafter: Drafter, sweep: Sweep, holds: Sequence[tuple[int, int]]
) -> list[CurvePoint]:
    gammas = tuple(int(value) for value in sweep.values) if sweep.axis == "gamma" else scorer.gammas
    share = _believed(scorer, drafter, scorer.workload).share
    known = drafter.with_share(share.value if share is not None else 1.0)
    running, alone = (replace(scorer.workload, batch_size=batch) for batch in holds[0])
    times = round_times(
        scorer.latency, scorer.target, known, [running], [running.batch_size], gammas
    )
    plain = scorer.latency.decode_s(scorer.target, alone)

    def where(x: float) -> _Where:
        return _Where(x, *holds[0], plain)

    if sweep.axis == "gamma":
        tokens = _Tokens(scorer, drafter).at(scorer.workload.context_len)
        return [
            _point(scorer, times, 0, tokens, where(gamma), only=row)
            for row, gamma in enumerate(times.gammas)
        ]
    return [
        _point(
            scorer,
            times,
            0,
            _Taus(replace(acceptance_of(drafter, GivenAcceptance(x), scorer.context), share=share)),
            where(x),
        )
        for x in sweep.values
    ]


def _believed(scorer: Scorer, drafter: Drafter, workload: Workload) -> FamilyAcceptance:
    known = scorer.known_families.get(drafter.family)
    if known is not None:
        return known
    beyond = scorer.context.context_len - scorer.workload.context_len
    context = replace(scorer.context, context_len=workload.context_len + beyond)
    return acceptance_of(drafter, scorer.acceptance, context)


class _Taus:
    """tau by gamma of one acceptance, each asked for once."""

    def __init__(self, known: FamilyAcceptance) -> None:
        self.known, self.alpha = known, known.acceptance.alpha
        self.drift = known.acceptance.drift
        self.share = known.share.value if known.share is not None else 1.0
        self._seen: dict[int, Estimate] = {}
        self._means: dict[tuple[int, ...], Array] = {}

    def means(self, gammas: tuple[int, ...]) -> Array:
        """tau of each of `gammas`."""
        if gammas not in self._means:
            positions = speculation.drifting_positions(
                self.alpha.value, self.drift.value, max(gammas)
            )
            reach = np.cumsum(speculation.accepted_by_position(positions))
            self._means[gammas] = 1.0 + self.share * reach[np.array(gammas) - 1]
        return self._means[gammas]

    def tau(self, gamma: int) -> Estimate:
        if gamma not in self._seen:
            bounds = speculation.tau_interval(self.alpha, gamma, self.drift)
            self._seen[gamma] = self.known.tau(
                speculation.tau_estimate(self.alpha, gamma, self.drift).between(bounds)
            )
        return self._seen[gamma]


class _Tokens:
    """tau by context: acceptance may depend on it, and is then asked for at a ladder of
    contexts."""

    def __init__(self, scorer: Scorer, drafter: Drafter) -> None:
        self._scorer, self._drafter = scorer, drafter
        self._seen: dict[int, _Taus] = {}

    def at(self, context: int) -> _Taus:
        if context not in self._seen:
            workload = replace(self._scorer.workload, context_len=context)
            self._seen[context] = _Taus(_believed(self._scorer, self._drafter, workload))
        return self._seen[context]


def _point(
    scorer: Scorer, times: RoundTimes, row: int, taus: _Taus, where: _Where, only: int | None = None
) -> CurvePoint:
    """The point at row `row` of `times`; `only`: the gamma that is asked about."""
    decode = float(times.decode[row])
    gains = taus.means(times.gammas) * decode / times.round[row]
    ideals = (1.0 + taus.share * np.array(times.gammas)) * decode / times.round[row]
    best = int(np.argmax(gains)) if only is None else only
    gamma = times.gammas[best]
    tau, source = taus.tau(gamma), times.source
    decode_s = Estimate(decode, float(times.decode_std[row]), source)
    round_s = Estimate(float(times.round[row, best]), float(times.round_std[row, best]), source)
    verify_s = Estimate(float(times.verify[row, best]), float(times.verify_std[row, best]), source)
    gain = speculation.speedup_estimate(tau, decode_s, round_s, verify_s, scorer.target_correlation)
    bounds = (
        (tau.low, tau.high)
        if tau.low is not None and tau.high is not None
        else (tau.value, tau.value)
    )
    gain = gain.between(speculation.speedup_interval(gain, tau, bounds, round_s))
    tpot = speculation.tpot_estimate(tau, round_s)
    return CurvePoint(
        x=float(where.x),
        gamma=gamma,
        alpha=taus.alpha,
        tau=tau,
        speedup=gain,
        speedup_off=decode / (decode + float(times.idle[row])),
        ideal=float(np.max(ideals)) if only is None else float(ideals[best]),
        tpot_s=tpot,
        plain_tpot_s=where.plain_s,
        tokens_per_s=_rate(where.running, tpot),
        plain_tokens_per_s=_rate(where.plain_running, where.plain_s),
        running=where.running,
        plain_running=where.plain_running,
    )


def _rate(batch: int, tpot: Estimate) -> Estimate:
    value = batch / tpot.value
    return Estimate(value, value * tpot.relative_std, tpot.source)


def _held(
    scorer: Scorer, drafter: Drafter, sweep: Sweep, held: Held | None
) -> list[tuple[int, int]]:
    """For each point how many of the requests in flight run at once, with the draft and without."""
    fixed = scorer.workload
    if sweep.axis in ("gamma", "alpha"):
        return [_running(fixed, drafter, held)]
    if sweep.axis == "batch":
        most = [held(fixed, each) if held is not None else None for each in (drafter, None)]
        return [(_least(int(x), most[0]), _least(int(x), most[1])) for x in sweep.values]
    return [_running(replace(fixed, context_len=int(x)), drafter, held) for x in sweep.values]


def _running(workload: Workload, drafter: Drafter, held: Held | None) -> tuple[int, int]:
    most = [held(workload, each) if held is not None else None for each in (drafter, None)]
    return _least(workload.batch_size, most[0]), _least(workload.batch_size, most[1])


def _least(batch: int, most: int | None) -> int:
    return batch if most is None else max(1, min(batch, most))


def _with_crossings(points: Sequence[CurvePoint], sweep: Sweep) -> Curve:
    xs = [point.x for point in points]
    low, high = ([_bound(point, side) for point in points] for side in ("low", "high"))
    short = [point.x for point in points if sweep.axis == "batch" and point.running < point.x]
    logs = sweep.axis in ("batch", "context")
    gains = [point.throughput_gain for point in points]
    return Curve(
        tuple(points),
        starts=crossing(xs, gains, rising=True, logs=logs),
        stops=crossing(xs, gains, logs=logs),
        stops_between=(crossing(xs, low, logs=logs), crossing(xs, high, logs=logs)),
        ideal_stops=crossing(xs, [point.ideal for point in points], logs=logs),
        memory_stops=short[0] if short else None,
    )


def _bound(point: CurvePoint, side: str) -> float:
    value = getattr(point.speedup, side)
    return point.throughput_gain * float(1.0 if value is None else value / point.speedup.value)


def crossing(
    xs: Sequence[float], gains: Sequence[float], *, rising: bool = False, logs: bool = True
) -> float | None:
    """The first x at which `gains` falls to 1 (`rising`: rises to it), read between points; None
    where it does not."""
    for (x, gain), (after_x, after) in zip(
        zip(xs, gains, strict=True), list(zip(xs, gains, strict=True))[1:], strict=False
    ):
        before, later = math.log(max(gain, 1e-9)), math.log(max(after, 1e-9))
        if (before < 0.0 <= later) if rising else (before > 0.0 >= later):
            share = before / (before - later)
            if logs and x > 0:
                return float(math.exp(math.log(x) + share * (math.log(after_x) - math.log(x))))
            return x + share * (after_x - x)
    return None
