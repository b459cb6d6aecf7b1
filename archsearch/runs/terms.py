"""`error_by_term` of a confirmation or a load: why a predicted speed-up was off, term by term."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from archsearch.estimate import number
from archsearch.speedup import RoundTerms, error_by_term

TERMS: Final = tuple(field.name for field in fields(RoundTerms))
REST: Final = "rest"


@dataclass(frozen=True)
class TermErrors:
    """The terms as predicted and as measured, and the part of each in ln(predicted / measured
    speed-up)."""

    predicted: RoundTerms
    measured: RoundTerms
    log_error: RoundTerms

    @classmethod
    def between(cls, predicted: RoundTerms, measured: RoundTerms) -> TermErrors:
        return cls(predicted, measured, error_by_term(predicted, measured))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TermErrors:
        """KeyError for a missing term, ValueError or TypeError for what is no number."""
        parts = [part.name for part in fields(cls)]
        return cls(
            *(RoundTerms(**{name: number(data[name][part]) for name in TERMS}) for part in parts)
        )

    def to_dict(self) -> dict[str, dict[str, float]]:
        """term -> predicted, measured, log_error."""
        return {
            name: {part.name: getattr(getattr(self, part.name), name) for part in fields(self)}
            for name in TERMS
        }

    def shares(self, relative_error: float) -> dict[str, float]:
        """What each term and the rest bring to `relative_error` of the speed-up (predicted /
        measured - 1); they add up to it.

        The parts of ln(predicted / measured) are scaled by one factor, so that they add up to the
        error itself. "rest": the measured speed-up is a median of ratios, which the medians of the
        terms do not give exactly.
        """
        total = math.log1p(relative_error)
        logs = {name: float(getattr(self.log_error, name)) for name in TERMS}
        logs[REST] = total - math.fsum(logs.values())
        factor = relative_error / total if abs(total) > 1e-9 else 1.0
        return {name: factor * value for name, value in logs.items()}
