"""`archsearch search` where nobody named a device and this machine would not serve the target: one
row for each GPU whose kernels ship."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, Final

from archsearch.architecture.counts import parameters
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.hardware.device import load_device
from archsearch.hardware.identify import identify_cpu, visible_gpus
from archsearch.models.targets import resolve_target
from archsearch.pipeline.search import search
from archsearch.pipeline.session import SearchRequest
from archsearch.profiles import find_profile, list_profiles, profile_roots
from archsearch.progress import ProgressLine

LEAST_PARAMETERS: Final = 4e9
"""A target with fewer is taken to be meant for this CPU, which then wants a profile."""


def surveyed_devices(request: SearchRequest) -> tuple[str, ...]:
    """The GPUs to answer for; () where the search is for a device: one that was named, that is
    here, or this CPU.

    Raises ArchsearchError for an unknown target.
    """
    asked = request.asked
    if asked.gpu is not None or asked.profile is not None or request.confirm or visible_gpus():
        return ()
    target = resolve_target(request.target).architecture
    if parameters(target) < LEAST_PARAMETERS or _on_this_cpu(parameters(target)):
        return ()
    shipped = (
        path.parent.name for path in list_profiles() if path.is_relative_to(profile_roots()[-1])
    )
    keys = sorted(set(shipped), key=lambda key: load_device(key).bandwidth_bytes_per_s)
    return tuple(key for key in keys if load_device(key).kind == "gpu")


def _on_this_cpu(count: float) -> bool:
    """Whether this CPU has a profile and memory for the weights in 16 bits."""
    cpu = identify_cpu()
    try:
        find_profile(cpu.key)
    except MissingDataError:
        return False
    return 2.0 * count < 0.8 * cpu.memory_bytes


def survey(request: SearchRequest, devices: Sequence[str]) -> dict[str, Any]:
    """The best that one can have today and the best within the training budget on each of
    `devices`, as `search` ranks them; a device that cannot hold the target has an `error`. No run
    folder is left."""
    rows: list[dict[str, Any]] = []
    with (
        ProgressLine("search on the GPUs that ship") as line,
        tempfile.TemporaryDirectory(prefix="archsearch-") as folder,
    ):
        for number, key in enumerate(devices):
            line(key, float(number), float(len(devices)))
            asked = replace(request.asked, gpu=key)
            try:
                with redirect_stderr(StringIO()):  # one bar for all of them
                    found = search(replace(request, asked=asked, run=Path(folder) / key))
            except ArchsearchError as error:
                rows.append({"device": key, "error": str(error)})
                continue
            rows.append({"device": key, **_row(found)})
    return {"target": request.target, "survey": rows}


def _row(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a row needs of a search's result."""
    kinds = [(score, (score.get("needs") or {}).get("kind", "training")) for score in found["best"]]
    return {
        "engine": found["served"],
        "tensor_parallel": found["workload"]["tensor_parallel"],
        "dtype": found["dtype"],
        "today": next((score for score, kind in kinds if kind != "training"), None),
        "trained": next((score for score, kind in kinds if kind == "training"), None),
        "training_budget": found.get("training_budget"),
        "warnings": found["warnings"],
    }
