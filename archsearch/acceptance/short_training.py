"""Acceptance after the full training, from short trainings of some shapes: what the climb ranks
with.

The prior is fitted to where the short trainings lead. A shape that was trained also has an effect
of its own that no term of the prior explains. Its measurement counts for that effect by its error:
the smaller the error, the more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Self

from archsearch.acceptance.estimator import Acceptance, AcceptanceContext, AcceptanceObservation
from archsearch.acceptance.prior import SHAPE_NOISE_STD, PriorAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.estimate import Estimate
from archsearch.speedup import alpha_estimate, logit, logit_std


class ExtrapolatedAcceptance:
    """`levels`: logit(alpha) of each trained shape after its short training, and the std of its own
    error; `grown`: what training on to the end adds to the logit of all alike.

    `sampling_std`: std of a measured alpha over the sample of texts, which all share; `context`:
    what the levels were measured in, with the tokens of the full training; what was not trained has
    the prior's alpha. A measurement with error e says S^2 / (S^2 + e^2) of what its shape departs
    from the fit by (S: SHAPE_NOISE_STD).
    """

    def __init__(
        self,
        levels: Mapping[Architecture, tuple[float, float]],
        grown: Estimate,
        context: AcceptanceContext,
        *,
        sampling_std: float = 0.0,
    ) -> None:
        self.levels, self.grown, self.context = levels, grown, context
        self.sampling_std = sampling_std
        self.fit([])

    def fit(self, observations: Sequence[AcceptanceObservation]) -> Self:
        """Learn from the levels and from drafts measured elsewhere; a shape trained to the end
        counts as it was measured."""
        seen = {
            item.architecture
            for item in observations
            if item.context.trained_tokens == self.context.trained_tokens
        }
        ends = (
            (shape, alpha_estimate(level + self.grown.value, std, "measured"))
            for shape, (level, std) in self.levels.items()
        )
        ours = [AcceptanceObservation(*end, self.context) for end in ends if end[0] not in seen]
        self.prior_ = PriorAcceptance().fit([*observations, *ours])
        return self

    def _own_share(self, architecture: Architecture) -> float:
        """How much of a shape's own effect its training has shown: 0 for none, 1 for all."""
        if architecture not in self.levels:
            return 0.0
        return SHAPE_NOISE_STD**2 / (SHAPE_NOISE_STD**2 + self.levels[architecture][1] ** 2)

    def predict(self, architecture: Architecture, context: AcceptanceContext) -> Acceptance:
        """alpha after the full training; the prior's answer where nothing was trained at all."""
        found = self.prior_.predict(architecture, context)
        if not self.levels:
            return found
        level, variance = logit(found.alpha.value), logit_std(found.alpha) ** 2
        share = self._own_share(architecture)
        if share:
            # against the prior where it was trained, which is not where it is asked about
            here = self.prior_.predict(architecture, self.context).alpha.value
            departs = self.levels[architecture][0] + self.grown.value - logit(here)
            level += share * departs
            variance = max(variance - share * SHAPE_NOISE_STD**2, 0.0)
        alpha = alpha_estimate(level, math.sqrt(variance + self.grown.std**2), "modelled")
        std = math.hypot(alpha.std, self.sampling_std)
        return Acceptance(Estimate(alpha.value, std, alpha.source), found.drift)

    def difference_std(
        self, first: Architecture, second: Architecture, context: AcceptanceContext
    ) -> float:
        """Std of the difference of the two logits; what both trainings have shown of their own
        effects is known."""
        if first == second:
            return 0.0
        # of both effects the part that trainings have shown is no doubt any more
        known = (self._own_share(first) + self._own_share(second)) * SHAPE_NOISE_STD**2
        return math.sqrt(max(self.prior_.difference_std(first, second, context) ** 2 - known, 1e-6))
