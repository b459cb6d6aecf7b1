"""Rounds of speculation in real model code, and what the host needs to launch a pass: what tables
of kernels do not hold.

A `Cycle` verifies gamma + 1 tokens and drafts gamma, on static buffers, so that one CUDA graph can
hold the whole round. The same round is run in the styles that engines have: one graph, a graph per
pass, the draft launched kernel by kernel while the target's graph still runs, or waited for after
every token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import numpy as np
import torch

from archsearch.errors import ArchsearchError
from archsearch.profiling.cuda import CudaRunner, GpuTimer
from archsearch.profiling.kernels import Run
from archsearch.profiling.layers import LeanRun
from archsearch.profiling.timer import Timing

RoundStyle = Literal["one graph", "graph per pass", "draft eager", "draft eager, serial", "eager"]
ROUND_STYLES: Final[tuple[RoundStyle, ...]] = (
    "one graph",
    "graph per pass",
    "draft eager",
    "draft eager, serial",
    "eager",
)
"""One graph: as TensorRT-LLM and SGLang, no host between passes. Graph per pass: launched from
Python. Draft eager: the target as a graph, the draft kernel by kernel behind it, one wait a round,
as vLLM drafts without graphs. Serial: a wait after every pass. Eager: nothing captured."""


class LaunchRunner:
    """A `CudaRunner` whose seconds are the host's alone: until the last call has returned, whatever
    the device still does.

    Few calls at a time: a launch queue that is full (about 1,000 kernels) makes the host wait for
    the device.
    """

    def __init__(self, runner: CudaRunner) -> None:
        self.runner, self.device = runner, runner.device

    def capture(self, calls: Sequence[Run]) -> Run:
        return self.runner.capture(calls)

    def seconds(self, run: Run, count: int, before: Run | None) -> float:
        if before is not None:
            before()
        wait(self.device)
        start = time.perf_counter()
        for _ in range(count):
            run()
        elapsed = time.perf_counter() - start
        wait(self.device)
        return elapsed

    def release(self) -> None:
        self.runner.release()


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Cycle:
    """Rounds of `target` and `draft` at one place of the text: `context` tokens are cached, the
    block after them is verified.

    `block` [batch, gamma + 1]: the last token and the draft's. Greedy acceptance decides the next
    token; how much is computed does not depend on it, as in engines that pad.
    """

    def __init__(self, target: LeanRun, draft: LeanRun, *, gamma: int, context: int) -> None:
        ours, theirs = draft.model.arch, target.model.arch
        if ours.vocab_size != theirs.vocab_size or ours.trimmed or theirs.trimmed:
            raise ArchsearchError(
                f"a round needs one vocabulary and full heads, got {ours.head_rows} of"
                f" {ours.vocab_size} tokens in the draft and {theirs.head_rows} of"
                f" {theirs.vocab_size} in the target"
            )
        if draft.batch != target.batch:
            raise ArchsearchError(
                f"draft and target must have one batch size, got {draft.batch} and {target.batch}"
            )
        self.target, self.draft, self.gamma, self.context = target, draft, gamma, context
        self.device = target.cache.device
        self.block = torch.zeros(target.batch, gamma + 1, dtype=torch.long, device=self.device)

    def verify(self) -> None:
        """One pass of the target over the block; the token after the last accepted one becomes the
        block's first."""
        chosen = self.target.forward(self.block, self.context).argmax(-1)  # [batch, gamma + 1]
        agree = (chosen[:, :-1] == self.block[:, 1:]).long()
        accepted = agree.cumprod(-1).sum(-1, keepdim=True)
        self.block[:, :1].copy_(chosen.gather(1, accepted))

    def draft_step(self, number: int) -> None:
        """Draft token `number` (from 0) of the round, out of the one before it."""
        logits = self.draft.forward(self.block[:, number : number + 1], self.context + number)
        self.block[:, number + 1 : number + 2].copy_(logits.argmax(-1))

    def drafting(self) -> None:
        """All draft tokens of a round."""
        for number in range(self.gamma):
            self.draft_step(number)

    def whole(self) -> None:
        """Verification and drafting."""
        self.verify()
        self.drafting()

    def run(self, style: RoundStyle, graphs: CudaRunner) -> Run:
        """A round in `style`; `graphs` captures. All but `one graph` end when the host knows that
        the round is done."""
        if style == "one graph":
            return graphs.capture([self.whole])
        if style == "eager":
            return self._in_row([self.whole], serial=False)
        verify = graphs.capture([self.verify])
        if style == "graph per pass":
            steps = [
                graphs.capture([partial(self.draft_step, number)]) for number in range(self.gamma)
            ]
            return self._in_row([verify, *steps], serial=False)
        steps = [partial(self.draft_step, number) for number in range(self.gamma)]
        return self._in_row([verify, *steps], serial=style == "draft eager, serial")

    def _in_row(self, passes: Sequence[Run], *, serial: bool) -> Run:
        def run() -> None:
            for one in passes:
                one()
                if serial:
                    wait(self.device)
            wait(self.device)

        return run


@dataclass(frozen=True)
class Clocks:
    """The timers of one device: `graph` knows no host, `eager` waits for device and host, `launch`
    is the host's alone.

    `graphs`: what captures.
    """

    graph: GpuTimer
    eager: GpuTimer
    launch: GpuTimer
    graphs: CudaRunner


def time_round(cycle: Cycle, style: RoundStyle, clocks: Clocks, budget_s: float = 0.3) -> Timing:
    """Seconds of rounds of `cycle` in `style`."""
    timer = clocks.graph if style == "one graph" else clocks.eager
    return timer.time(cycle.run(style, clocks.graphs), budget_s=budget_s)


def time_parts(cycle: Cycle, clocks: Clocks, budget_s: float = 0.2) -> dict[str, Timing]:
    """What a round is made of: its passes on the device (in graphs) and the host's time to launch
    them.

    `decode`, `verify`, `drafting` (all draft tokens): the device's; `launch verify graph`, `launch
    drafting`, `launch whole`: the host's, the last two without graphs.
    """
    one_token = cycle.target.step(1, cycle.context)
    verify = clocks.graphs.capture([cycle.verify])
    device: dict[str, Run] = {
        "decode": clocks.graphs.capture([one_token]),
        "verify": verify,
        "drafting": clocks.graphs.capture([cycle.drafting]),
    }
    host: dict[str, Run] = {
        "launch verify graph": verify,
        "launch drafting": cycle.drafting,
        "launch whole": cycle.whole,
    }
    found = {name: clocks.graph.time(run, budget_s=budget_s) for name, run in device.items()}
    return found | {
        name: clocks.launch.time(run, calls=1, budget_s=budget_s) for name, run in host.items()
    }


@dataclass(frozen=True)
class LaunchLine:
    """Host seconds of a pass: `pass_s` + layers * `layer_s`; `worst`: its largest relative error at
    the points it came from."""

    pass_s: float
    layer_s: float
    worst: float


def launch_line(points: Sequence[tuple[int, float]]) -> LaunchLine:
    """The line of least squares of relative errors through (layers, seconds). Raises ValueError for
    fewer than two depths."""
    if len({layers for layers, _ in points}) < 2:
        raise ValueError(
            "a line through launch times needs two depths, got"
            f" {sorted({layers for layers, _ in points})}"
        )
    layers, seconds = (
        np.array([point[0] for point in points], dtype=float),
        np.array([point[1] for point in points]),
    )
    features = np.stack([np.ones_like(layers), layers], axis=1) / seconds[:, None]
    (pass_s, layer_s), *_ = np.linalg.lstsq(features, np.ones_like(seconds), rcond=None)
    worst = float(np.abs((pass_s + layer_s * layers) / seconds - 1.0).max())
    return LaunchLine(float(pass_s), float(layer_s), worst)


def round_law(device_s: float, host_s: float, wait_s: float = 0.0) -> float:
    """Seconds of a round whose host works ahead of the device: the longer of the two, and what
    waiting for it costs."""
    return max(device_s, host_s) + wait_s
