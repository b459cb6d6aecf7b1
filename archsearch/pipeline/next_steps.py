"""What to measure next: the measurements that a user can make after a search, what each would teach
(`search.next_measurement`), its minutes, its command.

Minutes come from the command's own budget, or from predicted times; constants that nobody measured
on this machine are said in `minutes_from`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from archsearch.acceptance.learnt import training_of
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.acceptance.terms import tokens_of
from archsearch.architecture import catalogue
from archsearch.architecture.counts import parameters, pass_parameters
from archsearch.engine_facts import ENGINES, engine_facts, engines_that
from archsearch.engines.environments.environment import find_python
from archsearch.errors import ArchsearchError
from archsearch.hardware.identify import visible_gpus
from archsearch.latency.model import LatencyModel
from archsearch.models.targets import TargetRef, resolve_target
from archsearch.pipeline.climb.plan import confirm_seconds
from archsearch.pipeline.climb.trainings import FIRST_GUESS_SPEED
from archsearch.pipeline.confirm import LoadRequest
from archsearch.pipeline.session import SearchSession
from archsearch.pipeline.training_budget import TRAINING_SHARE, training_peak
from archsearch.report.phrases import count_words, search_command, shell_path
from archsearch.report.terminal.search import Kind, Step
from archsearch.runs.run import WORKLOAD_FILE
from archsearch.search import rungs
from archsearch.search.next_measurement import Belief, Outlook, best_pair
from archsearch.search.objective import Score
from archsearch.training.curves import MEASURED, growth

PROMPTS: Final = 64
ANSWER_TOKENS: Final = 128
"""What `archsearch acceptance` reads by default."""
PROMPT_LOGIT_STD: Final = 0.137 * math.sqrt(24)
"""Std of logit(alpha) over one prompt: the median of five drafts confirmed on 24 prompts each (the
confirmed*.json of benchmarks/results)."""
SYNTHETIC_STD: Final = 0.025
"""Relative std of a speed-up measured under synthetic acceptance: median of 58 cases (the
load-*.json of benchmarks/results/2026-11-21-engines)."""
PROFILE_STD: Final = 0.05
"""Relative error of a pass on a measured profile: 4.5 % median of 32 draft steps, 3 % of 8
verifications (benchmarks/results/2026-11-21-epyc-2c/check-bfloat16.json)."""
PROFILE_MINUTES: Final = 10
CLIMBS: Final = (15, 30, 45, 60, 120, 240)
"""Minutes of a climb that are looked at: the least that trains two shapes is named."""
PROMPT_TOKENS: Final = 100.0
START_S: Final = 60.0
"""Assumed: starting an engine, loading a model."""
CPU_BYTES_PER_S: Final = 20e9
SIDE_BY_SIDE: Final = 16
"""Assumed, for a target whose passes were not priced on a CPU: its memory bandwidth, and answers
written together."""
LOAD_BYTES_PER_S: Final = 1e9
"""Assumed, of weights from a disk."""
SHOWN_LEAST: Final = 0.001


def next_steps(session: SearchSession, scores: Sequence[Score]) -> list[Step]:
    """The measurements that would teach something about a ranking that nothing confirmed, most per
    minute first: of each kind the best."""
    if not scores:
        return []
    belief = Belief(session.scorer, scores, session.context_of)
    best: dict[Kind, Step] = {}
    for step in sorted(_options(session, belief), key=lambda step: -step.value_per_minute):
        narrows = step.std_after < step.std  # else the winner may only change for a less sure one
        if narrows and step.value_per_minute * step.minutes >= SHOWN_LEAST:
            best.setdefault(step.kind, step)
    return list(best.values())


def _step(
    belief: Belief,
    kind: Kind,
    what: str,
    command: str,
    minutes: tuple[float, str],
    seen: Outlook,
    needs: str = "",
) -> Step:
    """In `minutes` (and what they rest on); `seen`: what is expected after it."""
    speedup = belief.scores[belief.lead].speedup.value
    stds = speedup * seen.std, speedup * seen.std_after
    worth = (seen.gain, seen.changes, seen.value / minutes[0])
    return Step(kind, what, command, *minutes, speedup, *stds, *worth, needs)


def _options(session: SearchSession, belief: Belief) -> Iterator[Step]:
    if isinstance(session.scorer.acceptance, PriorAcceptance):  # alpha was not given as a number
        yield from _drafts_that_exist(session, belief)
        yield from _short_trainings(session, belief)
    yield from _synthetic(session, belief)
    yield from _profile(session, belief)


def _drafts_that_exist(session: SearchSession, belief: Belief) -> Iterator[Step]:
    """alpha of drafts of the catalogue, on the user's prompts."""
    target, request = session.target, session.request
    if target.nowhere:
        return
    prompts = f" --prompts {shell_path(request.prompts)}" if request.prompts is not None else ""
    for draft in existing_drafts(target):
        training = training_of(draft, target)[0]
        context = replace(
            session.scorer.context, training=training, drafter="independent", trained_tokens=None
        )
        std = PROMPT_LOGIT_STD / math.sqrt(PROMPTS)
        seen = belief.acceptance_of((draft.architecture, context), std)
        if seen is None:
            continue
        seconds, words = _reading_s(session, draft)
        file = f"runs/alpha-{_file_name(target.name)}-{_file_name(draft.name)}.json"
        temperature = f" --temperature {request.temperature:g}" if request.temperature else ""
        whose = "your" if prompts else "the shipped"
        yield _step(
            belief,
            "acceptance",
            f"how much of {draft.name}, which exists, {target.name} accepts on {whose} prompts",
            f"archsearch acceptance --target {shlex.quote(request.target)} --draft"
            f" {draft.name}{prompts}{temperature} --domain {session.scorer.context.domain} --output"
            f" {file}",
            (seconds / 60.0, words),
            belief.outlook(seen),
            _weights_needed(target, draft),
        )


def existing_drafts(target: TargetRef) -> list[TargetRef]:
    """Models of the catalogue that could draft for a target: weights to be had, of its family with
    its vocabulary, at most a third of its size."""
    same = (
        entry.family
        for entry in catalogue.entries()
        if entry.name == target.name or entry.architecture == target.architecture
    )
    family = next(same, None)
    size = parameters(target.architecture)
    return [
        resolve_target(entry.name)
        for entry in catalogue.entries()
        if entry.family == family
        and (entry.hub_id or entry.weights)
        and entry.architecture.vocab_size == target.architecture.vocab_size
        and entry.parameters <= size / 3
    ]


def _reading_s(session: SearchSession, draft: TargetRef) -> tuple[float, str]:
    """(seconds that `archsearch acceptance` takes on a CPU in float32, what that rests on)."""
    tokens = PROMPTS * ANSWER_TOKENS
    step_s = 4.0 * parameters(session.target.architecture) / CPU_BYTES_PER_S
    words = (
        f"{PROMPTS} answers of {ANSWER_TOKENS} tokens, {SIDE_BY_SIDE} at a time,"
        f" {CPU_BYTES_PER_S / 1e9:.0f} GB/s assumed"
    )
    read_s = 4.0 * parameters(draft.architecture) / CPU_BYTES_PER_S * PROMPTS
    return 2 * START_S + step_s * tokens / SIDE_BY_SIDE + read_s, words


def _weights_needed(*models: TargetRef) -> str:
    """What is loaded that does not lie here; "" for nothing."""
    remote = [ref.hub_id for ref in models if ref.folder is None and not ref.weights and ref.hub_id]
    size = sum(4 * parameters(ref.architecture) for ref in models) / 2**30
    needed = [f"the weights of {' and '.join(remote)}"] if remote else []
    return " and ".join([*needed, f"{size:.0f} GiB of memory"] if remote or size > 8 else needed)


def _short_trainings(session: SearchSession, belief: Belief) -> Iterator[Step]:
    """A climb: the least time in which two shapes are trained."""
    request, target = session.request, session.target
    if not engine_facts(request.engine).make or request.confirm or target.nowhere:
        return
    asked = request.arguments() | {"profile": request.asked.profile}
    again = search_command(asked, session.run.path / WORKLOAD_FILE)
    per_prompt, fixed = confirm_seconds(session, PROMPT_TOKENS, slowdown=1.0)
    speed, words = _training_speed(session, belief)
    load_s = START_S + 2.0 * parameters(target.architecture) / LOAD_BYTES_PER_S
    for minutes in CLIMBS:
        plan = rungs.divide(60.0 * minutes, load_s, per_prompt, fixed, request.confirm_prompts)
        schedule = [] if plan.stay else rungs.halving(plan.rung_s, speed, START_S / 10)
        if not schedule:
            continue
        tokens = schedule[-1].tokens
        whole = pass_parameters(belief.scores[0].architecture)
        full = max(tokens, round(float(tokens_of(session.scorer.context, whole))))
        std = PROMPT_LOGIT_STD / math.sqrt(PROMPTS)
        common = math.hypot(growth(MEASURED, tokens, full).std, std)
        found = best_pair(belief, common, rungs.catch_up(tokens)[1])
        if found is None:
            return
        pair = " and ".join(belief.scores[i].architecture.label() for i in found[0])
        yield _step(
            belief,
            "training",
            f"short trainings, {count_words(tokens)} tokens each, of the shapes that could win,"
            f" such as {pair}",
            f"{again} --time-budget {minutes}m",
            (float(minutes), f"the budget; {words}"),
            found[1],
            " and ".join(filter(None, [_needed(session), _weights_needed(target)])),
        )
        return


def _training_speed(session: SearchSession, belief: Belief) -> tuple[float, str]:
    """(training tokens/s, what that rests on)."""
    device = session.source.device
    if device.is_cpu:
        return FIRST_GUESS_SPEED, f"{FIRST_GUESS_SPEED:.0f} training tokens/s assumed"
    peak = TRAINING_SHARE * training_peak(device)
    speed = peak / (6.0 * pass_parameters(belief.scores[0].architecture))
    share = f"{TRAINING_SHARE:.0%} of the GPU's peak"
    return speed, f"{speed:.0f} training tokens/s assumed ({share})"


def _synthetic(session: SearchSession, belief: Belief) -> Iterator[Step]:
    """Rank 1 with random weights in an engine: its real cycle at the predicted acceptance."""
    request, target = session.request, session.target
    weights = bool(target.folder or target.weights or target.hub_id)
    able = engines_that(lambda row: row.synthesises and (row.dummy_weights or weights))
    # Rounds at a given acceptance are run for shapes of the run that are models of their own.
    models = [
        i
        for i, score in enumerate(belief.scores)
        if score.drafter is None and not score.is_found and (score.rank or 1) <= request.top
    ]
    if not able or not models or belief.scores[models[0]].speedup.value <= 1.0:
        return
    asked, index = request.engine if request.engine in able else able[-1], models[0]
    other = "" if asked == request.engine else f" --engine {asked}"
    score, plan = belief.scores[index], LoadRequest()
    seconds = 2 * START_S + plan.repeats * plan.tokens * (score.decode_s.value + score.tpot_s.value)
    words = (
        f"{plan.repeats} repeats of {plan.tokens} tokens at the predicted times, two starts of"
        f" {START_S:.0f} s assumed"
    )
    yield _step(
        belief,
        "synthetic",
        f"the real cycle of rank {score.rank or 1} in {engine_facts(asked).title}, random weights,"
        " at the predicted acceptance",
        f"archsearch confirm {shell_path(session.run.path)} --rank {score.rank or 1}{other}"
        " --synthetic",
        (seconds / 60.0, words),
        belief.outlook(belief.round_of(index, SYNTHETIC_STD)),
        _needed(session, asked),
    )


def _needed(session: SearchSession, engine: str = "") -> str:
    """What is missing here to run on the search's device, in `engine` where one is named."""
    device, missing = session.source.device, []
    if not device.is_cpu and all(gpu.name != device.name for gpu in visible_gpus()):
        missing.append(f"a machine with {device.name}")
    if engine and not engine_facts(engine).in_process:
        try:
            find_python(engine)
        except ArchsearchError:
            missing.append(f"archsearch engine install {engine}")
    return " and ".join(missing)


def _profile(session: SearchSession, belief: Belief) -> Iterator[Step]:
    """The device profiled, where nobody has measured this one here."""
    request, source = session.request, session.source
    latency = source.latency
    here = latency.profile if isinstance(latency, LatencyModel) else None
    if request.asked.profile is not None or (here and here.rows and not here.imported):
        return
    engine = ENGINES.get(source.engine)
    ranks = session.scorer.workload.tensor_parallel
    own = engine is not None and engine.make and not engine.in_process
    options = f" --engine {source.engine}" if own else ""
    options += f" --tensor-parallel {ranks}" if ranks > 1 else ""
    yield _step(
        belief,
        "profile",
        f"the passes of target and drafts on {source.device.name} itself",
        f"archsearch profile --gpu {source.device.key} --target {shlex.quote(request.target)}"
        f" --dtype {source.dtype} --mode {source.mode}{options} --budget {PROFILE_MINUTES}m",
        (float(PROFILE_MINUTES), "the budget"),
        belief.outlook(belief.profile(PROFILE_STD)),
        _needed(session),
    )


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-")
