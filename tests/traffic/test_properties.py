"""What must hold whatever the numbers are: random latencies, loads and shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from archsearch.acceptance.estimator import GivenAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.capacity import memory_bytes, memory_plan
from archsearch.drafters.registry import as_drafter
from archsearch.estimate import Estimate
from archsearch.hardware.device import load_device
from archsearch.pipeline.schedule import schedule_points, speedup_when_off
from archsearch.schedule import check_schedule, gamma_at, schedule_from_points
from archsearch.search.objective import Scorer
from archsearch.speedup import tau
from archsearch.traffic.mix import mix_of
from archsearch.traffic.served import serve_part
from archsearch.traffic.steady import RoundTokens, at_rate, in_flight
from archsearch.workload import Workload
from tests.doubles.serving import DRAFT, TARGET, FormulaLatency

quick = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
few = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
alphas = st.floats(0.01, 0.99)
batches = st.integers(1, 512)
latencies = st.builds(
    FormulaLatency,
    base=st.floats(1e-3, 0.1),
    row=st.floats(1e-6, 1e-3),
    kv=st.floats(0.0, 1e-6),
    share=st.floats(0.01, 1.0),
    off=st.floats(0.0, 5e-3),
)


def best(latency: FormulaLatency, alpha: float, batch: int, context: int = 512) -> float:
    workload = Workload(batch_size=batch, context_len=context)
    return Scorer(TARGET, workload, latency, GivenAcceptance(alpha))(DRAFT).speedup.value


@quick
@given(latencies, alphas, alphas, batches)
def test_more_alpha_never_lowers_the_best_speedup(
    latency: FormulaLatency, one: float, other: float, batch: int
) -> None:
    low, high = sorted((one, other))
    assert best(latency, high, batch) >= best(latency, low, batch) * (1 - 1e-12)


@quick
@given(latencies, alphas, batches)
def test_the_speedup_never_exceeds_tau(latency: FormulaLatency, alpha: float, batch: int) -> None:
    # A round reads at least what a plain step reads, so it gives no more than tau times as many
    # tokens a second.
    found = Scorer(TARGET, Workload(batch_size=batch), latency, GivenAcceptance(alpha))(DRAFT)
    assert found.speedup.value <= found.tau.value * (1 + 1e-12)
    assert found.tau.value <= found.gamma + 1


@quick
@given(latencies, batches)
def test_gamma_0_gives_exactly_1_where_off_costs_nothing(
    latency: FormulaLatency, batch: int
) -> None:
    scorer = Scorer(
        TARGET, Workload(batch_size=batch), replace(latency, off=0.0), GivenAcceptance(0.5)
    )
    assert speedup_when_off(scorer, DRAFT).value == 1.0
    loaded = Scorer(
        TARGET, Workload(batch_size=batch), replace(latency, off=1e-3), GivenAcceptance(0.5)
    )
    assert speedup_when_off(loaded, DRAFT).value < 1.0


@quick
@given(batches, batches, st.integers(1, 8000), st.integers(1, 8000), st.sampled_from([1, 2, 4]))
def test_memory_grows_with_batch_and_context(
    one: int, two: int, near: int, far: int, ranks: int
) -> None:
    (few_, many), (short, long) = sorted((one, two)), sorted((near, far))
    workload = Workload(few_, short, ranks)
    least = memory_bytes(TARGET, DRAFT, workload).total_bytes
    assert least <= memory_bytes(TARGET, DRAFT, replace(workload, batch_size=many)).total_bytes
    assert least <= memory_bytes(TARGET, DRAFT, replace(workload, context_len=long)).total_bytes
    device = load_device("a100")
    plan, longer = (
        memory_plan(TARGET, DRAFT, replace(workload, context_len=n), device) for n in (short, long)
    )
    assert plan.requests >= longer.requests and plan.cached_tokens == longer.cached_tokens
    alone = memory_plan(TARGET, None, workload, device)
    assert alone.requests >= plan.requests, "a draft never makes room"
    shared = memory_plan(TARGET, DRAFT, replace(workload, draft_tensor_parallel=ranks), device)
    assert shared.requests >= plan.requests, "a draft on one rank takes the room of all"


@few
@given(latencies, alphas, st.sets(batches, min_size=1, max_size=6))
def test_a_schedule_is_feasible_and_never_loses_to_none(
    latency: FormulaLatency, alpha: float, sizes: set[int]
) -> None:
    scorer = Scorer(TARGET, Workload(context_len=256), latency, GivenAcceptance(alpha), max_gamma=6)
    taus = {gamma: Estimate(tau(alpha, gamma), 0.0, "given") for gamma in scorer.gammas}
    points = schedule_points(
        scorer, DRAFT, Estimate(alpha, 0.0, "given"), taus, load_device("a100"), sorted({1, *sizes})
    )
    for point in points:
        off = speedup_when_off(scorer.at_batch(point.batch_size), DRAFT).value
        assert point.speedup is not None and point.speedup.value >= off * (1 - 1e-12)
        if point.gamma:
            assert point.speedup.value > off and point.gamma in scorer.gammas
    ranges = check_schedule(
        schedule_from_points([(point.batch_size, point.gamma) for point in points])
    )
    for batch in range(1, points[-1].batch_size + 1, 7):
        assert 0 <= gamma_at(ranges, batch) <= 6
    assert all(gamma_at(ranges, point.batch_size) == point.gamma for point in points)


@few
@given(latencies, alphas, st.integers(1, 64), st.integers(1, 2000), st.integers(2, 500))
def test_a_load_keeps_its_laws(
    latency: FormulaLatency, alpha: float, flight: int, prompt: int, output: int
) -> None:
    part = {"weight": 1, "concurrency": flight, "prompt_tokens": prompt, "output_tokens": output}
    scorer = Scorer(TARGET, Workload(), latency, GivenAcceptance(alpha), gammas=[1, 3])
    found = serve_part(scorer, as_drafter(DRAFT), mix_of({"parts": [part]}, "w").parts[0])
    for service in found.services:
        closed = in_flight(service, flight)
        # Little's law: what is in flight is the rate times how long each request stays
        stay = closed.ttft_s + closed.tpot_s * (service.output_tokens - 1)
        assert closed.requests_per_s * stay == pytest.approx(flight, rel=1e-6)
        half = at_rate(service, 0.5 * service.most_requests_per_s)
        assert not half.full and half.running >= 0 and half.tpot_s > 0
        more = at_rate(service, 0.8 * service.most_requests_per_s)
        assert more.running >= half.running and more.tpot_s >= half.tpot_s * (1 - 1e-9)
    assert found.best.tpot_s <= found.off.tpot_s * (1 + 1e-12), "never a gamma that loses to none"


@quick
@given(alphas, st.integers(1, 12), st.integers(1, 400))
def test_rounds_of_an_answer_lie_between_its_bounds(alpha: float, gamma: int, tokens: int) -> None:
    rounds = RoundTokens.of(alpha, 0.0, gamma).rounds(tokens)
    assert tokens / (gamma + 1) <= rounds * (1 + 1e-9) and rounds <= max(tokens, 1) * (1 + 1e-9)


def test_the_shapes_of_these_tests_divide() -> None:
    assert isinstance(TARGET, Architecture) and TARGET.num_attention_heads % 4 == 0
