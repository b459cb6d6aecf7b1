"""How acceptance runs along a block, learnt from published sweeps over gamma and printed
positions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from archsearch.acceptance.table import Published, load_published
from archsearch.acceptance.terms import Term
from archsearch.estimate import Array
from archsearch.speedup import alpha_from_tau, drifting_positions, tau_from_positions

KINDS: Final = ("greedy", "sampled", "feature", "block")


def kind_of(family: str, temperature: float | None) -> str:
    """What decides how acceptance runs along the block: `feature` (its inputs are its own features
    and degrade), `block` (all positions in one pass), or of an independent draft how tokens are
    chosen, `greedy` or `sampled`."""
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
