"""A GPU measured in its modes and dtypes, where the latency model is least sure first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError, MissingDataError, RunFailed
from archsearch.files import ensure_writable_dir
from archsearch.hardware.device import Device
from archsearch.latency.model import LatencyModel
from archsearch.pipeline.profile_check import check_profile
from archsearch.pipeline.profile_request import (
    ENGINE_STAND_IN,
    ProfileRequest,
    drafts_for_check,
    sample_space,
)
from archsearch.pipeline.profile_rounds import profile_rounds
from archsearch.profiles import Profile, current_stack, stack_key
from archsearch.progress import ProgressLine
from archsearch.workload import dtype_name


def profile_gpu(request: ProfileRequest, device: Device) -> dict[str, Any]:
    """Measure a GPU in its modes and dtypes, where the latency model is least sure first; the
    budget is shared equally.

    Returns the summary of `profile_device`, with `skipped` (points that did not fit the memory)
    and, for each mode and dtype, the relative std at which the sweep stopped. Raises
    ArchsearchError where nothing can be measured here, or the folder holds imported tables.
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
        raise ArchsearchError(
            f"{folder} holds imported tables; pass another --output for measured rows"
        )
    before = len(profile.rows)
    reference = request.target or ENGINE_STAND_IN
    drafts = sample_space(request.space, reference, 400, request.seed)
    modes = request.modes or ("graph", "eager")
    plans = [(mode, dtype) for mode in modes for dtype in gpu_dtypes(device, mode, request.dtypes)]
    memory = float(device.memory_bytes)
    sweeps: dict[str, dict[str, Any]] = {}
    learnt: dict[str, Any] = {}
    checks: dict[str, Any] = {}
    rounds: dict[str, Any] = {}
    skipped: list[str] = []
    benches = {
        mode: cuda.open_bench(
            device, profile, mode=mode, dtype=dtype, allow_busy=request.allow_busy
        )
        for mode, dtype in plans
    }
    # A mode measured before keeps its own, and the kernels that were used then.
    profile.provenance |= {
        mode: _with_known_kernels(profile, mode, bench.provenance())
        for mode, bench in benches.items()
    }
    profile.save_header()
    for mode, dtype in plans:
        bench = benches[mode]
        wanted = selection.needs(
            drafts,
            request.target,
            dtype,
            mode,
            selection.Asked(ranks=request.tensor_parallel, seed=request.seed),
            selection.Room(
                memory_bytes=memory, cache_bytes=float(device.last_level_cache_bytes or math.inf)
            ),
        )
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
        except RunFailed as error:  # everything else is measured; a shipped table stands in
            skipped.append(str(error))
        if request.engine and not engine_facts(request.engine_name).in_process and mode == "graph":
            for opened in benches.values():
                opened.release()
            rounds[f"{dtype} {mode}"] = profile_rounds(request, profile, device, dtype)
        name = f"{dtype} {mode}"
        sweeps[name] = {
            "new_rows": result.new_rows,
            "relative_std": result.relative_std,
            "stopped": result.stopped,
        }
        try:
            model = LatencyModel(profile, dtype, mode, request.engine_name)
        except MissingDataError as error:
            learnt[name] = {"missing": str(error)}
            continue
        learnt[name] = model.summary()
        if request.check:
            unseen = drafts_for_check(request, reference, profile)
            checks[name] = check_profile(
                bench, profile, unseen, request.target, dtype, request.check, memory, mode=mode
            )
    for bench in benches.values():
        skipped += [str(entry) for entry in bench.skipped]
    profile.provenance |= {
        mode: _with_known_kernels(profile, mode, bench.provenance())
        for mode, bench in benches.items()
    }
    profile.save_header()
    return {
        "folder": str(folder),
        "device": device.key,
        "rows": len(profile.rows),
        "new_rows": len(profile.rows) - before,
        "noisy_share": profile.noisy_share,
        "throttled_share": (
            sum(row.throttled for row in profile.rows.values()) / max(1, len(profile.rows))
        ),
        "sweeps": sweeps,
        "skipped": skipped,
        "models": learnt,
        "checks": checks,
        "rounds": rounds,
        "known_error": profile.known_error,
        "provenance": profile.provenance,
    }


def _with_known_kernels(profile: Profile, mode: str, found: dict[str, Any]) -> dict[str, Any]:
    """A bench's provenance; it names the small kernels only of dtypes that it has measured in this
    process."""
    known = profile.provenance.get(mode, {}).get("fused_kernels", {})
    return found | {"fused_kernels": known | found["fused_kernels"]}


def gpu_dtypes(device: Device, mode: str, asked: Sequence[str]) -> list[str]:
    """The dtypes to measure in a mode: bfloat16 unless others are asked for (float16 runs the same
    kernels); what the mode does not offer is left out where another mode has it.

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
            f"{device.name} is not measured in {', '.join(wanted)} in {mode} mode; use one of"
            f" {', '.join(offered)}"
        )
    return kept
