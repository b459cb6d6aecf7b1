"""What others measured: the table of published acceptance (published.csv) and the regression that turns it into the prior.

    logit(alpha_i) = x_i . beta + study + lot + domain + text + draft + e_i

`beta` has the wide Gaussian prior of `prior.PriorTerms`. The rest are random effects whose spreads come from the marginal
likelihood: of a study; of a lot (drafts of one kind for one target, trained alike); of a study's domain; of a lot's text (one
data set); of a draft within its lot. Drafts of one lot on one text share all but the last, so an ablation speaks clearly about
depth or size although levels scatter widely. With the spreads known this is a ridge regression on columns scaled by their prior
std (`sklearn.linear_model.Ridge`); its posterior covariance is (Z'Z + 1)^-1. This project's own anchors are one more study, whose
offset the prediction keeps: they are the only drafts made the way a search makes them.

`Drifts` learns how acceptance runs along a block, from sweeps over gamma and printed positions.

`python -m archsearch.acceptance.published` fits both and writes published_fit.json, which `prior.py` reads. scikit-learn and
scipy are needed for that only.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from archsearch.acceptance.estimator import DOMAINS, DRAFTERS, AcceptanceContext
from archsearch.acceptance.prior import (
    COEFFICIENTS,
    FEATURE_DRAFTERS,
    FIT_FILE,
    PUBLISHED_FILE,
    REFERENCE_GAMMA,
    PriorTerms,
    PublishedFit,
    Term,
    first_alpha,
    inputs_hash,
    load_anchors,
    regressors,
    shape_terms,
    size_terms,
    token_terms,
)
from archsearch.errors import ArchsearchError
from archsearch.files import write_json
from archsearch.speedup import alpha_from_tau, drifting_positions, logit, tau_from_positions

OWN_STUDY: Final = "archsearch sketches"
TRAININGS: Final = ("target", "shared", "other")
# Regressors that only rows of the table have.
TABLE_TERMS: Final[dict[str, Term]] = {
    # A draft that went through the target's own training (same vendor, same data), at the tokens of the reference.
    "shared training": Term(0.5, 0.7),
    # A draft that was trained on something else.
    "other training": Term(-0.5, 0.7),
    # Per ln(layers / 5) of block drafters, which see the target's hidden states.
    "block_depth": Term(0.15, 0.15),
}
NAMES: Final = (*COEFFICIENTS, *TABLE_TERMS)
DOMAIN_PRIOR: Final = Term(0.0, 0.7)
DRAFTER_PRIOR: Final = Term(0.0, 0.4)
# A tuned draft whose training tokens no one printed: some 100k to 1M dialogues.
UNKNOWN_TOKENS: Final = 3e8
UNKNOWN_TEMPERATURE: Final = 0.5
# What a printed tau or rate is rounded and sampled to, logit.
READING_STD: Final = 0.03


@dataclass(frozen=True, slots=True)
class Published:
    """A row of published.csv; None where the source does not say. Columns are explained at the head of the file."""

    id: str
    study: str
    source_title: str
    source_ref: str
    family: str
    draft: str
    target: str
    target_params_b: float | None
    body_params_m: float | None
    layers: int | None
    hidden_size: int | None
    kv_heads: int | None
    draft_vocab: int | None
    training: str
    recipe: str
    trained_tokens: float | None
    domain: str
    dataset: str
    temperature: float | None
    gamma: int | None
    metric: str
    conversion: str
    tau: float | None
    positions: tuple[float, ...]
    alpha: float
    alpha_std: float | None
    level: bool
    sweep: str
    note: str


def _number(text: str) -> float | None:
    return float(text) if text else None


def _whole(text: str) -> int | None:
    return round(float(text)) if text else None


@cache
def load_published(path: Path = PUBLISHED_FILE) -> tuple[Published, ...]:
    """The rows of the table. Raises ArchsearchError naming the line that is broken."""
    convert: dict[str, Callable[[str], Any]] = {
        **dict.fromkeys(("target_params_b", "body_params_m", "trained_tokens", "temperature", "tau", "alpha_std"), _number),
        **dict.fromkeys(("layers", "hidden_size", "kv_heads", "draft_vocab", "gamma"), _whole),
        "level": lambda text: {"yes": True, "no": False}[text],
        "positions": lambda text: tuple(float(part) for part in text.split()),
        "alpha": float,
    }
    names = [field.name for field in fields(Published)]
    rows = []
    with path.open(encoding="utf-8", newline="") as handle:
        lines = [line for line in handle if not line.startswith("#")]
    for row in csv.DictReader(lines):
        try:
            item = Published(**{name: convert.get(name, str)(row[name]) for name in names})
            good = (
                0.0 < item.alpha < 1.0
                and item.family in DRAFTERS
                and item.training in TRAININGS
                and (not item.level or item.domain in DOMAINS)
            )
        except (KeyError, TypeError, ValueError):
            good = False
        if not good:
            raise ArchsearchError(f"{path}: row {row.get('id')!r} is broken; columns are explained at the head of the file")
        rows.append(item)
    return tuple(rows)


def row_terms(row: Published) -> dict[str, float]:
    """The regressors of a row of the table: those of a shape, and what only the table has."""
    terms = {"intercept": 1.0, f"domain {row.domain}": 1.0}
    terms["temperature"] = UNKNOWN_TEMPERATURE if row.temperature is None else row.temperature
    if row.training == "target":
        terms |= token_terms(row.trained_tokens or UNKNOWN_TOKENS)
    else:
        terms[f"{row.training} training"] = 1.0
    if row.family != "independent":
        terms |= {"sees_target": 1.0, f"drafter {row.family}": 1.0}
    elif row.body_params_m and row.target_params_b:
        terms |= size_terms(row.body_params_m * 1e6, row.target_params_b * 1e9)
    if row.layers:
        if row.family in ("independent", "kv"):
            terms["depth"] = math.log(row.layers / 2)
            terms["single_layer"] = float(row.layers == 1)
        elif row.family == "block":
            terms["block_depth"] = math.log(row.layers / 5)
    return terms


def level_alpha(row: Published, drifts: Mapping[str, Term]) -> float:
    """alpha of a row, all meant alike: of a feature drafter, which sinks along the block, the constant alpha that gives its tau
    at REFERENCE_GAMMA, from its printed positions, or brought there from the printed gamma by its kind's drift."""
    if row.family in FEATURE_DRAFTERS and len(row.positions) >= REFERENCE_GAMMA:
        return alpha_from_tau(tau_from_positions(row.positions[:REFERENCE_GAMMA]), REFERENCE_GAMMA)
    if row.family not in FEATURE_DRAFTERS or not row.gamma or not row.tau or row.gamma == REFERENCE_GAMMA:
        return row.alpha
    drift = drifts[kind_of(row.family, row.temperature)].mean
    first = first_alpha(min(row.tau, row.gamma + 0.999), row.gamma, drift)
    return alpha_from_tau(tau_from_positions(drifting_positions(first, drift, REFERENCE_GAMMA)), REFERENCE_GAMMA)


# The random effects, widest first.
EFFECTS: Final = ("study", "lot", "domain", "text", "draft")


@dataclass(frozen=True)
class Design:
    """The regression's rows: `x` [n, len(NAMES)], `y` [n] logit(alpha), `noise` [n] std of the reading, each row's group in
    every effect (`groups`: name -> n labels), its domain, kind of drafter and `condition` (what two drafts must share to be
    compared)."""

    x: np.ndarray
    y: np.ndarray
    noise: np.ndarray
    groups: Mapping[str, tuple[str, ...]]
    domain: tuple[str, ...]
    family: tuple[str, ...]
    condition: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.y)

    @property
    def study(self) -> tuple[str, ...]:
        return self.groups["study"]

    @property
    def draft(self) -> tuple[str, ...]:
        return self.groups["draft"]

    def where(self, keep: Sequence[bool] | np.ndarray) -> Design:
        """The rows that `keep` says."""
        chosen = [i for i, yes in enumerate(keep) if yes]

        def of(labels: Sequence[str]) -> tuple[str, ...]:
            return tuple(labels[i] for i in chosen)

        groups = {name: of(labels) for name, labels in self.groups.items()}
        return Design(
            self.x[chosen], self.y[chosen], self.noise[chosen], groups, of(self.domain), of(self.family), of(self.condition)
        )


def design(rows: Iterable[Published] | None = None, *, drifts: Mapping[str, Term], anchors: bool = True) -> Design:
    """The rows of the table that are meant for levels, and this project's anchors; `drifts`: see `Drifts`."""
    from archsearch.architecture import catalogue

    x, y, noise = [], [], []
    labels: list[dict[str, str]] = []
    for row in load_published() if rows is None else rows:
        if not row.level:
            continue
        x.append(regressors(row_terms(row), NAMES))
        y.append(logit(level_alpha(row, drifts)))
        noise.append(math.hypot(READING_STD, (row.alpha_std or 0.0) / (row.alpha * (1 - row.alpha))))
        lot = f"{row.study}|{row.target}|{row.family}|{row.training}|{row.recipe}"
        condition = f"{row.study}|{row.target}|{row.dataset}|{row.temperature}|{row.recipe}"
        labels.append(
            _labels(row.study, lot, row.domain, row.dataset, row.draft) | {"family": row.family, "condition": condition}
        )
    if anchors:
        for anchor in load_anchors()[1]:
            target = catalogue.load(anchor.target).architecture
            context = AcceptanceContext(target, domain=anchor.domain, trained_tokens=anchor.tokens)
            x.append(regressors(shape_terms(anchor.architecture, context), NAMES))
            y.append(logit(anchor.alpha))
            noise.append(0.08)  # one seed, 80 texts: two runs of one sketch differed by this much
            lot = f"{OWN_STUDY}|{anchor.domain}"  # the two sketches were trained on different text
            of = _labels(OWN_STUDY, lot, anchor.domain, anchor.domain, anchor.architecture.label())
            labels.append(of | {"family": "independent", "condition": lot})
    groups = {name: tuple(label[name] for label in labels) for name in EFFECTS}
    last = (tuple(label[name] for label in labels) for name in ("of_domain", "family", "condition"))
    return Design(np.array(x), np.array(y), np.array(noise), groups, *last)


def _labels(study: str, lot: str, domain: str, dataset: str, draft: str) -> dict[str, str]:
    return {
        "study": study,
        "lot": lot,
        "domain": f"{study}|{domain}",
        "text": f"{lot}|{dataset}",
        "draft": f"{lot}|{draft}",
        "of_domain": domain,
    }


@dataclass(frozen=True, slots=True)
class Spread:
    """Std in logit of each effect, and of what is left."""

    study: float = 0.4
    lot: float = 0.2
    domain: float = 0.2
    text: float = 0.2
    draft: float = 0.1
    residual: float = 0.1

    def effect(self, name: str) -> float:
        value: float = getattr(self, name)
        return value


@dataclass(frozen=True)
class Levels:
    """Posterior of the regression: `mean` and `covariance` over NAMES, and the mean offset of every group of every effect."""

    mean: np.ndarray
    covariance: np.ndarray
    offsets: Mapping[str, Mapping[str, float]]
    spread: Spread

    def predict(self, rows: Design) -> tuple[np.ndarray, np.ndarray]:
        """(mean, std) of logit(alpha) of rows of studies that were not fitted."""
        return rows.x @ self.mean, np.sqrt(np.diag(self.joint_covariance(rows)))

    def joint_covariance(self, rows: Design) -> np.ndarray:
        """[n, n] of logit(alpha) of rows of studies that were not fitted: shared coefficients and effects."""
        covariance: np.ndarray = rows.x @ self.covariance @ rows.x.T + np.diag(self.spread.residual**2 + rows.noise**2)
        for name in EFFECTS:
            member = _one_hot(rows.groups[name])[0]
            covariance += self.spread.effect(name) ** 2 * (member @ member.T)
        return covariance


def prior_of(name: str) -> Term:
    """What is believed of a coefficient before the table."""
    if name in TABLE_TERMS:
        return TABLE_TERMS[name]
    if name == "domain chat":
        return Term(0.0, 1e-6)  # the other domains are counted from it
    if name.startswith("domain "):
        return DOMAIN_PRIOR
    if name.startswith("drafter "):
        return DRAFTER_PRIOR
    term: Term = getattr(PriorTerms(), name)
    return term


def _one_hot(labels: Sequence[Any]) -> tuple[np.ndarray, list[Any]]:
    known = sorted(set(labels))
    index = {label: i for i, label in enumerate(known)}
    matrix = np.zeros((len(labels), len(known)))
    matrix[np.arange(len(labels)), [index[label] for label in labels]] = 1.0
    return matrix, known


def best_spread(rows: Design, start: Spread | None = None) -> Spread:
    """The spreads with the highest marginal likelihood, with a weak belief (a factor of 2) around the default."""
    from scipy.optimize import minimize

    stds = np.array([prior_of(name).std for name in NAMES])
    centre = rows.x @ np.array([prior_of(name).mean for name in NAMES])
    scaled = rows.x * stds
    fixed = scaled @ scaled.T + np.diag(rows.noise**2)
    parts = [_one_hot(rows.groups[name])[0] for name in EFFECTS]
    kernels = [*(part @ part.T for part in parts), np.eye(len(rows))]
    residual = rows.y - centre
    default = np.log(np.array(astuple(Spread())))

    def loss(log_std: np.ndarray) -> tuple[float, np.ndarray]:
        variances = np.exp(2.0 * log_std)
        covariance = fixed + sum(v * k for v, k in zip(variances, kernels, strict=True))
        inverse = np.linalg.inv(covariance)
        weights = inverse @ residual
        value = 0.5 * (residual @ weights + np.linalg.slogdet(covariance)[1])
        outer = inverse - np.outer(weights, weights)
        slope = np.array([v * float(np.sum(outer * k)) for v, k in zip(variances, kernels, strict=True)])
        away = (log_std - default) / math.log(2.0)
        return float(value + 0.5 * away @ away), slope + away / math.log(2.0)

    first = np.log(np.array(astuple(start or Spread())))
    found = minimize(loss, first, jac=True, method="L-BFGS-B", bounds=[(-5.0, 1.0)] * len(default), options={"maxiter": 25})
    return Spread(*(float(value) for value in np.exp(found.x)))


def fit_levels(rows: Design, spread: Spread) -> Levels:
    """The posterior of all coefficients and offsets, the spreads being known."""
    from sklearn.linear_model import Ridge

    terms = [prior_of(name) for name in NAMES]
    means, stds = np.array([term.mean for term in terms]), np.array([term.std for term in terms])
    blocks, names = zip(*(_one_hot(rows.groups[name]) for name in EFFECTS), strict=True)
    scales = [spread.effect(name) for name in EFFECTS]
    columns = np.hstack([rows.x * stds, *(block * scale for block, scale in zip(blocks, scales, strict=True))])
    noise = np.sqrt(spread.residual**2 + rows.noise**2)
    scaled = columns / noise[:, None]
    y = (rows.y - rows.x @ means) / noise
    solution = Ridge(alpha=1.0, fit_intercept=False, solver="cholesky").fit(scaled, y).coef_
    covariance = np.linalg.inv(scaled.T @ scaled + np.eye(columns.shape[1]))
    count = len(NAMES)
    ends = np.cumsum([count, *(len(known) for known in names)])
    offsets = {
        name: dict(zip(known, (scale * solution[start:end]).tolist(), strict=True))
        for name, known, scale, start, end in zip(EFFECTS, names, scales, ends[:-1], ends[1:], strict=True)
    }
    return Levels(means + stds * solution[:count], stds[:, None] * covariance[:count, :count] * stds, offsets, spread)


# --- along the block -------------------------------------------------------------------------------------------------------


KINDS: Final = ("greedy", "sampled", "feature", "block")


def kind_of(family: str, temperature: float | None) -> str:
    """What decides how acceptance runs along the block: `feature` (its inputs are its own features and degrade), `block` (all
    positions in one pass), or of an independent draft how tokens are chosen, `greedy` or `sampled`."""
    if family in ("independent", "medusa", "mlp"):
        return "greedy" if temperature == 0 else "sampled"
    return "block" if family == "block" else "feature"


@dataclass(frozen=True, slots=True)
class Sweep:
    """tau of one draft on one text at several gammas."""

    name: str
    study: str
    family: str
    temperature: float | None
    taus: Mapping[int, float]

    @property
    def kind(self) -> str:
        return kind_of(self.family, self.temperature)


def sweeps(rows: Iterable[Published] | None = None) -> list[Sweep]:
    """Every sweep over gamma in the table; printed positions are a sweep too."""
    groups: dict[str, list[Published]] = {}
    for row in load_published() if rows is None else rows:
        if row.sweep:
            groups.setdefault(row.sweep, []).append(row)
    found = []
    for name, members in groups.items():
        taus: dict[int, float] = {}
        for row in members:
            if row.positions:
                taus |= {g: tau_from_positions(row.positions[:g]) for g in range(1, len(row.positions) + 1)}
            elif row.gamma and row.tau:
                taus[row.gamma] = row.tau
        first = members[0]
        if len(taus) > 1:
            found.append(Sweep(name, first.study, first.family, first.temperature, dict(sorted(taus.items()))))
    return found


def sweep_errors(sweep: Sweep, drift: float) -> np.ndarray:
    """ln(predicted / printed tau) at each gamma above the smallest, from tau at the smallest and a drift (logit per position)."""
    smallest = min(sweep.taus)
    first = first_alpha(sweep.taus[smallest], smallest, drift)
    positions = drifting_positions(first, drift, max(sweep.taus))
    return np.array([math.log(tau_from_positions(positions[:g]) / t) for g, t in sweep.taus.items() if g > smallest])


# Each study's drift is one draw from N(mean, BETWEEN^2), mean from N(0, BETWEEN^2); tau is believed to TAU_STD beyond that.
DRIFT_BETWEEN: Final = 0.12
DRIFT_TAU_STD: Final = 0.02
DRIFT_GRID: Final = np.linspace(-0.6, 0.6, 121)


@dataclass
class Drifts:
    """Drift along the block by kind (KINDS), learnt from sweeps of several studies.

    A study's sweeps are as good as one (they share drafts and engine): its likelihood over the drift is that of its mean squared
    error. After `fit`: `drift_` by kind, mean and std of the drift of a new study.
    """

    between: float = DRIFT_BETWEEN
    tau_std: float = DRIFT_TAU_STD

    def fit(self, found: Sequence[Sweep]) -> Drifts:
        """Learn from sweeps; a kind without any keeps N(0, between)."""
        self.drift_: dict[str, Term] = {}
        for kind in KINDS:
            members = [sweep for sweep in found if sweep.kind == kind]
            log_post = -0.5 * (DRIFT_GRID / self.between) ** 2
            for study in sorted({sweep.study for sweep in members}):
                errors = self._squared([sweep for sweep in members if sweep.study == study])
                own = np.exp(-0.5 * (errors - errors.min()) / self.tau_std**2)
                # p(study's data | mean of studies) = integral of its likelihood over its own drift
                kernel = np.exp(-0.5 * ((DRIFT_GRID[:, None] - DRIFT_GRID[None, :]) / self.between) ** 2)
                log_post += np.log(kernel @ own)
            weight = np.exp(log_post - log_post.max())
            weight /= weight.sum()
            mean = float(weight @ DRIFT_GRID)
            of_mean = float(weight @ (DRIFT_GRID - mean) ** 2)
            self.drift_[kind] = Term(mean, math.sqrt(of_mean + self.between**2))
        return self

    @staticmethod
    def _squared(members: Sequence[Sweep]) -> np.ndarray:
        """Mean squared error over the members' gammas at each point of the grid."""
        return np.array([np.mean([np.mean(_cached_errors(sweep, float(d)) ** 2) for sweep in members]) for d in DRIFT_GRID])


_ERRORS: dict[tuple[str, float], np.ndarray] = {}


def _cached_errors(sweep: Sweep, drift: float) -> np.ndarray:
    key = (f"{sweep.study}|{sweep.name}|{sorted(sweep.taus.items())}", drift)
    if key not in _ERRORS:
        _ERRORS[key] = sweep_errors(sweep, drift)
    return _ERRORS[key]


# --- the stored fit --------------------------------------------------------------------------------------------------------


def for_new_target(levels: Levels, rows: Design, drift: Mapping[str, Term]) -> PublishedFit:
    """What the regression says of a new target of this project: its own study's offsets kept, the spreads added to the doubt."""
    size = len(COEFFICIENTS)
    mean, covariance = levels.mean[:size].copy(), levels.covariance[:size, :size].copy()
    intercept = COEFFICIENTS.index("intercept")
    spread = levels.spread
    mean[intercept] += levels.offsets["study"].get(OWN_STUDY, 0.0)
    covariance[intercept, intercept] += spread.study**2 + spread.lot**2
    for number, domain in enumerate(DOMAINS, start=COEFFICIENTS.index(f"domain {DOMAINS[0]}")):
        own = _labels(OWN_STUDY, f"{OWN_STUDY}|{domain}", domain, domain, "")
        mean[number] += sum(levels.offsets[name].get(own[name], 0.0) for name in ("lot", "domain", "text"))
        covariance[number, number] += spread.domain**2 + spread.text**2
    counts = {name: int(np.count_nonzero(rows.x[:, number])) for number, name in enumerate(COEFFICIENTS)}
    return PublishedFit(mean, covariance, counts, asdict(spread), dict(drift), inputs_hash())


def fit_all(start: Spread | None = None) -> PublishedFit:
    """Everything that the prior reads, from the table and the anchors. Takes some seconds; fewer from spreads that are near."""
    drifts = Drifts().fit(sweeps()).drift_
    rows = design(drifts=drifts)
    return for_new_target(fit_levels(rows, best_spread(rows, start)), rows, drifts)


def save_fit(fit: PublishedFit, path: Path = FIT_FILE) -> None:
    """Write published_fit.json."""
    upper = fit.covariance[np.triu_indices(len(COEFFICIENTS))]
    write_json(
        path,
        {
            "about": "made by `python -m archsearch.acceptance.published` from published.csv and anchors.yaml; do not edit",
            "inputs": fit.inputs,
            "spread": {name: round(value, 6) for name, value in fit.spread.items()},
            "drift": {name: [round(term.mean, 4), round(term.std, 4)] for name, term in fit.drift.items()},
            "rows": dict(fit.rows),
            "coefficients": list(COEFFICIENTS),
            "mean": [round(float(value), 6) for value in fit.mean],
            "covariance_upper": [float(f"{value:.6g}") for value in upper],
        },
    )


if __name__ == "__main__":
    save_fit(fit_all())
