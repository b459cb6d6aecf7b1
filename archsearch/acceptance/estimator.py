"""The contract of acceptance estimators, and the values that go in and come out.

An estimator follows scikit-learn's manners: the constructor only stores its arguments, `fit` learns
from measured drafts and returns itself, `predict` answers for a shape. What differs between
estimators (prior, measured, short trainings, ...) is where they look.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, Self, get_args

from archsearch import speedup
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate, Numbers
from archsearch.needs import TrainingBudget

# Which text acceptance is for. `narrow`: one kind of task, the draft distilled on it; `mixed`:
# chat, code and documents together. `editing`: code that is rewritten, most of it copied.
DOMAINS: Final = tuple(
    "chat code editing math qa summarisation translation completion mixed narrow".split()
)
# How a draft came to know what the target writes: `target` made for it (distilled on its text, or
# reading its hidden states); `shared` through the target's own training (same vendor, same data);
# `other` neither.
Training = Literal["target", "shared", "other"]
TRAININGS: Final[tuple[str, ...]] = get_args(Training)
# Kinds of drafters, as the columns of benchmarks/data/published.csv explain them.
DRAFTERS: Final = ("independent", "kv", "eagle1", "eagle3", "mtp", "block", "medusa", "mlp")


@dataclass(frozen=True, slots=True)
class VocabularyCoverage:
    """Which share of the user's tokens the `rows` most frequent tokens hold: sorted (rows, share)
    points."""

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        rows, shares = ([point[i] for point in self.points] for i in (0, 1))
        rising = bool(rows) and rows == sorted(set(rows)) and shares == sorted(shares)
        if not rising or rows[0] < 1 or shares[0] < 0 or shares[-1] > 1:
            raise ArchsearchError(
                "coverage needs rising points (rows, share between 0 and 1), got"
                f" {list(self.points)}"
            )

    def share(self, rows: int) -> float:
        """Coverage of a head with `rows` rows; linear in log2(rows) between points, towards nothing
        at 1 row below them."""
        import numpy as np

        known, shares = zip((1, 0.0), *self.points, strict=True)
        return float(np.interp(math.log2(max(rows, 1)), np.log2(known), shares))


@dataclass(frozen=True, slots=True)
class AcceptanceContext:
    """What acceptance depends on besides the draft's shape.

    `domain`: which text (one of DOMAINS); `coverage`: known for the user's own text, None
    otherwise; `target`: what the draft's size is relative to, and caps what size can bring (a draft
    does not agree more with a target by outgrowing it). `trained_tokens`: tokens of the target's
    text that the draft has been or will be distilled on, repeats included; None: what `budget` buys
    for a draft of its size, or without one what is usual for the target's size
    (`terms.usual_tokens`). `drafter`: `independent` (sees tokens only: what a search makes) or
    another of DRAFTERS, which see the target's hidden states (`trained_tokens` None: as published
    ones accept; `families.context_for` says what a budget buys). `training`: one of TRAININGS; only
    `target` reads `trained_tokens` and `budget`. `pretrain_tokens`: behind a draft's weights before
    the target's text; None: none of a draft made for its target, of others what is known of a model
    of its shape (`learnt.known_learning`). `tokens_std`: of log10(`trained_tokens`), where these
    are a guess.
    """

    target: Architecture | None = None
    temperature: float = 0.0
    context_len: int = 512
    domain: str = "chat"
    coverage: VocabularyCoverage | None = None
    trained_tokens: float | None = None
    drafter: str = "independent"
    training: str = "target"
    budget: TrainingBudget | None = None
    pretrain_tokens: float | None = None
    tokens_std: float = 0.0


@dataclass(frozen=True, slots=True)
class AcceptanceObservation:
    """A measured draft: its shape, its alpha (with the std over prompts) and where that was.

    `likeness`: of its text to the text that is asked about, 0 to 1; `text`: which text that was,
    where it is another one: drafts measured on one text share what that text is like.
    """

    architecture: Architecture
    alpha: Estimate
    context: AcceptanceContext = field(default_factory=AcceptanceContext)
    likeness: float = 1.0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """alpha at the first position and its drift along the block (logit per position; 0 gives the
    closed form of tau)."""

    alpha: Estimate
    drift: Estimate = Estimate(0.0, 0.0, "given")

    def tau(self, gamma: int) -> Estimate:
        """Tokens a round at `gamma` draft tokens, the target's own included."""
        return speedup.tau_estimate(self.alpha, gamma, self.drift)


class AcceptanceEstimator(Protocol):
    """What the search asks of every rung of the acceptance ladder."""

    def fit(self, observations: Sequence[AcceptanceObservation]) -> Self:
        """Learn from measured drafts; calling it again starts afresh."""

    def predict(self, architecture: Architecture, context: AcceptanceContext) -> Acceptance:
        """alpha with its absolute std."""

    def difference_std(
        self, first: Architecture, second: Architecture, context: AcceptanceContext
    ) -> float:
        """Std of logit(alpha of first) - logit(alpha of second): what ranks; errors that both share
        cancel."""


@dataclass(frozen=True)
class GivenAcceptance:
    """The same alpha for every shape (`--alpha 0.75`): the latency decides alone. `rounds`: (tau,
    gamma) that was given instead, over all rounds, of which alpha is the inverse."""

    alpha: float
    std: float = 0.0
    rounds: tuple[float, int] | None = None

    @classmethod
    def of_tau(cls, tau: float, gamma: int | None) -> Self:
        """From tokens a round, the target's own included, as publications print them. Raises
        ArchsearchError without a gamma, and for a tau that it does not allow."""
        if gamma is None:
            raise ArchsearchError("--tau is of one gamma: say it (--gamma N)")
        if not 1.0 <= tau <= gamma + 1:
            raise ArchsearchError(
                f"--tau {tau:g} at --gamma {gamma} must lie between 1 and {gamma + 1}: tokens a"
                " round, the target's own included"
            )
        return cls(speedup.alpha_from_tau(tau, gamma), rounds=(tau, gamma))

    def fit(self, observations: Sequence[AcceptanceObservation]) -> Self:
        """Nothing to learn: the user said so."""
        return self

    def predict(self, architecture: Architecture, context: AcceptanceContext) -> Acceptance:
        """The alpha that was given, for any shape. Raises ArchsearchError where it is no
        probability."""
        if not 0.0 <= self.alpha <= 1.0:
            raise ArchsearchError(f"alpha must lie between 0 and 1, got {self.alpha}")
        return Acceptance(Estimate(self.alpha, self.std, "given"))

    def alphas(self, grid: Architecture, context: AcceptanceContext) -> tuple[Numbers, float]:
        """The same over a grid, and no drift."""
        known = self.predict(grid, context)
        return known.alpha.value, known.drift.value

    def difference_std(
        self, first: Architecture, second: Architecture, context: AcceptanceContext
    ) -> float:
        """0: what is given is given for all shapes alike."""
        return 0.0
