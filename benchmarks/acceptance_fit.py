"""The fit that the acceptance prior reads, from the table of published acceptance: the drift of
acceptance along a block, the spreads of the random effects, and the posterior of all coefficients.

    python benchmarks/acceptance_fit.py

writes published_fit.json and known_targets.npz in archsearch/acceptance/, out of published.csv,
anchors.yaml and shape_study.csv in benchmarks/data/. Some seconds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Final

import numpy as np
from scipy.optimize import minimize

from archsearch.acceptance.known_targets import KNOWN_FILE
from archsearch.acceptance.terms import COEFFICIENTS, FIT_FILE, PublishedFit, Term, load_fit
from archsearch.estimate import Array
from archsearch.files import atomic_path, write_json
from archsearch.speedup import alpha_from_tau, drifting_positions, tau_from_positions
from published_levels import (
    EFFECTS,
    Design,
    Levels,
    Query,
    Spread,
    coefficients_for,
    design,
    kind_of,
    known_targets,
    own_slopes,
    prior_moments,
    same,
)
from published_table import (
    ANCHORS_FILE,
    PUBLISHED_FILE,
    STUDY_FILE,
    Published,
    load_published,
)

# --- how acceptance runs along a block, from sweeps over gamma and printed positions

KINDS: Final = ("greedy", "sampled", "feature", "block")


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
                taus |= {
                    g: tau_from_positions(row.positions[:g])
                    for g in range(1, len(row.positions) + 1)
                }
            elif row.gamma and row.tau:
                taus[row.gamma] = row.tau
        first = members[0]
        if len(taus) > 1:
            found.append(
                Sweep(
                    name, first.study, first.family, first.temperature, dict(sorted(taus.items()))
                )
            )
    return found


def sweep_errors(sweep: Sweep, drift: float) -> Array:
    """ln(predicted / printed tau) at each gamma above the smallest, from tau at the smallest and a
    drift (logit per position)."""
    smallest = min(sweep.taus)
    first = alpha_from_tau(sweep.taus[smallest], smallest, drift)
    positions = drifting_positions(first, drift, max(sweep.taus))
    return np.array(
        [
            math.log(tau_from_positions(positions[:g]) / t)
            for g, t in sweep.taus.items()
            if g > smallest
        ]
    )


# Each study's drift is one draw from N(mean, BETWEEN^2), mean from N(0, BETWEEN^2); beyond that
# tau has the error TAU_STD.
DRIFT_BETWEEN: Final = 0.12
DRIFT_TAU_STD: Final = 0.02
DRIFT_GRID: Final = np.linspace(-0.6, 0.6, 121)


def learn_drifts(found: Sequence[Sweep]) -> dict[str, Term]:
    """Drift along the block by kind (KINDS), learnt from sweeps of several studies: mean and std of
    the drift of a new study; of a kind without any sweep N(0, BETWEEN).

    A study's sweeps are as good as one (they share drafts and engine): its likelihood over the
    drift is that of its mean squared error.
    """
    drifts: dict[str, Term] = {}
    for kind in KINDS:
        members = [sweep for sweep in found if sweep.kind == kind]
        log_post = -0.5 * (DRIFT_GRID / DRIFT_BETWEEN) ** 2
        for study in sorted({sweep.study for sweep in members}):
            own = [sweep for sweep in members if sweep.study == study]
            # mean squared error over their gammas at each point of the grid
            squared = [
                np.mean([np.mean(_cached_errors(sweep, float(d)) ** 2) for sweep in own])
                for d in DRIFT_GRID
            ]
            likely = np.exp(-0.5 * (np.array(squared) - min(squared)) / DRIFT_TAU_STD**2)
            # p(study's data | mean of studies) = integral of its likelihood over its own drift
            kernel = np.exp(
                -0.5 * ((DRIFT_GRID[:, None] - DRIFT_GRID[None, :]) / DRIFT_BETWEEN) ** 2
            )
            log_post += np.log(kernel @ likely)
        # [grid] posterior of the mean; the largest is subtracted so that exp does not underflow
        weight = np.exp(log_post - log_post.max())
        weight /= weight.sum()
        mean = float(weight @ DRIFT_GRID)
        of_mean = float(weight @ (DRIFT_GRID - mean) ** 2)
        drifts[kind] = Term(mean, math.sqrt(of_mean + DRIFT_BETWEEN**2))
    return drifts


_ERRORS: dict[tuple[str, float], Array] = {}


def _cached_errors(sweep: Sweep, drift: float) -> Array:
    key = (f"{sweep.study}|{sweep.name}|{sorted(sweep.taus.items())}", drift)
    if key not in _ERRORS:
        _ERRORS[key] = sweep_errors(sweep, drift)
    return _ERRORS[key]


# --- the regression: its spreads, and what it says of rows that it has not seen


def best_spread(rows: Design, start: Spread | None = None) -> Spread:
    """The spreads with the highest marginal likelihood, with a weak belief (a factor of 2) around
    the default."""
    mean, variance = prior_moments()
    fixed = (rows.x * variance) @ rows.x.T + np.diag(rows.noise**2)
    kernels = [
        *(same(rows.groups[name], rows.groups[name]) for name in EFFECTS),
        np.eye(len(rows)),
        own_slopes(rows, rows),
    ]
    residual = rows.y - rows.x @ mean
    default = np.log(np.array(astuple(Spread())))

    def loss(log_std: Array) -> tuple[float, Array]:
        variances = np.exp(2.0 * log_std)
        covariance = fixed + sum(v * k for v, k in zip(variances, kernels, strict=True))
        inverse = np.linalg.inv(covariance)
        weights = inverse @ residual
        value = 0.5 * (residual @ weights + np.linalg.slogdet(covariance)[1])
        outer = inverse - np.outer(weights, weights)
        slope = np.array(
            [v * float(np.sum(outer * k)) for v, k in zip(variances, kernels, strict=True)]
        )
        away = (log_std - default) / math.log(2.0)
        return float(value + 0.5 * away @ away), slope + away / math.log(2.0)

    first = np.log(np.array(astuple(start or Spread())))
    found = minimize(
        loss,
        first,
        jac=True,
        method="L-BFGS-B",
        bounds=[(-5.0, 1.0)] * len(default),
        options={"maxiter": 25},
    )
    return Spread(*(float(value) for value in np.exp(found.x)))


def where(rows: Design, keep: Sequence[bool] | np.ndarray) -> Design:
    """The rows that `keep` says."""
    chosen = np.flatnonzero(keep)
    groups = {name: tuple(labels[i] for i in chosen) for name, labels in rows.groups.items()}
    return Design(rows.x[chosen], rows.y[chosen], rows.noise[chosen], groups)


def posterior(levels: Levels) -> tuple[Array, Array]:
    """(mean [len(COEFFICIENTS)], covariance [n, n]) of the coefficients alone."""
    mean, variance = prior_moments()
    inverse, weights = levels.solved
    cross = variance[:, None] * levels.rows.x.T
    return mean + cross @ weights, np.diag(variance) - cross @ inverse @ cross.T


def predict(levels: Levels, rows: Design) -> tuple[Array, Array]:
    """(mean, std) of logit(alpha) of rows that were not fitted; what they share with those that
    were is known."""
    mean, covariance = joint(levels, rows)
    return mean, np.sqrt(np.diag(covariance))


def joint(levels: Levels, rows: Design) -> tuple[Array, Array]:
    """(mean [n], covariance [n, n]) of logit(alpha) of rows that were not fitted, noise of
    reading included."""
    inverse, weights = levels.solved
    cross = levels.between(rows, levels.rows)
    own = levels.between(rows, rows) + np.diag(levels.spread.residual**2 + rows.noise**2)
    return rows.x @ prior_moments()[0] + cross @ weights, own - cross @ inverse @ cross.T


# --- the stored fit


def inputs_hash() -> str:
    """Which table and own drafts a fit rests on."""
    digest = hashlib.sha256()
    for path in (PUBLISHED_FILE, ANCHORS_FILE, STUDY_FILE):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def fit_all(start: Spread | None = None) -> PublishedFit:
    """Everything that the prior reads, from the table and the anchors, of a target that nobody
    measured: all effects are drawn anew, this project's own among them. Takes some seconds; fewer
    from spreads that are near."""
    drifts = learn_drifts(sweeps())
    rows = design(drifts=drifts)
    spread = best_spread(rows, start)
    mean, covariance = coefficients_for(Levels(rows, spread), Query())
    counts = dict(zip(COEFFICIENTS, np.count_nonzero(rows.x, axis=0).tolist(), strict=True))
    return PublishedFit(mean, covariance, counts, asdict(spread), dict(drifts), inputs_hash())


def save_fit(fit: PublishedFit) -> None:
    """Write published_fit.json."""
    upper = fit.covariance[np.triu_indices(len(COEFFICIENTS))]
    write_json(
        FIT_FILE,
        {
            "about": (
                "made by `python benchmarks/acceptance_fit.py` from published.csv and"
                " anchors.yaml; do not edit"
            ),
            "inputs": fit.inputs,
            "spread": {name: round(value, 6) for name, value in fit.spread.items()},
            "drift": {
                name: [round(term.mean, 4), round(term.std, 4)] for name, term in fit.drift.items()
            },
            "rows": dict(fit.rows),
            "coefficients": list(COEFFICIENTS),
            "mean": [round(float(value), 6) for value in fit.mean],
            "covariance_upper": [float(f"{value:.6g}") for value in upper],
        },
    )


def stored_levels() -> Levels:
    """The regression with the spreads and drifts of published_fit.json."""
    fit = load_fit()
    return Levels(design(drifts=fit.drift), Spread(**fit.spread))


def save_known_targets() -> None:
    """Write known_targets.npz, from the spreads and drifts of published_fit.json."""
    found = known_targets(stored_levels())
    kept = list({id(each): each for each in found.values()}.values())
    half = np.triu_indices(len(COEFFICIENTS))
    with atomic_path(KNOWN_FILE) as path, path.open("wb") as file:
        np.savez_compressed(
            file,
            names=np.array(list(found)),
            rows=np.array([next(i for i, k in enumerate(kept) if k is v) for v in found.values()]),
            mean=np.array([mean for mean, _, _ in kept]),
            upper=np.array([covariance[half] for _, covariance, _ in kept]),
            words=np.array([words for _, _, words in kept]),
        )


if __name__ == "__main__":
    save_fit(fit_all())
    load_fit.cache_clear()
    save_known_targets()
