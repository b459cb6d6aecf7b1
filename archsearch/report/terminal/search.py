"""What `search` prints, also where nobody named a device, and the summary of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from archsearch.architecture.architecture import Architecture
from archsearch.engine_facts import ENGINES, engine_title
from archsearch.estimate import Estimate
from archsearch.records import Inline, Maybe, Stored
from archsearch.report.answer import (
    MOST_ROWS,
    SCREEN,
    gain_words,
    hours_words,
    rows_text,
    sentences,
    serve_today,
    unit_of,
)
from archsearch.report.best import section_mix
from archsearch.report.costs import ParetoSet, pareto_section
from archsearch.report.engines import fastest_lines, whole_headline
from archsearch.report.families import found_section
from archsearch.report.headline import headline
from archsearch.report.learning import learning_lines, section_rungs
from archsearch.report.phrases import (
    AskedBudget,
    AskedOver,
    ServedBy,
    capital,
    clipped,
    mix_words,
    over_words,
    shell_path,
)
from archsearch.report.predicted import section_why
from archsearch.report.reading import Reading, read_run
from archsearch.report.section import Section
from archsearch.report.terminal.layout import indented, plus_minus, section_lines, table, wrapped
from archsearch.runs.confirmed import Confirmed
from archsearch.runs.run import Run, open_run
from archsearch.runs.state import HeadEntry
from archsearch.runs.tables import (
    Budgets,
    FamilyRow,
    RankedFamily,
    Remedied,
    Represented,
    TextVerdict,
)
from archsearch.search.objective import Score
from archsearch.search.ranking import Rival
from archsearch.search.rungs import Plan
from archsearch.search.samplers import Regret
from archsearch.search.study import Scored

LEAST_ROWS: Final = 3
HEADLINE_LINES: Final = 5
STEPS_SHOWN: Final = 2
NO_REGRET: Final = 5e-5  # what 0.00 % would say
LONGEST: Final = 46


Kind = Literal["acceptance", "training", "synthetic", "profile"]


@dataclass(frozen=True)
class Step:
    """A measurement that could be made next. `speedup`: the best candidate's, with its `std` now
    and the `std_after` expected; `gain`: expected gain in ln(speed-up) by changing the winner,
    `changes`: chance of that. `value_per_minute`: (narrowing + gain) in ln(speed-up), by which
    steps are ordered. `needs`: what the command needs that is not known to be here, "" for
    nothing."""

    kind: Kind
    what: str
    command: str
    minutes: float
    minutes_from: str
    speedup: float
    std: float
    std_after: float
    gain: float
    changes: float
    value_per_minute: float
    needs: str = ""

    def lines(self) -> list[str]:
        """What it is expected to bring, and its command."""
        after = f"narrows {self.speedup:.2f}x ± {self.std:.2f} to ± {self.std_after:.2f}"
        likely = f"; likely gain from a better choice {self.gain:.1%}"
        gain = likely if self.gain >= 0.001 else ""
        needs = f" Needs {self.needs}." if self.needs else ""
        what = capital(self.what)
        text = f"{what}: about {max(self.minutes, 1):.0f} min; {after}{gain}.{needs}"
        return [*indented(text), f"    {self.command}"]


@dataclass(frozen=True)
class MeasuredDraft:
    """What a prompt file decides of a draft that was trained in full, measured on its held-out
    answers. `coverage`: the share of the target's tokens that the `head_rows` of its head hold."""

    label: str
    shape: Architecture
    alpha: Estimate
    alpha_by_category: Mapping[str, Estimate]
    gamma: int
    tau: Estimate
    tau_by_gamma: Mapping[int, Estimate]
    speedup: Estimate
    coverage: float
    head_rows: int

    def words(self) -> str:
        parts = ", ".join(
            f"{name} {plus_minus(value)}" for name, value in self.alpha_by_category.items() if name
        )
        by_kind = f" ({parts})" if parts else ""
        return (
            f"  {self.label}: alpha {plus_minus(self.alpha)}{by_kind}, tau"
            f" {plus_minus(self.tau)} at gamma {self.gamma}, {self.head_rows} head rows"
            f" cover {self.coverage:.1%}"
        )


@dataclass(frozen=True, kw_only=True)
class Searched(AskedOver):
    """The answer of `search`. `invalid`: trials of shapes of which nothing can be said; `earlier`:
    what earlier runs changed (`acceptance.known.Earlier`); `best`: the ranking, `indistinguishable`
    its groups of ranks that are tied, `cheapest` the rank with the fewest parameters of each;
    `remedied`: ranks whose drafts run without graphs and need not;
    `confirmed`: confirmed.json of each that was.

    `replayed`: what was read of the text at hand; `refused`: why nothing was trained; `rungs`,
    `notes`, `plan`: of a search that was to train.
    """

    run: Path
    by: Inline[ServedBy]
    free_layers: float | None
    dtype: str
    earlier: Mapping[str, object] | None
    space: str
    families: tuple[FamilyRow | RankedFamily, ...]
    left_out: tuple[str, ...]
    trials: int
    invalid: int
    scored: tuple[Scored, ...]
    regrets: tuple[Regret, ...]
    remedied: tuple[Remedied, ...]
    best: tuple[Score, ...]
    rivals: tuple[Rival, ...]
    next: tuple[Step, ...]
    budgets: Budgets
    indistinguishable: tuple[tuple[int, ...], ...]
    cheapest: tuple[int | None, ...]
    pareto: ParetoSet | None
    confirmed: tuple[Confirmed, ...]
    report: Path
    replayed: Maybe[str] = None
    refused: Maybe[str] = None
    rungs: Maybe[tuple[Mapping[str, object], ...]] = None
    notes: Maybe[tuple[str, ...]] = None
    plan: Maybe[Plan] = None


@dataclass(frozen=True, kw_only=True)
class Climbed(Searched):
    """Of a search that trained. `seconds` in all, `steps` of each step; `prompts`: where they come
    from; `text`: the verdict on them, None where no draft was trained in full."""

    heads: tuple[HeadEntry, ...]
    seconds: float
    steps: Mapping[str, float]
    prompts: str
    measured: tuple[MeasuredDraft, ...]
    text: TextVerdict | None


def search_text(result: Searched, *, explain: bool) -> str:
    """The first screen: the answer in at most SCREEN lines of 100 columns; with `explain` all that
    it rests on behind it."""
    run = open_run(result.run)
    reading = read_run(run)  # once: what is shown of a run is what its files say
    options = reading.candidates
    if not options:
        return explained_text(result, run, reading)
    head = headline(run, options)
    unit = unit_of(run.device)
    where = f"for {result.target} on {result.device}"
    where += over_words(result.mix)
    trained = any(option.has_weights for option in options)
    if trained:
        whole = whole_headline(run, reading)
        above = [whole.title, *whole.lines[:HEADLINE_LINES]]
        above += [line for line in whole.lines[HEADLINE_LINES:] if line.startswith("Not on unseen")]
    else:
        above = sentences(options, where, unit, reading.remedied)
        above[1:1] = [" ".join(fastest_lines(reading, run.dtype)[:2])]
    # without how it runs independent drafts: the drafter that leads may be another
    served = result.by.served.removesuffix(f", {result.by.engine_class}")
    rests_on = f"{result.words()}, {served}."
    if result.training_budget is not None:
        hours = hours_words(result.training_budget.gpu_hours, unit)
        rests_on += f" Drafters to be trained are given {hours} (--training-budget)."
    above.insert(1, rests_on)
    said = [*result.warned, *(f"WARNING: {text}." for text in reading.problems)]
    said += [f"Note: {text}." for text in result.left_out]
    # worth most now: serving what one can have today, else the headline's first
    steps = [] if trained else [("Try it today", words) for _, words in serve_today(run, reading)]
    steps += [*head.next, ("See the whole run", f"archsearch report {shell_path(run.path)}")]
    why, command = steps[0]
    below = [
        *wrapped([f"{why}:"]),
        *(line if line.startswith(" ") else f"  {line}" for line in command.splitlines()),
        f"More: --explain, or archsearch report {shell_path(run.path)}",
    ]
    lines, second = wrapped([*above, *said[:1]]), wrapped(said[1:2])
    room = SCREEN - len(lines) - len(below) - 5  # blank lines, header, rule and marks of the table
    if room >= LEAST_ROWS + len(second):
        lines, room = lines + second, room - len(second)
    table_lines = rows_text(options, unit, max(LEAST_ROWS, min(MOST_ROWS, room)))
    text = "\n".join([*lines, "", *table_lines, "", *below])
    return f"{text}\n\n{explained_text(result, run, reading)}" if explain else text


def explained_text(result: Searched, run: Run, reading: Reading) -> str:
    """The workload, what each rung did, and the summary of the run folder."""
    work, mix = result.workload, result.mix
    where = f"batch size {work.batch_size}, context {work.context_len}"
    over = [where] if mix is None else mix_words(mix)
    whole = ", ".join(f"{each.shapes:,} of {each.space}" for each in result.scored if each.exact)
    scored = f"; all shapes were scored: {whole}" if whole else ""
    lines = [
        f"Workload: {over[0]}, tensor parallel"
        f" {work.tensor_parallel}, {result.dtype_words}, {work.mode} mode, temperature"
        f" {work.temperature:g}, served by {result.by.served}.",
        *(f"  {part}." for part in over[1:]),
        f"Latency: {result.latency}.",
        f"Acceptance prior: {result.prior}.",
        f"{result.trials} trials in space {result.space}{scored}.",
        *wrapped(each.words() for each in result.regrets if each.regret >= NO_REGRET),
    ]
    if result.free_layers is not None:
        lines.append(
            f"A draft as wide as rank 1 may be up to {result.free_layers:.1f} layers deep before"
            " launching it, not running it, takes the time."
        )
    notes = (f"Note: {note}." for note in (*(result.notes or ()), *result.left_out))
    said = [*result.warned, *notes]
    lines += ["", *said, *([""] if said else [])]
    if len(result.families) > 1:
        replayed = [f"  {result.replayed}."] if result.replayed else []
        lines += [*family_lines(result.families, run.path, result.by.engine), *replayed, ""]
    if isinstance(result, Climbed) and result.rungs:
        lines += [*section_lines(section_rungs(reading.climb)), f"Measured on {result.prompts}:"]
        lines += [*(draft.words() for draft in result.measured), ""]
    lines += [summary_text(run, reading), ""]
    lines += section_lines(section_why(reading.curves)) if result.rivals else []
    lines += section_lines(section_mix(reading.candidates))
    lines += section_lines(pareto_section(result.pareto)) if result.pareto else []
    return "\n".join([*lines[:-1], *next_lines(result.next)])


def next_lines(steps: Sequence[Step]) -> list[str]:
    """The measurements that teach most per minute."""
    lines = [line for step in steps[:STEPS_SHOWN] for line in step.lines()]
    return ["", "What to measure next (most per minute first):", *lines] if lines else []


def family_lines(rows: Sequence[Represented], run: Path, engine: str) -> list[str]:
    """The best of each family, and whether somebody has to train it; of a `run` that trained also
    how to measure the best beside one that needs no training."""
    if seen := [row for row in rows if isinstance(row, FamilyRow)]:
        return [*section_lines(found_section(seen))[:-1], *untrained_rival(rows, run, engine)]
    cells = [
        (
            row.family,
            str(row.rank),
            f" {row.label}",
            f"{row.parameters / 1e6:,.0f}M",
            str(row.gamma),
            plus_minus(row.alpha),
            plus_minus(row.tau),
            plus_minus(row.speedup) + ("*" if row.assumed else " "),
            "yes" if row.trains else "no",
        )
        for row in rows
    ]
    header = "family | rank |  best | parameters | gamma | alpha | tau | speed-up | to train"
    lines = ["The best of each family:", table(cells, header)]
    why = "; ".join(
        f"{row.family} ({row.assumed}) by {row.speedup.low:.2f}x" for row in rows if row.assumed
    )
    text = f"* assumed, so ranked by the lower end of its interval: {why}."
    return lines + (indented(text) if why else [])


def untrained_rival(rows: Sequence[Represented], run: Path, engine: str) -> list[str]:
    """Where a family that needs no training may be as fast as what was trained: how to measure the
    two side by side."""
    trained = [row for row in rows if row.trains]
    confirms = ENGINES[engine].confirms if engine in ENGINES else ()
    free = [row for row in rows if not row.trains and row.family in confirms]
    if not trained or not free:
        return []
    best, rival = (max(found, key=lambda row: row.speedup.value) for found in (trained, free))
    ours, theirs = best.speedup, rival.speedup
    if theirs.value < max(1.0, ours.value - math.hypot(ours.std, theirs.std)):
        return []
    rank = f" --rank {best.rank}" if best.family == "independent" and (best.rank or 1) > 1 else ""
    words = (
        f"{rival.family} needs no training and may be as fast; both in {engine_title(engine)},"
        " prompt by prompt:"
    )
    command = (
        f"archsearch confirm {shell_path(run)}{rank} --family {best.family} --family {rival.family}"
    )
    return [f"  {words}", f"    {command}"]


def summary_text(run: Run, reading: Reading | None = None) -> str:
    """The headline, a table of the best and what to do next; `reading`: the run's, where it was
    read."""
    reading = reading or read_run(run)
    options = reading.candidates
    head = whole_headline(run, reading)
    said = [*head.lines, *(f"WARNING: {problem}" for problem in reading.problems)]
    lines = [*wrapped([head.title]), *(line for text in said for line in indented(text)), ""]
    lines += [*rows_text(options, unit_of(run.device)), ""] if options else []
    lines += section_lines(Section("Learning curve", learning_lines(reading)))
    steps = Section("Next", commands=[*serve_today(run, reading), *head.next])
    return "\n".join([*lines, *section_lines(steps)[:-1]])


@dataclass(frozen=True)
class Brought:
    """The best that one can have today, and the best that is to be trained."""

    engine: str
    tensor_parallel: int
    dtype: str
    today: Score | None
    trained: Score | None
    training_budget: AskedBudget | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class SurveyRow:
    """What one GPU brings; `error`: why it cannot be said."""

    device: str
    brings: Inline[Brought | None] = None
    error: Maybe[str] = None

    def cells(self) -> Iterator[tuple[str, ...]]:
        """What one can have today, and the best within the training budget: a line each."""
        if (found := self.brings) is not None:
            yield f"{found.tensor_parallel} x {self.device}", "today", *_best_cells(found.today)
            yield "", "trained", *_best_cells(found.trained)


@dataclass(frozen=True)
class Survey:
    """The answer of `search` where nobody named a device."""

    target: str
    rows: Annotated[tuple[SurveyRow, ...], Stored("survey")]

    def __str__(self) -> str:
        found = [row.brings for row in self.rows if row.brings is not None]
        budgeted = [(each.engine, each.training_budget) for each in found if each.training_budget]
        assumed = "Batch 1."
        if budgeted:
            engine, budget = budgeted[0]
            hours = hours_words(budget.gpu_hours, "GPU")
            assumed = f"{engine}; drafters to be trained are given {hours}."
        above = [
            f"No GPU is here and {self.target} is not for this CPU. What speculation would bring on"
            " the GPUs whose kernels ship:",
            assumed,
        ]
        cells = [line for row in self.rows for line in row.cells()]
        header = "GPUs that hold it | best |  drafter | speed-up, 5 to 95 %"
        lines = [*wrapped(above), "", *([table(cells, header), ""] if cells else [])]
        lines += wrapped(f"{row.device}: {row.error}." for row in self.rows if row.error)
        named = next((row.device for row in self.rows if row.brings is not None), "NAME")
        lines += ["All of one GPU:", f"  archsearch search --target {self.target} --gpu {named}"]
        return "\n".join(lines)


def _best_cells(score: Score | None) -> tuple[str, str]:
    if score is None:
        return " none known", "-"
    hub = score.needs.hub_id if score.needs is not None else None
    name = f"{score.family}: {hub or score.proposer.label()}"
    return f" {clipped(name, LONGEST)}", gain_words(score.speedup)
