"""The timer divides what it measures by what the probe felt; the pool cuts distinct weights."""

from __future__ import annotations

import time

import pytest
import torch

from archsearch.profiling import timer as timers
from archsearch.profiling.timer import MAX_REPEATS, MIN_REPEATS, Probe, Timer, WeightPool, copies_of


class Clock:
    """A clock that only work moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def work(self, seconds: float):
        def run() -> None:
            self.now += seconds

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timers.time, "perf_counter", clock.perf_counter)
    return clock


def test_a_slow_moment_is_divided_out(clock: Clock) -> None:
    """The machine halves its speed: probe and work take twice as long, the reported time stays."""
    timer = Timer(lambda: 2e-3, reference_s=1e-3)  # type: ignore[arg-type]
    timing = timer.time(clock.work(10e-3), calls=1)
    assert timing.slowdown == 2.0 and timer.slowdowns == [2.0]
    assert timing.times_s == pytest.approx([5e-3] * len(timing.times_s))


def test_each_repeat_has_its_own_bracket(clock: Clock) -> None:
    """Probes 1, 3, 1, 3 ms around the repeats: a mean slowdown of 2 for each."""
    readings = iter([1e-3, 3e-3] * 100)
    timing = Timer(lambda: next(readings), 1e-3).time(clock.work(4e-3), calls=1, budget_s=0.01)  # type: ignore[arg-type]
    assert timing.times_s == pytest.approx([2e-3] * MIN_REPEATS)


def test_repeats_fill_the_budget_within_bounds(clock: Clock) -> None:
    timer = Timer(lambda: 1e-3, 1e-3)  # type: ignore[arg-type]
    assert len(timer.time(clock.work(1.0), calls=1, budget_s=0.01).times_s) == MIN_REPEATS
    assert len(timer.time(clock.work(1e-4), calls=1, budget_s=10.0).times_s) == MAX_REPEATS
    # A repeat takes 8 ms and two probes of 1 ms: ten fit into 100 ms (with slack for rounding).
    assert len(timer.time(clock.work(8e-3), calls=1, budget_s=0.1001).times_s) == 10


def test_short_work_is_called_often_and_reported_per_call(clock: Clock) -> None:
    calls = []

    def run() -> None:
        calls.append(1)
        clock.now += 1e-5

    timing = Timer(lambda: 1e-3, 1e-3).time(run, budget_s=0.001)  # type: ignore[arg-type]
    assert len(calls) == 2 + MIN_REPEATS * 200  # 2 ms a repeat
    assert timing.times_s == pytest.approx([1e-5] * MIN_REPEATS)


def test_before_is_not_timed(clock: Clock) -> None:
    flushed = []

    def flush() -> None:
        flushed.append(1)
        clock.now += 1.0

    timing = Timer(lambda: 1e-3, 1e-3).time(clock.work(5e-3), before=flush, budget_s=0.01)  # type: ignore[arg-type]
    assert timing.times_s == pytest.approx([5e-3] * MIN_REPEATS) and len(flushed) == MIN_REPEATS + 1


def test_real_time() -> None:
    """Real clock, real probe: 5 ms of sleep come out as 5 ms within what a busy machine does to
    sleep."""
    probe = Probe(WeightPool(8 << 20, torch.float32))
    timing = Timer(lambda: 1e-3, 1e-3).time(lambda: time.sleep(5e-3), calls=1, budget_s=0.03)  # type: ignore[arg-type]
    assert 5e-3 <= min(timing.times_s) < 0.5
    assert 0 < probe.reference_s(8) < 1.0


def test_pool_views_are_distinct_and_fill_the_working_set() -> None:
    pool = WeightPool(8 << 20, torch.bfloat16)
    views = pool.matrices(100, 300, 1 << 20)
    assert len(views) == -(
        -(1 << 20) // (2 * 30000)
    )  # rounded up: together they are no less than asked for
    assert all(view.shape == (100, 300) and view.dtype == torch.bfloat16 for view in views)
    starts = sorted(view.data_ptr() for view in views)
    assert all(
        b - a >= 2 * 30000 for a, b in zip(starts, starts[1:], strict=False)
    )  # no two overlap
    assert all(float(view.float().std()) > 0.01 for view in views[:3])
    assert len(pool.matrices(100, 300, 1)) == 1


def test_a_pool_that_is_too_small_serves_all_copies_from_a_block_of_their_own() -> None:
    pool = WeightPool(4 << 20, torch.float32)
    views = pool.matrices(512, 512, 16 << 20)
    assert len(views) == 16 and len({view.data_ptr() for view in views}) == 16
    (large,) = pool.matrices(2048, 2048, 1 << 20)
    assert large.shape == (2048, 2048) and float(large.std()) > 0.01


@pytest.mark.parametrize("l2_mib", [40, 50, 60, 126])
@pytest.mark.parametrize(
    "n, k", [(8192, 8192), (8192, 7168), (10240, 8192), (1024, 4096), (28672, 8192), (4096, 14336)]
)
def test_cold_weights_exceed_four_times_the_cache(l2_mib: int, n: int, k: int) -> None:
    """With the copies rounded down, 8192 x 8192 in bfloat16 was one copy beside 50 MiB: 2.6 times
    the cache."""
    weight, cold = 2 * n * k, 4 * (l2_mib << 20)
    copies = copies_of(weight, cold)
    assert copies * weight >= cold and (copies - 1) * weight < cold


def test_a_large_weight_beside_a_pool_of_four_caches() -> None:
    """The same, scaled down 64 times, on real memory: no byte of the working set is shared."""
    cache = (50 << 20) // 64
    pool = WeightPool(4 * cache + (32 << 20) // 64, torch.bfloat16)
    views = pool.matrices(1024, 1024, 4 * cache)
    starts = sorted(view.data_ptr() for view in views)
    assert sum(view.numel() * 2 for view in views) >= 4 * cache
    assert all(
        after - before >= 2 * 1024**2 for before, after in zip(starts, starts[1:], strict=False)
    )


def test_fill_makes_no_second_copy_of_what_is_larger_than_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = WeightPool(4 << 20, torch.float32)
    large = torch.zeros(5, pool.flat.numel())
    monkeypatch.setattr(torch.Tensor, "repeat", lambda *_: pytest.fail("a second copy"))
    pool.fill(large)
    assert float((large != 0).float().mean()) > 0.99 and not torch.equal(large[0], large[1])


def test_fill_writes_every_weight_differently() -> None:
    pool = WeightPool(4 << 20, torch.float32)
    first, second = torch.zeros(300, 40), torch.zeros(300, 40)
    pool.fill(first)
    pool.fill(second)
    assert float((first != 0).float().mean()) > 0.99 and not torch.equal(first, second)
    larger = torch.zeros(1500, 1000)  # more than the pool holds
    pool.fill(larger)
    assert float((larger != 0).float().mean()) > 0.99
