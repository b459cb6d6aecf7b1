"""Non-negative fits and the Gaussian process, against known laws and brute force."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from archsearch.latency.regression import Residual, nonnegative_fit

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
    """One constant for 1 and 100: the relative squares (c/1 - 1)^2 + (c/100 - 1)^2 are least at c = 1.01 / 1.0001."""
    assert nonnegative_fit(np.ones((2, 1)), np.array([1.0, 100.0])) == pytest.approx([1.01 / 1.0001])


def test_a_feature_of_zeros_gets_nothing() -> None:
    features = np.array([[1.0, 0.0], [2.0, 0.0]])
    assert nonnegative_fit(features, np.array([2.0, 4.0])) == pytest.approx([2.0, 0.0])


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    inputs = RNG.uniform(-2.0, 2.0, (40, 2))
    return inputs, 0.2 * np.sin(2 * inputs[:, 0]) + 0.01 * RNG.standard_normal(40)


def test_prediction_is_scikit_learns(data: tuple[np.ndarray, np.ndarray]) -> None:
    """The plain numpy prediction equals a GaussianProcessRegressor held at the same hyper-parameters."""
    inputs, values = data
    residual = Residual.fit(inputs, values)
    kernel = ConstantKernel(residual.amplitude) * RBF(residual.scales) + WhiteKernel(residual.noise)
    reference = GaussianProcessRegressor(kernel, optimizer=None).fit(inputs, values)
    for point in RNG.uniform(-3.0, 3.0, (10, 2)):
        mean, std = residual.predict(point)
        expected_mean, expected_std = reference.predict(point[None], return_std=True)
        assert mean == pytest.approx(expected_mean[0], abs=1e-7) and std == pytest.approx(expected_std[0], rel=1e-5)


def test_leave_one_out_is_a_refit_without_the_row(data: tuple[np.ndarray, np.ndarray]) -> None:
    inputs, values = data
    residual = Residual.fit(inputs, values)
    kernel = ConstantKernel(residual.amplitude) * RBF(residual.scales) + WhiteKernel(residual.noise)
    quick = residual.leave_one_out(values)
    for row in range(0, 40, 5):
        keep = np.arange(40) != row
        refit = GaussianProcessRegressor(kernel, optimizer=None).fit(inputs[keep], values[keep])
        assert quick[row] == pytest.approx(values[row] - refit.predict(inputs[row : row + 1])[0], abs=1e-7)


def test_far_away_the_correction_fades_and_the_std_grows(data: tuple[np.ndarray, np.ndarray]) -> None:
    inputs, values = data
    residual = Residual.fit(inputs, values, bounds=(0.2, 2.0))
    near, near_std = residual.predict(inputs[0])
    far, far_std = residual.predict(np.array([1000.0, 1000.0]))
    assert abs(near - values[0]) < 0.05
    assert far == pytest.approx(0.0, abs=1e-9) and far_std == pytest.approx((residual.amplitude + residual.noise) ** 0.5)
    assert far_std > 2 * near_std
