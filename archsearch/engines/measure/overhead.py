"""What an engine adds to a plain token and to a round, measured: its cycle time less the forward
passes it is made of.

Random weights of the real shapes are enough: time does not depend on what the numbers are.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from archsearch.architecture.architecture import Architecture
from archsearch.engines.engine import Sampling
from archsearch.engines.measure.rows import made_up, row_of
from archsearch.engines.transformers.engine import TransformersEngine
from archsearch.profiles import EngineShape, Measurement, median_error_s
from archsearch.profiling.cpu_sweep import CpuBench
from archsearch.profiling.layers import ForwardRun, build_model
from archsearch.progress import Progress, silent

log = logging.getLogger(__name__)

Case = tuple[int, int]
"""gamma and layers of the draft; (0, 0): plain tokens"""
GAMMAS: Final = (1, 2, 4, 7)
# A layer costs more inside an engine than in a loop of its own: its cache is handed about and
# cropped, and the verification has pushed code and weights out of the processor's caches.
DRAFT_LAYERS: Final = (1, 6)
CASES: Final[tuple[Case, ...]] = (
    (0, 0),
    *((gamma, layers) for gamma in GAMMAS for layers in DRAFT_LAYERS),
)
CONTEXT: Final = 64  # 128 before; not shown equal
TOKENS: Final = 12  # of a generation: three of them bring twice as many cycles as target passes
ATTEMPTS: Final = 2
SMALLEST_STD_S: Final = 1e-6  # no clock and no probe is surer of a difference


@dataclass
class _Timings:
    """Probe-corrected seconds of one case (gamma, layers of the draft): the engine's cycles and the
    passes they are made of."""

    cycles: list[float] = field(default_factory=list)
    target: list[float] = field(default_factory=list)  # one pass over gamma + 1 tokens
    first: list[float] = field(default_factory=list)  # the draft's, its weights out of the cache
    later: list[float] = field(default_factory=list)  # the draft's, in a loop

    def extra(self, gamma: int) -> tuple[float, float]:
        """Seconds of a cycle beyond its passes, and the std of that difference of medians; either
        sign."""
        parts = [(1.0, self.cycles), (-1.0, self.target)]
        if gamma:
            parts += [(-1.0, self.first), (1.0 - gamma, self.later)]
        used = [(weight, times) for weight, times in parts if weight]
        value = sum(weight * statistics.median(times) for weight, times in used)
        return value, math.hypot(
            *(weight * (median_error_s(times) or 0.0) for weight, times in used)
        )


class _Trial:
    """A target with random weights, one draft of each of DRAFT_LAYERS, and their passes, ready to
    be timed case by case."""

    def __init__(self, bench: CpuBench, target: Architecture, dtype: str) -> None:
        self.vocab_size, self.dtype = target.vocab_size, dtype
        self.timer, self.flush = bench.timer(dtype), bench.flush
        self.prompts = made_up(target.vocab_size, CONTEXT - TOKENS // 2)
        with torch.inference_mode():
            pool = bench.pool(dtype)
            self.target = build_model(target, pool)
            holders: tuple[Any, ...] = (self.target.config, self.target.generation_config)
            for holder in holders:
                holder.eos_token_id = None  # random weights must not end the text
            # small layers and an 8k head, so that little of the cycle is a draft's own time
            small = Architecture(256, 512, 1, 4, 4, 64, target.vocab_size)
            small = small.replace(draft_vocab_size=min(8192, target.vocab_size))
            self.drafts = {
                layers: build_model(small.replace(num_hidden_layers=layers), pool)
                for layers in DRAFT_LAYERS
            }
            self.whole = ForwardRun(self.target, batch=1, context=CONTEXT)
            self.small = {
                layers: ForwardRun(model, batch=1, context=CONTEXT)
                for layers, model in self.drafts.items()
            }

    def measure(self, case: Case, times: _Timings) -> None:
        gamma, layers = case
        with torch.inference_mode():
            times.target += self.timer.time(
                self.whole.step(gamma + 1), calls=1, budget_s=0.3
            ).times_s
            if layers:
                step = self.small[layers].step(1)
                times.first += self.timer.time(step, before=self.flush, budget_s=0.1).times_s
                times.later += self.timer.time(step, calls=4, budget_s=0.1).times_s
        times.cycles += self.cycles(self.drafts.get(layers), gamma)

    def cycles(self, draft: object, gamma: int) -> list[float]:
        """Probe-corrected seconds of the rounds (or plain tokens) of one generation; those that the
        end cut short are left out."""
        engine = TransformersEngine()
        engine.start(self.target, draft, gamma)
        before = statistics.median(self.timer.probe() for _ in range(5))
        result = engine.generate(self.prompts, Sampling(max_new_tokens=TOKENS + gamma))[0]
        after = statistics.median(self.timer.probe() for _ in range(5))
        slowdown = 0.5 * (before + after) / self.timer.reference_s
        whole = result.gaps_s[: max(1, result.rounds - 1)] if gamma else result.gaps_s
        return [gap / slowdown for gap in whole]

    def row(self, case: Case, times: _Timings) -> Measurement:
        gamma, layers = case
        shape = EngineShape("transformers", gamma, self.vocab_size, layers)
        extra, std = times.extra(gamma)
        row = row_of("engine", shape, (self.dtype, "eager", "warm"), (extra,))
        return replace(row, std_s=max(std, SMALLEST_STD_S))


def measure_overhead(
    bench: CpuBench,
    target: Architecture,
    dtype: str,
    *,
    rounds: int = 3,
    progress: Progress = silent,
) -> list[Measurement]:
    """Rows of kind `engine` for transformers: seconds beyond the forward passes, per plain token
    (gamma 0) and per round, for each of GAMMAS with drafts of each of DRAFT_LAYERS; each a
    difference, stored as it is, with its std.

    Plain and speculative generations alternate `rounds` times, each divided by the probe run just
    before and after it.
    """
    trial = _Trial(bench, target, dtype)
    return measured_rows(trial.measure, trial.row, rounds, progress)


def measured_rows(
    measure: Callable[[Case, _Timings], None],
    row_of: Callable[[Case, _Timings], Measurement],
    rounds: int,
    progress: Progress = silent,
) -> list[Measurement]:
    """A row for each of CASES, `measure`d `rounds` times in turn. Those further below zero than
    their noise explains get a second chance, and are left out where that does not help."""
    rows: dict[Case, Measurement] = {}
    todo: list[Case] = list(CASES)
    for attempt in range(ATTEMPTS):
        timings = {case: _Timings() for case in todo}
        # Cases take turns, so that cycles and the passes they are made of feel the same machine.
        what = "engine overhead, disturbed cases again" if attempt else "engine overhead"
        for step, case in enumerate(list(todo) * rounds):
            planned = rounds * len(todo)
            progress(f"{what} {step + 1}/{planned}", float(step), float(planned))
            measure(case, timings[case])
        rows |= {case: row_of(case, times) for case, times in timings.items()}
        todo = [case for case, row in rows.items() if row.impossible]
        if not todo:
            break
    for gamma, layers in todo:
        log.warning(
            "engine overhead at gamma %d, %d draft layers: less than nothing, twice; left out",
            gamma,
            layers,
        )
    return [row for row in rows.values() if not row.impossible]
