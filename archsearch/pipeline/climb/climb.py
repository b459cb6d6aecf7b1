"""The climb itself: rounds of short trainings, each on fewer shapes for longer, then the full
training of the best; a plan without rounds trains the prior's best.

Everything is in rungs.json before the next step begins and every training has its own checkpoint:
no shape is trained twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from archsearch.acceptance.estimator import AcceptanceObservation
from archsearch.architecture.architecture import Architecture
from archsearch.drafts.records import TrainedDraft, read_curve
from archsearch.drafts.trainer import choose_finalists
from archsearch.pipeline.climb import race
from archsearch.pipeline.climb.belief import Belief
from archsearch.pipeline.climb.trainings import ALL_SHARE, Trainings
from archsearch.progress import human_time, say
from archsearch.runs.state import (
    ClimbState,
    Fate,
    FinalistsEntry,
    HeadEntry,
    Look,
    PriorRung,
    RoundEntry,
    RungRow,
)
from archsearch.search import rungs
from archsearch.search.objective import Score, Scorer
from archsearch.search.rungs import Plan, Round
from archsearch.search.space import SearchSpace, numeric_values
from archsearch.search.space_file import Value

POOL: Final = 48  # candidates that a choice is made among
LEAST_PICK: Final = 0.0005  # ln(speed-up): a shape that promises less is not trained to be compared
LEAST_FINALIST_SHARE: Final = 0.05  # of the budget: with less left, a full training is none
PROBE_TOKENS: Final = 4_000  # to learn how fast each draft trains; they count as its first tokens
PROBE_SHARE: Final = 0.05  # of the time for full trainings, at most, for each of these


@dataclass
class Climb:
    """A search that trains, in progress. `space`: of the independent drafts, `pool`: its shapes
    that are looked at, best first; `out`: those that cannot win, and why; `wanted`, `most`: how
    many finalists; `heads`: of the other families that were asked for."""

    space: SearchSpace
    plan: Plan
    trainings: Trainings
    belief: Belief
    pool: dict[Architecture, None]
    heads: race.HeadRungs
    wanted: int = 1
    most: int = 3
    out: dict[Architecture, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.belief.shorts = self.trainings.shorts
        self.file, self.judge = self.trainings.file, self.belief.scorer

    @property
    def state(self) -> ClimbState:
        return self.file.state

    @property
    def scorer(self) -> Scorer:
        """Scores by what is known now."""
        return self.belief.scorer

    def climb(self) -> list[TrainedDraft]:
        """Rounds of short trainings, or none, then the finalists and the heads that are left; in
        the order of training."""
        if self.plan.climbs:
            self._short_trainings()
        else:
            self._begin_without_rounds()
        left_s = self.left_s()
        if self.state.finalists is None and left_s < LEAST_FINALIST_SHARE * self.plan.budget_s:
            self.file.note(
                f"no draft was trained in full: {human_time(left_s)} were left of"
                f" {human_time(self.plan.budget_s)}; give a larger --time-budget to go on from here"
            )
            self.file.save()
            return []
        entry = self.state.finalists or self._choose_finalists()
        if not self.plan.climbs and entry.foreseen is None:
            for shape in entry.shapes:
                limit_s = PROBE_SHARE * self.plan.finalist_s
                self.trainings.short(shape, PROBE_TOKENS, f"{shape.label()}: speed", limit_s)
        drafts = self.trainings.finalists(entry, self.judge)
        drafts = race.race(self.heads, self.trainings, drafts, self.measured, self.left_s)
        self._record(entry, drafts)
        if self.plan.climbs:
            context = replace(self.scorer.context, temperature=0.0)
            own = [AcceptanceObservation(each.architecture, each.alpha, context) for each in drafts]
            self.belief.learn(own)
        return drafts

    def _short_trainings(self) -> None:
        self.belief.learn()
        first = self.contenders()
        self._record_prior(first, "could still win")
        say(f"rung 0: {len(self.pool)} shapes scored by the prior, {len(first)} could still win")
        self._recall()
        if self.state.finalists is None:
            self.rounds(first)
            if self.heads.gammas:
                race.short_trainings(self.heads, self.file, self.left_s, self.standings()[0])

    def _begin_without_rounds(self) -> None:
        if self.state.finalists is None or self.state.rung_end_s is None:
            self.state.rung_end_s = self.file.elapsed_s()
            self.file.save()
        known = {entry.family for entry in self.state.heads}
        new = (each for each in self.heads.gammas.items() if each[0] not in known)
        self.state.heads += [HeadEntry(*each) for each in new]

    def rounds(self, first: Sequence[Score]) -> None:
        """Successive halving, until one is left, the seconds are gone or knowing more brings
        nothing."""
        if len(first) < 2:
            self.file.note("rung 1: left out, the prior leaves one candidate")
            return
        rest = self.left_s()
        if rest <= 0.0:
            self.file.note("rung 1: left out, the time is spent")
            return
        rung_s = self._rung_time(rest)
        if not self.state.rounds:  # the machine's speed decides how many more can be
            label = "the prior's best, to learn the machine's speed"
            self.trainings.short(first[0].architecture, rungs.FIRST_TOKENS, label, rung_s / 6)
        if not self.belief.shorts:
            return
        if self.belief.full_tokens is None:
            self.aim(rest - rungs.rung_share(rest))
        schedule = self._schedule(first)
        if not schedule:
            self.file.note(
                "rung 1: the time is too short to compare shapes by training; the prior's best is"
                " trained"
            )
            return
        words = ", then ".join(f"{step.places} shapes to {step.tokens} tokens" for step in schedule)
        say(
            f"rung 1: short trainings, about {human_time(rung_s)}: {words}"
            f" ({self.trainings.mean_speed(first):.0f} tokens/s measured)"
        )
        for number, step in enumerate(schedule, start=1):
            if not self.round(number, step, len(schedule)):
                break

    def round(self, number: int, step: Round, of: int) -> bool:
        """One round: choose, train to equal tokens, learn, drop. False where the climb over rungs
        ends here."""
        entry = self.state.round(number)
        if entry is not None and entry.done:
            return not entry.end
        entry = entry or self._choose(number, step)
        if entry is None:
            return False
        start = self.file.clock()
        self.trainings.shorts_together(entry.shapes, entry.tokens)
        for place, shape in enumerate(entry.shapes, start=1):
            label = f"round {number}/{of}, shape {place}/{len(entry.shapes)}"
            self.trainings.short(shape, entry.tokens, label)
        self.belief.learn()
        entry.seconds = (entry.seconds or 0.0) + self.file.clock() - start
        self._judge(entry)
        entry.done = True
        entry.end = sum(shape not in self.out for shape in self.pool) < 2
        self.file.save()
        best = self.standings()[0]
        new = "" if best.architecture in self.belief.shorts else ", not trained yet"
        say(
            f"rung 1, round {number}: {len(entry.shapes)} shapes at {entry.tokens} tokens in"
            f" {human_time(entry.seconds)}; best {best.architecture.label()}"
            f" {best.speedup.words()}{new}; {len(self.contenders())}"
            " could still win"
        )
        return not entry.end

    # -- ranking

    def standings(self) -> list[Score]:
        """Scores of all that are still in, best first."""
        scores = [self.scorer(shape) for shape in self.pool if shape not in self.out]
        return sorted(scores, key=_order)

    def contenders(self) -> list[Score]:
        """Those that could still win, best first; at most POOL, the most promising."""
        scores = self.standings()
        if not scores:
            return []
        kept = [score for score, can in zip(scores, self._alive(scores), strict=True) if can]
        # The best of every depth: many shapes of one depth must not crowd the others out.
        depths: dict[int, list[Score]] = {}
        for score in kept:
            depths.setdefault(score.architecture.num_hidden_layers, []).append(score)
        each = max(2, POOL // len(depths))
        pool = [score for group in depths.values() for score in group[:each]]
        pool += [score for score in kept if score not in pool][: max(0, POOL - len(pool))]
        return sorted(pool, key=_order)

    def _alive(self, scores: Sequence[Score]) -> list[bool]:
        values = [math.log(score.worth) for score in scores]
        gaps = self.belief.score_gap_std
        return rungs.contenders(values, lambda i, j: gaps(scores[i], scores[j]))

    def expand_neighbourhood(self) -> None:
        """Take the neighbours of the best into the pool: it may have moved to where rung 0 did not
        look."""
        space, target = self.space, self.scorer.target
        for score in self.standings()[:5]:
            shape = score.architecture
            slides = "S" in shape.window_pattern
            window = shape.window_pattern + (str(shape.sliding_window) if slides else "")
            wanted: dict[str, Value] = {
                **numeric_values(shape),
                "tie_word_embeddings": shape.tie_word_embeddings,
                "window": window,
            }
            for indices in space.neighbours(space.nearest(wanted, target), target):
                found = space.build(indices, target)
                if not isinstance(found, Architecture) or found in self.pool:
                    continue
                if self.scorer.feasible(found):
                    self.pool[found] = None

    def measured(self, draft: TrainedDraft) -> Score:
        return draft.score(self.judge)

    # -- time

    def left_s(self) -> float:
        plan, elapsed_s = self.plan, self.file.elapsed_s()
        left_s = rungs.training_s(plan.budget_s, elapsed_s, plan.confirm_s)
        if plan.climbs:
            return left_s
        assert self.state.rung_end_s is not None
        least_s = rungs.LEAST_ASKED_SHARE * plan.budget_s
        return max(left_s, self.state.rung_end_s + least_s - elapsed_s)

    def aim(self, seconds: float) -> None:
        """What a full training in `seconds` is foreseen to see, with the text worth writing before
        it."""
        by_speed = sorted(self.belief.shorts.values(), key=lambda short: short.tokens_per_s)
        split = self.trainings.split_minutes(by_speed[len(by_speed) // 2].architecture, seconds)
        tokens = max(rungs.FIRST_TOKENS, int(split.tokens))
        self.belief.full_tokens = self.state.full_tokens = tokens
        self.belief.full_epoch = self.state.full_epoch = int(split.epoch_tokens)
        self.file.save()

    def _rung_time(self, rest_s: float) -> float:
        """Seconds that the short trainings have; when they end is written down the first time."""
        rung_s = self.state.rung_s or rungs.rung_share(rest_s) / self.heads.rung_divisor
        if self.state.rung_end_s is None:
            self.state.rung_s, self.state.rung_end_s = rung_s, self.file.elapsed_s() + rung_s
            self.file.save()
        return rung_s

    def _rung_left_s(self) -> float:
        """Until the short trainings end; negative where they are late."""
        assert self.state.rung_end_s is not None
        return self.state.rung_end_s - self.file.elapsed_s()

    def _schedule(self, first: Sequence[Score]) -> list[Round]:
        """The rounds, as planned at the speed that was measured; written down once."""
        if not self.state.schedule:
            seconds = max(0.0, self._rung_left_s())
            if not self.state.rounds:  # the first need not train the first shape again
                seconds += sum(short.wall_s for short in self.belief.shorts.values())
            speed = self.trainings.mean_speed(first)
            self.state.schedule = rungs.halving(seconds, speed, self.trainings.overhead_s())
            self.file.save()
        return self.state.schedule

    # -- one round

    def _choose(self, number: int, step: Round) -> RoundEntry | None:
        """Who is trained in a round; None, with a note, where there should be none."""
        self.belief.learn()
        self.expand_neighbourhood()
        scores = self.contenders()
        draws = self.belief.draws(scores)  # [draws, scores]
        left = self._rung_left_s()
        gain = rungs.expected_gain(draws)
        if len(scores) < 2 or gain < rungs.LEAST_GAIN:
            why = (
                "one candidate is left"
                if len(scores) < 2
                else f"knowing more would bring {gain:.1%}"
            )
            self.file.note(f"rung 1 ends after round {number - 1}: {why}")
            return None
        share = left * rungs.part_of_round(self.state.schedule, number)
        costs = [self.trainings.cost_s(score.architecture, step.tokens) for score in scores]
        # The first round also asks where the prior is least sure: the best of each depth has a
        # place.
        depths = {
            score.architecture.num_hidden_layers: i
            for i, score in reversed(list(enumerate(scores)))
        }
        # What was trained to learn the speed stays in where it can still win: it costs little.
        probed = [i for i, score in enumerate(scores) if score.architecture in self.belief.shorts]
        first = dict.fromkeys([*probed, *sorted(depths.values())[: math.ceil(step.places / 3)]])
        picks = rungs.best_set(
            draws,
            costs,
            max(share, 0.0) * 1.1,
            most=step.places,
            least=2 if number == 1 else 1,
            least_gain=LEAST_PICK,
            start=tuple(first) if number == 1 else (),
        )
        if number > 1 and costs[next(iter(picks))] > 1.2 * max(left, 0.0):
            self.file.note(f"rung 1 ends after round {number - 1}: its time is spent")
            return None
        shapes, gains = tuple(scores[i].architecture for i in picks), tuple(picks.values())
        entry = RoundEntry(number, step.tokens, shapes, gains, gain, len(scores))
        self.state.rounds.append(entry)
        self.file.save()
        return entry

    def _judge(self, entry: RoundEntry) -> None:
        scores = [self.scorer(shape) for shape in entry.shapes]
        leader = min(scores, key=_order)
        for score, alive in zip(scores, self._alive(scores), strict=True):
            shape = score.architecture
            if not alive and shape not in self.out:
                behind = math.log(leader.worth / score.worth)
                std = self.belief.score_gap_std(leader, score)
                self.out[shape] = (
                    f"cannot win: {behind:.1%} behind {leader.architecture.label()}, std of the"
                    f" difference {std:.1%}"
                )
            fate: Fate = "pruned" if shape in self.out else "kept"
            self.state.record(self.row(1, entry.round, score, fate, self.out.get(shape, "")))

    # -- finalists

    def _choose_finalists(self) -> FinalistsEntry:
        rivals = sum(entry.state == "kept" for entry in self.state.heads)
        # the rest is for the best of the families
        share = ALL_SHARE / (1 + rivals) if rivals else 1.0
        budget_s = self.left_s() * share
        if self.plan.climbs:
            chosen = self._promising(budget_s)
        else:
            chosen = choose_finalists([self.judge(shape) for shape in self.pool], self.most)
            self._record_prior(chosen, "the best, and the best of other depths")
        entry = FinalistsEntry(
            tuple(score.architecture for score in chosen),
            ends_at_s=self.file.elapsed_s() + budget_s,
            predicted=tuple(chosen),
        )
        self.state.finalists = entry
        self.file.save()
        return entry

    def _promising(self, budget_s: float) -> list[Score]:
        """As many as promise the best end: each one more shares the time."""
        belief = self.belief
        if belief.shorts:
            self.aim(budget_s)  # by the speeds that are known now
        belief.learn()
        scores = self.contenders() or self.standings()
        if self.state.rounds:  # what was measured goes before what is only predicted
            scores = [score for score in scores if score.architecture in belief.shorts] or scores
        most = max(self.wanted, min(3, self.most))
        loss = scores[0].slope * belief.end_slope()
        count = rungs.finalist_count(belief.draws(scores[: 2 * most]), loss, most)
        return scores[: max(self.wanted, count)]

    def _record(self, entry: FinalistsEntry, drafts: Sequence[TrainedDraft]) -> None:
        """What the finalists reached; the last row of every short training that led to no full one
        says so."""
        predicted = {score.architecture: score.alpha for score in entry.predicted}
        for draft in drafts:
            row = self.row(2, 0, self.measured(draft), "trained", "measured on held-out text")
            tokens, seconds = self.trainings.trainer.spent(draft.architecture)
            row = replace(row, tokens=tokens, seconds=seconds, measured=None)
            self.state.record(replace(row, predicted_alpha=predicted[draft.architecture]))
        rows = self.state.rungs
        last = {row.shape: row.round for row in sorted(rows, key=lambda row: row.round)}
        why = "not chosen for the next round or the finalists"
        for number, row in enumerate(rows):
            left = row.rung == 1 and row.state == "kept" and row.shape not in entry.shapes
            if left and row.round == last[row.shape]:
                rows[number] = replace(row, state="dropped", why=why)
        self.file.save()

    # -- what is written down

    def row(self, rung: int, number: int, score: Score, state: Fate, why: str) -> RungRow:
        shape = score.architecture
        short = self.belief.shorts.get(shape) if rung else None
        return RungRow(
            rung=rung,
            round=number,
            shape=shape,
            label=shape.label(),
            gamma=score.gamma,
            tokens=short.tokens if short else 0,
            seconds=short.seconds if short else 0.0,
            measured=Look(*short.points[-1]) if short and short.points else None,
            alpha=score.alpha,
            tau=score.tau,
            score=score.speedup,
            state=state,
            why=why,
        )

    def _record_prior(self, first: Sequence[Score], why: str) -> None:
        if any(row.rung == 0 for row in self.state.rungs):
            return
        for score in first:
            self.state.record(self.row(0, 0, score, "kept", why))
        self.state.rung0 = PriorRung(len(self.pool), len(first))
        self.file.save()

    def _recall(self) -> None:
        """Curves that an earlier process trained, and who was out."""
        self.out |= {row.shape: row.why for row in self.state.rungs if row.state == "pruned"}
        rounds = dict.fromkeys(shape for entry in self.state.rounds for shape in entry.shapes)
        # Who was trained to learn the speed, before the first round, may be in none.
        probes = [shape for shape in self.pool if shape not in rounds]
        self.pool.update(rounds)
        for shape in (*probes, *rounds):
            if (short := read_curve(self.trainings.trainer.draft_folder(shape))) is not None:
                self.belief.shorts[shape] = short
        self.belief.full_tokens = self.state.full_tokens
        self.belief.full_epoch = self.state.full_epoch or 0


def _order(score: Score) -> tuple[float, int]:
    """Best first; of equals the smaller one."""
    return -score.worth, score.parameters
