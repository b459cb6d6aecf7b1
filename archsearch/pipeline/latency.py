"""Which latency model answers: a profile, or the datasheet; and what is said about it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archsearch.architecture.architecture import Architecture
from archsearch.errors import MissingDataError
from archsearch.hardware.device import Device
from archsearch.hardware.identify import resolve_device
from archsearch.latency.model import LatencyModel
from archsearch.latency.roofline import RooflineLatency
from archsearch.profiles import Profile, current_stack, find_profile
from archsearch.workload import Workload


@dataclass(frozen=True)
class LatencySource:
    """A latency model and where it comes from, in words and as data for run.yaml."""

    latency: Any
    device: Device
    dtype: str
    threads: int | None
    profile: dict[str, Any]
    words: str


def choose_latency(
    gpu: str | None,
    profile_folder: Path | None,
    target: Architecture,
    *,
    dtype: str | None,
    mode: str,
    engine: str,
    batch_size: int = 1,
    context_len: int = 256,
) -> LatencySource:
    """The profile named, or the device's profile, or, where nobody profiled it, the datasheet roofline (marked).

    Without a dtype: the one in which the profile says that the target decodes fastest; a speed-up over a slower dtype is none.
    """
    profile: Profile | None = None
    if profile_folder is not None:
        profile = Profile.load(profile_folder)
        device = Device.from_dict(profile.device)
    else:
        device = resolve_device(gpu or "cpu")
        try:
            profile = Profile.load(find_profile(device.key, current_stack() if device.kind == "cpu" else None))
        except MissingDataError:
            if device.kind == "cpu":
                raise
    if profile is None:
        name = dtype or next(d for d in ("bfloat16", "float16", "float32") if d in device.flops_per_s)
        words = (
            f"datasheet roofline of {device.name}: nobody has profiled it here; "
            "expect errors of 15-25 % on large layers and 25-50 % on small ones"
        )
        return LatencySource(
            RooflineLatency(device, name, mode), device, name, None, {"hash": None, "source": "roofline", "dtype": name}, words
        )
    names = [dtype] if dtype else [name for name, found in profile.combinations() if found == mode]
    models = {}
    for name in names:
        try:
            models[name] = LatencyModel(profile, name, mode, engine)
        except MissingDataError:
            if dtype or len(names) == 1:
                raise
    if not models:
        raise MissingDataError(f"profile {profile.folder} has no usable rows in {mode} mode; run archsearch profile longer")
    workloads = {name: Workload(batch_size, context_len, dtype=name, mode=mode) for name in models}
    best = min(models, key=lambda name: models[name].decode_s(target, workloads[name]).value)
    stale = [
        f"{name} {profile.stack.get(name)} there, {version} here"
        for name, version in current_stack().items()
        if device.kind == "cpu" and name != "python" and profile.stack.get(name) != version
    ]
    words = f"profile {profile.folder} ({len(profile.rows)} rows, {best})" + (
        f"; WARNING: made with {', '.join(stale)}" if stale else ""
    )
    if best in profile.known_error and "draft step" in profile.known_error[best]:
        words += f", known error of a draft step {profile.known_error[best]['draft step']['median_absolute_error']:.1%}"
    elif not profile.known_error:
        words += ", never checked (archsearch profile --check 20)"
    return LatencySource(
        models[best],
        device,
        best,
        device.threads,
        {"folder": str(profile.folder), "hash": profile.fingerprint(), "dtype": best},
        words,
    )


def acceptance_for(choice: str) -> Any:
    """The estimator that `--alpha` names: prior (also under `distilled`, which trains afterwards) or a number."""
    from archsearch.acceptance.estimator import GivenAcceptance
    from archsearch.acceptance.prior import PriorAcceptance

    return PriorAcceptance() if choice in ("prior", "distilled") else GivenAcceptance(float(choice))


def machine_slowdown(source: LatencySource, runs: int = 60) -> float | None:
    """How much slower this CPU is now than when its profile was started, by the profile's own probe; None where there is none.

    Predicted times are at the profile's reference speed. A busy machine slows target and draft alike, so speed-ups keep.
    """
    profile = getattr(source.latency, "profile", None)
    reference = profile.probe_reference_s.get(source.dtype) if profile is not None and source.device.kind == "cpu" else None
    if reference is None:
        return None
    import torch

    from archsearch.profiling.timer import Probe, WeightPool

    with torch.inference_mode():
        probe = Probe(WeightPool(96 << 20, getattr(torch, source.dtype)))
        return statistics.median(probe() for _ in range(runs)) / reference
