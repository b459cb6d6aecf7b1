"""Target alone against target + draft in a real engine, interleaved prompt by prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from archsearch.engines.engine import Engine, EnginePrompt, EngineStep, GenerationResult, ModelSource, Sampling
from archsearch.engines.measure.turns import Turns, report
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.estimate import Estimate
from archsearch.progress import Progress
from archsearch.speedup import DISTURBED_GAP, counting_doubt

_BOOTSTRAP_REPEATS: Final = 1000


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which target alone and target + draft disagree on a prompt, and what the target thinks of both.

    `logit_gap`: logit(alone) - logit(with draft) in a single pass over the common prefix. About the rounding error of the dtype:
    a tie that a 1-token and a (gamma + 1)-token pass break differently. Large: something is wrong.
    """

    prompt_id: str
    position: int
    alone_token: int | None
    draft_token: int | None
    alone_logit: float | None
    draft_logit: float | None

    @property
    def logit_gap(self) -> float | None:
        return None if self.alone_logit is None or self.draft_logit is None else self.alone_logit - self.draft_logit


@dataclass(frozen=True, slots=True)
class Identity:
    """How many answers are the same token by token, and where the others part. None of it applies to sampling.

    `alpha`: of the runs that were compared, where a check of its own made them.
    """

    prompts: int
    identical: int
    differences: tuple[Difference, ...] = ()
    alpha: float | None = None

    def largest_gap(self) -> float:
        """The largest |logit_gap| of all differences; 0 when there are none."""
        gaps = [difference.logit_gap for difference in self.differences]
        return max((abs(gap) for gap in gaps if gap is not None), default=0.0)


@dataclass(frozen=True, slots=True)
class CategoryResult:
    """The same figures for the prompts of one category."""

    prompts: int
    alpha: float
    tau: float
    speedup: float


@dataclass(frozen=True, slots=True)
class BestOf:
    """What it costs to report the best of several gammas that ran on the same prompts.

    `optimism`: by how much the best one's median speed-up is too high because it was picked for it; `share`: of the bootstrap's
    draws in which it was the best again.
    """

    gammas: tuple[int, ...]
    optimism: float
    share: float


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What came out for one gamma.

    `alpha`: accepted / (accepted + rejected), std by bootstrap over prompts. `accepted_by_position`: share of rounds in which
    position i was accepted (unconditional). `tau`: tokens per round, bonus included, whole rounds only.
    `speedup`: median over prompts of (time per token alone / with draft), both after the first tokens arrived, std by bootstrap;
    `speedup_pooled`: all tokens over all seconds, the same window; `speedup_end_to_end`: pooled with prefill.
    `speedup_interval` covers both ways of counting: the same draws of prompts give a median and a pooled speed-up each, and it
    reaches from the lower 5 % quantile of the two to the higher 95 %. `best_of`: only for the best of several gammas; its
    interval's lower end bears the optimism of the choice. `tokens_per_s` and `baseline_tokens_per_s` are pooled over
    the decode window; `decode_s`: median seconds a token alone; `round_s`: median seconds a round. `draft_s`, `verify_s`,
    `rest_s`: median seconds of all passes of the draft in a whole round, of the target's pass, and of what is neither; None where
    the engine does not tell. `tokens_per_step`: tokens a pass of the target after a request's first, whether it verified drafts
    or not, and `drafting_share`: whole rounds among those passes; both matter for drafters that do not always propose.
    """

    engine: str
    engine_version: str
    gamma: int
    prompts: int
    tokens: int
    rounds: int
    alpha: Estimate
    accepted_by_position: tuple[float, ...]
    tau: Estimate
    baseline_tokens_per_s: float
    tokens_per_s: float
    speedup: Estimate
    speedup_interval: tuple[float, float]
    speedup_pooled: float
    speedup_end_to_end: float
    decode_s: float
    round_s: float
    identical_output: Identity
    categories: dict[str, CategoryResult]
    per_prompt_speedup: tuple[float, ...]
    draft_s: float | None = None
    verify_s: float | None = None
    rest_s: float | None = None
    best_of: BestOf | None = None
    tokens_per_step: float | None = None
    drafting_share: float | None = None

    @property
    def disturbed(self) -> bool:
        """Whether the pooled speed-up is more than 15 % off the median over prompts: something else ran during part of it."""
        return abs(self.speedup_pooled / self.speedup.value - 1.0) > DISTURBED_GAP

    @property
    def undecided(self) -> str | None:
        """Why these figures decide nothing, None where they do."""
        return counting_doubt(self.speedup.value, self.speedup_pooled)

    def to_dict(self, predicted_speedup: float | None = None) -> dict[str, Any]:
        """The content of confirmed.json; `relative_error` is predicted / measured - 1, None without a prediction."""
        data = dataclasses.asdict(self)
        for name in ("alpha", "tau", "speedup"):
            data[name] = getattr(self, name).to_dict()
        for difference, raw in zip(self.identical_output.differences, data["identical_output"]["differences"], strict=True):
            raw["logit_gap"] = difference.logit_gap
        data["disturbed"] = self.disturbed
        data["undecided"] = self.undecided
        data["predicted_speedup"] = predicted_speedup
        data["relative_error"] = None if predicted_speedup is None else predicted_speedup / self.speedup.value - 1.0
        return data


def confirm(
    make_engine: Callable[[], Engine],
    target: ModelSource,
    draft: ModelSource,
    gammas: Sequence[int],
    prompts: Sequence[EnginePrompt],
    sampling: Sampling | None = None,
    *,
    apart: bool = False,
    progress: Progress | None = None,
    seed: int = 0,
) -> dict[int, Confirmation]:
    """Run every prompt with the target alone and with the draft at each gamma, back to back; one Confirmation per gamma.

    Drift of the machine hits all alike: each prompt runs all variants, and the order is reversed every other prompt. `apart`: one
    engine at a time is alive (they do not fit the memory together); the prompts then go in two halves, and the variants take the
    second in reverse. A warm-up of each start is not counted. Raises ArchsearchError for no prompts or gammas, RunFailed when the
    counts are empty or an engine fails; its `results` are then those of the prompts that every variant had answered, without the
    check of identity.
    """
    gammas = sorted(set(gammas))
    if not prompts or not gammas:
        raise ArchsearchError(f"confirm needs at least one prompt and one gamma, got {len(prompts)} and {len(gammas)}")
    run = Turns(make_engine, target, {0: (None, 0)} | {gamma: (draft, gamma) for gamma in gammas}, prompts, sampling, apart)

    def summed(runs: Turns[int], asked: Sequence[EnginePrompt], greedy: bool) -> dict[int, Confirmation]:
        return _summaries(runs.judge(0 if greedy else gammas[-1]), gammas, asked, runs.results, runs.steps, greedy, seed)

    return run.go(summed, progress)


def compare(
    make_engine: Callable[[], Engine],
    target: ModelSource,
    drafters: Mapping[str, tuple[ModelSource, int]],
    prompts: Sequence[EnginePrompt],
    sampling: Sampling | None = None,
    *,
    apart: bool = False,
    progress: Progress | None = None,
    seed: int = 0,
) -> dict[str, Confirmation]:
    """As `confirm`, for drafters of several kinds: `drafters` is by name what stands in the draft's place, and its gamma.

    A drafter that proposed nothing in any whole round (lookup may find nothing) is left out.
    Raises ArchsearchError without prompts or drafters.
    """
    if not prompts or not drafters:
        raise ArchsearchError(f"a comparison needs at least one prompt and one drafter, got {len(prompts)} and {len(drafters)}")
    run = Turns(make_engine, target, {"": (None, 0)} | dict(drafters), prompts, sampling, apart)

    def summed(runs: Turns[str], asked: Sequence[EnginePrompt], greedy: bool) -> dict[str, Confirmation]:
        engine, found = runs.judge("" if greedy else next(iter(drafters))), {}
        for name, (_, gamma) in drafters.items():
            if any(result.rounds for result in runs.results[name]):
                result = summarise(engine, gamma, asked, runs.results[""], runs.results[name], greedy=greedy, seed=seed)
                found[name] = dataclasses.replace(result, **_terms(runs.steps[name], gamma))
        return found

    return run.go(summed, progress)


def _summaries(
    engine: Engine,
    gammas: Sequence[int],
    prompts: Sequence[EnginePrompt],
    results: dict[int, list[GenerationResult]],
    steps: dict[int, list[EngineStep]],
    greedy: bool,
    seed: int,
) -> dict[int, Confirmation]:
    found = {}
    for gamma in gammas:
        result = summarise(engine, gamma, prompts, results[0], results[gamma], greedy=greedy, seed=seed)
        found[gamma] = dataclasses.replace(result, **_terms(steps[gamma], gamma))
    if len(found) > 1:
        best = max(found.values(), key=lambda item: item.speedup.value)
        ratios = np.array([_ratios(results[0], results[gamma]) for gamma in found])  # [gammas, prompts]
        shared = ratios[:, ~np.isnan(ratios).any(axis=0)]
        if shared.size:
            cost = choice_cost(shared, tuple(found), best.gamma, seed)
            low, high = best.speedup_interval
            found[best.gamma] = dataclasses.replace(best, best_of=cost, speedup_interval=(low - cost.optimism, high))
    return found


def choice_cost(ratios: np.ndarray, gammas: tuple[int, ...], best: int, seed: int = 0) -> BestOf:
    """How much choosing the best median flatters, by a bootstrap over prompts that repeats the choice.

    `ratios` [gammas, prompts]: speed-up of each prompt at each gamma. In every draw of prompts the gamma with the highest median
    is chosen anew; how much higher that median is than the same gamma's over all prompts is what the choice gained by chance.
    Its mean over the draws is the optimism (Efron 1983), 0 at least.
    """
    draws = np.random.default_rng(seed).integers(0, ratios.shape[1], (_BOOTSTRAP_REPEATS, ratios.shape[1]))
    medians = np.median(ratios[:, draws], axis=2)  # [gammas, repeats]
    winners = medians.argmax(axis=0)
    gained = medians[winners, np.arange(_BOOTSTRAP_REPEATS)] - np.median(ratios, axis=1)[winners]
    return BestOf(gammas, max(0.0, float(gained.mean())), float((winners == gammas.index(best)).mean()))


def _terms(steps: Sequence[EngineStep], gamma: int) -> dict[str, Any]:
    """Medians over whole rounds of what the engine told of its passes; {} where it does not."""
    whole = [
        step
        for step in steps
        if not step.prefill
        and step.target_s is not None
        and step.target_tokens == gamma + 1
        and len(step.draft_s) in (gamma, 1)  # one for all tokens where they are proposed in one go
    ]
    if not whole:
        return {}
    return {
        "draft_s": float(np.median([sum(step.draft_s) for step in whole])),
        "verify_s": float(np.median([step.target_s or 0.0 for step in whole])),
        "rest_s": float(np.median([step.other_s or 0.0 for step in whole])),
    }


def summarise(
    engine: Engine,
    gamma: int,
    prompts: Sequence[EnginePrompt],
    alone: Sequence[GenerationResult],
    assisted: Sequence[GenerationResult],
    *,
    greedy: bool = True,
    seed: int = 0,
) -> Confirmation:
    """Counts and times of the same prompts, alone and assisted, as one Confirmation. `engine`: a started one, for tied logits.

    Raises RunFailed where no whole round was seen, or every answer ended in its first.
    """
    if not sum(result.rounds for result in assisted):
        raise RunFailed(
            f"no whole round of gamma {gamma} was seen; allow more new tokens than {gamma + 1} or use a smaller gamma"
        )
    accepted = np.array([result.accepted for result in assisted], float)
    rejected = np.array([result.rejected for result in assisted], float)
    rounds = np.array([result.rounds for result in assisted], float)
    by_position = np.array([result.accepted_by_position for result in assisted], float).sum(0) / rounds.sum()
    base_s, base_tokens = _decode_window(alone)
    fast_s, fast_tokens = _decode_window(assisted)
    usable = (base_tokens > 0) & (fast_tokens > 0)  # an answer that ended in its first round has no decode window
    if not usable.any():
        raise RunFailed("every answer ended in its first round: nothing to time; use prompts with longer answers")
    ratios = _ratios(alone, assisted)[usable]
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(prompts), (_BOOTSTRAP_REPEATS, len(prompts)))
    timed = rng.integers(0, len(ratios), (_BOOTSTRAP_REPEATS, len(ratios)))  # prompts with a decode window [repeats, usable]
    median_draws = np.median(ratios[timed], axis=1)
    sums = [part[usable][timed].sum(axis=1) for part in (base_s, base_tokens, fast_s, fast_tokens)]
    pooled_draws = (sums[0] / sums[1]) / (sums[2] / sums[3])
    quantiles = np.quantile([median_draws, pooled_draws], [0.05, 0.95], axis=1)  # [5 % and 95 %, median and pooled]
    low, high = quantiles[0].min(), quantiles[1].max()
    whole_request = [sum(result.seconds for result in group) / _tokens(group) for group in (alone, assisted)]
    return Confirmation(
        engine=engine.name,
        engine_version=engine.version,
        gamma=gamma,
        prompts=len(prompts),
        tokens=_tokens(assisted),
        rounds=int(rounds.sum()),
        alpha=_ratio_estimate(accepted, accepted + rejected, draws),
        accepted_by_position=tuple(float(share) for share in by_position),
        tau=_ratio_estimate(accepted + rounds, rounds, draws),
        baseline_tokens_per_s=float(base_tokens.sum() / base_s.sum()),
        tokens_per_s=float(fast_tokens.sum() / fast_s.sum()),
        speedup=Estimate(float(np.median(ratios)), float(median_draws.std()), "measured"),
        speedup_interval=(float(low), float(high)),
        speedup_pooled=float((base_s.sum() / base_tokens.sum()) / (fast_s.sum() / fast_tokens.sum())),
        speedup_end_to_end=whole_request[0] / whole_request[1],
        decode_s=float(np.median(base_s[base_tokens > 0] / base_tokens[base_tokens > 0])),
        round_s=_median_round_s(assisted),
        identical_output=_identity(engine, prompts, alone, assisted) if greedy else Identity(0, 0),
        categories=_categories(prompts, alone, assisted),
        per_prompt_speedup=tuple(float(ratio) for ratio in ratios),
        **_per_step(assisted),
    )


def _per_step(assisted: Sequence[GenerationResult]) -> dict[str, Any]:
    """Tokens a pass of the target, and the share of passes that are whole rounds; {} where passes are not told apart."""
    passes = sum(len(result.gaps_s) for result in assisted)
    if not passes:
        return {}
    rounds = min(sum(result.rounds for result in assisted), passes)
    return {"tokens_per_step": sum(result.decode_tokens for result in assisted) / passes, "drafting_share": rounds / passes}


def _tokens(results: Sequence[GenerationResult]) -> int:
    return sum(len(result.token_ids) for result in results)


def _decode_window(results: Sequence[GenerationResult]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and tokens [prompts] after each request's first tokens."""
    seconds = np.array([result.decode_seconds for result in results], float)
    return seconds, np.array([result.decode_tokens for result in results], float)


def _ratios(alone: Sequence[GenerationResult], assisted: Sequence[GenerationResult]) -> np.ndarray:
    """Time per token alone / with the draft [prompts]; nan for an answer that ended in its first round."""
    base_s, base_tokens = _decode_window(alone)
    fast_s, fast_tokens = _decode_window(assisted)
    usable = (base_tokens > 0) & (fast_tokens > 0)
    ratios = np.full(len(alone), np.nan)
    ratios[usable] = (base_s[usable] / base_tokens[usable]) / (fast_s[usable] / fast_tokens[usable])
    return ratios


def _median_round_s(assisted: Sequence[GenerationResult]) -> float:
    """Median seconds of a whole round; a request's first, which holds the prefill, is left out. 0 when there was no other."""
    gaps = [gap for result in assisted for gap in result.gaps_s[: max(0, result.rounds - 1)]]
    return float(np.median(gaps)) if gaps else 0.0


def _ratio_estimate(numerator: np.ndarray, denominator: np.ndarray, draws: np.ndarray) -> Estimate:
    """sum / sum over prompts, std over bootstrap draws [repeats, prompts] of prompts."""
    below = denominator[draws].sum(1)
    repeats = numerator[draws].sum(1)[below > 0] / below[below > 0]
    return Estimate(float(numerator.sum() / denominator.sum()), float(repeats.std()), "measured")


def _categories(
    prompts: Sequence[EnginePrompt], alone: Sequence[GenerationResult], assisted: Sequence[GenerationResult]
) -> dict[str, CategoryResult]:
    categories: dict[str, CategoryResult] = {}
    for category in sorted({prompt.category for prompt in prompts if prompt.category}):
        members = [index for index, prompt in enumerate(prompts) if prompt.category == category]
        base_s, base_tokens = _decode_window([alone[index] for index in members])
        fast = [assisted[index] for index in members]
        fast_s, fast_tokens = _decode_window(fast)
        accepted, rejected = sum(result.accepted for result in fast), sum(result.rejected for result in fast)
        rounds = sum(result.rounds for result in fast)
        usable = (base_tokens > 0) & (fast_tokens > 0)
        if rounds and usable.any():
            ratios = (base_s[usable] / base_tokens[usable]) / (fast_s[usable] / fast_tokens[usable])
            categories[category] = CategoryResult(
                len(members), accepted / (accepted + rejected), (accepted + rounds) / rounds, float(np.median(ratios))
            )
    return categories


def _identity(
    engine: Engine, prompts: Sequence[EnginePrompt], alone: Sequence[GenerationResult], assisted: Sequence[GenerationResult]
) -> Identity:
    differences = []
    for prompt, base, fast in zip(prompts, alone, assisted, strict=True):
        if base.token_ids == fast.token_ids:
            continue
        common = min(len(base.token_ids), len(fast.token_ids))
        position = next((i for i in range(common) if base.token_ids[i] != fast.token_ids[i]), common)
        tokens = [result.token_ids[position] if position < len(result.token_ids) else None for result in (base, fast)]
        logits: list[float | None] = [None, None]
        if tokens[0] is not None and tokens[1] is not None:
            prefix = (*prompt.token_ids, *base.token_ids[:position])
            logits = list(engine.token_logits(prefix, [tokens[0], tokens[1]]))
        differences.append(Difference(prompt.prompt_id, position, *tokens, *logits))
    return Identity(len(prompts), len(prompts) - len(differences), tuple(differences))


def exactness_check(
    make_engine: Callable[[], Engine],
    target: ModelSource,
    draft: ModelSource,
    gamma: int,
    prompts: Sequence[EnginePrompt],
    *,
    max_new_tokens: int = 32,
    progress: Progress | None = None,
) -> Identity:
    """Greedy output with and without the draft on a few prompts. Give float32 modules (or an engine that loads float32).

    In float32 ties are too rare to matter, so every answer must be identical; in bfloat16 use `Confirmation.identical_output`,
    which shows the ties.
    """
    sampling = Sampling(max_new_tokens=max_new_tokens)
    answers = []
    for number, gamma_used in enumerate((0, gamma)):
        engine = make_engine()
        engine.start(target, draft if gamma_used else None, gamma_used)
        try:
            rows: list[GenerationResult] = []
            for index, prompt in enumerate(prompts):
                rows += engine.generate([prompt], sampling)
                report(progress, "exactness in float32", number * len(prompts) + index + 1, 2 * len(prompts))
            answers.append(rows)
            if gamma_used:
                accepted, rejected = sum(row.accepted for row in rows), sum(row.rejected for row in rows)
                alpha = accepted / (accepted + rejected) if accepted + rejected else None
                return dataclasses.replace(_identity(engine, prompts, answers[0], answers[1]), alpha=alpha)
        finally:
            engine.stop()
    raise AssertionError("unreachable")
