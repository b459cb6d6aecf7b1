"""Learning curves and where they lead; where the next minute is better spent."""

from __future__ import annotations

import math

import numpy as np
import pytest

from archsearch.errors import ArchsearchError
from archsearch.speedup import logit, sigmoid
from archsearch.training.curves import (
    LEARNT_EPOCHS,
    MEASURED,
    REPEATS,
    AlphaPoint,
    CurvePrior,
    Supply,
    best_split,
    effective_tokens,
    extrapolate,
    fit_prior,
    text_after,
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


def test_tokens_that_come_again_are_worth_less_and_less():
    assert effective_tokens(5_000, 10_000) == effective_tokens(5_000, 0) == 5_000
    values = [effective_tokens(epochs * 10_000, 10_000) for epochs in range(1, 80)]
    steps = [b - a for a, b in zip(values, values[1:], strict=False)]
    assert (
        values[0] == 10_000
        and all(b <= a for a, b in zip(steps, steps[1:], strict=False))
        and steps[0] < 10_000
    )
    assert values[-1] == pytest.approx((1 + REPEATS) * 10_000, rel=1e-5)
    # arXiv 2305.16264, equation 5, with R of 15: four epochs are nearly as good as new data.
    assert effective_tokens(40_000, 10_000, 15.0) == pytest.approx(
        10_000 * (1 + 15 * (1 - math.exp(-3 / 15)))
    )


def test_a_small_text_promises_less_than_a_large_one():
    points = [AlphaPoint(8_000, 0.3, False, 20_000), AlphaPoint(16_000, 0.38, False, 20_000)]
    small, large, endless = (
        extrapolate(points, 2_000_000, epoch_tokens=n).value for n in (20_000, 200_000, 0)
    )
    assert 0.38 < small < large < endless
    assert extrapolate(points, 4_000_000, epoch_tokens=20_000).value == pytest.approx(
        small, abs=0.002
    ), "epochs bring no more"
    assert MEASURED.curves


def test_sources_of_text_are_used_in_their_order():
    sources = [Supply("answers", 1000, 10), Supply("more", 500, 5, worth=0.5)]
    assert text_after(50, sources) == 500 and text_after(100, sources) == 1000
    assert (
        text_after(150, sources) == pytest.approx(1000 + 50 * 5 * 0.5)
        and text_after(1e9, sources) == 1250
    )
    assert text_after(10, [Supply("none", 0, 10), Supply("stuck", 10, 0)]) == 0


@pytest.mark.parametrize(("write", "train"), [(50, 4000), (400, 4000), (4000, 4000), (400, 500)])
def test_the_best_split_is_the_best_of_all(write, train):
    supplies = [Supply("answers", 60_000, write)]
    best, alone = best_split(2000, supplies, train)
    others = [
        effective_tokens((1 - share) * 2000 * train, text_after(share * 2000, supplies))
        for share in (0.1, 0.25, 0.4, 0.55, 0.7, 0.85)
    ]
    assert best.effective >= max(*others, alone.effective) and alone.text_s == 0
    assert 0 < best.text_s < 2000


def test_where_there_is_text_enough_nothing_is_written():
    assert best_split(100, [Supply("answers", 1e6, 400)], 1000, epoch_tokens=1e6)[0].text_s == 0
    nothing, _ = best_split(100, [], 1000)
    assert nothing.effective == 0 and nothing.text_s == 0


def test_more_text_promises_more_acceptance_and_as_much_what_was_seen():
    points = [
        AlphaPoint(t, a, False, 40_000)
        for t, a in ((48_000, 0.265), (88_000, 0.29), (160_000, 0.309), (293_000, 0.337))
    ]
    same, more = (
        extrapolate(points, round(LEARNT_EPOCHS * text), annealed=False, epoch_tokens=text)
        for text in (40_000, 400_000)
    )
    assert 0.30 < same.value < 0.36 and more.value > same.value + 0.03
    assert more.std > same.std > 0
