"""Ways to serve take turns on the same prompts in an engine: drift of the machine hits all alike.
Everything that is confirmed is one plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np

from archsearch.acceptance.lookup import Ngram
from archsearch.engines.engine import (
    Chained,
    Engine,
    EnginePrompt,
    EngineStep,
    GenerationResult,
    ModelSource,
    Sampling,
)
from archsearch.errors import ArchsearchError, RunFailed, Stopped
from archsearch.progress import Progress, silent
from archsearch.schedule import Ranges, gamma_at

ALONE: Final = "alone"
_WARM_UP_TOKENS: Final = 16

Case = tuple[str, int]
"""(name of a variant, requests in flight)."""
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to serve: `draft` None is the target alone. `synthetic`, `schedule`: see
    `Engine.start`."""

    name: str
    draft: ModelSource | None = None
    gamma: int = 0
    synthetic: tuple[float, ...] = ()
    schedule: Ranges = ()

    def gamma_at(self, batch: int) -> int:
        """Draft tokens a round at a batch size."""
        return gamma_at(self.schedule, batch, self.gamma)

    @property
    def ragged(self) -> bool:
        """Whether its rounds may draft fewer than gamma tokens, or none."""
        return isinstance(self.draft, Ngram | Chained)


@dataclass(frozen=True)
class Plan:
    """What is run: every variant at every concurrency, turn by turn; the target alone, where it is
    missing, is added.

    `repeats`: how many turns, None for one a prompt. A turn gives each engine `per_request` groups
    of prompts, one after the other, each as large as what is in flight: the next of `prompts` each
    time, and the same to every variant. `apart`: one engine at a time is alive (their weights do
    not fit together); each is then started `starts` times, for as many parts of the turns. `seed`:
    of the bootstrap.
    """

    target: ModelSource
    variants: Sequence[Variant]
    prompts: Sequence[EnginePrompt]
    sampling: Sampling = Sampling()
    concurrencies: Sequence[int] = (1,)
    repeats: int | None = None
    per_request: int = 1
    apart: bool = False
    starts: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.prompts or not self.concurrencies or self.turns < 1:
            raise ArchsearchError(
                "nothing to measure: give prompts, concurrencies and at least one repeat"
            )
        if all(variant.draft is not None for variant in self.variants):
            object.__setattr__(self, "variants", [Variant(ALONE), *self.variants])

    @property
    def turns(self) -> int:
        return len(self.prompts) if self.repeats is None else self.repeats

    @property
    def alone(self) -> Variant:
        """The target alone."""
        return next(variant for variant in self.variants if variant.draft is None)

    @property
    def drafting(self) -> list[Variant]:
        """All others."""
        return [variant for variant in self.variants if variant.draft is not None]

    def order(self) -> list[tuple[int, Variant, int]]:
        """(turn, variant, concurrency) as they run; every other turn, or part of them where one
        engine at a time is alive, goes backwards."""
        cases = [(number, variant) for number in self.concurrencies for variant in self.variants]
        parts = min(self.starts, self.turns) if self.apart else self.turns
        found: list[tuple[int, Variant, int]] = []
        for place, part in enumerate(np.array_split(np.arange(self.turns), parts)):
            steps = [(int(turn), variant, number) for turn in part for number, variant in cases]
            if self.apart:
                steps.sort(key=lambda step: self.variants.index(step[1]))
            found += steps if place % 2 == 0 else steps[::-1]
        return found

    def groups(self, turn: int, concurrency: int) -> list[list[EnginePrompt]]:
        before = sum(number for number in self.concurrencies if number < concurrency)
        start = self.per_request * (turn * sum(self.concurrencies) + before)
        return [self.some(start + concurrency * i, concurrency) for i in range(self.per_request)]

    def some(self, start: int, count: int) -> list[EnginePrompt]:
        """`count` prompts from `start` on, round and round, with ids that stay distinct."""
        chosen = [self.prompts[(start + i) % len(self.prompts)] for i in range(count)]
        if count <= len(self.prompts):
            return chosen
        named = enumerate(chosen)
        return [replace(prompt, prompt_id=f"{prompt.prompt_id}#{i}") for i, prompt in named]


@dataclass(frozen=True)
class Turn:
    """What one variant did in one turn at one concurrency: its answers, and for each call of the
    engine its steps, () where the engine does not report them."""

    concurrency: int
    ragged: bool
    results: Sequence[GenerationResult]
    calls: Sequence[Sequence[EngineStep]]

    @cached_property
    def full(self) -> list[EngineStep]:
        """The steps that show what serving takes: see `full_steps`."""
        full = (full_steps(steps, self.concurrency, self.ragged) for steps in self.calls)
        return [step for steps in full for step in steps]


@dataclass(frozen=True)
class Trace:
    """What a plan came to: `turns` of every case, those of `numbers` only. `logits`: the target's
    for two tokens after a prefix; None where an engine failed or answers were sampled."""

    plan: Plan
    engine: str
    version: str
    numbers: Sequence[int]
    turns: Mapping[Case, Sequence[Turn]]
    logits: Callable[[Sequence[int], Sequence[int]], Sequence[float]] | None

    @property
    def prompts(self) -> list[EnginePrompt]:
        """Those that were answered, where a turn is a prompt."""
        return [self.plan.prompts[number] for number in self.numbers]

    def results(self, variant: str) -> list[GenerationResult]:
        """The answers of a variant, one request at a time."""
        return [result for turn in self.turns[variant, 1] for result in turn.results]


class _Engines:
    """The engines of a plan, each started when it is first needed; where one at a time is alive,
    the others are stopped before."""

    def __init__(self, make_engine: Callable[[Variant], Engine], plan: Plan) -> None:
        self.make_engine, self.plan = make_engine, plan
        self.alive: dict[str, Engine] = {}
        self.name = self.version = ""

    def ready(self, variant: Variant) -> Engine:
        plan = self.plan
        if variant.name not in self.alive:
            if plan.apart:
                self.stop()
            engine = self.alive[variant.name] = self.make_engine(variant)
            engine.start(
                plan.target,
                variant.draft,
                variant.gamma,
                synthetic=variant.synthetic,
                schedule=variant.schedule,
            )
            tokens = min(_WARM_UP_TOKENS, plan.sampling.max_new_tokens)
            warm_up = replace(plan.sampling, max_new_tokens=tokens)
            engine.generate(plan.some(0, max(plan.concurrencies)), warm_up)
            self.name, self.version = engine.name, engine.version
        return self.alive[variant.name]

    def turn(self, variant: Variant, turn: int, concurrency: int) -> Turn:
        engine, plan = self.ready(variant), self.plan
        sampling = replace(plan.sampling, seed=plan.sampling.seed + turn)
        results: list[GenerationResult] = []
        calls = []
        # all groups at once would be in flight together wherever the engine has room for more
        for group in plan.groups(turn, concurrency):
            results += engine.generate(group, sampling)
            calls.append(engine.steps())
        return Turn(concurrency, variant.ragged, results, calls)

    def logits(self, prefix: Sequence[int], tokens: Sequence[int]) -> Sequence[float]:
        return self.ready(self.plan.alone).token_logits(prefix, tokens)

    def stop(self) -> None:
        for engine in self.alive.values():
            engine.stop()
        self.alive.clear()


def run_plan(
    make_engine: Callable[[Variant], Engine],
    plan: Plan,
    summary: Callable[[Trace], R],
    *,
    look: Callable[[Turn], object] = lambda turn: None,
    progress: Progress = silent,
) -> R:
    """`summary` of what the plan came to; it is called while the engines are alive, which are all
    stopped afterwards. A warm-up of each start is not counted.

    `look` sees each turn as it ends and may raise: what cannot be measured is known at the first.
    Raises RunFailed where an engine fails or nothing could be counted, Stopped where somebody ends
    it; their `results` are then the summary of the turns that every variant had finished, None
    where there is none.
    """
    seen: dict[Case, dict[int, Turn]] = {
        (variant.name, number): {} for variant in plan.variants for number in plan.concurrencies
    }
    order, done = plan.order(), 0
    at_once = [] if plan.apart else plan.variants

    def tell(what: str) -> None:
        progress(what, float(done), float(len(order) + len(at_once)))

    engines = _Engines(make_engine, plan)

    def trace(numbers: Sequence[int], whole: bool) -> Trace:
        turns = {case: [found[number] for number in numbers] for case, found in seen.items()}
        logits = engines.logits if whole and plan.sampling.temperature == 0 else None
        return Trace(plan, engines.name, engines.version, numbers, turns, logits)

    try:
        for variant in at_once:
            engines.ready(variant)
            done += 1
            tell(f"start {variant.name}")
        for turn, variant, number in order:
            seen[variant.name, number][turn] = engines.turn(variant, turn, number)
            look(seen[variant.name, number][turn])
            done += 1
            tell(f"turn {turn + 1}/{plan.turns}, {number} in flight, {variant.name}")
        return summary(trace(range(plan.turns), whole=True))
    except (RunFailed, KeyboardInterrupt) as ended:
        error = ended if isinstance(ended, RunFailed) else Stopped("stopped")
        finished = sorted(set.intersection(*map(set, seen.values())))
        if finished:
            with contextlib.suppress(RunFailed):  # too little for a figure
                error.results = summary(trace(finished, whole=False))
        if error is ended or not error.results:
            raise
        raise error from ended
    finally:
        engines.stop()


def full_steps(
    steps: Sequence[EngineStep], concurrency: int, ragged: bool = False
) -> list[EngineStep]:
    """The steps that show what serving at `concurrency` takes: all requests in them, no prompt
    read, no request ended, since its last round is cut; of rounds that drafted less than gamma only
    those of a drafter that finds fewer tokens (`ragged`)."""
    kept = []
    for step, after in pairwise(steps):
        goes_on = after.batch == step.batch and not after.prefill
        tokens = step.batch * (step.gamma + 1)
        whole = ragged or not step.target_tokens or step.target_tokens == tokens
        if step.batch == concurrency and not step.prefill and goes_on and whole:
            kept.append(step)
    return kept


def pass_times(steps: Sequence[EngineStep]) -> tuple[float | None, float | None, float | None]:
    """Median seconds of all passes of the draft in a round, of the target's pass, and of what is
    neither; None where the engine does not report its passes."""
    parts = [
        (sum(step.draft_s), step.target_s, step.other_s)
        for step in steps
        if step.target_s is not None
    ]
    if not parts:
        return None, None, None
    draft_s, target_s, rest_s = map(float, np.median(np.array(parts, float), axis=0))
    return draft_s, target_s, rest_s


def bootstrap(values: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(draws [1000, n] with replacement of the places of `values` [n], their medians [1000])."""
    draws = np.random.default_rng(seed).integers(0, len(values), (1000, len(values)))
    return draws, np.median(values[draws], axis=1)
