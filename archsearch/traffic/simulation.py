"""A server of continuous batching, event by event: what `traffic.steady` says in closed form, by
chance and without its means.

Requests arrive and wait until memory holds one more. Every step reads prompts up to a budget of
tokens, oldest first, beside one round of all requests that decode; it takes the round's seconds at
their number and, for the prompt tokens in it, their share of what the prompts add. A prompt that
was read gives the first token; a round gives each request 1 to gamma + 1 tokens by chance.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from archsearch.traffic.lengths import Lengths
from archsearch.traffic.steady import Service
from archsearch.traffic.traces import Request

BUDGET: Final = 8192  # tokens of a step (vLLM's max_num_batched_tokens)
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


@dataclass
class _Server:
    env: Any
    service: Service
    read_s: Callable[[int], float]
    rng: np.random.Generator
    waiting: deque[_Served] = field(default_factory=deque)
    reading: deque[_Served] = field(default_factory=deque)
    decoding: list[_Served] = field(default_factory=list)
    done: list[_Served] = field(default_factory=list)
    wake: Any = None
    steps: list[tuple[float, float, int]] = field(
        default_factory=list
    )  # end, seconds, requests that decoded

    def arrive(self, request: Request) -> None:
        tokens = max(request.prompt_tokens, 1)
        self.waiting.append(_Served(request, tokens, self.read_s(request.prompt_tokens)))
        if self.wake is not None and not self.wake.triggered:
            self.wake.succeed()

    def run(self) -> Generator[Any, Any, None]:
        while True:
            while self.waiting and len(self.reading) + len(self.decoding) < self.service.held:
                self.reading.append(self.waiting.popleft())
            if not self.reading and not self.decoding:
                self.wake = self.env.event()
                yield self.wake
                continue
            read, seconds = self._read()
            read_any = seconds > 0.0
            active = list(self.decoding) if self.service.shares_steps or not read_any else []
            if active:
                round_s = self.service.round_at(len(active))
                seconds += round_s
            elif self.service.shares_steps:  # `read_s` is what a prompt adds to a step
                seconds += self.service.round_at(1.0)
            yield self.env.timeout(seconds)
            if active:
                self.steps.append((self.env.now, seconds, len(active)))
            self._write(active)
            for each in read:
                self._first(each)

    def _read(self) -> tuple[list[_Served], float]:
        """Prompts of this step: those that end in it, and the seconds that all of it adds."""
        left, seconds, whole = BUDGET - len(self.decoding), 0.0, []
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

    def _first(self, each: _Served) -> None:
        each.written, each.first_s = 1, self.env.now
        (self.decoding if each.request.output_tokens > 1 else self.done).append(each)
        if each.request.output_tokens <= 1:
            each.done_s = self.env.now

    def _write(self, active: list[_Served]) -> None:
        reach = np.array(self.service.tokens.reach)
        tokens = np.ones(len(active), dtype=int)
        if len(reach) and active:
            # P(more than i + 1 tokens) = reach[i]: one uniform number decides how far a round gets
            tokens += (self.rng.random(len(active))[:, None] < reach).sum(axis=1)
        for each, count in zip(active, tokens, strict=True):
            each.written += int(count)
            if each.written >= each.request.output_tokens:
                each.done_s = self.env.now
                self.done.append(each)
                self.decoding.remove(each)


def simulate(
    service: Service,
    requests: Sequence[Request],
    *,
    read_s: Callable[[int], float] | None = None,
    seed: int = 0,
) -> Simulated:
    """Serve `requests`; `read_s`: seconds that a prompt of so many tokens adds (default: the
    service's mean for every prompt)."""
    import simpy

    env = simpy.Environment()
    server = _Server(
        env, service, read_s or (lambda tokens: service.prefill_s), np.random.default_rng(seed)
    )

    def arrivals() -> Generator[Any, Any, None]:
        for request in requests:
            if request.arrival_s > env.now:
                yield env.timeout(request.arrival_s - env.now)
            server.arrive(request)

    def limit() -> Generator[Any, Any, None]:
        while len(server.done) < len(requests):
            yield env.timeout(step)

    step = max(requests[-1].arrival_s / 200.0, service.round_at(1.0) * 20.0)
    env.process(arrivals())
    env.process(server.run())
    env.run(until=env.process(limit()))
    return _counted(server, requests)


def _counted(server: _Server, requests: Sequence[Request]) -> Simulated:
    by_arrival = sorted(server.done, key=lambda each: each.request.arrival_s)
    counted = by_arrival[int(WARM_UP * len(by_arrival)) :] or by_arrival
    long = [each for each in counted if each.request.output_tokens > 1]
    ttft = sorted(each.first_s - each.request.arrival_s for each in counted)
    end, span = max(each.done_s for each in counted), requests[-1].arrival_s
    start = counted[0].request.arrival_s
    late = statistics.fmean(ttft[-max(1, len(ttft) // 10) :])
    return Simulated(
        requests=len(counted),
        running=_running(server, start, span) if span > start else float(len(counted)),
        tpot_s=statistics.fmean(
            (each.done_s - each.first_s) / (each.request.output_tokens - 1) for each in long
        )
        if long
        else 0.0,
        ttft_s=statistics.fmean(ttft),
        ttft_p99_s=ttft[min(len(ttft) - 1, int(0.99 * len(ttft)))],
        tokens_per_s=sum(each.request.output_tokens for each in counted) / (end - start),
        full=end > BEHIND * span or late > 0.5 * span,
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
