"""`archsearch profile`: measure this device or this machine's host, or import measured tables of
another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.hardware.identify import check_claim, resolve_device
from archsearch.pipeline.profile.cpu import profile_cpu
from archsearch.pipeline.profile.engine import check_engine_request
from archsearch.pipeline.profile.gpu import profile_gpu
from archsearch.pipeline.profile.run import ProfileRequest
from archsearch.profiles import profiles_of
from archsearch.progress import ProgressLine
from archsearch.report.terminal.profile import Imported, Profiled
from archsearch.workload import dtype_name

if TYPE_CHECKING:
    from archsearch.profiling.timer import HostSpeed


def profile_device(request: ProfileRequest) -> Profiled:
    """Measure this device until the budget is spent or every planned row exists; continue where an
    earlier run stopped. Raises ArchsearchError when the device is not the one claimed, or is busy;
    the line says where a profile of it is there already."""
    try:
        device = check_claim(request.gpu, request.threads)
    except ArchsearchError as error:
        device = resolve_device(request.gpu, request.threads)
        if device.is_cpu or not profiles_of(device.key):
            raise
        raise ArchsearchError(
            f"{error}. A profile of {device.key} is here already and needs no GPU to be used:"
            f" archsearch search --target T --gpu {request.gpu}"
        ) from error
    check_engine_request(request)
    return profile_cpu(request, device) if device.is_cpu else profile_gpu(request, device)


def import_tables(
    gpu: str,
    *,
    framework: str = "vllm",
    tables: Path | None = None,
    dtypes: Sequence[str] = (),
    output: Path | None = None,
) -> Imported:
    """`--from aiconfigurator`: write a GPU's profile from measured kernel tables."""
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
    rows, whose = len(profile.rows), profile.provenance
    return Imported(str(profile.folder), profile.device["key"], rows, profile.origin, whose)


def profile_host(budget_s: float) -> HostSpeed:
    """`measure_host`. Raises MissingDataError without torch and transformers."""
    try:
        from archsearch.profiling.timer import measure_host

        return measure_host(budget_s)
    except ImportError as error:
        raise MissingDataError(
            f"measuring the host needs torch and transformers: {error}"
        ) from None
