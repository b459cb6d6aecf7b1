"""Broken files of every kind end in an answer or in one line (`benchmarks/fuzz.py` runs
thousands)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fuzz import FAULTS, fuzz, outcome_of


@pytest.mark.parametrize(
    "count",
    [pytest.param(35, marks=pytest.mark.slow), pytest.param(105, marks=pytest.mark.campaign)],
)
def test_no_mutation_ends_in_a_traceback_or_a_silent_change(tmp_path: Path, count: int) -> None:
    rows = fuzz(count, 1, tmp_path)
    assert not [row for row in rows if row.outcome in FAULTS]
    assert {row.case for row in rows if row.outcome == "refused"} >= {
        "config",
        "profile",
        "mix",
        "space",
    }


def test_what_counts_as_a_fault() -> None:
    base = ("2.0x", "")
    assert (
        outcome_of(1, "", "Traceback (most recent call last):", base, number_lost=False)
        == "traceback"
    )
    assert outcome_of(2, "", "Error: no", base, number_lost=True) == "refused"
    assert outcome_of(0, "3.0x", "", base, number_lost=True) == "silent"
    assert outcome_of(0, "3.0x", "warning", base, number_lost=True) == "changed"
