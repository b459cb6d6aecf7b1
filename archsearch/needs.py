"""What it takes to have a drafter: nothing, a download, or a training of so many tokens and
GPU-hours; and what a training budget buys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args

from archsearch.errors import ArchsearchError
from archsearch.estimate import N
from archsearch.records import as_data

Kind = Literal["exists", "nothing", "training"]
KINDS: Final[tuple[str, ...]] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Needs:
    """What it takes to have a drafter.

    `kind`: `exists` (download `hub_id`), `nothing` (n-gram lookup, suffix trees) or `training`. Of
    a training: `tokens` of the target's own text that the drafter learns from, repeats included
    (each is seen `epochs` times), and device-hours of the searched device, apart: `text_hours` (the
    target writes the text), `teacher_hours` (the target's passes over it for probabilities or
    hidden states), `training_hours` (the drafter's own passes). `source`: where the hours come from
    (as in `Estimate.source`). `init`: what a training starts from, a hub id or words; "" for one
    from scratch.
    """

    kind: Kind
    hub_id: str | None = None
    tokens: float | None = None
    epochs: float = 1.0
    text_hours: float = 0.0
    teacher_hours: float = 0.0
    training_hours: float = 0.0
    source: str = ""
    init: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArchsearchError(
                f"needs: unknown kind {self.kind!r}; use one of {', '.join(KINDS)}"
            )
        if self.kind == "exists" and not self.hub_id:
            raise ArchsearchError("needs: a drafter that exists has a hub id")
        hours = (self.text_hours, self.teacher_hours, self.training_hours)
        if not all(math.isfinite(hour) and hour >= 0 for hour in hours):
            raise ArchsearchError(f"needs: hours must be numbers of 0 and more, got {hours}")

    @property
    def gpu_hours(self) -> float:
        """Device-hours in all; 0 where nothing is trained."""
        return self.text_hours + self.teacher_hours + self.training_hours

    def to_dict(self) -> dict[str, Any]:
        """`kind`, with `hub_id` of what exists, and of a training `tokens`, `gpu_hours` and its
        three parts."""
        if self.kind == "exists":
            return {"kind": self.kind, "hub_id": self.hub_id}
        if self.kind == "nothing":
            return {"kind": self.kind}
        rest = as_data(self)
        del rest["hub_id"]
        return rest | {"gpu_hours": self.gpu_hours}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Needs:
        """The inverse of `to_dict`. Raises ArchsearchError for what is none."""
        known = {field.name for field in fields(cls)}
        try:
            return cls(**{name: value for name, value in data.items() if name in known})
        except (TypeError, AttributeError) as error:
            raise ArchsearchError(f"needs must be an object with a kind, got {data!r}") from error


NOTHING: Final = Needs("nothing")


@dataclass(frozen=True, slots=True)
class TrainingBudget:
    """Device-hours for one drafter, and what they buy: the cost of a token of the target's text is
    a constant (writing it, the target's pass over it) plus the drafter's own passes, which grow
    with its parameters (`Drafter.training_parameters`: those of one pass times the passes of a
    token).

    `hours`: device-hours; `text_hours_per_token` and `teacher_hours_per_token`: for one token;
    `hours_per_parameter_token`: of the drafter's training, for one parameter and token. `epochs`:
    how often each written token is read.
    """

    hours: float
    text_hours_per_token: float
    teacher_hours_per_token: float
    hours_per_parameter_token: float
    epochs: float = 1.0
    source: str = "modelled"

    def tokens(self, parameters: N) -> N:
        """Tokens that a drafter of `parameters` (a number or an array) sees within the budget,
        repeats included."""
        seen = self.text_hours_per_token / self.epochs + self.teacher_hours_per_token
        return self.hours / (seen + self.hours_per_parameter_token * parameters)

    def needs(self, parameters: float) -> Needs:
        """The whole budget spent on a drafter of `parameters`."""
        return self.cost(parameters, float(self.tokens(parameters)))

    def cost(self, parameters: float, tokens: float) -> Needs:
        """What `tokens`, repeats included, take for a drafter of `parameters`, whatever the
        budget."""
        return Needs(
            "training",
            tokens=tokens,
            epochs=self.epochs,
            text_hours=tokens * self.text_hours_per_token / self.epochs,
            teacher_hours=tokens * self.teacher_hours_per_token,
            training_hours=tokens * self.hours_per_parameter_token * parameters,
            source=self.source,
        )
