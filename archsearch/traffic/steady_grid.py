"""`traffic.steady` for many drafts at once: the same formulas over arrays (held together by tests/traffic/test_mix_scores.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from archsearch.traffic.mix import LoadPart
from archsearch.traffic.steady import FULL, upper_half

Array = NDArray[np.float64]
HALVINGS: Final = 60  # of the range in which the number that runs is looked for: to the last digits


@dataclass(frozen=True)
class SteadyGrid:
    """`Steady` of each draft, [drafts]."""

    running: Array
    tpot_s: Array
    ttft_s: Array
    tokens_per_s: Array
    full: NDArray[np.bool_]


@dataclass(frozen=True)
class ServiceGrid:
    """`Service` of each draft. `round_s`: [sizes, drafts]; `tau`, `square` (mean of a round's tokens and of their square),
    `prefill_s` and `held`: [drafts] or one number."""

    at: Array
    round_s: Array
    tau: Any
    square: Any
    prefill_s: Any
    output_tokens: float
    held: Any
    shares_steps: bool

    @property
    def rounds(self) -> Any:
        """Rounds a request."""
        tokens = self.output_tokens - 1.0
        if tokens <= 0.0:
            return 0.0
        return np.maximum(1.0, tokens / self.tau + (self.square - self.tau) / (2.0 * self.tau**2))

    @property
    def steps(self) -> Any:
        """Steps a request takes part in (`steady.Service.steps`)."""
        return self.rounds + (1.0 if self.shares_steps else 0.0)

    def round_at(self, running: Any) -> Array:
        """Seconds of a round while `running` requests decode."""
        if len(self.at) == 1:
            return self.round_s[0]
        drafts = np.arange(self.round_s.shape[1])
        batch = np.broadcast_to(np.maximum(running, 1.0), drafts.shape)
        low = np.clip(np.searchsorted(self.at, batch, side="right") - 1, 0, len(self.at) - 2)
        below, above = self.round_s[low, drafts], self.round_s[low + 1, drafts]
        within = below + (above - below) / (self.at[low + 1] - self.at[low]) * (batch - self.at[low])
        half = upper_half(self.at)
        slope = np.maximum(0.0, (self.round_s[-1] - self.round_s[half]) / (self.at[-1] - self.at[half]))
        beyond = self.round_s[-1] + slope * (batch - self.at[-1])
        return np.asarray(np.where(batch <= self.at[-1], within, beyond))

    def requests_per_s(self, running: Any) -> Any:
        """Requests finished a second while `running` of them decode."""
        return 1.0 / (self.prefill_s + self.steps * self.round_at(running) / np.maximum(running, 1.0))

    def most_requests_per_s(self) -> Array:
        """The highest rate that each can serve."""
        most = np.maximum(self.requests_per_s(self.held), self.requests_per_s(1.0))
        for size in self.at:
            most = np.where(size <= self.held, np.maximum(most, self.requests_per_s(size)), most)
        return np.asarray(most)


def serve_grid(service: ServiceGrid, part: LoadPart) -> SteadyGrid:
    """Each draft's server under the part."""
    if part.concurrency is not None:
        return in_flight_grid(service, part.concurrency)
    assert part.requests_per_second is not None
    return at_rate_grid(service, part.requests_per_second)


def in_flight_grid(service: ServiceGrid, concurrency: Any) -> SteadyGrid:
    """`steady.in_flight` of each draft."""
    running = np.minimum(concurrency, service.held)
    rate = service.requests_per_s(running)
    together = 1.0 + (running - 1.0) / (2.0 * np.maximum(service.rounds, 1.0))
    reading = together * service.prefill_s + (service.steps - service.rounds) * service.round_at(running)
    ttft = (concurrency - running) / rate + reading
    decoding = running / rate - reading
    return _steady(service, running, decoding, ttft, rate)


def at_rate_grid(service: ServiceGrid, requests_per_s: float) -> SteadyGrid:
    """`steady.at_rate` of each draft."""
    most = service.most_requests_per_s()
    full = requests_per_s >= FULL * most
    prefilling = np.minimum(requests_per_s * service.prefill_s, 1.0 - 1e-9)  # of those that are full: not used
    low, high = np.zeros(len(most)), np.broadcast_to(np.asarray(service.held, dtype=float), most.shape)
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        needed = requests_per_s * service.rounds * service.round_at(np.minimum(middle + 1.0, service.held)) / (1.0 - prefilling)
        enough = middle - needed >= 0.0
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    round_s = service.round_at(np.minimum(high + 1.0, service.held))
    decoding = service.rounds * round_s / (1.0 - prefilling)
    waits = prefilling * service.prefill_s / (2.0 * (1.0 - prefilling))
    busy = np.minimum(1.0, prefilling + (1.0 - prefilling) * (1.0 - np.exp(-high)))
    ttft = service.prefill_s + waits + round_s / (1.0 - prefilling) * (0.5 * busy + service.steps - service.rounds)
    open_ = _steady(service, high, decoding, ttft, np.full(len(most), requests_per_s))
    if not full.any():
        return open_
    shut = in_flight_grid(service, service.held)
    return SteadyGrid(
        np.where(full, shut.running, open_.running),
        np.where(full, shut.tpot_s, open_.tpot_s),
        np.where(full, np.inf, open_.ttft_s),
        np.where(full, shut.tokens_per_s, open_.tokens_per_s),
        full,
    )


def _steady(service: ServiceGrid, running: Any, decoding: Any, ttft: Any, rate: Any) -> SteadyGrid:
    size = service.round_s.shape[1]
    each = [running, decoding / max(service.output_tokens - 1.0, 1.0), ttft, rate * service.output_tokens]
    arrays = [np.broadcast_to(np.asarray(value, dtype=float), size) for value in each]
    return SteadyGrid(arrays[0], arrays[1], arrays[2], arrays[3], np.zeros(size, dtype=bool))
