"""A server in steady state: how many requests run, from the requests per second that arrive or from a fixed number in flight.

With P seconds of prefill a request, R rounds a request and rounds of r(b) seconds while b requests decode:

    fixed number c in flight     seconds a request = P + S r(c) / c          (every slot is refilled at once)
    x requests per second        b = x R r(1 + b) / (1 - x P)                (Little's law; prefills take the share x P)

S = R + 1 where prompts are read in the steps of those that decode, P being what they add to a step; else R.

A request that arrives at random sees b others beside itself, hence 1 + b (exact where a round takes as long as it has requests:
processor sharing).

R = (L - 1) / tau + (E[X^2] - tau) / (2 tau^2) for L output tokens, the first of them from the prefill, and X tokens a round: the
last round of an answer ends beyond its end (renewal theory). A plain step is a round with tau = 1. Held against a discrete-event
simulation in `traffic.simulation`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from archsearch.errors import ArchsearchError
from archsearch.speedup import accepted_by_position, drifting_positions

Array = NDArray[np.float64]
MOST_RUNNING: Final = 1024
RATES: Final = 48  # looked at for the one above which speculation should be off
FULL: Final = 0.995  # share of a server's capacity from which on it counts as full: waiting grows without end


@dataclass(frozen=True)
class RoundTokens:
    """Tokens of a round: `reach[i]` is the chance that a round gives more than i + 1 of them; () for plain steps."""

    reach: tuple[float, ...] = ()

    @classmethod
    def of(cls, alpha: float, drift: float, gamma: int, share: float = 1.0) -> RoundTokens:
        """Of a drafter with `alpha`, its drift in logit per position, that drafts in `share` of rounds."""
        if gamma < 1:
            return cls()
        return cls(tuple(share * chance for chance in accepted_by_position(drifting_positions(alpha, drift, gamma))))

    @property
    def tau(self) -> float:
        return 1.0 + math.fsum(self.reach)

    @property
    def square(self) -> float:
        """Mean of the squared number of tokens."""
        return 1.0 + math.fsum((2 * i + 3) * chance for i, chance in enumerate(self.reach))

    def rounds(self, tokens: float) -> float:
        """Mean rounds until at least `tokens` tokens are written."""
        if tokens <= 0.0:
            return 0.0
        return max(1.0, tokens / self.tau + (self.square - self.tau) / (2.0 * self.tau**2))


@dataclass(frozen=True)
class Service:
    """What a server does for a request. `at`: batch sizes, ascending; `round_s`: seconds of a round at each; `prefill_s`: seconds
    that a request's prompt adds; `output_tokens`: mean; `held`: most requests that memory holds."""

    at: Array
    round_s: Array
    tokens: RoundTokens
    prefill_s: float
    output_tokens: float
    held: int = MOST_RUNNING
    shares_steps: bool = True  # prompts are read in the steps of those that decode; else in steps of their own, first

    @cached_property  # asked at every step of every fixed point
    def rounds(self) -> float:
        """Rounds a request."""
        return self.tokens.rounds(self.output_tokens - 1.0)

    @property
    def steps(self) -> float:
        """Steps a request takes part in: its rounds, and the one in which its prompt is read where prompts share them."""
        return self.rounds + (1.0 if self.shares_steps else 0.0)

    def round_at(self, running: float) -> float:
        """Seconds of a round while `running` requests decode: between the batch sizes that are known, and by the slope over the
        upper half of them beyond: from one to the next a batch may take less, where one was measured and the other was not."""
        batch = max(running, 1.0)
        if batch <= self.at[-1] or len(self.at) == 1:
            return float(np.interp(batch, self.at, self.round_s))
        half = upper_half(self.at)
        slope = max(0.0, (self.round_s[-1] - self.round_s[half]) / (self.at[-1] - self.at[half]))
        return float(self.round_s[-1] + slope * (batch - self.at[-1]))

    def requests_per_s(self, running: float) -> float:
        """Requests finished a second while `running` of them decode."""
        return 1.0 / (self.prefill_s + self.steps * self.round_at(running) / max(running, 1.0))

    @cached_property
    def most_requests_per_s(self) -> float:
        """The highest rate that it can serve."""
        sizes = sorted({self.held, *(int(size) for size in self.at if size <= self.held), 1})
        return max(self.requests_per_s(size) for size in sizes)


def upper_half(at: Array) -> int:
    """Where the last batch size stands that is at most half of the largest; of two or more."""
    return int(max(0, np.searchsorted(at[:-1], at[-1] / 2.0, side="right") - 1))


@dataclass(frozen=True, slots=True)
class Steady:
    """A server in steady state. `running`: requests that decode at once; `full`: more arrive than it serves, so that waiting has
    no end and `ttft_s` is infinite. `tpot_s`: seconds per output token after the first, with the prefills in between."""

    requests_per_s: float
    running: float
    tpot_s: float
    ttft_s: float
    tokens_per_s: float
    utilisation: float
    full: bool = False


def in_flight(service: Service, concurrency: int) -> Steady:
    """`concurrency` requests in flight at all times; those that memory does not hold wait.

    Raises ArchsearchError for fewer than one.
    """
    if concurrency < 1:
        raise ArchsearchError(f"at least 1 request must be in flight, got {concurrency}")
    running = min(concurrency, service.held)
    rate = service.requests_per_s(running)
    together = 1.0 + (running - 1.0) / (2.0 * max(service.rounds, 1.0))  # prefills of those that ended in the same round
    reading = together * service.prefill_s + (service.steps - service.rounds) * service.round_at(running)
    ttft = (concurrency - running) / rate + reading
    decoding = running / rate - reading
    return Steady(rate, running, _per_token(decoding, service), ttft, rate * service.output_tokens, 1.0)


def at_rate(service: Service, requests_per_s: float) -> Steady:
    """`requests_per_s` arriving at random (Poisson); the operating point by fixed point.

    Raises ArchsearchError for a rate that is not positive.
    """
    if not requests_per_s > 0.0 or not math.isfinite(requests_per_s):
        raise ArchsearchError(f"requests per second must be a positive number, got {requests_per_s}")
    most = service.most_requests_per_s
    if requests_per_s >= FULL * most:
        full = in_flight(service, service.held)
        return Steady(full.requests_per_s, full.running, full.tpot_s, math.inf, full.tokens_per_s, requests_per_s / most, True)
    prefilling = requests_per_s * service.prefill_s
    low, high = 0.0, float(service.held)

    def beyond(running: float) -> float:
        """How much more decodes than would be needed."""
        return running - requests_per_s * service.rounds * service.round_at(min(running + 1.0, service.held)) / (1.0 - prefilling)

    for _ in range(80):
        middle = (low + high) / 2.0
        low, high = (low, middle) if beyond(middle) >= 0.0 else (middle, high)
    running = high
    round_s = service.round_at(min(running + 1.0, service.held))
    decoding = service.rounds * round_s / (1.0 - prefilling)
    waits = prefilling * service.prefill_s / (2.0 * (1.0 - prefilling))  # behind other prompts (M/D/1)
    busy = min(1.0, prefilling + (1.0 - prefilling) * (1.0 - math.exp(-running)))
    step_s = round_s / (1.0 - prefilling)  # with the prompts in it; a prompt waits for one and is read in the next
    ttft = service.prefill_s + waits + step_s * (0.5 * busy + service.steps - service.rounds)
    rate = requests_per_s
    return Steady(rate, running, _per_token(decoding, service), ttft, rate * service.output_tokens, rate / most)


def _per_token(decoding_s: float, service: Service) -> float:
    return decoding_s / max(service.output_tokens - 1.0, 1.0)


def crossing_rate(plain: Service, drafting: Sequence[Service]) -> float | None:
    """Requests per second above which a token takes no longer without drafting, whichever of `drafting` (one a gamma) is
    taken: where speculation should be off. None where drafting is faster at every rate that is served; 0 where it never is."""
    able = max(service.most_requests_per_s for service in drafting)
    top = min(plain.most_requests_per_s, able) * FULL * 0.999
    rates = [float(rate) for rate in np.geomspace(top / 200.0, top, RATES)]
    gains = []
    for rate in rates:
        points = [at_rate(service, rate) for service in drafting]
        best = min((point.tpot_s for point in points if not point.full), default=math.inf)
        gains.append(max(at_rate(plain, rate).tpot_s / best, 1e-9))
    if gains[0] <= 1.0:
        return 0.0
    steps = list(zip(rates, gains, strict=True))
    for (rate, before), (after_rate, after) in zip(steps, steps[1:], strict=False):
        if before > 1.0 >= after:
            share = math.log(before) / (math.log(before) - math.log(after))
            return rate + share * (after_rate - rate)
    return top if able < plain.most_requests_per_s else None  # full while the plain server still keeps up
