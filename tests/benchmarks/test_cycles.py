"""Rounds of target and draft: what they compute, what is captured, whose time is taken, and the
line through launch times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from archsearch.errors import ArchsearchError
from archsearch.profiling.cuda import GpuTimer
from archsearch.profiling.fused import Fused
from archsearch.profiling.layers import LeanDecoder, LeanRun
from archsearch.profiling.timer import WeightPool
from gpuday.cycles import (
    ROUND_STYLES,
    Clocks,
    Cycle,
    LaunchRunner,
    launch_line,
    round_law,
    time_parts,
    time_round,
)
from tests.doubles.world import TINY

CONTEXT = 12


class PlainRunner:
    """Runs captures on the CPU and says what was captured."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.captures: list[int] = []

    def capture(self, calls: Sequence[Any]) -> Any:
        self.captures.append(len(calls))
        return lambda: [call() for call in calls]

    def seconds(self, run: Any, count: int, before: Any) -> float:
        start = time.perf_counter()
        for _ in range(count):
            run()
        return time.perf_counter() - start

    def release(self) -> None:
        pass


def lean(layers: int, seed: int, batch: int = 1) -> LeanRun:
    pool = WeightPool(1 << 20, torch.float32, seed=seed)
    model = LeanDecoder.random(TINY.replace(num_hidden_layers=layers), pool, Fused())
    return LeanRun(model, batch=batch, capacity=CONTEXT + 8, pool=pool)


def greedy_block(run: LeanRun, token: int, count: int, start: int) -> list[int]:
    """What a model writes greedily, a token at a time."""
    written = []
    for number in range(count):
        token = int(run.forward(torch.tensor([[token]]), start + number)[0, -1].argmax())
        written.append(token)
    return written


def test_a_round_drafts_greedily_and_goes_on_after_the_last_token_that_the_target_shares() -> None:
    target, draft = lean(2, 0), lean(1, 1)
    cycle = Cycle(target, draft, gamma=3, context=CONTEXT)
    cycle.block.copy_(torch.tensor([[5, 0, 0, 0]]))
    cycle.drafting()
    assert cycle.block[0, 1:].tolist() == greedy_block(draft, 5, 3, CONTEXT)
    own = greedy_block(target, 5, 4, CONTEXT)
    # The target shares the first two draft tokens and not the third: its own third comes next.
    cycle.block.copy_(torch.tensor([[5, own[0], own[1], (own[2] + 1) % TINY.vocab_size]]))
    cycle.verify()
    assert int(cycle.block[0, 0]) == own[2]
    cycle.block.copy_(torch.tensor([[5, *own[:3]]]))
    cycle.verify()
    assert int(cycle.block[0, 0]) == own[3]  # all accepted: the token after them


def test_a_target_that_drafts_for_itself_accepts_all() -> None:
    target = lean(2, 0)
    cycle = Cycle(target, target, gamma=4, context=CONTEXT)
    cycle.block[0, 0] = 7
    cycle.drafting()
    own = greedy_block(target, 7, 5, CONTEXT)
    cycle.verify()
    assert int(cycle.block[0, 0]) == own[4]


@pytest.mark.parametrize(
    "style, captures",
    [
        ("one graph", 1),
        ("graph per pass", 4),
        ("draft eager", 1),
        ("draft eager, serial", 1),
        ("eager", 0),
    ],
)
def test_every_style_runs_the_same_round(style: Any, captures: int) -> None:
    expected = Cycle(lean(2, 0, 2), lean(1, 1, 2), gamma=3, context=CONTEXT)
    expected.whole()
    cycle, runner = Cycle(lean(2, 0, 2), lean(1, 1, 2), gamma=3, context=CONTEXT), PlainRunner()
    cycle.run(style, runner)()
    assert cycle.block.tolist() == expected.block.tolist() and len(runner.captures) == captures


def test_unlike_pairs_are_refused() -> None:
    target, pool = lean(1, 0), WeightPool(1 << 20, torch.float32)
    other = LeanRun(
        LeanDecoder.random(TINY.replace(draft_vocab_size=64), pool, Fused()), batch=1, capacity=20
    )
    with pytest.raises(ArchsearchError, match="one vocabulary and full heads, got 64 of"):
        Cycle(target, other, gamma=2, context=4)
    with pytest.raises(ArchsearchError, match="one batch size, got 2 and 1"):
        Cycle(target, lean(1, 0, 2), gamma=2, context=4)


def test_the_launch_runner_leaves_the_device_s_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device works a second behind a launch that returns at once; waiting for it is not in the
    time."""
    from gpuday import cycles

    busy_until = [0.0]

    def launch() -> None:
        busy_until[0] = time.perf_counter() + 1.0

    def wait(device: torch.device) -> None:
        time.sleep(max(0.0, busy_until[0] - time.perf_counter()))

    monkeypatch.setattr(cycles, "wait", wait)
    runner = LaunchRunner(PlainRunner())
    assert runner.seconds(launch, 3, None) < 0.5
    assert time.perf_counter() >= busy_until[0]  # it did wait, afterwards
    order: list[str] = []
    runner.seconds(partial(order.append, "run"), 2, partial(order.append, "before"))
    assert order == ["before", "run", "run"]


def test_rounds_and_their_parts_are_timed() -> None:
    runner = PlainRunner()
    timer = GpuTimer(runner, lambda: 1e-6, 1e-6)
    clocks = Clocks(timer, timer, GpuTimer(LaunchRunner(runner), lambda: 1e-6, 1e-6), runner)
    cycle = Cycle(lean(2, 0), lean(1, 1), gamma=2, context=CONTEXT)
    with torch.inference_mode():
        parts = time_parts(cycle, clocks, budget_s=0.01)
        rounds = {style: time_round(cycle, style, clocks, budget_s=0.01) for style in ROUND_STYLES}
    names = {
        "decode",
        "verify",
        "drafting",
        "launch verify graph",
        "launch drafting",
        "launch whole",
    }
    assert set(parts) == names and all(
        min(timing.times_s) > 0 for timing in (*parts.values(), *rounds.values())
    )


def test_the_line_through_launch_times() -> None:
    line = launch_line(
        [(2, 0.5e-3 + 2 * 0.1e-3), (8, 0.5e-3 + 8 * 0.1e-3), (24, 0.5e-3 + 24 * 0.1e-3)]
    )
    assert (line.pass_s, line.layer_s) == pytest.approx((0.5e-3, 0.1e-3)) and line.worst < 1e-9
    bent = launch_line([(2, 1e-3), (8, 1.6e-3), (24, 4e-3)])
    assert 0.03 < bent.worst < 0.2
    with pytest.raises(ValueError, match="two depths"):
        launch_line([(8, 1e-3), (8, 1.1e-3)])


def test_the_law_of_a_round() -> None:
    assert round_law(5e-3, 3e-3, 1e-4) == pytest.approx(5.1e-3) and round_law(
        2e-3, 3e-3
    ) == pytest.approx(3e-3)
