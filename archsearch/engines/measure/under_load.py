"""Target alone against target + draft with several requests in flight: medians over interleaved repeats, term by term.

Each repeat runs every variant at every concurrency, in an order that is reversed every other time, so that drift of the machine
hits all alike; a speed-up is the ratio inside one repeat. Times come from the engine's steps at full batch that read no prompt
(from whole requests where an engine does not tell its steps).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from archsearch.acceptance.lookup import Ngram
from archsearch.engines.engine import Engine, EnginePrompt, EngineStep, GenerationResult, ModelSource, Sampling
from archsearch.engines.measure.load_result import LoadResult, ScheduleVerdict
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.estimate import Estimate
from archsearch.latency.engine_passes import START_STD
from archsearch.progress import Progress
from archsearch.schedule import Ranges, gamma_at

ALONE: Final = "alone"
_DRAWS: Final = 1000
_WARM_UP_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to serve: `draft` None is the target alone. `synthetic`, `schedule`: see `Engine.start`."""

    name: str
    draft: ModelSource | None = None
    gamma: int = 0
    synthetic: tuple[float, ...] = ()
    schedule: Ranges = ()

    def gamma_at(self, batch: int) -> int:
        """Draft tokens a round at a batch size."""
        return gamma_at(self.schedule, batch, self.gamma)


Results = dict[tuple[str, int], LoadResult]
"""By (variant name, concurrency)."""


@dataclass(frozen=True)
class LoadPlan:
    """What is run: every variant at every concurrency, `repeats` times; the target alone is added where it is missing.

    A repeat gives each engine `per_request` groups of prompts, one group after the other, each as large as what is in flight: the
    next ones of `prompts` each time and the same ones to every variant. `apart`: one engine at a time is alive (their weights do
    not fit together); each repeat then starts it anew. `seed`: of the bootstrap.
    """

    target: ModelSource
    variants: Sequence[Variant]
    prompts: Sequence[EnginePrompt]
    concurrencies: Sequence[int]
    sampling: Sampling
    repeats: int = 5
    per_request: int = 1
    apart: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.prompts or not self.concurrencies or self.repeats < 1:
            raise ArchsearchError("nothing to measure: give prompts, concurrencies and at least one repeat")
        if all(variant.draft is not None for variant in self.variants):
            object.__setattr__(self, "variants", [Variant(ALONE), *self.variants])

    @property
    def alone(self) -> str:
        """The name of the target alone."""
        return next(variant.name for variant in self.variants if variant.draft is None)

    def order(self, repeat: int) -> list[tuple[Variant, int]]:
        """Variants and concurrencies of one repeat; reversed every other time, so that drift of the machine hits all alike."""
        cases = [(variant, number) for number in self.concurrencies for variant in self.variants]
        if self.apart:
            cases.sort(key=lambda case: self.variants.index(case[0]))
        return cases if repeat % 2 == 0 else cases[::-1]

    def groups(self, repeat: int) -> dict[int, list[list[EnginePrompt]]]:
        """The groups of prompts of one repeat, by concurrency."""
        position, groups = repeat * self.per_request * sum(self.concurrencies), {}
        for number in self.concurrencies:
            groups[number] = [_next(self.prompts, position + number * i, number) for i in range(self.per_request)]
            position += number * self.per_request
        return groups


@dataclass
class _Seen:
    """What one variant did at one concurrency, repeat by repeat."""

    token_s: list[float] = field(default_factory=list)
    steps: list[EngineStep] = field(default_factory=list)
    results: list[GenerationResult] = field(default_factory=list)
    version: str = ""


class _Engines:
    """The engines of a plan, each started when it is first needed; where they stand apart, the others are stopped before."""

    def __init__(self, make_engine: Callable[[Variant], Engine], plan: LoadPlan) -> None:
        self.make_engine, self.plan = make_engine, plan
        self.alive: dict[str, Engine] = {}

    def ready(self, variant: Variant) -> Engine:
        """The engine of a variant, started and warm."""
        if variant.name not in self.alive:
            if self.plan.apart:
                self.stop()
            engine = self.alive[variant.name] = self.make_engine(variant)
            engine.start(self.plan.target, variant.draft, variant.gamma, synthetic=variant.synthetic, schedule=variant.schedule)
            sampling = self.plan.sampling
            warm_up = dataclasses.replace(sampling, max_new_tokens=min(_WARM_UP_TOKENS, sampling.max_new_tokens))
            engine.generate(_next(self.plan.prompts, 0, max(self.plan.concurrencies)), warm_up)
        return self.alive[variant.name]

    def stop(self) -> None:
        for engine in self.alive.values():
            engine.stop()
        self.alive.clear()


def measure_load(make_engine: Callable[[Variant], Engine], plan: LoadPlan, progress: Progress | None = None) -> Results:
    """Every variant at every concurrency. Raises RunFailed where no step at full batch was seen or an engine fails; its `results`
    are then those of the repeats that were whole."""
    seen = {(variant.name, number): _Seen() for variant in plan.variants for number in plan.concurrencies}
    engines = _Engines(make_engine, plan)
    planned, done = float(len(plan.variants) * (1 + plan.repeats * len(plan.concurrencies))), 0.0

    def tell(what: str) -> None:
        nonlocal done
        done += 1.0
        if progress is not None:
            progress(what, done, planned)

    try:
        for variant in plan.variants if not plan.apart else ():
            engines.ready(variant)
            tell(f"start {variant.name}")
        for repeat in range(plan.repeats):
            groups = plan.groups(repeat)
            settings = dataclasses.replace(plan.sampling, seed=plan.sampling.seed + repeat)
            for variant, number in plan.order(repeat):
                ragged = isinstance(variant.draft, Ngram)
                _run_groups(engines.ready(variant), groups[number], settings, seen[variant.name, number], ragged)
                tell(f"repeat {repeat + 1}/{plan.repeats}, {number} in flight, {variant.name}")
        return _results(plan, seen)
    except RunFailed as error:
        whole = min(len(entry.token_s) for entry in seen.values())
        if whole:
            for entry in seen.values():
                del entry.token_s[whole:]
            error.results = _results(plan, seen)
        raise
    finally:
        engines.stop()


def _run_groups(
    engine: Engine, groups: Sequence[list[EnginePrompt]], sampling: Sampling, seen: _Seen, ragged: bool = False
) -> None:
    """One variant's share of a repeat at one concurrency."""
    calls = []
    for group in groups:  # all at once would be in flight together wherever the engine has room for more
        results = engine.generate(group, sampling)
        calls.append((engine.steps(), results))
    seen.version = engine.version
    _note(seen, calls, len(groups[0]), ragged)


def _results(plan: LoadPlan, seen: dict[tuple[str, int], _Seen]) -> Results:
    return {
        (variant.name, number): _result(variant, number, seen[variant.name, number], seen[plan.alone, number], plan.seed)
        for variant in plan.variants
        for number in plan.concurrencies
    }


def _next(prompts: Sequence[EnginePrompt], start: int, count: int) -> list[EnginePrompt]:
    """`count` prompts from `start` on, round and round, with ids that stay distinct."""
    chosen = [prompts[(start + i) % len(prompts)] for i in range(count)]
    return [dataclasses.replace(prompt, prompt_id=f"{prompt.prompt_id}#{i}") for i, prompt in enumerate(chosen)]


def full_steps(steps: Sequence[EngineStep], concurrency: int, ragged: bool = False) -> list[EngineStep]:
    """The steps that say what serving at `concurrency` takes: all requests in them, no prompt read, no request ended.

    A request's last round is cut at its last token, so a step that is followed by another batch, by a prompt or by nothing is
    left out; and so are rounds that drafted less than gamma. `ragged`: not those of a drafter that finds fewer tokens, or none.
    """
    kept = []
    for number, step in enumerate(steps):
        after = steps[number + 1] if number + 1 < len(steps) else None
        goes_on = after is not None and after.batch == step.batch and not after.prefill
        whole = ragged or not step.target_tokens or step.target_tokens == step.batch * (step.gamma + 1)
        if step.batch == concurrency and not step.prefill and goes_on and whole:
            kept.append(step)
    return kept


def _note(
    seen: _Seen,
    calls: Sequence[tuple[Sequence[EngineStep], Sequence[GenerationResult]]],
    concurrency: int,
    ragged: bool = False,
) -> None:
    """Take the steps and results of one repeat's calls."""
    results = [result for _, answers in calls for result in answers]
    seen.results += results
    full = [step for steps, _ in calls for step in full_steps(steps, concurrency, ragged)]
    if full:
        seen.steps += full
        seen.token_s.append(sum(step.seconds for step in full) / sum(step.written for step in full) * concurrency)
        return
    if any(steps for steps, _ in calls):
        raise RunFailed(
            f"no step with all {concurrency} requests in it was seen; answers are too short or differ too much in length: "
            "allow more new tokens or a lower concurrency"
        )
    tokens = sum(result.decode_tokens for result in results)
    if not tokens:
        raise RunFailed("every answer ended in its first round: nothing to time; use prompts with longer answers")
    seen.token_s.append(sum(result.decode_seconds for result in results) / tokens)


def _result(variant: Variant, concurrency: int, seen: _Seen, alone: _Seen, seed: int) -> LoadResult:
    times, base = np.array(seen.token_s), np.array(alone.token_s)
    speedup, interval = None, None
    if variant.draft is not None:
        ratios = base / times
        rng = np.random.default_rng(seed)
        draws = np.median(ratios[rng.integers(0, len(ratios), (_DRAWS, len(ratios)))], axis=1)
        low, high = np.quantile(draws, [0.05, 0.95])
        speedup, interval = Estimate(float(np.median(ratios)), float(draws.std()), "measured"), (float(low), float(high))
    rounds = sum(result.rounds for result in seen.results)
    accepted = sum(result.accepted for result in seen.results)
    rejected = sum(result.rejected for result in seen.results)
    width = max((len(result.accepted_by_position) for result in seen.results), default=0)
    by_position = [
        sum(result.accepted_by_position[i] for result in seen.results if i < len(result.accepted_by_position))
        for i in range(width)
    ]
    told = [step for step in seen.steps if step.target_s is not None]
    timed_rounds = sum(step.batch for step in seen.steps)
    tau = sum(step.written for step in seen.steps) / timed_rounds if timed_rounds else (accepted + rounds) / max(1, rounds)
    return LoadResult(
        variant=variant.name,
        concurrency=concurrency,
        gamma=variant.gamma_at(concurrency) if variant.draft is not None else 0,
        engine_version=seen.version,
        repeats=len(times),
        batch_steps=len(seen.steps),
        tokens_per_s=concurrency / float(np.median(times)),
        tau=float(tau) if variant.draft is not None else 1.0,
        alpha=accepted / (accepted + rejected) if accepted + rejected and not variant.schedule else None,  # one gamma only
        accepted_by_position=tuple(count / rounds for count in by_position) if rounds else (),
        speedup=speedup,
        speedup_interval=interval,
        step_s=_median([step.seconds for step in seen.steps]) or float(np.median(times)),
        target_s=_median([step.target_s for step in told if step.target_s is not None]),
        draft_s=_median([sum(step.draft_s) for step in told]),
        rest_s=_median([step.other_s for step in told if step.other_s is not None]),
        repeats_s=tuple(seen.token_s),
    )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def schedule_verdict(
    results: Results, schedule: str, fixed: Sequence[str], concurrencies: Sequence[int]
) -> list[ScheduleVerdict]:
    """For each concurrency the schedule against the best of always off (1.0) and every fixed gamma.

    Each setting is a process of its own, so START_STD is in the margin: the same gamma in two starts differs by that much.
    """
    rows = []
    for number in concurrencies:
        own = results[schedule, number].speedup
        assert own is not None
        others = {"off": Estimate(1.0, 0.0, "measured")}
        for name in fixed:
            speedup = results[name, number].speedup
            assert speedup is not None
            others[name] = speedup
        best = max(others, key=lambda name: others[name].value)
        starts = START_STD * own.value * (1.0 if best == "off" else 2.0**0.5)
        noise = (own.std**2 + others[best].std ** 2 + starts**2) ** 0.5
        holds = own.value >= others[best].value - 2.0 * noise
        gamma = results[schedule, number].gamma
        rows.append(ScheduleVerdict(number, gamma, own, best, others[best], 2.0 * noise, holds))
    return rows


def overall_speedups(results: Results, names: Sequence[str], concurrencies: Sequence[int]) -> dict[str, float]:
    """The geometric mean of each variant's speed-up over the concurrencies, and `off` = 1: one setting for all loads."""
    means = {"off": 1.0}
    for name in names:
        logs = [np.log(speedup.value) for number in concurrencies if (speedup := results[name, number].speedup) is not None]
        means[name] = float(np.exp(np.mean(logs)))
    return means
