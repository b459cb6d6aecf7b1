"""What a plan shows that asks prompt by prompt: target alone against target + drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from archsearch.engines.engine import EnginePrompt, GenerationResult
from archsearch.engines.measure.results import (
    BestOf,
    CategoryResult,
    Confirmation,
    Difference,
    Identity,
)
from archsearch.engines.measure.turns import Trace, Variant, bootstrap, pass_times
from archsearch.errors import RunFailed
from archsearch.estimate import Estimate

# Columns of the counts of prompts: seconds and tokens after each request's first ones, alone and
# with the drafter; verdicts of draft tokens; whole rounds.
_BASE_S, _BASE_N, _FAST_S, _FAST_N, _ACCEPTED, _REJECTED, _ROUNDS = range(7)


def confirmations(trace: Trace) -> dict[str, Confirmation]:
    """What every drafting variant came to; one that proposed nothing in any whole round (lookup may
    find nothing) is left out. Raises RunFailed where none did, or nothing can be timed."""
    variants = [
        variant
        for variant in trace.plan.drafting
        if any(result.rounds for result in trace.results(variant.name))
    ]
    if not variants:
        gamma = min(variant.gamma for variant in trace.plan.drafting)
        raise RunFailed(
            f"no whole round of gamma {gamma} was seen; allow more new tokens than {gamma + 1} or "
            "use a smaller gamma"
        )
    return {variant.name: _confirmation(trace, variant) for variant in variants}


def best_of_gammas(trace: Trace) -> dict[str, Confirmation]:
    """As `confirmations`, for one draft at several gammas: the best of them bears what being picked
    adds by chance."""
    found = confirmations(trace)
    if len(found) < 2:
        return found
    name = max(found, key=lambda each: found[each].speedup.value)
    best = found[name]
    ratios = np.array([_ratios(_counts(trace, each)) for each in found])  # [gammas, prompts]
    shared = ratios[:, ~np.isnan(ratios).any(axis=0)]
    if shared.size:
        gammas = tuple(each.gamma for each in found.values())
        cost = choice_cost(shared, gammas, best.gamma, trace.plan.seed)
        low, high = best.interval
        interval = (low - cost.optimism, high)
        found[name] = dataclasses.replace(best, best_of=cost, speedup_interval=interval)
    return found


def choice_cost(ratios: np.ndarray, gammas: tuple[int, ...], best: int, seed: int = 0) -> BestOf:
    """How much choosing the best median flatters, by a bootstrap over prompts that repeats the
    choice.

    `ratios` [gammas, prompts]: speed-up of each prompt at each gamma. In every draw of prompts the
    gamma with the highest median is chosen anew; how much higher that median is than the same
    gamma's over all prompts is what the choice gained by chance. Its mean over the draws is the
    optimism (Efron 1983), 0 at least.
    """
    draws, _ = bootstrap(ratios[0], seed)
    medians = np.median(ratios[:, draws], axis=2)  # [gammas, repeats]
    winners = medians.argmax(axis=0)
    gained = medians.max(axis=0) - np.median(ratios, axis=1)[winners]
    again = float((winners == gammas.index(best)).mean())
    return BestOf(gammas, max(0.0, float(gained.mean())), again)


def _confirmation(trace: Trace, variant: Variant) -> Confirmation:
    """Counts and times of the same prompts, alone and with a drafter."""
    assisted, plan = trace.results(variant.name), trace.plan
    counts = _counts(trace, variant.name)
    ratios = _ratios(counts)
    timed = counts[~np.isnan(ratios)]
    ratios = ratios[~np.isnan(ratios)]
    if not len(ratios):
        raise RunFailed(
            "every answer ended in its first round: nothing to time; use prompts with longer"
            " answers"
        )
    places, medians = bootstrap(ratios, plan.seed)
    pooled = _pooled(timed[places].sum(axis=1))
    quantiles = np.quantile([medians, pooled], [0.05, 0.95], axis=1)  # [5 and 95 %, both ways]
    sums, drawn = counts.sum(axis=0), counts[bootstrap(counts[:, 0], plan.seed)[0]].sum(axis=1)
    whole = [
        sum(result.seconds for result in each) / _tokens(each)
        for each in (trace.results(plan.alone.name), assisted)
    ]
    gaps = [gap for result in assisted for gap in result.gaps_s[: max(0, result.rounds - 1)]]
    passes = sum(len(result.gaps_s) for result in assisted)
    by_position = np.array([result.accepted_by_position for result in assisted], float).sum(0)
    rounds = float(sums[_ROUNDS])
    alone = counts[counts[:, _BASE_N] > 0]
    steps = [
        step
        for turn in trace.turns[variant.name, 1]
        for step in turn.full
        if step.target_tokens == variant.gamma + 1
    ]
    draft_s, verify_s, rest_s = pass_times(steps)
    return Confirmation(
        engine=trace.engine,
        engine_version=trace.version,
        gamma=variant.gamma,
        prompts=len(assisted),
        tokens=_tokens(assisted),
        rounds=int(rounds),
        alpha=_estimate(sums, drawn, (_ACCEPTED,), (_ACCEPTED, _REJECTED)),
        accepted_by_position=tuple(map(float, by_position / rounds)),
        tau=_estimate(sums, drawn, (_ACCEPTED, _ROUNDS), (_ROUNDS,)),
        baseline_tokens_per_s=float(sums[_BASE_N] / sums[_BASE_S]),
        tokens_per_s=float(sums[_FAST_N] / sums[_FAST_S]),
        speedup=Estimate(float(np.median(ratios)), float(medians.std()), "measured"),
        speedup_interval=(float(quantiles[0].min()), float(quantiles[1].max())),
        speedup_pooled=float(_pooled(sums)),
        speedup_end_to_end=whole[0] / whole[1],
        decode_s=float(np.median(alone[:, _BASE_S] / alone[:, _BASE_N])),
        round_s=float(np.median(gaps)) if gaps else 0.0,
        identical_output=_identity(trace, variant) if trace.logits else Identity(0, 0),
        categories=_categories(trace.prompts, counts),
        per_prompt_speedup=tuple(map(float, ratios)),
        draft_s=draft_s,
        verify_s=verify_s,
        rest_s=rest_s,
        tokens_per_step=float(sums[_FAST_N] / passes) if passes else None,
        drafting_share=min(rounds, passes) / passes if passes else None,
    )


def _counts(trace: Trace, variant: str) -> np.ndarray:
    """[prompts, columns] of a variant beside the target alone."""
    pairs = zip(trace.results(trace.plan.alone.name), trace.results(variant), strict=True)
    return np.array(
        [
            (
                base.decode_seconds,
                base.decode_tokens,
                fast.decode_seconds,
                fast.decode_tokens,
                fast.accepted,
                fast.rejected,
                fast.rounds,
            )
            for base, fast in pairs
        ],
        float,
    )


def _ratios(counts: np.ndarray) -> np.ndarray:
    """Time per token alone / with the drafter [prompts]; nan for an answer that ended in its first
    round."""
    usable = (counts[:, _BASE_N] > 0) & (counts[:, _FAST_N] > 0)
    ratios = np.full(len(counts), np.nan)
    ratios[usable] = _pooled(counts[usable])
    return ratios


def _pooled(counts: np.ndarray) -> np.ndarray:
    """Time per token alone / with the drafter of counts [..., columns]."""
    base, fast = (
        counts[..., s] / counts[..., n] for s, n in ((_BASE_S, _BASE_N), (_FAST_S, _FAST_N))
    )
    return base / fast


def _estimate(
    sums: np.ndarray, drawn: np.ndarray, above: Sequence[int], below: Sequence[int]
) -> Estimate:
    """A ratio of sums over prompts of columns, its std over bootstrap draws [draws, columns]."""
    bottom = drawn[:, below].sum(axis=1)
    repeats = drawn[bottom > 0][:, above].sum(axis=1) / bottom[bottom > 0]
    value = sums[list(above)].sum() / sums[list(below)].sum()
    return Estimate(float(value), float(repeats.std()), "measured")


def _tokens(results: Sequence[GenerationResult]) -> int:
    return sum(len(result.token_ids) for result in results)


def _categories(prompts: Sequence[EnginePrompt], counts: np.ndarray) -> dict[str, CategoryResult]:
    found = {}
    for category in sorted({prompt.category for prompt in prompts if prompt.category}):
        own = counts[[prompt.category == category for prompt in prompts]]
        ratios, sums = _ratios(own), own.sum(axis=0)
        if sums[_ROUNDS] and not np.isnan(ratios).all():
            found[category] = CategoryResult(
                len(own),
                float(sums[_ACCEPTED] / (sums[_ACCEPTED] + sums[_REJECTED])),
                float((sums[_ACCEPTED] + sums[_ROUNDS]) / sums[_ROUNDS]),
                float(np.nanmedian(ratios)),
            )
    return found


def identities(trace: Trace) -> dict[str, Identity]:
    """Whether the answers of every drafting variant are the target's own, token by token, and alpha
    of these runs. In float32 ties are too rare to matter, so every answer must be."""
    found = {}
    for variant in trace.plan.drafting:
        accepted, rejected = _counts(trace, variant.name)[:, [_ACCEPTED, _REJECTED]].sum(axis=0)
        alpha = float(accepted / (accepted + rejected)) if accepted + rejected else None
        found[variant.name] = dataclasses.replace(_identity(trace, variant), alpha=alpha)
    return found


def _identity(trace: Trace, variant: Variant) -> Identity:
    differences = []
    pairs = zip(
        trace.prompts,
        trace.results(trace.plan.alone.name),
        trace.results(variant.name),
        strict=True,
    )
    for prompt, base, fast in pairs:
        if base.token_ids == fast.token_ids:
            continue
        common = min(len(base.token_ids), len(fast.token_ids))
        same = (base.token_ids[i] == fast.token_ids[i] for i in range(common))
        position = next((i for i, equal in enumerate(same) if not equal), common)
        one, other = (dict(enumerate(answer.token_ids)).get(position) for answer in (base, fast))
        found = Difference(prompt.prompt_id, position, one, other)
        if trace.logits is not None and one is not None and other is not None:
            prefix = (*prompt.token_ids, *base.token_ids[:position])
            alone, draft = trace.logits(prefix, [one, other])
            found = Difference(prompt.prompt_id, position, one, other, alone, draft, alone - draft)
        differences.append(found)
    asked = len(trace.prompts)
    return Identity(asked, asked - len(differences), tuple(differences))
