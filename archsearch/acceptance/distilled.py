"""Acceptance from short training: learning curves of the shapes trained so far, and what they say about the others.

A shape with a curve is answered by its curve, carried on to the full budget (`training.curves`). A shape without one is answered
by the prior, fitted to what all the curves lead to: the more is trained, the less of it is published slopes. Both speak of the
same thing: greedy alpha on the user's held-out text after the full training.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Self

from archsearch.acceptance.estimator import Acceptance, AcceptanceContext, AcceptanceObservation
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.estimate import Estimate
from archsearch.speedup import logit, sigmoid
from archsearch.training.curves import AlphaPoint, CurvePrior, extrapolate, fit_prior


class DistilledAcceptance:
    """alpha at `budget_tokens` from `curves` (shape: points on the same held-out texts) measured in `context`.

    `sampling_std`: std of a measured alpha over the sample of texts (they are shared by all curves, so it is no part of a
    difference). After `fit`: `curve_prior_` (what curves share), `prior_` (fitted), `trained_` (shape: extrapolated alpha).
    """

    def __init__(
        self,
        curves: Mapping[Architecture, Sequence[AlphaPoint]],
        budget_tokens: int,
        context: AcceptanceContext | None = None,
        *,
        prior: PriorAcceptance | None = None,
        curve_prior: CurvePrior | None = None,
        sampling_std: float = 0.0,
    ) -> None:
        self.curves = curves
        self.budget_tokens = budget_tokens
        self.context = context
        self.prior = prior
        self.curve_prior = curve_prior
        self.sampling_std = sampling_std
        self.fit([])

    def fit(self, observations: Sequence[AcceptanceObservation]) -> Self:
        """Learn from the curves and from `observations`, drafts measured elsewhere; a shape with both is taken as observed."""
        self.context_ = self.context or AcceptanceContext()
        curves = {arch: list(points) for arch, points in self.curves.items() if points}
        self.curve_prior_ = fit_prior(list(curves.values()), self.curve_prior)
        self.trained_ = {}
        for arch, points in curves.items():
            others = fit_prior([curve for other, curve in curves.items() if other != arch], self.curve_prior)
            self.trained_[arch] = extrapolate(points, self.budget_tokens, others)
        self.observed_ = {o.architecture: o for o in observations}
        unseen = {arch: alpha for arch, alpha in self.trained_.items() if arch not in self.observed_}
        ours = [AcceptanceObservation(arch, alpha, self.context_) for arch, alpha in unseen.items()]
        prior = copy.deepcopy(self.prior) if self.prior else PriorAcceptance()  # fitting must not touch the one given
        self.prior_ = prior.fit([*observations, *ours])
        return self

    def _own(self, architecture: Architecture, context: AcceptanceContext) -> Acceptance | None:
        """From the shape's own measurement or curve, moved to `context` by the prior's terms."""
        if architecture in self.observed_:
            observation = self.observed_[architecture]
            alpha, at = observation.alpha, observation.context
        elif architecture in self.trained_:
            alpha, at = self.trained_[architecture], self.context_
        else:
            return None
        there = self.prior_.predict(architecture, context)
        if context == at:
            return Acceptance(_with_std(alpha, self.sampling_std), there.drift)
        here = self.prior_.predict(architecture, at)
        shift = logit(_clamped(there.alpha.value)) - logit(_clamped(here.alpha.value))
        value = sigmoid(logit(_clamped(alpha.value)) + shift)
        doubt = 0.5 * abs(shift)  # how far a term carries over to this target: half of it
        relative = math.hypot(alpha.std / max(alpha.value * (1 - alpha.value), 1e-6), doubt)
        moved = Estimate(value, value * (1 - value) * relative, "modelled")
        return Acceptance(_with_std(moved, self.sampling_std), there.drift)

    def predict(self, architecture: Architecture, context: AcceptanceContext) -> Acceptance:
        """alpha after the full budget: own curve where there is one, else the prior fitted to all curves."""
        own = self._own(architecture, context)
        if own is not None:
            return own
        found = self.prior_.predict(architecture, context)
        return Acceptance(_with_std(found.alpha, self.sampling_std), found.drift)

    def difference_std(self, first: Architecture, second: Architecture, context: AcceptanceContext) -> float:
        """Std of the difference of the two logits. Between trained shapes it is that of their curves: the texts are shared."""
        if first == second:
            return 0.0
        trained = [arch for arch in (first, second) if arch in self.trained_ or arch in self.observed_]
        if len(trained) == 2:
            return math.hypot(*(self._logit_std(arch) for arch in trained))
        fitted = self.prior_.difference_std(first, second, context)
        return math.hypot(fitted, self._logit_std(trained[0])) if trained else fitted

    def _logit_std(self, architecture: Architecture) -> float:
        alpha = self.observed_[architecture].alpha if architecture in self.observed_ else self.trained_[architecture]
        return alpha.std / max(alpha.value * (1 - alpha.value), 1e-6)


def _with_std(alpha: Estimate, more: float) -> Estimate:
    return Estimate(alpha.value, math.hypot(alpha.std, more), alpha.source) if more else alpha


def _clamped(alpha: float) -> float:
    return min(max(alpha, 0.002), 0.998)
