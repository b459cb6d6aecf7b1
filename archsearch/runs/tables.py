"""What a run says besides its ranks: budgets.json, curves.json, engines.json, families.json (with
heads/comparison-<engine>.json), schedule.json and text_verdict.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self, get_args

from archsearch import records
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.files import digest
from archsearch.needs import Needs
from archsearch.records import Maybe, from_data
from archsearch.runs.confirmed import Exact, Judged
from archsearch.schedule import GammaSchedule, check_schedule
from archsearch.search import ranking
from archsearch.search.objective import Score
from archsearch.speedup import crossing

BUDGETS_FILE: Final = "budgets.json"


@dataclass(frozen=True)
class BudgetDrafter:
    """A drafter that a budget buys: the best of its family, or one that exists. `alpha`, `gamma`
    and `speedup` are of a drafter that has had what `needs` says."""

    family: str
    label: str
    needs: Needs
    gamma: int
    alpha: Estimate
    speedup: Estimate


@dataclass(frozen=True)
class BudgetRow:
    """What at most `gpu_hours` device-hours of training buy: `drafters`, best first, those that
    exist or need nothing among them."""

    gpu_hours: float
    drafters: tuple[BudgetDrafter, ...]


@dataclass(frozen=True)
class Budgets:
    """All of one run: `rows`, hours ascending from 0. Hours are of the searched device (`device`,
    its key), a GPU or a CPU."""

    device: str
    rows: tuple[BudgetRow, ...]


CURVES_FILE: Final = "curves.json"
FORMAT: Final = 1
Swept = Literal["batch", "context", "alpha", "gamma"]
SWEPT: Final[tuple[Swept, ...]] = get_args(Swept)


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

    def passes_one(self, edge: bool = False) -> float | None:
        """Where the speed-up first passes 1; None where it never does. `edge`: where the lower end
        of its bounds does."""
        gains = [point.speedup for point in self.points]
        above = [(gain.bounds[0] if edge else gain.value) - 1.0 for gain in gains]
        return crossing([point.x for point in self.points], above, rising=above[0] < 0, logs=False)


@dataclass(frozen=True)
class Bar:
    """Where the time of one pass, layer or round goes: seconds by term, and the whole as
    predicted."""

    name: str
    terms: Mapping[str, float]
    total: Estimate


@dataclass(frozen=True)
class Remedied:
    """What a rank gains by `switches` (NAME=VALUE; "": by another version of its engine) that give
    its draft CUDA graphs: `speedup`, over the target alone with them, which is `alone` times as
    fast as without."""

    rank: int | None
    switches: str
    gamma: int
    speedup: Estimate
    alone: float = 1.0

    @property
    def rate(self) -> float:
        """The speed-up over the target alone without them."""
        return self.alone * self.speedup.value


def pays_beside(gain: float, better: Remedied | None) -> bool:
    """Whether a speed-up, also by `better`, beats the target alone as that is served fastest."""
    return gain > 1.0 if better is None else max(gain, better.rate) > better.alone


@dataclass(frozen=True)
class Curves:
    """All of one run.

    `state`: what the scores were when this was worked out; `at`: batch size, context and gamma of
    the bars; `sweeps`: by what is swept; `passes`, `layers`, `rounds`: bars, draft beside target;
    `rivals`: what the first rank wins by; `groups`: ranks that the error bars cannot tell apart,
    the best first; `longest`: by rank what a context is to be cut to where memory holds less than
    the models could take; `remedied`: ranks that a switch of the engine makes faster; `notes`: what
    is missing, and why.
    """

    state: str
    at: Mapping[str, int]
    sweeps: Mapping[str, tuple[Curve, ...]]
    passes: tuple[Bar, ...] = ()
    layers: tuple[Bar, ...] = ()
    rounds: tuple[Bar, ...] = ()
    rivals: tuple[ranking.Rival, ...] = ()
    notes: tuple[str, ...] = ()
    groups: Maybe[tuple[tuple[int, ...], ...]] = None
    longest: Maybe[Mapping[str, int]] = None
    remedied: tuple[Remedied, ...] = ()
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(
                f"format {self.format}, this archsearch reads {FORMAT}; write it again: archsearch"
                " report"
            )


def longest_of(run: Path, rank: int | None) -> int | None:
    """`Curves.longest` of a rank of a run, of None the least of all; None for no such."""
    found = records.load_or_note(run / CURVES_FILE, "curves", Curves, [])
    cut = (found.longest if found is not None else None) or {}
    return cut.get(str(rank)) if rank is not None else min(cut.values(), default=None)


def state_of(scores: Sequence[Score]) -> str:
    """What `Curves` of these scores have as their state."""
    return digest([score.to_dict() for score in scores])[:16]


ENGINES_FILE: Final = "engines.json"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run the target: in `engine` at precision `dtype`, alone (`drafter` "", gamma 0) or
    with a drafter, one request at a time. `same`: answers that are the target's own, None where
    nobody looked; `profile_first`: the command that measures what a prediction does without;
    `slowdown`: of the machine that ran it against the profile, where it is known."""

    engine: str
    dtype: str
    tokens_per_s: Estimate
    drafter: str = ""
    gamma: int = 0
    same: Exact | None = None
    profile_first: str | None = None
    slowdown: Maybe[float] = None

    @property
    def measured(self) -> bool:
        return self.tokens_per_s.source == "measured"


@dataclass(frozen=True)
class EngineWays:
    """engines.json. `dtype`: the run's precision; `missing`: engines that are installed and have no
    prices, with the command that measures them."""

    dtype: str
    ways: tuple[Way, ...]
    missing: Mapping[str, str] = field(default_factory=dict)


FAMILIES_FILE: Final = "families.json"
COMPARISON_FILE: Final = "heads/comparison-{engine}.json"
COMPARISON_FILES: Final = "heads/comparison-*.json"
BESIDE_FILE: Final = "heads/{family}/confirmed-{engine}.json"


@dataclass(frozen=True, kw_only=True)
class Represented:
    """A family by its best drafter. `rank`: None where the run does not rank it; `gamma`: what it
    runs best with, `speedup`: predicted at that; `assumed`: as of `Score`."""

    family: str
    rank: int | None = None
    label: str
    parameters: int = 0
    gamma: int
    alpha: Maybe[Estimate] = None
    tau: Estimate
    speedup: Estimate
    trains: bool = True
    assumed: str = ""

    @classmethod
    def of(cls, score: Score, **more: object) -> Self:
        """Of a score; `more`: other fields."""
        own = {name: getattr(score, name) for name in _OF_SCORE}
        drafter = score.proposer
        return cls(**{**own, "label": drafter.label(), "trains": drafter.trains} | more)


_OF_SCORE: Final = "family rank parameters gamma alpha tau speedup assumed".split()


@dataclass(frozen=True, kw_only=True)
class RankedFamily(Represented):
    """In a ranking. `trains`: whether it is still to be trained."""

    needs: Needs | None


@dataclass(frozen=True, kw_only=True)
class FamilyRow(Represented):
    """On a run's held-out text (`measured_on`, in words). `seconds`: of training, `states_s`: of
    reading the text's states besides; `note`: where the engine does not run it."""

    measured_on: str
    seconds: float = 0.0
    states_s: float = 0.0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Rival(Judged):
    """One drafter in an engine beside the target alone. `foretold_by_position`: its acceptance on
    held-out text; `predicted_std`: of the speed-up; `rank`: whose draft it has, None of a head and
    of what has none. `identical_output_float32`: None where nobody looked; `warning`: why its
    acceptance does not fit; `note`: what else was replayed of it."""

    family: str
    rank: Maybe[int] = None
    foretold_by_position: tuple[float, ...] = ()
    predicted_tau: Maybe[Estimate] = None
    predicted_std: Maybe[float] = None
    identical_output_float32: Exact | None = None
    warning: str | None = None
    note: str = ""

    @property
    def predicted(self) -> Estimate | None:
        """The speed-up that was predicted; None where held-out text said nothing."""
        if self.predicted_speedup is None or self.predicted_std is None:
            return None
        return Estimate(self.predicted_speedup, self.predicted_std, "modelled")


@dataclass(frozen=True, kw_only=True)
class Silent:
    """A drafter that proposed nothing."""

    family: str
    rank: Maybe[int] = None
    gamma: int
    foretold_by_position: tuple[float, ...] = ()
    predicted_tau: Maybe[Estimate] = None
    predicted_std: Maybe[float] = None
    note: str = "proposed nothing on these prompts"


@dataclass(frozen=True)
class Swap:
    """Two drafters that came out the other way round than predicted; `inside`: their speed-ups lie
    no further apart than their error bars, predicted or measured."""

    pair: tuple[str, str]
    inside: bool


@dataclass(frozen=True)
class Order:
    """The families by speed-up, as predicted and as measured."""

    predicted: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    swapped: tuple[Swap, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EngineComparison:
    """Drafters of several families in one engine, each on every prompt. `baseline_tokens_per_s`: of
    the target alone; `order`: None where there were none to order; `profile_first`: the command
    that measures what the predictions do without; `prompts_file`: as of `Confirmed`."""

    run: str = ""
    engine: str
    dtype: str
    prompts: int
    prompts_file: Maybe[str] = None
    threads: int | None = None
    baseline_tokens_per_s: float | None = None
    rows: tuple[Rival | Silent, ...]
    order: Order | None = None
    latency: str = ""
    profile_first: str | None = None

    @property
    def rivals(self) -> list[Rival]:
        """Those that drafted."""
        return [row for row in self.rows if isinstance(row, Rival)]


def forget(run: Path, *families: str) -> None:
    """Drop what engines measured side by side of drafters of these families, whose weights are
    others now."""
    for path in run.glob(COMPARISON_FILES):
        found = records.load_or_note(path, "comparison of families", EngineComparison, [])
        rows = [row for row in found.rows if row.family not in families] if found else []
        if found and len(rows) < len(found.rows):
            records.save(path, replace(found, rows=tuple(rows), order=None))
    for family in families:
        for path in run.glob(BESIDE_FILE.format(family=family, engine="*")):
            path.unlink()


def families_of(data: Any) -> tuple[FamilyRow, ...]:
    """The rows of families.json."""
    return tuple(from_data(FamilyRow, row) for row in data["families"])


SCHEDULE_FILE: Final = "schedule.json"


def read_schedule(path: Path) -> GammaSchedule:
    """What a schedule.json holds; an empty schedule where there is no such file. Raises
    ArchsearchError when malformed."""
    return records.load(path, "gamma schedule", _schedule) or GammaSchedule()


def planned_schedule(data: object) -> GammaSchedule:
    """The content of a schedule that was worked out, batch size by batch size. Raises one of
    WRONG_SHAPE."""
    schedule = _schedule(data)
    sizes = [point.batch_size for point in schedule.points]
    if not sizes or not schedule.engine or min(sizes) < 1:
        raise ValueError("no engine, no points, or a batch size below 1")
    if any(point.tau is None or point.speedup is None for point in schedule.points):
        raise ValueError("a point without tau or speedup")
    return schedule


def _schedule(data: Any) -> GammaSchedule:
    lists = isinstance(data, Mapping) and (data.get("ranges"), data.get("points", []))
    if not lists or not all(isinstance(each, list) for each in lists):
        raise ArchsearchError(
            "it must hold a list `ranges` (and may hold a list `points`); plan it again: archsearch"
            " schedule"
        )
    check_schedule(data["ranges"])
    return records.from_data(GammaSchedule, data)


TEXT_VERDICT_FILE: Final = "text_verdict.json"
LITTLE: Final = 0.02  # of the speed-up: what more text must bring to be asked for


@dataclass(frozen=True, slots=True)
class TextStand:
    """`distinct_tokens` that the target wrote for `prompts`, alpha of the draft that learns them,
    and its speed-up."""

    prompts: int
    distinct_tokens: int
    alpha: Estimate
    speedup: Estimate

    def words(self) -> str:
        """`0.30 ± 0.02 (1.09x)`"""
        return f"{self.alpha.words()} ({self.speedup.value:.2f}x)"


@dataclass(frozen=True, slots=True)
class TextVerdict:
    """What the text of a run decides.

    `label`: of the draft; `asked`: prompts to train on, answered or not; `now`: what the draft
    reached; `learnt`: what its text would bring were it learnt in full, None where it is; `more`:
    what more prompts of the kind would bring, None where no curve shows it; `narrow`: the category
    whose alpha is well above that of all, "" for none; `faults`: what is wrong with prompts or
    answers.
    """

    label: str
    asked: int
    now: TextStand
    learnt: TextStand | None = None
    more: TextStand | None = None
    narrow: str = ""
    narrow_alpha: Estimate | None = None
    faults: tuple[str, ...] = ()
    ALSO: ClassVar = ("words",)

    def words(self) -> str:
        """`24k distinct tokens from 317 prompts: alpha 0.30 ± 0.02 (1.09x). 3,000 prompts like
        these would bring about ...`"""
        now, count = self.now, self.now.distinct_tokens
        of_all = "" if now.prompts >= self.asked else f" of {self.asked:,}"
        tokens = f"{count / 1000:.0f}k" if count >= 2000 else f"{count}"
        text = f"{tokens} distinct tokens from {now.prompts:,}{of_all} prompts: alpha {now.words()}"
        if self.learnt is not None:
            text += f"; learnt in full, this text would bring about {self.learnt.words()}"
        text += f". {self._more_words()}"
        if self.narrow and self.narrow_alpha is not None:
            text += (
                f"; or narrow the domain: {self.narrow!r} alone has alpha"
                f" {self.narrow_alpha.value:.2f}"
            )
        elif self.more is not None and self._brings() > LITTLE:
            text += "; or narrow the domain"
        return f"{text.strip()}."

    def _brings(self) -> float:
        """By how much more prompts raise the speed-up, as a share of it."""
        return 0.0 if self.more is None else self.more.speedup.value / self.now.speedup.value - 1.0

    def _more_words(self) -> str:
        more = self.more
        if more is None:
            return (
                "What more prompts would bring is not known: nothing was looked at while it was"
                " trained"
            )
        what = f"{more.prompts:,} prompts like these"
        if self._brings() <= LITTLE:
            return f"More would bring little: {what} about {more.words()}"
        return f"{what} would bring about {more.words()}"
