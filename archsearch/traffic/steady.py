"""A server in steady state: how many requests run, from the requests per second that arrive or from
a fixed number in flight.

With P seconds of prefill a request, R rounds a request and rounds of r(b) seconds while b requests
decode:

    c in flight            seconds a request = P + S r(c) / c  (every slot is refilled at once)
    c that start together  c P + S_1 r(c) + (S_2 - S_1) r(c - 1) + ...  (nobody takes a place)
    x requests per second  b = x R r(1 + b) / (1 - x P)        (Little's law; prefills: share x P)

S = R + 1 where prompts are read in the steps of those that decode, P being what they add to a step;
else R.

A request that arrives at random sees b others beside itself, hence 1 + b (exact where a round takes
as long as it has requests: processor sharing).

R = (L - 1) / tau + (E[X^2] - tau) / (2 tau^2) for L output tokens, the first of them from the
prefill, and X tokens a round: the last round of an answer ends beyond its end (renewal theory). A
plain step is a round with tau = 1.

Waiting for one of the slots that memory holds is M/G/c with a rate of service that depends on how
many are in: a birth-death chain gives the chance to wait (Erlang-C, where a request takes as long
whatever runs beside it), the mean is that of M/M/c times (1 + cv^2) / 2, cv that of a request's
work (Allen and Cunneen, 1990), and waits are exponential.

Numbers may be arrays that broadcast: of many drafts, of many rates. Held against a discrete-event
simulation in `traffic.simulation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from archsearch.errors import ArchsearchError
from archsearch.estimate import Array, Numbers
from archsearch.speedup import accepted_by_position, drifting_positions

MOST_RUNNING: Final = 1024
RATES: Final = 48  # looked at for the one above which speculation should be off
# share of a server's capacity from which on it counts as full: waiting grows without end
FULL: Final = 0.995
BLOCKS: Final = 64  # of numbers of requests among which the chain is summed
RARE: Final = 0.01  # of requests that take longer than the 99th percentile
# Std of logit(alpha) between requests. Assumed, with nine runs of benchmarks/strangers.py in sight:
# 0.65 over the demo's 30 texts (clumps included), 0.31 over the table's data sets.
REQUEST_STD: Final = 0.5


@dataclass(frozen=True)
class RoundTokens:
    """Tokens of a round: `reach[i]` is the chance (a number, or an array of many drafts) that a
    round gives more than i + 1 of them; () for plain steps."""

    reach: tuple[Numbers, ...] = ()

    @classmethod
    def of(cls, alpha: Numbers, drift: float, gamma: int, share: float = 1.0) -> RoundTokens:
        """Of a drafter with `alpha`, its drift in logit per position, that drafts in `share` of
        rounds."""
        reach = accepted_by_position(drifting_positions(alpha, drift, gamma))
        return cls(tuple(share * chance for chance in reach))

    @cached_property
    def tau(self) -> Numbers:
        return 1.0 + sum(self.reach)

    @cached_property
    def square(self) -> Numbers:
        """Mean of the squared number of tokens."""
        return 1.0 + sum((2 * i + 3) * chance for i, chance in enumerate(self.reach))

    def rounds(self, tokens: float) -> Numbers:
        """Mean rounds until at least `tokens` tokens are written."""
        if tokens <= 0.0:
            return 0.0
        return np.maximum(1.0, tokens / self.tau + (self.square - self.tau) / (2.0 * self.tau**2))


@dataclass(frozen=True)
class Service:
    """What a server does for a request. `at`: batch sizes, ascending; `round_s`: seconds of a round
    at each, [sizes] or [sizes, ...] of many drafts; `prefill_s`: seconds that a request's prompt
    adds; `output_tokens`: mean; `held`: most requests that memory holds; both of all or of each
    draft."""

    at: Array
    round_s: Array
    tokens: RoundTokens
    prefill_s: Numbers
    output_tokens: float
    held: Numbers = MOST_RUNNING
    # prompts are read in the steps of those that decode; else in steps of their own, first
    shares_steps: bool = True
    output_cv2: float = 0.0  # squared coefficient of variation of the output's length
    # quantiles of the output's length over its mean: of shares of requests
    lengths: Callable[[Any], Any] = np.ones_like

    @cached_property  # asked at every step of every fixed point
    def rounds(self) -> Numbers:
        return self.tokens.rounds(self.output_tokens - 1.0)

    @cached_property
    def chance_cv2(self) -> Numbers:
        """Squared coefficient of variation of the rounds of a request of one length."""
        return (self.tokens.square / self.tokens.tau**2 - 1.0) / np.maximum(self.rounds, 1.0)

    @property
    def steps(self) -> Numbers:
        """Steps a request takes part in: its rounds, and the one in which its prompt is read where
        prompts share them."""
        return self.rounds + (1.0 if self.shares_steps else 0.0)

    def round_at(self, running: Numbers) -> Numbers:
        """Seconds of a round while `running` requests decode: between the batch sizes that are
        known, and by the slope over the upper half of them beyond: from one to the next a batch may
        take less, where one was measured and the other was not."""
        at, last, seconds = self.at, len(self.at) - 1, self.round_s
        if not last:
            return seconds[0]
        batch, drafts = np.maximum(running, 1.0), seconds.shape[1:]
        low = np.minimum(np.searchsorted(at, batch, side="right") - 1, last - 1)
        share = (batch - at[low]) / (at[low + 1] - at[low])
        if drafts:  # a row of each draft's column
            size = math.prod(drafts)
            here = low * size + np.arange(size).reshape(drafts)
            below, above = np.take(seconds, here), np.take(seconds, here + size)
        else:
            below, above = seconds[low], seconds[low + 1]
        beyond = seconds[-1] + self._slope * (batch - at[-1])
        return np.where(batch <= at[-1], below + (above - below) * share, beyond)[()]

    @cached_property
    def _slope(self) -> Numbers:
        """Seconds that a round takes longer per request, over the upper half of `at`."""
        at = self.at
        half = min(int(np.searchsorted(at, at[-1] / 2.0, side="right")), len(at) - 2)
        return np.maximum(0.0, (self.round_s[-1] - self.round_s[half]) / (at[-1] - at[half]))

    def requests_per_s(self, running: Numbers) -> Numbers:
        """Requests finished a second while `running` of them decode."""
        return 1.0 / (
            self.prefill_s + self.steps * self.round_at(running) / np.maximum(running, 1.0)
        )

    @cached_property
    def most_requests_per_s(self) -> float:
        """The highest rate that it can serve."""
        most = np.maximum(self.requests_per_s(self.held), self.requests_per_s(1.0))
        for size in self.at:
            most = np.where(size <= self.held, np.maximum(most, self.requests_per_s(size)), most)
        return _number(most)


@dataclass(frozen=True, slots=True)
class Steady:
    """A server in steady state. `running`: requests that decode at once; `full`: more arrive than
    it serves, so that waiting has no end and `ttft_s` is infinite. `tpot_s`: seconds per output
    token after the first, with the prefills in between. `ttft_s` is a mean, `ttft_p99_s` what one
    in a hundred exceeds: of requests that come by chance, None of a fixed number in flight.
    `fallen`: requests that decode where the server stays once it has fallen behind; 0: nowhere."""

    requests_per_s: float
    running: float
    tpot_s: float
    ttft_s: float
    tokens_per_s: float
    utilisation: float
    full: bool = False
    ttft_p99_s: float | None = None
    fallen: float = 0.0

    def where(self, which: ArrayLike, other: Steady) -> Steady:
        """This where `which` says so, else the other."""
        pairs = [(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        found: Any = (mine if mine is None else chosen(which, mine, its) for mine, its in pairs)
        return Steady(*found)


def in_flight(service: Service, concurrency: Numbers) -> Steady:
    """`concurrency` requests in flight at all times; those that memory does not hold wait.

    Raises ArchsearchError for fewer than one.
    """
    if np.any(np.less(concurrency, 1)):
        raise ArchsearchError(f"at least 1 request must be in flight, got {concurrency}")
    running = np.minimum(concurrency, service.held)
    rate = service.requests_per_s(running)
    # prefills of those that ended in the same round
    together = 1.0 + (running - 1.0) / (2.0 * np.maximum(service.rounds, 1.0))
    reading = together * service.prefill_s + (service.steps - service.rounds) * service.round_at(
        running
    )
    ttft = (concurrency - running) / rate + reading
    return _steady(service, running, running / rate - reading, ttft, None, rate, 1.0)


def together(service: Service, number: int) -> Steady:
    """`number` requests that start together, without others behind them (offline batches, groups of
    rollouts): the server waits for the slowest, in rounds of fewer and fewer.

    Of c in memory the k-th to end is at the quantile (k - 3/8) / (c + 1/4) (Blom, 1958) of lengths,
    of acceptance (REQUEST_STD) and of chance, whose deviations from the mean rounds add up as
    squares; at most it takes a plain step a token. Summed over k at which the rest has shrunk by
    the root of 2. `tpot_s` ends with the last. Raises ArchsearchError for fewer than one.
    """
    from scipy.special import ndtri

    full, tokens, rounds = in_flight(service, number), service.tokens, service.rounds
    held = np.minimum(number, service.held)
    ranks = np.ndim(held + rounds + service.round_s[0])
    halves = np.arange(2 * math.ceil(math.log2(number)) + 1.0).reshape(-1, *ranks * (1,))
    left = np.maximum(held * 0.5 ** (halves / 2.0), 1.0)  # until the last one is left
    share = (held - left + 0.625) / (held + 0.25)
    later, lengths = ndtri(share), service.lengths(share)

    def slow(deviations: Numbers) -> Numbers:
        """1 / tau of requests that accept less."""
        if not tokens.reach:
            return 1.0
        first = np.minimum(tokens.reach[0], 0.9999)
        # the first position's odds moved; every further chance by the same power of its own
        of_odds = first + (1.0 - first) * np.exp(REQUEST_STD * deviations)
        power = 1.0 - np.log(of_odds) / np.log(first)
        return 1.0 / (1.0 + sum(chance**power for chance in tokens.reach))

    # over a normal distribution by Gauss-Hermite with three points
    mean = (slow(-(3.0**0.5)) + 4.0 * slow(0.0) + slow(3.0**0.5)) / 6.0
    apart = (lengths - 1.0) ** 2 + (slow(later) / mean - 1.0) ** 2 + later**2 * service.chance_cv2
    ends = rounds * np.maximum(1.0 + np.sign(later) * apart**0.5, 0.0)
    ends = np.minimum(ends, (service.output_tokens - 1.0) * lengths)
    ends = np.maximum.accumulate(ends, axis=0)
    running = (np.concatenate([left[:1], left[:-1]]) + left) / 2.0
    step_s = np.diff(ends, axis=0, prepend=0.0) * service.round_at(running)
    reading = held * service.prefill_s + (service.steps - rounds) * service.round_at(held)
    # in places that are taken again, at the earliest where the first one ends
    waves = np.ceil(number / held) - 1.0
    before = np.maximum((number - held) / full.requests_per_s, waves * step_s[0])
    decoding = before + step_s.sum(axis=0)
    whole = reading + decoding
    in_all = ((running * step_s).sum(axis=0) + held * (before + reading)) / whole
    ttft = full.ttft_s + reading / 2.0
    return _steady(service, in_all, decoding, ttft, None, number / whole, 1.0)


def slot_waiting(service: Service, requests_per_s: Numbers) -> tuple[Numbers, Numbers]:
    """The chance that a request finds all slots taken, and the mean seconds that it then waits for
    one.

    The chain is summed from all slots taken downwards, in BLOCKS of numbers of requests with one
    rate of service (exact up to BLOCKS slots). Below what is served: see FULL.
    """
    held = np.asarray(service.held, dtype=float)
    size = np.maximum(held / BLOCKS, 1.0)
    top = service.requests_per_s(held)
    log_share = below = 0.0 * top
    for block in range(BLOCKS):
        at = held - block * size
        ratio = service.requests_per_s(np.maximum(at - (size - 1.0) / 2.0, 1.0)) / requests_per_s
        # a geometric series: each of the block's `size` states is `ratio` times the one above it
        near = np.abs(ratio - 1.0) < 1e-9
        grown = np.expm1(np.minimum(size * np.log(ratio), 500.0))
        states = np.where(near, size, ratio * grown / np.where(near, 1.0, ratio - 1.0))
        below = below + np.where(at > 0.5, np.exp(np.minimum(log_share, 500.0)) * states, 0.0)
        log_share = log_share + size * np.log(ratio)
    above = 1.0 / (1.0 - np.minimum(requests_per_s / top, FULL))
    work = service.output_cv2 + service.chance_cv2
    waited = (1.0 + work) / 2.0 / np.maximum(top - requests_per_s, (1.0 - FULL) * top)
    return above / (above + below), waited


def at_rate(service: Service, requests_per_s: Numbers) -> Steady:
    """`requests_per_s` arriving at random (Poisson), one rate or one each; the operating point by
    fixed point: of several the lowest, which a server that fills up reaches first.

    Raises ArchsearchError for a rate that is not positive.
    """
    if not np.all(np.greater(requests_per_s, 0.0) & np.isfinite(requests_per_s)):
        raise ArchsearchError(
            f"requests per second must be a positive number, got {requests_per_s}"
        )
    most = service.most_requests_per_s
    full = requests_per_s >= FULL * most
    used: Any = requests_per_s / most
    # of those that are full: not used
    prefilling = np.minimum(requests_per_s * service.prefill_s, 1.0 - 1e-9)
    arrive = requests_per_s * service.rounds / (1.0 - prefilling)  # in a second of rounds
    # more run than arrive while one is served? A straight line between these numbers
    held = service.held + 0.0 * (most + arrive)
    at = np.append(service.at, np.inf).reshape(-1, *np.ndim(held) * (1,))
    at = np.append(np.minimum(at, held) - 1.0, [held], axis=0)
    beyond = at - arrive * service.round_at(np.minimum(at + 1.0, service.held))
    enough = beyond >= 0.0
    enough[-1] = True
    first = np.maximum(np.argmax(enough, axis=0), 1)
    last = len(at) - 1 - np.argmin(enough[-2::-1], axis=0)

    def root(end: Any) -> Any:
        ends = np.array([end - 1, end])
        (low, high), (under, over) = (np.take_along_axis(each, ends, 0) for each in (at, beyond))
        return low - (high - low) * under / np.where(over > 0.0, over - under, -under)

    high, fallen = root(first), np.where(last > first, root(last), 0.0)
    round_s = service.round_at(np.minimum(high + 1.0, service.held))
    decoding = service.rounds * round_s / (1.0 - prefilling)
    # behind other prompts (M/D/1)
    waits = prefilling * service.prefill_s / (2.0 * (1.0 - prefilling))
    # prompts of one step end together: later than by turns, whose mean wait is the same
    if service.shares_steps:
        waits = waits * (1.0 + prefilling / (1.0 + prefilling))
    busy = np.minimum(1.0, prefilling + (1.0 - prefilling) * (1.0 - np.exp(-high)))
    # with the prompts in it; a prompt waits for one and is read in the next
    step_s = round_s / (1.0 - prefilling)
    chance, waited = slot_waiting(service, np.minimum(requests_per_s, FULL * most))
    chance = np.where(last > first, 0.0, chance)  # memory fills up where it has fallen behind
    read = service.prefill_s + waits + step_s * (0.5 * busy + service.steps - service.rounds)
    behind = (
        service.prefill_s / (2.0 * (1.0 - prefilling)) * np.log(np.maximum(prefilling / RARE, 1.0))
    )
    late = read + np.maximum(waited * np.log(np.maximum(chance / RARE, 1.0)), behind - waits)
    open_ = _steady(service, high, decoding, read + chance * waited, late, requests_per_s, used)
    open_ = replace(open_, fallen=_number(fallen))
    if not np.any(full):
        return open_
    shut = replace(in_flight(service, service.held), ttft_s=np.inf, ttft_p99_s=np.inf, full=True)
    return replace(shut, utilisation=used).where(full, open_)


def _steady(
    service: Service,
    running: Numbers,
    decoding: Numbers,
    ttft: Numbers,
    late: Numbers | None,
    rate: Numbers,
    used: Numbers,
) -> Steady:
    tpot = decoding / max(service.output_tokens - 1.0, 1.0)
    numbers = (rate, running, tpot, ttft, rate * service.output_tokens, used)
    found = Steady(*map(_number, numbers))
    return found if late is None else replace(found, ttft_p99_s=_number(late))


def _number(value: Numbers) -> Any:
    """An array as it is; a number as Python's own, which JSON knows."""
    return value if np.ndim(value) else np.asarray(value).item()


def chosen(which: ArrayLike, one: Numbers, other: Numbers) -> Any:
    """`one` where `which` says so, else the other."""
    return _number(np.where(which, one, other))


def crossing_rate(plain: Service, drafting: Sequence[Service]) -> float | None:
    """Requests per second above which a token takes no longer without drafting, whichever of
    `drafting` (one a gamma) is taken: where speculation should be off. None where drafting is
    faster at every rate that is served; 0 where it never is."""
    able = max(service.most_requests_per_s for service in drafting)
    top = min(plain.most_requests_per_s, able) * FULL * 0.999
    rates = np.geomspace(top / 200.0, top, RATES)
    for _ in range(3):  # ever closer: a server may leave its graphs there
        points = [at_rate(service, rates) for service in drafting]
        best = np.min([np.where(point.full, np.inf, point.tpot_s) for point in points], axis=0)
        gains = at_rate(plain, rates).tpot_s / best
        slower = gains <= 1.0
        if not slower.any():  # full while the plain server still keeps up
            return top if able < plain.most_requests_per_s else None
        if not (after := int(np.argmax(slower))):
            return 0.0
        rates = np.linspace(rates[after - 1], rates[after], RATES)
    return float(rates[0])
