"""Differences of cycles and passes: stored as they are, measured again where they cannot be."""

from __future__ import annotations

import logging

import pytest

from archsearch.engines.measure.overhead import CASES, Case, _Timings, measured_rows
from archsearch.profiles import Measurement, freeze_shape


def row_of(case: Case, times: _Timings) -> Measurement:
    extra, std = times.extra(case[0])
    return Measurement(
        "engine",
        freeze_shape({"gamma": case[0], "layers": case[1]}),
        "float32",
        "eager",
        "warm",
        (extra,),
        std_s=std,
    )


def around(seconds: float) -> list[float]:
    return [seconds * factor for factor in (0.98, 0.99, 1.0, 1.01, 1.02)]


def test_a_difference_keeps_its_sign_and_knows_its_std() -> None:
    times = _Timings(
        cycles=around(9e-3), target=around(10e-3), first=around(1e-3), later=around(0.5e-3)
    )
    value, std = times.extra(3)
    assert value == pytest.approx(9e-3 - 10e-3 - 1e-3 - 2 * 0.5e-3)
    one_percent = 1.2533 * 0.02 / 1.349 / 5**0.5
    assert std == pytest.approx(
        one_percent * (9e-3**2 + 10e-3**2 + 1e-3**2 + (2 * 0.5e-3) ** 2) ** 0.5
    )


@pytest.mark.parametrize("always", [False, True])
def test_a_disturbed_case_has_a_second_chance(
    always: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The passes of one case are timed while something else runs: the difference lies far below
    zero."""
    calls: dict[Case, int] = {}

    def measure(case: Case, times: _Timings) -> None:
        calls[case] = calls.get(case, 0) + 1
        slow = case == (7, 1) and (always or calls[case] <= 2)
        times.cycles += around(12e-3)
        times.target += around(50e-3 if slow else 10e-3)
        times.first += around(0.1e-3)
        times.later += around(0.1e-3)

    with caplog.at_level(logging.WARNING):
        rows = measured_rows(measure, row_of, 2)
    assert calls[7, 1] == 4 and all(count == 2 for case, count in calls.items() if case != (7, 1))
    assert len(rows) == len(CASES) - always and all(0.5e-3 < row.median_s < 2.5e-3 for row in rows)
    assert ("gamma 7" in caplog.text) == always
