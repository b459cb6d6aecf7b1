"""The lowest rung: what published measurements say about the alpha of a shape that nobody has
trained.

    logit(alpha) = x . beta + target + e
    beta ~ N(mean, covariance)  one coefficient per term of COEFFICIENTS

Effects are nearly additive in logit(alpha) across published studies. The table of published
measurements is benchmarks/data/published.csv, with this project's own sketches in anchors.yaml. A
term that it covers has the posterior of a regression with random effects
(`benchmarks/published_levels.py`). Other terms (narrow or over-wide drafts, fewer KV heads,
windows) keep the prior of its `PriorTerms`. `published_fit.json` and `known_targets.npz` hold the
outcome: nothing is fitted here.

For a *new* target the spread over studies and lots is part of the intercept's std, the spread of a
domain over studies and data sets part of each domain's. All drafts of a search share both: the std
of a *difference* between two shapes (about 0.15 for usual ones) is far below the absolute one
(about 0.6).

`fit` is the conjugate update of all coefficients: one measured draft moves the intercept almost
wholly, several sharpen the slopes. What was measured on another text has that text's own effect: a
Gaussian process over texts, correlated by how alike their words are (`text_correlation`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Final, Self

import numpy as np

from archsearch.acceptance.estimator import Acceptance, AcceptanceContext, AcceptanceObservation
from archsearch.acceptance.known_targets import known_target
from archsearch.acceptance.terms import (
    COEFFICIENTS,
    FEATURE_DRAFTERS,
    REFERENCE_GAMMA,
    SHAPE_TERMS,
    Term,
    domain_terms,
    load_fit,
    lot_term,
    regressors,
    shape_terms,
    tokens_of,
)
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import ShapeGrid
from archsearch.errors import ArchsearchError
from archsearch.estimate import Array, Estimate, Numbers
from archsearch.speedup import alpha_from_tau, logit, rising_root, sigmoid, tau

# FR-Spec (Llama-3-8B, EAGLE-2): tau loses 2.3 h^1.54 % when the head is cut by 2^h, at a tau of
# 3.89 with drafts 6 deep.
FRSPEC_TAU: Final = 3.89
FRSPEC_DEPTH: Final = 6

# What no term explains about a shape. Differences between independent drafts of a left-out study
# miss by 0.12 on average (benchmarks/prior_figures.py), which is 0.1 for each of the two.
SHAPE_NOISE_STD: Final = 0.10
# Doubt about the trimmed vocabulary: per halving by the rule; of the whole term where coverage is
# known.
VOCABULARY_STD_PER_HALVING: Final = 0.04
VOCABULARY_STD_KNOWN: Final = 0.03
# Logit per position of an independent draft, counted from an alpha that is the mean over all
# tokens, as the prior's is: none, with doubt. The first position lies below that mean (a round
# starts after a miss) and the later ones above, which nearly
# cancels: the closed form is 0 to 5 % too high at gamma 4 to 8 in nine greedy traces of this
# project (three of the demo, six sketches) and 0 to 4 % in sampled published sweeps (NeMo-RL). From
# the *first* position acceptance rises when greedy (published_fit.json).
INDEPENDENT_DRIFT: Final = Term(0.0, 0.05)

# Std of logit(alpha) over kinds of prompts, one shape distilled on each
# (benchmarks/text_likeness.py). The table's data sets, whose drafts are larger and saw much of
# everything, spread by half as much.
NARROW_TEXT_STD: Final = 0.65
# Domains whose texts are alike, and those whose data sets are: the others spread more.
ALIKE_TEXTS: Final = ("chat", "code")
ALIKE_DATASETS: Final = ("chat",)
# The correlation of two texts' effects is their likeness to this power
# (benchmarks/text_likeness.py).
LIKENESS_POWER: Final = 1.0

# What version 0.1.0 wrote to prior.json, in its order: without names.
OLD_COEFFICIENTS: Final = (
    *"intercept size target_size depth single_layer overwide narrow temperature tokens early"
    " grouped".split(),
    *"single_kv_head cut_by_window window sees_target".split(),
    *(
        f"domain {name}"
        for name in "chat code math qa summarisation translation completion mixed narrow".split()
    ),
    *(name for name in COEFFICIENTS if name.startswith("drafter ")),
)
# Terms of versions 0.1.0 and 0.2.0 in the place of `learnt`: see `earlier_terms`.
EARLIER_TERMS: Final = ("tokens", "shared_training", "other_training")
KNOWN_NAMES: Final = {*COEFFICIENTS, *EARLIER_TERMS, "domain random"}


def earlier_terms(terms: Mapping[str, float], context: AcceptanceContext) -> dict[str, float]:
    """What versions 0.1.0 and 0.2.0 knew of a draft's training and windows, so that a run of theirs
    is scored on as it began: decades of tokens above and below 200k, or that it was not made for
    the target; all halvings by windows alike."""
    cut = {"cut_by_window": terms.get("cut_by_window", 0.0) + terms.get("cut_far", 0.0)}
    if context.training != "target":
        return cut | {f"{context.training}_training": 1.0, "early": 0.0}
    seen = max(float(tokens_of(context, 0.0)), 1e3)
    return cut | {
        "tokens": math.log10(max(seen, 2e5) / 5e5),
        "early": math.log10(min(seen, 2e5) / 2e5),
    }


# --- trimmed heads


def trimmed_alpha(alpha: Numbers, coverage: Numbers) -> Numbers:
    """alpha of a draft whose head covers the share `coverage` of the target's tokens, from its
    alpha with a full head; numbers or arrays.

    Rare tokens are the hard ones, which a weak draft never had. The chance that a token outside the
    head would have been accepted is taken as alpha^4, hence alpha * (1 - (1 - coverage) * alpha^3).
    A sketch with 93 % coverage lost 0.00 of 0.30 and 0.033 of 0.82 (this: 0.001 and 0.032).
    """
    return np.minimum(alpha * (1.0 - (1.0 - coverage) * alpha**3), coverage)


@cache
def assumed_coverage(halvings: float) -> float:
    """Coverage of a head cut by 2^halvings, unknown text: what makes `trimmed_alpha` lose FR-Spec's
    2.3 h^1.54 % of tau."""
    if halvings <= 0:
        return 1.0
    full = alpha_from_tau(FRSPEC_TAU, FRSPEC_DEPTH)
    lost = min(0.023 * halvings**1.54, 1.0 - 1.0 / FRSPEC_TAU)
    trimmed = alpha_from_tau(FRSPEC_TAU * (1.0 - lost), FRSPEC_DEPTH)
    return max(1.0 - (1.0 - trimmed / full) / full**3, 0.0)


def _untrimmed_alpha(alpha: float, coverage: float) -> float:
    """The full-head alpha that `trimmed_alpha` turns into `alpha` (the smallest, where the curve
    bends back)."""
    if coverage >= 1.0:
        return alpha
    return rising_root(lambda full: float(trimmed_alpha(full, coverage)), alpha, alpha, 0.995)


def text_std(domain: str, spread: Mapping[str, float], *, own: bool = True) -> float:
    """Std in logit of a text's own effect in a domain: as the table's data sets spread, and with
    `own` of `narrow` as it was measured here where that is more."""
    text = spread["text" if domain in ALIKE_TEXTS else "loose_text"]
    dataset = spread["dataset" if domain in ALIKE_DATASETS else "loose_dataset"]
    measured = NARROW_TEXT_STD if own and domain == "narrow" else 0.0
    return max(measured, math.hypot(text, dataset))


def text_correlation(likeness: float) -> float:
    """Correlation of the effects of two texts on logit(alpha), from how alike their prompts are."""
    return min(max(likeness, 0.0), 1.0) ** LIKENESS_POWER


def _terms(
    arch: Architecture, context: AcceptanceContext, names: tuple[str, ...]
) -> dict[str, float]:
    terms = {**shape_terms(arch, context), lot_term(context.drafter, context.training): 1.0}
    return terms | earlier_terms(terms, context) if names != COEFFICIENTS else terms


@lru_cache(maxsize=4096)  # a climb compares every shape with every other
def _row(arch: Architecture, context: AcceptanceContext, names: tuple[str, ...]) -> Array:
    return regressors(_terms(arch, context, names), names)


@dataclass(frozen=True)
class Part:
    """A term's part of logit(alpha), with its std and what it rests on."""

    term: str
    contribution: float
    std: float
    evidence: str


class PriorAcceptance:
    """alpha of an untrained shape from published measurements, sharpened by what was measured for
    this target.

    After `fit`: `coefficients_` and `covariance_` (in the order of COEFFICIENTS), `observations_`
    (how many were used), `source_`.
    """

    def __init__(self) -> None:
        self._start(None)

    def _start(self, target: Architecture | None) -> None:
        """Nothing measured: what the table says of drafts for `target`, by its shape."""
        self._published = load_fit()
        self._target = target
        known = (known_target(target) if target is not None else None) or self._published
        self.names_ = COEFFICIENTS
        self.coefficients_, self.covariance_ = known.mean.copy(), known.covariance.copy()
        narrow, spread = self.names_.index("domain narrow"), self._published.spread
        # The table's share of a text's effect is in there already.
        here, table = (text_std("narrow", spread, own=own) for own in (True, False))
        self.covariance_[narrow, narrow] += here**2 - table**2
        self.observations_ = 0
        self.source_ = "prior"
        self._kept = False

    def about(self, target: Architecture | None) -> Self:
        """The same estimator, knowing which target it is asked about; what was fitted or read back
        stays."""
        if not self._kept and target != self._target:
            self._start(target)
        return self

    def _row(self, arch: Architecture, context: AcceptanceContext) -> Array:
        return _row(arch, context, self.names_)

    def _coverage(self, arch: Architecture, context: AcceptanceContext) -> tuple[float, float]:
        """(coverage of the head, std of its effect in logit)."""
        if not arch.trimmed:
            return 1.0, 0.0
        if context.coverage is not None:
            return context.coverage.share(arch.head_rows), VOCABULARY_STD_KNOWN
        halvings = math.log2(arch.vocab_size / arch.head_rows)
        return assumed_coverage(halvings), VOCABULARY_STD_PER_HALVING * halvings

    def fit(self, observations: Sequence[AcceptanceObservation]) -> Self:
        """Update the coefficients with measured drafts of one target (conjugate, Gaussian in
        logit); starts from the published ones each time. An observation counts in its own context:
        its domain, temperature and training tokens are part of it."""
        self._start(observations[0].context.target if observations else self._target)
        if not observations:
            return self
        rows, targets, noise = [], [], []
        for observation in observations:
            arch, context = observation.architecture, observation.context
            alpha = min(max(observation.alpha.value, 0.005), 0.995)
            coverage, vocabulary_std = self._coverage(arch, context)
            rows.append(self._row(arch, context))
            targets.append(logit(_untrimmed_alpha(alpha, coverage)))
            measured_std = observation.alpha.std / (alpha * (1.0 - alpha))
            noise.append(SHAPE_NOISE_STD**2 + vocabulary_std**2 + measured_std**2)
        x, y = np.stack(rows), np.array(targets)
        shared, among = self._other_texts(observations)
        cross = self.covariance_ @ x.T + shared  # [coefficients, observations]
        whole = x @ self.covariance_ @ x.T + x @ shared + shared.T @ x.T + among + np.diag(noise)
        gain = cross @ np.linalg.inv(whole)
        self.coefficients_ = self.coefficients_ + gain @ (y - x @ self.coefficients_)
        updated = self.covariance_ - gain @ cross.T
        self.covariance_ = (updated + updated.T) / 2
        self.observations_, self._kept = len(observations), True
        self.source_ = "modelled"
        return self

    def _other_texts(self, observations: Sequence[AcceptanceObservation]) -> tuple[Array, Array]:
        """What texts other than the asked one add to each observation: its covariance with the
        coefficients [coefficients, observations] and among observations [observations,
        observations]; zero for the asked text.

        A domain's coefficient holds the effect of the asked text, u ~ N(0, s^2). An observation on
        text t has u_t in its place, Cov(u_t, u) = k_t s^2, so it departs by u_t - u. Two other
        texts are taken to be alike through the asked one: k_t k_v.
        """
        count = len(observations)
        shared, among = np.zeros((len(COEFFICIENTS), count)), np.zeros((count, count))
        for i, one in enumerate(observations):
            apart = 1.0 - text_correlation(one.likeness)
            if apart <= 0.0:
                continue
            variance = text_std(one.context.domain, self._published.spread) ** 2
            shared[self.names_.index(f"domain {one.context.domain}"), i] = -variance * apart
            for j, other in enumerate(observations):
                if other.context.domain == one.context.domain:
                    same = i == j or one.text == other.text
                    away = 2.0 if same else 1.0 - text_correlation(other.likeness)
                    among[i, j] = variance * apart * away
        return shared, among

    def to_dict(self) -> dict[str, object]:
        """What was learnt, so that a search that is continued scores as it began."""
        return {
            "observations": self.observations_,
            "made": None,  # versions until 0.2.0 took a new draft to be made as published ones were
            "names": list(self.names_),
            "coefficients": self.coefficients_.tolist(),
            "covariance": self.covariance_.tolist(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`, also of what version 0.1.0 wrote. Raises ArchsearchError for
        what is neither."""
        prior = cls()
        other = ArchsearchError(
            "this run's acceptance prior was written by another version of archsearch; use another"
            " --run"
        )
        try:
            mean = np.array(data["coefficients"], float)
            covariance = np.array(data["covariance"], float)
            names = tuple(data.get("names", OLD_COEFFICIENTS))
            observations = int(data["observations"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise other from error
        size = (len(names),)
        fits = mean.shape == size and covariance.shape == 2 * size
        if not fits or not set(names) <= KNOWN_NAMES:
            raise other
        # "random" was a domain of which nothing was known
        kept = [i for i, name in enumerate(names) if name != "domain random"]
        prior.names_ = tuple(names[i] for i in kept)
        prior.coefficients_, prior.covariance_ = mean[kept], covariance[np.ix_(kept, kept)]
        if "names" not in data:  # its domains were no sums of others, its intercept held the lot
            parts = domain_terms("mixed")
            del parts["domain mixed"]
            for part, share in parts.items():
                change = np.eye(len(names))
                change[names.index("domain mixed"), names.index(part)] = -share
                prior.coefficients_ = change @ prior.coefficients_
                prior.covariance_ = change @ prior.covariance_ @ change.T
        prior.observations_, prior._kept = observations, True
        prior.source_ = "modelled" if prior.observations_ else "prior"
        return prior

    def alphas(self, grid: ShapeGrid, context: AcceptanceContext) -> tuple[Numbers, float]:
        """(alpha of every independent draft of a grid, as `predict` has it of one; the drift along
        the block)."""
        self.about(context.target)
        terms = _terms(grid, context, self.names_)
        slope = dict(zip(self.names_, self.coefficients_.tolist(), strict=True))
        level = sum(slope.get(name, 0.0) * value for name, value in terms.items())
        full = 1.0 / (1.0 + np.exp(-level))
        heads = [grid.at((0, 0, 0, head)) for head in range(grid.shape[-1])]
        coverage = np.array([self._coverage(arch, context)[0] for arch in heads])
        return trimmed_alpha(full, coverage), INDEPENDENT_DRIFT.mean

    def predict(self, architecture: Architecture, context: AcceptanceContext) -> Acceptance:
        """alpha with its absolute std (about 0.6 logit before `fit`), and the drift along the
        block.

        Of an independent draft: the mean over tokens. Of a feature drafter: at the first position,
        from which it sinks.
        """
        self.about(context.target)
        features = self._row(architecture, context)
        full = sigmoid(float(features @ self.coefficients_))
        coverage, vocabulary_std = self._coverage(architecture, context)
        alpha = float(trimmed_alpha(full, coverage))
        variance = (
            float(features @ self.covariance_ @ features) + SHAPE_NOISE_STD**2 + vocabulary_std**2
        )
        if context.tokens_std and context.trained_tokens:
            tokens = (context.trained_tokens * 10.0**half for half in (0.5, -0.5))
            more, fewer = (
                self._row(architecture, replace(context, trained_tokens=each)) for each in tokens
            )
            variance += float((more - fewer) @ self.coefficients_ * context.tokens_std) ** 2
        drift = INDEPENDENT_DRIFT
        if context.drafter in FEATURE_DRAFTERS:
            drift = self._published.drift["block" if context.drafter == "block" else "feature"]
            alpha = alpha_from_tau(tau(alpha, REFERENCE_GAMMA), REFERENCE_GAMMA, drift.mean)
        std = alpha * (1.0 - alpha) * math.sqrt(max(variance, 0.0))
        return Acceptance(
            Estimate(alpha, std, self.source_), Estimate(drift.mean, drift.std, "prior")
        )

    def difference_std(
        self, first: Architecture, second: Architecture, context: AcceptanceContext
    ) -> float:
        """Std of the difference of the two logits: 0 for the same shape, about 0.15 for usual
        neighbours of a search."""
        if first == second:
            return 0.0
        self.about(context.target)
        gap = self._row(first, context) - self._row(second, context)
        halvings = abs(math.log2(first.head_rows / second.head_rows))
        vocabulary_std = VOCABULARY_STD_PER_HALVING * halvings
        if context.coverage is not None:
            vocabulary_std = VOCABULARY_STD_KNOWN if halvings else 0.0
        return self._apart_std(gap, vocabulary_std)

    def _apart_std(self, gap: Array, *vocabulary_stds: float) -> float:
        """Of two logits whose regressors are `gap` apart."""
        square = max(float(gap @ self.covariance_ @ gap), 0.0) + 2.0 * SHAPE_NOISE_STD**2
        for std in vocabulary_stds:
            square += std**2
        return math.sqrt(square)

    def gap_std(
        self,
        first: tuple[Architecture, AcceptanceContext],
        second: tuple[Architecture, AcceptanceContext],
    ) -> float:
        """`difference_std` of shapes in contexts of their own: drafters of two kinds for one
        target."""
        self.about(first[1].target)
        stds = (self._coverage(*each)[1] for each in (first, second))
        return self._apart_std(self._row(*first) - self._row(*second), *stds)

    def joint(self, drafts: Sequence[tuple[Architecture, AcceptanceContext]]) -> Array:
        """[n, n] covariance of logit(alpha) of drafts, each in its own context: what they share and
        what each has of its own."""
        self.about(drafts[0][1].target)
        x = np.stack([self._row(arch, context) for arch, context in drafts])
        covariance = x @ self.covariance_ @ x.T
        for i, (arch, context) in enumerate(drafts):
            own = SHAPE_NOISE_STD**2 + self._coverage(arch, context)[1] ** 2
            same = [j for j, other in enumerate(drafts) if other == (arch, context)]
            covariance[i, same] += own
        return covariance

    def parts(self, architecture: Architecture, context: AcceptanceContext) -> list[Part]:
        """Every term's part of logit(alpha), the trimmed vocabulary's last; they add up to it. Of a
        feature drafter that is its alpha over REFERENCE_GAMMA positions, not at the first.

        Terms are correlated: the std of the whole is not the root of the sum of squares.
        """
        self.about(context.target)
        terms = _terms(architecture, context, self.names_)
        rows = []
        for index, name in enumerate(self.names_):
            if name not in terms and (name not in SHAPE_TERMS or name in _WHERE_SAID):
                continue
            value, each = terms.get(name, 0.0), float(self.coefficients_[index])
            std = math.sqrt(max(float(self.covariance_[index, index]), 0.0))
            why = f"{each:+.2f} ± {std:.2f}{self._evidence(name, value)}"
            rows.append(Part(name, value * each, abs(value) * std, why))
        why = "differences between independent drafts of left-out studies"
        rows.append(Part("unexplained", 0.0, SHAPE_NOISE_STD, why))
        full = sigmoid(math.fsum(part.contribution for part in rows))
        coverage, std = self._coverage(architecture, context)
        lost = logit(float(trimmed_alpha(full, coverage))) - logit(full)
        if not architecture.trimmed:
            why = "full head"
        elif context.coverage is not None:
            why = f"covers {100 * coverage:.1f} % of the text that was counted"
        else:
            why = f"FR-Spec's rule (arXiv 2502.14856), coverage {100 * coverage:.1f} % assumed"
        return [*rows, Part("vocabulary", lost, std, why)]

    def rows_of(self, name: str) -> int:
        """How many rows of the table, this project's own among them, say something about a term."""
        return int(self._published.rows.get(name, 0))

    def _evidence(self, name: str, value: float) -> str:
        unit, count = _UNITS.get(name), self.rows_of(name)
        basis = (
            f"{count} published and own rows" if count else "assumed: no published study varied it"
        )
        if self.observations_:
            basis += f", {self.observations_} measured for this target"
        per = f" x {value:+.2f} {unit}" if unit else ""
        return f"{per}; {basis}"


# The shape's terms are listed also where they are 0, but for these.
_WHERE_SAID: Final = (
    "learnt early late tuned head_tokens long_context sees_target block_depth"
).split()
_UNITS: Final = {
    "learnt": "logit by the law of excess loss",
    "size": "decades of body / target's from 1/15",
    "target_size": "decades of target from 10B",
    "depth": "ln(layers / 2)",
    "overwide": "ln(hidden / target's)",
    "narrow": "ln(target's hidden / hidden)",
    "temperature": "temperature",
    "early": "decades of training tokens below a million",
    "late": "decades of training tokens above a million",
    "tuned": "decades of tuning tokens from 10k",
    "head_tokens": "decades of training tokens from 300M",
    "cut_by_window": "halvings of the context by windows",
    "cut_far": "halvings beyond 95 tokens by windows",
    "long_context": "doublings of the context from 2048",
}
