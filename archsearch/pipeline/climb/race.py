"""Heads among the candidates of a search: the families of drafters compete for its minutes
(docs/families.md, "One climb over families"). Everything decided is in rungs.json before it is
done. Ranks and exports are of independent drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from archsearch import speedup as speculation
from archsearch.drafts.heads import HeadPlan, HeadRecord, TrainedHead
from archsearch.drafts.records import TrainedDraft
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.models.files import HeadFamily
from archsearch.pipeline.climb.trainings import ALL_SHARE, Trainings
from archsearch.progress import human_time, say
from archsearch.runs.state import HeadEntry, Race, StateFile
from archsearch.search import rungs
from archsearch.search.objective import Score
from archsearch.training.curves import MEASURED, effective_tokens, growth

INDEPENDENT: Final = "independent"
HEAD_RUNG: Final = 0.25  # of the time of the drafts' rounds: a head's short training
LEAST_SHORT_S: Final = 10.0  # below that a head has seen nothing
LEAST_HEAD_S: Final = 20.0
LEAST_JUDGED: Final = 40_000
"""Tokens that a head must have seen before it may be dropped: its learning rate rises for 20,000.
An EAGLE-3 head that had seen 6,700 was to accept 4 % of its tokens; another accepted 63 % after
110,000 (benchmarks/results/2026-11-22-heads)."""
# of logit(alpha), besides that of the curve: heads' curves were measured on few texts
FORESEEN_STD: Final = 0.15


@dataclass(frozen=True)
class HeadRungs:
    """The heads of a search. `gammas`: by family that was asked for, the draft tokens a round that
    it is trained for; `train`: to so many seconds in all; `score`: by what was measured of it, at
    the taus given (None: its own)."""

    gammas: Mapping[HeadFamily, int]
    train: Callable[[HeadPlan, float], TrainedHead]
    score: Callable[[TrainedHead, dict[int, Estimate] | None], Score]

    @property
    def rung_divisor(self) -> float:
        """What the time of short trainings is divided by, so that the heads' fit into it."""
        return 1.0 + HEAD_RUNG * len(self.gammas)

    def trained(self, entry: HeadEntry, seconds: float, file: StateFile) -> TrainedHead | None:
        """The head of an entry, trained to `seconds` in all; None, noted, for one that fails."""
        start = file.clock()
        try:
            head = self.train(HeadPlan.usual(entry.family, self.gammas[entry.family]), seconds)
        except ArchsearchError as error:
            entry.state, entry.why = "dropped", str(error)
            file.note(f"no {entry.family} head: {error}")
            return None
        score = self.score(head, None)
        entry.gamma, entry.measured = score.gamma, score.speedup
        entry.tokens, entry.seconds = head.record.tokens, head.record.seconds
        file.step("heads", file.clock() - start)
        return head


def short_trainings(
    heads: HeadRungs, file: StateFile, left_s: Callable[[], float], leader: Score
) -> None:
    """One short training of each family of heads; those go that the best draft (`leader`) or
    another head leaves no chance."""
    state = file.state
    seconds = HEAD_RUNG * (state.rung_s or rungs.rung_share(left_s()) / heads.rung_divisor)
    known = {entry.family for entry in state.heads}
    for family, gamma in heads.gammas.items():
        if family in known:
            continue
        if seconds < LEAST_SHORT_S or left_s() < 2 * seconds:
            file.note(f"no {family} head: {human_time(seconds)} for a short training are too few")
            continue
        entry = HeadEntry(family, gamma)
        head = heads.trained(entry, seconds, file)
        if head is not None:
            entry.foreseen = _foreseen(heads, head, left_s())
            state.heads.append(entry)
            file.save()
    _drop(state.heads, leader)
    file.save()


def _foreseen(heads: HeadRungs, head: TrainedHead, left_s: float) -> Estimate:
    full_s = ALL_SHARE * left_s / (1 + len(heads.gammas)) + (1.0 - ALL_SHARE) * left_s
    tokens, seconds = head.record.tokens, max(head.record.seconds, 1e-3)
    epoch = head.record.epoch_tokens or max(head.record.text_tokens, 1)
    end = tokens * max(1.0, (seconds + full_s) / seconds)
    rise = growth(MEASURED, effective_tokens(tokens, epoch), effective_tokens(end, epoch))
    later = heads.score(head, risen(head, rise.value)).speedup
    wide = heads.score(head, risen(head, rise.value + math.hypot(rise.std, FORESEEN_STD))).speedup
    return Estimate(later.value, math.hypot(later.std, wide.value - later.value), "modelled")


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


def _drop(entries: list[HeadEntry], leader: Score) -> None:
    kept = [entry for entry in entries if entry.state == "kept" and entry.foreseen]
    known: dict[str, Estimate] = {each.family: at for each in kept if (at := each.foreseen)}
    if not known:
        return
    known[INDEPENDENT] = leader.speedup
    logs = {name: (math.log(at.value), at.relative_std) for name, at in known.items()}
    best = max(known, key=lambda name: known[name].value)
    for entry in kept:
        words = f"{known[entry.family].words()}x foreseen"
        if entry.tokens < LEAST_JUDGED:
            words = "too few to judge it by"
        elif rungs.beaten(
            *logs[entry.family], [at for name, at in logs.items() if name != entry.family]
        ):
            entry.state = "pruned"
            words = entry.why = (
                f"cannot win: {known[entry.family].value:.2f}x foreseen, {best}"
                f" {known[best].value:.2f}x"
            )
        say(
            f"rung 1, {entry.family}: {entry.tokens} tokens in {human_time(entry.seconds)}; {words}"
        )


def race(
    heads: HeadRungs,
    trainings: Trainings,
    drafts: list[TrainedDraft],
    measured: Callable[[TrainedDraft], Score],
    left_s: Callable[[], float],
) -> list[TrainedDraft]:
    """Train the heads that are left as long as the best draft was, then the best family with the
    time that remains, on more text where it has learnt what there is; the drafts, the best trained
    on where it won."""
    file, state = trainings.file, trainings.file.state
    rivals = [entry for entry in state.heads if entry.state in ("kept", "trained")]
    if not rivals or not drafts:
        return drafts
    best = max(range(len(drafts)), key=lambda i: measured(drafts[i]).speedup.value)
    shape = drafts[best].architecture
    if state.race is None:
        spent = trainings.trainer.spent(shape)[1]
        state.race = Race(max(LEAST_HEAD_S, min(spent, left_s() / (1 + len(rivals)))))
        file.save()

    def train(entry: HeadEntry, seconds: float) -> HeadRecord | None:
        head = heads.trained(entry, seconds, file)
        if head is not None:
            entry.state, entry.why = "trained", ""
        file.save()
        return None if head is None else head.record

    for entry in rivals:
        train(entry, state.race.seconds)
    places: dict[str, float] = {
        entry.family: entry.measured.value
        for entry in rivals
        if entry.state == "trained" and entry.measured is not None
    }
    places[INDEPENDENT] = measured(drafts[best]).speedup.value
    if not state.race.winner:
        order = sorted(places, key=lambda name: -places[name])
        state.race.winner = order[0]
        words = ", ".join(f"{name} {places[name]:.2f}x" for name in order)
        file.note(
            f"families after {human_time(state.race.seconds)} of training each: {words}; the time"
            f" that was left went to {order[0]}"
        )
        file.save()
    if left_s() > LEAST_HEAD_S:
        start = file.clock()
        if state.race.winner == INDEPENDENT:
            drafts[best] = trainings.longer(shape, left_s(), "the best family", "the best family")
        else:
            entry = next(entry for entry in rivals if entry.family == state.race.winner)
            if record := train(entry, entry.seconds + left_s()):
                file.step("the best family", file.clock() - start)
                trainings.on_more_text(
                    record,
                    f"the {entry.family} head",
                    record.tokens_per_s,
                    left_s,
                    lambda more_s: (  # one that fails ends it
                        train(entry, entry.seconds + more_s) or replace(record, stopped="")
                    ),
                )
    return drafts
