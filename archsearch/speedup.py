"""The mathematics of speculation. Seconds and probabilities in, numbers out.

    speedup = tau * decode_s / (draft_s + verify_s + overhead_s)
    tau = (1 - alpha^(gamma + 1)) / (1 - alpha)

`alpha` is the chance that a draft token is accepted given that all before it in its block were,
`gamma` the draft tokens per verification, `tau` the mean tokens per verification with the target's
own token included ("TAR" in arXiv 2402.01528, "mean acceptance length" elsewhere). tau and its
closed form: Leviathan et al., arXiv 2211.17192, eq. 1. All times are seconds per round: `draft_s`
for all gamma draft tokens, `verify_s` one target pass on gamma + 1 tokens, `decode_s` one target
pass on 1 token.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Final

from archsearch.estimate import QUANTILE_95, Array, Estimate, N, Numbers, weakest_source

ALPHA_LIMITS: Final = (0.002, 0.998)  # beyond these a measured alpha says nothing about its logit

# The largest gamma that is looked at unless someone says otherwise.
MAX_GAMMA: Final = 16
# Acceptance that rises along a block was measured over so many positions (n-gram, vLLM pull request
# 24344: .81 .91 .95 .97 .97).
RISING_POSITIONS: Final = 5


def _check_alpha(alpha: Numbers) -> None:
    within = (alpha >= 0.0) & (alpha <= 1.0)
    if not (within if isinstance(within, bool) else within.all()):
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")


def _check_gamma(gamma: int) -> None:
    if gamma < 0:
        raise ValueError(f"gamma must be at least 0, got {gamma}")


# odds(alpha) = 1.4 KL^-.87, to .12 logit from .43 to 5.2 nats: one public pair of drafts
# (huggingface pdhinaka/specviz-tinystories) and six of this project's own. Greedy and sampled
# alike.
DIVERGENCE_ODDS: Final = 1.4
DIVERGENCE_POWER: Final = 0.87
DIVERGENCE_STD: Final = 0.12
DIVERGENCE_RANGE: Final = (0.43, 5.2)


def alpha_of_divergence(nats: float) -> float:
    """alpha of a draft whose distribution lies `nats` a token (Kullback-Leibler divergence, target
    from draft) from its target's, on text that the target wrote. Raises ValueError for a negative
    one."""
    if nats < 0:
        raise ValueError(f"a divergence is not negative, got {nats}")
    if nats == 0:
        return 1.0
    return sigmoid(math.log(DIVERGENCE_ODDS) - DIVERGENCE_POWER * math.log(nats))


def logit(probability: float) -> float:
    """Log-odds of a probability, kept off 0 and 1, where they are not finite."""
    kept = clamped(probability)
    return math.log(kept / (1.0 - kept))


def sigmoid(value: float) -> float:
    """The inverse of `logit`; does not overflow."""
    if value >= 0:
        return 1.0 / (1.0 + math.exp(-value))
    return math.exp(value) / (1.0 + math.exp(value))


def clamped(alpha: float) -> float:
    """alpha kept off 0 and 1, where its logit is not finite."""
    return min(max(alpha, ALPHA_LIMITS[0]), ALPHA_LIMITS[1])


def logit_std(alpha: Estimate) -> float:
    """Std of logit(alpha), to first order: std / (alpha * (1 - alpha))."""
    value = clamped(alpha.value)
    return alpha.std / (value * (1.0 - value))


def alpha_estimate(level: float, std: float, source: str) -> Estimate:
    """alpha from its logit and the std of that: the inverse of `logit` and `logit_std`."""
    value = sigmoid(level)
    return Estimate(value, value * (1.0 - value) * std, source)


def moved(alpha: Estimate, level: float, std: float) -> Estimate:
    """alpha with its logit moved by `level`, which is known to `std`."""
    spread = math.hypot(logit_std(alpha), std)
    return alpha_estimate(logit(alpha.value) + level, spread, alpha.source)


# --- tokens per round


def tau(alpha: float, gamma: int) -> float:
    """Mean tokens per verification, bonus token included, for a constant alpha (arXiv 2211.17192
    eq. 1).

    Summed term by term, so that alpha = 1 gives gamma + 1 and alphas next to it lose no digits.

    >>> round(tau(0.8, 4), 4)
    3.3616
    """
    _check_alpha(alpha)
    _check_gamma(gamma)
    total, reach = 1.0, 1.0
    for _ in range(gamma):
        reach *= alpha
        total += reach
    return total


def tau_slope(alpha: float, gamma: int) -> float:
    """d tau / d alpha."""
    _check_alpha(alpha)
    _check_gamma(gamma)
    total, power = 0.0, 1.0
    for i in range(1, gamma + 1):
        total += i * power
        power *= alpha
    return total


def accepted_by_position(conditional: Sequence[N]) -> list[N]:
    """Unconditional chance that position 1..gamma is accepted: the running product of the
    conditional ones (numbers or arrays).

    >>> accepted_by_position([0.8, 0.5])
    [0.8, 0.4]
    """
    for chance in conditional:
        _check_alpha(chance)
    return list(accumulate(conditional, mul))


def tau_from_positions(conditional: Sequence[float]) -> float:
    """tau for acceptance that changes along the block: `conditional[i]` is the chance of position i
    + 1 given all before it."""
    return 1.0 + math.fsum(accepted_by_position(conditional))


@dataclass(frozen=True, slots=True)
class Tree:
    """A draft tree as SGLang makes it: `steps` passes, the `topk` likeliest continuations of each
    node, and `tokens` verified, the root among them. Raises ValueError for what is none."""

    topk: int
    steps: int
    tokens: int

    def __post_init__(self) -> None:
        largest = 1 + sum(min(self.topk**depth, 10**6) for depth in range(1, self.steps + 1))
        if not 1 <= self.topk <= 64 or not 1 <= self.steps <= 32:
            raise ValueError("a tree has a top-k of 1 to 64 and 1 to 32 steps")
        if not self.steps < self.tokens <= min(largest, 1024):
            raise ValueError(
                f"a tree of top-k {self.topk} and {self.steps} steps verifies {self.steps + 1} to"
                f" {min(largest, 1024)} tokens, not {self.tokens}"
            )

    def tau(self, conditional: Sequence[float]) -> float:
        """Tokens a round where the likeliest token of each depth is right with chance
        `conditional`: 1 + the sum over nodes of the chance that all to them is right, nodes taken
        best first. Of what the likeliest misses each further one has RUNNER_UP."""
        heap, total, kept = [(-1.0, 0)], 0.0, 0
        while heap and kept < self.tokens:
            chance, depth = heapq.heappop(heap)
            total, kept = total - chance, kept + 1
            if depth == self.steps:
                continue
            left = 1.0 - conditional[depth]
            for rank in range(self.topk):
                found = RUNNER_UP * left if rank else conditional[depth]
                left -= found if rank else 0.0
                if found > 0.0:
                    heapq.heappush(heap, (chance * found, depth + 1))
        return total

    def alpha(self, tau_value: float) -> float:
        """The constant chance of the likeliest token that gives `tau_value`."""
        return rising_root(lambda alpha: self.tau([alpha] * self.steps), tau_value)


# Fitted to tokens a round of an EAGLE-3 head of Qwen3-8B in SGLang 0.5.3: a chain of two and six
# trees (top-k 4 or 8, 2 to 8 steps, 8 to 32 tokens) agree to 3.5 % (gpustack, performance lab).
RUNNER_UP: Final = 0.25


def drifting_positions(alpha: N, drift: float, gamma: int) -> list[N]:
    """Conditional acceptance sigmoid(logit(alpha) + drift * (i - 1)) at position i, of a number or
    an array; `drift` in logit per position. What rises does so for RISING_POSITIONS, and stays."""
    _check_alpha(alpha)
    if drift == 0.0:
        return [alpha] * gamma
    # the odds, by this factor
    grown = [math.exp(drift * steps_of_drift(drift, i)) for i in range(gamma)]
    return [alpha * factor / (1.0 - alpha + alpha * factor) for factor in grown]


def steps_of_drift(drift: float, position: int) -> int:
    """How often `drift` has moved acceptance at a position, counted from 0."""
    return min(position, RISING_POSITIONS - 1) if drift > 0.0 else position


def alpha_from_tau(tau_value: float, gamma: int, drift: float = 0.0) -> float:
    """Acceptance at the first position that gives `tau_value` at `gamma` where logits move by
    `drift` per position; without drift the constant alpha, the inverse of `tau`.

    Raises ValueError for gamma < 1 or a tau outside 1..gamma + 1.

    >>> round(alpha_from_tau(3.3616, 4), 4)
    0.8
    """
    if gamma < 1 or not 1.0 <= tau_value <= gamma + 1:
        raise ValueError(
            f"tau must lie between 1 and gamma + 1 with gamma >= 1, got tau {tau_value} at gamma"
            f" {gamma}"
        )

    def reached(alpha: float) -> float:
        return 1.0 + math.fsum(accumulate(drifting_positions(alpha, drift, gamma), mul))

    return rising_root(reached, tau_value)


def tokens_by_budget(alpha: float, gamma: int, known: float, requests: int = 512) -> Array:
    """Tokens of a request's round, by how many draft tokens of all `requests` are verified
    [requests * gamma + 1]: first those likeliest to be reached and accepted.

    `known`: the share of acceptance's variance that is forecast token by token, between 0 (each
    request looks alike) and 1. Forecasts follow a beta distribution, drawn with one seed.
    """
    import numpy as np

    chances = np.full((requests, gamma), alpha)
    if 0.0 < known < 1.0 and 0.0 < alpha < 1.0:
        weight = 1.0 / known - 1.0
        drawn = np.random.default_rng(0)
        chances = drawn.beta(weight * alpha, weight * (1.0 - alpha), (requests, gamma))
    survival = np.sort(np.cumprod(chances, axis=1), axis=None)[::-1]
    survival *= (tau(alpha, gamma) - 1.0) * requests / max(float(survival.sum()), 1e-12)
    return np.concatenate([[1.0], 1.0 + np.cumsum(survival) / requests])


def rising_root(
    reached: Callable[[float], float], wanted: float, low: float = 0.0, high: float = 1.0
) -> float:
    """Where between `low` and `high` the rising function `reached` gives `wanted`; the nearer end
    where it does not.

    False position with the Illinois rule: about ten calls for all digits (bisection takes sixty).
    """
    below, above = reached(low) - wanted, reached(high) - wanted
    if below >= 0.0 or above <= 0.0:
        return low if below >= 0.0 else high
    middle, side = low, 0
    for _ in range(100):
        previous, middle = middle, high - above * (high - low) / (above - below)
        if not low < middle < high or middle == previous:
            break
        found = reached(middle) - wanted
        if found == 0.0:
            break
        if found < 0.0:
            low, below = middle, found
            above, side = above / 2 if side < 0 else above, -1
        else:
            high, above = middle, found
            below, side = below / 2 if side > 0 else below, 1
    return min(max(middle, low), high)


# --- time per round


def break_even_alpha(gamma: int, decode_s: float, round_s: float) -> float:
    """The alpha at which speed-up is 1: below it the draft does not pay. 0 if it always pays, inf
    if no alpha is enough.

    >>> round(break_even_alpha(4, decode_s=0.020, round_s=0.030), 2)
    0.34
    """
    needed = round_s / decode_s
    if needed <= 1.0:
        return 0.0
    if gamma < 1 or needed > gamma + 1:
        return math.inf
    return alpha_from_tau(needed, gamma)


# --- how sure


def tau_estimate(alpha: Estimate, gamma: int, drift: Estimate | None = None) -> Estimate:
    """tau with its std (delta method) from alpha's std and, where given, the drift's (logit per
    position)."""
    if gamma < 1:
        return Estimate(1.0, 0.0, alpha.source)
    chance = min(max(alpha.value, 0.0), 1.0)
    drift = drift or Estimate(0.0, 0.0, alpha.source)
    positions = drifting_positions(chance, drift.value, gamma)
    reach, value, by_level, by_drift, level, slope = 1.0, 1.0, 0.0, 0.0, 0.0, 0.0
    for i, accepted in enumerate(positions):
        # d ln(reach) / d level = sum of (1 - accepted): derivative of ln sigmoid.
        reach *= accepted
        level += 1.0 - accepted
        slope += (1.0 - accepted) * steps_of_drift(drift.value, i)
        value += reach
        by_level += reach * level
        by_drift += reach * slope
    level_std = alpha.std / max(chance * (1.0 - chance), 1e-9) if alpha.std else 0.0
    return Estimate(
        value,
        math.hypot(by_level * level_std, by_drift * drift.std),
        weakest_source(alpha.source, drift.source),
    )


def speedup_estimate(
    tau_value: Estimate,
    decode_s: Estimate,
    round_s: Estimate,
    verify_s: Estimate | None = None,
    target_correlation: float = 0.0,
) -> Estimate:
    """tau * decode_s / round_s with its std (delta method, relative errors).

    `target_correlation`: correlation of the errors of decode_s and of `verify_s`, the target's part
    of the round. Both are passes of one target priced by one model, so an error they share cancels;
    0 is the cautious choice.
    """
    value = tau_value.value * decode_s.value / round_s.value
    decode = decode_s.relative_std
    verify = verify_s.std / round_s.value if verify_s is not None else 0.0
    variance = (
        tau_value.relative_std**2
        + decode**2
        + round_s.relative_std**2
        - 2.0 * target_correlation * decode * verify
    )
    return Estimate(
        value,
        value * math.sqrt(max(variance, 0.0)),
        weakest_source(tau_value.source, decode_s.source, round_s.source),
    )


def tpot_estimate(tau_value: Estimate, round_s: Estimate) -> Estimate:
    """Seconds per output token with its std (delta method)."""
    value = round_s.value / tau_value.value
    relative = math.hypot(tau_value.relative_std, round_s.relative_std)
    return Estimate(value, value * relative, weakest_source(tau_value.source, round_s.source))


def break_even_estimate(gamma: int, decode_s: Estimate, round_s: Estimate) -> Estimate | None:
    """`break_even_alpha` with its std from the times; None where no alpha is enough."""
    alpha = break_even_alpha(gamma, decode_s.value, round_s.value)
    if math.isinf(alpha):
        return None
    needed = round_s.value / decode_s.value
    needed_std = needed * math.hypot(decode_s.relative_std, round_s.relative_std)
    source = weakest_source(decode_s.source, round_s.source)
    return Estimate(alpha, min(needed_std / tau_slope(alpha, gamma), 1.0), source)


# --- the shape of the doubt


def alpha_interval(alpha: Estimate) -> tuple[float, float]:
    """5 and 95 % of alpha, whose logit is taken as normal: it stays between 0 and 1, and leans
    where alpha is near them. At the ends of that range themselves the logit says nothing, and alpha
    is taken as normal."""
    if clamped(alpha.value) != alpha.value:
        spread = QUANTILE_95 * alpha.std
        return max(alpha.value - spread, 0.0), min(alpha.value + spread, 1.0)
    level, std = logit(alpha.value), logit_std(alpha)
    low, high = (sigmoid(level + sign * QUANTILE_95 * std) for sign in (-1.0, 1.0))
    return min(low, alpha.value), max(high, alpha.value)


def tau_interval(alpha: Estimate, gamma: int, drift: Estimate | None = None) -> tuple[float, float]:
    """5 and 95 % of tau at gamma, from alpha (normal in its logit) and its drift along the block.

    tau rises with both, so each bound is tau with both 1.64 std away together, shared out by
    how much each moves tau (first-order reliability method); tau itself, bent as it is in alpha, is
    not made linear.
    """
    if gamma < 1:
        return 1.0, 1.0
    drift = drift or Estimate(0.0, 0.0, alpha.source)
    level, std = logit(alpha.value), logit_std(alpha)

    def at(steps: tuple[float, float]) -> float:
        start = sigmoid(level + steps[0] * std)
        return tau_from_positions(
            drifting_positions(start, drift.value + steps[1] * drift.std, gamma)
        )

    moves = [at((1.0, 0.0)) - at((-1.0, 0.0)), at((0.0, 1.0)) - at((0.0, -1.0))]
    whole = math.hypot(*moves)
    if whole == 0.0:
        value = at((0.0, 0.0))
        return value, value
    away = (QUANTILE_95 * moves[0] / whole, QUANTILE_95 * moves[1] / whole)
    return at((-away[0], -away[1])), at(away)


def speedup_interval(
    speedup: Estimate, tau_value: Estimate, gamma: int, round_s: Estimate | None = None
) -> tuple[float, float]:
    """5 and 95 % of a speed-up from those of tau; a tau without them counts as known. What its std
    holds besides tau's, the times' part, is normal in the logarithm; on each side the two add in
    squares. A round with bounds of its own counts with them instead of its std: an engine's host
    may be much slower and hardly faster. No round is shorter than the plain step whose rows it
    holds, unless it is predicted so: a round that brings 2 tokens is at most twice as fast."""
    times = max(speedup.relative_std**2 - tau_value.relative_std**2, 0.0)
    rounds = (0.0, 0.0)
    if round_s is not None and round_s.low is not None and round_s.high is not None:
        times = max(times - round_s.relative_std**2, 0.0)
        rounds = (math.log(round_s.high / round_s.value), math.log(round_s.value / round_s.low))
    ends = (tau_value.low, tau_value.high)
    down, up = (0.0 if end is None else abs(math.log(end / tau_value.value)) for end in ends)
    low, high = (
        sign * math.hypot(part, QUANTILE_95 * math.sqrt(times), max(other, 0.0))
        for sign, part, other in ((-1.0, down, rounds[0]), (1.0, up, rounds[1]))
    )
    most = tau_value.value * math.exp(up)
    if speedup.value > tau_value.value:
        most = (gamma + 1.0) * speedup.value / tau_value.value
    return speedup.value * math.exp(low), min(speedup.value * math.exp(high), most)


# --- where it pays


def levels(gains: Sequence[float]) -> list[float]:
    """Speed-ups in the logarithm, in which they are read between points: 0 where nothing is
    gained."""
    return [math.log(max(gain, 1e-9)) for gain in gains]


def crossing(
    xs: Sequence[float], above: Sequence[float], *, rising: bool = False, logs: bool = True
) -> float | None:
    """The first x at which `above` falls to 0 (`rising`: rises to it), by a straight line between
    points (`logs`: in the logarithm of x); None where it does not."""
    for (x, after_x), (before, later) in zip(pairwise(xs), pairwise(above), strict=False):
        if (before < 0.0 <= later) if rising else (before > 0.0 >= later):
            share = before / (before - later)
            return x * (after_x / x) ** share if logs and x > 0 else x + share * (after_x - x)
    return None


# --- what a measured speed-up decides

DISTURBED_GAP: Final = 0.15
LEAST_PROMPTS: Final = 4
"""The median of all prompts lies between the extremes of n with a chance of 1 - 2^(1-n): of three
in 75 %, which no 5 to 95 % can be."""


def is_disturbed(median: float, pooled: float, steady: float | None) -> bool:
    """Whether what else ran on the machine moved a speed-up counted in two ways.

    `median`, `pooled`, `steady`: as of `ByPrompt`. Prompts run back to back, so a busy machine
    moves the pooled figure first, which no interval over prompts can see: it is far from both
    others. Prompts that accept much more than most move it away from the median alone: their passes
    take what others take.
    """
    return min(abs(pooled / each - 1.0) for each in (median, steady or median)) > DISTURBED_GAP


def counting_doubt(
    median: float, pooled: float, prompts: int, steady: float | None = None
) -> str | None:
    """Why a speed-up (as of `is_disturbed`) decides nothing; None where it does."""
    figures = (
        f"the median over prompts is {median:.2f}x, all tokens over all seconds give {pooled:.2f}x"
    )
    if prompts < LEAST_PROMPTS:
        several = f"{prompts} prompts" if prompts > 1 else "one prompt"
        return f"{median:.2f}x on {several} says too little of others"
    if is_disturbed(median, pooled, steady):
        return f"the machine was disturbed: {figures}"
    if (median - 1.0) * (pooled - 1.0) < 0:
        return f"the two ways of counting contradict each other: {figures}"
    return None


# --- why a prediction was off


@dataclass(frozen=True, slots=True)
class RoundTerms:
    """What a speed-up is made of: tokens a round, seconds of one plain target step, and the three
    parts of a round (seconds)."""

    tau: float
    decode_s: float
    draft_s: float
    verify_s: float
    overhead_s: float

    @property
    def round_s(self) -> float:
        """Seconds of one round."""
        return math.fsum((self.draft_s, self.verify_s, self.overhead_s))

    def slowed(self, slowdown: float) -> RoundTerms:
        """The same on a machine that is `slowdown` times slower (below 1: faster)."""
        tau, *times = astuple(self)
        return RoundTerms(tau, *(slowdown * part for part in times))


def error_by_term(predicted: RoundTerms, measured: RoundTerms) -> RoundTerms:
    """How much of ln(predicted speed-up / measured) each term brings; they add up to it exactly.

    The round's part is split among its terms in proportion to their differences (logarithmic mean
    of the two rounds). Positive: this term makes the prediction too high.
    """
    difference = predicted.round_s - measured.round_s
    mean = measured.round_s
    if abs(difference) > 1e-12 * measured.round_s:
        mean = difference / math.log(predicted.round_s / measured.round_s)
    return RoundTerms(
        math.log(predicted.tau / measured.tau),
        math.log(predicted.decode_s / measured.decode_s),
        -(predicted.draft_s - measured.draft_s) / mean,
        -(predicted.verify_s - measured.verify_s) / mean,
        -(predicted.overhead_s - measured.overhead_s) / mean,
    )
