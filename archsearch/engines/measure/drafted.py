"""Rows of a Profile out of rounds of drafters that are no models: what a round takes beside the
target's pass.

An engine times the passes of a draft model; what it runs around a head (the states it hands over,
the scatter of trimmed logits, a loop over heads, a search through the text) lies outside. So whole
rounds are taken, less the target's pass, and `latency.added` learns what they are made of.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from archsearch.drafters.drafter import Drafter
from archsearch.engines.engine import Engine, EnginePrompt, EngineStep, ModelSource, Sampling
from archsearch.engines.measure.passes import CONTEXT_STEP, MIN_STEPS, MOST_TIMES, RATE
from archsearch.profiles import DraftedShape, Measurement, freeze_shape
from archsearch.progress import Progress, silent

HALF: Final = 64  # tokens of a prompt, said twice: lookup finds something
TOKENS: Final = 48


@dataclass(frozen=True)
class DraftedCase:
    """A drafter, what the engine loads of it, and the gamma of each batch size."""

    drafter: Drafter
    source: ModelSource
    gammas: Mapping[int, int]

    @property
    def scheduled(self) -> bool:
        """Whether gamma differs by batch size."""
        return len(set(self.gammas.values())) > 1


def measure_drafted(
    make_engine: Callable[[DraftedCase], Engine],
    target: ModelSource,
    cases: Sequence[DraftedCase],
    asked: Mapping[str, str],
    vocabulary: int,
    *,
    repeats: int = 3,
    slowdown: Callable[[], float] = lambda: 1.0,
    record: Callable[[Measurement], None] = lambda row: None,
    progress: Progress = silent,
) -> list[Measurement]:
    """Rows of kind `drafted` of every case, each given to `record` as soon as its case is done.
    `asked`: engine, dtype and mode; `vocabulary`: ids of the made-up prompts lie below it."""
    found = []
    for number, case in enumerate(cases):
        engine = make_engine(case)
        try:
            engine.start(target, case.source, max(case.gammas.values()), **_options(engine, case))
            seen: dict[tuple[int, int], list[tuple[float, float]]] = {}
            speeds = []
            for repeat in range(repeats):
                for batch, gamma in sorted(case.gammas.items(), reverse=repeat % 2 == 1):
                    progress(
                        f"{case.drafter.title}, batch {batch}",
                        number + repeat / repeats,
                        len(cases),
                    )
                    before = slowdown()
                    engine.generate(
                        _prompts(batch, vocabulary, repeat), Sampling(TOKENS, ignore_end=True)
                    )
                    speeds.append(0.5 * (before + slowdown()))
                    times = seen.setdefault((batch, gamma), [])
                    times += [
                        (seconds / speeds[-1], context)
                        for seconds, context in rounds_of(engine.steps(), batch, gamma)
                    ]
        finally:
            engine.stop()
        for (batch, gamma), times in seen.items():
            if len(times) >= MIN_STEPS:
                found.append(
                    _row(case.drafter, batch, gamma, times, asked, sorted(speeds)[len(speeds) // 2])
                )
                record(found[-1])
    return found


def rounds_of(steps: Sequence[EngineStep], batch: int, gamma: int) -> list[tuple[float, float]]:
    """(seconds beside the target's pass, context) of the steps at full batch in which every request
    had gamma tokens judged."""
    return [
        (step.seconds - step.target_s, step.context)
        for step in steps
        if step.target_s is not None
        and not step.prefill
        and step.batch == batch
        and step.gamma == gamma
        and step.target_tokens == batch * (gamma + 1)
    ]


def _row(
    drafter: Drafter,
    batch: int,
    gamma: int,
    times: Sequence[tuple[float, float]],
    asked: Mapping[str, str],
    slowdown: float,
) -> Measurement:
    context = CONTEXT_STEP * max(
        1, round(sum(context for _, context in times) / len(times) / CONTEXT_STEP)
    )
    every = -(-len(times) // MOST_TIMES)
    shape = freeze_shape(DraftedShape(asked["engine"], drafter, gamma, batch, context).to_dict())
    kept = tuple(seconds for seconds, _ in times[::every])
    return Measurement("drafted", shape, asked["dtype"], asked["mode"], "cold", kept, slowdown)


def _options(engine: Engine, case: DraftedCase) -> dict[str, Any]:
    """Schedule and, for drafters with made-up weights, synthetic acceptance."""
    options: dict[str, Any] = {}
    if engine.synthesises and case.drafter.trains:
        largest = max(case.gammas.values())
        options["synthetic"] = tuple(RATE ** (position + 1) for position in range(largest))
    if case.scheduled:
        pairs = sorted(case.gammas.items())
        starts = [1, *(batch + 1 for batch, _ in pairs[:-1])]
        options["schedule"] = tuple(
            (first, batch, gamma) for first, (batch, gamma) in zip(starts, pairs, strict=True)
        )
    return options


def _prompts(count: int, vocabulary: int, seed: int) -> list[EnginePrompt]:
    """Made-up prompts that say a text twice."""
    chance = random.Random(seed)
    halves = [
        tuple(chance.randrange(min(1000, vocabulary)) for _ in range(HALF)) for _ in range(count)
    ]
    return [EnginePrompt(str(number), half + half) for number, half in enumerate(halves)]
