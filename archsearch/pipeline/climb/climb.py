"""The climb itself: rounds of short trainings, each on fewer shapes for longer, then the full
training of the best.

Everything decided or learnt is in the run folder's rungs.json before the next step begins, and
every training has its own checkpoint: a climb that was killed goes on where it stopped, and no
shape is trained twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from archsearch.acceptance.estimator import AcceptanceObservation
from archsearch.architecture.architecture import Architecture
from archsearch.drafts.records import TrainedDraft, read_curve
from archsearch.drafts.trainer import DraftTrainer
from archsearch.files import write_json
from archsearch.pipeline.climb.belief import Belief
from archsearch.pipeline.climb.budget import TrainingCosts, part_of_round
from archsearch.pipeline.climb.families import HeadRungs, short_trainings
from archsearch.pipeline.climb.finalists import train_in_full
from archsearch.pipeline.climb.minutes import split_minutes
from archsearch.pipeline.session import SearchSession
from archsearch.pipeline.shared_work import Job, SharedWork, train_job
from archsearch.progress import human_time, say
from archsearch.runs.state import ClimbState, Fate, Look, PriorRung, RoundEntry, RungRow, StateFile
from archsearch.search import rungs
from archsearch.search.objective import Score, Scorer
from archsearch.search.rungs import Plan, Round
from archsearch.search.space import InvalidShape
from archsearch.training.data_plan import Split

POOL: Final = 48  # candidates that a choice is made among
LEAST_PICK: Final = 0.0005  # ln(speed-up): a shape that promises less is not trained to be compared
LEAST_FINALIST_SHARE: Final = 0.05  # of the budget: with less left, a full training is none


@dataclass
class Climb:
    """A climb in progress. `pool`: all shapes that are looked at; `out`: those that cannot win, and
    why; `shared`: where others train along."""

    session: SearchSession
    trainer: DraftTrainer
    file: StateFile
    plan: Plan
    belief: Belief
    pool: dict[Architecture, None] = field(default_factory=dict)
    out: dict[Architecture, str] = field(default_factory=dict)
    heads: HeadRungs | None = None
    shared: SharedWork | None = None

    @property
    def state(self) -> ClimbState:
        return self.file.state

    @property
    def scorer(self) -> Scorer:
        """Scores by what is believed now."""
        return self.belief.scorer

    @property
    def costs(self) -> TrainingCosts:
        return TrainingCosts(self.belief.shorts)

    def climb(self) -> list[TrainedDraft]:
        """Rounds of short trainings, then the finalists; in the order of training."""
        self.belief.learn()
        first = self.contenders()
        self._record_prior(first)
        say(f"rung 0: {len(self.pool)} shapes scored by the prior, {len(first)} could still win")
        self._recall()
        if self.state.finalists is None:
            self.rounds(first)
            short_trainings(self)
            if self.left_s() < LEAST_FINALIST_SHARE * self.plan.budget_s:
                self.file.note(
                    f"no draft was trained in full: {human_time(self.left_s())} were left of"
                    f" {human_time(self.plan.budget_s)}; give a larger --time-budget to go on from"
                    " here"
                )
                self.file.save()
                return []
        return train_in_full(self)

    def rounds(self, first: Sequence[Score]) -> None:
        """Successive halving over short trainings, until one is left, the seconds are gone or
        knowing more brings nothing."""
        if len(first) < 2:
            self.file.note("rung 1: left out, the prior leaves one candidate")
            return
        rest = self.left_s()
        if rest <= 0.0:
            self.file.note("rung 1: left out, the time is spent")
            return
        rung_s = self._rung_time(rest)
        if (
            not self.state.rounds
        ):  # the prior's best first: the machine's speed decides how many more can be
            label = "the prior's best, to learn the machine's speed"
            self._train_short(first[0].architecture, rungs.FIRST_TOKENS, label, limit_s=rung_s / 6)
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
            f" ({self.costs.mean_speed(first):.0f} tokens/s measured)"
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
        if self.shared is not None:
            seed = self.session.request.seed
            jobs = [Job("short", shape, entry.tokens, seed) for shape in entry.shapes]
            self.shared.finish(jobs, lambda job: train_job(job, self.trainer))
        for place, shape in enumerate(
            entry.shapes, start=1
        ):  # what others have trained is read, not done again
            self._train_short(
                shape, entry.tokens, f"round {number}/{of}, shape {place}/{len(entry.shapes)}"
            )
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
            f" {best.speedup.value:.2f} ± {best.speedup.std:.2f}{new}; {len(self.contenders())}"
            " could still win"
        )
        return not entry.end

    # -- who stands where
    # ----------------------------------------------------------------------------------------------

    def standings(self) -> list[Score]:
        """Scores of all that are still in, best first."""
        scores = [self.scorer(shape) for shape in self.pool if shape not in self.out]
        return sorted(scores, key=_order)

    def contenders(self) -> list[Score]:
        """Those that could still win, best first; at most POOL, the most promising."""
        scores = self.standings()
        if not scores:
            return []
        values = [math.log(score.speedup.value) for score in scores]
        alive = rungs.contenders(
            values, lambda i, j: self.belief.score_gap_std(scores[i], scores[j])
        )
        kept = [score for score, can in zip(scores, alive, strict=True) if can]
        # The best of every depth: many shapes of one depth must not crowd the others out.
        depths: dict[int, list[Score]] = {}
        for score in kept:
            depths.setdefault(score.architecture.num_hidden_layers, []).append(score)
        each = max(2, POOL // len(depths))
        pool = [score for group in depths.values() for score in group[:each]]
        pool += [score for score in kept if score not in pool][: max(0, POOL - len(pool))]
        return sorted(pool, key=_order)

    def expand_neighbourhood(self, leaders: int = 5) -> None:
        """Take the neighbours of the best into the pool: what was learnt may have moved the best to
        where rung 0 did not look."""
        space, target = self.session.space, self.scorer.target
        for score in self.standings()[:leaders]:
            shape = score.architecture
            window = shape.window_pattern + (
                str(shape.sliding_window) if "S" in shape.window_pattern else ""
            )
            same = (
                "num_hidden_layers",
                "hidden_size",
                "num_key_value_heads",
                "kv_group_size",
                "head_dim",
                "tie_word_embeddings",
            )
            wanted = {name: getattr(shape, name) for name in same} | {
                "ffn_ratio": shape.intermediate_size / shape.hidden_size,
                "draft_vocab_size": shape.head_rows,
                "window": window,
            }
            for indices in space.neighbours(space.nearest(wanted, target), target):
                found = space.shape(indices, target)
                if isinstance(found, InvalidShape) or found in self.pool:
                    continue
                if all(value <= 0 for value in self.scorer.constraints(found).values()):
                    self.pool[found] = None

    def measured(self, draft: TrainedDraft) -> Score:
        """The score of a trained draft, by what was measured of it."""
        return self.session.scorer.measured(draft.architecture, draft.alpha, draft.tau)

    # -- time
    # ----------------------------------------------------------------------------------------------

    def left_s(self) -> float:
        """Seconds left for training."""
        return rungs.training_s(self.plan.budget_s, self.file.elapsed_s(), self.plan.confirm_s)

    def aim(self, seconds: float) -> Split:
        """What a full training in `seconds` is foreseen to see, with the text that is worth writing
        before it: what curves are carried on to."""
        middle = sorted(self.belief.shorts.values(), key=lambda short: short.tokens_per_s)[
            len(self.belief.shorts) // 2
        ]
        split = split_minutes(self, middle.architecture, seconds)
        self.belief.full_tokens = self.state.full_tokens = max(
            rungs.FIRST_TOKENS, int(split.tokens)
        )
        self.belief.full_epoch = self.state.full_epoch = int(split.epoch_tokens)
        self.file.save()
        return split

    def _rung_time(self, rest_s: float) -> float:
        """Seconds that the short trainings have; when they end is written down the first time."""
        divisor = self.heads.rung_divisor if self.heads is not None else 1.0
        rung_s = self.state.rung_s or rungs.rung_share(rest_s) / divisor
        if self.state.rung_end_s is None:
            self.state.rung_s, self.state.rung_end_s = rung_s, self.file.elapsed_s() + rung_s
            self.file.save()
        return rung_s

    def _rung_left_s(self) -> float:
        """Seconds until the short trainings end; negative where they are late."""
        assert self.state.rung_end_s is not None
        return self.state.rung_end_s - self.file.elapsed_s()

    def _schedule(self, first: Sequence[Score]) -> list[Round]:
        """The rounds, as planned at the speed that was measured; written down once."""
        if not self.state.schedule:
            probe_s = (
                0.0
                if self.state.rounds
                else sum(short.wall_s for short in self.belief.shorts.values())
            )
            seconds = (
                max(0.0, self._rung_left_s()) + probe_s
            )  # the first round need not train the first shape again
            self.state.schedule = rungs.halving(
                seconds, self.costs.mean_speed(first), self.costs.overhead_s()
            )
            self.file.save()
        return self.state.schedule

    # -- one round
    # ----------------------------------------------------------------------------------------------

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
        share = left * part_of_round(self.state.schedule, number)
        costs = [self.costs.cost_s(score.architecture, step.tokens) for score in scores]
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
        if number > 1 and costs[picks[0].index] > 1.2 * max(left, 0.0):
            self.file.note(f"rung 1 ends after round {number - 1}: its time is spent")
            return None
        shapes = tuple(scores[pick.index].architecture for pick in picks)
        entry = RoundEntry(
            number, step.tokens, shapes, tuple(pick.gain for pick in picks), gain, len(scores)
        )
        self.state.rounds.append(entry)
        self.file.save()
        return entry

    def _train_short(
        self, shape: Architecture, tokens: int, label: str, limit_s: float | None = None
    ) -> None:
        self.pool.setdefault(shape)
        seed = self.session.request.seed
        self.belief.shorts[shape] = self.trainer.train_short(
            shape, tokens, seed, label, limit_s=limit_s
        )
        self.file.save()

    def _judge(self, entry: RoundEntry) -> None:
        """Who of the round cannot win any more, and why."""
        number = entry.round
        scores = {shape: self.scorer(shape) for shape in entry.shapes}
        leader = max(scores.values(), key=lambda score: score.speedup.value)
        rival = max(
            (s for s in scores.values() if s is not leader),
            key=lambda s: s.speedup.value,
            default=leader,
        )
        reached = {  # ln(speed-up), and its std without what all share
            shape: (
                math.log(score.speedup.value),
                self.belief.own_std(score, rival if score is leader else leader),
            )
            for shape, score in scores.items()
        }
        for shape, score in scores.items():
            others = [value for other, value in reached.items() if other != shape]
            if (
                shape not in self.out
                and score is not leader
                and rungs.beaten(*reached[shape], others)
            ):
                behind = math.log(leader.speedup.value / score.speedup.value)
                std = self.belief.own_std(score, leader) * math.sqrt(2.0)
                why = (
                    f"cannot win: {behind:.1%} behind {leader.architecture.label()}, std of the"
                    f" difference {std:.1%}"
                )
                self.out[shape] = why
            fate: Fate = "pruned" if shape in self.out else "kept"
            self.state.record(self.row(1, number, score, fate, self.out.get(shape, "")))

    # -- what is written down
    # ----------------------------------------------------------------------------------------------

    def row(self, rung: int, number: int, score: Score, state: Fate, why: str) -> RungRow:
        """What a rung says of a shape now."""
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

    def _record_prior(self, contenders: Sequence[Score]) -> None:
        if any(row.rung == 0 for row in self.state.rungs):
            return
        for score in contenders:
            self.state.record(self.row(0, 0, score, "kept", "could still win"))
        self.state.rung0 = PriorRung(len(self.pool), len(contenders))
        self.file.save()

    def _recall(self) -> None:
        """Curves that an earlier process trained, and who was out."""
        self.out |= {row.shape: row.why for row in self.state.rungs if row.state == "pruned"}
        rounds = dict.fromkeys(shape for entry in self.state.rounds for shape in entry.shapes)
        # Who was trained to learn the speed, before the first round, may be in none.
        probes = [shape for shape in self.pool if shape not in rounds]
        self.pool.update(rounds)
        for shape in (*probes, *rounds):
            if (short := read_curve(self.trainer.draft_folder(shape))) is not None:
                self.belief.shorts[shape] = short
        self.belief.full_tokens, self.belief.full_epoch = (
            self.state.full_tokens,
            self.state.full_epoch or 0,
        )


def _order(score: Score) -> tuple[float, int]:
    """Best first; of equals the smaller one."""
    return -score.speedup.value, score.parameters


def start_climb(
    session: SearchSession,
    file: StateFile,
    plan: Plan,
    trainer: DraftTrainer,
    ranked: Sequence[Score],
    known: list[AcceptanceObservation],
    heads: HeadRungs | None = None,
) -> Climb:
    """A climb over the shapes that rung 0 scored, and over other families where there are
    `heads`."""
    pool = {score.architecture: None for score in ranked}
    belief = Belief(session.scorer, known)
    return Climb(session, trainer, file, plan, belief, pool=pool, heads=heads)


def write_texts(trainer: DraftTrainer, file: StateFile, plan: Plan) -> None:
    """Held-out text, then the training text, then further answers, until the plan's share is
    used."""
    start = file.clock()
    trainer.texts.heldout(0.5 * plan.text_s)
    trainer.texts.write_training_once(max(plan.text_s - file.elapsed_s(), 0.1 * plan.text_s))
    more = trainer.folder / "more_done.json"
    if not more.exists():
        left = plan.text_s - file.elapsed_s()
        found = trainer.texts.grow(left if left > 0.1 * plan.text_s else 0.0)
        write_json(more, {"tokens": sum(found.values()), "by_source": found})
    file.step("text", file.clock() - start)
    tokens = sum(cache.written_tokens for cache in trainer.texts.all_training())
    say(f"text: {tokens} tokens to train on, {trainer.texts.heldout().written_tokens} held out")
