"""A number that knows how sure it is and where it came from."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeGuard, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[np.float64]"
Numbers: TypeAlias = "float | NDArray[np.float64]"
"""A number, or an array in its place: of many drafts, of many rates."""
N = TypeVar("N", float, Array, Numbers)
"""A number in, a number out; an array in, an array out."""
QUANTILE_95: Final = 1.6448536269514722
"""Of the standard normal distribution; its negative is the 5 % one."""
SOURCES: Final = ("measured", "modelled", "roofline", "prior", "published", "given")


class Many(NamedTuple):
    """Arrays in the place of an `Estimate`: of many drafts, of many gammas."""

    value: Numbers
    std: Numbers = 0.0
    source: str = "modelled"


@dataclass(frozen=True, slots=True)
class Estimate:
    """`value` with its standard deviation `std` (same unit) and its `source`, one of SOURCES.
    `low`, `high`: its 5 and 95 % quantiles where the shape of the doubt matters, else None."""

    value: float
    std: float
    source: str
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source must be one of {SOURCES}, not {self.source!r}")
        if not (math.isfinite(self.value) and self.std >= 0):
            raise ValueError(
                f"an estimate needs a finite value and std >= 0, got {self.value} ± {self.std}"
            )

    @property
    def relative_std(self) -> float:
        """std / |value|; infinite for a value of 0."""
        return self.std / abs(self.value) if self.value else math.inf

    @property
    def interval(self) -> tuple[float, float]:
        """5 and 95 % of what is never negative: its own quantiles, else a normal distribution's."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        spread = QUANTILE_95 * self.std
        return max(0.0, self.value - spread), self.value + spread

    @property
    def bounds(self) -> tuple[float, float]:
        """(low, high) for a figure: one standard deviation where a quantile is not known."""
        low = self.value - self.std if self.low is None else self.low
        return low, self.value + self.std if self.high is None else self.high

    def to_dict(self) -> dict[str, object]:
        """{"value", "std", "source"}, with "low" and "high" (5 and 95 %) where they are known."""
        shape = (
            {} if self.low is None or self.high is None else {"low": self.low, "high": self.high}
        )
        return {"value": self.value, "std": self.std, "source": self.source, **shape}

    def words(self, unit: str = "") -> str:
        """`1.52x ± 0.20`."""
        return f"{self.value:.2f}{unit} ± {self.std:.2f}"

    def plus(self, more: Estimate) -> Estimate:
        """With what comes on top of it; their errors are independent."""
        return Estimate(self.value + more.value, math.hypot(self.std, more.std), self.source)

    def times(self, factor: float) -> Estimate:
        """So many times it, without quantiles; all of its error is shared."""
        return Estimate(factor * self.value, factor * self.std, self.source)

    def between(self, bounds: tuple[float, float]) -> Estimate:
        """The same with its 5 and 95 % quantiles; what is sure (std 0) has none."""
        return Estimate(self.value, self.std, self.source, *bounds) if self.std else self

    @classmethod
    def from_dict(cls, data: dict[str, object]) -> Estimate:
        """Read back `to_dict`. Raises KeyError, TypeError or ValueError for what is none."""
        low, high = (
            None if data.get(name) is None else number(data[name]) for name in ("low", "high")
        )
        return cls(number(data["value"]), number(data["std"]), str(data["source"]), low, high)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is what JSON or YAML calls a number, and finite: no "12" and no true."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def number(value: object) -> float:
    """A finite float; ValueError for anything else."""
    if not is_number(value):
        raise ValueError(f"{str(value)[:40]!r} where a finite number belongs")
    return float(value)


def weakest_source(*sources: str) -> str:
    """The least trustworthy of several sources: what a result built from all of them may call
    itself.

    Two measured parts make a modelled whole only where the caller says so; this keeps the worst
    tag.

    >>> weakest_source("measured", "prior", "modelled")
    'prior'
    """
    order = ("measured", "given", "published", "modelled", "prior", "roofline")
    return max(sources, key=order.index)
