"""curves.json: what the best candidates would gain at other batch sizes, contexts, alphas and
gammas, and where their time goes.

Worked out when a run is written, so that its report needs no profile. Everything in it is
predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from archsearch import files
from archsearch.estimate import Estimate, number
from archsearch.runs.fields import as_estimate
from archsearch.runs.run import Run

CURVES_FILE: Final = "curves.json"
FORMAT: Final = 1
Swept = Literal["batch", "context", "alpha", "gamma"]
SWEPT: Final[tuple[Swept, ...]] = ("batch", "context", "alpha", "gamma")


@dataclass(frozen=True)
class Point:
    """The speed-up at `x` (sequences, tokens, or a share, by what is swept), with the gamma that
    gives it."""

    x: float
    gamma: int
    speedup: Estimate


@dataclass(frozen=True)
class Curve:
    """The speed-up of the candidate of one rank along one quantity, x ascending; gamma is the best
    at each x."""

    rank: int
    label: str
    points: tuple[Point, ...]

    def crossing(self, edge: bool = False) -> float | None:
        """Where the speed-up passes 1, between two points by a straight line; None where it never
        does. Of several the first. `edge`: where the lower end of its interval does (5 %, or one
        standard deviation where that is all that is known)."""

        def above(gain: Estimate) -> float:
            return (
                gain.value if not edge else gain.value - gain.std if gain.low is None else gain.low
            ) - 1.0

        for left, right in zip(self.points, self.points[1:], strict=False):
            first, second = above(left.speedup), above(right.speedup)
            if first != second and (first > 0.0) != (second > 0.0):
                return left.x + (right.x - left.x) * first / (first - second)
        return None


@dataclass(frozen=True)
class Bar:
    """Where the time of one pass, layer or round goes: seconds by term, and the whole as
    predicted."""

    name: str
    terms: Mapping[str, float]
    total: Estimate


@dataclass(frozen=True)
class Curves:
    """All of one run.

    `state`: what the scores were when this was worked out; `at`: batch size, context and gamma of
    the bars; `sweeps`: by what is swept; `passes`, `layers`, `rounds`: bars, draft beside target;
    `rivals`: what the first rank wins by (`search.why.Rival`); `notes`: what is missing, and why.
    """

    state: str
    at: Mapping[str, int]
    sweeps: Mapping[Swept, tuple[Curve, ...]]
    passes: tuple[Bar, ...] = ()
    layers: tuple[Bar, ...] = ()
    rounds: tuple[Bar, ...] = ()
    rivals: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """curves.json. Times in seconds, estimates as {"value", "std", "source"}."""
        return {
            "format": FORMAT,
            "state": self.state,
            "at": dict(self.at),
            "sweeps": {
                name: [_curve_dict(curve) for curve in curves]
                for name, curves in self.sweeps.items()
            },
            **{
                name: [_bar_dict(bar) for bar in getattr(self, name)]
                for name in ("passes", "layers", "rounds")
            },
            "rivals": [dict(rival) for rival in self.rivals],
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Curves:
        """Raises one of WRONG_SHAPE."""
        if data["format"] != FORMAT:
            raise ValueError(
                f"format {data['format']}, this archsearch reads {FORMAT}; write it again:"
                " archsearch report"
            )
        return cls(
            str(data["state"]),
            {str(name): int(value) for name, value in data["at"].items()},
            {name: _curves(data["sweeps"].get(name, [])) for name in SWEPT},
            _bars(data["passes"]),
            _bars(data["layers"]),
            _bars(data["rounds"]),
            tuple(
                {
                    **rival,
                    "label": str(rival["label"]),
                    "tokens": number(rival["tokens"]),
                    "time": number(rival["time"]),
                }
                for rival in data["rivals"]
            ),
            tuple(map(str, data["notes"])),
        )


def write_curves(run: Run, curves: Curves) -> None:
    """Write curves.json of a run."""
    files.write_json(run.path / CURVES_FILE, curves.to_dict())


def _curve_dict(curve: Curve) -> dict[str, Any]:
    points = [
        {"x": point.x, "gamma": point.gamma, "speedup": point.speedup.to_dict()}
        for point in curve.points
    ]
    return {"rank": curve.rank, "label": curve.label, "points": points}


def _bar_dict(bar: Bar) -> dict[str, Any]:
    return {"name": bar.name, "terms": dict(bar.terms), "total": bar.total.to_dict()}


def _curves(data: Sequence[Any]) -> tuple[Curve, ...]:
    return tuple(
        Curve(
            int(row["rank"]),
            str(row["label"]),
            tuple(
                Point(number(point["x"]), int(point["gamma"]), as_estimate(point["speedup"]))
                for point in row["points"]
            ),
        )
        for row in data
    )


def _bars(data: Sequence[Any]) -> tuple[Bar, ...]:
    return tuple(
        Bar(
            str(row["name"]),
            {str(name): number(value) for name, value in row["terms"].items()},
            as_estimate(row["total"]),
        )
        for row in data
    )
