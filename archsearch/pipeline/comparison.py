"""Predicted beside measured: each term of a round, and how far off predictions were."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from archsearch.estimate import Estimate
from archsearch.speedup import error_by_term

TERMS: Final = ("tau", "decode_s", "draft_s", "verify_s", "overhead_s")


def predicted_terms(score: Any, overhead: Estimate) -> dict[str, float]:
    """The terms of a Score as `speedup.error_by_term` takes them."""
    return {
        "tau": score.tau.value,
        "decode_s": score.decode_s.value,
        "draft_s": score.draft_s.value,
        "verify_s": score.verify_s.value,
        "overhead_s": overhead.value,
    }


def explain(predicted: dict[str, float], measured: dict[str, float | None], slowdown: float = 1.0) -> dict[str, Any] | None:
    """Predicted, measured and each term's share of the error of the speed-up; None where the engine did not tell a term.

    Measured times are divided by the machine's `slowdown`, so that they stand beside predictions at the profile's speed.
    """
    told = {name: value if name == "tau" else value / slowdown for name, value in measured.items() if value is not None}
    if len(told) < len(measured) or min(told["tau"], told["decode_s"]) <= 0:
        return None
    shares = error_by_term(predicted, told)
    return {name: {"predicted": predicted[name], "measured": told[name], "log_error": shares[name]} for name in TERMS}


def error_summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median absolute error of the predicted speed-up over the rows with a draft, and the shares within 5 and 10 %."""
    errors = [abs(row["relative_error"]) for row in rows if row["gamma"] and row["relative_error"] is not None]
    if not errors:
        return {"cases": 0}
    return {
        "cases": len(errors),
        "median_absolute_error": statistics.median(errors),
        "within_5_percent": statistics.fmean(error <= 0.05 for error in errors),
        "within_10_percent": statistics.fmean(error <= 0.10 for error in errors),
    }
