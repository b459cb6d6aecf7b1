"""`archsearch confirm`: a candidate in a real engine, beside its prediction, term by term.

Two ways. *By prompt*: trained drafts, one request at a time, every prompt with and without the draft, back to back. *Under load*:
several requests in flight, medians over interleaved repeats; for a draft without weights with random ones and synthetic
acceptance at the predicted rates, so that a shape is proved before it is trained.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import read_architecture
from archsearch.drafts.records import load_trained
from archsearch.drafts.trainer import Workshop
from archsearch.engines.registry import DUMMY_ENGINES
from archsearch.errors import ArchsearchError, MissingDataError, RunFailed
from archsearch.estimate import Estimate
from archsearch.export import vllm_config
from archsearch.files import write_json
from archsearch.models.targets import TargetRef
from archsearch.pipeline.candidates import write_report
from archsearch.pipeline.latency import choose_latency, machine_slowdown
from archsearch.pipeline.schedule import Rates, acceptance_of, schedule_points, speedup_when_off, write_schedule
from archsearch.pipeline.session import SearchSession, check_weights
from archsearch.progress import ProgressLine
from archsearch.search.objective import Scorer
from archsearch.speedup import error_by_term

if TYPE_CHECKING:
    from archsearch.engines.engine import Engine, EngineSettings
    from archsearch.engines.measure.under_load import LoadResult, Variant

LOAD_FILE: Final = "load-{engine}.json"
RIVAL_GAMMAS: Final = (1, 3, 5)
PARTIAL_FILE: Final = "partial-{what}-{engine}.json"
TERMS: Final = ("tau", "decode_s", "draft_s", "verify_s", "overhead_s")


@dataclass(frozen=True)
class EngineChoice:
    """Which engine runs and how it is reached; None and empty mean the run's own and the defaults.

    `python`: interpreter of the engine's environment; `server_url`, `baseline_url`: running servers with and without the draft.
    """

    name: str | None = None
    python: Path | None = None
    server_url: str | None = None
    baseline_url: str | None = None
    timeout_s: float = 600.0


def check_choice(
    choice: EngineChoice, name: str, *, synthetic: bool = False, schedule: bool = False, concurrency: int = 1
) -> None:
    """Raise ArchsearchError, before anything is loaded, for an engine that is not there or cannot do what is asked."""
    from archsearch.engines.registry import BATCHING, SCHEDULING, SYNTHESISING, check_engine, check_interpreter_choice

    check_engine(name)
    if choice.server_url is not None:
        if name != "vllm":
            raise ArchsearchError(f"--server-url is for a running vLLM server, not for {name}; leave one of the two out")
        if synthetic:
            raise ArchsearchError(
                "a running server cannot take synthetic acceptance; leave --server-url out, or train the draft first"
            )
        if schedule:
            raise ArchsearchError("a running server keeps the schedule it was started with; leave --schedule or --server-url out")
        return
    if concurrency > 1 and name not in BATCHING:
        raise ArchsearchError(
            f"{name} runs one request at a time, so {concurrency} in flight cannot be confirmed in it; use --concurrency 1, or "
            f"--engine {' or '.join(BATCHING)}"
        )
    if schedule and name not in SCHEDULING:
        raise ArchsearchError(
            f"{name} takes one gamma for all batch sizes; use --engine {' or '.join(SCHEDULING)} for --schedule"
        )
    if synthetic and name not in SYNTHESISING:
        raise ArchsearchError(
            f"{name} cannot accept by chance, which a draft without weights needs; train the draft first, or use --engine "
            f"{' or '.join(SYNTHESISING)} with --synthetic"
        )
    check_interpreter_choice(name, choice.python)


def serving_scorer(session: SearchSession, engine: str) -> tuple[Scorer, str]:
    """The session's scorer with the latencies of `engine`, and where those come from in words."""
    if engine == session.request.engine:
        return session.scorer, session.source.words
    request, folder = session.request, session.source.profile.get("folder")
    source = choose_latency(
        request.gpu,
        Path(folder) if folder else None,
        session.target.architecture,
        dtype=session.source.dtype,
        mode=session.source.mode,
        engine=engine,
        batch_size=request.batch_size,
        context_len=request.context,
        tensor_parallel=request.tensor_parallel,
    )
    return session.scorer.with_latency(source.latency), source.words


def engine_settings(
    session: SearchSession, choice: EngineChoice, *, concurrency: int, max_len: int, dtype: str
) -> EngineSettings:
    """How the session's device, dtype and ranks are told to an engine."""
    from archsearch.engines.engine import EngineSettings

    return EngineSettings(
        dtype=dtype,
        concurrency=concurrency,
        max_len=max_len,
        mode=session.source.mode,
        tensor_parallel=session.scorer.workload.tensor_parallel,
        threads=session.source.threads,
        device="cpu" if session.source.device.kind == "cpu" else "gpu",
        python=choice.python,
        timeout_s=choice.timeout_s,
        server_url=choice.server_url,
        baseline_url=choice.baseline_url,
    )


def engine_target(ref: TargetRef) -> Path | str:
    """What an engine outside this process loads as the target: a folder or a hub id."""
    from archsearch.models.load import weights_source

    return weights_source(ref)


# -------------------------------------------------------------------------------------------------------------- by prompt


def confirm_rank(
    session: SearchSession,
    rank: int,
    *,
    gammas: Sequence[int] = (),
    prompt_count: int | None = None,
    prompts: Path | None = None,
    shop: Workshop | None = None,
    choice: EngineChoice | None = None,
) -> dict[str, Any]:
    """Run target alone and target + draft in the engine, interleaved, on held-out prompts; write confirmed.json.

    The prediction beside it is the score's: latency from the profile, tau from the trace on held-out text; and once more with the
    tau that the engine counted, which leaves only the latency's error.
    """
    import gc

    from archsearch.engines.engine import EnginePrompt, Sampling
    from archsearch.engines.measure.by_prompt import confirm, exactness_check
    from archsearch.engines.registry import IN_PROCESS, make_engine
    from archsearch.models.drafts import load_draft
    from archsearch.text.prompts import encode_prompts, read_prompts

    run = session.run
    choice = choice or EngineChoice()
    name = choice.name or session.request.engine
    score = run.score(rank)
    folder = run.best_dir(rank)
    if not (folder / "model.safetensors").is_file():
        raise MissingDataError(
            f"rank {rank} of {run.path} has no weights; train it (archsearch train {run.path} --rank {rank}), or prove its shape "
            f"without (archsearch confirm {run.path} --rank {rank} --synthetic)"
        )
    check_weights(session.target)
    check_choice(choice, name)
    trained = load_trained(score.architecture, folder)
    shop = shop or session.workshop()
    check_tokenizer(shop.tokenizer, folder)
    scorer, words = serving_scorer(session, name)
    chosen = read_prompts(prompts) if prompts else shop.prompts.heldout
    count = prompt_count or session.request.confirm_prompts
    encoded = encode_prompts(spread_prompts(chosen, count), shop.tokenizer)
    asked = [EnginePrompt(item.id or str(number), item.token_ids, item.category or None) for number, item in enumerate(encoded)]
    sampling = Sampling(
        max_new_tokens=session.request.answer_tokens, temperature=session.request.temperature, seed=session.request.seed
    )
    wanted = list(gammas) or [score.gamma]
    unknown = [gamma for gamma in wanted if gamma not in trained.tau]
    if unknown:
        raise ArchsearchError(
            f"gamma {unknown[0]} was not measured on held-out text (1 to {max(trained.tau)}); use a smaller gamma"
        )
    longest = max(len(prompt.token_ids) for prompt in asked) + sampling.max_new_tokens
    inside = name in IN_PROCESS

    def factory(dtype: str) -> Callable[[], Engine]:
        settings = engine_settings(session, choice, concurrency=1, max_len=longest, dtype=dtype)
        return lambda: make_engine(name, settings, shop.tokenizer)

    def sources(dtype: str) -> tuple[Any, Any]:
        return (shop.model(dtype), load_draft(folder, dtype)) if inside else (engine_target(session.target), folder)

    slowdowns = [machine_slowdown(session.source)]
    started = time.monotonic()
    try:
        with ProgressLine(f"confirm in {name}") as line:
            results = confirm(
                factory(session.source.dtype),
                *sources(session.source.dtype),
                wanted,
                asked,
                sampling,
                apart=not inside and choice.server_url is None and _apart(session, score.architecture, len(wanted) + 1, 1),
                progress=line,
            )
    except RunFailed as error:
        raise _kept(error, folder / PARTIAL_FILE.format(what="confirmed", engine=name), "prompts") from error
    slowdowns.append(machine_slowdown(session.source))
    known_slowdowns = [value for value in slowdowns if value is not None]
    slowdown = statistics.fmean(known_slowdowns or [1.0])
    exact, unchecked = None, None
    if session.request.temperature == 0 and choice.server_url is None:
        gc.collect()
        few = asked[:4] if inside else asked  # an engine of its own loads as quickly for all
        try:
            with ProgressLine("identical output in float32") as line:
                exact = exactness_check(
                    factory("float32"), *sources("float32"), wanted[0], few, max_new_tokens=32 if inside else 64, progress=line
                )
        except RunFailed as error:  # what was measured stands without it
            unchecked = str(error)
    context = round(statistics.fmean(len(item.token_ids) for item in encoded) + session.request.answer_tokens / 2)
    local = scorer.at_context(context)
    rows = []
    for gamma, outcome in results.items():
        predicted = local.measured(score.architecture, trained.alpha, trained.tau, gammas=[gamma])
        counted = local.measured(score.architecture, outcome.alpha, {gamma: outcome.tau}, gammas=[gamma])
        row = outcome.to_dict(predicted.speedup.value)
        overhead = local.latency.overhead_s(local.target, local.workload, gamma)
        row |= {
            "predicted": predicted.to_dict(),
            "predicted_at_measured_tau": counted.speedup.value,
            "relative_error_at_measured_tau": counted.speedup.value / outcome.speedup.value - 1.0,
            "predicted_round_s": predicted.draft_s.value + predicted.verify_s.value + overhead.value,
            "overhead_s": overhead.to_dict(),
            "error_by_term": explain(
                predicted_terms(predicted, overhead),
                {
                    "tau": outcome.tau.value,
                    "decode_s": outcome.decode_s,
                    "draft_s": outcome.draft_s,
                    "verify_s": outcome.verify_s,
                    "overhead_s": outcome.rest_s,
                },
                slowdown,
            ),
            "context": context,
            "slowdown": slowdown if known_slowdowns else None,
            "dtype": session.source.dtype,
            "latency": words,
        }
        rows.append(row)
    best = max(rows, key=lambda row: row["speedup"]["value"])
    identical = None
    if exact is not None:
        identical = {"prompts": exact.prompts, "identical": exact.identical, "alpha": exact.alpha}
    best = {
        **best,
        "rank": rank,
        "architecture": score.architecture.label(),
        "identical_output_float32": identical,
        "identical_output_unchecked": unchecked,
        "other_gammas": [row for row in rows if row is not best],
        "seconds": time.monotonic() - started,
    }
    before = run.confirmed(rank)
    if name == session.request.engine or before is None or before.get("engine") == name:
        run.write_confirmed(rank, best)  # the engine that the run predicts for keeps this place
    write_json(folder / f"confirmed-{name}.json", best)
    write_report(run)
    return best


def _kept(error: RunFailed, path: Path, what: str) -> RunFailed:
    """The same failure; where it had come to something, that is in `path` and the message says so."""
    if not error.results:
        return error
    found = [result.to_dict() for result in error.results.values()]
    write_json(path, {"stopped": str(error), "results": found})
    whole = max(int(result.get("prompts") or result.get("repeats") or 0) for result in found)
    return RunFailed(f"{error}; the {whole} {what} before it are kept in {path}")


def predicted_terms(score: Any, overhead: Estimate) -> dict[str, float]:
    """The terms of a Score as `speedup.error_by_term` takes them."""
    return {
        "tau": score.tau.value,
        "decode_s": score.decode_s.value,
        "draft_s": score.draft_s.value,
        "verify_s": score.verify_s.value,
        "overhead_s": overhead.value,
    }


def explain(predicted: dict[str, float], measured: dict[str, float | None], slowdown: float = 1.0) -> dict[str, Any] | None:
    """Predicted, measured and each term's share of the error of the speed-up; None where the engine did not tell a term.

    Measured times are divided by the machine's `slowdown`, so that they stand beside predictions at the profile's speed.
    """
    told = {name: value if name == "tau" else value / slowdown for name, value in measured.items() if value is not None}
    if len(told) < len(measured) or min(told["tau"], told["decode_s"]) <= 0:
        return None
    shares = error_by_term(predicted, told)
    return {name: {"predicted": predicted[name], "measured": told[name], "log_error": shares[name]} for name in TERMS}


def check_tokenizer(ours: Any, folder: Path) -> None:
    """Raise ArchsearchError where the draft in `folder` has a tokenizer and it is not the target's: its ids mean other tokens."""
    from archsearch.models.load import TOKENIZER_FILES, load_tokenizer, tokenizers_differ

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return
    theirs = load_tokenizer(TargetRef(folder.name, read_architecture(folder), folder=folder))
    differences = tokenizers_differ(ours, theirs, limit=2)
    if differences:
        raise ArchsearchError(
            f"the tokenizer in {folder} differs from the target's ({'; '.join(differences)}); use a draft made for this target"
        )


def spread_prompts(prompts: Sequence[Any], count: int) -> list[Any]:
    """`count` prompts at equal distances, so that every category of a sorted file is represented."""
    if len(prompts) <= count:
        return list(prompts)
    return [prompts[round(i * (len(prompts) - 1) / (count - 1))] for i in range(count)] if count > 1 else list(prompts[:1])


# ------------------------------------------------------------------------------------------------------------- under load


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
    from archsearch.engines.measure.under_load import measure_load, overall_speedups, schedule_ranges, schedule_verdict
    from archsearch.engines.registry import make_engine

    run = session.run
    choice = choice or EngineChoice()
    name = choice.name or session.request.engine
    score = run.score(request.rank)
    folder = run.best_dir(request.rank)
    has_weights = (folder / "model.safetensors").is_file()
    synthetic = request.synthetic or not has_weights
    concurrencies = sorted(set(request.concurrencies))
    check_choice(choice, name, synthetic=synthetic, schedule=request.schedule, concurrency=concurrencies[-1])
    scorer, words = serving_scorer(session, name)
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
        ranges = schedule_ranges([(number, points[number].gamma) for number in sizes])
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
                and _apart(session, score.architecture, len(variants) + 1, max(concurrencies)),
                progress=line,
                seed=session.request.seed,
            )
    except RunFailed as error:
        raise _kept(error, folder / PARTIAL_FILE.format(what="load", engine=name), "whole repeats") from error
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
    told = {
        "tau": measured.tau,
        "decode_s": alone.step_s,
        "draft_s": measured.draft_s,
        "verify_s": measured.target_s,
        "overhead_s": measured.rest_s,
    }
    return row | {
        "predicted_speedup": predicted.speedup.to_dict(),
        "relative_error": predicted.speedup.value / measured.speedup.value - 1.0,
        "relative_error_at_measured_tau": counted.speedup.value / measured.speedup.value - 1.0,
        "error_by_term": explain(predicted_terms(predicted, overhead), told, slowdown),
    }


def error_summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median absolute error of the predicted speed-up over the rows with a draft, and the shares within 5 and 10 %."""
    errors = [abs(row["relative_error"]) for row in rows if row["gamma"] and row["relative_error"] is not None]
    if not errors:
        return {"cases": 0}
    return {
        "cases": len(errors),
        "median_absolute_error": statistics.median(errors),
        "within_5_percent": statistics.fmean(error <= 0.05 for error in errors),
        "within_10_percent": statistics.fmean(error <= 0.10 for error in errors),
    }


def load_prompts(session: SearchSession, scorer: Scorer, request: LoadRequest, synthetic: bool) -> list[Any]:
    """Held-out prompts, or (synthetic) made-up ones that put the workload's context in mid-run."""
    from archsearch.engines.engine import EnginePrompt

    if not synthetic:
        from archsearch.text.prompts import encode_prompts, read_prompts

        shop = session.workshop()
        chosen = read_prompts(request.prompts) if request.prompts else shop.prompts.heldout
        encoded = encode_prompts(spread_prompts(chosen, 24), shop.tokenizer)
        return [EnginePrompt(item.id or str(i), item.token_ids, item.category or None) for i, item in enumerate(encoded)]
    rng = random.Random(session.request.seed)
    length = max(8, session.request.context - request.tokens // 2)
    most = min(1000, scorer.target.vocab_size)
    return [EnginePrompt(str(i), tuple(rng.randrange(most) for _ in range(length))) for i in range(max(request.concurrencies))]


def _apart(session: SearchSession, draft: Architecture, engines: int, concurrency: int) -> bool:
    """Whether the engines must take turns in memory: together they would need more than the device has."""
    from archsearch.capacity import memory_bytes, usable_bytes

    workload = replace(session.scorer.workload, batch_size=concurrency)
    each = memory_bytes(session.target.architecture, draft, workload).total_bytes
    fixed = 2 << 30 if session.source.device.kind == "cpu" else 0  # an engine's own libraries and buffers
    return engines * (each + fixed) > usable_bytes(session.source.device) or session.source.device.kind != "cpu"


class DraftFolders:
    """The folders that an engine loads: the trained draft, or one of its shape with random weights; the target's likewise."""

    def __init__(self, session: SearchSession, engine: str) -> None:
        from archsearch.engines.registry import IN_PROCESS

        self.session, self.engine = session, engine
        self.inside = engine in IN_PROCESS
        self.base = session.run.path / "engine"

    def draft(self, arch: Architecture, folder: Path, synthetic: bool) -> Any:
        """The draft as the engine takes it."""
        dtype = self.session.source.dtype
        if not synthetic:
            from archsearch.models.drafts import load_draft

            return load_draft(folder, dtype) if self.inside else folder
        return random_draft(arch if self.inside else arch.replace(draft_vocab_size=None), dtype, self.base, load=self.inside)

    def target(self, synthetic: bool) -> tuple[Any, bool]:
        """The target as the engine takes it, and whether its weights (and the draft's) are to be made up."""
        ref = self.session.target
        try:
            check_weights(ref)
        except MissingDataError as error:
            if not synthetic:
                raise
            if self.engine not in DUMMY_ENGINES:
                raise MissingDataError(
                    f"target {ref.name!r} has no weights here and {self.engine} needs them; give a folder that has them, or use "
                    "--engine vllm, which makes them up"
                ) from error
            return write_shape(ref.architecture, self.base / "target"), True
        if self.inside:
            return self.session.workshop().model(self.session.source.dtype), False
        return engine_target(ref), False


def random_draft(arch: Architecture, dtype: str, base: Path, *, load: bool = False) -> Any:
    """A draft of `arch` with random weights: the module (`load`), or its folder under `base`, made once."""
    from archsearch.models.drafts import build_draft, save_draft

    if load:
        return build_draft(arch, dtype)
    folder = base / arch.label().replace(" ", "_").replace("/", "-")
    if not (folder / "model.safetensors").is_file():  # weights are written last
        save_draft(build_draft(arch, dtype), folder)
    return folder


def write_shape(arch: Architecture, folder: Path) -> Path:
    """A folder with a config.json only, for engines that make weights up."""
    from archsearch.architecture.hf_config import to_hf_config

    write_json(folder / "config.json", to_hf_config(arch))
    return folder


# --------------------------------------------------------------------------------------------------------------- schedule


def schedule_rank(
    session: SearchSession, rank: int, engine: str | None = None, batch_sizes: Sequence[int] = ()
) -> dict[str, Any]:
    """The best gamma at each batch size of a candidate, by the latencies of `engine`; written to best/<rank>/schedule.json.

    Without `batch_sizes`: up to 256, on a CPU up to twice the largest batch of which passes were measured.
    vLLM's speculative_config.json of the rank gets the schedule too.
    """
    from archsearch.pipeline.schedule import BATCH_SIZES

    name = engine or session.request.engine
    score, folder = session.run.score(rank), session.run.best_dir(rank)
    scorer, words = serving_scorer(session, name)
    alpha, taus, _ = acceptance_of(scorer, score, folder)
    largest = scorer.latency.largest_batch
    usual = [size for size in BATCH_SIZES if largest is None or size <= 2 * largest]
    sizes = sorted({1, *(batch_sizes or usual)})  # a schedule begins at batch size 1
    points = schedule_points(scorer, score.architecture, alpha, taus, session.source.device, sizes)
    data = write_schedule(folder, points, name, words)
    most = points[-1].batch_size
    note = ""
    if most < sizes[-1]:
        note = f"Above batch size {most} the KV caches do not fit {session.source.device.key}."
    elif not batch_sizes and largest is not None:
        note = f"Passes were measured up to batch size {largest}; above {most} nothing is foretold."
    gammas = [gamma for _, _, gamma in data["ranges"]]
    if name == "vllm" and max(gammas):
        ranks = scorer.workload.tensor_parallel
        config = vllm_config(str(folder), max(gammas), tuple((a, b, c) for a, b, c in data["ranges"]), ranks)
        write_json(folder / "speculative_config.json", config)
    return {"run": str(session.run.path), "rank": rank, "architecture": score.architecture.label(), "note": note, **data}


__all__ = [
    "EngineChoice",
    "LoadRequest",
    "check_tokenizer",
    "confirm_load",
    "confirm_rank",
    "schedule_rank",
    "serving_scorer",
    "spread_prompts",
]
