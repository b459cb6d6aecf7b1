"""Rounds that a profile holds (rows of kind `round`), brought to the fit: those that tell about the
engine that is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from archsearch.engine_rounds import EngineRounds, engine_rounds, parse_version, version_in
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.latency.round_fit import RoundFit, RoundRow, StepRow, carried_over, fit_rounds
from archsearch.profiles import Measurement, Profile, RoundShape
from archsearch.workload import Workload


def with_measured_rounds(
    model: Any, profile: Profile
) -> tuple[EngineRounds | None, RoundFit | None]:
    """`model.rounds` with what the profile's rounds tell of them, and the fit; as it is where they
    tell nothing.

    `model`: a latency that prices passes (`forward_s`, `verify_s`, `round_passes`). Rows of any
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
    others = [
        key
        for key, (rounds, _) in by_class.items()
        if (rounds.costs.graph, rounds.costs.order) == _way(asked)
    ]
    for key in [name] if name in by_class else others:
        rounds, rows = by_class[key]
        fit = _fitted(model, asked if key == name else rounds, rows)
        if fit is not None:
            return (fit.rounds if key == name else carried_over(asked, fit.rounds)), fit
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


def _way(rounds: EngineRounds) -> tuple[str, str]:
    return rounds.costs.graph, rounds.costs.order


def _fitted(model: Any, prior: EngineRounds, rows: list[Measurement]) -> RoundFit | None:
    """The fit of `prior` to rows of its class; None where no round is among them."""
    rounds: list[RoundRow] = []
    steps: list[StepRow] = []
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
                kernels = model.forward_s(
                    shape.target,
                    batch=shape.batch,
                    tokens=1,
                    context=shape.context,
                    ranks=shape.tensor_parallel,
                )
                steps.append(
                    StepRow(seconds, kernels, shape.target.num_hidden_layers, shape.batch, target)
                )
            else:
                verify = model.verify_s(shape.target, work, shape.gamma)
                passes = model.round_passes(shape.target, shape.draft, work, shape.gamma, verify)
                rounds.append(RoundRow(seconds, passes, f"draft {shape.draft.label()}", target))
    finally:
        model.rounds = before
    if not rounds:
        return None
    fit = fit_rounds(prior, rounds, steps)
    return replace(fit, rounds=replace(fit.rounds, version=prior.version))
