"""Non-negative fits and the Gaussian process, against known laws and brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel

from archsearch.latency.regression import (
    Kriging,
    Residual,
    _exponential_hyperparameters,
    nonnegative_fit,
)

RNG = np.random.default_rng(0)


def test_nonnegative_fit_recovers_the_law() -> None:
    size = np.geomspace(1e4, 1e9, 30)
    features = np.stack([np.ones_like(size), size], axis=1)
    assert nonnegative_fit(features, 2e-6 + 1e-10 * size) == pytest.approx([2e-6, 1e-10], rel=1e-6)


def test_nonnegative_fit_never_pays_back() -> None:
    """Times that fall with the second feature: its coefficient is 0, not negative."""
    work = np.linspace(1.0, 2.0, 20)
    features = np.stack([np.ones_like(work), work], axis=1)
    constant, slope = nonnegative_fit(features, 3.0 - work)
    assert slope == 0.0 and constant > 0


def test_nonnegative_fit_weighs_relative_errors() -> None:
    """One constant for 1 and 100: the relative squares (c/1 - 1)^2 + (c/100 - 1)^2 are least at c =
    1.01 / 1.0001."""
    assert nonnegative_fit(np.ones((2, 1)), np.array([1.0, 100.0])) == pytest.approx(
        [1.01 / 1.0001]
    )


def test_a_feature_of_zeros_gets_nothing() -> None:
    features = np.array([[1.0, 0.0], [2.0, 0.0]])
    assert nonnegative_fit(features, np.array([2.0, 4.0])) == pytest.approx([2.0, 0.0])


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    inputs = RNG.uniform(-2.0, 2.0, (40, 2))
    return inputs, 0.2 * np.sin(2 * inputs[:, 0]) + 0.01 * RNG.standard_normal(40)


def test_prediction_is_scikit_learns(data: tuple[np.ndarray, np.ndarray]) -> None:
    """The plain numpy prediction equals a GaussianProcessRegressor held at the same
    hyper-parameters."""
    inputs, values = data
    residual = Residual.fit(inputs, values)
    kernel = ConstantKernel(residual.amplitude) * RBF(residual.scales) + WhiteKernel(residual.noise)
    reference = GaussianProcessRegressor(kernel, optimizer=None).fit(inputs, values)
    for point in RNG.uniform(-3.0, 3.0, (10, 2)):
        mean, std = residual.predict(point)
        expected_mean, expected_std = reference.predict(point[None], return_std=True)
        assert mean == pytest.approx(expected_mean[0], abs=1e-7) and std == pytest.approx(
            expected_std[0], rel=1e-5
        )


def test_leave_one_out_is_a_refit_without_the_row(data: tuple[np.ndarray, np.ndarray]) -> None:
    inputs, values = data
    residual = Residual.fit(inputs, values)
    kernel = ConstantKernel(residual.amplitude) * RBF(residual.scales) + WhiteKernel(residual.noise)
    quick = residual.leave_one_out()
    for row in range(0, 40, 5):
        keep = np.arange(40) != row
        refit = GaussianProcessRegressor(kernel, optimizer=None).fit(inputs[keep], values[keep])
        assert quick[row] == pytest.approx(
            values[row] - refit.predict(inputs[row : row + 1])[0], abs=1e-7
        )


def test_far_away_the_correction_fades_and_the_std_grows(
    data: tuple[np.ndarray, np.ndarray],
) -> None:
    inputs, values = data
    residual = Residual.fit(inputs, values, bounds=(0.2, 2.0))
    near, near_std = residual.predict(inputs[0])
    far, far_std = residual.predict(np.array([1000.0, 1000.0]))
    assert abs(near - values[0]) < 0.05
    assert far == pytest.approx(0.0, abs=1e-9) and far_std == pytest.approx(
        (residual.amplitude + residual.noise) ** 0.5
    )
    assert far_std > 2 * near_std


@pytest.fixture(scope="module")
def rough() -> tuple[np.ndarray, np.ndarray]:
    """A staircase, as kernels make it, with 2 % noise and some rows far off."""
    inputs = np.random.default_rng(1).uniform(0.0, 6.0, (400, 2))
    values = 0.1 * np.floor(inputs[:, 0]) + 0.02 * np.random.default_rng(2).standard_normal(400)
    values[::20] += 0.4
    return inputs, values


def test_kriging_over_all_rows_is_the_gaussian_process(
    rough: tuple[np.ndarray, np.ndarray],
) -> None:
    """With every row a neighbour it equals scikit-learn's process with an exponential (Matern 1/2)
    correlation."""
    inputs, values = rough[0][:30], rough[1][:30]
    krige = Kriging.fit(inputs, values)
    model = replace(krige, row_noise=np.full(30, krige.noise), calibration=1.0)
    kernel = ConstantKernel(model.amplitude) * Matern(model.lengths, nu=0.5)
    reference = GaussianProcessRegressor(kernel, alpha=model.noise, optimizer=None).fit(
        inputs, values
    )
    points = np.random.default_rng(3).uniform(-1.0, 7.0, (10, 2))
    mean, std = model.predict(points)
    expected_mean, expected_std = reference.predict(points, return_std=True)
    assert mean == pytest.approx(expected_mean, abs=1e-8)
    assert std == pytest.approx(np.sqrt(expected_std**2 + model.noise), rel=1e-5)


def test_kriging_leave_one_out_is_a_fit_without_the_row(
    rough: tuple[np.ndarray, np.ndarray],
) -> None:
    model = Kriging.fit(*rough)
    for row in (0, 7, 399):
        keep = np.arange(400) != row
        without = replace(
            model,
            inputs=model.inputs[keep],
            values=model.values[keep],
            row_noise=model.row_noise[keep],
        )
        mean, std = model.leave_one_out(np.array([row]))
        expected_mean, expected_std = without.predict(rough[0][row : row + 1])
        assert mean == pytest.approx(expected_mean, abs=1e-10) and std == pytest.approx(
            expected_std, rel=1e-8
        )


def test_kriging_follows_jumps_past_outliers_with_an_honest_std(
    rough: tuple[np.ndarray, np.ndarray],
) -> None:
    model = Kriging.fit(*rough)
    points = np.random.default_rng(4).uniform(0.2, 5.8, (300, 2))
    errors = np.abs(model.predict(points)[0] - 0.1 * np.floor(points[:, 0]))
    assert np.median(errors) < 0.02
    left_out = np.abs(rough[1] - model.leave_one_out()[0]) / model.leave_one_out()[1]
    assert 0.93 <= np.mean(left_out <= 2.0) <= 0.97


def test_hyperparameters_are_where_the_posterior_is_greatest(
    rough: tuple[np.ndarray, np.ndarray],
) -> None:
    """The gradient that the search follows is right: scikit-learn finds no better likelihood nearby
    (the prior is wide)."""
    inputs, values = rough[0][1:20], rough[1][1:20]
    (amplitude, lengths, noise), *_ = _exponential_hyperparameters(inputs, values, 0, 3.0)

    def cost(theta: np.ndarray) -> float:
        distance = np.sqrt((((inputs[:, None] - inputs[None]) / np.exp(theta[1:3])) ** 2).sum(-1))
        covariance = np.exp(theta[0] - distance) + np.exp(theta[3]) * np.eye(len(inputs))
        prior = np.log([0.02, 3.0, 3.0, 0.002])
        fit = (
            0.5 * values @ np.linalg.solve(covariance, values)
            + 0.5 * np.linalg.slogdet(covariance)[1]
        )
        return float(fit + ((theta - prior) ** 2).sum() / 8.0)

    found = np.log([amplitude, *lengths, noise])
    for step in np.vstack([np.eye(4), -np.eye(4)]) * 0.05:
        assert cost(found) < cost(found + step)


def test_like_keeps_the_hyperparameters_and_takes_the_rows(
    rough: tuple[np.ndarray, np.ndarray],
) -> None:
    inputs, values = rough
    few = Kriging.fit(inputs[:200], values[:200])
    more = Kriging.fit(inputs, values, like=few)
    assert (more.amplitude, more.noise) == (few.amplitude, few.noise) and len(more.values) == 400
