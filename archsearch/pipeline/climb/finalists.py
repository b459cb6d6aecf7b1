"""The last rung: one to three drafts are trained in full with the time that is left, half for all
alike, half for the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from archsearch.acceptance.estimator import AcceptanceObservation
from archsearch.architecture.architecture import Architecture
from archsearch.drafts.records import TrainedDraft
from archsearch.files import read_json
from archsearch.pipeline.climb.belief import slope
from archsearch.pipeline.climb.families import draft_share, race
from archsearch.pipeline.climb.minutes import LEAST_WRITING_S, split_minutes, write_more
from archsearch.pipeline.finalists import (
    ALL_SHARE,
    best_of,
    equal_tokens,
    foreseen_tokens,
    not_judged,
    train_alike,
)
from archsearch.progress import human_time, say
from archsearch.runs.state import FinalistsEntry, Longer
from archsearch.search import rungs

if TYPE_CHECKING:
    from archsearch.pipeline.climb.climb import Climb


def train_in_full(climb: Climb) -> list[TrainedDraft]:
    """Choose the finalists, train them and write down what they reached; in the order of
    training."""
    entry = climb.state.finalists or _choose(climb)
    drafts = race(climb, _train(climb, entry))
    _record(climb, entry, drafts)
    context = replace(climb.scorer.context, temperature=0.0)
    climb.belief.learn(
        [AcceptanceObservation(draft.architecture, draft.alpha, context) for draft in drafts]
    )
    return drafts


def _choose(climb: Climb) -> FinalistsEntry:
    """As many as promise the best end: each one more shares the time."""
    belief, request = climb.belief, climb.session.request
    budget = climb.left_s() * draft_share(climb)
    if belief.shorts:
        climb.aim(budget)  # by the speeds that are known now
    belief.learn()
    scores = climb.contenders() or climb.standings()
    if climb.state.rounds:  # what was measured goes before what is only believed
        scores = [score for score in scores if score.architecture in belief.shorts] or scores
    wanted = max(1, request.confirm)
    most = max(wanted, min(3, request.finalists))
    loss = slope(scores[0]) * belief.end_slope()
    count = max(wanted, rungs.finalist_count(belief.draws(scores[: 2 * most]), loss, most))
    chosen = scores[:count]
    entry = FinalistsEntry(
        tuple(score.architecture for score in chosen),
        ends_at_s=climb.file.elapsed_s() + budget,
        predicted=tuple(chosen),
    )
    climb.state.finalists = entry
    climb.file.save()
    return entry


def _train(climb: Climb, entry: FinalistsEntry) -> list[TrainedDraft]:
    """All to equal tokens, then the best as long as there is time. Every choice is written before
    it is acted on.

    More text comes first where it promises more than epochs, and again where a draft has learnt
    what its text can teach.
    """
    file, trainer, seed = climb.file, climb.trainer, climb.session.request.seed

    def left_s() -> float:
        return max(0.0, entry.ends_at_s - file.elapsed_s())

    if entry.tokens is None and entry.longer is None and not entry.texts:
        write_more(climb, entry, split_minutes(climb, entry.shapes[0], left_s()))
    alone = len(entry.shapes) == 1
    if entry.longer is None and entry.foreseen is None:
        done = [trainer.spent(shape)[0] for shape in entry.shapes]
        speeds = [climb.costs.speed(shape) for shape in entry.shapes]
        if not alone and entry.tokens is None:
            entry.tokens = equal_tokens(ALL_SHARE * left_s(), speeds, done)
        alone_s = left_s() * (1.0 if alone else 1.0 - ALL_SHARE)
        entry.foreseen = foreseen_tokens(entry.tokens or done[0], alone_s, speeds)
        file.save()
    names = ", ".join(shape.label() for shape in entry.shapes)
    say(f"rung 2: full training, about {human_time(left_s())}: {names}")
    start = file.clock()
    drafts = (
        []
        if entry.tokens is None
        else train_alike(trainer, entry.shapes, entry.tokens, left_s, seed, climb.shared)
    )
    if entry.longer is None:
        best = 0 if alone else best_of(drafts, climb.session.scorer)
        entry.longer = Longer(best, trainer.spent(entry.shapes[best])[1] + left_s())
        file.step("finalists", 0.0)
    best = entry.longer.index
    drafts[best : best + 1] = [
        trainer.train(entry.shapes[best], entry.longer.seconds, seed, "the best finalist")
    ]
    file.step("finalists", file.clock() - start)
    drafts[best] = _go_on(climb, entry, drafts[best], left_s)
    why = not_judged(drafts[best], entry.foreseen[best]) if entry.foreseen else ""
    if why:
        file.note(why)
    file.save()
    return drafts


def _go_on(
    climb: Climb, entry: FinalistsEntry, draft: TrainedDraft, left_s: Callable[[], float]
) -> TrainedDraft:
    """While a draft has learnt what its text can teach and there is time: more text, and on with
    it. What is left after that is given back."""
    shape, file = draft.architecture, climb.file
    while draft.stopped and left_s() > LEAST_WRITING_S:
        split = split_minutes(climb, shape, left_s())
        if not write_more(climb, entry, split):
            file.note(
                f"{shape.label()} had learnt what its text can teach after {draft.tokens} tokens,"
                f" {draft.tokens / max(climb.trainer.text_tokens(), 1):.0f} times the text;"
                f" {human_time(left_s())} were not needed; more prompts (--prompts) would bring"
                " more"
            )
            break
        start = file.clock()
        seconds = climb.trainer.spent(shape)[1] + left_s()
        draft = climb.trainer.train(
            shape, seconds, climb.session.request.seed, "the best finalist, on more text"
        )
        file.step("finalists", file.clock() - start)
    return draft


def _record(climb: Climb, entry: FinalistsEntry, drafts: Sequence[TrainedDraft]) -> None:
    """What the finalists reached, in rungs.json; all others are dropped."""
    predicted = {score.architecture: score.alpha for score in entry.predicted}
    for draft in drafts:
        shape, score = draft.architecture, climb.measured(draft)
        training = read_json(draft.folder / "training.json", "training record")
        row = climb.row(2, 0, score, "trained", "measured on held-out text")
        climb.state.record(
            replace(
                row,
                tokens=training["tokens"],
                seconds=training["seconds"],
                measured=None,
                predicted_alpha=predicted[shape],
            )
        )
    _drop_others(climb, entry.shapes)
    climb.file.save()


def _drop_others(climb: Climb, finalists: Sequence[Architecture]) -> None:
    """The last row of every short training that led to no full one says so."""
    rows = climb.state.rungs
    last_round: dict[Architecture, int] = {}
    for row in rows:
        if row.rung == 1:
            last_round[row.shape] = max(row.round, last_round.get(row.shape, 0))
    for number, row in enumerate(rows):
        if (
            row.rung == 1
            and row.state == "kept"
            and row.shape not in finalists
            and row.round == last_round[row.shape]
        ):
            rows[number] = replace(
                row, state="dropped", why="not chosen for the next round or the finalists"
            )
