"""The closed form against the event-by-event server, on loads that nothing was fitted to."""

from __future__ import annotations

import numpy as np
import pytest

from archsearch.traffic.lengths import Lengths
from archsearch.traffic.simulation import poisson, simulate
from archsearch.traffic.steady import RoundTokens, Service, at_rate
from archsearch.traffic.traces import Request

AT = np.array([1.0, 8.0, 64.0, 256.0])
PROMPT, OUTPUT = Lengths.read({"mean": 400, "std": 200}, "prompt"), Lengths.read({"low": 40, "high": 160}, "output")


def service(drafting: bool, prefill_s: float = 0.03) -> Service:
    tokens = RoundTokens.of(0.75, 0.0, 4) if drafting else RoundTokens()
    rounds = 26e-3 + 5e-4 * AT if drafting else 20e-3 + 1.5e-4 * AT
    return Service(AT, rounds, tokens, prefill_s, OUTPUT.mean, 256)


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("load", [0.15, 0.45, 0.7])
def test_the_operating_point_is_that_of_the_simulation(drafting: bool, load: float) -> None:
    server = service(drafting)
    rate = load * server.most_requests_per_s
    told, seen = at_rate(server, rate), simulate(server, poisson(rate, 1500, PROMPT, OUTPUT, seed=5))
    assert not seen.full and not told.full
    assert told.tpot_s == pytest.approx(seen.tpot_s, rel=0.08)
    assert told.running == pytest.approx(seen.running, rel=0.15)
    assert told.tokens_per_s == pytest.approx(seen.tokens_per_s, rel=0.10)
    assert told.ttft_s == pytest.approx(seen.ttft_s, rel=0.15)


def test_more_than_it_serves() -> None:
    server = service(False)
    rate = 2.5 * server.most_requests_per_s
    assert at_rate(server, rate).full and simulate(server, poisson(rate, 800, PROMPT, OUTPUT)).full


def test_memory_makes_requests_wait() -> None:
    server = Service(AT, np.full(4, 0.02), RoundTokens(), 0.0, 51.0, held=2)
    requests = [Request(0.0, 10, 51)] * 4 + [Request(1e-6, 10, 51)]
    seen = simulate(server, requests)
    assert seen.tpot_s == pytest.approx(0.02, rel=0.01) and seen.ttft_s > 0.5


def test_one_request_alone_takes_what_its_rounds_take() -> None:
    server = Service(AT, np.full(4, 0.02), RoundTokens(), 0.1, 11.0)
    seen = simulate(server, [Request(0.0, 100, 11), Request(10.0, 100, 11)])
    assert seen.tpot_s == pytest.approx(0.02) and seen.ttft_s == pytest.approx(0.12), "a step, and what the prompt adds"
    apart = Service(AT, np.full(4, 0.02), RoundTokens(), 0.1, 11.0, shares_steps=False)
    later = simulate(apart, [Request(0.0, 100, 11), Request(0.11, 100, 11)])
    assert later.tpot_s > 0.02, "the first request waits while the second one's prompt is read"
