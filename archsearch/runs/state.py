"""rungs.json: the state of a search that trains. What is planned, what every round trains, what
came of it, the finalists, the time spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.models.files import HeadFamily
from archsearch.progress import say
from archsearch.records import Maybe, Stored, from_data, load, save
from archsearch.search.objective import Score
from archsearch.search.rungs import Plan, Round

FORMAT: Final = 1

Fate = Literal["kept", "pruned", "dropped", "trained"]
LEFT_OUT: Final = Stored(omit=True)


@dataclass(frozen=True, slots=True)
class Look:
    """The end of a short training's curve: alpha on kept-out text after `tokens` tokens."""

    tokens: int
    alpha: float


@dataclass(frozen=True)
class RungRow:
    """What one rung (and round) said of one shape, and what became of it.

    `tokens`, `seconds`: of its training so far, 0 at rung 0; `measured`: None without a short
    training; `predicted_alpha`: of a finalist, before its full training.
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
    predicted_alpha: Maybe[Estimate] = None


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
    seconds: Maybe[float] = None
    done: bool = False
    end: bool = False


@dataclass(frozen=True, slots=True)
class Longer:
    """The finalist (its index) that is trained on, to `seconds` of training in all."""

    index: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TextEntry:
    """Text that was written between short and full trainings, until `ends_at_s` of the search's
    clock: tokens of one pass over all text `before` and `after`, None while it is written."""

    ends_at_s: float
    before: int
    after: int | None = None


@dataclass
class FinalistsEntry:
    """Who is trained in full, until `ends_at_s` of the search's clock.

    `predicted`: their scores before; `tokens`: that all of them reach, None for a single one or
    before the speed is known; `longer`: None before all have been trained alike; `foreseen`: tokens
    that each would end at as the best one, at the speed measured by then. `writing`: text being
    written for them, `texts`: what was.
    """

    shapes: tuple[Architecture, ...]
    ends_at_s: float
    predicted: tuple[Score, ...]
    tokens: Maybe[int] = None
    longer: Longer | None = None
    foreseen: Maybe[tuple[int, ...]] = None
    writing: Maybe[TextEntry] = None
    texts: Annotated[tuple[TextEntry, ...], LEFT_OUT] = ()


@dataclass
class HeadEntry:
    """A head among the families of a search: `measured` speed-up after `tokens` and `seconds` of
    training so far, None before any. `foreseen`: the one predicted after a full training, from
    its short one; None without."""

    family: HeadFamily
    gamma: int
    seconds: float = 0.0
    tokens: int = 0
    measured: Estimate | None = None
    foreseen: Estimate | None = None
    state: Fate = "kept"
    why: str = ""


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
    """All of rungs.json. `elapsed_s`: wall seconds of the search in all processes; `steps`: seconds
    by step.

    `rung_s`, `rung_end_s`: time of the short trainings, and when on the search's clock it ends;
    `full_tokens`: of a full training, `full_epoch`: of one pass over its text; `schedule`: rounds
    as planned at the measured speed; `confirmed`: ranks; `heads`, `race`: where other families than
    independent drafts are trained, `compared`: the best head ran beside the best draft. None, or
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
    rung0: Maybe[PriorRung] = None
    rung_s: Maybe[float] = None
    rung_end_s: Maybe[float] = None
    full_tokens: Maybe[int] = None
    full_epoch: Maybe[int] = None
    schedule: Annotated[list[Round], LEFT_OUT] = field(default_factory=list)
    confirmed: Annotated[list[int], LEFT_OUT] = field(default_factory=list)
    heads: Annotated[list[HeadEntry], LEFT_OUT] = field(default_factory=list)
    race: Maybe[Race] = None
    compared: Annotated[bool, LEFT_OUT] = False
    format: int = FORMAT

    def record(self, row: RungRow) -> None:
        """A row of what was learnt: one per rung, round and shape, the last one holds."""
        rows = {(each.rung, each.round, each.shape): each for each in [*self.rungs, row]}
        self.rungs = list(rows.values())

    def round(self, number: int) -> RoundEntry | None:
        return next((entry for entry in self.rounds if entry.round == number), None)

    def planned_for(self, budget_s: float, climbs: bool) -> ClimbState:
        """With another budget, rounds of short trainings that were not asked for, or a plan that
        trained nothing: a new plan. What was written and trained is used again."""
        plan = self.plan
        stayed = plan is not None and plan.stay != ""
        same = plan is None or plan.climbs == climbs
        if budget_s == self.budget_s and same and not stayed:
            return self
        # else nothing of the time spent came to anything
        begun = bool(self.steps or self.rounds or self.heads)
        return ClimbState(
            budget_s,
            self.elapsed_s if begun or not stayed else 0.0,
            rounds=self.rounds,
            rungs=self.rungs,
            steps=self.steps,
            rung0=self.rung0,
            heads=[replace(entry, state="kept", why="") for entry in self.heads],
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """ArchsearchError for what is no state of a search, or of another format."""
        if data.get("format") != FORMAT:
            raise ArchsearchError(
                "it was written by another version of archsearch; use another --run"
            )
        return from_data(cls, data)


class StateFile:
    """rungs.json being written: the state that it holds, and the search's clock.

    `start`: of this process's part, on `clock`; `climbs`: with rounds of short trainings. Raises
    ArchsearchError where the file is broken or of another format.
    """

    def __init__(
        self,
        path: Path,
        budget_s: float,
        start: float,
        *,
        climbs: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.clock, self._start = path, clock, start
        found = load(path, "state of the climb", ClimbState)
        self.state = found.planned_for(budget_s, climbs) if found else ClimbState(budget_s)
        self._before = self.state.elapsed_s

    def elapsed_s(self) -> float:
        """Wall seconds of this search, those of killed processes up to their last step included."""
        return self._before + self.clock() - self._start

    def save(self) -> None:
        self.state.elapsed_s = self.elapsed_s()
        save(self.path, self.state)

    def step(self, name: str, seconds: float) -> None:
        """Note how long a step took; of a step that was interrupted, the sum."""
        self.state.steps[name] = self.state.steps.get(name, 0.0) + seconds
        self.save()

    def note(self, text: str) -> None:
        """A sentence that the result and the report show; said at once."""
        if text not in self.state.notes:
            self.state.notes.append(text)
        say(text)
