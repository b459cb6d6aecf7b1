"""The climb: from the prior over short trainings to finalists, inside a time budget. `search.rungs` decides, `finalists` trains.

Everything decided or learnt is in the run folder's rungs.json before the next step begins, and every training has its own
checkpoint: a climb that was killed goes on where it stopped, and no shape is trained twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from archsearch import speedup as speculation
from archsearch.acceptance.estimator import (
    AcceptanceEstimator,
    AcceptanceObservation,
    VocabularyCoverage,
)
from archsearch.acceptance.prior import SHAPE_NOISE_STD, PriorAcceptance
from archsearch.acceptance.short_training import ExtrapolatedAcceptance
from archsearch.acceptance.supernet import SupernetAcceptance, check
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import body_parameters
from archsearch.drafts.records import ShortTraining, TrainedDraft, paired_logit_std
from archsearch.drafts.trainer import Workshop
from archsearch.errors import ArchsearchError
from archsearch.files import read_json, write_json
from archsearch.pipeline.finalists import ALL_SHARE, best_of, equal_tokens, train_alike
from archsearch.pipeline.latency import machine_slowdown
from archsearch.pipeline.session import SearchSession
from archsearch.progress import human_time, say
from archsearch.search import rungs, study
from archsearch.search.objective import Score, Scorer, difference_std
from archsearch.search.rungs import Plan, Round
from archsearch.search.space import InvalidShape
from archsearch.training.curves import AlphaPoint, CurvePrior, curve_slope, fit_prior, growth

FORMAT: Final = 1
POOL: Final = 48  # candidates that a choice is made among
SUPERNET_SHARE: Final = 0.5  # of the rungs' time, where a supernet is asked for
SUPERNET_SHAPES: Final = 12
LEAST_PICK: Final = 0.0005  # ln(speed-up): a shape that promises less is not trained to be compared
EXACT_TOKENS: Final = 4 * 32 * 2  # what the exactness check in float32 generates
FLOAT32_COST: Final = 2.0  # of a target step, beside the run's dtype
TYPICAL_SPEEDUP: Final = 1.5  # of the half of a confirmation that runs with a draft
LEAST_FINALIST_SHARE: Final = 0.05  # of the budget: with less left, a full training is none
FIRST_GUESS_SPEED: Final = 2000.0  # training tokens/s before anything was trained


class Ledger:
    """rungs.json: the plan, what every round trains, what came of it, the finalists, and the time spent in all processes."""

    def __init__(self, path: Path, budget_s: float, start: float) -> None:
        self.path, self._start = path, start
        self.data: dict[str, Any] = {
            "format": FORMAT, "budget_s": budget_s, "elapsed_s": 0.0, "plan": None, "rounds": [], "finalists": None, "notes": [],
            "rungs": [], "steps": {},
        }  # fmt: skip
        if path.exists():
            found = read_json(path, "state of the climb")
            if found.get("format") != FORMAT:
                raise ArchsearchError(f"{path} was written by another version of archsearch; use another --run")
            self.data = found
            if found["budget_s"] != budget_s:  # another budget: a new plan; what was written and trained is used again
                found |= {"budget_s": budget_s, "plan": None, "finalists": None, "confirmed": [], "notes": []}
                for name in ("rung_s", "rung_end_s", "schedule", "full_tokens"):
                    found.pop(name, None)
        self._before = float(self.data["elapsed_s"])

    def elapsed_s(self) -> float:
        """Wall seconds of this search, those of killed processes up to their last step included."""
        return self._before + time.monotonic() - self._start

    def save(self) -> None:
        self.data["elapsed_s"] = self.elapsed_s()
        write_json(self.path, self.data)

    def step(self, name: str, seconds: float) -> None:
        """Note how long a step took; of a step that was interrupted, the sum."""
        self.data["steps"][name] = self.data["steps"].get(name, 0.0) + seconds
        self.save()

    def note(self, text: str) -> None:
        if text not in self.data["notes"]:
            self.data["notes"].append(text)
        say(text)

    def record(self, row: Mapping[str, Any]) -> None:
        """A line of what was learnt: one per rung, round and shape, the last one stands."""
        key = ("rung", "round", "shape")
        rows = self.data["rungs"]
        for number, known in enumerate(rows):
            if all(known[name] == row[name] for name in key):
                rows[number] = dict(row)
                return
        rows.append(dict(row))


@dataclass
class Climb:
    """A climb in progress."""

    session: SearchSession
    shop: Workshop
    ledger: Ledger
    plan: Plan
    scorer: Scorer
    known: list[AcceptanceObservation]
    mirror: study.ClimbStudy
    shorts: dict[Architecture, ShortTraining] = field(default_factory=dict)
    pool: dict[Architecture, None] = field(default_factory=dict)
    out: dict[Architecture, str] = field(default_factory=dict)
    full_tokens: int | None = None
    acceptance: AcceptanceEstimator = field(default_factory=PriorAcceptance)
    _learnt: tuple[Any, ...] | None = None

    # -- what is believed -------------------------------------------------------------------------------------------------------

    def learn(self, finalists: Sequence[AcceptanceObservation] = ()) -> None:
        """Fit what is known of acceptance to all that was trained, and score with it from now on."""
        state = (
            "supernet" in self.ledger.data,
            *((arch, short.tokens) for arch, short in self.shorts.items()),
            self.full_tokens,
            len(finalists),
        )
        if state == self._learnt:
            return
        self._learnt = state
        context = self.scorer.context
        fitted: AcceptanceEstimator
        if self.shorts:
            curves = [[AlphaPoint(*point) for point in short.points] for short in self.shorts.values()]
            at = max(short.tokens for short in self.shorts.values())
            end = max(self.full_tokens or at, at)
            context = replace(context, trained_tokens=float(end))
            shared = fit_prior(curves)
            levels = self.levels(shared)
            # What is trained here is known better from here than from an earlier run on other text.
            others = [item for item in self.known if item.architecture not in levels]
            fitted = ExtrapolatedAcceptance(
                levels,
                growth(shared, at, end),
                replace(context, temperature=0.0),
                prior=self._slices(),
                sampling_std=self._sampling_std(),
            ).fit([*others, *finalists])
        else:
            fitted = (self._slices() or PriorAcceptance()).fit([*self.known, *finalists])
        self.acceptance = fitted
        self.scorer = self.scorer.with_acceptance(fitted, context)

    def _slices(self) -> SupernetAcceptance | None:
        """What a supernet says, where one was trained: alpha of its slices, and the prior for the rest."""
        found = self.ledger.data.get("supernet")
        if found is None or "slices" not in found:
            return None
        shapes = [Architecture.from_dict(shape) for shape in found["shapes"]]
        return SupernetAcceptance(dict(zip(shapes, found["slices"], strict=True)))

    def supernet(self, scores: Sequence[Score], seconds: float) -> None:
        """Train one draft with shared weights over candidates with one head: its slices rank them before the short trainings.

        Only where it is asked for by name: on its own it has to rank better than the prior first (`acceptance.supernet.check`).
        """
        from archsearch.training.supernet import covers

        data = self.ledger.data
        if "slices" in data.get("supernet", {}):
            return
        if "supernet" not in data:
            fitting = [score for score in scores if covers(self.scorer.target, score.architecture)]
            same = [score for score in fitting if _head(score.architecture) == _head(fitting[0].architecture)]
            if len(same) < 2:
                raise ArchsearchError(
                    "--alpha supernet needs two candidates that are slices of one draft (no wider than the target, its head_dim, "
                    f"no window, one head); of {len(scores)} that could win {len(same)} are; use --alpha distilled"
                )
            picks = rungs.best_set(self.draws(same), [0.0] * len(same), 1.0, most=SUPERNET_SHAPES, least=2)
            data["supernet"] = {"shapes": [same[pick.index].architecture.to_dict() for pick in picks]}
            self.ledger.save()
        shapes = [Architecture.from_dict(shape) for shape in data["supernet"]["shapes"]]
        start = time.monotonic()
        data["supernet"]["slices"] = self.shop.train_supernet(shapes, seconds, self.session.request.seed)
        self._learnt = None
        self.ledger.step("supernet", time.monotonic() - start)
        values = data["supernet"]["slices"]
        say(f"supernet: alpha of {len(shapes)} slices from {min(values):.3f} to {max(values):.3f}")

    def _supernet_verdict(self) -> None:
        """Whether the supernet ranked the shapes that were trained alone better than the prior did."""
        found = self._slices()
        if found is not None:
            context = self.scorer.context
            prior = PriorAcceptance().fit(self.known)
            alone = {shape: short.points[-1][1] for shape, short in self.shorts.items() if short.points}
            believed = {shape: prior.predict(shape, context).alpha.value for shape in alone}
            self.ledger.note(check(found.slices, believed, alone).reason)

    def levels(self, shared: CurvePrior) -> dict[Architecture, tuple[float, float]]:
        """Where each trained shape will stand among them when all are trained in full: (logit(alpha), std of its own error), at
        the tokens of the longest.

        Round by round: the mean of a round's shapes is where the round before left them (newcomers count at the mean), and each
        one's distance from it is what `catch_up` leaves of it.
        """
        result: dict[Architecture, tuple[float, float]] = {}
        marks = sorted({short.tokens for short in self.shorts.values()})
        done = 0
        for mark in marks:
            group = [short for short in self.shorts.values() if short.tokens >= mark]
            measured = {short.architecture: _logit_at(short, mark) for short in group}
            if done:  # all move on by what training between the two marks adds
                rise = growth(shared, done, mark).value - shared.mean[3]
                result = {shape: (value + rise, std) for shape, (value, std) in result.items()}
            before = [result[shape][0] for shape in measured if shape in result]
            centre = float(np.mean(list(measured.values())))
            anchor = float(np.mean(before)) if before else centre
            spread, std = rungs.catch_up(mark)
            for short in group:
                paired = max((paired_logit_std(short, other) for other in group[:4] if other is not short), default=0.0)
                own = math.hypot(std, paired / math.sqrt(2.0))
                result[short.architecture] = (anchor + (measured[short.architecture] - centre) / spread, own)
            done = mark
        return result

    def _sampling_std(self) -> float:
        """Std of a measured alpha over the kept-out texts; all drafts share them."""
        from archsearch.acceptance.measured import resampled_ratio

        stds = [
            resampled_ratio(np.array([short.hits, short.heldout_tokens], dtype=np.float64).T).std
            for short in self.shorts.values()
            if short.hits
        ]
        return max(stds, default=0.0)

    def gap_std(self, first: Architecture, second: Architecture) -> float:
        """Std of the difference of two logits of alpha."""
        return self.acceptance.difference_std(first, second, self.scorer.context)

    def standings(self) -> list[Score]:
        """Scores of all that are still in, best first."""
        scores = [self.scorer(shape) for shape in self.pool if shape not in self.out]
        return sorted(scores, key=lambda score: (-score.speedup.value, score.parameters))

    def look_around(self, leaders: int = 5) -> None:
        """Take the neighbours of the best into the pool: what was learnt may have moved the best to where rung 0 did not look."""
        space, target = self.session.space, self.scorer.target
        for score in self.standings()[:leaders]:
            shape = score.architecture
            window = shape.window_pattern + (str(shape.sliding_window) if "S" in shape.window_pattern else "")
            same = ("num_hidden_layers", "hidden_size", "num_key_value_heads", "kv_group_size", "head_dim", "tie_word_embeddings")
            wanted = {name: getattr(shape, name) for name in same} | {
                "ffn_ratio": shape.intermediate_size / shape.hidden_size,
                "draft_vocab_size": shape.head_rows,
                "window": window,
            }
            for indices in space.neighbours(space.nearest(wanted, target), target):
                found = space.build(indices, target)
                if isinstance(found, InvalidShape) or found in self.pool:
                    continue
                if all(value <= 0 for value in self.scorer.constraints(found).values()):
                    self.pool[found] = None

    def contenders(self) -> list[Score]:
        """Those that could still win, best first; at most POOL, the most promising."""
        scores = self.standings()
        if not scores:
            return []
        values = [math.log(score.speedup.value) for score in scores]

        def gap(i: int, j: int) -> float:
            return difference_std(scores[i], scores[j], self.acceptance, self.scorer.context)

        kept = [scores[i] for i, alive in enumerate(rungs.could_win(values, gap)) if alive]
        # The best of every depth: many shapes of one depth must not crowd the others out.
        depths: dict[int, list[Score]] = {}
        for score in kept:
            depths.setdefault(score.architecture.num_hidden_layers, []).append(score)
        each = max(2, POOL // len(depths))
        pool = [score for group in depths.values() for score in group[:each]]
        pool += [score for score in kept if score not in pool][: max(0, POOL - len(pool))]
        return sorted(pool, key=lambda score: (-score.speedup.value, score.parameters))

    def draws(self, scores: Sequence[Score]) -> np.ndarray:
        """[draws, scores] of ln(speed-up) as it may turn out when acceptance is known."""
        shapes = [score.architecture for score in scores]
        own = 2.0 * SHAPE_NOISE_STD**2
        # What no term explains is alike in shapes that are alike: without that, twins look like two draws of a lottery.
        gaps = np.array([
            [math.sqrt(max(self.gap_std(a, b) ** 2 - own * kinship(a, b), 0.0)) if a != b else 0.0 for b in shapes]
            for a in shapes
        ])  # fmt: skip
        slopes = np.array([slope(score) for score in scores])
        level = speculation.logit_std(scores[0].alpha)
        mean = np.array([math.log(score.speedup.value) for score in scores])
        return rungs.draws_of(mean, rungs.belief(gaps, slopes, level))

    # -- what it costs ----------------------------------------------------------------------------------------------------------

    def speed(self, shape: Architecture) -> float:
        """Training tokens/s of a shape: its own, or from those trained so far in proportion to their work per token."""
        if shape in self.shorts:
            return self.shorts[shape].tokens_per_s
        if not self.shorts:
            return FIRST_GUESS_SPEED
        rates = [short.tokens_per_s * work(arch) for arch, short in self.shorts.items()]
        return float(np.median(rates)) / work(shape)

    def overhead_s(self) -> float:
        """Seconds per shape and round that are no training steps: building the draft, looking at alpha."""
        steps = [short.wall_s - short.tokens / short.tokens_per_s for short in self.shorts.values() if short.wall_s > 0]
        return max(0.0, float(np.median(steps))) if steps else 0.0

    def cost_s(self, shape: Architecture, tokens: int) -> float:
        """Seconds to bring a shape to `tokens`."""
        done = self.shorts[shape].tokens if shape in self.shorts else 0
        return max(0, tokens - done) / self.speed(shape) + (self.overhead_s() if done < tokens else 0.0)

    def left_s(self) -> float:
        """Seconds left for training."""
        return rungs.training_s(self.plan.budget_s, self.ledger.elapsed_s(), self.plan.confirm_s)

    # -- the rungs --------------------------------------------------------------------------------------------------------------

    def climb(self) -> list[TrainedDraft]:
        """Rounds of short trainings, then the finalists; in the order of training."""
        self.learn()
        first = self.contenders()
        self._record_prior(first)
        say(f"rung 0: {len(self.pool)} shapes scored by the prior, {len(first)} could still win")
        self.recall()
        data = self.ledger.data
        if data["finalists"] is None:
            self.rounds(first)
            least = LEAST_FINALIST_SHARE * self.plan.budget_s
            if self.left_s() < least:
                self.ledger.note(
                    f"no draft was trained in full: {human_time(self.left_s())} were left of {human_time(self.plan.budget_s)}; "
                    "give a larger --time-budget to go on from here"
                )
                self.ledger.save()
                return []
        return self.finalists()

    def recall(self) -> None:
        """Curves that an earlier process trained, and who was out."""
        for row in self.ledger.data["rungs"]:
            if row["state"] == "pruned":
                self.out[Architecture.from_dict(row["shape"])] = row["why"]
        for entry in self.ledger.data["rounds"]:
            for data in entry["shapes"]:
                shape = Architecture.from_dict(data)
                path = self.shop.draft_folder(shape) / "curve.json"
                if path.exists():
                    self.shorts[shape] = ShortTraining.from_dict(read_json(path, "learning curve"))
                self.pool.setdefault(shape)
        self.full_tokens = self.ledger.data.get("full_tokens")

    def rounds(self, first: Sequence[Score]) -> None:
        """Successive halving over short trainings, until one is left, the seconds are gone or knowing more brings nothing."""
        data = self.ledger.data
        if len(first) < 2:
            self.ledger.note("rung 1: left out, the prior leaves one candidate")
            return
        rest = self.left_s()
        if rest <= 0.0:
            self.ledger.note("rung 1: left out, the time is spent")
            return
        rung_s = data.get("rung_s") or rungs.rung_share(rest)
        if "rung_end_s" not in data:
            data["rung_s"], data["rung_end_s"] = rung_s, self.ledger.elapsed_s() + rung_s
            self.ledger.save()
        if self.session.request.alpha == "supernet":
            self.supernet(first, SUPERNET_SHARE * rung_s)
            self.learn()
            first = self.contenders()
        if not data["rounds"]:
            self.probe(first[0].architecture, rung_s)
        if not self.shorts:
            return
        self.aim(rest)
        schedule = [Round(entry["places"], entry["tokens"]) for entry in data.get("schedule", [])]
        if not schedule:
            left = max(0.0, data["rung_end_s"] - self.ledger.elapsed_s())
            schedule = rungs.halving(left + self.spent_on_probe(), self.mean_speed(first), self.overhead_s())
            data["schedule"] = [{"places": step.places, "tokens": step.tokens} for step in schedule]
            self.ledger.save()
        if not schedule:
            self.ledger.note("rung 1: the time is too short to compare shapes by training; the prior's best is trained")
            return
        words = ", then ".join(f"{step.places} shapes to {step.tokens} tokens" for step in schedule)
        say(f"rung 1: short trainings, about {human_time(rung_s)}: {words} ({self.mean_speed(first):.0f} tokens/s measured)")
        for number, step in enumerate(schedule, start=1):
            if not self.round(number, step, len(schedule)):
                break

    def probe(self, shape: Architecture, rung_s: float) -> None:
        """Train the prior's best first: the machine's speed decides how many more can be."""
        self._train_short(shape, rungs.FIRST_TOKENS, "the prior's best, to learn the machine's speed", limit_s=rung_s / 6)

    def spent_on_probe(self) -> float:
        return sum(short.wall_s for short in self.shorts.values()) if not self.ledger.data["rounds"] else 0.0

    def mean_speed(self, scores: Sequence[Score]) -> float:
        """Tokens/s over shapes that are likely to be chosen (harmonic mean: equal tokens for all)."""
        speeds = [self.speed(score.architecture) for score in scores[: rungs.MOST_PLACES]]
        return len(speeds) / sum(1.0 / value for value in speeds)

    def aim(self, rest_s: float) -> None:
        """The tokens of a full training: what curves are carried on to."""
        if self.full_tokens is None:
            speed = float(np.median([short.tokens_per_s for short in self.shorts.values()]))
            stored = self.ledger.data.get("full_tokens")
            self.full_tokens = int(stored or max(rungs.FIRST_TOKENS, (rest_s - rungs.rung_share(rest_s)) * speed))
            self.ledger.data["full_tokens"] = self.full_tokens
            self.ledger.save()

    def round(self, number: int, step: Round, of: int) -> bool:
        """One round: choose, train to equal tokens, learn, drop. False where the climb over rungs ends here."""
        data = self.ledger.data
        entries = [entry for entry in data["rounds"] if entry["round"] == number]
        if entries:
            entry = entries[0]
            if entry.get("done"):
                return not entry.get("end")
            shapes = [Architecture.from_dict(item) for item in entry["shapes"]]
        else:
            self.learn()
            self.look_around()
            scores = self.contenders()
            draws = self.draws(scores)
            left = data["rung_end_s"] - self.ledger.elapsed_s()
            gain = rungs.expected_gain(draws)
            if len(scores) < 2 or gain < rungs.LEAST_GAIN:
                why = "one candidate is left" if len(scores) < 2 else f"knowing more would bring {gain:.1%}"
                self.ledger.note(f"rung 1 ends after round {number - 1}: {why}")
                return False
            share = left * part_of_round(data["schedule"], number)
            costs = [self.cost_s(score.architecture, step.tokens) for score in scores]
            # The first round also asks where the prior is least sure: the best of each depth has a place.
            depths = {score.architecture.num_hidden_layers: i for i, score in reversed(list(enumerate(scores)))}
            picks = rungs.best_set(
                draws,
                costs,
                max(share, 0.0) * 1.1,
                most=step.places,
                least=2 if number == 1 else 1,
                least_gain=LEAST_PICK,
                start=sorted(depths.values())[: math.ceil(step.places / 3)] if number == 1 else (),
            )
            if number > 1 and costs[picks[0].index] > 1.2 * max(left, 0.0):
                self.ledger.note(f"rung 1 ends after round {number - 1}: its time is spent")
                return False
            shapes = [scores[pick.index].architecture for pick in picks]
            entry = {
                "round": number, "tokens": step.tokens, "shapes": [shape.to_dict() for shape in shapes],
                "gains": [pick.gain for pick in picks], "expected_gain": gain, "contenders": len(scores),
            }  # fmt: skip
            data["rounds"].append(entry)
            self.ledger.save()
        start = time.monotonic()
        for place, shape in enumerate(shapes, start=1):
            self._train_short(shape, step.tokens, f"round {number}/{of}, shape {place}/{len(shapes)}")
        self.learn()
        entry["seconds"] = entry.get("seconds", 0.0) + time.monotonic() - start
        self._judge(entry)
        if number == 1:
            self._supernet_verdict()
        entry["done"] = True
        entry["end"] = sum(shape not in self.out for shape in self.pool) < 2
        self.ledger.save()
        best = self.standings()[0]
        new = "" if best.architecture in self.shorts else ", not trained yet"
        say(
            f"rung 1, round {number}: {len(shapes)} shapes at {step.tokens} tokens in {human_time(entry['seconds'])}; best "
            f"{best.architecture.label()} {best.speedup.value:.2f} ± {best.speedup.std:.2f}{new}; "
            f"{len(self.contenders())} could still win"
        )
        return not entry["end"]

    def _train_short(self, shape: Architecture, tokens: int, label: str, limit_s: float | None = None) -> None:
        self.pool.setdefault(shape)
        self.shorts[shape] = self.shop.train_short(shape, tokens, self.session.request.seed, label, limit_s=limit_s)
        self.ledger.save()

    def _own_std(self, shape: Architecture, score: Score, leader: Score) -> float:
        """Relative std of a score without what all candidates share."""
        own = slope(score) * self.gap_std(shape, leader.architecture) / math.sqrt(2.0)
        time_std = score.draft_s.std / (score.tpot_s.value * score.tau.value)
        return math.hypot(own, time_std)

    def _judge(self, entry: Mapping[str, Any]) -> None:
        """Report the round's scores to the study, let its pruner say who is out, and write down why."""
        number = int(entry["round"])
        shapes = [Architecture.from_dict(item) for item in entry["shapes"]]
        scores = {shape: self.scorer(shape) for shape in shapes}
        leader = max(scores.values(), key=lambda score: score.speedup.value)
        rival = max((s for s in scores.values() if s is not leader), key=lambda s: s.speedup.value, default=leader)
        for shape, score in scores.items():
            against = rival if score is leader else leader
            std = self._own_std(shape, score, against)
            self.mirror.report(shape, number, score.speedup.value, std, score.alpha.to_dict())
        for shape, score in scores.items():
            pruned = shape not in self.out and score is not leader and self.mirror.should_prune(shape)
            why = self.out.get(shape, "")
            if pruned:
                behind = math.log(leader.speedup.value / score.speedup.value)
                std = self._own_std(shape, score, leader) * math.sqrt(2.0)
                why = f"cannot win: {behind:.1%} behind {leader.architecture.label()}, std of the difference {std:.1%}"
                self.out[shape] = why
                self.mirror.finish(shape, why)
            self.ledger.record(self._row(1, number, shape, score, "pruned" if shape in self.out else "kept", why))

    def _row(self, rung: int, number: int, shape: Architecture, score: Score, state: str, why: str) -> dict[str, Any]:
        short = self.shorts.get(shape) if rung else None
        curve = None if short is None else {"tokens": short.points[-1][0], "alpha": short.points[-1][1]} if short.points else None
        return {
            "rung": rung, "round": number, "shape": shape.to_dict(), "label": shape.label(), "gamma": score.gamma,
            "tokens": short.tokens if short else 0, "seconds": short.seconds if short else 0.0, "measured": curve,
            "alpha": score.alpha.to_dict(), "tau": score.tau.to_dict(), "score": score.speedup.to_dict(), "state": state,
            "why": why,
        }  # fmt: skip

    def _record_prior(self, contenders: Sequence[Score]) -> None:
        if any(row["rung"] == 0 for row in self.ledger.data["rungs"]):
            return
        for score in contenders:
            self.ledger.record(self._row(0, 0, score.architecture, score, "kept", "could still win"))
        self.ledger.data["rung0"] = {"scored": len(self.pool), "contenders": len(contenders)}
        self.ledger.save()

    # -- finalists --------------------------------------------------------------------------------------------------------------

    def finalists(self) -> list[TrainedDraft]:
        """Train one to three in full with the time that is left: half of it for all alike, half for the best of them."""
        data = self.ledger.data
        wanted = max(1, self.session.request.confirm)
        if data["finalists"] is None:
            if self.shorts and self.full_tokens is None:
                self.aim(self.left_s())
            self.learn()
            scores = self.contenders() or self.standings()
            if data["rounds"]:  # what was measured goes before what is only believed
                scores = [score for score in scores if score.architecture in self.shorts] or scores
            most = max(wanted, min(3, self.session.request.finalists))
            loss = slope(scores[0]) * curve_slope(self.full_tokens or rungs.FIRST_TOKENS)
            count = max(wanted, rungs.finalist_count(self.draws(scores[: 2 * most]), loss, most))
            shapes = [score.architecture for score in scores[:count]]
            budget = self.left_s()
            data["finalists"] = {
                "shapes": [shape.to_dict() for shape in shapes], "ends_at_s": self.ledger.elapsed_s() + budget,
                "predicted": [score.to_dict() for score in scores[:count]], "longer": None,
            }  # fmt: skip
            self.ledger.save()
        entry = data["finalists"]
        shapes = [Architecture.from_dict(item) for item in entry["shapes"]]

        def left_s() -> float:
            return max(0.0, entry["ends_at_s"] - self.ledger.elapsed_s())

        alone = len(shapes) == 1
        if not alone and "tokens" not in entry:
            done = [self.shop.spent(shape)[0] for shape in shapes]
            entry["tokens"] = equal_tokens(ALL_SHARE * left_s(), [self.speed(shape) for shape in shapes], done)
            self.ledger.save()
        names = ", ".join(shape.label() for shape in shapes)
        say(f"rung 2: full training, about {human_time(left_s())}: {names}")
        start, seed = time.monotonic(), self.session.request.seed
        drafts = [] if alone else train_alike(self.shop, shapes, entry["tokens"], left_s, seed)
        if entry["longer"] is None:
            best = 0 if alone else best_of(drafts, self.session.scorer)
            entry["longer"] = {"index": best, "seconds": self.shop.spent(shapes[best])[1] + left_s()}
            self.ledger.step("finalists", 0.0)
        best = entry["longer"]["index"]
        drafts[best : best + 1] = [self.shop.train(shapes[best], entry["longer"]["seconds"], seed, "the best finalist")]
        self.ledger.step("finalists", time.monotonic() - start)
        for draft in drafts:
            score = self._measured(draft)
            record = read_json(draft.folder / "training.json", "training record")
            row = self._row(2, 0, draft.architecture, score, "trained", "measured on held-out text")
            row |= {"tokens": record["tokens"], "seconds": record["seconds"], "measured": None}
            predicted = next(p for p, shape in zip(entry["predicted"], shapes, strict=True) if shape == draft.architecture)
            row["predicted_alpha"] = predicted["alpha"]
            self.ledger.record(row)
            last = 1 + max((item["round"] for item in data["rounds"]), default=0)
            self.mirror.report(draft.architecture, last, score.speedup.value, 0.0, score.alpha.to_dict())
            self.mirror.finish(draft.architecture, "finalist", score.speedup.value)
        for shape in self.shorts:
            if shape not in shapes and shape not in self.out:
                self.mirror.finish(shape, "not among the finalists")
        for row in data["rungs"]:
            if row["rung"] == 1 and row["state"] == "kept" and Architecture.from_dict(row["shape"]) not in shapes:
                later = any(r["rung"] == 1 and r["round"] > row["round"] and r["shape"] == row["shape"] for r in data["rungs"])
                if not later:
                    row["state"], row["why"] = "dropped", "not chosen for the next round or the finalists"
        self.ledger.save()
        context = replace(self.scorer.context, temperature=0.0)
        self.learn([AcceptanceObservation(draft.architecture, draft.alpha, context) for draft in drafts])
        return drafts

    def _measured(self, draft: TrainedDraft) -> Score:
        return self.session.scorer.measured(draft.architecture, draft.alpha, draft.tau)


def slope(score: Score) -> float:
    """d ln(speed-up) / d logit(alpha) at the score's gamma."""
    alpha = score.alpha.value
    return speculation.tau_slope(alpha, score.gamma) * alpha * (1.0 - alpha) / score.tau.value


def _logit_at(short: ShortTraining, tokens: int) -> float:
    """logit(alpha) at `tokens`, between the points of its curve (straight in ln(tokens))."""
    xs = [math.log(point[0]) for point in short.points]
    ys = [speculation.logit(speculation.clamped(point[1])) for point in short.points]
    return float(np.interp(math.log(tokens), xs, ys))


def part_of_round(schedule: Sequence[Mapping[str, int]], number: int) -> float:
    """The share of round `number` (from 1) in what it and those after it cost."""
    costs, before = [], 0
    for step in schedule:
        costs.append(step["places"] * (step["tokens"] - before))
        before = step["tokens"]
    return costs[number - 1] / sum(costs[number - 1 :])


def kinship(first: Architecture, second: Architecture) -> float:
    """How much of what no term explains two shapes have in common, 0 to 1: falls with every doubling of a dimension. Assumed."""
    pairs = (
        (first.num_hidden_layers, second.num_hidden_layers, 2.0), (first.hidden_size, second.hidden_size, 2.0),
        (first.intermediate_size, second.intermediate_size, 0.5), (first.num_attention_heads, second.num_attention_heads, 0.5),
        (first.num_key_value_heads, second.num_key_value_heads, 0.25), (first.head_rows, second.head_rows, 0.25),
    )  # fmt: skip
    return math.exp(-sum(weight * abs(math.log2(a / b)) for a, b, weight in pairs))


def _head(shape: Architecture) -> tuple[Any, ...]:
    return (shape.draft_vocab_size, shape.tie_word_embeddings, shape.head_dim, shape.model_type)


def work(shape: Architecture) -> float:
    """What a training token costs, in parameters: the layers and the head's rows (the embedding is a lookup)."""
    return body_parameters(shape) + shape.head_rows * shape.hidden_size + 1e6


# --- the whole of it ---------------------------------------------------------------------------------------------------


def confirm_seconds(session: SearchSession, prompt_tokens: float) -> tuple[float, float]:
    """(seconds per prompt of `prompt_tokens` tokens, fixed seconds) of confirming one draft, from the profile's times and the
    machine's speed now.

    A prompt is read by the target alone, by the target beside the draft, and by the draft. A token of it is priced at what one
    more token costs a verification pass: dear, since long passes use a machine better; the draft is priced as the target's share
    that a typical speed-up leaves.
    """
    slowdown = machine_slowdown(session.source) or 1.0
    scorer, request = session.scorer, session.request
    step_s = scorer.decode_s.value * slowdown
    most = request.max_gamma
    longer = scorer.latency.verify_s(scorer.target, scorer.workload, most).value - scorer.decode_s.value
    read_s = max(0.0, longer / most) * slowdown * prompt_tokens
    per_prompt = (request.answer_tokens * step_s + read_s) * (1.0 + 1.0 / TYPICAL_SPEEDUP) + read_s / TYPICAL_SPEEDUP
    exact = EXACT_TOKENS * FLOAT32_COST * step_s if request.temperature == 0 else 0.0
    return per_prompt, exact


def confirming_tokens(session: SearchSession) -> list[int]:
    """Tokens of each prompt that confirms."""
    shop = session.workshop()
    return [len(item.token_ids) for item in shop.texts.encode(shop.prompts.confirming)]


def make_plan(session: SearchSession, ledger: Ledger) -> Plan:
    """The plan of rungs.json, or a new one."""
    if ledger.data["plan"] is not None:
        return Plan(**ledger.data["plan"])
    request = session.request
    tokens = confirming_tokens(session)
    prompts = min(request.confirm_prompts, len(tokens))
    per_prompt, fixed = confirm_seconds(session, float(np.mean(tokens)))
    plan = rungs.divide(request.time_budget_s, ledger.elapsed_s(), per_prompt, fixed, prompts, max(1, request.confirm))
    ledger.data["plan"] = plan.to_dict()
    ledger.save()
    return plan


def plan_text(plan: Plan) -> str:
    """What is done with the minutes, one line."""
    if plan.stay:
        return f"plan for {human_time(plan.budget_s)}: rung 0 only: {plan.stay}"
    return (
        f"plan for {human_time(plan.budget_s)}: the target writes text {human_time(plan.text_s)}, the prior scores all shapes, "
        f"short trainings of those that could win {human_time(plan.rung_s)}, full training of the best "
        f"{human_time(plan.finalist_s)}, confirmation on {plan.confirm_prompts} prompts {human_time(plan.confirm_s)}"
    )


def write_texts(shop: Workshop, ledger: Ledger, plan: Plan) -> None:
    """Held-out text, then the training text, then further answers, until the plan's share is used."""
    written = shop.folder / "text" / "done.json"
    start = time.monotonic()
    shop.texts.heldout(0.5 * plan.text_s)
    if not written.exists():  # a text that stopped at its budget is finished all the same: drafts must share it
        shop.texts.write_training(max(plan.text_s - ledger.elapsed_s(), 0.1 * plan.text_s))
        write_json(written, {"tokens": shop.texts.training().written_tokens})
    more = shop.folder / "more_done.json"
    if not more.exists():
        left = plan.text_s - ledger.elapsed_s()
        found = shop.texts.write_more(left if left > 0.1 * plan.text_s else 0.0)
        write_json(more, {"tokens": found.written_tokens if found else 0})
    ledger.step("text", time.monotonic() - start)
    tokens = sum(cache.written_tokens for cache in shop.texts.all_training())
    say(f"text: {tokens} tokens to train on, {shop.texts.heldout().written_tokens} held out")


def start_climb(
    session: SearchSession,
    ledger: Ledger,
    plan: Plan,
    shop: Workshop,
    ranked: Sequence[Score],
    known: list[AcceptanceObservation],
) -> Climb:
    """A climb over the shapes that rung 0 scored."""
    mirror = study.ClimbStudy(
        session.space,
        session.scorer,
        session.request.storage or session.run.storage_file,
        rungs.STD_FACTOR,
        session.about() | {"run": session.run.info["created"], "seed": session.request.seed},  # its curves are this run's
    )
    pool = {score.architecture: None for score in ranked}
    return Climb(session, shop, ledger, plan, session.scorer, known, mirror, pool=pool)


def affordable_prompts(session: SearchSession, ledger: Ledger, plan: Plan, drafts: int) -> int:
    """Prompts to confirm each of `drafts` on in the time that is left; never more than planned twice over, never below 4."""
    per_prompt, fixed = confirm_seconds(session, float(np.mean(confirming_tokens(session))))
    left = (1.0 - rungs.MARGIN_SHARE / 2) * plan.budget_s - ledger.elapsed_s()
    fitting = (left / drafts - fixed) / per_prompt if per_prompt > 0 else session.request.confirm_prompts
    return max(min(4, plan.confirm_prompts), min(int(fitting), session.request.confirm_prompts, 2 * plan.confirm_prompts))


def measured_row(session: SearchSession, draft: TrainedDraft, coverage: VocabularyCoverage) -> dict[str, Any]:
    """What a prompt file decides, measured on its held-out answers: alpha (by category), tau, gamma, coverage of the head."""
    score = session.scorer.measured(draft.architecture, draft.alpha, draft.tau)
    return {
        "label": draft.architecture.label(),
        "shape": draft.architecture.to_dict(),
        "alpha": draft.alpha.to_dict(),
        "alpha_by_category": {name: value.to_dict() for name, value in draft.alpha_by_category.items()},
        "gamma": score.gamma,
        "tau": score.tau.to_dict(),
        "tau_by_gamma": {gamma: value.to_dict() for gamma, value in draft.tau.items()},
        "speedup": score.speedup.to_dict(),
        "coverage": coverage.share(draft.architecture.head_rows),
        "head_rows": draft.architecture.head_rows,
    }


def trial_rows(rows: Sequence[dict[str, Any]], ledger: Ledger) -> list[dict[str, Any]]:
    """Rows of trials.csv with what each rung said of a shape: the rung it reached, its state, alpha with its source per rung."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in ledger.data["rungs"]:
        found.setdefault(_key(record["shape"]), []).append(record)
    result: list[dict[str, Any]] = []
    seen: set[str] = set()
    for row in rows:
        records = found.get(_key(row), []) if row.get("state") == "COMPLETE" else []
        result.append(with_rungs(row, records) if row.get("state") == "COMPLETE" else dict(row))
        seen.update(_key(record["shape"]) for record in records)
    for key, records in found.items():
        if key not in seen:
            last = {**records[-1]["shape"], "speedup": records[-1]["score"]["value"], "speedup_std": records[-1]["score"]["std"]}
            extra = {
                "number": len(result),
                "state": "COMPLETE",
                "origin": "climb",
                "feasible": True,
                "invalid": "",
            }
            result.append(with_rungs({**extra, **last}, records))
    return result


def with_rungs(row: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A row with the columns of the rungs its shape reached."""
    merged = {**row, "rung": max((record["rung"] for record in records), default=0)}
    for record in records:
        name = f"rung_{record['rung']}" + (f"_{record['round']}" if record["rung"] == 1 else "")
        alpha, score = record["alpha"], record["score"]
        merged |= {
            f"{name}_state": record["state"], f"{name}_alpha": alpha["value"], f"{name}_alpha_std": alpha["std"],
            f"{name}_alpha_source": alpha["source"], f"{name}_speedup": score["value"],
        }  # fmt: skip
    return merged


_SHAPE: Final = tuple(Architecture.__dataclass_fields__)


def _key(shape: Mapping[str, Any]) -> str:
    return repr([shape.get(name) for name in _SHAPE])


def summary(ledger: Ledger) -> list[dict[str, Any]]:
    """One entry per rung and round: how many candidates, minutes, the best score, what was dropped."""
    rows: list[dict[str, Any]] = []
    data = ledger.data
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for record in data["rungs"]:
        groups.setdefault((record["rung"], record["round"]), []).append(record)
    for (rung, number), records in sorted(groups.items()):
        best = max(records, key=lambda record: record["score"]["value"])
        if rung == 1:
            seconds = next((entry.get("seconds", 0.0) for entry in data["rounds"] if entry["round"] == number), 0.0)
        else:
            seconds = data["steps"].get("search" if rung == 0 else "finalists", 0.0)
        gone = [record for record in records if record["state"] in ("pruned", "dropped")]
        scored = data.get("rung0", {}).get("scored", len(records)) if rung == 0 else len(records)
        rows.append(
            {
                "rung": rung, "round": number, "what": ("prior", "short training", "full training")[rung],
                "candidates": scored, "tokens": max(record["tokens"] for record in records), "seconds": seconds,
                "best": best["label"], "score": best["score"], "alpha": best["alpha"],
                "dropped": [{"label": record["label"], "why": record["why"]} for record in gone]
                if rung else [{"label": f"{scored - len(records)} shapes", "why": "cannot win"}] if scored > len(records) else [],
                "records": records,
            }
        )  # fmt: skip
    return rows
