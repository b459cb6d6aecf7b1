"""A GPU measured in its modes and dtypes, where the latency model is least sure first, and what an
engine adds to its rounds, by running it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from archsearch.engine_facts import engine_facts
from archsearch.engine_rounds import engine_rounds, version_in
from archsearch.engines.engine import Engine, EngineSettings
from archsearch.engines.measure.rounds import RoundRequest, RoundsMeasured, measure_rounds
from archsearch.engines.registry import make_engine
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.hardware.device import Device
from archsearch.pipeline.in_engine import shape_folder, write_shape
from archsearch.pipeline.profile.run import ProfileRequest, ProfileRun
from archsearch.profiles import Profile, current_stack
from archsearch.progress import ProgressLine
from archsearch.report.terminal.profile import GpuSweeps, Profiled, SweepEnd
from archsearch.workload import dtype_name

if TYPE_CHECKING:
    from archsearch.profiling.cuda import CudaBench


def profile_gpu(request: ProfileRequest, device: Device) -> Profiled:
    """Measure a GPU in its modes and dtypes, which share the budget equally.

    Raises ArchsearchError where nothing can be measured here, or the folder holds imported tables.
    """
    from archsearch.profiling import collectives, cuda
    from archsearch.profiling import gpu_sweep as selection

    cuda.check_cuda(device)
    run = ProfileRun(request, device, current_stack())
    profile = run.profile
    if profile.imported:
        raise ArchsearchError(
            f"{run.folder} holds imported tables; pass another --output for measured rows"
        )
    modes = request.modes or ("graph", "eager")
    plans = [(mode, dtype) for mode in modes for dtype in gpu_dtypes(device, mode, request.dtypes)]
    sweeps: dict[str, SweepEnd] = {}
    rounds: dict[str, RoundsMeasured] = {}
    skipped: list[str] = []
    benches = {
        mode: cuda.open_bench(
            device, profile, mode=mode, dtype=dtype, allow_busy=request.allow_busy
        )
        for mode, dtype in plans
    }
    _keep_provenance(profile, benches)  # of a mode measured before: its own
    asked = selection.Asked(ranks=request.tensor_parallel, seed=request.seed)
    room = selection.Room(
        memory_bytes=run.memory, cache_bytes=float(device.last_level_cache_bytes or math.inf)
    )
    for mode, dtype in plans:
        bench, name = benches[mode], f"{dtype} {mode}"
        wanted = selection.needs(run.drafts, request.target, dtype, mode, asked, room)
        if dtype == "float8_e4m3fn":
            wanted = selection.fp8_needs(wanted)
        with ProgressLine(f"profile {mode} {dtype}") as line:
            stop = selection.Stop(budget_s=request.budget_s / len(plans))
            result = selection.adaptive_sweep(bench, wanted, dtype, stop, progress=line)
        try:
            for row in collectives.measure_all_reduces(
                collectives.measurable(wanted.all_reduces()), dtype, mode
            ):
                profile.record(row)
        except RunFailed as error:  # everything else is measured; a shipped table is used
            skipped.append(str(error))
        if request.engine and not engine_facts(request.engine_name).in_process and mode == "graph":
            for opened in benches.values():
                opened.release()
            rounds[name] = profile_rounds(run, dtype)
        sweeps[name] = SweepEnd(result.new_rows, result.relative_std, result.stopped)
        run.learn(bench, dtype, mode)
    for bench in benches.values():
        skipped += [str(entry) for entry in bench.skipped]
    _keep_provenance(profile, benches)
    throttled = sum(row.throttled for row in profile.rows.values()) / max(1, len(profile.rows))
    return run.summary(GpuSweeps(throttled, sweeps, skipped, rounds, profile.provenance))


def _keep_provenance(profile: Profile, benches: Mapping[str, CudaBench]) -> None:
    """How each mode was measured, into the profile's header. A bench names the small kernels only
    of dtypes that it has measured in this process."""
    for mode, bench in benches.items():
        known = profile.provenance.get(mode, {}).get("fused_kernels", {})
        found = bench.provenance()
        profile.provenance[mode] = found | {"fused_kernels": known | found["fused_kernels"]}
    profile.save_header()


def gpu_dtypes(device: Device, mode: str, asked: Sequence[str]) -> list[str]:
    """The dtypes to measure in a mode: bfloat16 unless others are asked for (float16 runs the same
    kernels), less what the mode does not offer. Raises ArchsearchError where nothing is left."""
    from archsearch.profiling.cuda import supported_dtypes

    offered = supported_dtypes(device, mode)
    wanted = [dtype_name(name) for name in asked] or [
        next(name for name in ("bfloat16", "float16", "float32") if name in offered)
    ]
    kept = [name for name in wanted if name in offered]
    if not kept:
        raise ArchsearchError(
            f"{device.name} is not measured in {', '.join(wanted)} in {mode} mode; use one of"
            f" {', '.join(offered)}"
        )
    return kept


RUNNERS: Final = "VLLM_USE_V2_MODEL_RUNNER"
RECORDED: Final = {"vllm": {"async_scheduling": "0"}}
"""Switches that archsearch sets when it runs an engine, which every row names."""
FREE_SHARE: Final = 0.9  # of the GPU's free memory that the engine may take


def profile_rounds(run: ProfileRun, dtype: str) -> RoundsMeasured:
    """Run the engine that was asked for on the GPU with random weights and record its rounds that
    are not known; of vLLM with both model runners where they run drafts differently. Raises
    ArchsearchError without a target, or for an engine that cannot make up weights."""
    request, profile = run.request, run.profile
    name, ref = request.engine_name, request.target_in_engine()
    if not engine_facts(name).dummy_weights:
        raise ArchsearchError(
            f"{name} cannot make up weights, so its rounds on a GPU are not measured; use --engine"
            " vllm"
        )
    share = free_share()

    def engine(options: Mapping[str, str]) -> Engine:
        settings = EngineSettings(
            dtype=dtype,
            max_len=1024,
            mode="graph",
            tensor_parallel=request.tensor_parallel,
            device="gpu",
            python=request.engine_python,
            dummy_weights=True,
            environment={key: value for key, value in options.items() if key.isupper()},
            memory_share=share,
        )
        return make_engine(name, settings)

    with tempfile.TemporaryDirectory(dir=profile.folder, prefix=".engine-") as temporary:
        base = Path(temporary)
        target = write_shape(ref.architecture, base / "target")
        asked = RoundRequest(
            target=target,
            architecture=ref.architecture,
            engine=engine,
            folder_of=lambda arch: write_shape(arch, shape_folder(arch, base)),
            dtype=dtype,
            mode="graph",
            variants=variants(name, engine({}).version),
            recorded=RECORDED.get(name, {}),
            tensor_parallel=request.tensor_parallel,
            known=frozenset(row.shape for row in profile.select("round", dtype, "graph")),
        )
        with ProgressLine(f"rounds of {name}") as line:
            return measure_rounds(asked, record=profile.record, progress=line)


def variants(engine: str, version: str) -> list[dict[str, str]]:
    """Switches to measure an engine with: none, and vLLM's other runner where that runs drafts in
    another way."""
    if engine != "vllm":
        return [{}]
    ways: dict[str, dict[str, str]] = {}
    for value in ("1", "0"):
        try:
            known = engine_rounds(engine, version_in(version), {**RECORDED[engine], RUNNERS: value})
        # a version that runs no independent drafts, which the engine will say
        except ArchsearchError:
            return [{}]
        assert known is not None
        ways.setdefault(known.costs.name, {RUNNERS: value})
    return list(ways.values()) if len(ways) > 1 else [{}]


def free_share() -> float:
    """The share of the GPU's memory that an engine in its own process may take."""
    import torch

    if not torch.cuda.is_available():
        return FREE_SHARE
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return round(FREE_SHARE * free / total, 3)
