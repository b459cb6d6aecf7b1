"""The supernet's rung, and whether it has earned it.

The alpha of a slice of a supernet is not the alpha of a draft trained alone: it is lower, and how much lower depends on the
shape. It helps only where it *ranks* shapes better than the prior does, which costs nothing. So a search trains a few anchor
shapes alone anyway (they are candidates for the next rung), and compares both orders with theirs: `check`. Where the supernet
does not win, the search goes from the prior to successive halving.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from archsearch.acceptance.estimator import Acceptance, AcceptanceContext, AcceptanceObservation
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.speedup import alpha_estimate, clamped, logit, logit_std

MIN_ANCHORS: Final = 4  # fewer say nothing about an order: three are sorted by chance once in six times


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation, ties sharing their mean rank; 0 where one of the two is constant.

    Raises ArchsearchError for fewer than two pairs.
    """
    if len(first) != len(second) or len(first) < 2:
        raise ArchsearchError(f"a rank correlation needs two lists of the same length, at least 2: {len(first)}, {len(second)}")
    one, other = _ranks(first), _ranks(second)
    one, other = one - one.mean(), other - other.mean()
    size = math.sqrt(float(one @ one) * float(other @ other))
    return float(one @ other) / size if size else 0.0


def _ranks(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    below = (array[None] < array[:, None]).sum(1)
    equal = (array[None] == array[:, None]).sum(1)
    return below + (equal - 1) / 2


def earned(rank_correlation_supernet: float, rank_correlation_prior: float, *, anchors: int, margin: float = 0.02) -> bool:
    """Whether the supernet ranks the anchors better than the prior, by more than a hair and on enough of them."""
    return anchors >= MIN_ANCHORS and rank_correlation_supernet > rank_correlation_prior + margin


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the supernet is used, the two rank correlations it rests on, and the sentence that says so."""

    earned: bool
    supernet: float
    prior: float
    anchors: int
    reason: str


def check(
    slices: Mapping[Architecture, float], prior: Mapping[Architecture, float], alone: Mapping[Architecture, float]
) -> Verdict:
    """Compare the orders of the supernet's slices and of the prior with that of drafts trained alone."""
    shapes = [arch for arch in alone if arch in slices and arch in prior]
    if len(shapes) < MIN_ANCHORS:
        return Verdict(False, 0.0, 0.0, len(shapes), f"supernet off: {len(shapes)} anchors trained alone, {MIN_ANCHORS} needed")
    final = [alone[arch] for arch in shapes]
    ours = spearman([slices[arch] for arch in shapes], final)
    theirs = spearman([prior[arch] for arch in shapes], final)
    won = earned(ours, theirs, anchors=len(shapes))
    words = "on: it ranks" if won else "off: it does not rank"
    reason = f"supernet {words} {len(shapes)} anchors better than the prior (Spearman {ours:.2f} against {theirs:.2f})"
    return Verdict(won, ours, theirs, len(shapes), reason)


class SupernetAcceptance:
    """alpha of a stand-alone draft from the alpha of its slice: logit(alone) = offset + scale logit(slice) + noise.

    `slices`: alpha of each covered shape's slice; other shapes are the prior's. Offset, scale and noise start from
    `offset`, `scale` (mean, std) and are updated by `fit` with drafts that were trained alone.
    """

    def __init__(
        self,
        slices: Mapping[Architecture, float],
        *,
        prior: PriorAcceptance | None = None,
        offset: tuple[float, float] = (0.5, 0.5),
        scale: tuple[float, float] = (1.0, 0.3),
        noise_std: float = 0.12,
    ) -> None:
        self.slices = slices
        self.prior = prior
        self.offset = offset
        self.scale = scale
        self.noise_std = noise_std
        self.fit([])

    def fit(self, observations: Sequence[AcceptanceObservation]) -> Self:
        """Learn offset and scale from shapes that were trained alone and have a slice; the prior learns from all."""
        prior = copy.deepcopy(self.prior) if self.prior else PriorAcceptance()  # fitting must not touch the one given
        self.prior_ = prior.fit(observations)
        self.coefficients_ = np.array([self.offset[0], self.scale[0]])
        self.covariance_ = np.diag([self.offset[1] ** 2, self.scale[1] ** 2])
        used = [o for o in observations if o.architecture in self.slices]
        self.source_ = "modelled"
        if used:
            rows = np.stack([self._row(o.architecture) for o in used])
            noise = self.noise_std**2 + np.array([logit_std(o.alpha) for o in used]) ** 2
            gain = self.covariance_ @ rows.T @ np.linalg.inv(rows @ self.covariance_ @ rows.T + np.diag(noise))
            targets = np.array([logit(clamped(o.alpha.value)) for o in used])
            self.coefficients_ = self.coefficients_ + gain @ (targets - rows @ self.coefficients_)
            updated = self.covariance_ - gain @ rows @ self.covariance_
            self.covariance_ = (updated + updated.T) / 2
        return self

    def _row(self, architecture: Architecture) -> np.ndarray:
        return np.array([1.0, logit(clamped(self.slices[architecture]))])

    def predict(self, architecture: Architecture, context: AcceptanceContext) -> Acceptance:
        """alpha of the shape trained alone; the prior's where the supernet has no slice of it."""
        found = self.prior_.predict(architecture, context)
        if architecture not in self.slices:
            return found
        row = self._row(architecture)
        std = math.sqrt(float(row @ self.covariance_ @ row) + self.noise_std**2)
        return Acceptance(alpha_estimate(float(row @ self.coefficients_), std, self.source_), found.drift)

    def difference_std(self, first: Architecture, second: Architecture, context: AcceptanceContext) -> float:
        """Std of the difference of the two logits; offset and most of scale cancel between slices."""
        if first == second:
            return 0.0
        if first not in self.slices or second not in self.slices:
            return self.prior_.difference_std(first, second, context)
        gap = self._row(first) - self._row(second)
        return math.sqrt(float(gap @ self.covariance_ @ gap) + 2 * self.noise_std**2)
