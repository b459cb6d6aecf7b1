"""The closed form against the event-by-event server, on loads that nothing was fitted to."""

from __future__ import annotations

import math

import numpy as np
import pytest

from archsearch.traffic.simulation import poisson, simulate
from archsearch.traffic.steady import (
    RoundTokens,
    Service,
    at_rate,
    crossing_rate,
    in_flight,
    slot_waiting,
    together,
)
from archsearch.traffic.traces import Lengths, Request

AT = np.array([1.0, 8.0, 64.0, 256.0])
PROMPT, OUTPUT = (
    Lengths.read({"mean": 400, "std": 200}, "prompt"),
    Lengths.read({"low": 40, "high": 160}, "output"),
)


def service(drafting: bool, prefill_s: float = 0.03) -> Service:
    tokens = RoundTokens.of(0.75, 0.0, 4) if drafting else RoundTokens()
    rounds = 26e-3 + 5e-4 * AT if drafting else 20e-3 + 1.5e-4 * AT
    return Service(AT, rounds, tokens, prefill_s, OUTPUT.mean, 256)


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("load", [0.15, 0.45, 0.7])
def test_the_operating_point_is_that_of_the_simulation(drafting: bool, load: float) -> None:
    server = service(drafting)
    rate = load * server.most_requests_per_s
    told, seen = (
        at_rate(server, rate),
        simulate(server, poisson(rate, 1500, PROMPT, OUTPUT, seed=5)),
    )
    assert not seen.full and not told.full
    assert told.tpot_s == pytest.approx(seen.tpot_s, rel=0.08)
    assert told.running == pytest.approx(seen.running, rel=0.15)
    assert told.tokens_per_s == pytest.approx(seen.tokens_per_s, rel=0.10)
    assert told.ttft_s == pytest.approx(seen.ttft_s, rel=0.15)


def test_a_step_in_a_round_is_reached_from_below_and_the_fall_is_told() -> None:
    """Where a batch leaves its CUDA graphs, one rate has two operating points that hold."""
    at = np.array([1.0, 64.0, 128.0, 129.0, 256.0, 512.0])
    rounds = 10e-3 + 5e-5 * at + 10e-3 * (at > 128)
    server = Service(at, rounds, RoundTokens(), 1e-3, OUTPUT.mean, 512)
    rate = 55.0
    told = at_rate(server, rate)
    seen = simulate(server, poisson(rate, 2500, PROMPT, OUTPUT, seed=5))
    assert told.running == pytest.approx(seen.running, rel=0.1) and told.running < 128
    assert told.tpot_s == pytest.approx(seen.tpot_s, rel=0.05)
    assert told.fallen > 129 and at_rate(server, 20.0).fallen == 0.0
    # a round of so many takes what it then takes
    stays = rate * server.rounds * server.round_at(told.fallen + 1.0) / (1.0 - rate * 1e-3)
    assert told.fallen == pytest.approx(stays)
    other = Service(at, np.full(6, 18e-3), RoundTokens(), 1e-3, OUTPUT.mean, 512)
    off = crossing_rate(other, [server])
    assert off is not None, "where the step is, not somewhere between two of the rates looked at"
    assert at_rate(server, 0.999 * off).tpot_s < at_rate(other, 0.999 * off).tpot_s
    assert at_rate(server, 1.001 * off).tpot_s > at_rate(other, 1.001 * off).tpot_s


def test_more_than_it_serves() -> None:
    server = service(False)
    rate = 2.5 * server.most_requests_per_s
    assert at_rate(server, rate).full and simulate(server, poisson(rate, 800, PROMPT, OUTPUT)).full


@pytest.mark.parametrize(
    ("held", "load", "output"),
    [
        (8, 0.5, {"low": 200, "high": 200}),
        (2, 0.8, {"mean": 200, "std": 200}),
    ],
)
def test_waiting_for_a_slot_is_in_the_first_token(
    held: int, load: float, output: dict[str, float]
) -> None:
    lengths = Lengths.read(output, "output")
    rounds, tokens = np.full(4, 0.02), RoundTokens.of(0.7, 0.0, 4)
    server = Service(AT, rounds, tokens, 0.3, 200.0, held, output_cv2=lengths.cv2)
    rate = load * server.most_requests_per_s
    told = at_rate(server, rate)
    runs = [
        simulate(server, poisson(rate, 1500, PROMPT, lengths, seed=seed), seed=seed)
        for seed in (1, 2)
    ]
    seen = float(np.mean([run.ttft_s for run in runs]))
    assert told.ttft_s == pytest.approx(seen, rel=0.30), (
        "0.43 s where 1.5 were seen, without the waiting"
    )
    assert told.ttft_p99_s == pytest.approx(
        float(np.mean([run.ttft_p99_s for run in runs])), rel=0.65
    )
    assert told.running == pytest.approx(float(np.mean([run.running for run in runs])), rel=0.20)


def test_a_slot_is_waited_for_as_in_erlang_c() -> None:
    # Service that depends on nobody else: a round takes as many units as there are requests, so a
    # request takes S r(1).
    at = np.arange(1.0, 9.0)
    server = Service(at, np.full(8, 1.0), RoundTokens(), 0.0, 11.0, held=8, shares_steps=False)
    rate, servers = 0.6, 8
    offered = rate * 10.0
    terms = [offered**n / math.factorial(n) for n in range(servers)]
    last = offered**servers / math.factorial(servers) * servers / (servers - offered)
    chance, waited = slot_waiting(server, rate)
    assert chance == pytest.approx(last / (sum(terms) + last), rel=1e-9)
    assert waited == pytest.approx(0.5 / (servers / 10.0 - rate)), (
        "M/D/c by Allen and Cunneen: half of M/M/c"
    )


def test_requests_are_counted_while_they_arrive() -> None:
    server = Service(AT, np.full(4, 0.02), RoundTokens(), 0.0, 101.0, 256)
    together = [Request(0.1 * n, 10, 101) for n in range(100)]
    # 2 s each, ten a second: 20 run, also where the first tenth and the end, when they grow few,
    # are left out
    assert simulate(server, together).running == pytest.approx(20.0, rel=0.05)


def test_memory_makes_requests_wait() -> None:
    server = Service(AT, np.full(4, 0.02), RoundTokens(), 0.0, 51.0, held=2)
    requests = [Request(0.0, 10, 51)] * 4 + [Request(1e-6, 10, 51)]
    seen = simulate(server, requests)
    assert seen.tpot_s == pytest.approx(0.02, rel=0.01) and seen.ttft_s > 0.5


def test_one_request_alone_takes_what_its_rounds_take() -> None:
    server = Service(AT, np.full(4, 0.02), RoundTokens(), 0.1, 11.0)
    seen = simulate(server, [Request(0.0, 100, 11), Request(10.0, 100, 11)])
    assert seen.tpot_s == pytest.approx(0.02) and seen.ttft_s == pytest.approx(0.12), (
        "a step, and what the prompt adds"
    )
    apart = Service(AT, np.full(4, 0.02), RoundTokens(), 0.1, 11.0, shares_steps=False)
    later = simulate(apart, [Request(0.0, 100, 11), Request(0.11, 100, 11)])
    assert later.tpot_s > 0.02, "the first request waits while the second one's prompt is read"


@pytest.mark.parametrize("reach", [(), (0.6, 0.3, 0.15)])
@pytest.mark.parametrize(
    "lengths", [{"low": 128, "high": 128}, {"low": 50, "high": 500}, {"mean": 256, "std": 200}]
)
@pytest.mark.parametrize("held", [24, 256])
def test_a_group_waits_for_its_slowest(
    reach: tuple[float, ...],
    lengths: dict[str, float],
    held: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the simulation's requests accept alike
    monkeypatch.setattr("archsearch.traffic.steady.REQUEST_STD", 0.0)
    output, number = Lengths.read(lengths, "output"), 64
    server = Service(
        AT,
        6e-3 + 1e-4 * AT,
        RoundTokens(reach),
        1e-3,
        output.mean,
        held,
        output_cv2=output.cv2,
        lengths=output.quantiles,
    )
    seen = []
    for seed in range(6):
        drawn = output.sample(np.random.default_rng(seed), number)
        asked = [Request(0.0, 100, max(1, written)) for written in drawn]
        counted = simulate(server, asked, seed=seed)
        # of the nine tenths that it counts
        seen.append(counted.tokens_per_s * number / counted.requests)
    # places that are taken again: the longest requests need not be the last ones
    off = 0.1 if held >= number else 0.2
    assert together(server, number).tokens_per_s == pytest.approx(np.mean(seen), rel=off)


def test_who_accepts_less_is_waited_for() -> None:
    # 9 runs of vLLM's `LLM.generate` on so many prompts: 0.88x to 1.12x where refilling says 1.03x
    # to 1.41x (benchmarks/strangers.py)
    tokens = RoundTokens.of(0.45, 0.0, 4)
    plain, drafting = (
        Service(AT, base + 1e-5 * AT, each, 1e-3, 128.0, 256)
        for base, each in ((7e-3, RoundTokens()), (9.5e-3, tokens))
    )
    gain = {
        load: load(drafting, 32).tokens_per_s / load(plain, 32).tokens_per_s
        for load in (in_flight, together)
    }
    assert gain[in_flight] > 1.15 and gain[together] < 1.0
    one = together(drafting, 1).tokens_per_s / in_flight(drafting, 1).tokens_per_s
    assert one == pytest.approx(1.0, rel=0.02)
