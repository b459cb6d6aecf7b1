"""The passes of an engine that runs in a process of its own, measured in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import parameters
from archsearch.engine_facts import engine_facts
from archsearch.engines.registry import check_interpreter_choice
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.hardware.device import Device
from archsearch.latency.model import LatencyModel
from archsearch.pipeline.engine_choice import engine_target
from archsearch.pipeline.profile_request import ProfileRequest
from archsearch.pipeline.stand_ins import can_run, random_draft, write_shape
from archsearch.profiles import Profile
from archsearch.progress import ProgressLine
from archsearch.workload import Workload

ENGINE_DRAFTS = 6
"""Drafts with random weights that an engine of its own is profiled with."""


def check_engine_request(request: ProfileRequest) -> None:
    """Raise ArchsearchError, before anything is measured, where the engine to be profiled is absent or has no target to run."""
    name, ref = request.engine_name, request.target_ref
    check_interpreter_choice(name, request.engine_python)
    if engine_facts(name).in_process or not request.engine:
        return
    if ref is None:
        raise ArchsearchError(f"profiling {name} runs a target in it; name one with --target")
    can_run(name, ref)


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
    Raises ArchsearchError without a target.
    """
    import tempfile

    from archsearch.engines.engine import EngineSettings, EngineStep
    from archsearch.engines.measure.passes import BATCHES, PassRequest, measure_passes, measured_models, spread_drafts
    from archsearch.engines.registry import make_engine

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
        if can_run(name, ref):
            target = engine_target(ref)
        else:
            target, settings = write_shape(ref.architecture, base / "target"), replace(settings, dummy_weights=True)
        # Known ones keep their place in the list, because the place decides which gammas a draft is measured with.
        folders = [(arch, base if arch in known else random_draft(arch, dtype, base)) for arch in drafts]
        with ProgressLine(f"passes of {name}") as line:
            asked = PassRequest(
                target=target,
                architecture=ref.architecture,
                drafts=folders,
                dtype=dtype,
                mode=mode,
                vocabulary=ref.architecture.vocab_size,
                batches=batches,
                slowdown=slowdown or (lambda: 1.0),
                passes_s=passes_s if base_model is not None else None,
                known=known,
            )
            measure_passes(lambda: make_engine(name, settings), asked, record=profile.record, progress=line)
    return len(profile.rows) - before
