"""Minutes: the plan of a climb, what a training costs at the speed that was measured, what a
confirmation costs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import body_parameters
from archsearch.drafts.records import ShortTraining
from archsearch.engine_facts import engine_facts
from archsearch.models.drafters import HEAD_FAMILIES
from archsearch.pipeline.latency import machine_slowdown
from archsearch.pipeline.session import SearchSession
from archsearch.progress import human_time
from archsearch.runs.state import StateFile
from archsearch.search import rungs
from archsearch.search.objective import Score
from archsearch.search.rungs import Plan, Round

EXACT_TOKENS: Final = 4 * 32 * 2  # what the exactness check in float32 generates
FLOAT32_COST: Final = 2.0  # of a target step, beside the run's dtype
TYPICAL_SPEEDUP: Final = 1.5  # of the half of a confirmation that runs with a draft
COMPARISON_COST: Final = (
    2.0  # a head and a draft beside the target alone, in confirmations of one draft
)
FIRST_GUESS_SPEED: Final = 2000.0  # training tokens/s before anything was trained
LOOKS: Final = 3  # at the speed of a machine that seems busy
BETWEEN_LOOKS_S: Final = 2.0


@dataclass(frozen=True)
class TrainingCosts:
    """What training takes, by what `shorts` took so far (a view: it grows with the climb)."""

    shorts: Mapping[Architecture, ShortTraining]

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
        """Seconds per shape and round that are no training steps: building the draft, looking at
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
        return max(0, tokens - done) / self.speed(shape) + (
            self.overhead_s() if done < tokens else 0.0
        )


def work(shape: Architecture) -> float:
    """What a training token costs, in parameters: the layers and the head's rows (the embedding is
    a lookup)."""
    return body_parameters(shape) + shape.head_rows * shape.hidden_size + 1e6


def part_of_round(schedule: Sequence[Round], number: int) -> float:
    """The share of round `number` (from 1) in what it and those after it cost."""
    costs, before = [], 0
    for step in schedule:
        costs.append(step.places * (step.tokens - before))
        before = step.tokens
    return costs[number - 1] / sum(costs[number - 1 :])


# --- the plan and the confirmation
# ------------------------------------------------------------------------------------


def make_plan(session: SearchSession, file: StateFile) -> Plan:
    """The plan of rungs.json, or a new one."""
    if file.state.plan is not None:
        return file.state.plan
    request = session.request
    tokens = confirming_tokens(session)
    prompts = min(request.confirm_prompts, len(tokens))
    slowdown = _pace(session)
    per_prompt, fixed = confirm_seconds(session, float(np.mean(tokens)), slowdown)

    def divided(confirmed: float) -> Plan:
        return rungs.divide(
            request.time_budget_s, file.elapsed_s(), per_prompt, fixed, prompts, confirmed, slowdown
        )

    plan = divided(max(1, request.confirm))
    if set(request.families) & set(HEAD_FAMILIES) & set(engine_facts(request.engine).confirms):
        beside = divided(max(1, request.confirm) + COMPARISON_COST)
        plan = plan if beside.stay else replace(beside, compares=True)
    file.state.plan = plan
    file.save()
    return plan


def _pace(session: SearchSession) -> float:
    """How much slower the machine is than its profile. Where it is busy, the least of a few looks:
    one at a second that a neighbour took would refuse the whole budget, and what a confirmation may
    take is asked again before it begins."""
    found = machine_slowdown(session.source) or 1.0
    for _ in range(LOOKS - 1):
        if found < rungs.SLOW:
            break
        time.sleep(BETWEEN_LOOKS_S)
        found = min(found, machine_slowdown(session.source) or 1.0)
    return found


def plan_text(plan: Plan) -> str:
    """What is done with the minutes, one line."""
    if plan.stay:
        return f"plan for {human_time(plan.budget_s)}: rung 0 only: {plan.stay}"
    return (
        f"plan for {human_time(plan.budget_s)}: the target writes text {human_time(plan.text_s)},"
        " the prior scores all shapes, short trainings of those that could win"
        f" {human_time(plan.rung_s)}, full training of the best {human_time(plan.finalist_s)},"
        f" confirmation on {plan.confirm_prompts} prompts {human_time(plan.confirm_s)}"
        + (", the best head beside the best draft included" if plan.compares else "")
    )


def confirm_seconds(
    session: SearchSession, prompt_tokens: float, slowdown: float | None = None
) -> tuple[float, float]:
    """(seconds per prompt of `prompt_tokens` tokens, fixed seconds) of confirming one draft, from
    the profile's times and the machine's speed now (`slowdown`: where that is known).

    A prompt is read by the target alone, by the target beside the draft, and by the draft. A token
    of it is priced at what one more token costs a verification pass: dear, since long passes use a
    machine better; the draft is priced as the target's share that a typical speed-up leaves.
    """
    slowdown = slowdown or machine_slowdown(session.source) or 1.0
    scorer, request = session.scorer, session.request
    step_s = scorer.decode_s.value * slowdown
    most = request.max_gamma
    longer = (
        scorer.latency.verify_s(scorer.target, scorer.workload, most).value - scorer.decode_s.value
    )
    read_s = max(0.0, longer / most) * slowdown * prompt_tokens
    per_prompt = (request.answer_tokens * step_s + read_s) * (
        1.0 + 1.0 / TYPICAL_SPEEDUP
    ) + read_s / TYPICAL_SPEEDUP
    exact = EXACT_TOKENS * FLOAT32_COST * step_s if request.temperature == 0 else 0.0
    return per_prompt, exact


def confirming_tokens(session: SearchSession) -> list[int]:
    """Tokens of each prompt that confirms."""
    trainer = session.trainer()
    return [len(item.token_ids) for item in trainer.texts.encode(trainer.prompts.confirming)]


def affordable_prompts(session: SearchSession, file: StateFile, plan: Plan, drafts: float) -> int:
    """Prompts to confirm each of `drafts` on in the time that is left; never more than planned
    twice over, never below 4. The best head beside the best draft is COMPARISON_COST of them."""
    per_prompt, fixed = confirm_seconds(session, float(np.mean(confirming_tokens(session))))
    left = (1.0 - rungs.MARGIN_SHARE / 2) * plan.budget_s - file.elapsed_s()
    fitting = (
        (left / drafts - fixed) / per_prompt if per_prompt > 0 else session.request.confirm_prompts
    )
    return max(
        min(4, plan.confirm_prompts),
        min(int(fitting), session.request.confirm_prompts, 2 * plan.confirm_prompts),
    )
