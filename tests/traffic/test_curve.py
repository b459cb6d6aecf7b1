"""Curves: the same numbers as one workload at a time, where they cross 1, and what memory does to
throughput."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from archsearch.acceptance.estimator import GivenAcceptance
from archsearch.errors import ArchsearchError
from archsearch.search.objective import Scorer
from archsearch.speedup import crossing, levels
from archsearch.traffic.curve import AXES, curve, sweep_of
from archsearch.traffic.steady import RoundTokens
from archsearch.traffic.times import ladder, service_of, times_over_batches
from archsearch.workload import Workload
from tests.doubles.serving import DRAFT, TARGET, FormulaLatency

WORKLOAD = Workload(context_len=512)


def scorer(alpha: float = 0.8, std: float = 0.0, **costs: float) -> Scorer:
    return Scorer(TARGET, WORKLOAD, FormulaLatency(**costs), GivenAcceptance(alpha, std))


def test_points_say_what_one_workload_says() -> None:
    found = curve(scorer(std=0.05), DRAFT, sweep_of("batch", "1:64:16", 4096))
    for point in found.points:
        alone = scorer(std=0.05).at_batch(int(point.x))(DRAFT)
        assert point.gamma == alone.gamma
        assert (point.tau, point.speedup) == (alone.tau, alone.speedup)
        assert point.tokens_per_s.value == pytest.approx(point.x / point.tpot_s.value)


def test_context_gamma_and_alpha_too() -> None:
    by_context = curve(scorer(), DRAFT, sweep_of("context", "128:4096:12", 4096))
    for point in by_context.points:
        alone = scorer().at_context(int(point.x))(DRAFT).speedup
        assert point.speedup.value == pytest.approx(alone.value, rel=1e-12)
    by_gamma = curve(scorer(), DRAFT, sweep_of("gamma", None, 4096))
    assert [point.gamma for point in by_gamma.points] == list(range(1, 17))
    assert (
        max(by_gamma.points, key=lambda point: point.speedup.value).gamma == scorer()(DRAFT).gamma
    )
    by_alpha = curve(scorer(), DRAFT, sweep_of("alpha", "0.0:1.0:21", 4096))
    gains = [point.speedup.value for point in by_alpha.points]
    assert gains == sorted(gains) and by_alpha.points[-1].speedup.value == pytest.approx(
        by_alpha.points[-1].ideal
    )
    assert by_alpha.starts == pytest.approx(scorer(alpha=by_alpha.starts or 0.0)(DRAFT).alpha.value)


def test_where_it_stops_paying_by_hand() -> None:
    # gamma 1, alpha 0.5: 1.5 (b + n r) = 1.1 b + (2 + 0.1) n r, so n = 0.4 b / (0.6 r)
    costs = {"base": 12e-3, "row": 1e-4, "kv": 0.0, "share": 0.1}
    one = Scorer(TARGET, WORKLOAD, FormulaLatency(**costs), GivenAcceptance(0.5), gammas=[1])
    found = curve(one, DRAFT, sweep_of("batch", "1:512:512", 4096))
    assert found.stops == pytest.approx(0.4 * 12e-3 / (0.6 * 1e-4), rel=0.01)
    assert [point.pays for point in found.points] == [
        point.x < (found.stops or 0) for point in found.points
    ]
    assert found.stops_between[0] < found.stops < found.stops_between[1]  # type: ignore[operator]
    assert found.ideal_stops is None  # 2 (b + n r) = 1.1 b + 2.1 n r only at n = 9 b / r
    assert all(np.diff([point.ideal for point in found.points]) < 0)


def test_memory_lowers_throughput_not_only_fit() -> None:
    def held(workload: Workload, drafter: object) -> int:
        return 16 if drafter is not None else 24

    free, full = (
        curve(scorer(), DRAFT, sweep_of("batch", "1:64:64", 4096), limit) for limit in (None, held)
    )
    assert full.memory_stops == 17
    at = {int(point.x): point for point in full.points}
    assert at[16] == {int(point.x): point for point in free.points}[16]
    assert at[64].running == 16 and at[64].plain_running == 24
    assert at[64].tokens_per_s == at[16].tokens_per_s
    assert at[64].throughput_gain < at[64].speedup.value
    assert at[64].plain_tokens_per_s.value == pytest.approx(24 / at[24].plain_tpot_s.value)


def test_an_empty_cache_still_runs_one_request() -> None:
    assert (
        curve(scorer(), DRAFT, sweep_of("context", "1:64", 4096), lambda *_: 0).points[0].running
        == 1
    )


def test_a_ladder_has_both_ends_and_grows_evenly() -> None:
    rungs = ladder(512)
    assert rungs[:8] == (1, 2, 3, 4, 5, 6, 7, 8) and rungs[-1] == 512 and len(rungs) < 40
    assert max(b / a for a, b in zip(rungs[7:], rungs[8:], strict=False)) < 1.3
    assert ladder(1) == (1,) and ladder(3) == (1, 2, 3)


def test_times_between_rungs_are_close() -> None:
    latency = FormulaLatency()
    priced = times_over_batches(latency, TARGET, DRAFT, WORKLOAD, [1, 4], ladder(512))
    server = service_of(priced, 4, RoundTokens(), 0.0, 100.0, None)
    for batch in (11, 100, 333):
        exact = latency.round(TARGET, DRAFT, replace(WORKLOAD, batch_size=batch), 4).round_s.value
        assert server.round_at(float(batch)) == pytest.approx(exact, rel=2e-3)


def test_crossings() -> None:
    assert crossing([1.0, 2.0, 4.0], levels([2.0, 0.5, 0.4])) == pytest.approx(2**0.5)
    assert crossing([0.1, 0.3], levels([0.5, 2.0]), rising=True, logs=False) == pytest.approx(0.2)
    assert crossing([1.0, 2.0], levels([2.0, 1.5])) is None


@pytest.mark.parametrize(
    "text", ["", "1", "a:b", "1:2:3:4", "8:1", "0:5", "1:2:1", "1:2:99999", "1.5:9", "1:inf"]
)
def test_a_range_that_is_none(text: str) -> None:
    with pytest.raises(ArchsearchError, match="--range"):
        sweep_of("batch", text, 4096)


def test_usual_ranges() -> None:
    for axis in AXES:
        values = sweep_of(axis, None, 4096).values
        assert list(values) == sorted(set(values)) and 16 <= len(values) <= 64
    assert sweep_of("context", None, 2048).values[-1] == 2048
    with pytest.raises(ArchsearchError, match="--sweep depth"):
        sweep_of("depth", None, 4096)
