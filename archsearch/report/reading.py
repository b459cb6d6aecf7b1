"""What lies in a run folder, as the report needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from archsearch.acceptance.estimator import AcceptanceContext, GivenAcceptance
from archsearch.acceptance.measured import Trace
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.acceptance.replay import replay_tau
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.models.targets import shape_here
from archsearch.records import load_or_note
from archsearch.report.compare import Comparison
from archsearch.runs.candidate import TRAINING_FILE, Candidate, TrainingRecord
from archsearch.runs.confirmed import CONFIRMED_FILE, LOAD_FILES, Confirmed, LoadRecord
from archsearch.runs.run import COMPARE_FILE, RUNGS_FILE, Run
from archsearch.runs.state import ClimbState
from archsearch.runs.tables import (
    BESIDE_FILE,
    BUDGETS_FILE,
    COMPARISON_FILES,
    CURVES_FILE,
    ENGINES_FILE,
    FAMILIES_FILE,
    SCHEDULE_FILE,
    TEXT_VERDICT_FILE,
    Budgets,
    Curves,
    EngineComparison,
    EngineWays,
    FamilyRow,
    Remedied,
    TextVerdict,
    families_of,
    planned_schedule,
    state_of,
)
from archsearch.schedule import GammaSchedule
from archsearch.search.objective import Score, grouped

_T = TypeVar("_T")
# acceptance by position is drawn at least so far: what a larger gamma would find
POSITIONS: Final = 4


@dataclass(frozen=True)
class Shown(Candidate):
    """One rank of a run with all that was read of its folder.

    What `_candidate` reads is None or empty where it is not there. `confirmed`: also of what needs
    no weights, beside the target alone; `replayed`: acceptance by position from the trace on
    held-out text at the score's gamma; `replayed_on`: the same in blocks of at least POSITIONS;
    `group`: candidates with the same number are tied with the best of that group; `elsewhere`: in
    other engines or precisions than that of `confirmed`.
    """

    trained_by: TrainingRecord | None
    confirmed: Confirmed | None
    replayed: tuple[float, ...]
    replayed_on: tuple[float, ...] = ()
    group: int = 0
    loads: tuple[LoadRecord, ...] = ()
    schedule: GammaSchedule | None = None
    elsewhere: tuple[Confirmed, ...] = ()

    @property
    def stale(self) -> bool:
        """Whether it was trained further after it was confirmed."""
        return self.confirmed is not None and self.confirmed.is_stale(self.score.alpha)

    @property
    def stage(self) -> str:
        if self.confirmed is not None:
            return "retrained" if self.stale else "confirmed"
        return "trained" if self.has_weights else "searched"

    @property
    def measured_speedup(self) -> Estimate | None:
        return None if self.confirmed is None or self.stale else self.confirmed.speedup

    @property
    def undecided(self) -> str | None:
        """Why its confirmation decides nothing; None where it does, or where there is none of these
        weights."""
        return None if self.confirmed is None or self.stale else self.confirmed.undecided

    @property
    def measured(self) -> bool:
        """Whether its confirmation decides something."""
        return self.measured_speedup is not None and self.undecided is None

    @property
    def gain(self) -> Estimate:
        """Its speed-up, measured or predicted."""
        if self.confirmed is None or not self.measured:
            return self.score.speedup
        seen, (low, high) = self.confirmed.speedup, self.confirmed.interval
        return Estimate(seen.value, seen.std, "measured", low, high)

    @property
    def gamma(self) -> int:
        """At which `gain` is."""
        found = self.confirmed if self.measured else None
        return self.score.gamma if found is None else found.gamma

    @property
    def at_hand(self) -> bool:
        """Whether one can have it today: it exists, needs nothing, or was trained in this run."""
        needs = self.score.needs
        return self.has_weights or (needs is not None and needs.kind != "training")

    @property
    def ranked_by(self) -> float:
        """As measured, else `Score.ranked_by`."""
        return self.gain.value if self.measured else self.score.ranked_by

    @property
    def name(self) -> str:
        """What it is called: its family, and its hub id where it exists, else its shape."""
        return f"{self.score.family}: {self.hub_id or self.score.proposer.label()}"

    @property
    def hub_id(self) -> str:
        """Where it can be downloaded; "" of what cannot, or was trained in this run."""
        needs = self.score.needs
        return "" if self.has_weights or needs is None else needs.hub_id or ""

    @property
    def kind(self) -> tuple[object, ...]:
        """What distinguishes rows of a table: not the number of heads."""
        if self.at_hand:
            return (self.name,)
        drafter = self.score.proposer
        shape = drafter.architecture
        own = (shape.num_hidden_layers, shape.hidden_size) if drafter.is_model else ()
        return (self.score.family, *own)


@dataclass(frozen=True)
class Reading:
    """A run folder as the report sees it.

    `problems`: one line for each file that is there and cannot be read; the others: what `read_run`
    reads, None or empty where it is not there.
    """

    candidates: list[Shown]
    finalists: list[TrainingRecord]
    climb: ClimbState | None
    problems: list[str]
    text: TextVerdict | None = None
    curves: Curves | None = None
    comparison: Comparison | None = None
    families: tuple[FamilyRow, ...] = ()
    compared: tuple[EngineComparison, ...] = ()
    budgets: Budgets | None = None
    engines: EngineWays | None = None

    @property
    def remedied(self) -> tuple[Remedied, ...]:
        """As of `Curves`; () where nobody looked."""
        return self.curves.remedied if self.curves is not None else ()


def read_run(run: Run) -> Reading:
    """Everything the report shows; a broken file costs its own part of the report and is said in
    `problems`."""
    files = _Files(run.path, [])
    shown = [_candidate(_Files(run.best_dir(rank), files.problems), rank) for rank in run.ranks()]
    found = [item for item in shown if item is not None]
    curves = files.read(CURVES_FILE, "curves", Curves)
    numbers = groups(run, [item.score for item in found], curves)
    return Reading(
        [
            replace(
                item, group=numbers[item.rank], confirmed=item.confirmed or beside(run, item.score)
            )
            for item in found
        ],
        files.every("finalists/*/training.json", "training record", TrainingRecord.from_dict),
        files.read(RUNGS_FILE, "state of the climb", ClimbState),
        files.problems,
        files.read(TEXT_VERDICT_FILE, "verdict on the text", TextVerdict),
        curves,
        files.read(COMPARE_FILE, "comparison", Comparison),
        files.read(FAMILIES_FILE, "families of the run", families_of) or (),
        tuple(files.every(COMPARISON_FILES, "comparison of families", EngineComparison)),
        files.read(BUDGETS_FILE, "budgets", Budgets),
        files.read(ENGINES_FILE, "engines of the run", EngineWays),
    )


def beside(run: Run, score: Score) -> Confirmed | None:
    """What the run's engine measured last of a drafter without weights beside the target alone."""
    if score.needs is None or score.needs.kind != "nothing":
        return None
    engine = run.arguments.get("engine") or "transformers"
    path = run.path / BESIDE_FILE.format(family=score.family, engine=engine)
    return load_or_note(path, "confirmation", Confirmed, [])  # one that proposed nothing is none


class _Files(NamedTuple):
    """Those of a folder, and what is wrong with some."""

    folder: Path
    problems: list[str]

    def read(self, name: str, what: str, kind: Callable[..., _T]) -> _T | None:
        return load_or_note(self.folder / name, what, kind, self.problems)

    def every(self, names: str, what: str, kind: Callable[..., _T]) -> list[_T]:
        paths = sorted(self.folder.glob(names))
        read = (load_or_note(path, what, kind, self.problems) for path in paths)
        return [found for found in read if found is not None]


def _candidate(files: _Files, rank: int) -> Shown | None:
    score = files.read("score.json", "score", Score.from_dict)
    if score is None:
        return None
    confirmed = files.read(CONFIRMED_FILE, "confirmation", Confirmed)
    main = (confirmed.engine, confirmed.dtype) if confirmed is not None else None
    others = files.every("confirmed-*.json", "confirmation", Confirmed)
    return Shown(
        replace(score, rank=rank),
        files.folder,
        files.read(TRAINING_FILE, "training record", TrainingRecord.from_dict),
        confirmed,
        _replayed(files.folder, score.gamma),
        _replayed(files.folder, max(score.gamma, POSITIONS)),
        loads=tuple(files.every(LOAD_FILES, "measurement under load", LoadRecord)),
        schedule=files.read(SCHEDULE_FILE, "schedule", planned_schedule),
        elsewhere=tuple(other for other in others if (other.engine, other.dtype) != main),
    )


def _replayed(folder: Path, gamma: int) -> tuple[float, ...]:
    if not (folder / "trace.npz").is_file():
        return ()
    try:
        return replay_tau(Trace.load(folder / "trace.npz"), gamma, resamples=0).accepted_by_position
    except ArchsearchError:  # texts too short for this gamma, or a broken trace
        return ()


def target_shape(run: Run) -> Architecture | None:
    """The shape of a run's target (see `shape_here`)."""
    return shape_here(str(run.arguments.get("target", "")))


def groups(run: Run, scores: Sequence[Score], curves: Curves | None = None) -> dict[int, int]:
    """Rank -> number of the group of scores that the error bars cannot tell apart, 1 for the
    fastest: as the session of the run said in `curves`, which knows where acceptance was asked for
    of each; without such, by the run's arguments alone."""
    if curves is not None and curves.groups and curves.state == state_of(scores):
        return {rank: i for i, ranks in enumerate(curves.groups, start=1) for rank in ranks}
    shape = target_shape(run)  # the prior caps what size brings at the target's size
    asked = run.arguments
    context = AcceptanceContext(
        shape,
        float(asked.get("temperature", 0.0)),
        int(asked.get("context", 512)),
        str(asked.get("domain", "narrow")),
    )
    given = any(score.alpha.source == "given" for score in scores)
    prior = GivenAcceptance(0.5) if given else PriorAcceptance()
    found = enumerate(grouped(scores, prior, lambda score: context), start=1)
    return {score.rank or 0: number for number, group in found for score in group}
