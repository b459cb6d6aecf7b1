"""Log-space regression for latencies: a physical base (constant + slope x work) times a Gaussian
process for what it misses.

`Residual` for tens to hundreds of smooth rows (CPU ops, whole passes), `Kriging` for up to
thousands of rough ones (GPU kernels).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from archsearch.estimate import Array, Numbers


def nonnegative_fit(features: Array, times_s: Array) -> Array:
    """Coefficients >= 0 that minimise the *relative* squared error of `features @ c` against
    `times_s`."""
    return _nnls(features / times_s[:, None], np.ones(len(times_s)))[0]


def _nnls(design: Array, values: Array) -> tuple[Array, float]:
    """Coefficients >= 0 by least squares of scaled columns, and the norm of what is left."""
    from scipy.optimize import nnls

    norms = np.linalg.norm(design, axis=0)
    norms[norms == 0] = 1.0
    scaled, rest = nnls(design / norms, values)
    return np.asarray(scaled / norms), float(rest)


@dataclass(frozen=True)
class DifferenceFit:
    """A law `features @ coefficients` of differences of timings; `misfit_s`: std of what it misses
    beyond the noise of rows."""

    coefficients: Array  # [columns], seconds, >= 0
    # [columns, columns], of the fit before the coefficients were held at zero or above
    covariance: Array
    misfit_s: float

    def value_s(self, *point: float) -> float:
        """The law at one row of features."""
        return float(np.dot(self.coefficients, point))

    def std_s(self, *point: float) -> float:
        """How far a new measurement at that row may lie from it: what the rows leave open about the
        law, and the misfit."""
        at = np.asarray(point)
        return float(np.sqrt(max(0.0, at @ self.covariance @ at) + self.misfit_s**2))


def fit_differences(features: Array, values_s: Array, stds_s: Array) -> DifferenceFit:
    """Least squares of `values_s` [rows] on `features` [rows, columns], weighted by 1 / (std^2 +
    misfit^2).

    Differences of timings have absolute errors: relative ones would let the smallest row, which is
    mostly noise, decide. `stds_s` [rows]: standard error of each, NaN where it is not known; such
    rows take the median of the known ones. `misfit` is what makes chi-squared equal to the degrees
    of freedom (DerSimonian and Laird 1986): without it a row of many repeats would outweigh all.
    The law is held at zero or above; its covariance is of the fit without that hold.
    """
    rows = len(features)
    known = stds_s[np.isfinite(stds_s) & (stds_s > 0)]
    # Nobody's noise is known: all of the scatter is misfit, and rows weigh alike.
    floor = max(1e-3 * float(np.median(np.abs(values_s))), 1e-9)
    usual = np.median(known) if len(known) else floor
    stds = np.maximum(np.where(np.isfinite(stds_s) & (stds_s > 0), stds_s, usual), floor)
    free = max(0, rows - int(np.linalg.matrix_rank(features)))

    def weighted(misfit: float) -> tuple[Array, float]:
        """Coefficients >= 0 and chi-squared."""
        scale = np.sqrt(stds**2 + misfit**2)  # [rows]
        coefficients, rest = _nnls(features / scale[:, None], values_s / scale)
        return coefficients, rest**2

    misfit = 0.0
    if free and weighted(0.0)[1] > free:
        low, high = 0.0, 10.0 * float(np.max(np.abs(values_s)))
        for _ in range(60):  # chi-squared falls as the misfit grows
            misfit = 0.5 * (low + high)
            low, high = (misfit, high) if weighted(misfit)[1] > free else (low, misfit)
    design = features / np.sqrt(stds**2 + misfit**2)[:, None]
    return DifferenceFit(weighted(misfit)[0], np.asarray(np.linalg.pinv(design.T @ design)), misfit)


@dataclass(frozen=True)
class Residual:
    """Gaussian process over log(measured / base); hyper-parameters by scikit-learn, prediction in
    plain numpy (microseconds).

    Zero mean: far from any measurement the correction fades to none and the std grows to
    `amplitude`.
    """

    inputs: Array  # [rows, features], scaled by the length scales
    scales: Array
    amplitude: float
    noise: float
    weights: Array  # K^-1 y
    inverse: Array  # K^-1

    @classmethod
    def fit(
        cls,
        inputs: Array,
        log_ratio: Array,
        *,
        min_noise: float = 0.01,
        bounds: tuple[float, float] = (0.2, 20.0),
    ) -> Residual:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

        width = inputs.shape[1]
        shape = ConstantKernel(0.04, (1e-4, 1.0)) * RBF(np.ones(width), [bounds] * width)
        kernel = shape + WhiteKernel(0.002, (min_noise**2, 0.2))
        with warnings.catch_warnings():
            # a length scale at its bound means: this input does not matter
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = GaussianProcessRegressor(kernel, random_state=0).fit(inputs, log_ratio)
        amplitude = float(model.kernel_.k1.k1.constant_value)
        scales = np.asarray(model.kernel_.k1.k2.length_scale, dtype=float)
        noise = float(model.kernel_.k2.noise_level)
        scaled = inputs / scales
        squares = ((scaled[:, None, :] - scaled) ** 2).sum(-1)
        covariance = amplitude * np.exp(-0.5 * squares) + noise * np.eye(len(inputs))
        inverse = np.linalg.inv(covariance)
        return cls(scaled, scales, amplitude, noise, inverse @ log_ratio, inverse)

    def predict(self, point: Array) -> tuple[float, float]:
        """Mean and standard deviation (noise included) of log(measured / base) at one point."""
        difference = self.inputs - point / self.scales
        covariance = self.amplitude * np.exp(-0.5 * np.einsum("ij,ij->i", difference, difference))
        mean = float(covariance @ self.weights)
        variance = self.amplitude - float(covariance @ self.inverse @ covariance)
        return mean, float(np.sqrt(max(variance, 0.0) + self.noise))

    def means(self, first: Sequence[Numbers], last: Array) -> Array:
        """Means at points of which the first inputs, `first`, are arrays that broadcast, and the
        others are each of `last` [places, inputs]: [..., places].

        The exponential of each input is taken once for each of its own values.
        """

        def near(column: int, values: Numbers) -> Array:
            at = np.asarray(values, dtype=float)[..., None] / self.scales[column]
            return np.asarray(np.exp(-0.5 * (self.inputs[:, column] - at) ** 2))

        alike: dict[tuple[int, ...], Array] = {}  # by shape: the fewest numbers are multiplied
        for column, values in enumerate(first):
            alike[np.shape(values)] = alike.get(np.shape(values), 1.0) * near(column, values)
        kernel = math.prod(sorted(alike.values(), key=np.size))
        places = self.amplitude * self.weights * np.ones((len(last), 1))
        for column, values in enumerate(last.T, start=len(first)):
            places = places * near(column, values)
        return np.asarray(kernel @ places.T)

    def leave_one_out(self) -> Array:
        """Errors of log(measured / predicted) when each row is left out (Rasmussen and Williams,
        eq. 5.12)."""
        return np.asarray(self.weights / np.diag(self.inverse))


@dataclass(frozen=True)
class Kriging:
    """Local Gaussian process over log(measured / base) for tables of hundreds to thousands of rows
    with rough jumps.

    GPU libraries choose among kernels, so utilisation jumps from shape to shape: the correlation is
    exponential (Matern 1/2: continuous, nowhere smooth) with a length per input. Every prediction
    solves the ordinary Gaussian process equations (Rasmussen and Williams 2006, eq. 2.25 and 2.26)
    over its NEIGHBOURS nearest rows only, which is as good as all rows for such a correlation and
    takes 0.1 ms. Timings are heavy-tailed (the same kernel lands in one of two states 10 % apart),
    so rows far from what their neighbours say count less (Student-t weights) where that makes
    leave-one-out errors smaller. The std is scaled until 95 % of the leave-one-out errors lie
    within two of it.

    Far from every row the mean fades to 0 and the std grows to sqrt(amplitude + noise), times
    `calibration`.
    """

    inputs: Array  # [rows, features], divided by `lengths`
    values: Array  # [rows]
    row_noise: Array  # [rows], variances
    lengths: Array
    amplitude: float
    noise: float
    calibration: float

    NEIGHBOURS = 32
    # hyper-parameters are learnt from that many rows; more change them little and cost the cube
    FIT_ROWS = 256
    CHECK_ROWS = 800  # leave-one-out errors of that many rows calibrate the std
    ROUNDS = 2
    STUDENT = 3.0  # degrees of freedom
    # rows count alike only where that is clearly better: leave-one-out errors of few rows are noisy
    # themselves
    CLEARLY = 0.95
    BLOCK = 256

    @classmethod
    def fit(cls, inputs: Array, log_ratio: Array, *, like: Kriging | None = None) -> Kriging:
        """Learn from `inputs` [rows, features] and `log_ratio` [rows]. `like`: its hyper-parameters
        are kept (quick)."""
        order = np.random.default_rng(0).permutation(len(log_ratio))
        if like is not None:
            learnt = [(like.amplitude, like.lengths, like.noise)]
        else:
            some = order[: cls.FIT_ROWS]
            learnt = _exponential_hyperparameters(
                inputs[some], log_ratio[some], cls.ROUNDS, cls.STUDENT
            )
        check = order[: cls.CHECK_ROWS]
        found: list[tuple[float, Kriging]] = []
        for robust, (amplitude, lengths, noise) in ((False, learnt[0]), (True, learnt[-1])):
            even = np.full(len(log_ratio), noise)
            model = cls(inputs / lengths, log_ratio, even, lengths, amplitude, noise, 1.0)
            if robust:
                misfit = log_ratio - model.leave_one_out()[0]
                model = replace(model, row_noise=noise * _student_weights(misfit, cls.STUDENT))
            mean, std = model.leave_one_out(check)
            misfit = np.abs(log_ratio[check] - mean)
            calibration = max(0.5, float(np.quantile(misfit / std, 0.95)) / 2.0)
            found.append((float(np.median(misfit)), replace(model, calibration=calibration)))
        (plain_error, plain), (robust_error, weighted) = found
        return plain if plain_error < cls.CLEARLY * robust_error else weighted

    def predict(self, points: Array) -> tuple[Array, Array]:
        """Mean and std (noise included) of log(measured / base) at `points` [count, features]."""
        return self._predict(points / self.lengths, None)

    def leave_one_out(self, rows: NDArray[np.int_] | None = None) -> tuple[Array, Array]:
        """What the other rows say about each of `rows` (all by default): mean and std."""
        chosen = np.arange(len(self.values)) if rows is None else rows
        return self._predict(self.inputs[chosen], chosen)

    def _predict(self, scaled: Array, without: NDArray[np.int_] | None) -> tuple[Array, Array]:
        count = min(self.NEIGHBOURS, len(self.values) - (without is not None))
        means, variances = np.empty(len(scaled)), np.empty(len(scaled))
        squares = np.einsum("ij,ij->i", self.inputs, self.inputs)
        for start in range(0, len(scaled), self.BLOCK):
            block = scaled[start : start + self.BLOCK]
            distance = (
                np.einsum("ij,ij->i", block, block)[:, None] + squares - 2.0 * block @ self.inputs.T
            )
            if without is not None:
                distance[np.arange(len(block)), without[start : start + self.BLOCK]] = np.inf
            near = np.argpartition(distance, count - 1, axis=1)[:, :count]
            rows = self.inputs[near]  # [block, count, features]
            covariance = self.amplitude * np.exp(-_distance(rows[:, :, None], rows[:, None]))
            covariance[:, np.arange(count), np.arange(count)] += self.row_noise[near]
            cross = self.amplitude * np.exp(-_distance(block[:, None], rows))
            solved = np.linalg.solve(covariance, np.stack([cross, self.values[near]], axis=-1))
            means[start : start + self.BLOCK] = np.einsum("ij,ij->i", cross, solved[..., 1])
            variances[start : start + self.BLOCK] = self.amplitude - np.einsum(
                "ij,ij->i", cross, solved[..., 0]
            )
        return means, self.calibration * np.sqrt(np.maximum(variances, 0.0) + self.noise)


def _distance(a: Array, b: Array) -> Array:
    difference = a - b
    return np.asarray(np.sqrt(np.einsum("...i,...i->...", difference, difference)))


def _student_weights(errors: Array, degrees: float) -> Array:
    """How much wider than usual the noise of each row is, were it Student-t distributed: (nu + z^2)
    / (nu + 1)."""
    scale = 1.4826 * float(np.median(np.abs(errors))) or 1.0
    return np.asarray((degrees + (errors / scale) ** 2) / (degrees + 1.0))


def _exponential_hyperparameters(
    inputs: Array, values: Array, rounds: int, degrees: float
) -> list[tuple[float, Array, float]]:
    """Amplitude, lengths and noise of greatest posterior for an exponential correlation (Rasmussen
    and Williams, eq. 5.9).

    A wide log-normal prior (a factor e^2) around amplitude 0.02, lengths 3 and noise 0.002 keeps
    few rows from running away. After each of `rounds`, rows with large leave-one-out errors get
    wider noise.
    """
    from scipy.linalg.lapack import dpotrf, dpotri
    from scipy.optimize import minimize

    size, width = inputs.shape
    squares = [(inputs[:, [column]] - inputs[:, column]) ** 2 for column in range(width)]
    prior = np.concatenate([[np.log(0.02)], np.full(width, np.log(3.0)), [np.log(0.002)]])
    weights = np.ones(size)

    def covariance(theta: Array) -> tuple[Array, Array, Array, float]:
        """Distances, correlated part, inverse of the covariance, log of its determinant."""
        distance = np.full((size, size), 1e-12)
        for scale, square in zip(theta[1:-1], squares, strict=True):
            distance += np.exp(-2.0 * scale) * square
        np.sqrt(distance, out=distance)
        correlated = np.exp(theta[0] - distance)
        factor, failed = dpotrf(correlated + np.diag(np.exp(theta[-1]) * weights), lower=True)
        if failed:  # the noise is at least 1e-5, so this is a bug and not a matter of the rows
            raise FloatingPointError(
                f"covariance of {size} rows is not positive definite at {theta}"
            )
        inverse = np.tril(dpotri(factor, lower=True)[0])
        log_determinant = 2.0 * float(np.log(np.diag(factor)).sum())
        return distance, correlated, inverse + np.tril(inverse, -1).T, log_determinant

    def cost(theta: Array) -> tuple[float, Array]:
        distance, correlated, inverse, log_determinant = covariance(theta)
        solved = inverse @ values
        value = 0.5 * values @ solved + 0.5 * log_determinant + np.sum((theta - prior) ** 2) / 8.0
        sensitivity = inverse - np.outer(solved, solved)
        slope = sensitivity * correlated
        shared = slope / distance
        gradient = [0.5 * slope.sum()]
        gradient += [
            0.5 * np.exp(-2.0 * s) * (shared * square).sum()
            for s, square in zip(theta[1:-1], squares, strict=True)
        ]
        gradient += [0.5 * np.exp(theta[-1]) * (np.diag(sensitivity) * weights).sum()]
        return float(value), np.array(gradient) + (theta - prior) / 4.0

    bounds = [(-9.0, 2.0)] + [(-3.0, 5.0)] * width + [(np.log(1e-5), 0.0)]
    theta, learnt = prior, []
    for _ in range(rounds + 1):
        theta = minimize(
            cost, theta, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 40}
        ).x
        learnt.append((float(np.exp(theta[0])), np.exp(theta[1:-1]), float(np.exp(theta[-1]))))
        inverse = covariance(theta)[2]
        weights = _student_weights(inverse @ values / np.diag(inverse), degrees)
    return learnt
