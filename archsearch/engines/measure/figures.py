"""What a plan shows, in figures: prompt by prompt, or with several requests in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from archsearch.engines.engine import Chained, GenerationResult
from archsearch.engines.measure.results import (
    BestOf,
    ByPrompt,
    CategoryResult,
    Difference,
    Identity,
    ScheduleVerdict,
    UnderLoad,
)
from archsearch.engines.measure.turns import Case, Trace, Turn, Variant, bootstrap, pass_times
from archsearch.errors import RunFailed
from archsearch.estimate import Array, Estimate
from archsearch.latency.engine_passes import START_STD

Results = dict[Case, UnderLoad]
NOTHING_TIMED = (
    "every answer ended in its first round: nothing to time; use prompts with longer answers"
)

# Columns of the counts of prompts: seconds and tokens after each request's first ones, alone and
# with the drafter; verdicts of draft tokens; whole rounds.
_BASE_S, _BASE_N, _FAST_S, _FAST_N, _ACCEPTED, _REJECTED, _ROUNDS = range(7)


def by_prompt(trace: Trace) -> dict[str, ByPrompt]:
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
    return {variant.name: _by_prompt(trace, variant) for variant in variants}


def best_of_gammas(trace: Trace) -> dict[str, ByPrompt]:
    """As `by_prompt`, for one draft at several gammas: the best of them bears what being picked
    adds by chance. A draft that stops where unsure is not picked from."""
    found = by_prompt(trace)
    stops = {each.name for each in trace.plan.drafting if isinstance(each.draft, Chained)}
    fixed = [name for name in found if name not in stops]
    if len(fixed) < 2:
        return found
    name = max(fixed, key=lambda each: found[each].speedup.value)
    best = found[name]
    ratios = np.array([_ratios(_counts(trace, each)) for each in fixed])  # [gammas, prompts]
    shared = ratios[:, ~np.isnan(ratios).any(axis=0)]
    if shared.size:
        gammas = tuple(found[each].gamma for each in fixed)
        cost = choice_cost(shared, gammas, best.gamma, trace.plan.seed)
        low, high = best.interval
        interval = (low - cost.optimism, high)
        found[name] = dataclasses.replace(best, best_of=cost, speedup_interval=interval)
    return found


def choice_cost(ratios: Array, gammas: tuple[int, ...], best: int, seed: int) -> BestOf:
    """How much choosing the best median flatters, by a bootstrap over prompts that repeats the
    choice.

    `ratios` [gammas, prompts]: speed-up of each prompt at each gamma. In every draw of prompts the
    gamma with the highest median is chosen anew; how much higher that median is than the same
    gamma's over all prompts is chance, and its mean the optimism (Efron 1983), 0 at least.
    """
    draws, _ = bootstrap(ratios[0], seed)
    medians = np.median(ratios[:, draws], axis=2)  # [gammas, repeats]
    winners = medians.argmax(axis=0)
    gained = medians.max(axis=0) - np.median(ratios, axis=1)[winners]
    again = float((winners == gammas.index(best)).mean())
    return BestOf(gammas, max(0.0, float(gained.mean())), again)


def _by_prompt(trace: Trace, variant: Variant) -> ByPrompt:
    plan = trace.plan
    alone, assisted = trace.results(plan.alone.name), trace.results(variant.name)
    counts = _counts(trace, variant.name)
    ratios = _ratios(counts)
    timed = counts[~np.isnan(ratios)]
    ratios = ratios[~np.isnan(ratios)]
    if not len(ratios):
        raise RunFailed(NOTHING_TIMED)
    places, medians = bootstrap(ratios, plan.seed)
    pooled = _pooled(timed[places].sum(axis=1))
    quantiles = np.quantile([medians, pooled], [0.05, 0.95], axis=1)  # [5 and 95 %, both ways]
    sums, drawn = counts.sum(axis=0), counts[bootstrap(counts[:, 0], plan.seed)[0]].sum(axis=1)
    whole = [sum(each.seconds for each in some) / _tokens(some) for some in (alone, assisted)]
    gaps = [gap for result in assisted for gap in result.gaps_s[: max(0, result.rounds - 1)]]
    passes = sum(len(result.gaps_s) for result in assisted)
    rounds = int(sums[_ROUNDS])
    plain = counts[counts[:, _BASE_N] > 0]
    steps = [
        step
        for turn in trace.turns[variant.name, 1]
        for step in turn.full
        if step.target_tokens == variant.gamma + 1
    ]
    draft_s, verify_s, rest_s = pass_times(steps)
    return ByPrompt(
        engine=trace.engine,
        engine_version=trace.version,
        gamma=variant.gamma,
        prompts=len(assisted),
        tokens=_tokens(assisted),
        rounds=rounds,
        alpha=_estimate(sums, drawn, (_ACCEPTED,), (_ACCEPTED, _REJECTED)),
        accepted_by_position=_by_position(assisted),
        tau=_estimate(sums, drawn, (_ACCEPTED, _ROUNDS), (_ROUNDS,)),
        baseline_tokens_per_s=float(sums[_BASE_N] / sums[_BASE_S]),
        tokens_per_s=float(sums[_FAST_N] / sums[_FAST_S]),
        speedup=_median(ratios, medians),
        speedup_interval=(float(quantiles[0].min()), float(quantiles[1].max())),
        speedup_pooled=float(_pooled(sums)),
        speedup_end_to_end=whole[0] / whole[1],
        decode_s=float(np.median(plain[:, _BASE_S] / plain[:, _BASE_N])),
        round_s=float(np.median(gaps)) if gaps else 0.0,
        identical_output=_identity(trace, variant) if trace.logits else Identity(0, 0),
        categories=_categories([prompt.category for prompt in trace.prompts], counts),
        per_prompt_speedup=tuple(map(float, ratios)),
        draft_s=draft_s,
        verify_s=verify_s,
        rest_s=rest_s,
        tokens_per_step=float(sums[_FAST_N] / passes) if passes else None,
        drafting_share=min(rounds, passes) / passes if passes else None,
    )


def _counts(trace: Trace, variant: str) -> Array:
    """[prompts, columns] of a variant beside the target alone."""
    pairs = zip(trace.results(trace.plan.alone.name), trace.results(variant), strict=True)
    rows = [
        (
            *(base.decode_seconds, base.decode_tokens, fast.decode_seconds, fast.decode_tokens),
            *(fast.accepted, fast.rejected, fast.rounds),
        )
        for base, fast in pairs
    ]
    return np.array(rows, float)


def _ratios(counts: Array) -> Array:
    """Time per token alone / with the drafter [prompts]; nan for an answer that ended in its first
    round."""
    usable = (counts[:, _BASE_N] > 0) & (counts[:, _FAST_N] > 0)
    ratios = np.full(len(counts), np.nan)
    ratios[usable] = _pooled(counts[usable])
    return ratios


def _pooled(counts: Array) -> Array:
    """Time per token alone / with the drafter of counts [..., columns]."""
    base, fast = (
        counts[..., s] / counts[..., n] for s, n in ((_BASE_S, _BASE_N), (_FAST_S, _FAST_N))
    )
    return base / fast


def _median(values: Array, medians: Array) -> Estimate:
    return Estimate(float(np.median(values)), float(medians.std()), "measured")


def _estimate(sums: Array, drawn: Array, above: Sequence[int], below: Sequence[int]) -> Estimate:
    """A ratio of sums over prompts of columns, its std over bootstrap draws [draws, columns]."""
    bottom = drawn[:, below].sum(axis=1)
    repeats = drawn[bottom > 0][:, above].sum(axis=1) / bottom[bottom > 0]
    value = sums[list(above)].sum() / sums[list(below)].sum()
    return Estimate(float(value), float(repeats.std()), "measured")


def _by_position(results: Sequence[GenerationResult]) -> tuple[float, ...]:
    sums = np.zeros(max((len(each.accepted_by_position) for each in results), default=0))
    for each in results:
        sums[: len(each.accepted_by_position)] += each.accepted_by_position
    rounds = sum(each.rounds for each in results)
    return tuple(map(float, sums / rounds)) if rounds else ()


def _tokens(results: Sequence[GenerationResult]) -> int:
    return sum(len(result.token_ids) for result in results)


def _categories(names: Sequence[str | None], counts: Array) -> dict[str, CategoryResult]:
    found = {}
    for name in sorted({name for name in names if name}):
        own = counts[[each == name for each in names]]
        ratios, sums = _ratios(own), own.sum(axis=0)
        if sums[_ROUNDS] and not np.isnan(ratios).all():
            found[name] = CategoryResult(
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
    answers = zip(trace.results(trace.plan.alone.name), trace.results(variant.name), strict=True)
    for prompt, (base, fast) in zip(trace.prompts, answers, strict=True):
        if base.token_ids == fast.token_ids:
            continue
        common = min(len(base.token_ids), len(fast.token_ids))
        same = (base.token_ids[i] == fast.token_ids[i] for i in range(common))
        position = next((i for i, equal in enumerate(same) if not equal), common)
        one, other = (dict(enumerate(answer.token_ids)).get(position) for answer in (base, fast))
        logits: tuple[float, ...] = ()
        if trace.logits is not None and one is not None and other is not None:
            prefix = (*prompt.token_ids, *base.token_ids[:position])
            alone, draft = trace.logits(prefix, [one, other])
            logits = (alone, draft, alone - draft)
        differences.append(Difference(prompt.prompt_id, position, one, other, *logits))
    asked = len(trace.prompts)
    return Identity(asked, asked - len(differences), tuple(differences))


def under_load(trace: Trace) -> Results:
    """Every variant at every concurrency."""
    return {
        (variant.name, number): _under_load(trace, variant, number)
        for variant in trace.plan.variants
        for number in trace.plan.concurrencies
    }


def token_s(turn: Turn) -> float:
    """Seconds a token of one request in a turn. Raises RunFailed where nothing shows them."""
    if turn.full:
        seconds = sum(step.seconds for step in turn.full)
        return seconds / sum(step.written for step in turn.full) * turn.concurrency
    if any(turn.calls):
        raise RunFailed(
            f"no step with all {turn.concurrency} requests in it was seen; answers are too short or"
            " differ too much in length: allow more new tokens or a lower concurrency"
        )
    tokens = sum(result.decode_tokens for result in turn.results)
    if not tokens:
        raise RunFailed(NOTHING_TIMED)
    return sum(result.decode_seconds for result in turn.results) / tokens


def _under_load(trace: Trace, variant: Variant, concurrency: int) -> UnderLoad:
    def times_of(name: str) -> Array:
        return np.array([token_s(turn) for turn in trace.turns[name, concurrency]])

    turns, times = trace.turns[variant.name, concurrency], times_of(variant.name)
    speedup = interval = None
    drafts = variant.draft is not None
    if drafts:
        ratios = times_of(trace.plan.alone.name) / times
        _, medians = bootstrap(ratios, trace.plan.seed)
        low, high = np.quantile(medians, [0.05, 0.95])
        speedup, interval = _median(ratios, medians), (float(low), float(high))
    results = [result for turn in turns for result in turn.results]
    steps = [step for turn in turns for step in turn.full]
    rounds, accepted, rejected = (
        sum(getattr(result, name) for result in results)
        for name in ("rounds", "accepted", "rejected")
    )
    timed = sum(step.batch for step in steps)
    tau = sum(step.written for step in steps) / timed if timed else 1.0 + accepted / max(1, rounds)
    draft_s, target_s, rest_s = pass_times(steps)
    one_gamma = drafts and not variant.schedule and accepted + rejected > 0
    return UnderLoad(
        variant=variant.name,
        concurrency=concurrency,
        gamma=variant.gamma_at(concurrency) if drafts else 0,
        engine_version=trace.version,
        repeats=len(times),
        batch_steps=len(steps),
        tokens_per_s=concurrency / float(np.median(times)),
        tau=float(tau) if drafts else 1.0,
        alpha=accepted / (accepted + rejected) if one_gamma else None,
        accepted_by_position=_by_position(results),
        speedup=speedup,
        speedup_interval=interval,
        step_s=float(np.median([step.seconds for step in steps] or times)),
        target_s=target_s,
        draft_s=draft_s,
        rest_s=rest_s,
        repeats_s=tuple(map(float, times)),
    )


def schedule_verdict(
    results: Results, schedule: str, fixed: Sequence[str], concurrencies: Iterable[int]
) -> list[ScheduleVerdict]:
    """The verdict at each concurrency.

    Each setting is a process of its own, so START_STD is in the margin: the same gamma in two
    starts differs by that much.
    """
    rows = []
    for number in concurrencies:
        own = results[schedule, number]
        others = {"off": Estimate(1.0, 0.0, "measured")}
        others |= {name: results[name, number].gain for name in fixed}
        best = max(others, key=lambda name: others[name].value)
        starts = START_STD * own.gain.value * (1.0 if best == "off" else 2.0**0.5)
        margin = 2.0 * float(np.hypot(np.hypot(own.gain.std, others[best].std), starts))
        holds = own.gain.value >= others[best].value - margin
        rows.append(ScheduleVerdict(number, own.gamma, own.gain, best, others[best], margin, holds))
    return rows


def overall_speedups(
    results: Results, names: Sequence[str], concurrencies: Sequence[int]
) -> dict[str, float]:
    """The geometric mean of each variant's speed-up over the concurrencies, and `off` = 1: one
    setting for all loads."""
    gains = {name: [results[name, number].gain.value for number in concurrencies] for name in names}
    return {"off": 1.0} | {name: float(np.exp(np.log(v).mean())) for name, v in gains.items()}
