"""Log-space regression for latencies: a physical base (constant + slope x work) times a Gaussian process for what it misses."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def nonnegative_fit(features: Array, times_s: Array) -> Array:
    """Coefficients >= 0 that minimise the *relative* squared error of `features @ c` against `times_s`."""
    from scipy.optimize import nnls

    scaled = features / times_s[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0] = 1.0
    coefficients, _ = nnls(scaled / norms, np.ones(len(times_s)))
    return np.asarray(coefficients / norms)


@dataclass(frozen=True)
class Residual:
    """Gaussian process over log(measured / base); hyper-parameters by scikit-learn, prediction in plain numpy (microseconds).

    Zero mean: far from any measurement the correction fades to none and the std grows to `amplitude`.
    """

    inputs: Array  # [rows, features], scaled by the length scales
    scales: Array
    amplitude: float
    noise: float
    weights: Array  # K^-1 y
    inverse: Array  # K^-1

    @classmethod
    def fit(
        cls, inputs: Array, log_ratio: Array, *, min_noise: float = 0.01, bounds: tuple[float, float] = (0.2, 20.0)
    ) -> Residual:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

        width = inputs.shape[1]
        kernel = ConstantKernel(0.04, (1e-4, 1.0)) * RBF(np.ones(width), [bounds] * width) + WhiteKernel(
            0.002, (min_noise**2, 0.2)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a length scale at its bound means: this input does not matter
            model = GaussianProcessRegressor(kernel, normalize_y=False, random_state=0).fit(inputs, log_ratio)
        amplitude = float(model.kernel_.k1.k1.constant_value)
        scales = np.asarray(model.kernel_.k1.k2.length_scale, dtype=float)
        noise = float(model.kernel_.k2.noise_level)
        scaled = inputs / scales
        covariance = amplitude * np.exp(-0.5 * _square_distance(scaled, scaled)) + noise * np.eye(len(inputs))
        inverse: Array = np.asarray(np.linalg.inv(covariance), dtype=np.float64)
        return cls(scaled, scales, amplitude, noise, inverse @ log_ratio, inverse)

    def predict(self, point: Array) -> tuple[float, float]:
        """Mean and standard deviation (noise included) of log(measured / base) at one point."""
        difference = self.inputs - point / self.scales
        covariance = self.amplitude * np.exp(-0.5 * np.einsum("ij,ij->i", difference, difference))
        mean = float(covariance @ self.weights)
        variance = self.amplitude - float(covariance @ self.inverse @ covariance)
        return mean, float(np.sqrt(max(variance, 0.0) + self.noise))

    def leave_one_out(self, log_ratio: Array) -> Array:
        """Errors of log(measured / predicted) when each row is left out (Rasmussen and Williams, eq. 5.12)."""
        return np.asarray(self.weights / np.diag(self.inverse))


def _square_distance(a: Array, b: Array) -> Array:
    return np.asarray(((a[:, None, :] - b[None, :, :]) ** 2).sum(-1))
