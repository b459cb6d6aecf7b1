"""A server of continuous batching, event by event: what `traffic.steady` says in closed form, by
chance and without its means.

Requests wait until memory holds one more. Every step reads prompts up to a budget of tokens, oldest
first, beside one round of all requests that decode; it takes the round's seconds at their number
and, for the prompt tokens in it, their share of what the prompts add. A prompt that was read gives
the first token; a round gives each request 1 to gamma + 1 tokens by chance.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from archsearch.capacity import STEP_TOKENS
from archsearch.traffic.steady import Service
from archsearch.traffic.traces import Lengths, Request

WARM_UP: Final = 0.1  # share of the requests that are served before anything is counted
BEHIND: Final = 2.0  # a server that needs as many times the arrivals' span is full


@dataclass(frozen=True, slots=True)
class Simulated:
    """Means over requests (`ttft_p99_s`: the 99th percentile), and over time of requests that
    decode. `full`: it did not keep up with the arrivals."""

    requests: int
    running: float
    tpot_s: float
    ttft_s: float
    ttft_p99_s: float
    tokens_per_s: float
    full: bool


@dataclass
class _Served:
    request: Request
    left_to_read: int
    read_s: float  # seconds that its whole prompt adds
    written: int = 0
    first_s: float = 0.0
    done_s: float = 0.0


class _Server:
    """`step` by `step`, at `now` seconds. `steps`: (end, seconds, requests that decoded)."""

    def __init__(self, service: Service, arrivals: Sequence[_Served], seed: int) -> None:
        self.service, self.rng, self.now = service, np.random.default_rng(seed), 0.0
        most = len(arrivals) + 1
        self.round_s = np.full(most, service.round_at(np.arange(most, dtype=float))).tolist()
        # P(more than i + 1 tokens) = reach[i]: one uniform number decides how far a round gets
        self.missed = sorted(-chance for chance in service.tokens.reach)
        self.coming = deque(arrivals)
        self.waiting: deque[_Served] = deque()
        self.reading: deque[_Served] = deque()
        self.decoding: list[_Served] = []
        self.done: list[_Served] = []
        self.steps: list[tuple[float, float, int]] = []

    def step(self) -> None:
        """One step of what is there, after the next arrival where nothing is."""
        if not (self.waiting or self.reading or self.decoding):
            self.now = max(self.now, self.coming[0].request.arrival_s)
        self._arrive()
        while self.waiting and len(self.reading) + len(self.decoding) < self.service.held:
            self.reading.append(self.waiting.popleft())
        read, seconds = self._read()
        active = list(self.decoding) if self.service.shares_steps or seconds == 0.0 else []
        if active or self.service.shares_steps:  # `read_s` is what a prompt adds to a step
            seconds += self.round_s[len(active)]
        self.now += seconds
        if active:
            self.steps.append((self.now, seconds, len(active)))
        self._arrive()  # before places become free
        self._write(active)
        for each in read:
            each.written, each.first_s = 1, self.now
            self._end(each) if each.request.output_tokens <= 1 else self.decoding.append(each)

    def _arrive(self) -> None:
        while self.coming and self.coming[0].request.arrival_s <= self.now:
            self.waiting.append(self.coming.popleft())

    def _read(self) -> tuple[list[_Served], float]:
        """Prompts of this step: those that end in it, and the seconds that all of it adds."""
        left, seconds, whole = STEP_TOKENS - len(self.decoding), 0.0, []
        while self.reading and left > 0:
            each = self.reading[0]
            tokens = min(left, each.left_to_read)
            seconds += each.read_s * tokens / max(each.request.prompt_tokens, 1)
            each.left_to_read -= tokens
            left -= tokens
            if each.left_to_read:
                break
            whole.append(self.reading.popleft())
        return whole, seconds

    def _write(self, active: list[_Served]) -> None:
        drawn = (self.rng.random(len(active)) if self.missed else np.ones(len(active))).tolist()
        for each, number in zip(active, drawn, strict=True):
            each.written += 1 + bisect_left(self.missed, -number)
            if each.written >= each.request.output_tokens:
                self.decoding.remove(each)
                self._end(each)

    def _end(self, each: _Served) -> None:
        each.done_s = self.now
        self.done.append(each)


def simulate(
    service: Service, requests: Sequence[Request], mean_prompt: float = 0.0, *, seed: int = 0
) -> Simulated:
    """Serve `requests`. Prompts, `mean_prompt` tokens in the mean, add seconds in proportion to
    their tokens: what they cost beyond that (attention over themselves) is small beside the
    products with the weights; 0: all add the same."""
    seconds, arrivals = float(service.prefill_s), []
    for each in requests:
        read_s = seconds * each.prompt_tokens / mean_prompt if mean_prompt else seconds
        arrivals.append(_Served(each, max(each.prompt_tokens, 1), read_s))
    server = _Server(service, arrivals, seed)
    while len(server.done) < len(requests):
        server.step()
    return _counted(server, requests)


def _counted(server: _Server, requests: Sequence[Request]) -> Simulated:
    by_arrival = sorted(server.done, key=lambda each: each.request.arrival_s)
    counted = by_arrival[int(WARM_UP * len(by_arrival)) :] or by_arrival
    tpots = [
        (each.done_s - each.first_s) / (each.request.output_tokens - 1)
        for each in counted
        if each.request.output_tokens > 1
    ]
    ttft = sorted(each.first_s - each.request.arrival_s for each in counted)
    end, span = max(each.done_s for each in counted), requests[-1].arrival_s
    start = counted[0].request.arrival_s
    # the mean of the longest tenth, which grows with the span where the server falls behind
    late = statistics.fmean(ttft[-max(1, len(ttft) // 10) :])
    return Simulated(
        requests=len(counted),
        running=_running(server, start, span) if span > start else float(len(counted)),
        tpot_s=statistics.fmean(tpots) if tpots else 0.0,
        ttft_s=statistics.fmean(ttft),
        ttft_p99_s=ttft[min(len(ttft) - 1, int(0.99 * len(ttft)))],
        tokens_per_s=sum(each.request.output_tokens for each in counted) / (end - start),
        full=bool(end > BEHIND * span or late > 0.5 * span),
    )


def _running(server: _Server, start: float, end: float) -> float:
    """Requests that decode at once, from the first arrival that counts to the last: neither the
    warm-up nor the end, when nobody arrives any more."""
    inside = [
        (min(at, end) - max(at - seconds, start), running) for at, seconds, running in server.steps
    ]
    return sum(seconds * running for seconds, running in inside if seconds > 0.0) / (end - start)


def poisson(
    rate: float, count: int, prompt: Lengths, output: Lengths, seed: int = 0
) -> list[Request]:
    """`count` requests that arrive at random, `rate` a second."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1.0 / rate, size=count))
    lengths = zip(prompt.sample(rng, count), output.sample(rng, count), strict=True)
    return [
        Request(float(at - arrivals[0]), asked, max(1, written))
        for at, (asked, written) in zip(arrivals, lengths, strict=True)
    ]
