"""What readers written by hand need beside `archsearch.records`; new types are read by it alone."""

from __future__ import annotations

from typing import Any

from archsearch import records
from archsearch.estimate import Estimate, number
from archsearch.records import WRONG_SHAPE as WRONG_SHAPE

read_or_raise, read_or_tell = records.load, records.load_or_note


def optional_number(value: Any) -> float | None:
    """`number`, None for None."""
    return None if value is None else number(value)


def as_estimate(value: Any) -> Estimate:
    """An Estimate out of its dict, or out of a bare number (std unknown counts as 0)."""
    return records.from_data(Estimate, value)
