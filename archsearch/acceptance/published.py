"""What others measured: the table of published acceptance (published.csv) and the regression that
turns it into the prior.

    logit(alpha_i) = x_i . beta + family + family's domain + target + study + lot + study's domain +
    data set + text + draft + e_i

`beta` has the wide Gaussian prior of `terms.PriorTerms`. The rest are random effects whose spreads
come from the marginal likelihood: of the target's family (its sizes), and of that on one domain; of
a target; of a study; of a lot (drafts of one kind for one target, trained alike); of a study's
domain; of a data set, whoever drafts; of a lot's text (one data set); of a draft within its lot.
Drafts of one lot on one text share all but the last, so an ablation speaks clearly about depth or
size although levels scatter widely. This project's own drafts (anchors, and a lot of them: the
study of shapes) are one more study: their effects speak for their own target only.

`benchmarks/acceptance_fit.py` fits spreads and drifts (with scipy) and writes published_fit.json,
which `prior.py` reads. `known_targets.py` asks the same regression about a target of the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Final

import numpy as np

from archsearch.acceptance.estimator import DOMAINS, AcceptanceContext
from archsearch.acceptance.learnt import (
    PUBLISHED_HEAD_TOKENS,
    USUAL_TARGET_TOKENS,
    Learning,
    head_terms,
)
from archsearch.acceptance.table import (
    OWN_STUDY,
    Published,
    load_published,
    own_drafts,
)
from archsearch.acceptance.terms import (
    COEFFICIENTS,
    FEATURE_DRAFTERS,
    LOT_TERMS,
    REFERENCE_GAMMA,
    Term,
    attention_terms,
    depth_terms,
    domain_terms,
    drafter_terms,
    prior_of,
    regressors,
    shape_terms,
    size_terms,
    while_young,
    width_terms,
)
from archsearch.architecture import catalogue
from archsearch.estimate import Array
from archsearch.speedup import alpha_from_tau, drifting_positions, logit, tau_from_positions

UNKNOWN_TEMPERATURE: Final = 0.5
# An independent draft whose shape no one printed is taken as the table's off-the-shelf drafts are
# for their size: width goes with this power of the body's share of the target's, layers with the
# fourth root of the body, 12 at 100M.
USUAL_WIDTH_POWER: Final = 0.37
USUAL_LAYERS: Final = 12
# What a printed tau or rate is rounded and sampled to, logit.
READING_STD: Final = 0.03


def row_terms(row: Published) -> dict[str, float]:
    """The regressors of a row of the table, as `shape_terms` gives them of a shape. What a source
    does not say is at its zero, but for width and depth of an independent draft, which are as usual
    for its size."""
    terms = {"intercept": 1.0, **domain_terms(row.domain)}
    terms["temperature"] = UNKNOWN_TEMPERATURE if row.temperature is None else row.temperature
    if row.layers:
        terms |= depth_terms(row.layers, row.family)
    behind = row.target_tokens or USUAL_TARGET_TOKENS
    if row.family != "independent":
        terms |= head_terms(row.distill_tokens or PUBLISHED_HEAD_TOKENS, behind)
        return terms | drafter_terms(row.family)
    tokens = (row.pretrain_tokens or 0.0, row.distill_tokens or 0.0, row.parent_tokens or 0.0)
    learning = Learning(row.init, *tokens, on_policy=bool(row.on_policy))
    if row.body_params_m and row.target_params_b:
        terms |= learning.terms(row.body_params_m * 1e6, row.target_params_b * 1e9, behind)
        terms |= size_terms(row.body_params_m * 1e6, row.target_params_b * 1e9)
        share = min(row.body_params_m / (1e3 * row.target_params_b), 1.0)
        if not row.layers:
            terms |= depth_terms(
                round(USUAL_LAYERS * (row.body_params_m / 100) ** 0.25), row.family
            )
        if not row.hidden_size:
            terms |= width_terms(share**USUAL_WIDTH_POWER, 1.0)
    if row.hidden_size and row.target_hidden_size:
        terms |= width_terms(row.hidden_size, row.target_hidden_size)
    if row.heads and row.kv_heads:
        terms |= attention_terms(row.heads, row.kv_heads)
    return while_young(terms, learning)


def kind_of(family: str, temperature: float | None) -> str:
    """What decides how acceptance runs along the block: `feature` (its inputs are its own features
    and degrade), `block` (all positions in one pass), or of an independent draft how tokens are
    chosen, `greedy` or `sampled`."""
    if family in ("independent", "medusa", "mlp"):
        return "greedy" if temperature == 0 else "sampled"
    return "block" if family == "block" else "feature"


def level_alpha(row: Published, drifts: Mapping[str, Term]) -> float:
    """alpha of a row, all meant alike: of a feature drafter, which sinks along the block, the
    constant alpha that gives its tau at REFERENCE_GAMMA, from its printed positions, or brought
    there from the printed gamma by its kind's drift."""
    if row.family in FEATURE_DRAFTERS and len(row.positions) >= REFERENCE_GAMMA:
        return alpha_from_tau(tau_from_positions(row.positions[:REFERENCE_GAMMA]), REFERENCE_GAMMA)
    if (
        row.family not in FEATURE_DRAFTERS
        or not row.gamma
        or not row.tau
        or row.gamma == REFERENCE_GAMMA
    ):
        return row.alpha
    drift = drifts[kind_of(row.family, row.temperature)].mean
    first = alpha_from_tau(min(row.tau, row.gamma + 0.999), row.gamma, drift)
    return alpha_from_tau(
        tau_from_positions(drifting_positions(first, drift, REFERENCE_GAMMA)), REFERENCE_GAMMA
    )


# The random effects. `text` and `dataset` are those of chat (and code), where texts are alike; the
# loose ones those of the other domains.
EFFECTS: Final = (
    "family",
    "family_domain",
    "target",
    "study",
    "lot",
    "domain",
    "text",
    "loose_text",
    "dataset",
    "loose_dataset",
    "draft",
)
# Terms of the shape that studies may disagree about: each study has slopes of its own around the
# common ones. What one finds with its training, text and sizes of model binds another only as far
# as studies have been found to agree.
SLOPES: Final = (
    "learnt",
    "size",
    "depth",
    "single_layer",
    "overwide",
    "narrow",
    "early",
    "late",
    "tuned",
    "head_tokens",
    "grouped",
    "single_kv_head",
    "cut_by_window",
    "cut_far",
    "window",
)
ALIKE_TEXTS: Final = ("chat", "code")
ALIKE_DATASETS: Final = ("chat",)


@dataclass(frozen=True)
class Design:
    """The regression's rows: `x` [n, len(COEFFICIENTS)], `y` [n] logit(alpha), `noise` [n] std of
    the reading, and `groups`, n labels each ("" for none): each row's group in every effect, its
    domain (`of_domain`), `kind` of drafter and `condition`, which two drafts must share to be
    compared."""

    x: Array
    y: Array
    noise: Array
    groups: Mapping[str, tuple[str, ...]]

    def __len__(self) -> int:
        return len(self.y)

    @property
    def study(self) -> tuple[str, ...]:
        return self.groups["study"]


def design(drifts: Mapping[str, Term], *, anchors: bool = True) -> Design:
    """The rows of the table that are meant for levels, and this project's anchors; `drifts`: along
    the block, by `kind_of`."""
    x, y, noise = [], [], []
    labels: list[dict[str, str]] = []
    for row in load_published():
        if not row.level:
            continue
        x.append(regressors(row_terms(row)))
        y.append(logit(level_alpha(row, drifts)))
        noise.append(
            math.hypot(READING_STD, (row.alpha_std or 0.0) / (row.alpha * (1 - row.alpha)))
        )
        labels.append(_row_labels(row))
    for anchor in own_drafts() if anchors else ():
        entry = catalogue.load(anchor.target)
        context = AcceptanceContext(
            entry.architecture,
            context_len=anchor.context_len,
            domain=anchor.domain,
            trained_tokens=anchor.tokens,
        )
        x.append(regressors(shape_terms(anchor.architecture, context)))
        y.append(logit(anchor.alpha))
        noise.append(anchor.std)
        of = _labels(OWN_STUDY, anchor.lot, anchor.domain, "", (entry.family, entry.name))
        condition = f"{anchor.lot}|{anchor.domain}"
        draft = f"{condition}|{anchor.architecture.label()}"
        labels.append(of | {"draft": draft, "kind": "independent", "condition": condition})
    names = (*EFFECTS, "of_domain", "kind", "condition")
    groups = {name: tuple(label.get(name, "") for label in labels) for name in names}
    return Design(np.array(x), np.array(y), np.array(noise), groups)


def lot_of(row: Published) -> str:
    """Which drafts were trained alike for one target."""
    return f"{row.study}|{row.target}|{row.family}|{row.training}|{row.recipe}"


def _row_labels(row: Published) -> dict[str, str]:
    target = (
        row.target_family or f"of {row.study}",
        row.target_key or f"{row.target} of {row.study}",
    )
    lot = lot_of(row)
    labels = _labels(row.study, lot, row.domain, row.dataset, target)
    condition = f"{row.study}|{row.target}|{row.dataset}|{row.temperature}|{row.recipe}"
    return labels | {"draft": f"{lot}|{row.draft}", "kind": row.family, "condition": condition}


def _labels(
    study: str, lot: str, domain: str, dataset: str, target: tuple[str, str]
) -> dict[str, str]:
    """A row's group in the effects that are not the draft's, and its domain; `target`: its family
    and its own name."""
    text = "text" if domain in ALIKE_TEXTS else "loose_text"
    of_dataset = "dataset" if domain in ALIKE_DATASETS else "loose_dataset"
    # MT-Bench and mtbench are one
    name = "".join(letter for letter in dataset.lower() if letter.isalnum())
    return {
        "family": target[0],
        "family_domain": f"{target[0]}|{domain}",
        "target": target[1],
        "study": study,
        "lot": lot,
        "domain": f"{study}|{domain}",
        text: f"{lot}|{dataset or domain}",
        of_dataset: f"{name}|{domain}" if name else f"of {lot}|{domain}",
        "of_domain": domain,
    }


@dataclass(frozen=True, slots=True)
class Spread:
    """Std in logit of each effect, and of what is left; `slope`: how far the terms of SLOPES differ
    from study to study, as a share of each one's prior std."""

    family: float = 0.2
    family_domain: float = 0.2
    target: float = 0.2
    study: float = 0.2
    lot: float = 0.2
    domain: float = 0.2
    text: float = 0.2
    loose_text: float = 0.3
    dataset: float = 0.2
    loose_dataset: float = 0.2
    draft: float = 0.1
    residual: float = 0.1
    slope: float = 0.5

    def effect(self, name: str) -> float:
        value: float = getattr(self, name)
        return value

    def of_text(self, domain: str) -> float:
        """Std of a new text of a domain: its data set's and its own effect together."""
        text = self.text if domain in ALIKE_TEXTS else self.loose_text
        dataset = self.dataset if domain in ALIKE_DATASETS else self.loose_dataset
        return math.hypot(text, dataset)


def same(first: Sequence[str], second: Sequence[str]) -> np.ndarray:
    """[len(first), len(second)] 1 where two labels are one group, 0 where they differ or there is
    none."""
    codes: dict[str, int] = {"": -1}
    a, b = (
        np.array([codes.setdefault(label, len(codes)) for label in labels])
        for labels in (first, second)
    )
    return ((a[:, None] == b[None, :]) & (a[:, None] >= 0)).astype(float)


def _slopes() -> Array:
    """[len(COEFFICIENTS)] variance of a study's own slope at `Spread.slope` 1; 0 for terms that are
    not of SLOPES."""
    return np.array([prior_of(name).std ** 2 if name in SLOPES else 0.0 for name in COEFFICIENTS])


def _prior() -> tuple[Array, Array]:
    """(mean, variance) of every coefficient before the table."""
    terms = [prior_of(name) for name in COEFFICIENTS]
    return np.array([term.mean for term in terms]), np.array([term.std**2 for term in terms])


def _own_slopes(first: Design, second: Design) -> Array:
    """[len(first), len(second)] covariance from the slopes of each row's study, at `Spread.slope`
    1."""
    of_slopes: Array = (first.x * _slopes()) @ second.x.T
    return of_slopes * same(first.study, second.study)


@dataclass(frozen=True)
class Levels:
    """The regression over `rows`, its spreads being known: a Gaussian process in logit(alpha) whose
    covariance is that of the coefficients' prior, of the shared effects and of what is left. Needs
    numpy only.
    """

    rows: Design
    spread: Spread

    @cached_property
    def solved(self) -> tuple[np.ndarray, Array]:
        """(inverse covariance of the rows, that times what the prior's mean leaves)."""
        covariance = self._between(self.rows, self.rows)
        covariance[np.diag_indices(len(self.rows))] += self.spread.residual**2 + self.rows.noise**2
        inverse = np.linalg.inv(covariance)
        return inverse, inverse @ (self.rows.y - self.rows.x @ _prior()[0])

    def _between(self, first: Design, second: Design) -> Array:
        covariance: Array = (first.x * _prior()[1]) @ second.x.T
        for name in EFFECTS:
            covariance += self.spread.effect(name) ** 2 * same(
                first.groups[name], second.groups[name]
            )
        covariance += self.spread.slope**2 * _own_slopes(first, second)
        return covariance


# --- what a new draft is asked with


@dataclass(frozen=True, slots=True)
class Lot:
    """A lot that a new draft is like: its effect and its study's count with `weight`."""

    study: str
    name: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Query:
    """What is known of a target besides its shape: its `family` and `target` in the table, by
    LOT_TERMS the lots that a draft of it is like (`lots`), and the `study` whose domains it is
    asked in; "" for new ones."""

    family: str = ""
    target: str = ""
    lots: Mapping[str, tuple[Lot, ...]] = field(default_factory=dict)
    study: str = ""


def coefficients_for(levels: Levels, query: Query) -> tuple[Array, Array]:
    """(mean, covariance) over COEFFICIENTS for new drafts on new text: effects of the target and
    its family are in `intercept`, study and lot in LOT_TERMS, family, study and text of a domain in
    the domains' terms, a study's slopes in those of the shape. What `query` names is known as far
    as the table goes, the rest is drawn anew.
    """
    rows, spread = levels.rows, levels.spread
    mean, variance = _prior()
    cross = variance[:, None] * rows.x.T
    total = variance.copy()

    def shared(term: str, *effects: tuple[str, str]) -> None:
        number = COEFFICIENTS.index(term)
        for name, label in effects:
            total[number] += spread.effect(name) ** 2
            cross[number] += spread.effect(name) ** 2 * same([label], rows.groups[name])[0]

    slopes = spread.slope**2 * _slopes()  # the study's in which it is asked, or a new one's
    total += slopes
    cross += (slopes[:, None] * rows.x.T) * same([query.study], rows.study)
    shared("intercept", ("family", query.family), ("target", query.target))
    for domain in DOMAINS:
        of_family = f"{query.family}|{domain}" if query.family else ""
        of_study = f"{query.study}|{domain}" if query.study else ""
        shared(f"domain {domain}", ("family_domain", of_family), ("domain", of_study))
        total[COEFFICIENTS.index(f"domain {domain}")] += spread.of_text(domain) ** 2
    for term in LOT_TERMS:
        number = COEFFICIENTS.index(term)
        total[number] += spread.study**2 + spread.lot**2
        for like in query.lots.get(term, ()):
            cross[number] += (
                like.weight * spread.study**2 * same([like.study], rows.groups["study"])[0]
            )
            cross[number] += like.weight * spread.lot**2 * same([like.name], rows.groups["lot"])[0]
    prior = np.diag(total)
    for one, other in combinations(query.lots, 2):  # what two kinds share through a study, or a lot
        pair = COEFFICIENTS.index(one), COEFFICIENTS.index(other)
        prior[pair] = prior[pair[::-1]] = math.fsum(
            a.weight
            * b.weight
            * (spread.study**2 * (a.study == b.study) + spread.lot**2 * (a.name == b.name))
            for a in query.lots[one]
            for b in query.lots[other]
        )
    inverse, weights = levels.solved
    covariance = prior - cross @ inverse @ cross.T
    return mean + cross @ weights, (covariance + covariance.T) / 2
