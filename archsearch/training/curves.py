"""Learning curves of acceptance, and where they lead: alpha at a full budget from the first part of
it (docs/concepts.md, "Training and its curves").

    logit(alpha(t)) = level + slope x + bend x^2 / 2 + gain [annealed]
    x = ln(e(t) / REFERENCE_TOKENS), e: `effective_tokens`

Acceptance grows about linearly in the logarithm of the training tokens (Scylla, arXiv 2505.07858)
and flattens; over the decade that a search looks at, the second-order term is enough for that. The
four coefficients of a shape are drawn from a normal distribution that all shapes of one study share
(`CurvePrior`), learnt from the curves that are complete (`fit_prior`: EM for a linear mixed model
with unstructured covariance, Laird and Ware 1982). The covariance matters: shapes that start late
rise steeply and end near the others. All is linear and Gaussian, so a prediction and its band are
one update.

To *rank* shapes trained to the same point, compare alpha there: carrying each curve on adds the
noise of its slope (over nine shapes rho with the final alpha fell from 0.90 to 0.45).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from archsearch.errors import ArchsearchError
from archsearch.estimate import Array, Estimate
from archsearch.speedup import alpha_estimate, clamped, logit

# R: what repeating a text for ever is worth, in texts; the fit to nine curves of a small draft of
# SmolLM2-135M (`benchmarks/ data_curves.py`). With a kind of text left out: 3 without the
# narrowest, 5, and 10 without the widest.
REPEATS: Final = 5.0
LEARNT_EPOCHS: Final = 3.0 * REPEATS  # where all but a twentieth of what repeating brings has come
# logit(alpha) per e-fold of new tokens: a curve rises by this much at least, whatever its bend;
# twice as much text at its best look was worth 0.13 to 0.22 per e-fold beyond 100k tokens (same
# study).
LEAST_SLOPE: Final = 0.12
# Of the slope far out, per e-fold: that of the four kinds of text in MEASURED.
SLOPE_STD: Final = 0.1
REFERENCE_TOKENS: Final = 64_000  # where level and slope are counted
EM_ROUNDS: Final = 40
_PSEUDO_CURVES: Final = 2.0  # how many curves the start's widths weigh against those observed


@dataclass(frozen=True, slots=True)
class AlphaPoint:
    """alpha after `tokens` of training, of the running mean of the weights or `annealed`; the same
    held-out texts throughout. `epoch_tokens`: of one pass over the text (prompts included, as in
    `tokens`); 0 where no token came twice."""

    tokens: int
    alpha: float
    annealed: bool = False
    epoch_tokens: int = 0


def effective_tokens(tokens: float, epoch_tokens: float, repeats: float = REPEATS) -> float:
    """New tokens that `tokens` of training on a text of `epoch_tokens` are worth, at most 1 + R
    texts (arXiv 2305.16264, equation 5); `tokens` where the text never ends (0)."""
    if epoch_tokens <= 0 or tokens <= epoch_tokens:
        return float(tokens)
    return epoch_tokens * (1.0 + repeats * -math.expm1(-(tokens / epoch_tokens - 1.0) / repeats))


@dataclass(frozen=True, slots=True)
class CurvePrior:
    """What curves of one study share: mean and covariance of level, slope per e-fold of tokens,
    bend per squared e-fold and gain of the anneal, all in logit(alpha).

    `noise_std`: scatter of one point about its curve (seed and step, not the sample of texts, which
    every point shares). `curves`: how many it was learnt from. Its defaults are wide: where a fit
    starts that is tested on a curve left out.
    """

    mean: tuple[float, ...] = (0.4, 0.40, -0.06, 0.05)
    covariance: tuple[tuple[float, ...], ...] = (
        (1.0, 0.0, 0.0, 0.0),
        (0.0, 0.12**2, 0.0, 0.0),
        (0.0, 0.0, 0.06**2, 0.0),
        (0.0, 0.0, 0.0, 0.06**2),
    )
    noise_std: float = 0.03
    curves: int = 0


# Two studies on SmolLM2-135M: ten drafts (1 to 6 layers, 256 to 576 wide) over 256k tokens of one
# service domain (`benchmarks/rungs.py`, slope 0.50, bend -0.12, and the covariance within a kind of
# text), and one draft on three kinds of text in three sizes (`benchmarks/data_curves.py`, slopes
# 0.35, 0.27, 0.24, bends -0.16, -0.27, -0.15). Means of the four kinds; the variance between kinds
# is added to that within; the level is open.
MEASURED: Final = CurvePrior(
    mean=(0.0, 0.34, -0.17, 0.0),
    covariance=(
        (1.0, 0.0, 0.0, 0.0),
        (0.0, 0.0345, -0.0032, -0.0045),
        (0.0, -0.0032, 0.0070, 0.0001),
        (0.0, -0.0045, 0.0001, 0.0027),
    ),
    noise_std=0.033,
    curves=19,
)


def extrapolate(
    points: Sequence[AlphaPoint],
    tokens: int,
    prior: CurvePrior = MEASURED,
    *,
    annealed: bool = True,
    epoch_tokens: int = 0,
) -> Estimate:
    """alpha after `tokens` (at the end of an anneal, unless said otherwise), with the std of a
    measurement on the same texts. `epoch_tokens`: of the text by then; 0 for one that never ends.

    One point is enough: the prior's slope carries it on. For other texts add the std over prompts.
    Raises ArchsearchError without points.
    """
    if not points:
        raise ArchsearchError(
            "a learning curve needs at least one point; train for a few thousand tokens first"
        )
    if tokens < 1:
        raise ArchsearchError(f"a budget must be positive, got {tokens} tokens")
    mean, covariance, _, errors = _posterior(points, prior)
    row = _row(AlphaPoint(tokens, 0.5, annealed, epoch_tokens))
    # text of mixed kinds scatters more; the prior's own noise counts as three points
    errors = errors / prior.noise_std
    scatter = math.sqrt(max(1.0, (float(errors @ errors) + 3.0) / (len(points) + 3.0)))
    std = scatter * math.sqrt(float(row @ covariance @ row) + prior.noise_std**2)
    return alpha_estimate(
        float(row @ mean) + _beyond_the_bend(float(row[1]), mean), std, "modelled"
    )


def curve_slope(tokens: int, prior: CurvePrior = MEASURED) -> float:
    """logit(alpha) per e-fold of new tokens, there; not below LEAST_SLOPE."""
    _, slope_there, bend, _ = prior.mean
    return max(LEAST_SLOPE, slope_there + bend * math.log(max(tokens, 1) / REFERENCE_TOKENS))


def growth(prior: CurvePrior, start: float, end: float) -> Estimate:
    """What training from `start` to `end` new tokens and the anneal add to logit(alpha) of all
    shapes. Its std is half of it and SLOPE_STD per e-fold: it is carried on far beyond where it was
    seen."""
    gain, gain_std = prior.mean[3], math.sqrt(prior.covariance[3][3])
    if end <= start:
        return Estimate(gain, gain_std, "modelled")
    # the slope over ln(tokens), by the midpoint rule
    steps = np.linspace(math.log(start), math.log(end), 33)
    slopes = [curve_slope(round(math.exp(x)), prior) for x in (steps[:-1] + steps[1:]) / 2]
    risen = float(np.sum(np.diff(steps) * slopes))
    beyond = SLOPE_STD * math.log(end / start)
    return Estimate(risen + gain, math.hypot(0.5 * risen, gain_std, beyond), "modelled")


def fit_prior(curves: Sequence[Sequence[AlphaPoint]], start: CurvePrior = MEASURED) -> CurvePrior:
    """The prior that the given curves (of other shapes than the one to be predicted) speak for,
    beginning at `start`.

    `start`'s means and widths count as much as two curves, so few curves do not make the widths
    collapse. EM over the curves' coefficients.
    """
    usable = [list(curve) for curve in curves if len(curve) >= 2]
    if not usable:
        return start
    prior, weight = start, _PSEUDO_CURVES
    start_mean, start_covariance = np.array(start.mean), np.array(start.covariance)
    for _ in range(EM_ROUNDS):
        means, spreads, residuals, count = [], [], 0.0, 0
        for curve in usable:
            mean, covariance, rows, errors = _posterior(curve, prior)
            # E: what is not known of a curve's coefficients counts as scatter of its points
            residuals += float(errors @ errors + np.trace(rows @ covariance @ rows.T))
            count += len(curve)
            means.append(mean)
            spreads.append(covariance)
        stacked = np.stack(means)
        # Half of the weight on the start's means: they are of one target, the slopes of another may
        # differ.
        centre = (stacked.sum(0) + 0.5 * weight * start_mean) / (len(usable) + 0.5 * weight)
        away = stacked - centre
        covariance = (np.sum(spreads, axis=0) + away.T @ away + weight * start_covariance) / (
            len(usable) + weight
        )
        noise = math.sqrt((residuals + 4 * weight * start.noise_std**2) / (count + 4 * weight))
        widths = tuple(map(tuple, covariance.tolist()))
        prior = CurvePrior(tuple(centre.tolist()), widths, noise, len(usable))
    return prior


def _row(point: AlphaPoint) -> Array:
    x = math.log(effective_tokens(point.tokens, point.epoch_tokens) / REFERENCE_TOKENS)
    return np.array([1.0, x, 0.5 * x * x, float(point.annealed)])


def _beyond_the_bend(x: float, mean: Array) -> float:
    """What a curve that goes on rising by LEAST_SLOPE has at `x` (ln of tokens) more than its
    parabola."""
    slope, bend = float(mean[1]), float(mean[2])
    if slope + bend * x >= LEAST_SLOPE or bend >= 0.0:
        return 0.0
    turn = (LEAST_SLOPE - slope) / bend  # where the parabola's slope is LEAST_SLOPE
    return -0.5 * bend * (x - turn) ** 2


def _posterior(points: Sequence[AlphaPoint], prior: CurvePrior) -> tuple[Array, ...]:
    """Mean [4] and covariance [4, 4] of a curve's coefficients, the rows [n, 4] of its points and
    their distances [n] from it."""
    rows = np.stack([_row(point) for point in points])
    targets = np.array([logit(clamped(point.alpha)) for point in points])
    covariance, prior_mean = np.array(prior.covariance), np.array(prior.mean)
    noise = np.eye(len(points)) * prior.noise_std**2
    # [4, n]: how far each point moves each coefficient (a Kalman update of all points at once)
    gain = covariance @ rows.T @ np.linalg.inv(rows @ covariance @ rows.T + noise)
    mean = prior_mean + gain @ (targets - rows @ prior_mean)
    updated = covariance - gain @ rows @ covariance  # symmetric but for rounding
    return mean, (updated + updated.T) / 2, rows, targets - rows @ mean


_STEPS: Final = 201


@dataclass(frozen=True, slots=True)
class Supply:
    """Text that can be had from one source: at most `tokens` (prompts included, as a training
    counts them), `tokens_per_s` of them a second. `worth`: of one such token, in tokens of the
    greedy answers to the user's prompts."""

    name: str
    tokens: float
    tokens_per_s: float
    worth: float = 1.0


@dataclass(frozen=True, slots=True)
class Split:
    """`text_s` of the seconds for writing, which brings the text to `epoch_tokens`; the rest trains
    on `tokens` in all, worth `effective` new ones."""

    text_s: float
    epoch_tokens: float
    tokens: float
    effective: float


def text_after(seconds: float, supplies: Sequence[Supply]) -> float:
    """Tokens that `seconds` of writing bring, each worth what its source is; the sources in their
    order."""
    found, left = 0.0, seconds
    for supply in supplies:
        if supply.tokens_per_s <= 0 or supply.tokens <= 0:
            continue
        used = min(left, supply.tokens / supply.tokens_per_s)
        found += used * supply.tokens_per_s * supply.worth
        left -= used
    return found


def best_split(
    seconds: float,
    supplies: Sequence[Supply],
    train_per_s: float,
    *,
    epoch_tokens: float = 0.0,
    tokens: float = 0.0,
) -> tuple[Split, Split]:
    """(the division of `seconds` between writing and training that is worth most new tokens, with
    which alone acceptance rises, of equals the one with least text; the one that writes none).
    `epoch_tokens`, `tokens`: text and training that are there already."""

    def at(text_s: float) -> Split:
        epoch = epoch_tokens + text_after(text_s, supplies)
        seen = tokens + max(seconds - text_s, 0.0) * train_per_s
        return Split(text_s, epoch, seen, effective_tokens(seen, epoch) if epoch > 0 else 0.0)

    shares = [at(text_s) for text_s in np.linspace(0.0, max(seconds, 0.0), _STEPS).tolist()]
    return max(shares, key=lambda split: (split.effective, -split.text_s)), shares[0]
