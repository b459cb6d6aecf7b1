"""Steady states by hand, and what rounds a request takes."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from archsearch.errors import ArchsearchError
from archsearch.traffic.steady import RoundTokens, Service, at_rate, crossing_rate, in_flight

PLAIN = RoundTokens()


def service(
    round_s: float = 20e-3, slope: float = 1e-4, tokens: RoundTokens = PLAIN, **more: float
) -> Service:
    at = np.array([1.0, 64.0, 256.0])
    values = {"prefill_s": 0.02, "output_tokens": 101.0, **more}
    return Service(at, round_s + slope * at, tokens, **values)  # type: ignore[arg-type]


def test_rounds_of_a_request_are_what_chance_gives() -> None:
    tokens = RoundTokens.of(0.7, 0.0, 4)
    assert tokens.tau == pytest.approx((1 - 0.7**5) / 0.3)
    rng, total = random.Random(3), 0
    for _ in range(20_000):
        written = 0
        while written < 50:
            accepted = 0
            while accepted < 4 and rng.random() < 0.7:
                accepted += 1
            written, total = written + accepted + 1, total + 1
    assert tokens.rounds(50) == pytest.approx(total / 20_000, rel=0.005)
    assert RoundTokens().rounds(50) == 50.0 and RoundTokens().tau == 1.0


def test_a_fixed_number_in_flight_by_hand() -> None:
    found = in_flight(service(), 8)
    # 100 tokens after the first, and the step in which the prompt is read
    assert found.requests_per_s == pytest.approx(1 / (0.02 + 101 * (20e-3 + 8e-4) / 8))
    assert found.ttft_s > 20e-3 + 8e-4 + 0.02, (
        "no first token in less than a step and what the prompt adds to it"
    )
    assert found.tokens_per_s == pytest.approx(101 * found.requests_per_s)
    assert found.ttft_s + 100 * found.tpot_s == pytest.approx(
        8 / found.requests_per_s
    )  # Little's law
    assert in_flight(service(held=4), 8).running == 4
    assert in_flight(service(held=4), 8).ttft_s > in_flight(service(held=4), 4).ttft_s


def test_a_rate_is_a_fixed_point() -> None:
    found = at_rate(service(), 5.0)
    assert found.running == pytest.approx(
        5.0 * 100 * service().round_at(1 + found.running) / (1 - 0.1), rel=1e-12
    )
    assert not found.full and 0 < found.utilisation < 1
    slow = at_rate(service(), 0.01)
    assert slow.tpot_s == pytest.approx(20.1e-3, rel=0.02) and slow.ttft_s == pytest.approx(
        0.02 + 20.1e-3, rel=0.05
    )
    full = at_rate(service(held=64), 1e3)
    assert full.full and math.isinf(full.ttft_s) and full.running == 64


def test_a_drafting_server_that_slows_under_load_is_switched_off_at_a_rate() -> None:
    plain = service()
    drafting = service(26e-3, 6e-4, RoundTokens.of(0.7, 0.0, 3))
    off = crossing_rate(plain, [drafting])
    assert off is not None and 0 < off < plain.most_requests_per_s
    for rate, pays in ((0.8 * off, True), (1.1 * off, False)):
        assert (at_rate(drafting, rate).tpot_s < at_rate(plain, rate).tpot_s) is pays
    assert crossing_rate(plain, [service(60e-3, 1e-4, RoundTokens.of(0.2, 0.0, 3))]) == 0.0
    assert (
        crossing_rate(plain, [drafting, service(22e-3, 1e-5, RoundTokens.of(0.7, 0.0, 3))]) is None
    )


def test_what_is_no_load() -> None:
    with pytest.raises(ArchsearchError, match="positive number"):
        at_rate(service(), -1.0)
    with pytest.raises(ArchsearchError, match="at least 1"):
        in_flight(service(), 0)
