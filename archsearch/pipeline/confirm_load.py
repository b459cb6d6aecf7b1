"""`archsearch confirm --concurrency`: a candidate under load, beside its prediction, term by term.

Several requests in flight, medians over interleaved repeats; for a draft without weights with random ones and synthetic
acceptance at the predicted rates, so that a shape is proved before it is trained.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.estimate import Estimate
from archsearch.files import write_json
from archsearch.models.files import has_weights
from archsearch.pipeline.comparison import error_summary, explain, measured_terms, predicted_terms
from archsearch.pipeline.engine_choice import (
    PARTIAL_FILE,
    EngineChoice,
    check_choice,
    engine_settings,
    keep_partial,
    serving_scorer,
    take_turns,
)
from archsearch.pipeline.latency import machine_slowdown
from archsearch.pipeline.schedule import Rates, acceptance_of, schedule_points, speedup_when_off
from archsearch.pipeline.session import SearchSession
from archsearch.pipeline.stand_ins import DraftFolders
from archsearch.progress import ProgressLine
from archsearch.schedule import schedule_from_points
from archsearch.search.objective import Scorer
from archsearch.text.prompt_set import spread_prompts

if TYPE_CHECKING:
    from archsearch.engines.measure.under_load import LoadResult, Variant

LOAD_FILE: Final = "load-{engine}.json"
RIVAL_GAMMAS: Final = (1, 3, 5)


@dataclass(frozen=True)
class LoadRequest:
    """What is confirmed under load: `gammas` (empty: the best at each concurrency), `synthetic` acceptance
    (always for a draft without weights), the `schedule` against each fixed gamma, `tokens` new ones per request."""

    rank: int = 1
    gammas: tuple[int, ...] = ()
    concurrencies: tuple[int, ...] = (1,)
    synthetic: bool = False
    schedule: bool = False
    repeats: int = 5
    tokens: int = 64
    prompts: Path | None = None


def confirm_load(session: SearchSession, request: LoadRequest, choice: EngineChoice | None = None) -> dict[str, Any]:
    """Run a candidate at several concurrencies and write load-<engine>.json: predicted beside measured, term by term.

    With synthetic acceptance the engine accepts by chance at the predicted rates: times are real, the text is not the target's.
    """
    from archsearch.engines.engine import Sampling
    from archsearch.engines.measure.under_load import measure_load, overall_speedups, schedule_verdict
    from archsearch.engines.registry import make_engine

    run = session.run
    choice = choice or EngineChoice()
    name = choice.name or session.request.engine
    score = run.score(request.rank)
    folder = run.best_dir(request.rank)
    synthetic = request.synthetic or not has_weights(folder)
    concurrencies = sorted(set(request.concurrencies))
    check_choice(choice, name, synthetic=synthetic, schedule=request.schedule, concurrency=concurrencies[-1])
    scorer, words = serving_scorer(session, name)
    engine_facts(name).check_draft(score.architecture, scorer.workload.tensor_parallel)
    alpha, taus, rates = acceptance_of(scorer, score, folder)
    device = session.source.device
    sizes = sorted({1, *concurrencies}) if request.schedule else concurrencies  # a schedule begins at batch size 1
    points = {point.batch_size: point for point in schedule_points(scorer, score.architecture, alpha, taus, device, sizes)}
    missing = [number for number in concurrencies if number not in points]
    if missing:
        raise ArchsearchError(
            f"target and draft at {missing[0]} requests do not fit {device.key}; lower --concurrency or --context"
        )
    # A schedule is held against fixed gammas below and above its own too.
    usual = {gamma for gamma in RIVAL_GAMMAS if gamma in taus} if request.schedule else set()
    gammas = sorted(set(request.gammas)) or sorted({max(1, points[number].gamma) for number in concurrencies} | usual)
    beyond = [gamma for gamma in gammas if gamma not in taus or (synthetic and gamma not in rates)]
    if beyond:
        known = min(max(taus), max(rates)) if synthetic else max(taus)
        raise ArchsearchError(f"acceptance is known for gamma 1 to {known}, not for {beyond[0]}; use a smaller --gamma")
    folders = DraftFolders(session, name)
    draft, target, dummy = folders.draft(score.architecture, folder, synthetic), *folders.target(synthetic)
    if request.schedule:
        ranges = schedule_from_points([(number, points[number].gamma) for number in sizes])
        # An engine takes one set of rates, for the largest gamma. The fixed gammas get the same, so that only times differ.
        common = rates[max([*gammas, *(gamma for _, _, gamma in ranges)])]
        rates = {gamma: common[:gamma] for gamma in rates if gamma <= len(common)}
    variants = _variants(gammas, draft, rates if synthetic else {})
    if request.schedule:
        variants.append(_scheduled(ranges, draft, rates if synthetic else {}))
    asked = load_prompts(session, scorer, request, synthetic)
    sampling = Sampling(
        max_new_tokens=request.tokens,
        temperature=0.0 if synthetic else session.request.temperature,
        seed=session.request.seed,
        ignore_end=synthetic,
    )
    longest = max(len(prompt.token_ids) for prompt in asked) + request.tokens
    settings = replace(
        engine_settings(session, choice, concurrency=max(concurrencies), max_len=longest, dtype=session.source.dtype),
        dummy_weights=dummy,
    )
    tokenizer = None if synthetic else session.workshop().tokenizer
    started = time.monotonic()
    slowdowns = [machine_slowdown(session.source)]
    try:
        with ProgressLine(f"{name} under load") as line:
            results = measure_load(
                lambda _: make_engine(name, settings, tokenizer),
                target,
                variants,
                asked,
                concurrencies,
                sampling,
                repeats=request.repeats,
                # every held-out prompt at least once over the repeats: tau differs more between prompts than times do
                per_request=1 if synthetic else max(2, math.ceil(len(asked) / (request.repeats * concurrencies[-1]))),
                apart=choice.server_url is None
                and not folders.inside
                and take_turns(session, score.architecture, len(variants) + 1, max(concurrencies)),
                progress=line,
                seed=session.request.seed,
            )
    except RunFailed as error:
        raise keep_partial(error, folder / PARTIAL_FILE.format(what="load", engine=name), "whole repeats") from error
    slowdowns.append(machine_slowdown(session.source))
    slowdown = statistics.fmean([value for value in slowdowns if value is not None] or [1.0])
    context = round(statistics.fmean(len(prompt.token_ids) for prompt in asked) + request.tokens / 2)
    local = scorer.at_context(context)
    rows = [
        _load_row(local, score.architecture, alpha, taus, results, variant, number, slowdown)
        for variant in variants
        for number in concurrencies
    ]
    baseline = [results["alone", number].to_dict() for number in concurrencies]
    data: dict[str, Any] = {
        "engine": name,
        "engine_version": results["alone", concurrencies[0]].engine_version,
        "rank": request.rank,
        "architecture": score.architecture.label(),
        "dtype": session.source.dtype,
        "synthetic": synthetic,
        "alpha": alpha.to_dict(),
        "asked_acceptance_by_position": rates[max(gammas)] if synthetic else None,
        "context": context,
        "slowdown": slowdown if slowdowns[0] is not None else None,
        "repeats": request.repeats,
        "latency": words,
        "baseline": baseline,
        "rows": rows,
        "summary": error_summary(rows),
        "seconds": time.monotonic() - started,
    }
    if request.schedule:
        fixed = [variant.name for variant in variants if variant.draft is not None and not variant.schedule]
        data["schedule"] = {
            "ranges": [list(entry) for entry in variants[-1].schedule],
            "verdict": schedule_verdict(results, variants[-1].name, fixed, concurrencies),
            "overall": overall_speedups(results, [variants[-1].name, *fixed], concurrencies),
        }
    write_json(folder / LOAD_FILE.format(engine=name), data)
    return data


def _variants(gammas: Sequence[int], draft: Any, rates: Rates) -> list[Variant]:
    from archsearch.engines.measure.under_load import Variant

    return [Variant(f"gamma {gamma}", draft, gamma, tuple(rates.get(gamma, ()))) for gamma in gammas]


def _scheduled(ranges: Any, draft: Any, rates: Rates) -> Variant:
    from archsearch.engines.measure.under_load import Variant

    largest = max(gamma for _, _, gamma in ranges)
    if not largest:
        raise ArchsearchError(
            "no gamma pays at any of these batch sizes, so the schedule is off and there is no draft to serve; leave --schedule "
            "out, or train further"
        )
    return Variant("schedule", draft, largest, tuple(rates.get(largest, ())), tuple(ranges))


def _load_row(
    scorer: Scorer,
    arch: Architecture,
    alpha: Estimate,
    taus: dict[int, Estimate],
    results: dict[tuple[str, int], LoadResult],
    variant: Variant,
    concurrency: int,
    slowdown: float,
) -> dict[str, Any]:
    """Predicted beside measured of one variant at one concurrency. `slowdown`: of the machine, which predicted times know
    nothing of; it is taken out of the terms and leaves the speed-up as it is. With synthetic acceptance tau is what was asked
    for."""
    gamma = variant.gamma_at(concurrency)
    measured, alone = results[variant.name, concurrency], results["alone", concurrency]
    row = {**measured.to_dict(), "baseline_tokens_per_s": alone.tokens_per_s, "decode_s": alone.step_s}
    assert measured.speedup is not None
    local = scorer.at_batch(concurrency)
    if not gamma:  # the schedule is off here: what is left of the draft is its idle pass
        off = speedup_when_off(local, arch)
        return row | {
            "predicted_speedup": off.to_dict(),
            "relative_error": off.value / measured.speedup.value - 1.0,
            "error_by_term": None,
        }
    tau = taus[gamma]
    if variant.synthetic:
        tau = replace(tau, value=1.0 + sum(variant.synthetic[:gamma]))
    predicted = local.measured(arch, alpha, {gamma: tau}, gammas=[gamma])
    counted = local.measured(arch, alpha, {gamma: Estimate(measured.tau, 0.0, "measured")}, gammas=[gamma])
    overhead = local.latency.overhead_s(local.target, local.workload, gamma)
    told = measured_terms(measured.tau, alone.step_s, measured.draft_s, measured.target_s, measured.rest_s)
    return row | {
        "predicted_speedup": predicted.speedup.to_dict(),
        "relative_error": predicted.speedup.value / measured.speedup.value - 1.0,
        "relative_error_at_measured_tau": counted.speedup.value / measured.speedup.value - 1.0,
        "error_by_term": explain(predicted_terms(predicted, overhead), told, slowdown),
    }


def load_prompts(session: SearchSession, scorer: Scorer, request: LoadRequest, synthetic: bool) -> list[Any]:
    """Held-out prompts, or (synthetic) made-up ones that put the workload's context in mid-run."""
    from archsearch.engines.engine import EnginePrompt

    if not synthetic:
        from archsearch.text.prompts import read_prompts

        shop = session.workshop()
        chosen = read_prompts(request.prompts) if request.prompts else shop.prompts.confirming
        encoded = spread_prompts(shop.texts.encode(chosen), 24)
        return [EnginePrompt(item.id or str(i), item.token_ids, item.category or None) for i, item in enumerate(encoded)]
    rng = random.Random(session.request.seed)
    length = max(8, session.request.context - request.tokens // 2)
    most = min(1000, scorer.target.vocab_size)
    return [EnginePrompt(str(i), tuple(rng.randrange(most) for _ in range(length))) for i in range(max(request.concurrencies))]
