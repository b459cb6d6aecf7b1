"""The lowest rung: what published measurements say about the alpha of a shape that nobody has trained.

    logit(alpha) = x . beta + target + e        beta ~ N(mean, covariance), one coefficient per term of COEFFICIENTS

Effects are nearly additive in logit(alpha) across published studies. Where the table of published measurements (published.csv,
with this project's own sketches in anchors.yaml) says something about a term, its coefficient is the posterior of a regression
with random effects (`published.py`); where it says nothing (narrow or over-wide drafts, fewer KV heads, windows) it keeps the
belief of `PriorTerms`. `published_fit.json` holds the outcome, so that nothing is fitted here.

What is believed of a *new* target is wider than the coefficients: the spread over studies and lots is part of the intercept's
std, the spread of a domain over studies and data sets part of each domain's. All drafts of a search share both, so the std of a
*difference* between two shapes (about 0.15 for usual ones) is far below the absolute one (about 0.6).

**Which size.** Parameters of the body: layers and final norm, without embedding and head, relative to the target's. The embedding
is a lookup (tokens it holds do not make the draft wiser) and the head's rows have their own term (trimmed vocabulary); counting
either would let a 49k-row head pass for capacity: in a 2-layer draft of a 135M target it holds four times the parameters of the
layers. Capped at the target's body.

`fit` is the conjugate update of all coefficients: one measured draft moves the intercept almost wholly, several sharpen the
slopes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from archsearch.acceptance.estimator import DOMAINS, DRAFTERS, Acceptance, AcceptanceContext, AcceptanceObservation
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import body_parameters
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.files import read_json
from archsearch.speedup import alpha_from_tau, drifting_positions, logit, sigmoid, tau, tau_from_positions

HERE: Final = Path(__file__).parent
ANCHORS_FILE: Final = HERE / "anchors.yaml"
PUBLISHED_FILE: Final = HERE / "published.csv"
FIT_FILE: Final = HERE / "published_fit.json"

# FR-Spec (Llama-3-8B, EAGLE-2): tau loses 2.3 h^1.54 % when the head is cut by 2^h, at a tau of 3.89 with drafts 6 deep.
FRSPEC_TAU: Final = 3.89
FRSPEC_DEPTH: Final = 6

# Where each regressor is 0: 2 layers for a target whose body is 15 times larger, greedy, half a million tokens of distillation.
REFERENCE_LAYERS: Final = 2
REFERENCE_RATIO: Final = 1 / 15
REFERENCE_TOKENS: Final = 5e5
EARLY_TOKENS: Final = 2e5
REFERENCE_TARGET: Final = 1e10
# The body of a target that the context does not name: that of the anchors.
UNKNOWN_TARGET: Final = 1.06e8
USUAL_TOKENS_MOST: Final = 4e8
# The gamma at which the alpha of a feature drafter (which sinks along the block) is meant.
REFERENCE_GAMMA: Final = 5

FEATURE_DRAFTERS: Final = tuple(name for name in DRAFTERS if name not in ("independent", "medusa", "mlp"))


@dataclass(frozen=True, slots=True)
class Term:
    """One coefficient in logit(alpha): what is believed before any table is read."""

    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class PriorTerms:
    """What is believed without the table. Wide where the table decides (its rows are not counted twice), and the last word where
    no published study varied the term."""

    # Greedy, chat, an independent draft distilled on half a million tokens. The table decides.
    intercept: Term = Term(0.5, 1.0)
    # Per decade of the draft's body / the target's. The table decides.
    size: Term = Term(0.3, 0.3)
    # Per decade of the target's body at the same ratio; with a coefficient as large as `size` only the draft's size would count.
    target_size: Term = Term(0.0, 0.2)
    # Per ln(layers) at equal size. The table decides, with few independent drafts.
    depth: Term = Term(0.15, 0.15)
    # A single layer that does not see the target's hidden states, beyond size and depth. One attention layer cannot copy what
    # followed earlier (that takes two), and arXiv 2402.01528 saw TAR fall "sharply" there without printing it. The table adds
    # KVShot and this project's sketches, whose minutes of training use depth less.
    single_layer: Term = Term(-0.35, 0.15)
    # Per ln(hidden / target's hidden), above it only: no published sweep of width, so no gain and no loss but doubt.
    overwide: Term = Term(0.0, 0.10)
    # Per ln(target's hidden / hidden), below it only. Assumed: a narrower draft cannot take over the target's embedding and
    # head, it must squeeze them. No published sweep that holds the size.
    narrow: Term = Term(-0.20, 0.15)
    # Per unit of temperature. The table decides.
    temperature: Term = Term(-0.2, 0.2)
    # Per decade of tokens above EARLY_TOKENS. Log-linear in tokens: Scylla (arXiv 2505.07858). The table decides.
    tokens: Term = Term(0.3, 0.15)
    # Per decade of tokens below EARLY_TOKENS. This project's learning curves: 34k to 100k tokens +0.54, 49k to 150k +0.55.
    early: Term = Term(1.0, 0.3)
    # Attention variants. No published ablation; what fewer KV heads lose in parameters is in `size`.
    grouped: Term = Term(0.0, 0.05)
    single_kv_head: Term = Term(0.0, 0.05)
    # A window that cuts the context, per halving and share of sliding layers. Assumed: window drafters keep 86 to 94 % of their
    # proposals when 99 % of the cache is dropped.
    cut_by_window: Term = Term(-0.04, 0.04)
    # Any window, even one longer than the context.
    window: Term = Term(0.0, 0.05)
    # A drafter that reads the target's hidden states or cache instead of tokens only; its kind comes on top. The table decides.
    sees_target: Term = Term(0.0, 1.0)


# What no term explains about a shape. Differences between independent drafts of a left-out study miss by 0.12 on average
# (benchmarks/prior_figures.py), which is 0.1 for each of the two.
SHAPE_NOISE_STD: Final = 0.10
# Doubt about the trimmed vocabulary: per halving by the rule; of the whole term where coverage is known.
VOCABULARY_STD_PER_HALVING: Final = 0.04
VOCABULARY_STD_KNOWN: Final = 0.03
# Logit per position of an independent draft, counted from an alpha that is the mean over all tokens, as the prior's is: none,
# with doubt. The first position lies below that mean (a round starts after a miss) and the later ones above, which nearly
# cancels: the closed form is 0 to 5 % too high at gamma 4 to 8 in nine greedy traces of this project (three of the demo, six
# sketches) and 0 to 4 % in sampled published sweeps (NeMo-RL). From the *first* position acceptance rises when greedy:
# `published.Drifts`.
INDEPENDENT_DRIFT: Final = Term(0.0, 0.05)

SHAPE_TERMS: Final = tuple(field.name for field in fields(PriorTerms))
DOMAIN_TERMS: Final = tuple(f"domain {name}" for name in DOMAINS)
DRAFTER_TERMS: Final = tuple(f"drafter {name}" for name in DRAFTERS if name != "independent")
# In the order of coefficients_ and covariance_.
COEFFICIENTS: Final = SHAPE_TERMS + DOMAIN_TERMS + DRAFTER_TERMS
_INDEX: Final = {name: number for number, name in enumerate(COEFFICIENTS)}


# --- trimmed heads ---------------------------------------------------------------------------------------------------------


def trimmed_alpha(alpha: float, coverage: float) -> float:
    """alpha of a draft whose head covers the share `coverage` of the target's tokens, from its alpha with a full head.

    A dropped token can no longer be accepted, but a weak draft never had it: rare tokens are the hard ones. The chance that a
    token outside the head would have been accepted is taken as alpha^4, hence alpha * (1 - (1 - coverage) * alpha^3). Checked
    against: a sketch with 93 % coverage lost 0.00 of 0.30 and 0.033 of 0.82 (this: 0.001 and 0.032); alpha = 1 gives `coverage`,
    as it must.
    """
    return min(alpha * (1.0 - (1.0 - coverage) * alpha**3), coverage)


@cache
def assumed_coverage(halvings: float) -> float:
    """Coverage of a head cut by 2^halvings, unknown text: what makes `trimmed_alpha` lose FR-Spec's 2.3 h^1.54 % of tau."""
    if halvings <= 0:
        return 1.0
    full = alpha_from_tau(FRSPEC_TAU, FRSPEC_DEPTH)
    lost = min(0.023 * halvings**1.54, 1.0 - 1.0 / FRSPEC_TAU)
    trimmed = alpha_from_tau(FRSPEC_TAU * (1.0 - lost), FRSPEC_DEPTH)
    return max(1.0 - (1.0 - trimmed / full) / full**3, 0.0)


def _untrimmed_alpha(alpha: float, coverage: float) -> float:
    """The full-head alpha that `trimmed_alpha` turns into `alpha` (the smallest, where the curve bends back)."""
    low, high = alpha, 0.995
    if coverage >= 1.0 or trimmed_alpha(high, coverage) <= alpha:
        return alpha if coverage >= 1.0 else high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if trimmed_alpha(middle, coverage) < alpha else (low, middle)
    return (low + high) / 2


# --- regressors ------------------------------------------------------------------------------------------------------------


def size_terms(body: float, target_body: float) -> dict[str, float]:
    """`size` and `target_size` of a body of parameters relative to the target's."""
    ratio = min(body / target_body, 1.0)
    return {"size": math.log10(ratio / REFERENCE_RATIO), "target_size": math.log10(target_body / REFERENCE_TARGET)}


def usual_tokens(target: Architecture | None) -> float:
    """Tokens that a draft is assumed to be distilled on where nobody says: in proportion to the target's body, from half a
    million for 100M parameters (minutes on a CPU) to the 400 million of published drafts. Assumed."""
    body = body_parameters(target) if target else UNKNOWN_TARGET
    return min(REFERENCE_TOKENS * max(body / UNKNOWN_TARGET, 1.0), USUAL_TOKENS_MOST)


def token_terms(tokens: float) -> dict[str, float]:
    """`tokens` and `early`; both 0 at REFERENCE_TOKENS."""
    seen = max(float(tokens), 1e3)
    late = math.log10(max(seen, EARLY_TOKENS) / REFERENCE_TOKENS)
    return {"tokens": late, "early": math.log10(min(seen, EARLY_TOKENS) / EARLY_TOKENS)}


def shape_terms(arch: Architecture, context: AcceptanceContext) -> dict[str, float]:
    """Regressor of every term that is not 0, for a shape in a context. Raises ArchsearchError on an unknown domain or drafter."""
    if context.domain not in DOMAINS:
        raise ArchsearchError(f"unknown domain {context.domain!r}; use one of {', '.join(sorted(DOMAINS))}")
    if context.drafter not in DRAFTERS:
        raise ArchsearchError(f"unknown kind of drafter {context.drafter!r}; use one of {', '.join(DRAFTERS)}")
    result = {"intercept": 1.0, f"domain {context.domain}": 1.0, "temperature": context.temperature}
    tokens = usual_tokens(context.target) if context.trained_tokens is None else context.trained_tokens
    result |= token_terms(tokens)
    if context.drafter != "independent":
        # Their layers have the target's width, and what they see of the target outweighs their own size: the kind says it all.
        return result | {"sees_target": 1.0, f"drafter {context.drafter}": 1.0}
    result |= _body_terms(arch, context.target)
    sliding, cut = 0.0, 0.0
    if "S" in arch.window_pattern:
        for window in arch.windows():
            if window:
                sliding = 1.0
                cut += max(0.0, math.log2(max(context.context_len, 1) / window))
    return result | {"cut_by_window": cut / arch.num_hidden_layers, "window": sliding}


@lru_cache(maxsize=4096)
def _body_terms(arch: Architecture, target: Architecture | None) -> Mapping[str, float]:
    body = body_parameters(arch)
    width = target.hidden_size if target else arch.hidden_size
    kind = arch.attention_kind
    return {
        **size_terms(body, body_parameters(target) if target else UNKNOWN_TARGET),
        "depth": math.log(arch.num_hidden_layers / REFERENCE_LAYERS),
        "single_layer": float(arch.num_hidden_layers == 1),
        "overwide": max(0.0, math.log(arch.hidden_size / width)),
        "narrow": max(0.0, math.log(width / arch.hidden_size)),
        "grouped": float(kind != "MHA"),
        "single_kv_head": float(kind == "MQA"),
    }


def regressors(terms: Mapping[str, float], names: Sequence[str] = COEFFICIENTS) -> np.ndarray:
    """[len(names)] in the order of `names`."""
    return np.array([terms.get(name, 0.0) for name in names])


# --- what the table said ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Anchor:
    """A draft of this project that was trained and measured: alpha in a domain after so many tokens."""

    domain: str
    alpha: float
    architecture: Architecture
    tokens: float
    target: str
    source: str


@cache
def load_anchors(path: Path = ANCHORS_FILE) -> tuple[Architecture, tuple[Anchor, ...]]:
    """The reference shape and the anchors."""
    import yaml

    data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    reference = Architecture(**data["reference"])
    return reference, tuple(
        Anchor(
            row["domain"],
            float(row["alpha"]),
            reference.replace(**row["shape"]),
            float(row["tokens"]),
            row["target"],
            row["source"],
        )
        for row in data["anchors"]
    )


@dataclass(frozen=True)
class PublishedFit:
    """Coefficients for a new target, from the table: `mean` [n] and `covariance` [n, n] in the order of COEFFICIENTS.

    `rows`: how many table rows say something about each term; `spread`: std of each random effect and of what is left;
    `drift`: logit per position from the first one, by kind of drafter; `inputs`: hash of the files it came from.
    """

    mean: np.ndarray
    covariance: np.ndarray
    rows: Mapping[str, int]
    spread: Mapping[str, float]
    drift: Mapping[str, Term]
    inputs: str


@cache
def load_fit(path: Path = FIT_FILE) -> PublishedFit:
    """The stored outcome of `published.fit_all`. Fast: no table is read."""
    data = read_json(path, "fit of the published measurements")
    if tuple(data["coefficients"]) != COEFFICIENTS:
        raise ArchsearchError(f"{path} was made by another version; run: python -m archsearch.acceptance.published")
    size = len(COEFFICIENTS)
    upper = np.zeros((size, size))
    upper[np.triu_indices(size)] = data["covariance_upper"]
    covariance = upper + np.triu(upper, 1).T
    drift = {name: Term(*value) for name, value in data["drift"].items()}
    return PublishedFit(np.array(data["mean"]), covariance, data["rows"], data["spread"], drift, data["inputs"])


def inputs_hash(paths: Iterable[Path] = (PUBLISHED_FILE, ANCHORS_FILE)) -> str:
    """Which table and anchors a fit rests on."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class PriorAcceptance:
    """alpha of an untrained shape from published measurements, sharpened by what was measured for this target.

    After `fit`: `coefficients_` and `covariance_` (in the order of COEFFICIENTS), `observations_` (how many were used),
    `source_`.
    """

    def __init__(self, fit_file: Path = FIT_FILE) -> None:
        self.fit_file = fit_file
        self._start()

    def _start(self) -> None:
        self._published = load_fit(self.fit_file)
        self.coefficients_ = self._published.mean.copy()
        self.covariance_ = self._published.covariance.copy()
        self.observations_ = 0
        self.source_ = "prior"

    @property
    def intercepts_(self) -> dict[str, float]:
        """logit(alpha) of the reference draft in each domain."""
        base = float(self.coefficients_[_INDEX["intercept"]])
        return {name: base + float(self.coefficients_[_INDEX[f"domain {name}"]]) for name in DOMAINS}

    def _coverage(self, arch: Architecture, context: AcceptanceContext) -> tuple[float, float]:
        """(coverage of the head, std of its effect in logit)."""
        if not arch.trimmed:
            return 1.0, 0.0
        if context.coverage is not None:
            return context.coverage.share(arch.head_rows), VOCABULARY_STD_KNOWN
        halvings = math.log2(arch.vocab_size / arch.head_rows)
        return assumed_coverage(halvings), VOCABULARY_STD_PER_HALVING * halvings

    def fit(self, observations: Sequence[AcceptanceObservation]) -> Self:
        """Update the coefficients with measured drafts of one target (conjugate, Gaussian in logit); starts from the published
        ones each time. An observation counts in its own context: its domain, temperature and training tokens are part of it."""
        self._start()
        if not observations:
            return self
        rows, targets, noise = [], [], []
        for observation in observations:
            arch, context = observation.architecture, observation.context
            alpha = min(max(observation.alpha.value, 0.005), 0.995)
            coverage, vocabulary_std = self._coverage(arch, context)
            rows.append(regressors(shape_terms(arch, context)))
            targets.append(logit(_untrimmed_alpha(alpha, coverage)))
            measured_std = observation.alpha.std / (alpha * (1.0 - alpha))
            noise.append(SHAPE_NOISE_STD**2 + vocabulary_std**2 + measured_std**2)
        x, y = np.stack(rows), np.array(targets)
        gain = self.covariance_ @ x.T @ np.linalg.inv(x @ self.covariance_ @ x.T + np.diag(noise))
        self.coefficients_ = self.coefficients_ + gain @ (y - x @ self.coefficients_)
        updated = self.covariance_ - gain @ x @ self.covariance_
        self.covariance_ = (updated + updated.T) / 2
        self.observations_ = len(observations)
        self.source_ = "modelled"
        return self

    def to_dict(self) -> dict[str, Any]:
        """What was learnt, so that a search that is continued scores as it began."""
        return {
            "observations": self.observations_,
            "coefficients": self.coefficients_.tolist(),
            "covariance": self.covariance_.tolist(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`. Raises ArchsearchError for another version's coefficients."""
        prior = cls()
        coefficients, covariance = np.array(data["coefficients"]), np.array(data["covariance"])
        if coefficients.shape != prior.coefficients_.shape or covariance.shape != prior.covariance_.shape:
            raise ArchsearchError("this run's acceptance prior was written by another version of archsearch; use another --run")
        prior.coefficients_, prior.covariance_ = coefficients, covariance
        prior.observations_ = int(data["observations"])
        prior.source_ = "modelled" if prior.observations_ else "prior"
        return prior

    def predict(self, architecture: Architecture, context: AcceptanceContext) -> Acceptance:
        """alpha with its absolute std (about 0.6 logit before `fit`), and the drift along the block.

        Of an independent draft: the mean over tokens. Of a feature drafter: at the first position, from which it sinks.
        """
        features = regressors(shape_terms(architecture, context))
        full = sigmoid(float(features @ self.coefficients_))
        coverage, vocabulary_std = self._coverage(architecture, context)
        alpha = trimmed_alpha(full, coverage)
        variance = float(features @ self.covariance_ @ features) + SHAPE_NOISE_STD**2 + vocabulary_std**2
        drift = INDEPENDENT_DRIFT
        if context.drafter in FEATURE_DRAFTERS:
            drift = self._published.drift["block" if context.drafter == "block" else "feature"]
            alpha = first_alpha(tau(alpha, REFERENCE_GAMMA), REFERENCE_GAMMA, drift.mean)
        std = alpha * (1.0 - alpha) * math.sqrt(max(variance, 0.0))
        return Acceptance(Estimate(alpha, std, self.source_), Estimate(drift.mean, drift.std, "prior"))

    def difference_std(self, first: Architecture, second: Architecture, context: AcceptanceContext) -> float:
        """Std of the difference of the two logits: 0 for the same shape, about 0.15 for usual neighbours of a search."""
        if first == second:
            return 0.0
        gap = regressors(shape_terms(first, context)) - regressors(shape_terms(second, context))
        halvings = abs(math.log2(first.head_rows / second.head_rows))
        if context.coverage is not None:
            vocabulary_std = VOCABULARY_STD_KNOWN if halvings else 0.0
        else:
            vocabulary_std = VOCABULARY_STD_PER_HALVING * halvings
        return math.sqrt(max(float(gap @ self.covariance_ @ gap), 0.0) + 2.0 * SHAPE_NOISE_STD**2 + vocabulary_std**2)

    def explain(self, architecture: Architecture, context: AcceptanceContext) -> dict[str, float]:
        """Each term's part of logit(alpha), the trimmed vocabulary's last; they add up to logit of alpha.

        Of a feature drafter that is its alpha over REFERENCE_GAMMA positions, not at the first.
        """
        return {name: part for name, part, _, _ in self.explain_rows(architecture, context)}

    def explain_rows(self, architecture: Architecture, context: AcceptanceContext) -> list[tuple[str, float, float, str]]:
        """(term, its part of logit(alpha), that part's std, what it rests on) of every term; the parts add up to logit(alpha).

        Terms are correlated: the std of the whole is not the root of the sum of squares.
        """
        terms = shape_terms(architecture, context)
        rows = []
        for name in COEFFICIENTS:
            if name.startswith(("domain ", "drafter ", "sees")) and name not in terms:
                continue
            index, value = _INDEX[name], terms.get(name, 0.0)
            std = abs(value) * math.sqrt(max(float(self.covariance_[index, index]), 0.0))
            rows.append((name, value * float(self.coefficients_[index]), std, self._evidence(name, value)))
        rows.append(("unexplained", 0.0, SHAPE_NOISE_STD, "differences between independent drafts of left-out studies"))
        full = sigmoid(math.fsum(part for _, part, _, _ in rows))
        coverage, std = self._coverage(architecture, context)
        lost = logit(trimmed_alpha(full, coverage)) - logit(full)
        if not architecture.trimmed:
            why = "full head"
        elif context.coverage is not None:
            why = f"covers {100 * coverage:.1f} % of the text that was counted"
        else:
            why = f"FR-Spec's rule (arXiv 2502.14856), coverage {100 * coverage:.1f} % assumed"
        return [*rows, ("vocabulary", lost, std, why)]

    def _evidence(self, name: str, value: float) -> str:
        unit = _UNITS.get(name)
        index = _INDEX[name]
        coefficient = f"{self.coefficients_[index]:+.2f} ± {math.sqrt(max(float(self.covariance_[index, index]), 0.0)):.2f}"
        count = self._published.rows.get(name, 0)
        basis = f"{count} published and own rows" if count else "assumed: no published study varied it"
        if self.observations_:
            basis += f", {self.observations_} measured for this target"
        per = f" x {value:+.2f} {unit}" if unit else ""
        return f"{coefficient}{per}; {basis}"


_UNITS: Final = {
    "size": "decades of body / target's from 1/15",
    "target_size": "decades of target from 10B",
    "depth": "ln(layers / 2)",
    "overwide": "ln(hidden / target's)",
    "narrow": "ln(target's hidden / hidden)",
    "temperature": "temperature",
    "tokens": "decades of training tokens from 500k",
    "early": "decades of training tokens below 200k",
    "cut_by_window": "halvings of the context by windows",
}


def first_alpha(tau_value: float, gamma: int, drift: float) -> float:
    """Acceptance at the first position that gives `tau_value` at `gamma` when logits move by `drift` per position (bisection).

    `alpha_from_tau` is the case of no drift. Raises ValueError for gamma < 1 or a tau outside 1..gamma + 1.
    """
    if drift == 0.0 or tau_value in (1.0, gamma + 1.0):
        return alpha_from_tau(tau_value, gamma)
    if gamma < 1 or not 1.0 <= tau_value <= gamma + 1:
        raise ValueError(f"tau must lie between 1 and gamma + 1 with gamma >= 1, got tau {tau_value} at gamma {gamma}")
    low, high = 1e-9, 1.0 - 1e-12
    for _ in range(60):
        middle = (low + high) / 2
        reached = tau_from_positions(drifting_positions(middle, drift, gamma))
        low, high = (middle, high) if reached < tau_value else (low, middle)
    return (low + high) / 2
