"""What a round takes in an engine beside the target's pass, where the drafter is no model of its
own: learnt from rows of kind `drafted`, one law a family.

    seconds = c . [kernels, 1, launched passes, batch, draft tokens, draft tokens x share of the
    vocabulary that the head lacks]

`kernels`: its passes as their ops are priced. c >= 0. Heads run outside of what an engine times of
a draft (the states they read, the scatter of trimmed logits into the whole vocabulary, Medusa's
loop), so that the sum is learnt and not its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from archsearch.drafters.drafter import Drafter, RoundPlan, RoundRows
from archsearch.estimate import Estimate
from archsearch.latency.overhead import fit_rows, usable
from archsearch.latency.regression import DifferenceFit
from archsearch.profiles import DraftedShape, Measurement

MIN_ROWS = 4
Price = Callable[[RoundPlan], float]
"""Seconds of the passes of a plan by their ops."""


@dataclass(frozen=True)
class DraftedFit:
    """The laws by family; `price` as they were fitted with."""

    laws: dict[str, DifferenceFit]

    @classmethod
    def fit(cls, rows: Sequence[Measurement], scattered: bool, price: Price) -> DraftedFit:
        """From the `drafted` rows of one engine; families with too few rows are left out."""
        groups: dict[str, list[tuple[Measurement, list[float]]]] = {}
        for row in usable(rows):
            shape = DraftedShape.of(row)
            asked = RoundRows(
                shape.batch, shape.context, shape.gamma, fused=False, scattered=scattered
            )
            plan = shape.drafter.plan(asked)
            groups.setdefault(shape.drafter.family, []).append(
                (row, _point(shape.drafter, asked, plan, price(plan)))
            )
        return cls(
            {
                family: fit_rows([point for _, point in found], [row for row, _ in found])
                for family, found in groups.items()
                if len(found) >= MIN_ROWS
            }
        )

    def round_s(
        self, drafter: Drafter, rows: RoundRows, plan: RoundPlan, kernels_s: float
    ) -> tuple[Estimate, Estimate] | None:
        """(seconds of the drafter's kernels, of all else beside the target's pass); None where
        nothing of the family is known."""
        law = self.laws.get(drafter.family)
        if law is None:
            return None
        point = _point(drafter, rows, plan, kernels_s)
        kernels = float(law.coefficients[0]) * kernels_s
        whole = law.value_s(*point)
        return Estimate(kernels, 0.0, "measured"), Estimate(
            whole - kernels, law.std_s(*point), "measured"
        )

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Coefficients by family and name, for reports."""
        names = ("kernels", "round_s", "pass_s", "sequence_s", "token_s", "scattered_token_s")
        return {
            family: dict(zip(names, law.coefficients.tolist(), strict=True))
            for family, law in self.laws.items()
        }


def _point(drafter: Drafter, rows: RoundRows, plan: RoundPlan, kernels_s: float) -> list[float]:
    """Features of a round."""
    drafted = float(rows.batch * rows.gamma)
    lacking = 1.0 - drafter.architecture.head_rows / drafter.architecture.vocab_size
    return [kernels_s, 1.0, float(plan.launched), float(rows.batch), drafted, drafted * lacking]
