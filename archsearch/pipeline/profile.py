"""`archsearch profile`: measure this device, or import measured tables of another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from archsearch.errors import ArchsearchError
from archsearch.hardware.device import Device
from archsearch.hardware.identify import check_claim, resolve_device
from archsearch.pipeline.profile_cpu import profile_cpu
from archsearch.pipeline.profile_engine import check_engine_request
from archsearch.pipeline.profile_gpu import profile_gpu
from archsearch.pipeline.profile_request import ProfileRequest
from archsearch.profiles import profiles_of
from archsearch.progress import ProgressLine
from archsearch.workload import dtype_name


def profile_device(request: ProfileRequest) -> dict[str, Any]:
    """Measure this device until the budget is spent or every planned row exists; continue where an
    earlier run stopped.

    Returns a summary: folder, rows, noise, what the latency model learnt per dtype, and the check's
    results. Raises ArchsearchError when the device is not the one claimed, or is busy.
    """
    device = claimed_device(request)
    check_engine_request(request)
    return profile_cpu(request, device) if device.kind == "cpu" else profile_gpu(request, device)


def claimed_device(request: ProfileRequest) -> Device:
    """The device that was claimed, once this machine has confirmed it. Raises ArchsearchError where
    it is another one; the line says so where a profile of the claimed device is there already,
    which a search uses without the device."""
    try:
        return check_claim(request.gpu, request.threads)
    except ArchsearchError as error:
        device = resolve_device(request.gpu, request.threads)
        if device.kind == "cpu" or not profiles_of(device.key):
            raise
        raise ArchsearchError(
            f"{error}. A profile of {device.key} is here already and needs no GPU to be used:"
            f" archsearch search --target T --gpu {request.gpu}"
        ) from error


def import_tables(
    gpu: str,
    *,
    framework: str = "vllm",
    tables: Path | None = None,
    dtypes: Sequence[str] = (),
    output: Path | None = None,
) -> dict[str, Any]:
    """`--from aiconfigurator`: compose a GPU's profile from measured kernel tables and write it;
    returns what it is made of."""
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
