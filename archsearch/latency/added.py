"""What an engine adds to the passes of a step, learnt from rows that are differences of timings.

Every law is linear in named terms, held at zero or above, and one of:

    plain step     plain + batch                                      rows `engine`, `rest`, gamma 0
    round          1 + gamma + batch + gamma batch + gamma layers     rows `engine`, `rest`
    round beside the target's pass, a drafter that is no model        rows `drafted`, by family
                   kernels + 1 + launched passes + batch + draft tokens + draft tokens x share of
                   the vocabulary that the head lacks

Terms are off where rows do not say them: `engine` rows are of one request and name the draft's
layers, `rest` rows name the batch. `kernels`: the drafter's passes as their ops are priced; heads
run outside of what an engine times of a draft (the states they read, the scatter of trimmed logits,
Medusa's loop), so their sum is learnt.

Such rows are small numbers out of large ones, some at or below zero by noise alone: the fit knows
each row's std (`fit_differences`), and every answer has the std of the law.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from archsearch.drafters.drafter import Drafter, RoundPlan, RoundRows
from archsearch.estimate import Estimate
from archsearch.latency.regression import DifferenceFit, fit_differences
from archsearch.profiles import DraftedShape, Measurement

MIN_ROUND_ROWS: Final = {"engine": 2, "rest": 3}
MIN_DRAFTED_ROWS: Final = 4
PLAIN: Final = ("plain_s", "plain_sequence_s")
ROUND: Final = {
    "engine": ("round_s", "token_s", "layer_s"),
    "rest": ("round_s", "token_s", "sequence_s", "sequence_token_s"),
}
DRAFTED: Final = ("kernels", "round_s", "pass_s", "sequence_s", "token_s", "scattered_token_s")


def usable(rows: Sequence[Measurement]) -> list[Measurement]:
    """The rows that say how large a difference is: not one far below zero, which was disturbed, nor
    one that was cut off."""
    return [row for row in rows if not row.impossible and not row.cut_off]


def fit_rows(features: Sequence[Sequence[float]], rows: Sequence[Measurement]) -> DifferenceFit:
    """`fit_differences` of the rows' medians and standard errors on `features` [rows, columns]."""
    stds = [math.nan if row.error_s is None else row.error_s for row in rows]
    return fit_differences(
        np.array(features, dtype=float), np.array([row.median_s for row in rows]), np.array(stds)
    )


@dataclass(frozen=True)
class AddedFit:
    """What one engine adds to a plain step and to a round; None where too few rows were measured.

    `terms` of a round; `layers`: mean depth of the drafts, at which the std of a round is asked.
    """

    plain_law: DifferenceFit | None
    round_law: DifferenceFit | None
    terms: tuple[str, ...]
    layers: float

    @classmethod
    def fit(cls, rows: Sequence[Measurement]) -> AddedFit:
        """From the rows of one kind and engine (`engine`: and of one vocabulary)."""
        kind = rows[0].kind if rows else "rest"
        steps = [row for row in rows if row.sizes()["gamma"] == 0]
        plain = usable(steps)
        if kind == "engine" and not plain:  # without any, the rounds would be lost too
            plain = [row for row in steps if row.cut_off]
        rounds = [row for row in usable(rows) if row.sizes()["gamma"] > 0]
        depths = [float(row.sizes().get("draft_layers") or 1) for row in rounds]
        terms = ROUND[kind]
        if kind == "engine" and len(set(depths)) <= 1:  # what a layer adds is unknown
            terms = terms[:2]
        points = [
            _round_point(terms, row.sizes()["gamma"], row.sizes().get("batch", 1), depth)
            for row, depth in zip(rounds, depths, strict=True)
        ]
        batches = [[1.0, row.sizes()["batch"]] if kind == "rest" else [1.0] for row in plain]
        return cls(
            fit_rows(batches, plain) if plain else None,
            fit_rows(points, rounds) if len(rounds) >= MIN_ROUND_ROWS[kind] else None,
            terms,
            float(np.mean(depths)) if depths else 0.0,
        )

    @property
    def layer_s(self) -> float:
        """Seconds per draft token and layer of the draft; 0 where one depth was measured."""
        known = self.round_law if "layer_s" in self.terms else None
        return 0.0 if known is None else float(known.coefficients[2])

    def plain_s(self, batch: int = 1) -> Estimate:
        """Seconds that a plain step of `batch` requests takes beside the target's pass."""
        if self.plain_law is None:
            return Estimate(0.0, 0.0, "modelled")
        # rows of kind `engine` are of one request and say nothing of the batch
        point = (1.0, float(batch))[: len(self.plain_law.coefficients)]
        return Estimate(self.plain_law.value_s(*point), self.plain_law.std_s(*point), "measured")

    def round_s(self, gamma: int, batch: int = 1) -> Estimate:
        """Seconds that a round takes beside the passes of target and draft, without what the
        draft's layers add; the std is of both together."""
        if self.round_law is None:
            return Estimate(0.0, 0.0, "modelled")
        bare, point = (
            _round_point(self.terms, gamma, batch, layers) for layers in (0.0, self.layers)
        )
        return Estimate(self.round_law.value_s(*bare), self.round_law.std_s(*point), "measured")

    def to_dict(self) -> dict[str, float]:
        """Coefficients by name, for reports."""
        found: dict[str, float] = {}
        for law, names in ((self.plain_law, PLAIN), (self.round_law, self.terms)):
            if law is not None:
                found |= dict(zip(names, law.coefficients.tolist(), strict=False))
        misfit = 0.0 if self.round_law is None else self.round_law.misfit_s
        return found | {"layer_s": self.layer_s, "std_s": misfit}


def _round_point(terms: Sequence[str], gamma: float, batch: float, layers: float) -> list[float]:
    values = {"round_s": 1.0, "token_s": float(gamma), "sequence_s": float(batch)}
    values |= {"sequence_token_s": float(gamma) * batch, "layer_s": gamma * layers}
    return [values[name] for name in terms]


def fit_overheads(rows: Sequence[Measurement]) -> dict[tuple[str, int], AddedFit]:
    """`engine` rows by engine and vocabulary of the measurement; those with too few are left
    out."""
    groups: dict[tuple[str, int], list[Measurement]] = {}
    for row in rows:
        groups.setdefault((row.sizes()["engine"], row.sizes()["vocab_size"]), []).append(row)
    fits = {key: AddedFit.fit(group) for key, group in groups.items()}
    return {key: fit for key, fit in fits.items() if fit.plain_law and fit.round_law}


@dataclass(frozen=True)
class DraftedFit:
    """What a round takes beside the target's pass, by family of drafters that are no models."""

    laws: dict[str, DifferenceFit]

    @classmethod
    def fit(
        cls, rows: Sequence[Measurement], scattered: bool, price: Callable[[RoundPlan], float]
    ) -> DraftedFit:
        """From the `drafted` rows of one engine; families with too few rows are left out. `price`:
        seconds of the passes of a plan by their ops."""
        groups: dict[str, list[tuple[Measurement, list[float]]]] = {}
        for row in usable(rows):
            shape = DraftedShape.of(row)
            asked = RoundRows(
                shape.batch, shape.context, shape.gamma, fused=False, scattered=scattered
            )
            plan = shape.drafter.plan(asked)
            point = _drafted_point(shape.drafter, asked, plan, price(plan))
            groups.setdefault(shape.drafter.family, []).append((row, point))
        laws = {}
        for family, found in groups.items():
            if len(found) >= MIN_DRAFTED_ROWS:
                rows, points = zip(*found, strict=True)
                laws[family] = fit_rows(points, rows)
        return cls(laws)

    def round_s(
        self, drafter: Drafter, rows: RoundRows, plan: RoundPlan, kernels_s: float
    ) -> tuple[Estimate, Estimate] | None:
        """(seconds of the drafter's kernels, of all else beside the target's pass); None where
        nothing of the family is known."""
        law = self.laws.get(drafter.family)
        if law is None:
            return None
        point = _drafted_point(drafter, rows, plan, kernels_s)
        kernels = float(law.coefficients[0]) * kernels_s
        rest = Estimate(law.value_s(*point) - kernels, law.std_s(*point), "measured")
        return Estimate(kernels, 0.0, "measured"), rest

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Coefficients by family and name, for reports."""
        return {
            family: dict(zip(DRAFTED, law.coefficients.tolist(), strict=True))
            for family, law in self.laws.items()
        }


def _drafted_point(
    drafter: Drafter, rows: RoundRows, plan: RoundPlan, kernels_s: float
) -> list[float]:
    drafted = float(rows.batch * rows.gamma)
    lacking = 1.0 - drafter.architecture.head_rows / drafter.architecture.vocab_size
    return [kernels_s, 1.0, float(plan.launched), float(rows.batch), drafted, drafted * lacking]
