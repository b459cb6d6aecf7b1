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
from typing import Any, Final

import numpy as np

from archsearch.engines.engine import Engine, EnginePrompt, EngineStep, GenerationResult, ModelSource, Sampling
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


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One variant at one concurrency.

    `speedup`: median over repeats of (tokens/s of this variant / of the target alone in the same repeat), std and 5-95 %
    `speedup_interval` by bootstrap over repeats; None for the target alone. `tokens_per_s`: median over repeats, all requests
    together. `tau`: tokens per round and request, over the rounds that were timed; `accepted_by_position`: unconditional, whole
    rounds. `step_s`, `target_s`, `draft_s`, `rest_s`: median seconds of a step, of the target's pass, of all passes of the draft,
    and of what is neither; None where the engine does not tell. `batch_steps`: steps timed. `repeats_s`: seconds per token of
    each repeat.
    """

    variant: str
    concurrency: int
    gamma: int
    engine_version: str
    repeats: int
    batch_steps: int
    tokens_per_s: float
    tau: float
    alpha: float | None
    accepted_by_position: tuple[float, ...]
    speedup: Estimate | None
    speedup_interval: tuple[float, float] | None
    step_s: float
    target_s: float | None
    draft_s: float | None
    rest_s: float | None
    repeats_s: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        data["speedup"] = self.speedup.to_dict() if self.speedup else None
        return data


@dataclass
class _Seen:
    """What one variant did at one concurrency, repeat by repeat."""

    token_s: list[float] = field(default_factory=list)
    steps: list[EngineStep] = field(default_factory=list)
    results: list[GenerationResult] = field(default_factory=list)
    version: str = ""


def measure_load(
    make_engine: Callable[[Variant], Engine],
    target: ModelSource,
    variants: Sequence[Variant],
    prompts: Sequence[EnginePrompt],
    concurrencies: Sequence[int],
    sampling: Sampling,
    *,
    repeats: int = 5,
    per_request: int = 1,
    apart: bool = False,
    progress: Progress | None = None,
    seed: int = 0,
) -> dict[tuple[str, int], LoadResult]:
    """Every variant at every concurrency; the target alone is added where it is missing. Keys: (variant name, concurrency).

    A repeat gives each engine `per_request` groups of prompts, one group after the other, each as large as what is in flight: the
    next ones of `prompts` each time and the same ones to every variant. `apart`: one engine at a time is alive (their weights do
    not fit together); each repeat then starts it anew. Raises ArchsearchError for
    nothing to measure, RunFailed where no step at full batch was seen or an engine fails; its `results` are then those of the
    repeats that were whole.
    """
    if not prompts or not concurrencies or repeats < 1:
        raise ArchsearchError("nothing to measure: give prompts, concurrencies and at least one repeat")
    if all(variant.draft is not None for variant in variants):
        variants = [Variant(ALONE), *variants]
    seen = {(variant.name, number): _Seen() for variant in variants for number in concurrencies}
    engines: dict[str, Engine] = {}
    planned, done = len(variants) * (1 + repeats * len(concurrencies)), 0.0

    def tell(what: str, more: float = 1.0) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(what, done, planned)

    def ready(variant: Variant) -> Engine:
        if variant.name not in engines:
            if apart:
                for other in engines.values():
                    other.stop()
                engines.clear()
            engine = engines[variant.name] = make_engine(variant)
            engine.start(target, variant.draft, variant.gamma, synthetic=variant.synthetic, schedule=variant.schedule)
            warm_up = dataclasses.replace(sampling, max_new_tokens=min(_WARM_UP_TOKENS, sampling.max_new_tokens))
            engine.generate(_next(prompts, 0, max(concurrencies)), warm_up)
        return engines[variant.name]

    try:
        for variant in variants if not apart else ():
            ready(variant)
            tell(f"start {variant.name}")
        position = 0
        for repeat in range(repeats):
            settings = dataclasses.replace(sampling, seed=sampling.seed + repeat)
            groups: dict[int, list[list[EnginePrompt]]] = {}
            for number in concurrencies:
                groups[number] = [_next(prompts, position + number * i, number) for i in range(per_request)]
                position += number * per_request
            cases = [(variant, number) for number in concurrencies for variant in variants]
            if apart:
                cases.sort(key=lambda case: variants.index(case[0]))
            for variant, number in cases if repeat % 2 == 0 else reversed(cases):
                engine = ready(variant)
                calls = []
                for group in groups[number]:  # all at once would be in flight together wherever the engine has room for more
                    results = engine.generate(group, settings)
                    calls.append((engine.steps(), results))
                seen[variant.name, number].version = engine.version
                _note(seen[variant.name, number], calls, number)
                tell(f"repeat {repeat + 1}/{repeats}, {number} in flight, {variant.name}")
        return _results(variants, concurrencies, seen, seed)
    except RunFailed as error:
        whole = min(len(entry.token_s) for entry in seen.values())
        if whole:
            for entry in seen.values():
                del entry.token_s[whole:]
            error.results = _results(variants, concurrencies, seen, seed)
        raise
    finally:
        for engine in engines.values():
            engine.stop()


def _results(
    variants: Sequence[Variant], concurrencies: Sequence[int], seen: dict[tuple[str, int], _Seen], seed: int
) -> dict[tuple[str, int], LoadResult]:
    alone = _alone(variants)
    return {
        (variant.name, number): _result(variant, number, seen[variant.name, number], seen[alone, number], seed)
        for variant in variants
        for number in concurrencies
    }


def _alone(variants: Sequence[Variant]) -> str:
    return next(variant.name for variant in variants if variant.draft is None)


def _next(prompts: Sequence[EnginePrompt], start: int, count: int) -> list[EnginePrompt]:
    """`count` prompts from `start` on, round and round, with ids that stay distinct."""
    chosen = [prompts[(start + i) % len(prompts)] for i in range(count)]
    return [dataclasses.replace(prompt, prompt_id=f"{prompt.prompt_id}#{i}") for i, prompt in enumerate(chosen)]


def full_steps(steps: Sequence[EngineStep], concurrency: int) -> list[EngineStep]:
    """The steps that say what serving at `concurrency` takes: all requests in them, no prompt read, no request ended.

    A request's last round is cut at its last token, so a step that is followed by another batch, by a prompt or by nothing is
    left out; and so are rounds that drafted less than gamma.
    """
    kept = []
    for number, step in enumerate(steps):
        after = steps[number + 1] if number + 1 < len(steps) else None
        goes_on = after is not None and after.batch == step.batch and not after.prefill
        whole = not step.target_tokens or step.target_tokens == step.batch * (step.gamma + 1)
        if step.batch == concurrency and not step.prefill and goes_on and whole:
            kept.append(step)
    return kept


def _note(seen: _Seen, calls: Sequence[tuple[Sequence[EngineStep], Sequence[GenerationResult]]], concurrency: int) -> None:
    """Take the steps and results of one repeat's calls."""
    results = [result for _, answers in calls for result in answers]
    seen.results += results
    full = [step for steps, _ in calls for step in full_steps(steps, concurrency)]
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
    results: dict[tuple[str, int], LoadResult], schedule: str, fixed: Sequence[str], concurrencies: Sequence[int]
) -> list[dict[str, Any]]:
    """For each concurrency: the schedule's speed-up, the best of always off (1.0) and every fixed gamma, and `holds`: it is
    not shown to be worse, which is less than being as good: it may lose up to `margin`, two std of the difference, unseen.
    Each setting is a process of its own, so START_STD is in it: the same gamma in two starts differs by that much."""
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
        rows.append(
            {
                "concurrency": number,
                "gamma": results[schedule, number].gamma,
                "speedup": own.to_dict(),
                "best_other": best,
                "best_other_speedup": others[best].to_dict(),
                "margin": 2.0 * noise,
                "holds": own.value >= others[best].value - 2.0 * noise,
            }
        )
    return rows


def overall_speedups(
    results: dict[tuple[str, int], LoadResult], names: Sequence[str], concurrencies: Sequence[int]
) -> dict[str, float]:
    """The geometric mean of each variant's speed-up over the concurrencies, and `off` = 1: one setting for all loads."""
    means = {"off": 1.0}
    for name in names:
        logs = [np.log(speedup.value) for number in concurrencies if (speedup := results[name, number].speedup) is not None]
        means[name] = float(np.exp(np.mean(logs)))
    return means
