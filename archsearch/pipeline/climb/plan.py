"""The plan of the minutes of a search that trains, what a confirmation takes, the texts that come
first; and what came of it as rows: columns of trials.csv, the table of the report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.drafts.trainer import DraftTrainer
from archsearch.engine_facts import engine_facts
from archsearch.files import write_json
from archsearch.models.files import HEAD_FAMILIES
from archsearch.pipeline.latency import machine_slowdown
from archsearch.pipeline.session import SearchSession
from archsearch.progress import human_time, say
from archsearch.runs.state import ClimbState, RungRow, StateFile
from archsearch.search import rungs
from archsearch.search.rungs import Plan

EXACT_TOKENS: Final = 4 * 32 * 2  # what the exactness check in float32 generates
FLOAT32_COST: Final = 2.0  # of a target step, beside the run's dtype
TYPICAL_SPEEDUP: Final = 1.5  # of what a confirmation runs with a draft
DRAFTS: Final = 2  # ways in which one draft is run: at its gamma, and stopping where it is unsure
# a head and a draft beside the target alone, in confirmations of one draft
COMPARISON_COST: Final = 1.4
LOOKS: Final = 3  # at the speed of a machine that seems busy
BETWEEN_LOOKS_S: Final = 2.0


def make_plan(session: SearchSession, file: StateFile) -> Plan:
    """The plan of rungs.json, or a new one."""
    if file.state.plan is not None:
        return file.state.plan
    request = session.request
    tokens = confirming_tokens(session)
    prompts = min(request.confirm_prompts, len(tokens))
    # only a plan with rounds is refused to a busy machine
    slowdown = _pace(session, LOOKS if request.climb else 1)
    per_prompt, fixed = confirm_seconds(session, float(np.mean(tokens)), slowdown)

    def divided(confirmed: float) -> Plan:
        costs = (per_prompt, fixed, prompts, confirmed, slowdown)
        return rungs.divide(request.time_budget_s, file.elapsed_s(), *costs, rounds=request.climb)

    plan = divided(max(1, request.confirm))
    if set(request.families) & set(HEAD_FAMILIES) & set(engine_facts(request.engine).confirms):
        beside = divided(max(1, request.confirm) + COMPARISON_COST)
        fits = beside.confirm_s <= rungs.MOST_CONFIRM_SHARE * request.time_budget_s
        plan = replace(beside, compares=True) if fits and not beside.stay else plan
    file.state.plan = plan
    file.save()
    return plan


def _pace(session: SearchSession, looks: int) -> float:
    """How much slower the machine is than its profile. Where it is busy, the least of `looks`: one
    at a second that a neighbour took would refuse the whole budget."""
    found = machine_slowdown(session.source) or 1.0
    for _ in range(looks - 1):
        if found < rungs.SLOW:
            break
        time.sleep(BETWEEN_LOOKS_S)
        found = min(found, machine_slowdown(session.source) or 1.0)
    return found


def plan_text(plan: Plan) -> str:
    """What is done with the minutes, one line."""
    if plan.stay:
        return f"plan for {human_time(plan.budget_s)}: rung 0 only: {plan.stay}"
    short = f" short trainings of those that could win {human_time(plan.rung_s)},"
    return (
        f"plan for {human_time(plan.budget_s)}: the target writes text {human_time(plan.text_s)},"
        f" the prior scores all shapes,{short if plan.climbs else ''} full training of the best"
        f" {human_time(plan.finalist_s)},"
        f" confirmation on {plan.confirm_prompts} prompts {human_time(plan.confirm_s)}"
        + (", the best head beside the best draft included" if plan.compares else "")
    )


def write_texts(trainer: DraftTrainer, file: StateFile, plan: Plan) -> None:
    """Held-out text, then the training text, then, in a climb, further answers, until the plan's
    share is used."""
    start = file.clock()
    trainer.texts.heldout(0.5 * plan.text_s)
    left = plan.text_s - file.elapsed_s()
    trainer.texts.write_training_once(max(left, 0.1 * plan.text_s))
    more = trainer.folder / "more_done.json"
    if plan.climbs and not more.exists():
        left = plan.text_s - file.elapsed_s()
        found = trainer.texts.growth.grow(left if left > 0.1 * plan.text_s else 0.0)
        write_json(more, {"tokens": sum(found.values()), "by_source": found})
    file.step("text", file.clock() - start)
    tokens = sum(cache.written_tokens for cache in trainer.texts.all_training())
    say(f"text: {tokens} tokens to train on, {trainer.texts.heldout().written_tokens} held out")


def confirm_seconds(
    session: SearchSession, prompt_tokens: float, slowdown: float | None = None
) -> tuple[float, float]:
    """(seconds per prompt of `prompt_tokens` tokens, fixed seconds) of confirming one draft, from
    the profile's times and the machine's speed (`slowdown`, where known).

    A prompt is read by the target alone, and in each of DRAFTS ways by the target beside the draft
    and by the draft. A token of it is priced at what one more costs a verification pass; the draft
    as the target's share that a typical speed-up leaves.
    """
    slowdown = slowdown or machine_slowdown(session.source) or 1.0
    scorer, request = session.scorer, session.request
    step_s = scorer.decode_s.value * slowdown
    most = request.max_gamma
    longer = (
        scorer.latency.verify_s(scorer.target, scorer.workload, most).value - scorer.decode_s.value
    )
    read_s = max(0.0, longer / most) * slowdown * prompt_tokens
    alone = request.answer_tokens * step_s + read_s
    per_prompt = alone + DRAFTS * (alone + read_s) / TYPICAL_SPEEDUP
    exact = EXACT_TOKENS * FLOAT32_COST * step_s if request.temperature == 0 else 0.0
    return per_prompt, exact


def confirming_tokens(session: SearchSession) -> list[int]:
    """Tokens of each prompt that confirms."""
    trainer = session.trainer()
    return [len(item.token_ids) for item in trainer.texts.encode(trainer.prompts.confirming)]


def affordable_prompts(session: SearchSession, file: StateFile, plan: Plan, drafts: float) -> int:
    """Prompts to confirm each of `drafts` on in the time that is left, from LEAST_PROMPTS to twice
    the plan's. The best head beside the best draft is COMPARISON_COST of them."""
    wanted = session.request.confirm_prompts
    per_prompt, fixed = confirm_seconds(session, float(np.mean(confirming_tokens(session))))
    left = (1.0 - rungs.MARGIN_SHARE / 2) * plan.budget_s - file.elapsed_s()
    fitting = int((left / drafts - fixed) / per_prompt)
    most = min(fitting, wanted, 2 * plan.confirm_prompts)
    return max(min(rungs.LEAST_PROMPTS, plan.confirm_prompts), most)


def trial_rows(rows: Sequence[Mapping[str, object]], state: ClimbState) -> list[dict[str, object]]:
    """Rows of trials.csv with the rung that a shape reached, its state, alpha with its source per
    rung."""
    found: dict[str, list[RungRow]] = {}
    for record in state.rungs:
        found.setdefault(_key(record.shape.to_dict()), []).append(record)
    result: list[dict[str, object]] = []
    for row in rows:
        done = row.get("state") == "COMPLETE"
        result.append(_with_rungs(row, found.pop(_key(row), [])) if done else dict(row))
    for records in found.values():  # neighbours that the search over all shapes did not try
        known = {"number": len(result), "state": "COMPLETE", "origin": "climb"}
        known |= {"feasible": True, "invalid": "", **records[-1].shape.to_dict()}
        score = records[-1].score
        known |= {"speedup": score.value, "speedup_std": score.std}
        result.append(_with_rungs(known, records))
    return result


def _with_rungs(row: Mapping[str, object], records: Sequence[RungRow]) -> dict[str, object]:
    merged = {**row, "rung": max((record.rung for record in records), default=0)}
    for record in records:
        name = f"rung_{record.rung}" + (f"_{record.round}" if record.rung == 1 else "")
        merged |= {
            f"{name}_state": record.state,
            f"{name}_alpha": record.alpha.value,
            f"{name}_alpha_std": record.alpha.std,
            f"{name}_alpha_source": record.alpha.source,
            f"{name}_speedup": record.score.value,
        }
    return merged


def _key(shape: Mapping[str, object]) -> str:
    """A shape as trials.csv has it, whose fields may be of other number types."""
    return repr([shape.get(name) for name in Architecture.__dataclass_fields__])


def summary(state: ClimbState) -> list[dict[str, object]]:
    """One entry per rung and round: candidates, minutes, the best score, what was dropped."""
    groups: dict[tuple[int, int], list[RungRow]] = {}
    for record in state.rungs:
        groups.setdefault((record.rung, record.round), []).append(record)
    return [
        _rung_entry(state, rung, number, records)
        for (rung, number), records in sorted(groups.items())
    ]


def _rung_entry(
    state: ClimbState, rung: int, number: int, records: Sequence[RungRow]
) -> dict[str, object]:
    best = max(records, key=lambda record: record.score.value)
    scored = len(records)
    if rung == 0:
        scored = state.rung0.scored if state.rung0 else scored
        seconds = state.steps.get("search", 0.0)
        over = scored - len(records)
        dropped = [{"label": f"{over} shapes", "why": "cannot win"}] if over > 0 else []
    else:
        entry = state.round(number)
        seconds = (
            (entry and entry.seconds) or 0.0 if rung == 1 else state.steps.get("finalists", 0.0)
        )
        gone = (record for record in records if record.state in ("pruned", "dropped"))
        dropped = [{"label": record.label, "why": record.why} for record in gone]
    return {
        "rung": rung,
        "round": number,
        "what": ("prior", "short training", "full training")[rung],
        "candidates": scored,
        "tokens": max(record.tokens for record in records),
        "seconds": seconds,
        "best": best.label,
        "score": best.score,
        "alpha": best.alpha,
        "dropped": dropped,
        "records": records,
    }
