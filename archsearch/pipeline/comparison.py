"""Predicted beside measured: each term of a round, and how far off predictions were."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from archsearch.estimate import Estimate
from archsearch.runs.load import LoadRow
from archsearch.runs.terms import TermErrors
from archsearch.search.objective import Score
from archsearch.speedup import RoundTerms


def predicted_terms(score: Score, overhead: Estimate) -> RoundTerms:
    """The terms of a score; `overhead`: what the engine adds to a round."""
    return RoundTerms(
        score.tau.value,
        score.decode_s.value,
        score.draft_s.value,
        score.verify_s.value,
        overhead.value,
    )


def measured_terms(
    tau: float,
    decode_s: float | None,
    draft_s: float | None,
    verify_s: float | None,
    rest_s: float | None,
) -> RoundTerms | None:
    """The terms that an engine told, seconds a round (`decode_s`: a plain step; `rest_s`: what is
    neither drafting nor verification); None where one is missing or nothing was accepted or
    timed."""
    if draft_s is None or verify_s is None or rest_s is None or not decode_s or tau <= 0:
        return None
    return RoundTerms(tau, decode_s, draft_s, verify_s, rest_s)


def explain(
    predicted: RoundTerms, measured: RoundTerms | None, slowdown: float = 1.0
) -> TermErrors | None:
    """Predicted, measured and each term's share of the error of the speed-up; None where the engine
    did not tell a term.

    Measured times are divided by the machine's `slowdown`, so that they stand beside predictions at
    the profile's speed.
    """
    return (
        None if measured is None else TermErrors.between(predicted, measured.slowed(1.0 / slowdown))
    )


def error_summary(rows: Sequence[LoadRow]) -> dict[str, float]:
    """Median absolute error of the predicted speed-up over the rows with a draft, and the shares
    within 5 and 10 %."""
    errors = [
        abs(row.relative_error) for row in rows if row.gamma and row.relative_error is not None
    ]
    if not errors:
        return {"cases": 0}
    return {
        "cases": len(errors),
        "median_absolute_error": statistics.median(errors),
        "within_5_percent": statistics.fmean(error <= 0.05 for error in errors),
        "within_10_percent": statistics.fmean(error <= 0.10 for error in errors),
    }
