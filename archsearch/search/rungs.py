"""Multi-fidelity search: how a time budget is divided, which candidates are trained how long, and
when that ends. Numbers in, choices out.

A search climbs from the prior over short trainings to the full training of one to three finalists.
Scores are ln(speed-up), where what all candidates share (the target's times, the level of all
alphas) is a common summand and cancels in differences.

- *Who can still win*: `contenders`.
- *Who is trained* (`best_set`): the set with the largest expected best, chosen greedily, one shape
  at a time (submodular: within 1 - 1/e of the best set, Nemhauser et al. 1978). Shapes that are
  alike bring little beside each other, so the set is diverse by itself; a prior that cannot tell
  two depths apart wants both.
- *How long* (`halving`): each round half as many shapes on twice the tokens (successive halving,
  arXiv 1502.07943).
- *When it ends*: when one candidate is left, or when knowing more would bring less than
`LEAST_GAIN`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np

from archsearch.estimate import Array
from archsearch.records import Stored

# Shares of the whole time budget. What a step does not use goes to those after it.
TEXT_SHARE: Final = 0.25
RUNG_SHARE: Final = 0.25
FINALIST_SHARE: Final = 0.40
# The rest, for confirming: at most this much is set aside (chosen, not measured: half as many
# prompts widen an interval by sqrt(2)). Where not even LEAST_PROMPTS fit into MOST_CONFIRM_SHARE,
# nothing is trained, unless finalists were asked for by number.
CONFIRM_SHARE: Final = 0.20
MOST_CONFIRM_SHARE: Final = 0.30
LEAST_PROMPTS: Final = 8
LEAST_ASKED_SHARE: Final = 0.3  # that finalists asked for by number train at least (chosen)
SLOW: Final = 1.3  # slower than its profile by more, a machine is said to be
# Kept back for what nobody plans: loading, measuring acceptance, the report.
MARGIN_SHARE: Final = 0.03

# of the first round, where time allows: three times the warm-up of the learning rate
FIRST_TOKENS: Final = 32_000
LEAST_TOKENS: Final = 2_000  # below that a training says nothing
MOST_PLACES: Final = 16
LEAST_GAIN: Final = 0.003  # of ln(speed-up): what one more round must promise
STD_FACTOR: Final = 1.5  # "could still win": within so many std of the difference
DRAWS: Final = 2048
_LEADERS: Final = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done with `budget_s` seconds. `stay`: why the search stays at rung 0; "" where it
    trains.

    `text_s` ends at that many seconds after the start; `rung_s` and `finalist_s` are what the plan
    promises before anything was measured. `compares`: in the end the best head runs beside the best
    draft.
    """

    budget_s: float
    text_s: float
    rung_s: float
    finalist_s: float
    confirm_s: float
    confirm_prompts: int
    stay: str = ""
    compares: Annotated[bool, Stored(omit=True)] = False

    @property
    def climbs(self) -> bool:
        """Whether short trainings choose whom to train in full."""
        return self.rung_s > 0.0


def divide(
    budget_s: float,
    spent_s: float,
    prompt_s: float,
    fixed_s: float,
    prompts: int,
    confirmed: float = 1,
    slowdown: float = 1.0,
    rounds: bool = True,
) -> Plan:
    """The plan of a budget, with `rounds` of short trainings or without. `spent_s`: gone before it
    was made; `prompt_s`: seconds to confirm a draft on one prompt; `fixed_s`: per confirmed draft,
    whatever the number of prompts; `prompts`: wanted; `confirmed`: drafts to confirm; `slowdown`:
    of the machine now against its profile, which `prompt_s` and `fixed_s` hold already: a reason to
    name."""
    least, most_s = min(LEAST_PROMPTS, prompts), MOST_CONFIRM_SHARE * budget_s

    def confirm_s(count: int) -> float:
        return confirmed * (count * prompt_s + fixed_s)

    late = spent_s > 0.5 * budget_s
    if rounds and (late or confirm_s(least) > most_s):
        needed = max(confirm_s(least) / MOST_CONFIRM_SHARE, 2.5 * spent_s)
        advice = f"give at least {math.ceil(needed / 60)}m to train anything"
        if late:
            reason = f"half of the {budget_s:.0f} s was gone before anything could be trained"
        else:
            drafts = "one draft" if confirmed == 1 else f"{confirmed:g} drafts"
            reason = (
                f"confirming {drafts} on {least} prompts takes about {confirm_s(least):.0f} s here,"
                f" more than {MOST_CONFIRM_SHARE:.0%} of the {budget_s:.0f} s given"
            )
            fewer = next((n for n in range(least - 1, 0, -1) if confirm_s(n) <= most_s), 0)
            advice += f", or --confirm-prompts {fewer}" if fewer else ""
        if slowdown >= SLOW:
            reason += (
                f" (this machine is {slowdown:.1f} times slower now than when it was profiled)"
            )
            advice += "; where others use it, the same command goes on when they are done"
        return Plan(budget_s, 0.0, 0.0, 0.0, 0.0, 0, f"{reason}; {advice}")
    for_prompts = CONFIRM_SHARE * budget_s / confirmed - fixed_s
    fitting = int(for_prompts / prompt_s) if prompt_s > 0 else prompts
    count = max(least, min(prompts, fitting))
    text_s = TEXT_SHARE * budget_s
    rest = training_s(budget_s, max(text_s, spent_s), confirm_s(count))
    rest = rest if rounds else max(rest, LEAST_ASKED_SHARE * budget_s)
    rung_s = rung_share(rest) if rounds else 0.0
    return Plan(budget_s, text_s, rung_s, rest - rung_s, confirm_s(count), count)


def training_s(budget_s: float, elapsed_s: float, confirm_s: float) -> float:
    """What is left for training after `elapsed_s`, when confirming still takes `confirm_s`."""
    return max(0.0, (1.0 - MARGIN_SHARE) * budget_s - elapsed_s - confirm_s)


def rung_share(rest_s: float) -> float:
    """The part of the training time that the rungs get; the finalists have the rest."""
    return rest_s * RUNG_SHARE / (RUNG_SHARE + FINALIST_SHARE)


# --- who could still win


def contenders(values: Sequence[float], gap_std: Callable[[int, int], float]) -> list[bool]:
    """Which of `values` (ln speed-up) may still turn out best: none of the leading ones is ahead by
    more than STD_FACTOR times gap_std(i, j), the std of the difference."""
    leaders = sorted(range(len(values)), key=lambda i: -values[i])[:_LEADERS]
    return [
        all(values[j] - value <= STD_FACTOR * gap_std(i, j) for j in leaders if j != i)
        for i, value in enumerate(values)
    ]


def beaten(value: float, std: float, others: Sequence[tuple[float, float]]) -> bool:
    """Whether the optimistic score lies below the best pessimistic one of `others` (value, std).
    Errors are each one's own: the std of the difference is their root sum of squares."""
    return any(other - value > STD_FACTOR * math.hypot(std, own) for other, own in others)


# --- who is trained


def belief(gaps: Array, slopes: Array, level_std: float) -> Array:
    """Covariance [n, n] of ln(speed-up) from `gaps` [n, n], std of the differences of logit(alpha).

    Relative to the first, covariance = (d_i0^2 + d_j0^2 - d_ij^2) / 2; on top comes the level that
    all share (`level_std`, logit of alpha). `slopes` [n]: d ln(speed-up) / d logit(alpha) of each.
    """
    apart = gaps[0] ** 2
    covariance = 0.5 * (apart[:, None] + apart[None, :] - gaps**2)
    covariance = covariance + level_std**2
    return covariance * slopes[:, None] * slopes[None, :]


def draws_of(mean: Array, covariance: Array, draws: int = DRAWS) -> Array:
    """[draws, n] of the normal distribution; directions of negative variance (a gap table is no
    exact one) are dropped."""
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    root = vectors * np.sqrt(np.clip(values, 0.0, None))
    noise = np.random.default_rng(0).standard_normal((draws, len(mean)))
    return mean + noise @ root.T


def best_set(
    draws: Array,
    cost_s: Sequence[float],
    budget_s: float,
    *,
    most: int,
    least: int = 1,
    least_gain: float = 0.0,
    start: Sequence[int] = (),
) -> dict[int, float]:
    """Greedy set with the largest expected best, within `budget_s` seconds and `most` places.
    `draws` [draws, n]. The chosen in their order, and what knowing each adds to the expected best
    of those before it, ln(speed-up).

    First those of `start` that can be paid, then the best in the mean, then what adds most to the
    expected best, until the next would add less than `least_gain`; `least` are chosen whatever they
    cost.
    """
    chosen: dict[int, float] = {}
    left = budget_s
    current = np.full(draws.shape[0], -np.inf)
    while len(chosen) < min(most, draws.shape[1]):
        able = math.inf if len(chosen) < least else left
        free = [i for i in range(draws.shape[1]) if i not in chosen and cost_s[i] <= able]
        if not free:
            break
        reached = np.maximum(current[:, None], draws[:, free]).mean(axis=0)
        first = [i for i in start if i in free]
        place = free.index(first[0]) if first else int(np.argmax(reached))
        gain = float(reached[place] - current.mean()) if chosen else 0.0
        if not first and len(chosen) >= max(least, 1) and gain < least_gain:
            break
        index = free[place]
        chosen[index] = gain
        left -= cost_s[index]
        current = np.maximum(current, draws[:, index])
    return chosen


def expected_gain(draws: Array) -> float:
    """What it would bring to know all exactly: the expected best minus the best in the mean,
    ln(speed-up)."""
    return float(draws.max(axis=1).mean() - draws.mean(axis=0).max()) if draws.shape[1] else 0.0


# --- how long


@dataclass(frozen=True, slots=True)
class Round:
    """A round of successive halving: at most `places` shapes, each trained to `tokens` in all."""

    places: int
    tokens: int


def halving(seconds: float, tokens_per_s: float, overhead_s: float) -> list[Round]:
    """Rounds that take about `seconds` at `tokens_per_s`, with `overhead_s` per shape and round
    (building, looking at alpha).

    As many places as leave each shape FIRST_TOKENS in the first round; with less time, fewer places
    on fewer tokens; [] where not even two shapes get LEAST_TOKENS. With time to spare, more tokens.
    """
    for places in (MOST_PLACES, 12, 8, 6, 4, 3, 2):
        sizes = [places]
        while sizes[-1] > 2:
            sizes.append(math.ceil(sizes[-1] / 2))
        looks = overhead_s * sum(sizes)
        # Tokens of a round beyond those of the one before: 1, 1, 2, 4, ... times the first's.
        units = sum(size * 2 ** max(number - 1, 0) for number, size in enumerate(sizes))
        first = int((seconds - looks) * tokens_per_s / units)
        if first >= (FIRST_TOKENS if places > 3 else LEAST_TOKENS):
            return [Round(size, first * 2**number) for number, size in enumerate(sizes)]
    return []


def part_of_round(schedule: Sequence[Round], number: int) -> float:
    """The share of round `number` (from 1) in what it and those after it cost."""
    costs, before = [], 0
    for step in schedule:
        costs.append(step.places * (step.tokens - before))
        before = step.tokens
    return costs[number - 1] / sum(costs[number - 1 :])


def finalist_count(draws: Array, loss_per_e_fold: float, most: int = 3) -> int:
    """How many to train in full: the expected best of the first m (columns of `draws` [draws, n],
    best first), less what the winner loses because it shares the time.

    Half of the time goes to all alike, half to the best: the winner has 1/(2m) + 1/2 of it;
    `loss_per_e_fold`: ln(speed-up) per e-fold of tokens at the end of the curve.
    """
    best, count = -math.inf, 1
    for m in range(1, min(most, draws.shape[1]) + 1):
        share = 1.0 if m == 1 else 0.5 / m + 0.5
        value = float(draws[:, :m].max(axis=1).mean()) + loss_per_e_fold * math.log(share)
        if value > best + 1e-9:
            best, count = value, m
    return count


# What a short training says of the order after the full one: (tokens, how many times wider
# the spread of logit(alpha) is than at the end, std of each one's end given that and what its
# size and depth have yet to bring). Ten shapes of SmolLM2-135M, 256k tokens
# (`benchmarks/rungs.py`): those that start late (cut heads, narrow) catch up; correlation with the
# end .50, .65, .75, .92, .95. Without what size and depth bring the stds were .18, .11, .077, .038;
# on eight shapes of the study of shapes, carried on from 32k and 64k tokens to 128k, .060 and .042
# with it and .093 and .058 without.
CATCH_UP: Final = (
    (16_000, 1.9, 0.161),
    (40_000, 1.85, 0.103),
    (64_000, 1.45, 0.075),
    (128_000, 1.03, 0.044),
    (179_000, 1.0, 0.039),
)
CATCH_UP_LEAST: Final = 0.03  # of the std, however long the short training was


def catch_up(tokens: int) -> tuple[float, float]:
    """(how many times wider shapes are spread after `tokens` than at the end, std of each one's end
    given its value then).

    Straight in ln(tokens) between the points of CATCH_UP; the last one's std stays.
    """
    known, *columns = zip(*CATCH_UP, strict=True)
    x, xs = math.log(max(tokens, 1)), list(map(math.log, known))
    spread, std = (float(np.interp(x, xs, column)) for column in columns)
    return spread, max(CATCH_UP_LEAST, std)
