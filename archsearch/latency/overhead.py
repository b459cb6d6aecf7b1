"""What an engine adds to the passes of a profile, learnt from rows of kind `engine` and `rest`:
differences of timings.

Such rows are small numbers out of large ones: one may lie at or below zero by noise alone. They are
fitted by least squares that know each row's std (`fit_differences`), and every answer comes with
the std of the law, wide where the rows disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from archsearch.estimate import Estimate
from archsearch.latency.regression import DifferenceFit, fit_differences
from archsearch.profiles import EngineShape, Measurement, RestShape

Array = NDArray[np.float64]
MIN_ROUND_ROWS = 2


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
class OverheadFit:
    """What one engine adds: `plain` seconds to a plain token; to a round `law` on [1, gamma] or [1,
    gamma, gamma * draft layers].

    `layers`: mean depth of the drafts it was measured with, at which its std is asked.
    """

    plain: Estimate
    law: DifferenceFit
    layers: float

    @classmethod
    def fit(cls, rows: Sequence[Measurement]) -> OverheadFit | None:
        """From the `engine` rows of one engine and vocabulary; None where they are too few."""
        steps = [row for row in rows if EngineShape.of(row).gamma == 0]
        plain = usable(steps) or [
            row for row in steps if row.cut_off
        ]  # without any, the rounds would be lost too
        rounds = [row for row in usable(rows) if EngineShape.of(row).gamma > 0]
        if not plain or len(rounds) < MIN_ROUND_ROWS:
            return None
        shapes = [EngineShape.of(row) for row in rounds]
        depths = [
            1.0 if shape.draft_layers is None else float(shape.draft_layers) for shape in shapes
        ]
        points = [[1.0, float(shape.gamma)] for shape in shapes]
        if (
            len(set(depths)) > 1
        ):  # drafts of several depths were measured: what a layer adds can be told
            points = [
                [*point, point[1] * depth] for point, depth in zip(points, depths, strict=True)
            ]
        alone = fit_rows([[1.0]] * len(plain), plain)
        return cls(
            Estimate(alone.value_s(1.0), alone.std_s(1.0), "measured"),
            fit_rows(points, rounds),
            float(np.mean(depths)),
        )

    @property
    def layer_s(self) -> float:
        """Seconds per draft token and layer of the draft; 0 where one depth was measured."""
        return float(self.law.coefficients[2]) if len(self.law.coefficients) > 2 else 0.0

    def round_s(self, gamma: int) -> Estimate:
        """Seconds of a round of `gamma` draft tokens without what its layers add; the std is of
        both together."""
        constant, token = self.law.coefficients[:2]
        point = (1.0, float(gamma), gamma * self.layers)[: len(self.law.coefficients)]
        return Estimate(float(constant + gamma * token), self.law.std_s(*point), "measured")

    def to_dict(self) -> dict[str, float]:
        """For reports."""
        constant, token = (float(value) for value in self.law.coefficients[:2])
        return {
            "plain_s": self.plain.value,
            "round_s": constant,
            "token_s": token,
            "layer_s": self.layer_s,
            "std_s": self.law.misfit_s,
        }


def fit_overheads(rows: Sequence[Measurement]) -> dict[tuple[str, int], OverheadFit]:
    """By engine and vocabulary of the measurement; those with too few rows are left out."""
    groups: dict[tuple[str, int], list[Measurement]] = {}
    for row in rows:
        shape = EngineShape.of(row)
        groups.setdefault((shape.engine, shape.vocab_size), []).append(row)
    fits = {key: OverheadFit.fit(group) for key, group in groups.items()}
    return {key: fit for key, fit in fits.items() if fit is not None}


@dataclass(frozen=True)
class RestFit:
    """What the steps of an engine take beside its own passes: p0 + p1 batch of a plain step; of a
    round r0 + r1 gamma + r2 batch + r3 gamma batch. None where too few rows were measured."""

    plain: DifferenceFit | None
    round: DifferenceFit | None

    MIN_ROUND_ROWS = 3

    @classmethod
    def fit(cls, rows: Sequence[Measurement]) -> RestFit:
        """From the `rest` rows of one engine."""
        shapes = [(row, RestShape.of(row)) for row in usable(rows)]
        plain = [(row, shape) for row, shape in shapes if shape.gamma == 0]
        rounds = [(row, shape) for row, shape in shapes if shape.gamma > 0]
        plain_points = [[1.0, shape.batch] for _, shape in plain]
        points = [_round_point(shape.gamma, shape.batch) for _, shape in rounds]
        return cls(
            fit_rows(plain_points, [row for row, _ in plain]) if plain else None,
            fit_rows(points, [row for row, _ in rounds])
            if len(rounds) >= cls.MIN_ROUND_ROWS
            else None,
        )

    def plain_s(self, batch: int) -> Estimate:
        """Seconds of a plain step of `batch` requests beside the target's pass."""
        if self.plain is None:
            return Estimate(0.0, 0.0, "modelled")
        return Estimate(self.plain.value_s(1.0, batch), self.plain.std_s(1.0, batch), "measured")

    def round_s(self, gamma: int, batch: int) -> Estimate:
        """Seconds of a round beside the passes of target and draft."""
        if self.round is None:
            return Estimate(0.0, 0.0, "modelled")
        point = _round_point(gamma, batch)
        return Estimate(self.round.value_s(*point), self.round.std_s(*point), "measured")

    def to_dict(self) -> dict[str, float]:
        """Coefficients by name, for reports."""
        found: dict[str, float] = {}
        for law, names in (
            (self.plain, ("plain_s", "plain_sequence_s")),
            (self.round, ("round_s", "token_s", "sequence_s", "sequence_token_s")),
        ):
            if law is not None:
                found |= dict(zip(names, law.coefficients.tolist(), strict=True))
        return found


def _round_point(gamma: float, batch: float) -> tuple[float, float, float, float]:
    """Features of a round's rest."""
    return 1.0, float(gamma), float(batch), float(gamma) * batch
