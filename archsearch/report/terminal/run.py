"""What the commands on a run print: `train`, `confirm`, `schedule`, `recipe`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from archsearch.drafters.registry import family as family_class
from archsearch.drafts.heads import HeadAcceptance, HeadPlan
from archsearch.engine_facts import engine_facts
from archsearch.estimate import Estimate
from archsearch.progress import human_time
from archsearch.recipes.plan import Recipe
from archsearch.records import Inline, Maybe
from archsearch.report.confirmed import section_confirmed
from archsearch.report.engines import fastest_lines
from archsearch.report.families import compared_section, engine_of
from archsearch.report.load import section_load
from archsearch.report.phrases import exported_for, shell_path
from archsearch.report.reading import read_run
from archsearch.report.section import Section
from archsearch.report.terminal.layout import plus_minus, section_lines, table
from archsearch.runs.candidate import Divergence, TrainingRecord
from archsearch.runs.confirmed import Confirmed, LoadRecord
from archsearch.runs.run import open_run
from archsearch.runs.tables import EngineComparison, TextVerdict
from archsearch.schedule import GammaSchedule, largest_gamma, ranges_words
from archsearch.search.objective import Score
from archsearch.speedup import DIVERGENCE_RANGE, DIVERGENCE_STD, logit, logit_std


@dataclass(frozen=True)
class Trained:
    """The answer of `train` of a rank. `text` None: it learnt elsewhere; `expected` then: alpha by
    the law after as many tokens, where they are known."""

    run: Path
    rank: int
    before: Score
    after: Score
    training: TrainingRecord
    alpha_by_category: Mapping[str, Estimate]
    text: Maybe[TextVerdict] = None
    expected: Maybe[Estimate] = None

    def __str__(self) -> str:
        run, rank = self.run, self.rank
        before, after, training = self.before, self.after, self.training
        kinds = [
            f"{name} {plus_minus(value)}" for name, value in self.alpha_by_category.items() if name
        ]
        heldout = f"measured on held-out text{'; ' if kinds else ''}{', '.join(kinds)}"
        took = (
            f"Trained {human_time(training.seconds)} in all, {training.tokens:,} tokens at"
            f" {training.tokens_per_s:,.0f} tokens/s."
        )
        if training.taken_from:
            took = f"Weights of {training.taken_from}."
        if self.expected is not None:
            took += (
                f" Its curve ends at {training.looks[-1].alpha:.3f} after {training.tokens:,}"
                f" tokens; the law expects {plus_minus(self.expected, digits=3)}."
            )
        lines = [
            f"Rank {rank}: alpha {plus_minus(before.alpha, digits=3)} ({before.alpha.source})"
            f" -> {plus_minus(after.alpha, digits=3)} ({heldout}).",
            took,
            *_divergence_lines(training.divergence, after.alpha),
            *_ended(training.stopped),
            f"Modeled speed-up {plus_minus(before.speedup)} -> {plus_minus(after.speedup)} at"
            f" gamma {after.gamma}.",
            *([f"Text: {self.text.words()}"] if self.text is not None else []),
        ]
        confirm = ["archsearch", "confirm", str(run), "--rank", str(rank)]
        if training.taken_from:
            confirm += ["--prompts", str(training.record["prompts"])]
        return "\n".join([*lines, "", f"Next: {shlex.join(confirm)}"])


@dataclass(frozen=True)
class HeadAnswer:
    """The answer of `train` of a head; see `drafts.heads.HeadRecord`."""

    run: Path
    family: str
    gamma: int
    folder: Path
    plan: HeadPlan
    rows: int
    seconds: float
    tokens: int
    tokens_per_s: float
    auxiliary_s: float
    vocabulary_coverage: float
    stopped: str
    heldout: HeadAcceptance
    best: Mapping[str, object]

    def __str__(self) -> str:
        read = f"; auxiliary states in {human_time(self.auxiliary_s)} before"
        shares = "  ".join(f"{share:.2f}" for share in self.heldout.conditional)
        taus = "  ".join(f"{gamma}: {plus_minus(tau)}" for gamma, tau in self.heldout.tau.items())
        lines = [
            f"{family_class(self.family).title} for gamma {self.gamma}, {self.rows:,} tokens of the"
            f" vocabulary ({self.vocabulary_coverage:.1%} of what the target writes):"
            f" {self.folder}",
            f"Trained {human_time(self.seconds)} in all, {self.tokens:,} tokens at"
            f" {self.tokens_per_s:,.0f} tokens/s{read if self.auxiliary_s > 1 else ''}.",
            *_ended(self.stopped),
            f"Draft tokens right on held-out text, given those before: {shares}",
            f"Tokens a round, predicted by gamma: {taus}",
            "",
            f"Next: archsearch confirm {shell_path(self.run)} --family {self.family} --engine"
            f" {engine_of(open_run(self.run), self.family)}",
            f"      archsearch export {shell_path(self.run)} --family {self.family} --output DIR",
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class AdaptivePoint:
    """Its speed-up at one batch size."""

    batch_size: int
    speedup: Estimate


@dataclass(frozen=True)
class Adaptive:
    """vLLM's adaptive verification beside the schedule, at the batch sizes of its points; `use`:
    which of the two."""

    gamma: int
    points: tuple[AdaptivePoint, ...]
    use: str
    words: str


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """The answer of `schedule`; `family` and no `rank`: of a head. `as_engine`: what the engine
    makes of it, in words; `adaptive` None: the engine has none for such a drafter; `warning`: of
    the schedule, `warnings`: of the engine's version."""

    run: Path
    rank: int | None
    family: Maybe[str] = None
    architecture: str
    note: str
    adaptive: Adaptive | None
    schedule: Inline[GammaSchedule]
    as_engine: str
    warning: str
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        schedule = self.schedule
        rows: list[tuple[str, ...]] = [
            (
                str(point.batch_size),
                str(point.gamma or "off"),
                "-" if point.tau is None else f"{point.tau.value:.2f}",
                plus_minus(
                    point.speedup
                    if point.gamma
                    else max(point.by_gamma.values(), key=lambda gain: gain.value)
                ),
            )
            for point in schedule.points
        ]
        heads, adaptive = "batch size | gamma | tau | speed-up, predicted", self.adaptive
        if adaptive is not None:
            pairs = zip(rows, adaptive.points, strict=True)
            rows = [(*row, plus_minus(each.speedup)) for row, each in pairs]
            heads += f" | adaptive, gamma {adaptive.gamma}"
        facts = engine_facts(schedule.engine)
        one_gamma = facts.make and not facts.in_process and not facts.schedules
        engine = facts.name if one_gamma else "vllm --schedule"
        after = f"confirm {shell_path(self.run)} --rank {self.rank} --engine {engine}"
        able = largest_gamma(schedule.ranges, 0) > 0
        if self.rank is None:
            after = f"export {shell_path(self.run)} --family {self.family} --output DIR"
        else:  # confirmed by rank are drafts of the run itself
            score = open_run(self.run).score(self.rank)
            able &= score.drafter is None and not score.is_found
        lines = [
            f"Draft {self.architecture}, {schedule.engine}. Latencies: {schedule.latency}.",
            "",
            table(rows, heads),
            "",
            f"Gamma by batch size: {ranges_words(schedule.ranges)}. A range may lose 1 %."
            f" {self.note}".rstrip(),
            f"{self.as_engine}.",
            *([f"{adaptive.words}."] if adaptive is not None else []),
            *(f"WARNING: {text}." for text in (self.warning, *self.warnings) if text),
            *(["", f"Next: archsearch {after}"] if able else []),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class MadeRecipe:
    """The answer of `recipe`; `weights`: whether the folder holds the first ones."""

    recipe: Inline[Recipe]
    output: Path
    hours: float
    weights: bool

    def __str__(self) -> str:
        made, library, output = self.recipe, self.recipe.library, self.output
        version = f" {library.version}" if library.version else ""
        rows = [
            (
                f"{stage.tokens:,.0f}",
                f"{stage.gpu_hours:.1f}",
                "not known" if stage.alpha is None else plus_minus(stage.alpha),
            )
            for stage in made.stages
        ]
        start = "train.sh" if library.name == "archsearch" else "environments.sh"
        lines = [
            f"Recipe for rank {made.rank} of {made.run} with {library.name}{version}: {output}",
            f"{made.family}: {made.drafter.label()}, gamma {made.gamma};"
            f" target {made.target_name}.",
            f"About {made.hours:.1f} hours on these GPUs.",
            "",
            table(rows, "tokens | GPU-hours | alpha"),
            *[made.beyond] * bool(made.beyond),
            "",
            f"Next: read {output}/README.md, then bash {shell_path(output / start)}",
        ]
        return "\n".join(lines)


def _ended(why: str) -> list[str]:
    return [f"Ended before its budget: {why}; more text is what helps now."] if why else []


def _divergence_lines(divergence: Divergence | None, measured: Estimate) -> list[str]:
    if divergence is None:
        return []
    (low, high), nats = DIVERGENCE_RANGE, f"{divergence.nats:.2f} nats a token"
    start = "Its divergence from the target there"
    if not low <= divergence.nats <= high:
        return [f"{start}: {nats} (from {low:g} to {high:g} it also says alpha)."]
    text = f"{start}, {nats}, says alpha {divergence.alpha:.2f}"
    gap = logit(divergence.alpha) - logit(measured.value)
    if abs(gap) > 2.0 * math.hypot(DIVERGENCE_STD, logit_std(measured)):
        return [f"{text}: far from the measured one. Check the text and the tokenizer."]
    return [f"{text}."]


def confirm_text(found: Confirmed, run: Path, rank: int) -> str:
    """A confirmation by prompt."""
    section = section_confirmed(found, rank, found.architecture)
    return _measured(section, found.seconds, _next(found, run, rank))


def _measured(section: Section, seconds: float, after: str) -> str:
    took = f"Measured in {human_time(seconds)}."
    return "\n".join([*section_lines(section), took, "", after])


def engines_text(run: Path) -> str:
    """The fastest engine here, behind what one of them measured; "" where there is one."""
    opened = open_run(run)
    lines = fastest_lines(read_run(opened), opened.dtype)
    return "".join(f"\n{line}" for line in ["", *lines]) if lines else ""


def _next(found: Confirmed, run: Path, rank: int) -> str:
    named = f"{shell_path(run)} --rank {rank}"
    if found.undecided:
        again = f"archsearch confirm {named} --gamma {found.gamma} --engine {found.engine}"
        return f"Next, with nothing else running: {again}"
    if found.interval[0] > 1:
        command = f"archsearch export {named} --output my-draft"
        return f"Next: {command}{exported_for(found)}"
    return f"{found.answer}. More training may help: archsearch train {named} --budget 30m"


def load_text(found: LoadRecord, run: Path, rank: int) -> str:
    """A measurement under load."""
    named = f"{shell_path(run)} --rank {rank}"
    after = f"export {named} --output my-draft"
    if found.synthetic:
        after = f"train {named} --budget 30m"
    section = section_load(found, rank, found.architecture)
    return _measured(section, found.seconds, f"Next: archsearch {after}")


def families_text(found: EngineComparison, run: Path) -> str:
    """Every drafter beside the target alone."""
    return "\n".join([*section_lines(compared_section(found)), f"Kept in {run / 'heads'}."])
