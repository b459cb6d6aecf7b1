"""A comparison of runs: what `compare` prints, a section of a report, and a page of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar, Final

from archsearch.records import Stored
from archsearch.report.charts import Chart, colour, line
from archsearch.report.phrases import millions
from archsearch.report.section import Section, Table, text_cell
from archsearch.search.objective import Score
from archsearch.speedup import error_by_term

TERMS: Final = {
    "tau": "tokens a round",
    "decode_s": "the target's plain step",
    "draft_s": "drafting",
    "verify_s": "verification",
    "overhead_s": "what the engine adds",
}
SHOWN: Final = ("tau", "draft_s", "verify_s", "overhead_s")  # both runs have the same target


LogRatio = Annotated[float, Stored(low=-100.0, high=100.0)]


@dataclass(frozen=True)
class Winner:
    """The first of a run. `measured`: its confirmed speed-up, None where it was not confirmed or
    that decides nothing."""

    label: str
    family: str
    parameters: int
    gamma: int
    alpha: float
    tau: float
    draft_s: float
    verify_s: float
    decode_s: float
    speedup: float
    std: float
    measured: float | None

    @classmethod
    def of(cls, score: Score, measured: float | None) -> Winner:
        names = "alpha tau draft_s verify_s decode_s speedup".split()
        values = {name: getattr(score, name).value for name in names} | {"std": score.speedup.std}
        shape = (score.label(), score.family, score.parameters, score.gamma)
        return cls(*shape, **values, measured=measured)


@dataclass(frozen=True)
class Lead:
    """How far the second run's winner leads the first's under some conditions: ln of the ratio of
    their speed-ups, by TERMS, which add up to `total`. `first`, `second`: the two speed-ups."""

    first: float
    second: float
    total: LogRatio
    terms: Mapping[str, LogRatio]

    @classmethod
    def of(cls, first: Score, second: Score) -> Lead:
        terms = asdict(error_by_term(second.terms, first.terms))
        gains = first.speedup.value, second.speedup.value
        return cls(*gains, math.log(gains[1] / gains[0]), {name: terms[name] for name in TERMS})


@dataclass(frozen=True)
class Swap:
    """One condition of the first run replaced by the second's. `lead`: None where that cannot be
    priced, `why` says why not."""

    factor: str
    before: str
    after: str
    lead: Lead | None
    why: str = ""
    ALSO: ClassVar = ("flips",)

    @property
    def flips(self) -> bool:
        """Whether this condition alone makes the second run's winner the better of the two."""
        return self.lead is not None and self.lead.total > 0.0


@dataclass(frozen=True)
class Pair:
    """Two runs. `here`, `there`: the lead of the second's winner under the first's and the second's
    conditions; None where the winners are the same draft or cannot be priced (`why`)."""

    first: str
    second: str
    same: bool
    here: Lead | None = None
    there: Lead | None = None
    swaps: tuple[Swap, ...] = ()
    why: str = ""
    ALSO: ClassVar = ("words",)

    def words(self) -> str:
        if self.same:
            return f"{self.second} has the same winner as {self.first}."
        if self.here is None or self.there is None:
            return f"{self.second} against {self.first}: {self.why}."
        moved = {name: self.there.terms[name] - self.here.terms[name] for name in TERMS}
        most = max(moved, key=lambda name: moved[name])
        flipping = [swap.factor for swap in self.swaps if swap.flips]
        one = f"alone enough for that: {', '.join(flipping)}"
        return (
            f"The winner of {self.second} is {_percent(self.there.total)} there and"
            f" {_percent(self.here.total)} in {self.first}, beside the winner of {self.first}. What"
            f" changed most in its favour: {TERMS[most]} ({100 * math.expm1(moved[most]):+.1f} %);"
            f" {one if flipping else 'no single condition is enough for that'}."
        )


@dataclass(frozen=True)
class Comparison:
    """Runs side by side: `conditions` by name, one value a run; `winners`; the first run against
    each other one."""

    runs: tuple[str, ...]
    conditions: Mapping[str, tuple[str, ...]]
    winners: tuple[Winner, ...]
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...] = ()
    ALSO: ClassVar = ("differing",)

    @property
    def differing(self) -> tuple[str, ...]:
        """Conditions that are not the same in all runs."""
        return tuple(name for name, values in self.conditions.items() if len(set(values)) > 1)


def _percent(lead: float) -> str:
    return f"{100 * abs(math.expm1(lead)):.1f} % {'ahead' if lead >= 0 else 'behind'}"


_WINNER: Final = (
    "run | draft | params | gamma | alpha | tau | draft ms | verify ms | plain ms | predicted |"
    " measured"
)
_LEAD: Final = "conditions | first's | second's | lead | tokens | drafting | verifying | engine"


def compare_section(found: Comparison) -> Section:
    """Conditions that differ, the winners, and each pair by term and by condition."""
    differing = found.differing
    same = [
        f"{name} {values[0]}"
        for name, values in found.conditions.items()
        if name not in differing and values[0]
    ]
    rows = [[name, *(value or "-" for value in found.conditions[name])] for name in differing]
    winners = [_winner(*pair) for pair in zip(found.runs, found.winners, strict=True)]
    notes = [f"{note}." for note in found.notes]
    return Section(
        "Runs side by side",
        [] if differing else ["Nothing that was asked differs."],
        [_table(["what differs", *found.runs], rows)] if differing else [],
        notes=[f"The same in all: {', '.join(same)}."] if same else [],
        parts=[
            Section("Winners", tables=[_table(_WINNER, winners)], notes=notes),
            *(_pair(pair, place) for place, pair in enumerate(found.pairs, start=1)),
        ],
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return Table(header, [[text_cell(row[0], wrap=True), *row[1:]] for row in rows])


def _winner(run: str, winner: Winner) -> list[str]:
    seconds = (winner.draft_s, winner.verify_s, winner.decode_s)
    return [
        run,
        winner.label,
        millions(winner.parameters),
        str(winner.gamma),
        f"{winner.alpha:.2f}",
        f"{winner.tau:.2f}",
        *(f"{1e3 * each:.2f}" for each in seconds),
        f"{winner.speedup:.2f}x±{winner.std:.2f}",
        "-" if winner.measured is None else f"{winner.measured:.2f}x",
    ]


def _pair(pair: Pair, place: int) -> Section:
    if pair.here is None:
        return Section(words=[pair.words()])
    rows = [_lead(*each) for each in _places(pair)]
    table, chart = _table(_LEAD, rows), _chart(pair, place)
    return Section(words=[pair.words()], tables=[table], charts=[chart])


def _places(pair: Pair) -> list[tuple[str, Lead | None, str]]:
    """(conditions, how far the second's winner leads under them, why that is not known)."""
    swaps = [(f"{swap.factor} {swap.after or '-'}", swap.lead, swap.why) for swap in pair.swaps]
    return [(f"{pair.first}'s", pair.here, ""), *swaps, (f"{pair.second}'s", pair.there, "")]


def _lead(what: str, lead: Lead | None, why: str) -> list[str]:
    if lead is None:
        return [what, "-", "-", why[:60], "", "", "", ""]
    logs = (lead.total, *(lead.terms[name] for name in SHOWN))
    percents = [f"{100 * math.expm1(value):+.1f} %" for value in logs]
    return [what, f"{lead.first:.2f}x", f"{lead.second:.2f}x", *percents]


def _chart(pair: Pair, place: int) -> Chart:
    places = [(name, lead) for name, lead, _ in _places(pair) if lead is not None]
    series = []
    for number, key in enumerate(SHOWN):
        leads = [(name, 100.0 * math.expm1(lead.terms[key])) for name, lead in places]
        series.append(line(TERMS[key], leads, kind="bar", colour=colour(number)))
    return Chart(
        f"compare-{place}",
        f"What leads where: {pair.second}'s winner before {pair.first}'s",
        "By how much each term of a round sets the second winner's speed-up above the first's:"
        " under the first run's conditions, with one of the second's in their place, under the"
        " second's. Below the line: it is behind there. Predicted.",
        "conditions",
        "lead, %",
        series,
        level=0.0,
    )
