"""What an engine adds to its rounds, fitted to rounds that were measured in it, with what is
published as the prior.

The law is that of `rounds` (the longer of GPU and host where the engine overlaps). A row constrains
only the side that decided it, so the fit is a maximum of the posterior, by least squares from
several starts, with the covariance of the law's derivatives there. What no row constrains stays at
its prior, with the prior's std. The kernels' times are modelled and may be off too; a factor for
the target and one for each draft are fitted beside them and forgotten.

`with_measured_rounds` takes the rows of kind `round` of a profile that count for the engine asked
for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from archsearch.architecture.ops import Part
from archsearch.engine_rounds import (
    COSTS,
    MACHINE_STD,
    EngineRounds,
    RoundCosts,
    engine_rounds,
    parse_version,
    version_in,
)
from archsearch.errors import ArchsearchError
from archsearch.estimate import Array, Estimate
from archsearch.latency.draft_passes import DraftPasses, nothing_drafted
from archsearch.latency.rounds import Passes, plain_step, round_time
from archsearch.profiles import Measurement, Profile, RoundShape
from archsearch.workload import Workload

# relative: what a law of six numbers misses of a round, beside the noise of its timing
ROW_STD: Final = 0.01
KERNEL_STD: Final = 0.03  # relative, at least: what modelled kernels of one model may be off by
# Factors on the host's prior at which the fit begins: from the wrong side of the maximum a row does
# not constrain it.
STARTS: Final = (1.0, 0.5, 2.0)
TARGET: Final = ""
IDENTIFIED: Final = 0.9  # a cost whose std fell below this share of its prior's was measured


@dataclass(frozen=True)
class RoundRow:
    """A measured round, or plain step (of gamma 0): `seconds` with the std of its timing, and the
    passes it is made of, as modelled; names of the models."""

    seconds: Estimate
    passes: Passes
    draft: str = ""
    target: str = TARGET


@dataclass(frozen=True)
class RoundFit:
    """`rounds`: the engine with what was measured; `kernels`: by model (a target without a name is
    "") the factor between measured and modelled kernels; `errors`: relative, of each round and step
    against the law; `identified`: costs that the rows determine."""

    rounds: EngineRounds
    kernels: Mapping[str, Estimate]
    errors: tuple[float, ...]
    identified: tuple[str, ...]

    @property
    def costs(self) -> dict[str, Estimate]:
        """Seconds, by COSTS."""
        return {name: getattr(self.rounds.costs, f"{name}_s") for name in COSTS}

    @property
    def median_absolute_error(self) -> float:
        return float(np.median(np.abs(self.errors)))

    def to_dict(self) -> dict[str, object]:
        """For reports."""
        return {
            "class": self.rounds.costs.name,
            "rows": self.rounds.measured,
            "costs": {name: cost.to_dict() for name, cost in self.costs.items()},
            "identified": list(self.identified),
            "kernels": {
                name or "target": factor.to_dict() for name, factor in self.kernels.items()
            },
            "median_absolute_error": self.median_absolute_error,
            "worst_error": max(self.errors, key=abs),
        }


def prior_covariance(costs: RoundCosts) -> Array:
    """Covariance [costs, costs] of COSTS before anything is measured here: each with its own std,
    the host's with the machine's speed in common."""
    known = [getattr(costs, f"{name}_s") for name in COSTS]
    host = [name.startswith("host") * each.value for name, each in zip(COSTS, known, strict=True)]
    return np.diag([each.std**2 for each in known]) + MACHINE_STD**2 * np.outer(host, host)


class _Problem:
    """Parameters in units of their prior's std, and the residuals of rows and prior."""

    def __init__(self, prior: EngineRounds, rows: Sequence[RoundRow]) -> None:
        # rounds, then plain steps
        self.prior, self.rows = prior, sorted(rows, key=lambda row: not row.passes.gamma)
        drafts = [row.draft for row in self.rows if row.passes.gamma]
        self.rounds = len(drafts)
        # [costs, costs]; a cost of no std is known, and so not fitted
        covariance = prior_covariance(prior.costs)
        self.free = np.flatnonzero(np.diag(covariance) > 0)
        self.costs = [COSTS[number] for number in self.free]
        targets = dict.fromkeys(row.target for row in self.rows)
        self.models = [*targets, *dict.fromkeys(drafts)]
        means = [getattr(prior.costs, f"{name}_s").value for name in self.costs]
        plain = prior.plain.step_s
        self.means = np.array([*means, plain.value, *[1.0] * len(self.models)])
        # costs, then the plain step, then a factor for the kernels of each model
        count = len(self.costs)
        others = [max(plain.std, 1e-6), *map(self._kernel_std, self.models)]
        joint = np.diag([0.0] * count + others) ** 2
        joint[:count, :count] = covariance[np.ix_(self.free, self.free)]
        self.stds = np.sqrt(np.diag(joint))
        self.whiten = np.linalg.inv(np.linalg.cholesky(joint / np.outer(self.stds, self.stds)))
        lowest = np.concatenate([np.zeros(count + 1), np.full(len(self.models), 0.2)])
        # least squares must begin inside its bounds
        self.lower = np.minimum((lowest - self.means) / self.stds, -1e-9)

    def _kernel_std(self, name: str) -> float:
        """Relative std of the modelled kernels of a target or a draft: one model prices its passes,
        so they err alike."""
        passes = [row.passes.verify_s for row in self.rows if row.target == name]
        passes = passes or [row.passes.draft_s for row in self.rows if row.draft == name]
        return max(KERNEL_STD, float(np.median([each.relative_std for each in passes])))

    def unpack(self, scaled: Array, stds: Array) -> tuple[EngineRounds, dict[str, Estimate]]:
        """The engine and the kernels' factors at these parameters, of these stds."""
        values = np.maximum(self.means + self.stds * scaled, 0.0).tolist()
        found = [Estimate(*each, "measured") for each in zip(values, stds.tolist(), strict=True)]
        names, count = [f"{name}_s" for name in self.costs], len(self.costs)
        changes: dict[str, Any] = dict(zip(names, found, strict=False))
        plain = replace(self.prior.plain, step_s=found[count])
        rounds = replace(self.prior, costs=replace(self.prior.costs, **changes), plain=plain)
        return rounds, dict(zip(self.models, found[count + 1 :], strict=True))

    def predicted(self, scaled: Array) -> Array:
        rounds, factors = self.unpack(scaled, 0.0 * scaled)
        rounds = replace(rounds, costs=rounds.costs.certain())
        found = []
        for row in self.rows:
            passes = row.passes
            read = replace(passes.verify_s, std=0.0).times(factors[row.target].value)
            if not passes.gamma:
                found.append(plain_step(rounds, read, passes.target_layers, passes.batch).value)
                continue
            draft = factors[row.draft].value
            first, later = passes.first_s.times(draft), passes.later_s.times(draft)
            passes = replace(passes, verify_s=read, first_s=first, later_s=later)
            found.append(round_time(rounds.costs, passes).round_s.value)
        return np.array(found)

    @property
    def measured(self) -> tuple[Array, Array]:
        """Seconds of every row, and their std."""
        values = np.array([row.seconds.value for row in self.rows])
        return values, np.hypot([row.seconds.std for row in self.rows], ROW_STD * values)

    def residuals(self, scaled: Array) -> Array:
        """In std: rows, then the prior."""
        values, stds = self.measured
        return np.concatenate([(self.predicted(scaled) - values) / stds, self.whiten @ scaled])

    def start(self, factor: float) -> Array:
        """The prior's means, the host's times `factor`."""
        host = [name.startswith("host") for name in self.costs]
        host += [False] * (1 + len(self.models))
        moved = np.where(host, (factor - 1.0) * self.means / self.stds, 0.0)
        return np.asarray(np.maximum(moved, self.lower))


def fit_rounds(prior: EngineRounds, rows: Sequence[RoundRow]) -> RoundFit:
    """`prior` with its costs fitted to measured rounds and plain steps of one engine and class.

    Raises ValueError without a round.
    """
    from scipy.optimize import least_squares

    problem = _Problem(prior, rows)
    if not problem.rounds:
        raise ValueError("nothing to fit: no round was measured")
    bounds = (problem.lower, np.inf)
    tried = [
        least_squares(problem.residuals, problem.start(factor), bounds=bounds, x_scale=1.0)
        for factor in STARTS
    ]
    # the law has a kink where the host takes over: several starts find the better side
    best = min(tried, key=lambda found: found.cost)
    curvature = best.jac.T @ best.jac  # the prior's part makes it regular
    covariance = np.linalg.inv(curvature) * np.outer(problem.stds, problem.stds)
    values, _ = problem.measured
    errors = problem.predicted(best.x) / values - 1.0
    count, stds = len(problem.costs), np.sqrt(np.diag(covariance))
    # [costs, costs], zero where a cost was not fitted
    full = np.zeros((len(COSTS), len(COSTS)))
    full[np.ix_(problem.free, problem.free)] = covariance[:count, :count]
    rounds, kernels = problem.unpack(best.x, stds)
    sure = dict(zip(problem.costs, stds < IDENTIFIED * problem.stds, strict=False))
    unsure: dict[str, Any] = {
        f"{name}_s": replace(getattr(rounds.costs, f"{name}_s"), source="published")
        for name in problem.costs
        if not sure[name]
    }
    words = (
        f"{problem.rounds} rounds and {len(problem.rows) - problem.rounds} plain steps measured"
        f" here; before: {prior.costs.source}"
    )
    matrix = tuple(map(tuple, full.tolist()))
    costs = replace(rounds.costs, **unsure, covariance=matrix, source=words)
    fitted = replace(rounds, costs=costs, measured=problem.rounds)
    identified = tuple(name for name in problem.costs if sure[name])
    return RoundFit(fitted, kernels, tuple(errors.tolist()), identified)


# What launching takes is the same whether the engine synchronises or not: measured in one class, it
# holds in another that launches alike.
CARRIED: Final = ("host_layer", "host_target_layer", "host_all_reduce")


def carried_over(asked: EngineRounds, measured: EngineRounds) -> EngineRounds:
    """`asked` with what launching a layer was measured to take in another class with the same
    graphs; the rest as published."""
    changes: dict[str, Any] = {}
    for name in CARRIED:
        found = getattr(measured.costs, f"{name}_s")
        if found.source == "measured":
            changes[f"{name}_s"] = found
    return replace(asked, costs=replace(asked.costs, **changes)) if changes else asked


def with_measured_rounds(
    model: DraftPasses, profile: Profile
) -> tuple[EngineRounds | None, RoundFit | None]:
    """`model.rounds` with what the profile's rounds say of them, and the fit; unchanged where they
    say nothing.

    `model`: a latency that prices passes (`pass_s`, `verify_s`, `round_passes`). Rows of any
    version count that runs rounds in the same way (class). Where there is none, launching a layer
    is taken from a class with the same graphs.
    """
    asked: EngineRounds | None = model.rounds
    if asked is None:
        return None, None
    by_class: dict[str, tuple[EngineRounds, list[Measurement]]] = {}
    for row in profile.select("round", model.dtype, model.mode):
        known = rounds_of_row(RoundShape.of(row))
        if known is not None and known.engine == asked.engine:
            by_class.setdefault(known.costs.name, (known, []))[1].append(row)
    name = asked.costs.name
    if name in by_class:
        fit = _fitted(model, asked, by_class[name][1])
        return (asked if fit is None else fit.rounds), fit
    for rounds, rows in by_class.values():
        alike = all(getattr(rounds.costs, x) == getattr(asked.costs, x) for x in ("graph", "order"))
        if alike and (fit := _fitted(model, rounds, rows)) is not None:
            return carried_over(asked, fit.rounds), fit
    return asked, None


def measured_version(profile: Profile, engine: str) -> str | None:
    """The newest version of `engine` whose rounds the profile holds; None where it holds none."""
    shapes = [RoundShape.of(row) for row in profile.rows.values() if row.kind == "round"]
    found = {
        version
        for shape in shapes
        if shape.engine == engine and (version := version_in(shape.version))
    }
    return max(found, key=lambda version: parse_version(engine, version), default=None)


def rounds_of_row(shape: RoundShape) -> EngineRounds | None:
    """How the engine of a row runs rounds; None for a version or switch that nothing is known
    of."""
    try:
        return engine_rounds(shape.engine, version_in(shape.version), dict(shape.options))
    except ArchsearchError:
        return None


def _fitted(model: DraftPasses, prior: EngineRounds, rows: list[Measurement]) -> RoundFit | None:
    """The fit of `prior` to rows of its class; None where no round is among them."""
    found: list[RoundRow] = []
    before, model.rounds = model.rounds, prior  # what a first pass reads is the class's
    try:
        for row in rows:
            shape = RoundShape.of(row)
            work = Workload(
                shape.batch, shape.context, shape.tensor_parallel, model.dtype, model.mode
            )
            seconds = Estimate(row.median_s, row.error_s or 0.0, "measured")
            target = f"target {shape.target.label()}"
            if shape.draft is None:
                one = (Part(shape.batch, 1, shape.context), False)
                kernels = model.pass_s(shape.target, one, shape.tensor_parallel)
                layers = shape.target.num_hidden_layers
                step = replace(nothing_drafted(work), verify_s=kernels, target_layers=layers)
                found.append(RoundRow(seconds, step, target=target))
            else:
                verify = model.verify_s(shape.target, work, shape.gamma)
                passes = model.round_passes(shape.target, shape.draft, work, shape.gamma, verify)
                found.append(RoundRow(seconds, passes, f"draft {shape.draft.label()}", target))
    finally:
        model.rounds = before
    if not any(row.passes.gamma for row in found):
        return None
    fit = fit_rounds(prior, found)
    return replace(fit, rounds=replace(fit.rounds, version=prior.version))
