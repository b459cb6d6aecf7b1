"""What an engine adds: differences of timings, of which noise alone may take one below zero."""

from __future__ import annotations

import numpy as np
import pytest

from archsearch.latency.added import AddedFit, fit_overheads
from archsearch.latency.regression import fit_differences
from archsearch.profiles import Measurement, freeze_shape

DEMO_US = {
    (1, 1): 7866,
    (1, 6): 6409,
    (2, 1): 3995,
    (2, 6): 5184,
    (4, 1): 4883,
    (4, 6): 5487,
    (7, 1): 1,
    (7, 6): 3755,
}
"""Rows of the demo's profile as an older version stored them: gamma, draft layers; what was
negative is there as 1 us."""


def engine_row(gamma: int, layers: int, seconds: float, std_s: float | None = None) -> Measurement:
    shape = {"engine": "transformers", "gamma": gamma, "draft_layers": layers, "vocab_size": 320}
    return Measurement(
        "engine", freeze_shape(shape), "bfloat16", "eager", "warm", (seconds,), std_s=std_s
    )


def rest_row(gamma: int, batch: int, seconds: float, std_s: float | None = None) -> Measurement:
    shape = {"engine": "vllm", "gamma": gamma, "batch": batch, "first_tokens": 1}
    return Measurement(
        "rest", freeze_shape(shape), "bfloat16", "eager", "warm", (seconds,), std_s=std_s
    )


def test_one_row_cut_off_at_a_microsecond_does_not_zero_the_others() -> None:
    """Relative least squares gave it 10^7 times the weight of a 4 ms row: 0.001 ms of overhead at
    gamma 6."""
    rows = [
        engine_row(0, 0, 0.4e-3),
        *(engine_row(*case, us * 1e-6) for case, us in DEMO_US.items()),
    ]
    fit = fit_overheads([Measurement.from_dict(row.to_dict()) for row in rows])["transformers", 320]
    round_s = fit.round_s(6)
    assert 4.2e-3 < round_s.value < 5.4e-3
    assert 1e-3 < round_s.std < 5e-3  # the rows disagree by that much
    assert fit.layer_s < 1e-5 and fit.plain_s().value == pytest.approx(0.4e-3)


def test_rows_that_an_older_version_cut_off_have_no_size_and_are_left_out() -> None:
    rounds = [engine_row(1, 1, 3e-3), engine_row(2, 1, 4e-3), engine_row(4, 1, 6e-3)]
    without, with_cut_off, with_small, about_nothing = (
        AddedFit.fit(rows)
        for rows in (
            [engine_row(0, 0, 0.4e-3), *rounds],
            [engine_row(0, 0, 0.4e-3), *rounds, engine_row(7, 1, 1e-6)],
            [
                engine_row(0, 0, 0.4e-3),
                *rounds,
                engine_row(7, 1, 1e-6, 1e-4),
            ],  # measured as that small: it counts
            [
                engine_row(0, 0, 1e-6),
                *rounds,
            ],  # such a plain step keeps the rounds, which are worth more
        )
    )
    assert without and with_cut_off and with_small and about_nothing
    assert with_cut_off.to_dict() == without.to_dict() != with_small.to_dict()
    assert about_nothing.to_dict() == without.to_dict() | {"plain_s": pytest.approx(1e-6)}


def test_a_difference_that_noise_took_below_zero_pulls_like_any_other() -> None:
    rows = [engine_row(0, 0, -0.1e-3, 0.2e-3)]
    rows += [
        engine_row(gamma, 1, seconds, 0.5e-3)
        for gamma, seconds in ((1, 0.6e-3), (2, -0.4e-3), (4, 0.5e-3), (7, -0.3e-3))
    ]
    fit = AddedFit.fit([Measurement.from_dict(row.to_dict()) for row in rows])
    assert fit is not None
    assert fit.plain_s().value == 0.0 and fit.plain_s().std == pytest.approx(
        0.2e-3
    )  # an engine takes no less than no time
    assert 0.0 <= fit.round_s(4).value < 0.3e-3 and 0.2e-3 < fit.round_s(4).std < 1e-3


def test_rows_weigh_by_their_std() -> None:
    rows = [engine_row(0, 0, 1e-3, 1e-4)]
    rows += [engine_row(gamma, 1, 2e-3 + 1e-3 * gamma, 1e-5) for gamma in (1, 2, 4)]
    rows += [engine_row(7, 1, 30e-3, 20e-3)]  # one std above the line
    fit = AddedFit.fit(rows)
    assert fit is not None and fit.round_s(4).value == pytest.approx(6e-3, rel=0.01)


def test_a_row_far_below_zero_was_disturbed_and_is_left_out() -> None:
    good = [
        engine_row(0, 0, 1e-3, 1e-4),
        *(engine_row(gamma, 1, 2e-3, 1e-4) for gamma in (1, 2, 4)),
    ]
    bad = engine_row(7, 1, -8e-3, 1e-3)
    assert (
        bad.impossible
        and not any(row.impossible for row in good)
        and not engine_row(7, 1, -2e-3, 1e-3).impossible
    )
    with_bad, without = AddedFit.fit([*good, bad]), AddedFit.fit(good)
    assert (
        with_bad is not None and without is not None and with_bad.round_s(4) == without.round_s(4)
    )


def test_rests_are_fitted_alike() -> None:
    """A step whose passes add up to all of it: a rest of 1 us, or a little less than nothing."""
    rows = [rest_row(0, batch, 1e-3 + 1e-4 * batch, 2e-5) for batch in (1, 2, 4, 8)]
    law = {(1, 1): 2.1e-3, (2, 4): 2.4e-3, (4, 2): 2.2e-3, (6, 8): 2.8e-3, (3, 1): 2.1e-3}
    rows += [rest_row(gamma, batch, seconds, 1e-4) for (gamma, batch), seconds in law.items()]
    rows += [rest_row(5, 1, -2e-4, 1e-3)]
    fit = AddedFit.fit([Measurement.from_dict(row.to_dict()) for row in rows])
    assert fit.plain_s(3).value == pytest.approx(1.3e-3, rel=0.01)
    assert (
        fit.round_s(4, 4).value == pytest.approx(2.4e-3, rel=0.1) and fit.round_s(4, 4).std < 2e-3
    )
    assert AddedFit.fit([]).round_s(4, 4).value == 0.0


def test_a_law_whose_rows_fit_by_their_noise_has_no_misfit() -> None:
    rng = np.random.default_rng(0)
    features = np.stack([np.ones(200), rng.uniform(1, 8, 200)], axis=1)
    stds = rng.uniform(1e-4, 1e-3, 200)
    fit = fit_differences(features, features @ [2e-3, 5e-4] + stds * rng.standard_normal(200), stds)
    assert fit.coefficients == pytest.approx([2e-3, 5e-4], rel=0.1) and fit.misfit_s < 2e-4
    rough = fit_differences(
        features, features @ [2e-3, 5e-4] + 2e-3 * rng.standard_normal(200), stds
    )
    assert rough.misfit_s == pytest.approx(2e-3, rel=0.2)
