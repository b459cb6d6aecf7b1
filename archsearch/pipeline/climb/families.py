"""Heads in a climb: the families of drafters compete for its minutes, not only the shapes of one.

Beside the rounds of short trainings every family of heads that was asked for has one of its own; a
head that cannot win any more after it is dropped. Half of the time for full trainings then goes to
all families alike (the finalists among the independent drafts count as one), half to the family
that stands best after it. Independent drafts always have their part: ranks and exports are of them.
Everything decided is in rungs.json before it is done, and heads have the checkpoints and curves of
drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from archsearch import speedup as speculation
from archsearch.drafts.heads import HeadPlan, TrainedHead
from archsearch.drafts.records import TrainedDraft
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.models.drafters import HeadFamily
from archsearch.pipeline.finalists import ALL_SHARE
from archsearch.progress import human_time, say
from archsearch.runs.state import HeadEntry, Race
from archsearch.search import rungs
from archsearch.search.objective import Score
from archsearch.training.curves import MEASURED, effective_tokens, growth

if TYPE_CHECKING:
    from archsearch.pipeline.climb.climb import Climb

INDEPENDENT: Final = "independent"
HEAD_RUNG: Final = 0.25  # of the time of the drafts' rounds: a head's short training
LEAST_SHORT_S: Final = 10.0  # below that a head has seen nothing
LEAST_HEAD_S: Final = 20.0
LEAST_JUDGED: Final = 40_000
"""Tokens that a head must have seen before it may be dropped: its learning rate rises for 20,000.
An EAGLE-3 head that had seen 6,700 was to accept 4 % of its tokens; another accepted 63 % after
110,000 (benchmarks/results/2026-11-22-heads)."""
FORESEEN_STD: Final = (
    0.15  # of logit(alpha), besides that of the curve: heads' curves were measured on one text only
)


@dataclass(frozen=True)
class HeadRungs:
    """The heads of a climb. `gammas`: of each family that was asked for, the draft tokens a round
    that it is trained for; `train`: to so many seconds in all, going on where the head stands;
    `score`: by what was measured of it at the taus given (None: its own)."""

    gammas: Mapping[HeadFamily, int]
    train: Callable[[HeadPlan, float], TrainedHead]
    score: Callable[[TrainedHead, dict[int, Estimate] | None], Score]

    @property
    def families(self) -> tuple[HeadFamily, ...]:
        return tuple(self.gammas)

    @property
    def rung_divisor(self) -> float:
        """What the time of short trainings is divided by, so that the heads' fit into it."""
        return 1.0 + HEAD_RUNG * len(self.families)

    def plan(self, family: HeadFamily) -> HeadPlan:
        return HeadPlan.usual(family, self.gammas[family])


def short_trainings(climb: Climb) -> None:
    """One short training of each family of heads, and who of them is dropped after it."""
    heads, state = climb.heads, climb.state
    if heads is None:
        return
    seconds = HEAD_RUNG * (state.rung_s or rungs.rung_share(climb.left_s()) / heads.rung_divisor)
    known = {entry.family for entry in state.heads}
    for family in heads.families:
        if family in known:
            continue
        if seconds < LEAST_SHORT_S or climb.left_s() < 2 * seconds:
            climb.file.note(
                f"no {family} head: {human_time(seconds)} for a short training are too few"
            )
            continue
        start = climb.file.clock()
        try:
            head = heads.train(heads.plan(family), seconds)
        except ArchsearchError as error:
            climb.file.note(f"no {family} head: {error}")
            continue
        climb.file.step("heads", climb.file.clock() - start)
        state.heads.append(_entry(climb, heads, head))
        climb.file.save()
    _drop(climb)


def _entry(climb: Climb, heads: HeadRungs, head: TrainedHead) -> HeadEntry:
    """A head after its short training: where it stands, and where a full one would take it."""
    plan, left = head.plan, climb.left_s()
    score = heads.score(head, None)
    rivals = 1 + len(heads.families)
    full_s = ALL_SHARE * left / rivals + (1.0 - ALL_SHARE) * left
    tokens, seconds = int(head.record["tokens"]), max(float(head.record["seconds"]), 1e-3)
    epoch = max(int(head.record.get("text_tokens", 0)), 1)
    end = tokens * max(1.0, (seconds + full_s) / seconds)
    rise = growth(MEASURED, effective_tokens(tokens, epoch), effective_tokens(end, epoch))
    later = heads.score(head, risen(head, rise.value))
    wide = heads.score(head, risen(head, rise.value + math.hypot(rise.std, FORESEEN_STD)))
    std = math.hypot(later.speedup.std, wide.speedup.value - later.speedup.value)
    foreseen = Estimate(later.speedup.value, std, "modelled")
    return HeadEntry(plan.family, score.gamma, seconds, tokens, score.speedup, foreseen, "kept", "")


def risen(head: TrainedHead, logits: float) -> dict[int, Estimate]:
    """Tokens a round by gamma where every conditional acceptance is `logits` higher: as far as
    uniform chains gain, rounds do."""
    before = [speculation.clamped(share) for share in head.conditional]
    after = [speculation.sigmoid(speculation.logit(share) + logits) for share in before]
    found = {}
    for gamma, replay in head.replays.items():
        now, then = (1.0 + float(np.cumprod(shares[:gamma]).sum()) for shares in (before, after))
        tau = replay.estimate()
        found[gamma] = Estimate(min(tau.value * then / now, gamma + 1.0), tau.std, "modelled")
    return found


def _drop(climb: Climb) -> None:
    """Heads that neither the best draft nor another head leaves a chance."""
    kept = [entry for entry in climb.state.heads if entry.state == "kept"]
    if not kept:
        return
    leader = climb.standings()[0]
    places = {entry.family: entry.foreseen for entry in kept} | {INDEPENDENT: leader.speedup}
    logs = {
        name: (math.log(score.value), score.std / score.value) for name, score in places.items()
    }
    for entry in kept:
        others = [place for name, place in logs.items() if name != entry.family]
        few = entry.tokens < LEAST_JUDGED
        if rungs.beaten(*logs[entry.family], others) and not few:
            best = max(places, key=lambda name: places[name].value)
            entry.state = "pruned"
            entry.why = (
                f"cannot win: {entry.foreseen.value:.2f}x foreseen, {best}"
                f" {places[best].value:.2f}x"
            )
        words = entry.why or f"{entry.foreseen.value:.2f} ± {entry.foreseen.std:.2f}x foreseen"
        words = "too few to judge it by" if few else words
        say(
            f"rung 1, {entry.family}: {entry.tokens} tokens in {human_time(entry.seconds)}; {words}"
        )
    climb.file.save()


def draft_share(climb: Climb) -> float:
    """The part of the time for full trainings that the independent drafts have before families are
    compared."""
    rivals = sum(entry.state == "kept" for entry in climb.state.heads)
    return ALL_SHARE / (1 + rivals) if rivals else 1.0


def race(climb: Climb, drafts: list[TrainedDraft]) -> list[TrainedDraft]:
    """Train the heads that are left as long as the best draft was, then the best family with the
    time that remains; the drafts, the best of them trained on where it won."""
    heads, state = climb.heads, climb.state
    rivals = [entry for entry in state.heads if entry.state in ("kept", "trained")]
    if heads is None or not rivals or not drafts:
        return drafts
    best = max(range(len(drafts)), key=lambda i: climb.measured(drafts[i]).speedup.value)
    if state.race is None:
        spent = climb.trainer.spent(drafts[best].architecture)[1]
        state.race = Race(max(LEAST_HEAD_S, min(spent, climb.left_s() / (1 + len(rivals)))))
        climb.file.save()
    for entry in rivals:
        _train(climb, heads, entry, state.race.seconds)
    places: dict[str, float] = {
        entry.family: entry.measured.value for entry in rivals if entry.state == "trained"
    }
    places[INDEPENDENT] = climb.measured(drafts[best]).speedup.value
    if not state.race.winner:
        _decide(climb, state.race, places)
    if climb.left_s() > LEAST_HEAD_S:
        start = climb.file.clock()
        if state.race.winner == INDEPENDENT:
            shape = drafts[best].architecture
            seconds = climb.trainer.spent(shape)[1] + climb.left_s()
            drafts[best] = climb.trainer.train(
                shape, seconds, climb.session.request.seed, "the best family"
            )
        else:
            entry = next(entry for entry in rivals if entry.family == state.race.winner)
            _train(climb, heads, entry, entry.seconds + climb.left_s())
        climb.file.step("the best family", climb.file.clock() - start)
    return drafts


def _decide(climb: Climb, race: Race, places: dict[str, float]) -> None:
    order = sorted(places, key=lambda name: -places[name])
    race.winner = order[0]
    words = ", ".join(f"{name} {places[name]:.2f}x" for name in order)
    climb.file.note(
        f"families after {human_time(race.seconds)} of training each: {words}; the time that was"
        f" left went to {order[0]}"
    )
    climb.file.save()


def _train(climb: Climb, heads: HeadRungs, entry: HeadEntry, seconds: float) -> None:
    """Train a head to `seconds` in all and write down where it stands; one that fails is dropped:
    it is no reason to lose a search."""
    start = climb.file.clock()
    try:
        head = heads.train(heads.plan(entry.family), seconds)
    except ArchsearchError as error:
        entry.state, entry.why = "dropped", str(error)
        climb.file.note(f"no {entry.family} head: {error}")
    else:
        score = heads.score(head, None)
        changes = replace(
            entry,
            gamma=score.gamma,
            seconds=float(head.record["seconds"]),
            tokens=int(head.record["tokens"]),
            measured=score.speedup,
            state="trained",
            why="",
        )
        vars(entry).update(vars(changes))
    climb.file.step("heads", climb.file.clock() - start)
    climb.file.save()
