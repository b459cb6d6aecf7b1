"""Lengths of prompts and answers as distributions: a few values, each with its share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from archsearch.errors import ArchsearchError
from archsearch.estimate import number

POINTS: Final = 16
LONGEST: Final = 10_000_000


@dataclass(frozen=True)
class Lengths:
    """`values` tokens, each with its share of requests (`weights` add up to 1)."""

    values: tuple[int, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(
        cls, counts: Sequence[float], weights: Sequence[float] | None = None, what: str = "lengths"
    ) -> Lengths:
        """From values with their weights (default: alike). Raises ArchsearchError for negative
        lengths, or weights of nothing."""
        shares = [1.0] * len(counts) if weights is None else [number(weight) for weight in weights]
        if not counts or len(shares) != len(counts):
            raise ArchsearchError(
                f"{what}: {len(counts)} values and {len(shares)} weights; there must be as many, at"
                " least one"
            )
        if not all(0 <= value <= LONGEST for value in counts):
            raise ArchsearchError(
                f"{what}: a length must lie between 0 and {LONGEST}, got {min(counts)} to"
                f" {max(counts)}"
            )
        total = math.fsum(shares)
        if min(shares) < 0 or not 0 < total < math.inf:
            raise ArchsearchError(
                f"{what}: weights must be numbers, none negative, not all 0, got {shares}"
            )
        return cls(
            tuple(round(value) for value in counts), tuple(share / total for share in shares)
        )

    @classmethod
    def read(cls, data: Any, what: str) -> Lengths:
        """A number; `{mean, std}` (log-normal); `{low, high}` (even); `{values, weights}`.
        ArchsearchError for anything else."""
        if isinstance(data, int | float) and not isinstance(data, bool):
            return cls.of([data], what=what)
        if isinstance(data, Mapping):
            names = set(data)
            try:
                if names == {"mean", "std"}:
                    return cls._log_normal(number(data["mean"]), number(data["std"]), what)
                if names == {"low", "high"}:
                    low, high = number(data["low"]), number(data["high"])
                    if not low <= high:
                        raise ArchsearchError(f"{what}: low {low:g} lies above high {high:g}")
                    steps = (np.arange(POINTS) + 0.5) / POINTS
                    return cls.of([low + (high - low) * float(step) for step in steps], what=what)
                if names in ({"values"}, {"values", "weights"}):
                    return cls.of(
                        [number(value) for value in data["values"]], data.get("weights"), what
                    )
            except (TypeError, ValueError, OverflowError) as error:
                if isinstance(error, ArchsearchError):
                    raise
                raise ArchsearchError(f"{what}: {data!r} holds what is no number") from None
        raise ArchsearchError(
            f"{what}: {data!r} is neither a number, {{mean, std}}, {{low, high}} nor {{values,"
            " weights}"
        )

    @classmethod
    def _log_normal(cls, mean: float, std: float, what: str) -> Lengths:
        if not 0 < mean < math.inf or not 0 <= std < math.inf:
            raise ArchsearchError(
                f"{what}: mean must be positive and std not negative, got {mean:g} and {std:g}"
            )
        if std == 0:
            return cls.of([mean], what=what)
        spread = math.sqrt(math.log1p((std / mean) ** 2))
        normal = [NormalDist().inv_cdf((step + 0.5) / POINTS) for step in range(POINTS)]
        values = np.exp(spread * np.array(normal))
        return cls.of([float(value) for value in values * mean / values.mean()], what=what)

    @property
    def cv2(self) -> float:
        """Squared coefficient of variation; 0 where all are alike."""
        return max(0.0, self.mean_square / self.mean**2 - 1.0) if self.mean else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As `read` takes it."""
        return {"values": list(self.values), "weights": list(self.weights)}

    @property
    def mean(self) -> float:
        return math.fsum(v * weight for v, weight in zip(self.values, self.weights, strict=True))

    @property
    def mean_square(self) -> float:
        return math.fsum(v**2 * weight for v, weight in zip(self.values, self.weights, strict=True))

    def sample(self, rng: np.random.Generator, count: int) -> list[int]:
        """`count` lengths by chance."""
        return [int(value) for value in rng.choice(self.values, size=count, p=self.weights)]


def mean_context(prompt: Lengths, output: Lengths) -> int:
    """Tokens in the cache of a request that decodes, on the mean over time: long answers are seen
    for longer."""
    written = output.mean
    return round(prompt.mean + (output.mean_square / (2.0 * written) if written else 0.0))
