import math

import numpy as np
import pytest

from archsearch.errors import ArchsearchError
from archsearch.speedup import logit, sigmoid
from archsearch.training.curves import (
    MEASURED,
    AlphaPoint,
    CurvePrior,
    alpha_points,
    extrapolate,
    fit_prior,
    marks,
)

BUDGET = 256_000
MARKS = [16_000, 26_000, 40_000, 64_000, 128_000, 180_000]


def made_up(level, slope, bend, gain, noise=0.0, rng=None):
    """A curve of the model's own kind, written down from its formula, with the annealed end
    last."""
    points = []
    for tokens, annealed in [*((mark, False) for mark in MARKS), (BUDGET, True)]:
        x = math.log(tokens / 64_000)
        value = (
            level
            + slope * x
            + bend * x * x / 2
            + gain * annealed
            + (rng.normal(0, noise) if rng else 0.0)
        )
        points.append(AlphaPoint(tokens, sigmoid(value), annealed))
    return points


def saturating(end, rate):
    """A curve of another kind: a power law towards an end, 1 - alpha = (1 - end) + c t^-rate."""
    return [
        AlphaPoint(t, end - (end - 0.3) * (t / 10_000) ** -rate, t == BUDGET)
        for t in [*MARKS, BUDGET]
    ]


def test_one_point_and_the_shared_slope_are_an_answer_with_a_wide_band():
    prior = CurvePrior()
    early = extrapolate([AlphaPoint(16_000, 0.4)], BUDGET, prior)
    later = extrapolate([AlphaPoint(16_000, 0.4), AlphaPoint(128_000, 0.6)], BUDGET, prior)
    assert 0.45 < early.value < 0.85 and early.std > later.std > 0.0
    assert early.source == "modelled"


def test_a_point_of_the_budget_itself_is_what_is_answered():
    found = extrapolate(made_up(0.5, 0.35, -0.05, 0.05), BUDGET)
    assert found.value == pytest.approx(made_up(0.5, 0.35, -0.05, 0.05)[-1].alpha, abs=0.004)
    # Without the anneal the same budget is a little lower, by the gain that the curve shows.
    assert extrapolate(made_up(0.5, 0.35, -0.05, 0.05), BUDGET, annealed=False).value < found.value


def test_the_prior_that_curves_speak_for_is_near_what_made_them():
    rng = np.random.default_rng(1)
    curves = [
        made_up(rng.normal(0.4, 0.3), rng.normal(0.3, 0.05), rng.normal(-0.1, 0.02), 0.1, 0.01, rng)
        for _ in range(40)
    ]
    prior = fit_prior(curves, CurvePrior())
    assert prior.mean == pytest.approx((0.4, 0.3, -0.1, 0.1), abs=0.1)
    assert (
        prior.mean[1:] == pytest.approx((0.3, -0.1, 0.1), abs=0.03)
        and prior.covariance[1][1] < 0.09**2
    )
    assert prior.curves == 40 and prior.noise_std < 0.02
    assert (
        fit_prior([]) == MEASURED
        and fit_prior([[AlphaPoint(1000, 0.3)]], CurvePrior()) == CurvePrior()
    )


def test_the_band_holds_what_it_says_on_curves_it_was_not_fitted_on():
    rng = np.random.default_rng(2)

    def draw():
        return made_up(
            rng.normal(0.4, 0.4),
            rng.normal(0.4, 0.08),
            rng.normal(-0.08, 0.03),
            rng.normal(0.06, 0.03),
            0.02,
            rng,
        )

    prior = fit_prior([draw() for _ in range(9)])
    errors = []
    for _ in range(200):
        curve = draw()
        found = extrapolate(curve[:4], BUDGET, prior)
        errors.append((found.value - curve[-1].alpha) / found.std)
    inside = np.mean(np.abs(errors) <= 2)
    assert 0.88 <= inside <= 1.0 and 0.5 < np.std(errors) < 1.3


def test_curves_of_another_kind_are_predicted_from_a_quarter_within_the_band():
    curves = [saturating(end, rate) for end in (0.6, 0.7, 0.8, 0.9) for rate in (0.3, 0.45)]
    for index, curve in enumerate(curves):
        prior = fit_prior(curves[:index] + curves[index + 1 :])
        found = extrapolate(curve[:4], BUDGET, prior)
        assert abs(found.value - curve[-1].alpha) < 2 * found.std + 0.01
        assert abs(found.value - curve[-1].alpha) < 0.05


def test_order_of_points_does_not_matter_and_extremes_stay_inside():
    curve = made_up(0.2, 0.4, -0.05, 0.05)
    first, second = extrapolate(curve[:4], BUDGET), extrapolate(curve[3::-1], BUDGET)
    assert first.value == pytest.approx(second.value) and first.std == pytest.approx(second.std)
    for alpha in (0.0, 1.0):
        found = extrapolate([AlphaPoint(20_000, alpha)], BUDGET)
        assert 0.0 < found.value < 1.0 and math.isfinite(logit(found.value))


def test_bad_input_is_said_in_words():
    with pytest.raises(ArchsearchError, match="at least one point"):
        extrapolate([], BUDGET)
    with pytest.raises(ArchsearchError, match="got 0 tokens"):
        extrapolate([AlphaPoint(1000, 0.3)], 0)


def test_points_of_a_training_and_where_to_look():
    from archsearch.training.distill import CurvePoint

    curve = [
        CurvePoint(0, 0, 0.0, 0.0, "start"),
        CurvePoint(1, 100, 0.1, 0.2, "average"),
        CurvePoint(2, 200, 0.2, 0.3, "average"),
        CurvePoint(3, 300, 0.3, 0.25, "annealed"),  # on its way
        CurvePoint(4, 400, 0.4, 0.4, "annealed"),
    ]
    assert alpha_points(curve) == [
        AlphaPoint(100, 0.2),
        AlphaPoint(200, 0.3),
        AlphaPoint(400, 0.4, True),
    ]
    assert (
        alpha_points(curve[:3]) == [AlphaPoint(100, 0.2), AlphaPoint(200, 0.3)]
        and alpha_points([]) == []
    )
    looks = marks(256_000)
    assert looks[0] == 16_000 and looks[-1] < 256_000 * 0.8 and len(looks) == 6
    assert all(
        later == pytest.approx(1.6 * earlier, rel=1e-4)
        for earlier, later in zip(looks, looks[1:], strict=False)
    )


def test_late_starters_that_end_near_the_others_are_learnt():
    """The lower the level, the steeper the slope: a shape seen early is predicted far better with
    that than without."""
    rng = np.random.default_rng(3)

    def draw():
        level = rng.normal(0.3, 0.4)
        return made_up(level, 0.5 - 0.4 * (level - 0.3), -0.1, 0.05, 0.02, rng)

    prior = fit_prior([draw() for _ in range(12)])
    assert prior.covariance[0][1] < 0
    diagonal = CurvePrior(
        prior.mean, tuple(map(tuple, np.diag(np.diag(prior.covariance)).tolist())), prior.noise_std
    )
    errors = []
    for _ in range(60):
        curve = draw()
        errors.append(
            [
                abs(extrapolate(curve[:2], BUDGET, each).value - curve[-1].alpha)
                for each in (prior, diagonal)
            ]
        )
    with_it, without = np.mean(errors, axis=0)
    assert with_it < 0.8 * without
