"""What all that measures in an engine shares."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from archsearch.engines.engine import Engine, EnginePrompt, ModelSource, Sampling
from archsearch.profiles import Measurement, freeze_shape

RATE: Final = 0.7  # synthetic acceptance of each draft token, given those before
MOST_TIMES: Final = 200  # of a row that are kept, evenly over the run
COMMON_IDS: Final = 1000  # ids of made-up prompts lie below it


def made_up(
    vocabulary: int, length: int, count: int = 1, *, rng: random.Random | None = None
) -> list[EnginePrompt]:
    """`count` prompts of `length` tokens."""
    rng, most = rng or random.Random(0), min(COMMON_IDS, vocabulary)
    return [
        EnginePrompt(str(number), tuple(rng.randrange(most) for _ in range(length)))
        for number in range(count)
    ]


def synthetic(gamma: int) -> tuple[float, ...]:
    """The shares of rounds in which each draft token is accepted."""
    return tuple(RATE ** (position + 1) for position in range(gamma))


def row_of(
    kind: str, shape: Any, how: tuple[str, str, str], times: Sequence[float], slowdown: float = 1.0
) -> Measurement:
    """The row of a shape; `how`: dtype, mode, cache state."""
    kept = tuple(times[:: -(-len(times) // MOST_TIMES)])
    return Measurement(kind, freeze_shape(shape.to_dict()), *how, kept, slowdown)


PROMPT_TOKENS: Final = 16
PROBE_S: Final = 0.6  # of steps in one answer of the probe
MOST_STEPS: Final = 12
LEAST_STEPS: Final = 3
REFERENCE_CALLS: Final = 7
FRESH_S: Final = 0.1  # an answer this young is given again


class PlainSteps:
    """Called: seconds of a plain step of one request now over those of `reference_s`, which is
    measured where it is None.

    What slows an engine's steps need not slow a handful of GEMMs: on a virtual CPU whose other
    hyperthread works for somebody else a step takes 60 to 110 ms instead of 32, and a probe of
    milliseconds says 1.1.

    The engine of `make_engine` is started with `target` when first called, and lives until `stop`.
    `otherwise` answers in its stead where the engine does not tell its steps.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        target: ModelSource,
        vocabulary: int,
        *,
        reference_s: float | None = None,
        otherwise: Callable[[], float] = lambda: 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.prompts, self.target = made_up(vocabulary, PROMPT_TOKENS), target
        self.make_engine, self.otherwise, self.clock = make_engine, otherwise, clock
        self.reference_s, self.steps = reference_s, LEAST_STEPS
        self._engine: Engine | None = None
        self._silent = False  # the engine does not tell its steps
        self._last: tuple[float, float] | None = None  # when, seconds of a step

    def __call__(self) -> float:
        if self._engine is None and not self._silent:
            self._start()
        if self._silent or self.reference_s is None:
            return self.otherwise()
        if self._last is None or self.clock() - self._last[0] > FRESH_S:
            seconds = self._step_s()
            self._last = (self.clock(), seconds)
        return self._last[1] / self.reference_s

    def now(self) -> float:
        """As a call, never an answer of before."""
        self._last = None
        return self()

    def stop(self) -> None:
        """End the engine; a next call starts it again."""
        if self._engine is not None:
            self._engine.stop()
            self._engine = None

    def _start(self) -> None:
        self._engine = self.make_engine()
        self._engine.start(self.target, None, 0)
        self._step_s()  # warms up
        first = self._step_s()
        if not first:
            self._silent = True
            self.stop()
            return
        self.steps = min(MOST_STEPS, max(LEAST_STEPS, round(PROBE_S / first)))
        if self.reference_s is None:
            self.reference_s = statistics.median(self._step_s() for _ in range(REFERENCE_CALLS))

    def _step_s(self) -> float:
        """Seconds of a plain step, median over one short answer; 0 where they are not reported."""
        assert self._engine is not None
        self._engine.generate(self.prompts, Sampling(self.steps + 1, ignore_end=True))
        times = [step.seconds for step in self._engine.steps() if not step.prefill]
        return statistics.median(times) if times else 0.0
