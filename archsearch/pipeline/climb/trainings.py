"""Trainings of one search: drafts short and in full, more text for them; what they take, and where
each is written down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import numpy as np

from archsearch import speedup as speculation
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import pass_parameters
from archsearch.drafts.heads import HeadRecord
from archsearch.drafts.records import ShortTraining, TrainedDraft
from archsearch.drafts.trainer import DraftTrainer
from archsearch.estimate import Estimate
from archsearch.pipeline.shared_work import Job, SharedWork, train_job
from archsearch.progress import human_time, say
from archsearch.runs.state import FinalistsEntry, Longer, StateFile, TextEntry
from archsearch.search import rungs
from archsearch.search.objective import Score, Scorer
from archsearch.training.curves import Split, best_split

# of the time for full trainings, to all finalists alike (in tokens: how many seconds a draft had
# says how busy the machine was); the rest goes to the best
ALL_SHARE: Final = 0.5
SAME_TOKENS: Final = 0.02  # apart by less than this share, two trainings count as equally long
LEAST_TRAINING_S: Final = 0.5
# of the tokens that were foreseen: with less, a training does not show what its shape can do
LEAST_SEEN: Final = 0.5
FIRST_GUESS_SPEED: Final = 2000.0  # training tokens/s before anything was trained
LEAST_WRITING_S: Final = 15.0
# times the new tokens that training alone is worth: what writing must promise
LEAST_MORE: Final = 1.03


Learnt = TypeVar("Learnt", TrainedDraft, HeadRecord)


@dataclass
class Trainings:
    """Who trains, where it is written down, and what took how long. `shared`: where others train
    along; `shorts`: the short trainings, which a climb learns from."""

    trainer: DraftTrainer
    file: StateFile
    seed: int = 0
    shared: SharedWork | None = None
    shorts: dict[Architecture, ShortTraining] = field(default_factory=dict)

    # -- what they take

    def speed(self, shape: Architecture) -> float:
        """Training tokens/s of a shape: its own, or from those trained so far in proportion to
        their work per token."""
        if shape in self.shorts:
            return self.shorts[shape].tokens_per_s
        if not self.shorts:
            return FIRST_GUESS_SPEED
        rates = [short.tokens_per_s * work(arch) for arch, short in self.shorts.items()]
        return float(np.median(rates)) / work(shape)

    def mean_speed(self, scores: Sequence[Score]) -> float:
        """Tokens/s over shapes that are likely to be chosen (harmonic mean: equal tokens for
        all)."""
        speeds = [self.speed(score.architecture) for score in scores[: rungs.MOST_PLACES]]
        return len(speeds) / sum(1.0 / value for value in speeds)

    def overhead_s(self) -> float:
        """Seconds per shape and round beside training steps: building the draft, looking at
        alpha."""
        steps = [
            short.wall_s - short.tokens / short.tokens_per_s
            for short in self.shorts.values()
            if short.wall_s > 0
        ]
        return max(0.0, float(np.median(steps))) if steps else 0.0

    def cost_s(self, shape: Architecture, tokens: int) -> float:
        """Seconds to bring a shape to `tokens`."""
        done = self.shorts[shape].tokens if shape in self.shorts else 0
        more = max(0, tokens - done) / self.speed(shape)
        return more + (self.overhead_s() if done < tokens else 0.0)

    # -- short

    def short(
        self, shape: Architecture, tokens: int, label: str, limit_s: float | None = None
    ) -> None:
        """Train a shape to `tokens` in all; what others have trained is read, not done again."""
        self.shorts[shape] = self.trainer.train_short(
            shape, tokens, self.seed, label, limit_s=limit_s
        )
        self.file.save()

    def shorts_together(self, shapes: Sequence[Architecture], tokens: int) -> None:
        """Train shapes with whoever trains along; nothing where nobody does."""
        if self.shared is not None:
            jobs = [Job("short", shape, tokens, self.seed) for shape in shapes]
            self.shared.finish(jobs, lambda job: train_job(job, self.trainer))

    # -- in full

    def longer(self, shape: Architecture, more_s: float, label: str, step: str) -> TrainedDraft:
        """Train a shape on for `more_s`; noted under `step`."""
        start = self.file.clock()
        seconds = self.trainer.spent(shape)[1] + more_s
        draft = self.trainer.train(shape, seconds, self.seed, label)
        self.file.step(step, self.file.clock() - start)
        return draft

    def finalists(self, entry: FinalistsEntry, scorer: Scorer) -> list[TrainedDraft]:
        """All to equal tokens, then the best (by `scorer`) as long as there is time. Every choice
        is written before it is acted on. More text comes first where it promises more than epochs,
        and where a draft has learnt what its text can teach."""
        file, trainer = self.file, self.trainer

        def left_s() -> float:
            return max(0.0, entry.ends_at_s - file.elapsed_s())

        if entry.tokens is None and entry.longer is None and not entry.texts:
            self.write_more(entry, self.split_minutes(entry.shapes[0], left_s()))
        alone = len(entry.shapes) == 1
        if entry.longer is None and entry.foreseen is None:
            done = [trainer.spent(shape)[0] for shape in entry.shapes]
            speeds = [self.speed(shape) for shape in entry.shapes]
            if not alone and entry.tokens is None:
                entry.tokens = equal_tokens(ALL_SHARE * left_s(), speeds, done)
            alone_s = left_s() * (1.0 if alone else 1.0 - ALL_SHARE)
            level = entry.tokens or done[0]
            entry.foreseen = tuple(level + int(alone_s * speed) for speed in speeds)
            file.save()
        names = ", ".join(shape.label() for shape in entry.shapes)
        say(f"rung 2: full training, about {human_time(left_s())}: {names}")
        start = file.clock()
        drafts = (
            []
            if entry.tokens is None
            else train_alike(trainer, entry.shapes, entry.tokens, left_s, self.seed, self.shared)
        )
        if entry.longer is None:
            best = 0 if alone else best_of(drafts, scorer)
            entry.longer = Longer(best, trainer.spent(entry.shapes[best])[1] + left_s())
            file.step("finalists", 0.0)
        best = entry.longer.index
        drafts[best : best + 1] = [
            trainer.train(entry.shapes[best], entry.longer.seconds, self.seed, "the best finalist")
        ]
        file.step("finalists", file.clock() - start)
        shape, label = entry.shapes[best], "the best finalist, on more text"
        drafts[best] = self.on_more_text(
            drafts[best],
            shape.label(),
            self.speed(shape),
            left_s,
            lambda seconds: self.longer(shape, seconds, label, "finalists"),
        )
        if entry.foreseen and (why := not_judged(drafts[best], entry.foreseen[best])):
            file.note(why)
        file.save()
        return drafts

    def on_more_text(
        self,
        learnt: Learnt,
        name: str,
        speed: float,
        left_s: Callable[[], float],
        longer: Callable[[float], Learnt],
    ) -> Learnt:
        """While a draft or head has learnt what its text can teach and there is time: more text,
        and on with it (`longer`, for so many seconds, `speed` tokens/s)."""
        entry = self.file.state.finalists
        while entry is not None and learnt.stopped and left_s() > LEAST_WRITING_S:
            if not self.write_more(entry, self._split(learnt.tokens, speed, left_s())):
                self.file.note(
                    f"{name} had learnt what its text can teach after {learnt.tokens} tokens,"
                    f" {learnt.tokens / max(self.trainer.text_tokens(), 1):.0f} times the text;"
                    f" {human_time(left_s())} were not needed; more prompts (--prompts) would bring"
                    " more"
                )
                break
            learnt = longer(left_s())
        return learnt

    # -- more text

    def split_minutes(self, shape: Architecture, seconds: float) -> Split:
        """How `seconds` are divided between text and the training of `shape`."""
        return self._split(self.trainer.spent(shape)[0], self.speed(shape), seconds)

    def _split(self, tokens: float, speed: float, seconds: float) -> Split:
        trainer = self.trainer
        supplies = trainer.texts.growth.supplies() if seconds > LEAST_WRITING_S else []
        epoch = float(trainer.text_tokens())
        best, alone = best_split(seconds, supplies, speed, epoch_tokens=epoch, tokens=tokens)
        worth = best.text_s >= LEAST_WRITING_S and best.effective > LEAST_MORE * alone.effective
        return best if worth else alone

    def write_more(self, entry: FinalistsEntry, split: Split) -> bool:
        """Write text for the `split`'s seconds; True where there is more than before. What a
        killed process had begun goes on."""
        file, trainer = self.file, self.trainer
        if entry.writing is None:
            if split.text_s <= 0:
                return False
            entry.writing = TextEntry(file.elapsed_s() + split.text_s, trainer.text_tokens())
            file.save()
            say(
                f"more text first, about {human_time(split.text_s)}: {split.epoch_tokens:.0f}"
                f" tokens a pass instead of {trainer.text_tokens()} teach more than further epochs"
            )
        start, before = file.clock(), entry.writing.before
        trainer.texts.growth.grow(max(0.0, entry.writing.ends_at_s - file.elapsed_s()))
        entry.texts = (*entry.texts, replace(entry.writing, after=trainer.text_tokens()))
        entry.writing = None
        file.step("more text", file.clock() - start)
        return trainer.text_tokens() > before


def work(shape: Architecture) -> float:
    """Parameters of a training token: the layers and the head's rows (the embedding is a
    lookup)."""
    return pass_parameters(shape) + 1e6


def equal_tokens(seconds: float, speeds: Sequence[float], done: Sequence[int]) -> int:
    """The tokens that all drafts reach when `seconds` of training are shared so that they end
    level. `speeds`: tokens/s; `done`: tokens behind each. Never less than a tenth more than the
    furthest has: what is over cannot be taken back."""
    behind_s = sum(tokens / speed for tokens, speed in zip(done, speeds, strict=True))
    level = (seconds + behind_s) / sum(1.0 / speed for speed in speeds)
    return max(1, int(level), max(done) * 11 // 10)


def train_alike(
    trainer: DraftTrainer,
    shapes: Sequence[Architecture],
    tokens: int,
    left_s: Callable[[], float],
    seed: int,
    shared: SharedWork | None,
) -> list[TrainedDraft]:
    """Train every shape to `tokens` in all; `shared`: together with others. Where the machine has
    slowed down since, the best one's time pays for it; a draft gets its part of what is left, so it
    may end short of `tokens`: `best_of` knows."""

    def limit_s(shape: Architecture, parts: int) -> float:
        return trainer.spent(shape)[1] + max(left_s() / parts, LEAST_TRAINING_S)

    drafts = []
    if shared is not None and len(shapes) > 1:
        jobs = [Job("full", shape, tokens, seed, limit_s(shape, 1)) for shape in shapes]
        shared.finish(jobs, lambda job: train_job(job, trainer))
    for place, shape in enumerate(shapes):  # what is trained as far is measured, not trained again
        label = f"finalist {place + 1}/{len(shapes)}"
        limit = limit_s(shape, len(shapes) - place)
        draft = trainer.train(shape, limit, seed, label, tokens=tokens)
        if draft.tokens and draft.tokens < (1.0 - SAME_TOKENS) * tokens and not draft.stopped:
            say(
                f"{shape.label()} had {draft.tokens} of {tokens} tokens when its time was"
                " over; finalists are compared where all of them have been"
            )
        drafts.append(draft)
    return drafts


def not_judged(draft: TrainedDraft, foreseen: int) -> str:
    """Why the best draft's figures decide nothing about its shape; "" where they do. `foreseen`: at
    the speed measured first."""
    if not draft.tokens or draft.tokens >= LEAST_SEEN * foreseen or draft.stopped:
        return ""
    return (
        f"could not judge {draft.architecture.label()}: it was trained on {draft.tokens} tokens of"
        f" the {foreseen} that its plan foresaw, because the machine was busy or text took longer;"
        " go on with the same --run and a larger --time-budget"
    )


def best_of(drafts: Sequence[TrainedDraft], scorer: Scorer) -> int:
    """The index of the draft with the largest speed-up. Drafts that ended at unlike tokens are
    compared by their curves before the anneal, at the last tokens that all of these reach; one that
    has learnt what its text can teach is complete."""
    most = max(draft.tokens for draft in drafts)
    level = all(draft.stopped or most - draft.tokens <= SAME_TOKENS * most for draft in drafts)
    if level or not all(draft.points for draft in drafts):
        scores = [draft.score(scorer) for draft in drafts]
    else:
        common = min(draft.points[-1][0] for draft in drafts)
        scores = [_score_at(draft, common, scorer) for draft in drafts]
    return max(range(len(drafts)), key=lambda i: scores[i].speedup.value)


def _score_at(draft: TrainedDraft, tokens: int, scorer: Scorer) -> Score:
    """As it was after `tokens` tokens, by its learning curve."""
    xs, ys = zip(*((math.log(seen), alpha) for seen, alpha in draft.points), strict=True)
    alpha = Estimate(float(np.interp(math.log(tokens), xs, ys)), 0.0, "modelled")
    taus = {gamma: speculation.tau_estimate(alpha, gamma) for gamma in draft.tau}
    return scorer.measured(draft.architecture, alpha, taus)
