"""The lowest rung: what published measurements say about the alpha of a shape that nobody has trained.

    logit(alpha) = intercept(domain) + x . beta        beta ~ N(mean, std^2), one coefficient per term below

Effects are nearly additive in logit(alpha) across published studies of independent (not feature) drafts. The coefficients carry
their std, so the prior knows what it does not know: a shape far from what was measured has a wide band, and the std of a
*difference* between two shapes (about 0.15 for usual ones) is far below the absolute one (about 0.6), because domain and training
are shared.

**Which size.** Parameters of the body: layers and final norm, without embedding and head. The embedding is a lookup (tokens it
holds do not make the draft wiser) and the head's rows have their own term (trimmed vocabulary); counting either would let a
49k-row head pass for capacity: in a 2-layer draft of a 135M target it holds four times the parameters of the layers. Capped at
the target's body.

`fit` is the conjugate update of all coefficients: one measured draft moves the intercept almost wholly, several sharpen the
slopes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from archsearch.acceptance.estimator import Acceptance, AcceptanceContext, AcceptanceObservation
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import body_parameters
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.speedup import alpha_from_tau, logit, sigmoid

ANCHORS_FILE: Final = Path(__file__).with_name("anchors.yaml")

# FR-Spec (Llama-3-8B, EAGLE-2): tau loses 2.3 h^1.54 % when the head is cut by 2^h, at a tau of 3.89 with drafts 6 deep.
FRSPEC_TAU: Final = 3.89
FRSPEC_DEPTH: Final = 6


@dataclass(frozen=True, slots=True)
class Term:
    """One coefficient in logit(alpha): what is believed before anything is measured."""

    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class PriorTerms:
    """The coefficients, each with the evidence it rests on."""

    # Domain (0.5) and training (0.35) together; a draft distilled for minutes, see anchors.yaml. The mean is each domain's.
    intercept: Term = Term(0.0, 0.57)
    # Per decade of body parameters. T5, LaMDA (arXiv 2211.17192), Qwen3 (NeMo-RL): 0.12 to 0.42, mean 0.34.
    size: Term = Term(0.34, 0.10)
    # Per ln(layers) at equal size. DFlash 3 to 8 layers 0.14 to 0.20; arXiv 2402.01528 12 to 24 layers 0.07.
    depth: Term = Term(0.17, 0.06)
    # A single layer that does not see the target's hidden states. KVShot 1 to 2 layers +0.40 in all; a sketch of minutes less.
    single_layer: Term = Term(-0.35, 0.15)
    # Per ln(hidden / target's hidden), above it only: no published sweep of width, so no gain and no loss but doubt.
    overwide: Term = Term(0.0, 0.10)
    # Per ln(target's hidden / hidden), below it only. Assumed: a narrower draft cannot take over the target's embedding and
    # head, it must squeeze them. No published sweep; with it the three drafts of LLaMA-65B in arXiv 2402.01528, whose alphas set
    # nothing here, come out at .75 to .77 (measured .75 to .77), without it at .77 to .82.
    narrow: Term = Term(-0.20, 0.15)
    # Per unit of temperature. LK -0.19, EAGLE-1 -0.15, DFlash -0.23, Leviathan -0.25 at T = 1.
    temperature: Term = Term(-0.20, 0.10)
    # Attention variants. No published ablation; what fewer KV heads lose in parameters is in `size`.
    grouped: Term = Term(0.0, 0.05)
    single_kv_head: Term = Term(0.0, 0.05)
    # A window that cuts the context, per halving and share of sliding layers. Assumed: window drafters keep 86 to 94 % of their
    # proposals when 99 % of the cache is dropped.
    cut_by_window: Term = Term(-0.04, 0.04)
    # Any window, even one longer than the context.
    window: Term = Term(0.0, 0.05)
    # What no term explains about a shape.
    shape_noise_std: float = 0.08
    # Per position of the block, independent drafts: DSD log +0.27, NeMo-RL 0, PARD -0.13.
    drift: Term = Term(0.0, 0.12)
    # Doubt about the trimmed vocabulary: per halving by the rule; of the whole term where coverage is known.
    vocabulary_std_per_halving: float = 0.04
    vocabulary_std_known: float = 0.03


COEFFICIENTS: Final = tuple(field.name for field in fields(PriorTerms) if field.type == "Term" and field.name != "drift")


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


@dataclass(frozen=True, slots=True)
class Anchor:
    """A trained and measured draft that holds a domain's intercept."""

    domain: str
    alpha: float
    architecture: Architecture
    source: str


@cache
def load_anchors(path: Path = ANCHORS_FILE) -> tuple[Architecture, tuple[Anchor, ...]]:
    """The reference shape and the anchors."""
    import yaml

    data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    reference = Architecture(**data["reference"])
    return reference, tuple(
        Anchor(row["domain"], float(row["alpha"]), reference.replace(**row["shape"]), row["source"]) for row in data["anchors"]
    )


class PriorAcceptance:
    """alpha of an untrained shape from published slopes and anchored intercepts.

    After `fit`: `coefficients_` and `covariance_` (in the order of COEFFICIENTS), `observations_` (how many were used).
    """

    def __init__(self, terms: PriorTerms | None = None, anchors_file: Path = ANCHORS_FILE) -> None:
        self.terms = terms
        self.anchors_file = anchors_file
        self._start()

    def _start(self) -> None:
        terms = self.terms or PriorTerms()
        self._reference, anchors = load_anchors(self.anchors_file)
        self._reference_size = math.log10(body_parameters(self._reference))
        self._values = terms
        self.coefficients_ = np.array([getattr(terms, name).mean for name in COEFFICIENTS])
        self.covariance_ = np.diag([getattr(terms, name).std ** 2 for name in COEFFICIENTS])
        self.observations_ = 0
        self.source_ = "prior"
        residuals: dict[str, list[float]] = {}
        for anchor in anchors:
            features = self._features(anchor.architecture, AcceptanceContext())
            residuals.setdefault(anchor.domain, []).append(logit(anchor.alpha) - float(features @ self.coefficients_))
        self.intercepts_ = {domain: math.fsum(values) / len(values) for domain, values in residuals.items()}

    def _features(self, arch: Architecture, context: AcceptanceContext) -> np.ndarray:
        """[len(COEFFICIENTS)] regressors, in their order."""
        reference, target = self._reference, context.target
        body = body_parameters(arch)
        target_width = target.hidden_size if target else arch.hidden_size
        if target:
            body = min(body, body_parameters(target))
        sliding, cut = 0, 0.0
        if "S" in arch.window_pattern:
            for window in arch.windows():
                if window:
                    sliding = 1
                    cut += max(0.0, math.log2(max(context.context_len, 1) / window))
        kind = arch.attention_kind
        return np.array(
            [
                1.0,
                math.log10(body) - self._reference_size,
                math.log(arch.num_hidden_layers / reference.num_hidden_layers),
                float(arch.num_hidden_layers == 1),
                max(0.0, math.log(arch.hidden_size / target_width)),
                max(0.0, math.log(target_width / arch.hidden_size)),
                context.temperature,
                float(kind != "MHA"),
                float(kind == "MQA"),
                cut / arch.num_hidden_layers,
                float(sliding),
            ]
        )

    def _intercept(self, context: AcceptanceContext) -> float:
        try:
            return self.intercepts_[context.domain]
        except KeyError:
            known = ", ".join(sorted(self.intercepts_))
            raise ArchsearchError(f"unknown domain {context.domain!r}; use one of {known}") from None

    def _coverage(self, arch: Architecture, context: AcceptanceContext) -> tuple[float, float]:
        """(coverage of the head, std of its effect in logit)."""
        if not arch.trimmed:
            return 1.0, 0.0
        if context.coverage is not None:
            return context.coverage.share(arch.head_rows), self._values.vocabulary_std_known
        halvings = math.log2(arch.vocab_size / arch.head_rows)
        return assumed_coverage(halvings), self._values.vocabulary_std_per_halving * halvings

    def fit(self, observations: Sequence[AcceptanceObservation]) -> Self:
        """Update the coefficients with measured drafts (conjugate, Gaussian in logit); starts from the prior each time."""
        self._start()
        if not observations:
            return self
        rows, targets, noise = [], [], []
        for observation in observations:
            arch, context = observation.architecture, observation.context
            alpha = min(max(observation.alpha.value, 0.005), 0.995)
            coverage, vocabulary_std = self._coverage(arch, context)
            rows.append(self._features(arch, context))
            targets.append(logit(_untrimmed_alpha(alpha, coverage)) - self._intercept(context))
            measured_std = observation.alpha.std / (alpha * (1.0 - alpha))
            noise.append(self._values.shape_noise_std**2 + vocabulary_std**2 + measured_std**2)
        x, y = np.stack(rows), np.array(targets)
        gain = self.covariance_ @ x.T @ np.linalg.inv(x @ self.covariance_ @ x.T + np.diag(noise))
        self.coefficients_ = self.coefficients_ + gain @ (y - x @ self.coefficients_)
        updated = self.covariance_ - gain @ x @ self.covariance_
        self.covariance_ = (updated + updated.T) / 2
        self.observations_ = len(observations)
        self.source_ = "modelled"
        return self

    def predict(self, architecture: Architecture, context: AcceptanceContext) -> Acceptance:
        """alpha with its absolute std (about 0.6 logit before `fit`), and the drift along the block."""
        features = self._features(architecture, context)
        full = sigmoid(self._intercept(context) + float(features @ self.coefficients_))
        coverage, vocabulary_std = self._coverage(architecture, context)
        alpha = trimmed_alpha(full, coverage)
        variance = float(features @ self.covariance_ @ features) + self._values.shape_noise_std**2 + vocabulary_std**2
        std = alpha * (1.0 - alpha) * math.sqrt(variance)
        drift = self._values.drift
        return Acceptance(Estimate(alpha, std, self.source_), Estimate(drift.mean, drift.std, "prior"))

    def difference_std(self, first: Architecture, second: Architecture, context: AcceptanceContext) -> float:
        """Std of the difference of the two logits: 0 for the same shape, about 0.15 for usual neighbours of a search."""
        if first == second:
            return 0.0
        gap = self._features(first, context) - self._features(second, context)
        halvings = abs(math.log2(first.head_rows / second.head_rows))
        if context.coverage is not None:
            vocabulary_std = self._values.vocabulary_std_known if halvings else 0.0
        else:
            vocabulary_std = self._values.vocabulary_std_per_halving * halvings
        return math.sqrt(float(gap @ self.covariance_ @ gap) + 2.0 * self._values.shape_noise_std**2 + vocabulary_std**2)

    def explain(self, architecture: Architecture, context: AcceptanceContext) -> dict[str, float]:
        """Each term's part of logit(alpha), the trimmed vocabulary's last; they add up to logit of the predicted alpha."""
        features = self._features(architecture, context)
        parts = {name: float(value) for name, value in zip(COEFFICIENTS, features * self.coefficients_, strict=True)}
        parts["intercept"] += self._intercept(context)
        full = sigmoid(math.fsum(parts.values()))
        parts["vocabulary"] = logit(trimmed_alpha(full, self._coverage(architecture, context)[0])) - logit(full)
        return parts


def _untrimmed_alpha(alpha: float, coverage: float) -> float:
    """The full-head alpha that `trimmed_alpha` turns into `alpha` (the smallest, where the curve bends back)."""
    low, high = alpha, 0.995
    if coverage >= 1.0 or trimmed_alpha(high, coverage) <= alpha:
        return alpha if coverage >= 1.0 else high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if trimmed_alpha(middle, coverage) < alpha else (low, middle)
    return (low + high) / 2
