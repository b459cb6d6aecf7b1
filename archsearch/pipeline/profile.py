"""`archsearch profile`: measure this device, and check the latency model on shapes it has not seen."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import parameters
from archsearch.engine_facts import engine_facts, engines_that
from archsearch.engines.registry import check_interpreter_choice
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.estimate import Estimate
from archsearch.files import ensure_writable_dir, write_json
from archsearch.hardware.device import Device
from archsearch.hardware.identify import check_claim
from archsearch.latency.model import LatencyModel
from archsearch.models.targets import TargetRef
from archsearch.profiles import Profile, cpu_stack, current_stack, stack_key
from archsearch.progress import ProgressLine
from archsearch.search.space import InvalidShape, SearchSpace
from archsearch.workload import dtype_name

# What a check is to reach: median error, a margin, and the share of cases within it.
CPU_GOAL = (0.06, 0.12, 0.80)
GPU_GOAL = (0.05, 0.10, 0.90)
GPU_CHECK_MODEL_BYTES = 32 << 30


ENGINE_STAND_IN = Architecture(512, 1408, 4, 8, 8, 64, 32000)


@dataclass(frozen=True)
class ProfileRequest:
    """What `archsearch profile` was asked: `dtypes` empty means the device's best first, then the other."""

    gpu: str
    target: Architecture | None
    space: SearchSpace
    dtypes: tuple[str, ...] = ()
    budget_s: float = 300.0
    check: int = 0
    threads: int | None = None
    output: Path | None = None
    batch_size: int = 1
    engine: bool = True
    seed: int = 0
    modes: tuple[str, ...] = ()
    tensor_parallel: int = 1
    allow_busy: bool = False
    engine_name: str = "transformers"
    engine_python: Path | None = None
    target_ref: TargetRef | None = None


ENGINE_DRAFTS = 6
"""Drafts with random weights that an engine of its own is profiled with."""


def import_tables(
    gpu: str, *, framework: str = "vllm", tables: Path | None = None, dtypes: Sequence[str] = (), output: Path | None = None
) -> dict[str, Any]:
    """`--from aiconfigurator`: compose a GPU's profile from measured kernel tables and write it; returns what it is made of."""
    from archsearch.importers.aiconfigurator import import_profile

    with ProgressLine("import tables") as line:
        profile = import_profile(
            gpu,
            framework=framework,
            data=tables,
            dtypes=[dtype_name(name) for name in dtypes] or ["bfloat16"],
            output=output,
            progress=line,
        )
    return {
        "folder": str(profile.folder),
        "device": profile.device["key"],
        "rows": len(profile.rows),
        "origin": profile.origin,
        "provenance": profile.provenance,
    }


def sample_space(space: SearchSpace, target: Architecture, count: int, seed: int = 0) -> list[Architecture]:
    """Up to `count` distinct valid shapes drawn at random: what a sweep covers and a check draws from."""
    rng = random.Random(seed)
    dimensions = space.dimensions(target)
    found: dict[Architecture, None] = {}
    for _ in range(200 * count):
        shape = space.build(tuple(rng.randrange(len(dimension.choices)) for dimension in dimensions), target)
        if not isinstance(shape, InvalidShape):
            found[shape] = None
            if len(found) >= count:
                break
    if not found:
        space.check(target)
    return list(found)


def device_dtypes(device: Device, asked: Sequence[str]) -> list[str]:
    """The dtypes to measure: those asked for, or the device's native one first."""
    if asked:
        return [dtype_name(name) for name in asked]
    return ["bfloat16", "float32"] if device.native_bf16 else ["float32", "bfloat16"]


def profile_device(request: ProfileRequest) -> dict[str, Any]:
    """Measure this device until the budget is spent or every planned row exists; continue where an earlier run stopped.

    Returns a summary: folder, rows, noise, what the latency model learnt per dtype, and the check's results.
    Raises ArchsearchError when the device is not the one claimed, or is busy.
    """
    device = check_claim(request.gpu, request.threads)
    _check_engine_request(request)
    if device.kind != "cpu":
        return profile_gpu(request, device)
    if "graph" in request.modes or request.tensor_parallel > 1:
        raise ArchsearchError("--mode graph and --tensor-parallel are for GPUs; a CPU is measured in eager mode, on one device")
    stack = cpu_stack()
    folder = request.output or Path("profiles") / device.key / stack_key(stack)
    ensure_writable_dir(folder)

    import torch

    from archsearch.profiling import cpu_sweep as sweeps

    torch.set_num_threads(device.threads or 1)
    profile = Profile.open(folder, device.to_dict(), stack)
    bench = sweeps.CpuBench(profile, device.last_level_cache_bytes or (32 << 20))
    reference = request.target or ENGINE_STAND_IN
    drafts = sample_space(request.space, reference, 400, request.seed)
    dtypes = device_dtypes(device, request.dtypes)
    before = len(profile.rows)
    memory = float(device.memory_bytes)
    points = {
        dtype: sweeps.plan(drafts, request.target, dtype, batch=request.batch_size, memory_bytes=memory) for dtype in dtypes
    }
    other = request.engine and not engine_facts(request.engine_name).in_process
    if not (other and _has_model(profile, dtypes[0])):  # ops and whole models are measured already: go on with the engine
        with ProgressLine("profile") as line:
            sweeps.sweep(bench, points, budget_s=request.budget_s, progress=line)
        if request.engine and request.batch_size == 1:
            _measure_engine(bench, profile, request.target, dtypes, memory)
    if other:
        profile_engine(request, profile, device, drafts, dtypes[0], slowdown=_probe_slowdown(bench, dtypes[0]))
    learnt = {}
    for dtype in dtypes:
        try:
            learnt[dtype] = LatencyModel(profile, dtype, engine=request.engine_name).summary()
        except MissingDataError as error:
            learnt[dtype] = {"missing": str(error)}
    checks = {}
    if request.check:
        for dtype in dtypes:
            if "missing" not in learnt[dtype]:
                unseen = drafts_for_check(request, reference, profile)
                checks[dtype] = check_profile(bench, profile, unseen, request.target, dtype, request.check, memory)
    slowdowns = bench.slowdowns or [1.0]
    quantiles = statistics.quantiles(slowdowns, n=20) if len(slowdowns) > 1 else [1.0] * 19
    return {
        "folder": str(folder),
        "device": device.key,
        "rows": len(profile.rows),
        "new_rows": len(profile.rows) - before,
        "planned_rows": sum(len(p) for p in points.values()),
        "noisy_share": profile.noisy_share,
        "slowdown_p5": quantiles[0],
        "slowdown_median": quantiles[9],
        "slowdown_p95": quantiles[-1],
        "models": learnt,
        "checks": checks,
        "known_error": profile.known_error,
    }


def _check_engine_request(request: ProfileRequest) -> None:
    """Raise ArchsearchError, before anything is measured, where the engine to be profiled is absent or has no target to run."""
    name, ref = request.engine_name, request.target_ref
    check_interpreter_choice(name, request.engine_python)
    if engine_facts(name).in_process or not request.engine:
        return
    if ref is None:
        raise ArchsearchError(f"profiling {name} runs a target in it; name one with --target")
    _can_run(name, ref)


def _can_run(name: str, ref: TargetRef) -> bool:
    """Whether the target's weights are here; False where the engine makes them up. MissingDataError where it cannot."""
    from archsearch.pipeline.session import check_weights

    try:
        check_weights(ref)
    except MissingDataError as error:
        if engine_facts(name).dummy_weights:
            return False
        raise MissingDataError(
            f"target {ref.name!r} has no weights here and {name} needs them; give a folder that has them, or use --engine "
            f"{' or '.join(engines_that(lambda row: row.dummy_weights))}, which makes them up"
        ) from error
    return True


def _has_model(profile: Profile, dtype: str) -> bool:
    try:
        LatencyModel(profile, dtype)
    except MissingDataError:
        return False
    return True


def _probe_slowdown(bench: Any, dtype: str) -> Any:
    """How much slower than the profile's reference the machine is now."""
    timer = bench.timer(dtype)

    def slowdown() -> float:
        value = statistics.median(timer.probe() for _ in range(5)) / timer.reference_s
        timer.slowdowns.append(value)
        return float(value)

    return slowdown


def profile_engine(
    request: ProfileRequest,
    profile: Profile,
    device: Device,
    shapes: Sequence[Architecture],
    dtype: str,
    mode: str = "eager",
    *,
    slowdown: Any = None,
) -> int:
    """Measure the passes of `request.engine_name` in it (or, where it does not tell them, what it adds to the profile's) and
    record the rows; what is known is not measured again. Returns the number of new rows.
    """
    import tempfile

    from archsearch.engines.engine import EngineSettings, EngineStep
    from archsearch.engines.measure.passes import BATCHES, measure_passes, measured_models, spread_drafts
    from archsearch.engines.registry import make_engine
    from archsearch.pipeline.engine_choice import engine_target
    from archsearch.pipeline.stand_ins import random_draft, write_shape
    from archsearch.workload import Workload

    name, ref = request.engine_name, request.target_ref
    if ref is None:
        raise ArchsearchError(f"profiling {name} runs a target in it; name one with --target")
    limit = parameters(ref.architecture) / 2  # a draft that is not much smaller than its target never pays
    full = [shape.replace(draft_vocab_size=None) for shape in shapes]
    drafts = spread_drafts([shape for shape in full if parameters(shape) <= limit] or full, ENGINE_DRAFTS)
    rows = [*profile.select("pass", dtype, mode), *profile.select("engine", dtype, mode)]
    known = measured_models(rows, name, ref.architecture, drafts)
    if known.issuperset({None, *drafts}):
        return 0
    # Gamma by batch size needs a schedule; without one an engine is profiled at one request, where it tells all its passes.
    batches = BATCHES if engine_facts(name).schedules else (1,) * len(BATCHES)
    settings = EngineSettings(
        dtype=dtype,
        concurrency=max(batches),
        max_len=512,
        mode=mode,
        tensor_parallel=request.tensor_parallel,
        threads=device.threads,
        device="cpu" if device.kind == "cpu" else "gpu",
        python=request.engine_python,
    )
    base_model: LatencyModel | None = None
    if device.kind != "cpu":
        base_model = LatencyModel(profile, dtype, mode)

    def passes_s(draft: Architecture | None, step: EngineStep) -> Estimate:
        assert base_model is not None
        workload = Workload(1, round(step.context), request.tensor_parallel, dtype, mode)
        verify = base_model.verify_s(ref.architecture, workload, step.gamma)
        if draft is None or not step.gamma:
            return verify
        drafting = base_model.draft_s(draft, workload, step.gamma)
        return Estimate(verify.value + drafting.value, math.hypot(verify.std, drafting.std), "modelled")

    before = len(profile.rows)
    with tempfile.TemporaryDirectory(dir=profile.folder, prefix=".engine-") as temporary:
        base = Path(temporary)
        target: Any
        if _can_run(name, ref):
            target = engine_target(ref)
        else:
            target, settings = write_shape(ref.architecture, base / "target"), replace(settings, dummy_weights=True)
        # Known ones keep their place in the list, because the place decides which gammas a draft is measured with.
        folders = [(arch, base if arch in known else random_draft(arch, dtype, base)) for arch in drafts]
        with ProgressLine(f"passes of {name}") as line:
            measure_passes(
                lambda: make_engine(name, settings),
                target,
                ref.architecture,
                folders,
                dtype=dtype,
                mode=mode,
                vocabulary=ref.architecture.vocab_size,
                batches=batches,
                slowdown=slowdown or (lambda: 1.0),
                passes_s=passes_s if base_model is not None else None,
                known=known,
                record=profile.record,
                progress=line,
            )
    return len(profile.rows) - before


def profile_gpu(request: ProfileRequest, device: Device) -> dict[str, Any]:
    """Measure a GPU in its modes and dtypes, where the latency model is least sure first; the budget is shared equally.

    Returns the summary of `profile_device`, with `skipped` (points that did not fit the memory) and, for each mode and dtype, the
    relative std at which the sweep stopped.
    """
    from archsearch.profiling import collectives, cuda
    from archsearch.profiling import gpu_sweep as selection

    stack = current_stack()
    folder = request.output or Path("profiles") / device.key / stack_key(stack)
    problem = cuda.cuda_problem()
    if problem is not None:
        raise ArchsearchError(f"cannot measure on {device.name}: {problem}")
    ensure_writable_dir(folder)
    profile = Profile.open(folder, device.to_dict(), stack)
    if profile.imported:
        raise ArchsearchError(f"{folder} holds imported tables; pass another --output for measured rows")
    before = len(profile.rows)
    reference = request.target or ENGINE_STAND_IN
    drafts = sample_space(request.space, reference, 400, request.seed)
    modes = request.modes or ("graph", "eager")
    plans = [(mode, dtype) for mode in modes for dtype in gpu_dtypes(device, mode, request.dtypes)]
    memory = float(device.memory_bytes)
    sweeps: dict[str, dict[str, Any]] = {}
    learnt: dict[str, Any] = {}
    checks: dict[str, Any] = {}
    skipped: list[str] = []
    benches = {
        mode: cuda.open_bench(device, profile, mode=mode, dtype=dtype, allow_busy=request.allow_busy) for mode, dtype in plans
    }
    profile.provenance = {mode: bench.provenance() for mode, bench in benches.items()}
    profile.save_header()
    for mode, dtype in plans:
        bench = benches[mode]
        wanted = selection.needs(
            drafts,
            request.target,
            dtype,
            mode,
            selection.Asked(ranks=request.tensor_parallel, seed=request.seed),
            selection.Room(memory_bytes=memory, cache_bytes=float(device.last_level_cache_bytes or math.inf)),
        )
        if dtype == "float8_e4m3fn":
            wanted = selection.fp8_needs(wanted)
        with ProgressLine(f"profile {mode} {dtype}") as line:
            stop = selection.Stop(budget_s=request.budget_s / len(plans))
            result = selection.adaptive_sweep(bench, wanted, dtype, stop, progress=line)
        for row in collectives.measure_all_reduces(collectives.measurable(wanted.all_reduces()), dtype, mode):
            profile.record(row)
        if request.engine and not engine_facts(request.engine_name).in_process and mode == "graph":
            profile_engine(request, profile, device, drafts, dtype, mode)
        name = f"{dtype} {mode}"
        sweeps[name] = {"new_rows": result.new_rows, "relative_std": result.relative_std, "stopped": result.stopped}
        try:
            model = LatencyModel(profile, dtype, mode, request.engine_name)
        except MissingDataError as error:
            learnt[name] = {"missing": str(error)}
            continue
        learnt[name] = model.summary()
        if request.check:
            unseen = drafts_for_check(request, reference, profile)
            checks[name] = check_profile(bench, profile, unseen, request.target, dtype, request.check, memory, mode=mode)
    for bench in benches.values():
        skipped += [str(entry) for entry in bench.skipped]
    profile.save_header()
    return {
        "folder": str(folder),
        "device": device.key,
        "rows": len(profile.rows),
        "new_rows": len(profile.rows) - before,
        "noisy_share": profile.noisy_share,
        "throttled_share": sum(row.throttled for row in profile.rows.values()) / max(1, len(profile.rows)),
        "sweeps": sweeps,
        "skipped": skipped,
        "models": learnt,
        "checks": checks,
        "known_error": profile.known_error,
        "provenance": profile.provenance,
    }


def gpu_dtypes(device: Device, mode: str, asked: Sequence[str]) -> list[str]:
    """The dtypes to measure in a mode: bfloat16 unless others are asked for (float16 runs the same kernels); what the mode does
    not offer is left out where another mode has it.

    Raises ArchsearchError where the device computes in none of them.
    """
    from archsearch.profiling.cuda import supported_dtypes

    offered = supported_dtypes(device, mode)
    wanted = [dtype_name(name) for name in asked] or [
        next(name for name in ("bfloat16", "float16", "float32") if name in offered)
    ]
    kept = [name for name in wanted if name in offered]
    if not kept:
        raise ArchsearchError(
            f"{device.name} is not measured in {', '.join(wanted)} in {mode} mode; use one of {', '.join(offered)}"
        )
    return kept


def drafts_for_check(request: ProfileRequest, reference: Architecture, profile: Profile) -> list[Architecture]:
    """Shapes for a check, drawn with a seed that moves on with every check, so that no check repeats the last one's shapes."""
    done = sum(entry.get("checks", 0) for entry in profile.known_error.values())
    return sample_space(request.space, reference, 400, 1_000_003 + request.seed + done)


def _measure_engine(bench: Any, profile: Profile, target: Architecture | None, dtypes: list[str], memory: float) -> None:
    """Engine rows for each dtype that has none yet for this vocabulary."""
    from archsearch.architecture.counts import weight_bytes_per_pass
    from archsearch.engines.measure.overhead import measure_overhead

    subject = target
    if subject is None or weight_bytes_per_pass(subject, 4) > min(2 << 30, memory / 4):
        subject = ENGINE_STAND_IN if subject is None else ENGINE_STAND_IN.replace(vocab_size=subject.vocab_size)
    for dtype in dtypes:
        known = {row.sizes()["vocab_size"] for row in profile.select("engine", dtype, "eager")}
        if subject.vocab_size not in known:
            with ProgressLine(f"what transformers adds, {dtype}") as line:
                for row in measure_overhead(bench, subject, dtype, progress=line):
                    profile.record(row)


def check_profile(
    bench: Any,
    profile: Profile,
    drafts: list[Architecture],
    target: Architecture | None,
    dtype: str,
    count: int,
    memory: float,
    *,
    mode: str = "eager",
) -> dict[str, Any]:
    """Measure whole drafts (and verification passes) that the profile has not seen and compare; store it as the known error."""
    from archsearch.profiling.cpu_sweep import check_points, measure_points

    gpu = profile.device.get("kind") == "gpu"
    name = f"{dtype} {mode}" if gpu else dtype
    model = LatencyModel(profile, dtype, mode)
    before = profile.known_error.get(name, {})
    wide: dict[str, Any] = {"contexts": (192, 768, 1536), "model_limit_bytes": GPU_CHECK_MODEL_BYTES} if gpu else {}
    points = check_points(
        drafts, target, profile, dtype, count, seed=before.get("checks", 0), memory_bytes=memory, mode=mode, **wide
    )
    rows: list[dict[str, Any]] = []
    with ProgressLine(f"check {name}") as line:
        measured = list(measure_points(bench, points, dtype, progress=line))
    for point, row in measured:
        assert point.arch is not None
        predicted = model.forward_s(
            point.arch, batch=point.batch, tokens=point.tokens, context=point.context, cold=point.cache == "cold"
        )
        rows.append(
            {
                "what": "verify" if point.arch == target else f"draft step, {point.cache}",
                "architecture": point.arch.label(),
                "tokens": point.tokens,
                "context": point.context,
                "measured_s": row.median_s,
                "predicted_s": predicted.value,
                "predicted_std_s": predicted.std,
                "relative_error": predicted.value / row.median_s - 1,
                "noisy": row.noisy,
            }
        )
    goal = GPU_GOAL if gpu else CPU_GOAL
    groups = {
        what: _error_summary([row for row in rows if row["what"].startswith(what)], goal) for what in ("draft step", "verify")
    }
    result = {"checks": before.get("checks", 0) + 1, **{what: summary for what, summary in groups.items() if summary}}
    profile.known_error[name] = result
    profile.save_header()
    file = Path(str(profile.folder)) / f"check-{name.replace(' ', '-')}.json"
    write_json(file, {"dtype": dtype, "mode": mode, **result, "rows": rows})
    return {**result, "rows": rows}


def _error_summary(rows: list[dict[str, Any]], goal: tuple[float, float, float]) -> dict[str, Any]:
    """Median absolute error, shares within 10 %, 12 % and two std, whether `goal` is reached; empty for no rows."""
    if not rows:
        return {}
    errors = [abs(row["relative_error"]) for row in rows]
    within_std = [abs(row["predicted_s"] - row["measured_s"]) <= 2 * row["predicted_std_s"] for row in rows]
    median = statistics.median(errors)
    most, margin, share = goal
    return {
        "cases": len(rows),
        "median_absolute_error": median,
        "within_10_percent": statistics.fmean(e <= 0.10 for e in errors),
        "within_12_percent": statistics.fmean(e <= 0.12 for e in errors),
        "within_two_std": statistics.fmean(within_std),
        "bias": statistics.median(row["relative_error"] for row in rows),
        "reached": median <= most and statistics.fmean(e <= margin for e in errors) >= share,
    }
