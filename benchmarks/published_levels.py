"""What others measured: the table of published acceptance (published.csv) and the regression that
turns it into the prior.

    logit(alpha_i) = x_i . beta + family + family's domain + target + study + lot + study's domain +
    data set + text + draft + e_i

`beta` has the wide Gaussian prior of `PriorTerms`. The rest are random effects whose spreads
come from the marginal likelihood: of the target's family (its sizes), and of that on one domain; of
a target; of a study; of a lot (drafts of one kind for one target, trained alike); of a study's
domain; of a data set, whoever drafts; of a lot's text (one data set); of a draft within its lot.
Drafts of one lot on one text share all but the last, so an ablation speaks clearly about depth or
size although levels scatter widely. This project's own drafts (anchors, and a lot of them: the
study of shapes) are one more study: their effects speak for their own target only.

`acceptance_fit.py` fits spreads and drifts and writes what `archsearch.acceptance` reads: the
coefficients for a target that nobody measured, and those for each target that the table knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
from archsearch.acceptance.prior import ALIKE_DATASETS, ALIKE_TEXTS, text_std
from archsearch.acceptance.terms import (
    COEFFICIENTS,
    DOMAIN_PARTS,
    FEATURE_DRAFTERS,
    LOT_TERMS,
    READING_STD,
    REFERENCE_GAMMA,
    Term,
    attention_terms,
    depth_terms,
    domain_terms,
    drafter_terms,
    lot_term,
    regressors,
    shape_terms,
    size_terms,
    while_young,
    width_terms,
)
from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.estimate import Array
from archsearch.speedup import alpha_from_tau, drifting_positions, logit, tau_from_positions
from published_table import OWN_LOT, OWN_STUDY, Published, load_published, own_drafts

UNKNOWN_TEMPERATURE: Final = 0.5
# An independent draft whose shape no one printed is taken as the table's off-the-shelf drafts are
# for their size: width goes with this power of the body's share of the target's, layers with the
# fourth root of the body, 12 at 100M.
USUAL_WIDTH_POWER: Final = 0.37
USUAL_LAYERS: Final = 12


@dataclass(frozen=True, slots=True)
class PriorTerms:
    """Priors of the coefficients without the table. Wide where the table decides, whose rows must
    not count twice. Where no published study varied a term its prior is final, and wide as well."""

    # What the law of excess loss leaves: greedy, chat. The table decides.
    intercept: Term = Term(0.0, 0.4)
    # logit(alpha) that the law of excess loss gives to what the draft has learnt (`learnt.py`); all
    # other terms deviate from it. Its constants were fitted elsewhere, so 1; studies left out agree
    # (benchmarks/prior_figures.py).
    learnt: Term = Term(1.0, 0.2)
    # Per decade of the draft's body / the target's, beyond the law. The table decides.
    size: Term = Term(0.0, 0.2)
    # Per decade of the target's body at the same ratio, beyond the law.
    target_size: Term = Term(0.0, 0.1)
    # Per ln(layers) at equal size. The table decides, with few independent drafts.
    depth: Term = Term(0.15, 0.15)
    # A single layer that does not see the target's hidden states, beyond size and depth. One
    # attention layer cannot copy what followed earlier (that takes two), and arXiv 2402.01528 saw
    # TAR fall "sharply" there without printing it. The table adds KVShot and this project's
    # sketches, whose minutes of training use depth less.
    single_layer: Term = Term(-0.35, 0.15)
    # Per ln(hidden / target's hidden), above it only. No draft of the table is wider than its
    # target: no gain and no loss, but doubt.
    overwide: Term = Term(0.0, 0.20)
    # Per ln(target's hidden / hidden), below it only, at equal size and depth. The table decides:
    # every independent draft of a known shape is narrower than its target.
    narrow: Term = Term(0.0, 0.30)
    # Per unit of temperature. The table decides.
    temperature: Term = Term(-0.2, 0.2)
    # Per decade of tokens below a million, of a draft cut from its target: 2 x 576 rose from .24 to
    # .42 between 32k and 457k tokens. The table decides.
    early: Term = Term(0.65, 0.2)
    # Per decade above a million, of the same, beyond the law: nobody followed one from minutes to
    # days.
    late: Term = Term(0.0, 0.15)
    # Per decade of the target's text above 1e4 tokens, of a pretrained draft that is tuned on it.
    # The table decides.
    tuned: Term = Term(0.3, 0.15)
    # Per decade of a head's training tokens, beyond the law: heads of 5,000 samples lie below it,
    # others learn faster.
    head_tokens: Term = Term(0.0, 0.2)
    # Attention variants. No published ablation; what fewer KV heads lose in parameters is in
    # `size`. Assumed to be small: the table's drafts with fewer KV heads differ from the others in
    # more than that.
    grouped: Term = Term(0.0, 0.10)
    single_kv_head: Term = Term(0.0, 0.10)
    # A window that cuts the context, per halving and share of sliding layers. Assumed: window
    # drafters keep 86 to 94 % of their proposals when 99 % of the cache is dropped.
    cut_by_window: Term = Term(-0.04, 0.06)
    # The same beyond the 95 tokens that were measured: what a window cuts of a long context is what
    # is copied from far back, which nobody measured. A loss, and doubt that grows with each
    # halving.
    cut_far: Term = Term(-0.04, 0.06)
    # Any window, even one longer than the context.
    window: Term = Term(0.0, 0.05)
    # Per doubling of the context beyond HEAD_CONTEXT, of heads that were trained on texts of that
    # length. An EAGLE-3 head had tau 2.30, 1.69 and 1.09 at 2k, 8k and 16k, with a window 1.58,
    # 1.52 and 1.56 (speculators pull request 684); one that was trained for it 2.69 at 1k and 2.65
    # at 32k (AMD, MiniMax-M3). Half of the first, with as much doubt.
    long_context: Term = Term(-0.35, 0.35)
    # A drafter that reads the target's hidden states or cache instead of tokens only; its kind
    # comes on top. The table decides.
    sees_target: Term = Term(0.0, 1.0)
    # Per ln(layers / BLOCK_LAYERS) of block drafters, which see the target's hidden states. The
    # table decides.
    block_depth: Term = Term(0.15, 0.15)


DOMAIN_PRIOR: Final = Term(0.0, 0.7)
# `mixed` is chat, code and documents by its definition: near the mean of their terms.
PARTED_DOMAIN_PRIOR: Final = Term(0.0, 0.2)
DRAFTER_PRIOR: Final = Term(0.0, 0.4)
# EAGLE-1 is counted from EAGLE-3. Side by side it accepts less: .65 logit at 5 tokens in vLLM
# (issue 20780), and so in the tables of arXiv 2503.01840 (trees). Studies of one of them alone say
# more about their texts and training.
EAGLE1_PRIOR: Final = Term(-0.5, 0.2)


def prior_of(name: str) -> Term:
    """The prior of a coefficient, before the table."""
    if name == "domain chat":
        return Term(0.0, 1e-6)  # the other domains are counted from it
    if name.startswith("lot "):
        return Term(0.0, 0.0)  # nothing but the effects of study and lot
    if name.startswith("domain "):
        return PARTED_DOMAIN_PRIOR if name.removeprefix("domain ") in DOMAIN_PARTS else DOMAIN_PRIOR
    if name.startswith("drafter "):
        return EAGLE1_PRIOR if name == "drafter eagle1" else DRAFTER_PRIOR
    term: Term = getattr(PriorTerms(), name)
    return term


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


def design(drifts: Mapping[str, Term]) -> Design:
    """The rows of the table that are meant for levels, and this project's anchors; `drifts`: along
    the block, by kind (see `kind_of`)."""
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
    for anchor in own_drafts():
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


def prior_moments() -> tuple[Array, Array]:
    """(mean, variance) of every coefficient before the table."""
    terms = [prior_of(name) for name in COEFFICIENTS]
    return np.array([term.mean for term in terms]), np.array([term.std**2 for term in terms])


def own_slopes(first: Design, second: Design) -> Array:
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
        covariance = self.between(self.rows, self.rows)
        covariance[np.diag_indices(len(self.rows))] += self.spread.residual**2 + self.rows.noise**2
        inverse = np.linalg.inv(covariance)
        return inverse, inverse @ (self.rows.y - self.rows.x @ prior_moments()[0])

    def between(self, first: Design, second: Design) -> Array:
        covariance: Array = (first.x * prior_moments()[1]) @ second.x.T
        for name in EFFECTS:
            covariance += getattr(self.spread, name) ** 2 * same(
                first.groups[name], second.groups[name]
            )
        covariance += self.spread.slope**2 * own_slopes(first, second)
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
    mean, variance = prior_moments()
    cross = variance[:, None] * rows.x.T
    total = variance.copy()

    def shared(term: str, *effects: tuple[str, str]) -> None:
        number = COEFFICIENTS.index(term)
        for name, label in effects:
            total[number] += getattr(spread, name) ** 2
            cross[number] += getattr(spread, name) ** 2 * same([label], rows.groups[name])[0]

    slopes = spread.slope**2 * _slopes()  # the study's in which it is asked, or a new one's
    total += slopes
    cross += (slopes[:, None] * rows.x.T) * same([query.study], rows.study)
    shared("intercept", ("family", query.family), ("target", query.target))
    for domain in DOMAINS:
        of_family = f"{query.family}|{domain}" if query.family else ""
        of_study = f"{query.study}|{domain}" if query.study else ""
        shared(f"domain {domain}", ("family_domain", of_family), ("domain", of_study))
        total[COEFFICIENTS.index(f"domain {domain}")] += (
            text_std(domain, asdict(spread), own=False) ** 2
        )
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


# --- targets that the table knows

# How much of what the published drafts of a target show in common a next one of their kind, on a
# user's text and engine, has too. Assumed.
LOT_SHARED: Final = 0.7


def known_targets(levels: Levels) -> dict[str, tuple[Array, Array, str]]:
    """By name of a catalogue entry, for those that the table knows by themselves or by their
    family: (mean, covariance) over COEFFICIENTS for new drafts of it, and what they rest on."""
    made: dict[tuple[str, str], tuple[Array, Array, str]] = {}
    found = {}
    for entry in catalogue.entries():
        key, family = _name_of(entry.architecture)
        # rows of the target itself, and of other sizes of its family
        of_levels = [row for row in load_published() if row.level]
        rows = [row for row in of_levels if key and row.target_key == key]
        relatives = [row for row in of_levels if family and row.target_family == family]
        own = [anchor for anchor in own_drafts() if anchor.target == key]
        if not (relatives or own):
            continue
        if (key, family) not in made:
            lots = _lots(rows) | ({"lot target": (Lot(OWN_STUDY, OWN_LOT),)} if own else {})
            asked = Query(family, key, lots, OWN_STUDY if own else "")
            made[key, family] = (*coefficients_for(levels, asked), _words(rows, relatives))
        found[entry.name] = made[key, family]
    return found


def _name_of(target: Architecture) -> tuple[str, str]:
    """(the table's key of a target's shape, its family); "" for what the table does not have."""
    alike = catalogue.alike(target)
    keys = {row.target_key for row in load_published() if row.level} | {
        anchor.target for anchor in own_drafts()
    }
    key = next((entry.name for entry in alike if entry.name in keys), "")
    families = {row.target_family for row in load_published() if row.level}
    return key, next((entry.family for entry in alike if entry.family in families), "")


def _lots(rows: list[Published]) -> dict[str, tuple[Lot, ...]]:
    """By LOT_TERMS the lots of the target that a new draft is like, all alike. A draft that is yet
    to be made, or somebody else's, is like none."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        found.setdefault(lot_term(row.family, row.training), {})[lot_of(row)] = row.study
    if "lot eagle1" in found:  # the same lab's next head would be measured as that one was
        found.setdefault("lot eagle3", found["lot eagle1"])
    return {
        term: tuple(Lot(study, lot, LOT_SHARED / len(lots)) for lot, study in lots.items())
        for term, lots in found.items()
        if term not in ("lot target", "lot other")
    }


def _words(rows: list[Published], relatives: list[Published]) -> str:
    """One line for people: how many published drafts it rests on."""
    drafts = {(row.study, row.draft, row.family) for row in rows}
    names = sorted({row.target for row in rows})
    others = {row.target for row in relatives} - set(names)
    parts = []
    if drafts:
        parts.append(
            f"{len(drafts)} published draft{'s' if len(drafts) > 1 else ''} of {', '.join(names)}"
        )
    if others:
        parts.append(f"those of {len(others)} other targets of its family")
    return " and ".join(parts)
