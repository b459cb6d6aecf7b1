"""What is known of acceptance after every training, how sure that is, and the scores that
follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from archsearch import speedup as speculation
from archsearch.acceptance.estimator import (
    AcceptanceContext,
    AcceptanceEstimator,
    AcceptanceObservation,
)
from archsearch.acceptance.measured import resampled_ratio
from archsearch.acceptance.prior import SHAPE_NOISE_STD, PriorAcceptance
from archsearch.acceptance.short_training import ExtrapolatedAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.drafts.records import ShortTraining, paired_logit_std
from archsearch.search import rungs
from archsearch.search.objective import Score, Scorer, difference_std
from archsearch.training.curves import (
    AlphaPoint,
    CurvePrior,
    curve_slope,
    effective_tokens,
    fit_prior,
    growth,
)


@dataclass
class Belief:
    """Acceptance as it is known by now: fitted to `known` (earlier runs) and `shorts` (of this
    climb). `full_tokens`: what curves are carried on to, on a text of `full_epoch` tokens (0: that
    of the short trainings)."""

    scorer: Scorer
    known: list[AcceptanceObservation]
    shorts: dict[Architecture, ShortTraining] = field(default_factory=dict)
    full_tokens: int | None = None
    full_epoch: int = 0
    acceptance: AcceptanceEstimator = field(default_factory=PriorAcceptance)
    _learnt: tuple[object, ...] | None = None

    def learn(self, finalists: Sequence[AcceptanceObservation] = ()) -> None:
        """Fit acceptance to all that was trained, and score with it from now on."""
        trained = ((shape, short.tokens) for shape, short in self.shorts.items())
        state = (*trained, self.full_tokens, self.full_epoch, len(finalists))
        if state == self._learnt:
            return
        self._learnt = state
        context = self.scorer.context
        fitted: AcceptanceEstimator
        # One that ended before its first look, on a very slow machine, says nothing yet.
        looked = {shape: short for shape, short in self.shorts.items() if short.points}
        if looked:
            curves = [
                [AlphaPoint(*point, epoch_tokens=short.epoch_tokens) for point in short.points]
                for short in looked.values()
            ]
            at = max(short.tokens for short in looked.values())
            end = max(self.full_tokens or at, at)
            context = replace(context, trained_tokens=float(end))
            shared = fit_prior(curves)
            reached = levels(
                looked, shared, capacity_to_come(PriorAcceptance().fit(self.known), context)
            )
            # What is trained here is known better from here than from an earlier run on other text.
            others = [item for item in self.known if item.architecture not in reached]
            fitted = ExtrapolatedAcceptance(
                reached,
                growth(
                    shared,
                    effective_tokens(at, self.epoch_tokens),
                    effective_tokens(end, self.full_epoch or self.epoch_tokens),
                ),
                replace(context, temperature=0.0),
                sampling_std=sampling_std(looked),
            ).fit([*others, *finalists])
        else:
            fitted = PriorAcceptance().fit([*self.known, *finalists])
        self.acceptance = fitted
        self.scorer = self.scorer.with_acceptance(fitted, context)

    @property
    def epoch_tokens(self) -> int:
        """Tokens of one pass over the text of the short trainings; 0 where that is not known."""
        return max((short.epoch_tokens for short in self.shorts.values()), default=0)

    def end_slope(self) -> float:
        """logit(alpha) per e-fold of training tokens where the full training ends; near 0 where its
        text is learnt."""
        end, epoch = self.full_tokens or rungs.FIRST_TOKENS, self.full_epoch or self.epoch_tokens
        here, further = effective_tokens(end, epoch), effective_tokens(1.1 * end, epoch)
        return curve_slope(round(here)) * math.log(further / here) / math.log(1.1)

    def gap_std(self, first: Architecture, second: Architecture) -> float:
        """Std of the difference of two logits of alpha."""
        return self.acceptance.difference_std(first, second, self.scorer.context)

    def score_gap_std(self, first: Score, second: Score) -> float:
        """Std of the difference of two ln(speed-up)."""
        return difference_std(first, second, self.acceptance, lambda score: self.scorer.context)

    def draws(self, scores: Sequence[Score]) -> np.ndarray:
        """[draws, scores] of ln(speed-up) as it may turn out when acceptance is known."""
        shapes = [score.architecture for score in scores]
        own = 2.0 * SHAPE_NOISE_STD**2
        # What no term explains is alike in shapes that are alike: without that, twins look like two
        # draws of a lottery.
        gaps = np.array(
            [  # [scores, scores], std of differences of logit(alpha)
                [
                    math.sqrt(max(self.gap_std(a, b) ** 2 - own * similarity(a, b), 0.0))
                    if a != b
                    else 0.0
                    for b in shapes
                ]
                for a in shapes
            ]
        )
        slopes = np.array([score.slope for score in scores])  # [scores]
        # of the level that all alphas share: the std of the first
        level = speculation.logit_std(scores[0].alpha)
        mean = np.array([math.log(score.speedup.value) for score in scores])  # [scores]
        return rungs.draws_of(mean, rungs.belief(gaps, slopes, level))


def capacity_to_come(
    prior: AcceptanceEstimator, full: AcceptanceContext
) -> Callable[[Architecture, float], float]:
    """Of a shape and the tokens it has seen: what its size and depth have yet to bring by the full
    training, in logit(alpha) by `prior`, beside what more tokens bring to every shape."""

    def to_come(shape: Architecture, seen: float) -> float:
        now, end = (
            prior.predict(shape, replace(full, trained_tokens=float(tokens))).alpha.value
            for tokens in (seen, full.trained_tokens or seen)
        )
        return speculation.logit(end) - speculation.logit(now)

    return to_come


def levels(
    shorts: Mapping[Architecture, ShortTraining],
    shared: CurvePrior,
    to_come: Callable[[Architecture, int], float],
) -> dict[Architecture, tuple[float, float]]:
    """Where each trained shape will stand when all are trained in full: (logit(alpha), std of its
    own error), at the tokens of the longest.

    Round by round: the mean of a round's shapes is where the round before left them (newcomers
    count at the mean), and each one's distance from it is what `catch_up` leaves of it, and how far
    its size and depth will yet take it (`to_come`, of a shape and the tokens it has seen): young
    drafts of any size look alike.
    """
    result: dict[Architecture, tuple[float, float]] = {}
    marks = sorted({short.tokens for short in shorts.values()})  # tokens at the end of each round
    done = 0
    for mark in marks:
        group = [short for short in shorts.values() if short.tokens >= mark]
        measured = {short.architecture: _logit_at(short, mark) for short in group}
        if done:  # all move on by what training between the two marks adds
            epoch = max(short.epoch_tokens for short in group)
            rise = (
                growth(shared, effective_tokens(done, epoch), effective_tokens(mark, epoch)).value
                - shared.mean[3]
            )
            result = {shape: (value + rise, std) for shape, (value, std) in result.items()}
        before = [result[shape][0] for shape in measured if shape in result]
        centre = float(np.mean(list(measured.values())))
        # Those that go on are the better ones: their mean is kept where it was, not at that of all.
        anchor = float(np.mean(before)) if before else centre
        spread, std = rungs.catch_up(mark)
        coming = {shape: to_come(shape, mark) for shape in measured}
        mean_coming = float(np.mean(list(coming.values())))
        for short in group:
            # The texts are the same for all, so only paired differences of alpha count; four others
            # are enough.
            paired = max(
                (paired_logit_std(short, other) for other in group[:4] if other is not short),
                default=0.0,
            )
            # of one shape: half of the variance of a difference
            own = math.hypot(std, paired / math.sqrt(2.0))
            shape = short.architecture
            apart = (measured[shape] - centre) / spread + coming[shape] - mean_coming
            result[shape] = (anchor + apart, own)
        done = mark
    return result


def sampling_std(shorts: Mapping[Architecture, ShortTraining]) -> float:
    """Std of a measured alpha over the kept-out texts; all drafts share them."""
    stds = [
        resampled_ratio(np.array([short.hits, short.heldout_tokens], dtype=np.float64).T).std
        for short in shorts.values()
        if short.hits
    ]
    return max(stds, default=0.0)


def similarity(first: Architecture, second: Architecture) -> float:
    """How much of what no term explains two shapes have in common, 0 to 1: falls with every
    doubling of a dimension. Assumed."""
    pairs = (
        (first.num_hidden_layers, second.num_hidden_layers, 2.0),
        (first.hidden_size, second.hidden_size, 2.0),
        (first.intermediate_size, second.intermediate_size, 0.5),
        (first.num_attention_heads, second.num_attention_heads, 0.5),
        (first.num_key_value_heads, second.num_key_value_heads, 0.25),
        (first.head_rows, second.head_rows, 0.25),
    )
    return math.exp(-sum(weight * abs(math.log2(a / b)) for a, b, weight in pairs))


def _logit_at(short: ShortTraining, tokens: int) -> float:
    """logit(alpha) at `tokens`, between the points of its curve (straight in ln(tokens))."""
    xs = [math.log(point[0]) for point in short.points]
    ys = [speculation.logit(speculation.clamped(point[1])) for point in short.points]
    return float(np.interp(math.log(tokens), xs, ys))
