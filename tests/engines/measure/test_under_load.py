"""measured() on an engine whose times are made up: full batches, drift, queues, schedules, what
cannot be measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from archsearch.engines.engine import EnginePrompt, EngineStep, Sampling
from archsearch.engines.measure.figures import (
    overall_speedups,
    schedule_verdict,
    token_s,
    under_load,
)
from archsearch.engines.measure.results import UnderLoad
from archsearch.engines.measure.turns import Plan, Variant, full_steps, run_plan
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.estimate import Estimate
from archsearch.progress import silent
from archsearch.schedule import schedule_from_points
from tests.doubles.made_up_engine import MadeUpEngine

PROMPTS = [EnginePrompt(f"p{i}", tuple(range(50))) for i in range(8)]
SAMPLING = Sampling(max_new_tokens=200, ignore_end=True)
RATES = (0.8, 0.5, 0.2)


def measured(make, target, variants, prompts, concurrencies, sampling, progress=silent, **changes):  # noqa: ANN001, ANN003, ANN201
    """What a plan came to."""
    starts = changes.get("repeats", 5)
    plan = Plan(
        target,
        variants,
        prompts,
        sampling,
        concurrencies,
        **{"repeats": 5, "starts": starts, **changes},
    )
    return run_plan(make, plan, under_load, look=token_s, progress=progress)


def round_s(batch: int, gamma: int) -> float:
    draft = gamma * 1e-3 + 0.2e-3 * batch * (gamma + 2 + gamma - 1)
    return 10e-3 + 1e-3 * batch * (gamma + 1) + draft + 2e-3 + 0.3e-3 * gamma


def plain_s(batch: int) -> float:
    return 10e-3 + 1e-3 * batch + 0.5e-3


@pytest.mark.parametrize("drift", [0.0, 0.01])
def test_figures_at_every_concurrency(drift: float) -> None:
    seen: list[tuple[str, float, float]] = []
    results = measured(
        lambda variant: MadeUpEngine(drift=drift),
        "target",
        [Variant("gamma 3", "draft", 3, RATES)],
        PROMPTS,
        [1, 4],
        SAMPLING,
        repeats=6,
        progress=lambda *args: seen.append(args),
    )
    assert set(results) == {("alone", 1), ("alone", 4), ("gamma 3", 1), ("gamma 3", 4)}
    for batch in (1, 4):
        found, alone = results["gamma 3", batch], results["alone", batch]
        assert found.tau == pytest.approx(2.5, rel=0.1) and alone.tau == 1.0
        assert (
            found.speedup is not None
            and found.speedup_interval is not None
            and alone.speedup is None
        )
        # The tau that was timed, not the one that was asked for: what is left is exact, whatever
        # the drift.
        expected = found.tau * plain_s(batch) / round_s(batch, 3)
        assert found.speedup.value == pytest.approx(expected, rel=0.05)
        assert found.speedup_interval[0] <= found.speedup.value <= found.speedup_interval[1]
        assert found.repeats == 6 and found.gamma == 3 and found.engine_version == "1"
        assert found.accepted_by_position == pytest.approx(RATES, abs=0.12)
        if not drift:
            assert found.step_s == pytest.approx(
                round_s(batch, 3)
            ) and alone.step_s == pytest.approx(plain_s(batch))
            assert found.target_s == pytest.approx(10e-3 + 4e-3 * batch)
            assert found.draft_s == pytest.approx(3e-3 + 0.2e-3 * batch * 7)
            assert found.rest_s == pytest.approx(2.9e-3)
            assert alone.tokens_per_s == pytest.approx(batch / plain_s(batch))
    assert seen[-1][1] == pytest.approx(seen[-1][2])


def test_only_whole_rounds_at_full_batch_count() -> None:
    def step(
        batch: int, *, prefill: bool = False, gamma: int = 2, tokens: int | None = None
    ) -> EngineStep:
        return EngineStep(
            batch,
            batch,
            0.01,
            gamma,
            batch * (gamma + 1) if tokens is None else tokens,
            prefill=prefill,
        )

    steps = [
        step(4, prefill=True),
        step(4),
        step(4),
        step(4, tokens=8),
        step(4),
        step(4, prefill=True),
        step(4),
        step(3),
        step(4),
    ]
    # Left out: prompts, the short round, and steps after which a request had ended (a prompt,
    # another batch or nothing follows).
    assert [steps.index(kept) for kept in full_steps(steps, 4)] == [1, 1] and len(
        full_steps(steps, 4)
    ) == 2


def test_one_engine_at_a_time_where_memory_is_short() -> None:
    engines: list[MadeUpEngine] = []
    alive: list[int] = []

    def make(variant: Variant) -> MadeUpEngine:
        engines.append(MadeUpEngine())
        alive.append(sum(engine.log[-1:] != ["stop"] for engine in engines))
        return engines[-1]

    results = measured(
        make,
        "target",
        [Variant("gamma 2", "draft", 2, (0.5, 0.5))],
        PROMPTS,
        [1, 2],
        SAMPLING,
        repeats=3,
        apart=True,
    )
    assert max(alive) == 1 and all(engine.log[-1] == "stop" for engine in engines)
    assert results["gamma 2", 2].repeats == 3


def test_engines_are_stopped_when_something_fails() -> None:
    engines: list[MadeUpEngine] = []

    def make(variant: Variant) -> MadeUpEngine:
        engines.append(MadeUpEngine())
        return engines[-1]

    with pytest.raises(ArchsearchError, match="rates"):
        measured(
            make, "target", [Variant("gamma 2", "draft", 2, (0.5, 0.6))], PROMPTS, [1], SAMPLING
        )
    assert engines and all(engine.log[-1] == "stop" for engine in engines)


def test_an_engine_that_tells_nothing_is_timed_by_whole_requests() -> None:
    results = measured(
        lambda variant: MadeUpEngine(tells_steps=False),
        "target",
        [Variant("gamma 3", "draft", 3, RATES)],
        PROMPTS,
        [2],
        SAMPLING,
    )
    found = results["gamma 3", 2]
    assert found.target_s is None and found.speedup is not None
    assert found.speedup.value == pytest.approx(found.tau * plain_s(2) / round_s(2, 3), rel=0.15)


def test_what_cannot_be_measured_is_said() -> None:
    with pytest.raises(ArchsearchError, match="nothing to measure"):
        measured(lambda variant: MadeUpEngine(), "target", [], PROMPTS, [], SAMPLING)
    with pytest.raises(RunFailed, match="no step with all 4 requests"):
        measured(
            lambda variant: MadeUpEngine(),
            "target",
            [],
            PROMPTS,
            [4],
            Sampling(max_new_tokens=2, ignore_end=True),
        )


def test_a_schedule_beats_off_and_every_fixed_gamma() -> None:
    rates = (0.95, 0.9, 0.85)  # gamma 3 pays with few requests, none with many
    variants = [Variant("gamma 1", "d", 1, rates[:1]), Variant("gamma 3", "d", 3, rates)]
    variants.append(Variant("schedule", "d", 3, rates, ((1, 8, 3), (9, 32, 0))))
    results = measured(
        lambda variant: MadeUpEngine(), "t", variants, PROMPTS, [1, 32], SAMPLING, repeats=7
    )
    assert results["schedule", 1].gamma == 3 and results["schedule", 32].gamma == 0
    verdict = schedule_verdict(results, "schedule", ["gamma 1", "gamma 3"], [1, 32])
    assert [row.gamma for row in verdict] == [3, 0] and all(row.holds for row in verdict)
    overall = overall_speedups(results, ["schedule", "gamma 1", "gamma 3"], [1, 32])
    assert max(overall, key=overall.__getitem__) == "schedule" and overall["off"] == 1.0
    one, many = (results["schedule", number].speedup for number in (1, 32))
    assert (
        one is not None
        and many is not None
        and overall["schedule"] == pytest.approx((one.value * many.value) ** 0.5)
    )
    wrong = Variant("schedule", "d", 3, rates, ((1, 8, 1), (9, 32, 3)))
    results = measured(
        lambda variant: MadeUpEngine(),
        "t",
        [*variants[:2], wrong],
        PROMPTS,
        [1, 32],
        SAMPLING,
        repeats=7,
    )
    verdict = schedule_verdict(results, "schedule", ["gamma 1", "gamma 3"], [1, 32])
    assert not verdict[0].holds and verdict[0].best_other == "gamma 3"


def test_a_schedule_that_is_not_shown_to_be_worse_may_be_worse_within_a_stated_margin() -> None:
    def result(value: float) -> UnderLoad:
        speedup = Estimate(value, 0.0, "measured")
        return replace(template, speedup=speedup)

    template = next(
        iter(
            measured(
                lambda variant: MadeUpEngine(), "t", [Variant("x", "d", 1)], PROMPTS, [1], SAMPLING
            ).values()
        )
    )
    for lost, holds in ((0.07, True), (0.09, False)):
        results = {("schedule", 1): result(2.0 * (1.0 - lost)), ("gamma 1", 1): result(2.0)}
        row = schedule_verdict(results, "schedule", ["gamma 1"], [1])[0]
        assert row.holds is holds and 0.07 < (row.margin or 0.0) / 2.0 < 0.09


def test_ranges_out_of_points() -> None:
    assert schedule_from_points([(1, 4), (2, 4), (4, 2), (8, 0)]) == (
        (1, 2, 4),
        (3, 5, 2),
        (6, 8, 0),
    )
    assert schedule_from_points([(1, 3)]) == ((1, 1, 3),)
    assert schedule_from_points([(1, 2), (2, 2), (256, 2)]) == ((1, 256, 2),)
    with pytest.raises(ArchsearchError, match="begins at batch size 1"):
        schedule_from_points([(2, 3)])


class DiesLater(MadeUpEngine):
    """Dies at its fifth call: after the warm-up and three repeats."""

    def generate(self, prompts, sampling):  # noqa: ANN001, ANN201
        if self.calls == 4 and self.draft is not None:
            raise RunFailed("made-up was killed by signal 9")
        return super().generate(prompts, sampling)


def test_whole_repeats_before_a_failure_are_kept() -> None:
    with pytest.raises(RunFailed, match="signal 9") as caught:
        measured(
            lambda variant: DiesLater(),
            "target",
            [Variant("gamma 3", "draft", 3, RATES)],
            PROMPTS,
            [1],
            SAMPLING,
            repeats=5,
        )
    kept = caught.value.results
    assert kept["gamma 3", 1].repeats == kept["alone", 1].repeats == 3
    with pytest.raises(RunFailed) as caught:
        measured(
            lambda variant: MadeUpEngine(),
            "target",
            [],
            PROMPTS,
            [4],
            Sampling(max_new_tokens=2, ignore_end=True),
        )
    assert caught.value.results is None
