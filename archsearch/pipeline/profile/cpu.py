"""This CPU measured: ops, decoder layers, whole models, and what transformers adds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import weight_bytes_per_pass
from archsearch.engine_facts import ANY_ENGINE, EngineFacts, engine_facts
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.hardware.device import Device
from archsearch.latency.model import LatencyModel
from archsearch.pipeline.latency import GAMMAS, fastest_dtype
from archsearch.pipeline.profile.engine import profile_engine
from archsearch.pipeline.profile.run import ENGINE_STAND_IN, ProfileRequest, ProfileRun
from archsearch.pipeline.serving import check_dtype
from archsearch.profiles import EngineShape, Profile, cpu_stack
from archsearch.progress import ProgressLine
from archsearch.report.terminal.profile import CpuPace, Profiled
from archsearch.workload import dtype_name

if TYPE_CHECKING:
    from archsearch.profiling.cpu_sweep import CpuBench
    from archsearch.profiling.points import Bench


PROBE_S: Final = 8.0  # beside some seconds to build the models
PROBE_POOL_BYTES: Final = 32 << 20


def profile_cpu(request: ProfileRequest, device: Device) -> Profiled:
    """Measure this CPU.

    Raises ArchsearchError for graph mode or tensor parallelism.
    """
    if "graph" in request.modes or request.tensor_parallel > 1:
        raise ArchsearchError(
            "--mode graph and --tensor-parallel are for GPUs; a CPU is measured in eager mode, on"
            " one device"
        )
    import torch  # before a folder is made: a light install has none

    from archsearch.profiling import cpu_sweep as sweeps

    run = ProfileRun(request, device, cpu_stack())
    profile = run.profile
    torch.set_num_threads(device.threads or 1)
    bench = sweeps.CpuBench(profile, device.last_level_cache_bytes or (32 << 20))
    facts = engine_facts(request.engine_name)
    own = request.target_ref.dtype_in(facts.gguf) if request.target_ref else None
    asked = request.dtypes or ((own,) if own else ())
    dtypes = device_dtypes(device, asked, facts)[: 1 if request.quick else None]
    points = {
        dtype: sweeps.plan(
            run.drafts, request.target, dtype, batch=request.batch_size, memory_bytes=run.memory
        )
        for dtype in ([] if facts.gguf else dtypes)
    }
    other = request.engine and not facts.in_process
    if facts.gguf:  # its rounds are priced by its own passes, in precisions that torch has not
        for dtype in dtypes:
            profile_engine(run, dtype)
    elif not (other and _has_model(profile, dtypes[0])):  # else ops and whole models are there
        with ProgressLine("profile") as line:
            sweeps.sweep(bench, points, budget_s=request.budget_s, progress=line)
        if request.engine and request.batch_size == 1:
            _measure_engine(run, bench, dtypes)
    if other and not facts.gguf:
        slowdown = _probe_slowdown(bench, dtypes[0])
        profile_engine(run, dtypes[0], slowdown=slowdown)
    for dtype in dtypes:
        run.learn(bench, dtype, "eager")
    # where only an engine's passes were measured, its own plain steps say how slow the machine was
    new = list(profile.rows.values())[run.before :]
    slowdowns = bench.slowdowns or [row.slowdown for row in new] or [1.0]
    quantiles = statistics.quantiles(slowdowns, n=20) if len(slowdowns) > 1 else [1.0] * 19
    planned = sum(len(p) for p in points.values())
    return run.summary(CpuPace(planned, quantiles[0], quantiles[9], quantiles[-1]))


def device_dtypes(
    device: Device, asked: Sequence[str], facts: EngineFacts = ANY_ENGINE
) -> list[str]:
    """Those asked for (see `check_dtype`), or the device's native one first."""
    if asked:
        names = [dtype_name(name) for name in asked]
        for name in names:
            check_dtype(name, facts)
        return names
    if facts.gguf:
        return ["float16", "q8_0"]
    return ["bfloat16", "float32"] if device.native_bf16 else ["float32", "bfloat16"]


def faster_dtype(
    device: Device, target: Architecture, context: int, seconds: float = PROBE_S
) -> str:
    """The `fastest_dtype` of `target` at `context` on this CPU now: random weights, the dtypes in
    turn for about `seconds`."""
    import torch

    from archsearch.models.runtime import torch_dtype
    from archsearch.profiling.layers import ForwardRun, build_model
    from archsearch.profiling.timer import WeightPool

    torch.set_num_threads(device.threads or 1)
    times: dict[tuple[str, int], list[float]] = {}
    with torch.inference_mode():
        steps: dict[tuple[str, int], Callable[[], object]] = {}
        for name in device_dtypes(device, ()):
            dtype = torch_dtype(name)
            model = build_model(target, WeightPool(PROBE_POOL_BYTES, dtype))
            run = ForwardRun(model, batch=1, context=context)
            steps |= {(name, gamma): run.step(gamma + 1) for gamma in (0, *GAMMAS)}
            steps[name, 0]()
        end = time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            for key, step in steps.items():
                start = time.perf_counter()
                step()
                times.setdefault(key, []).append(time.perf_counter() - start)
    took = {key: statistics.median(each) for key, each in times.items()}
    plain = {name: seconds for (name, gamma), seconds in took.items() if not gamma}
    return fastest_dtype(plain, lambda name, gamma: took[name, gamma])


def _has_model(profile: Profile, dtype: str) -> bool:
    try:
        LatencyModel(profile, dtype)
    except MissingDataError:
        return False
    return True


def _probe_slowdown(bench: Bench, dtype: str) -> Callable[[], float]:
    timer = bench.timer(dtype)

    def slowdown() -> float:
        value = statistics.median(timer.probe() for _ in range(5)) / timer.reference_s
        timer.slowdowns.append(value)
        return float(value)

    return slowdown


def _measure_engine(run: ProfileRun, bench: CpuBench, dtypes: list[str]) -> None:
    """Engine rows for each dtype that has none yet for this vocabulary, where drafts can be priced:
    a minute each, which the budget does not count."""
    from archsearch.engines.measure.overhead import measure_overhead

    subject, profile = run.reference, run.profile
    if weight_bytes_per_pass(subject, 4) > min(2 << 30, run.memory / 4):
        subject = ENGINE_STAND_IN.replace(vocab_size=subject.vocab_size)
    for dtype in dtypes:
        known = {EngineShape.of(row).vocab_size for row in profile.select("engine", dtype, "eager")}
        if subject.vocab_size not in known and _has_model(profile, dtype):
            with ProgressLine(f"what transformers adds, {dtype}") as line:
                for row in measure_overhead(bench, subject, dtype, progress=line):
                    profile.record(row)
