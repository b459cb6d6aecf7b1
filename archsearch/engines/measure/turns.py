"""Variants of an engine take turns on the same prompts: drift of the machine hits all alike."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Generic, TypeVar

from archsearch.engines.engine import Engine, EnginePrompt, EngineStep, GenerationResult, ModelSource, Sampling
from archsearch.errors import RunFailed
from archsearch.progress import Progress

WARM_UP_TOKENS: Final = 16

R = TypeVar("R")
K = TypeVar("K")


class Turns(Generic[K]):
    """Every prompt in every variant, interleaved, the order reversed every other prompt.

    `variants`: by name what drafts, None for the target alone, and gamma.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        target: ModelSource,
        variants: Mapping[K, tuple[ModelSource | None, int]],
        prompts: Sequence[EnginePrompt],
        sampling: Sampling | None,
        apart: bool,
    ) -> None:
        self.make_engine, self.target, self.variants, self.prompts, self.apart = make_engine, target, variants, prompts, apart
        self.sampling = sampling or Sampling()
        self.engines: dict[K, Engine] = {}
        self.results: dict[K, list[GenerationResult]] = {name: [] for name in variants}
        self.steps: dict[K, list[EngineStep]] = {name: [] for name in variants}
        self.planned, self.done = len(variants) * len(prompts), 0
        self._judge: Engine | None = None

    def judge(self, name: K) -> Engine:
        """A started engine that can say the target's logits: that of a variant, or, after a failure, any that lives."""
        return self._judge or self._ready(name, None)

    def go(
        self,
        summed: Callable[[Turns[K], Sequence[EnginePrompt], bool], dict[K, R]],
        progress: Progress | None,
    ) -> dict[K, R]:
        """What `summed` makes of the results, of these prompts, with or without the check of identity."""
        try:
            for name in self.variants if not self.apart else ():
                self._ready(name, progress)
            for index, name in order(len(self.prompts), list(self.variants), self.apart):
                engine = self._ready(name, progress)
                self.results[name] += engine.generate([self.prompts[index]], self.sampling)
                self.steps[name] += engine.steps()
                self.done += 1
                report(progress, f"prompt {index + 1}/{len(self.prompts)}", self.done, self.planned)
            return summed(self, self.prompts, self.sampling.temperature == 0)
        except RunFailed as error:
            whole = min(len(rows) for rows in self.results.values())
            if whole:
                self.results = {name: rows[:whole] for name, rows in self.results.items()}
                self._judge = next(iter(self.engines.values()))
                with contextlib.suppress(RunFailed):  # too little for a figure; identity would need the engine that failed
                    error.results = summed(self, self.prompts[:whole], False)
            raise
        finally:
            for engine in self.engines.values():
                engine.stop()

    def _ready(self, name: K, progress: Progress | None) -> Engine:
        """The engine of a variant, started and warm."""
        if name not in self.engines:
            if self.apart:
                for other in self.engines.values():
                    other.stop()
                self.engines.clear()
            report(progress, "start and warm-up", self.done, self.planned)
            self.engines[name] = self.make_engine()
            self.engines[name].start(self.target, *self.variants[name])
            warm_up = dataclasses.replace(self.sampling, max_new_tokens=min(WARM_UP_TOKENS, self.sampling.max_new_tokens))
            self.engines[name].generate(self.prompts[:1], warm_up)
        return self.engines[name]


def order(prompts: int, variants: Sequence[K], apart: bool) -> list[tuple[int, K]]:
    """(prompt, variant) in the order in which they run: by prompt, or (`apart`) by variant within each half of the prompts."""
    if not apart:
        return [(i, name) for i in range(prompts) for name in (variants if i % 2 == 0 else reversed(variants))]
    half = (prompts + 1) // 2
    first = [(i, name) for name in variants for i in range(half)]
    return first + [(i, name) for name in reversed(variants) for i in range(half, prompts)]


def report(progress: Progress | None, what: str, done: float, planned: float) -> None:
    """Tell `progress`, where there is one, that `done` of `planned` is done."""
    if progress is not None:
        progress(what, done, planned)
