"""rungs.json: the state of a climb. What is planned, what every round trains, what came of it, the
finalists, the time spent.

`ClimbState` is the file as values; `StateFile` writes it before every next step, so that a climb
that was killed goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, Self

from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.files import write_json
from archsearch.models.drafters import HeadFamily
from archsearch.progress import say
from archsearch.runs.fields import read_or_raise
from archsearch.search.objective import Score
from archsearch.search.rungs import Plan, Round

FORMAT: Final = 1

Fate = Literal["kept", "pruned", "dropped", "trained"]


@dataclass(frozen=True, slots=True)
class Look:
    """The end of a short training's curve: alpha on kept-out text after `tokens` tokens."""

    tokens: int
    alpha: float


@dataclass(frozen=True)
class RungRow:
    """What one rung (and round) said of one shape, and what became of it.

    `tokens`, `seconds`: of its training so far, 0 at rung 0; `measured`: None without a short
    training; `predicted_alpha`: of a finalist, what was believed before its full training.
    """

    rung: int
    round: int
    shape: Architecture
    label: str
    gamma: int
    tokens: int
    seconds: float
    measured: Look | None
    alpha: Estimate
    tau: Estimate
    score: Estimate
    state: Fate
    why: str
    predicted_alpha: Estimate | None = None

    @property
    def key(self) -> tuple[int, int, Architecture]:
        """A row with the same key takes the place of this one."""
        return self.rung, self.round, self.shape

    def to_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        row |= {
            "shape": self.shape.to_dict(),
            "measured": None if self.measured is None else asdict(self.measured),
        }
        row |= {name: row[name].to_dict() for name in ("alpha", "tau", "score")}
        predicted = row.pop("predicted_alpha")
        return row if predicted is None else row | {"predicted_alpha": predicted.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        values = {**data, "shape": Architecture.from_dict(data["shape"])}
        values["measured"] = None if data["measured"] is None else Look(**data["measured"])
        for name in ("alpha", "tau", "score", "predicted_alpha"):
            if name in data:
                values[name] = Estimate.from_dict(data[name])
        return cls(**values)


@dataclass
class RoundEntry:
    """A round of short trainings: `shapes` to `tokens` each.

    `gains`: ln(speed-up) that knowing each was expected to add; `expected_gain`: knowing all;
    `seconds`: None before the first training ended; `done`: judged; `end`: no round comes after it.
    """

    round: int
    tokens: int
    shapes: tuple[Architecture, ...]
    gains: tuple[float, ...]
    expected_gain: float
    contenders: int
    seconds: float | None = None
    done: bool = False
    end: bool = False

    def to_dict(self) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "round": self.round,
            "tokens": self.tokens,
            "shapes": [shape.to_dict() for shape in self.shapes],
            "gains": list(self.gains),
            "expected_gain": self.expected_gain,
            "contenders": self.contenders,
        }
        if self.seconds is not None:
            entry["seconds"] = self.seconds
        return entry | {"done": True, "end": self.end} if self.done else entry

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        shapes = tuple(Architecture.from_dict(shape) for shape in data["shapes"])
        return cls(**{**data, "shapes": shapes, "gains": tuple(data["gains"])})


@dataclass(frozen=True, slots=True)
class Longer:
    """The finalist (its index) that is trained on, to `seconds` of training in all."""

    index: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TextEntry:
    """Text that was written between short and full trainings, until `ends_at_s` of the climb's
    clock: tokens of one pass over all text `before` and `after`, None while it is written."""

    ends_at_s: float
    before: int
    after: int | None = None


@dataclass
class FinalistsEntry:
    """Who is trained in full, until `ends_at_s` of the climb's clock.

    `predicted`: their scores before; `tokens`: that all of them reach, None for a single one or
    before the speed is known; `longer`: None before all have been trained alike; `foreseen`: tokens
    that each would end at as the best one, at the speed measured by then. `writing`: text being
    written for them, `texts`: what was.
    """

    shapes: tuple[Architecture, ...]
    ends_at_s: float
    predicted: tuple[Score, ...]
    tokens: int | None = None
    longer: Longer | None = None
    foreseen: tuple[int, ...] | None = None
    writing: TextEntry | None = None
    texts: tuple[TextEntry, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "shapes": [shape.to_dict() for shape in self.shapes],
            "ends_at_s": self.ends_at_s,
            "predicted": [score.to_dict() for score in self.predicted],
            "longer": None if self.longer is None else asdict(self.longer),
        }
        optional = {
            "tokens": self.tokens,
            "foreseen": None if self.foreseen is None else list(self.foreseen),
            "writing": None if self.writing is None else asdict(self.writing),
            "texts": [asdict(text) for text in self.texts] or None,
        }
        return entry | {name: value for name, value in optional.items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Version 0.1.0 wrote `seconds` and `longer_s` (shares of time) where `tokens` and `longer`
        stand now: not read."""
        longer = data.get("longer")
        return cls(
            tuple(Architecture.from_dict(shape) for shape in data["shapes"]),
            float(data["ends_at_s"]),
            tuple(Score.from_dict(score) for score in data["predicted"]),
            data.get("tokens"),
            None if longer is None else Longer(**longer),
            tuple(data["foreseen"]) if "foreseen" in data else None,
            TextEntry(**data["writing"]) if data.get("writing") else None,
            tuple(TextEntry(**text) for text in data.get("texts", ())),
        )


@dataclass
class HeadEntry:
    """A head among the families of a climb: `measured` speed-up where it stands after `tokens` and
    `seconds` of training, `foreseen` after a full one (as believed after its short training)."""

    family: HeadFamily
    gamma: int
    seconds: float
    tokens: int
    measured: Estimate
    foreseen: Estimate
    state: Fate
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "measured": self.measured.to_dict(),
            "foreseen": self.foreseen.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        places = {name: Estimate.from_dict(data[name]) for name in ("measured", "foreseen")}
        return cls(**{**data, **places})


@dataclass
class Race:
    """The full training of several families: every head to `seconds` in all, then the `winner` ("":
    not decided) with what is left."""

    seconds: float
    winner: str = ""


@dataclass(frozen=True, slots=True)
class PriorRung:
    """Rung 0: how many shapes the prior scored, and how many of them could win."""

    scored: int
    contenders: int


@dataclass
class ClimbState:
    """All of rungs.json. `elapsed_s`: wall seconds of the climb in all processes; `steps`: seconds
    by step.

    `rung_s`, `rung_end_s`: time of the short trainings, and when on the climb's clock it ends;
    `full_tokens`: of a full training, `full_epoch`: of one pass over its text; `schedule`: rounds
    as planned at the measured speed; `confirmed`: ranks; `heads`, `race`: of a climb with other
    families than independent drafts, `compared`: the best head ran beside the best draft. None, or
    empty: not decided yet.
    """

    budget_s: float
    elapsed_s: float = 0.0
    plan: Plan | None = None
    rounds: list[RoundEntry] = field(default_factory=list)
    finalists: FinalistsEntry | None = None
    notes: list[str] = field(default_factory=list)
    rungs: list[RungRow] = field(default_factory=list)
    steps: dict[str, float] = field(default_factory=dict)
    rung0: PriorRung | None = None
    rung_s: float | None = None
    rung_end_s: float | None = None
    full_tokens: int | None = None
    full_epoch: int | None = None
    schedule: list[Round] = field(default_factory=list)
    confirmed: list[int] = field(default_factory=list)
    heads: list[HeadEntry] = field(default_factory=list)
    race: Race | None = None
    compared: bool = False

    def record(self, row: RungRow) -> None:
        """A row of what was learnt: one per rung, round and shape, the last one stands."""
        for number, known in enumerate(self.rungs):
            if known.key == row.key:
                self.rungs[number] = row
                return
        self.rungs.append(row)

    def round(self, number: int) -> RoundEntry | None:
        return next((entry for entry in self.rounds if entry.round == number), None)

    def with_budget(self, budget_s: float) -> ClimbState:
        """Another budget, or a plan that trained nothing: a new plan. What was written and trained
        is used again."""
        stayed = self.plan is not None and self.plan.stay != ""
        if budget_s == self.budget_s and not stayed:
            return self
        begun = bool(
            self.steps or self.rounds or self.heads
        )  # else nothing of the time spent came to anything
        return ClimbState(
            budget_s,
            self.elapsed_s if begun or not stayed else 0.0,
            rounds=self.rounds,
            rungs=self.rungs,
            steps=self.steps,
            rung0=self.rung0,
            heads=[replace(entry, state="kept", why="") for entry in self.heads],
        )

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "format": FORMAT,
            "budget_s": self.budget_s,
            "elapsed_s": self.elapsed_s,
            "plan": None if self.plan is None else self.plan.to_dict(),
            "rounds": [entry.to_dict() for entry in self.rounds],
            "finalists": None if self.finalists is None else self.finalists.to_dict(),
            "notes": list(self.notes),
            "rungs": [row.to_dict() for row in self.rungs],
            "steps": dict(self.steps),
        }
        optional = {
            "rung0": None if self.rung0 is None else asdict(self.rung0),
            "rung_s": self.rung_s,
            "rung_end_s": self.rung_end_s,
            "full_tokens": self.full_tokens,
            "full_epoch": self.full_epoch,
            "schedule": [asdict(step) for step in self.schedule] or None,
            "confirmed": list(self.confirmed) or None,
            "heads": [entry.to_dict() for entry in self.heads] or None,
            "race": None if self.race is None else asdict(self.race),
            "compared": self.compared or None,
        }
        return data | {name: value for name, value in optional.items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """KeyError, TypeError or ValueError for what is no state of a climb; ArchsearchError for
        another format."""
        if data.get("format") != FORMAT:
            raise ArchsearchError(
                "it was written by another version of archsearch; use another --run"
            )
        made: dict[str, Callable[[Any], Any]] = {
            "plan": lambda value: Plan(**value),
            "finalists": FinalistsEntry.from_dict,
            "rung0": lambda value: PriorRung(**value),
            "race": lambda value: Race(**value),
        }
        lists: dict[str, Callable[[Any], Any]] = {
            "rounds": RoundEntry.from_dict,
            "rungs": RungRow.from_dict,
            "schedule": lambda value: Round(**value),
            "heads": HeadEntry.from_dict,
        }
        values = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        values |= {
            name: make(values[name]) for name, make in made.items() if values.get(name) is not None
        }
        values |= {
            name: [make(item) for item in values[name]]
            for name, make in lists.items()
            if name in values
        }
        return cls(**values)


class StateFile:
    """rungs.json being written: the state that it holds, and the climb's clock.

    `start`: of this process's part, on `clock`. Raises ArchsearchError where the file is broken or
    of another format.
    """

    def __init__(
        self,
        path: Path,
        budget_s: float,
        start: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.clock, self._start = path, clock, start
        found = read_or_raise(path, "state of the climb", ClimbState.from_dict)
        self.state = ClimbState(budget_s) if found is None else found.with_budget(budget_s)
        self._before = self.state.elapsed_s

    def elapsed_s(self) -> float:
        """Wall seconds of this search, those of killed processes up to their last step included."""
        return self._before + self.clock() - self._start

    def save(self) -> None:
        self.state.elapsed_s = self.elapsed_s()
        write_json(self.path, self.state.to_dict())

    def step(self, name: str, seconds: float) -> None:
        """Note how long a step took; of a step that was interrupted, the sum."""
        self.state.steps[name] = self.state.steps.get(name, 0.0) + seconds
        self.save()

    def note(self, text: str) -> None:
        """A sentence that the result and the report show; said at once."""
        if text not in self.state.notes:
            self.state.notes.append(text)
        say(text)
