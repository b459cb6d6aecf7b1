"""The climb: from the prior over short trainings to finalists, inside a time budget. `search.rungs` decides, `finalists` trains.

Everything decided or learnt is in the run folder's rungs.json before the next step begins, and every training has its own
checkpoint: a climb that was killed goes on where it stopped, and no shape is trained twice.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from archsearch import speedup as speculation
from archsearch.acceptance.distilled import DistilledAcceptance
from archsearch.acceptance.estimator import AcceptanceEstimator, AcceptanceObservation, VocabularyCoverage
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import body_parameters
from archsearch.errors import ArchsearchError
from archsearch.files import read_json, write_json
from archsearch.finalists import ShortTraining, TrainedDraft, Workshop, paired_logit_std
from archsearch.pipeline.latency import machine_slowdown
from archsearch.pipeline.session import SearchSession
from archsearch.progress import human_time
from archsearch.search import rungs, study
from archsearch.search.objective import Score, Scorer, difference_std
from archsearch.search.rungs import Plan, Round

RUNGS_FILE: Final = "rungs.json"
FORMAT: Final = 1
POOL: Final = 48  # candidates that a choice is made among
HORIZON: Final = 16  # a curve is carried on to at most so many times its tokens: beyond, nothing is known about the order
EXACT_TOKENS: Final = 4 * 32 * 2  # what the exactness check in float32 generates
FLOAT32_COST: Final = 2.0  # of a target step, beside the run's dtype
TYPICAL_SPEEDUP: Final = 1.5  # of the half of a confirmation that runs with a draft
LEAST_FINALIST_SHARE: Final = 0.05  # of the budget: with less left, a full training is none
FIRST_GUESS_SPEED: Final = 2000.0  # training tokens/s before anything was trained


def say(text: str) -> None:
    """A line on stderr: stdout is for the result."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


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

    # -- what is believed -------------------------------------------------------------------------------------------------------

    def learn(self, finalists: Sequence[AcceptanceObservation] = ()) -> None:
        """Fit what is known of acceptance to all that was trained, and score with it from now on."""
        context = replace(self.scorer.context, trained_tokens=None if self.full_tokens is None else float(self.full_tokens))
        if self.shorts or finalists:
            from archsearch.training.curves import AlphaPoint

            curves = {arch: [AlphaPoint(*point) for point in short.points] for arch, short in self.shorts.items()}
            most = max((short.tokens for short in self.shorts.values()), default=self.full_tokens or 1)
            horizon = max(min(self.full_tokens or HORIZON * most, HORIZON * most), 1)
            at = replace(context, temperature=0.0, trained_tokens=float(horizon))
            fitted: AcceptanceEstimator = DistilledAcceptance(curves, horizon, at, sampling_std=self._sampling_std())
            fitted.fit([*self.known, *finalists])
        else:
            fitted = PriorAcceptance().fit(self.known)
        self.acceptance = fitted
        old = self.scorer
        self.scorer = Scorer(
            old.target, old.workload, old.latency, fitted, gammas=old.gammas, domain=old.context.domain,
            coverage=old.context.coverage, limits=old.limits, target_correlation=old.target_correlation,
        )  # fmt: skip
        self.scorer.context = context

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
        """Std of the difference of two logits of alpha: the estimator's, and for trained shapes that of their texts (paired)."""
        known = self.acceptance.difference_std(first, second, self.scorer.context)
        one, other = self.shorts.get(first), self.shorts.get(second)
        if one is None or other is None or first == second:
            return known
        return math.hypot(known, paired_logit_std(one, other))

    def standings(self) -> list[Score]:
        """Scores of all that are still in, best first."""
        scores = [self.scorer(shape) for shape in self.pool if shape not in self.out]
        return sorted(scores, key=lambda score: (-score.speedup.value, score.parameters))

    def contenders(self) -> list[Score]:
        """Those that could still win, best first; at most POOL, the most promising."""
        scores = self.standings()
        if not scores:
            return []
        values = [math.log(score.speedup.value) for score in scores]

        def gap(i: int, j: int) -> float:
            return difference_std(scores[i], scores[j], self.acceptance, self.scorer.context)

        kept = [i for i, alive in enumerate(rungs.could_win(values, gap)) if alive]
        kept.sort(key=lambda i: -(values[i] + gap(i, 0)))
        return [scores[i] for i in sorted(kept[:POOL])]

    def draws(self, scores: Sequence[Score]) -> np.ndarray:
        """[draws, scores] of ln(speed-up) as it may turn out when acceptance is known."""
        shapes = [score.architecture for score in scores]
        gaps = np.array([[self.gap_std(a, b) for b in shapes] for a in shapes])
        slopes = np.array([slope(score) for score in scores])
        alpha = scores[0].alpha
        level = alpha.std / max(alpha.value * (1.0 - alpha.value), 1e-3)
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
            scores = self.contenders()
            draws = self.draws(scores)
            left = data["rung_end_s"] - self.ledger.elapsed_s()
            gain = rungs.expected_gain(draws)
            if len(scores) < 2 or gain < rungs.LEAST_GAIN:
                why = "one candidate is left" if len(scores) < 2 else f"knowing more would bring {gain:.1%}"
                self.ledger.note(f"rung 1 ends after round {number - 1}: {why}")
                return False
            # This round's share of the seconds; a later one trains half as many twice as long, at about equal cost.
            share = left / (of - number + 1) if of > number else left
            costs = [self.cost_s(score.architecture, step.tokens) for score in scores]
            picks = rungs.best_set(
                draws, costs, max(share, 0.0) * 1.15, most=step.places, least=2, least_gain=rungs.LEAST_GAIN / 3
            )
            if number > 1 and sum(costs[pick.index] for pick in picks[:2]) > 1.5 * max(left, 0.0):
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
            if self.shorts:  # of equals, one whose training has begun
                scores = sorted(scores, key=lambda s: (-round(s.speedup.value, 3), s.architecture not in self.shorts))
            most = max(wanted, min(3, self.session.request.finalists))
            loss = slope(scores[0]) * curve_slope(self.full_tokens or rungs.FIRST_TOKENS)
            count = max(wanted, rungs.finalist_count(self.draws(scores[: 2 * most]), loss, most))
            shapes = [score.architecture for score in scores[:count]]
            budget = self.left_s()
            spent = [self.shorts[shape].seconds if shape in self.shorts else 0.0 for shape in shapes]
            first = budget if count == 1 else 0.5 * budget / count
            data["finalists"] = {
                "shapes": [shape.to_dict() for shape in shapes], "seconds": [before + first for before in spent],
                "longer_s": 0.0 if count == 1 else 0.5 * budget, "ends_at_s": self.ledger.elapsed_s() + budget,
                "predicted": [score.to_dict() for score in scores[:count]], "longer": None,
            }  # fmt: skip
            self.ledger.save()
        entry = data["finalists"]
        shapes = [Architecture.from_dict(item) for item in entry["shapes"]]
        names = ", ".join(shape.label() for shape in shapes)
        say(f"rung 2: full training, about {human_time(max(0.0, entry['ends_at_s'] - self.ledger.elapsed_s()))}: {names}")
        start = time.monotonic()
        drafts = []
        for place, (shape, seconds) in enumerate(zip(shapes, entry["seconds"], strict=True), start=1):
            drafts.append(self.shop.train(shape, max(seconds, 0.5), self.session.request.seed, f"finalist {place}/{len(shapes)}"))
            self.ledger.step("finalists", 0.0)
        if len(shapes) > 1:
            if entry["longer"] is None:
                best = max(range(len(drafts)), key=lambda i: self._measured(drafts[i]).speedup.value)
                left = max(0.0, entry["ends_at_s"] - self.ledger.elapsed_s())
                entry["longer"] = {"index": best, "seconds": entry["seconds"][best] + min(left, entry["longer_s"])}
                self.ledger.save()
            best = entry["longer"]["index"]
            longer = self.shop.train(shapes[best], entry["longer"]["seconds"], self.session.request.seed, "the best finalist")
            drafts[best] = longer
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


def curve_slope(tokens: int) -> float:
    """logit(alpha) per e-fold of tokens at the end of a training, by the shipped belief about curves; not below 0.05."""
    from archsearch.training.curves import CurvePrior

    prior = CurvePrior()
    return max(0.05, prior.slope[0] + prior.bend[0] * math.log(max(tokens, 1) / prior.reference_tokens))


def work(shape: Architecture) -> float:
    """What a training token costs, in parameters: the layers and the head's rows (the embedding is a lookup)."""
    return body_parameters(shape) + shape.head_rows * shape.hidden_size + 1e6


# --- the whole of it ---------------------------------------------------------------------------------------------------


def confirm_seconds(session: SearchSession) -> tuple[float, float]:
    """(seconds per prompt, fixed seconds) of confirming one draft, from the profile's decode time and the machine's speed now."""
    slowdown = machine_slowdown(session.source) or 1.0
    step_s = session.scorer.decode_s.value * slowdown
    per_prompt = session.request.answer_tokens * step_s * (1.0 + 1.0 / TYPICAL_SPEEDUP)
    exact = EXACT_TOKENS * FLOAT32_COST * step_s if session.request.temperature == 0 else 0.0
    return per_prompt, exact


def make_plan(session: SearchSession, ledger: Ledger) -> Plan:
    """The plan of rungs.json, or a new one."""
    if ledger.data["plan"] is not None:
        return Plan(**ledger.data["plan"])
    from archsearch.finalists import load_prompt_set

    request = session.request
    prompts = min(request.confirm_prompts, len(load_prompt_set(request.prompts, request.heldout).heldout))
    per_prompt, fixed = confirm_seconds(session)
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
    shop.heldout_text()
    if not written.exists():  # a text that stopped at its budget is finished all the same: drafts must share it
        shop.write_text(max(plan.text_s - ledger.elapsed_s(), 0.1 * plan.text_s))
        write_json(written, {"tokens": shop.text().written_tokens})
    more = shop.folder / "more_done.json"
    if not more.exists():
        left = plan.text_s - ledger.elapsed_s()
        found = shop.write_more(left if left > 0.1 * plan.text_s else 0.0)
        write_json(more, {"tokens": found.written_tokens if found else 0})
    ledger.step("text", time.monotonic() - start)
    tokens = sum(cache.written_tokens for cache in shop.training_caches())
    say(f"text: {tokens} tokens to train on, {shop.heldout_text().written_tokens} held out")


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
        session.space, session.scorer, session.request.storage or session.run.storage_file, rungs.STD_FACTOR
    )
    pool = {score.architecture: None for score in ranked}
    return Climb(session, shop, ledger, plan, session.scorer, known, mirror, pool=pool)


def affordable_prompts(session: SearchSession, ledger: Ledger, plan: Plan, drafts: int) -> int:
    """Prompts to confirm each of `drafts` on in the time that is left; never more than planned twice over, never below 4."""
    per_prompt, fixed = confirm_seconds(session)
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
    result = []
    for row in rows:
        merged = dict(row)
        records = found.get(_key({name: row.get(name) for name in _SHAPE}), []) if row.get("hidden_size") else []
        if row.get("state") == "COMPLETE":
            merged["rung"] = max((record["rung"] for record in records), default=0)
        for record in records:
            name = f"rung_{record['rung']}" + (f"_{record['round']}" if record["rung"] == 1 else "")
            alpha, score = record["alpha"], record["score"]
            merged |= {
                f"{name}_state": record["state"], f"{name}_alpha": alpha["value"], f"{name}_alpha_std": alpha["std"],
                f"{name}_alpha_source": alpha["source"], f"{name}_speedup": score["value"],
            }  # fmt: skip
        result.append(merged)
    return result


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


