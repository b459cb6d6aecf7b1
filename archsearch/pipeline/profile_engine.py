"""The passes of an engine that runs in a process of its own, measured in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from archsearch.acceptance.lookup import Ngram
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import parameters, weight_bytes_per_pass
from archsearch.drafters.drafter import Drafter
from archsearch.drafters.medusa import Medusa
from archsearch.drafters.registry import family
from archsearch.engine_facts import EngineFacts, engine_facts, engines_that
from archsearch.engines.measure.drafted import DraftedCase
from archsearch.engines.registry import check_interpreter_choice
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.export.drafters import drafter_config
from archsearch.files import write_json
from archsearch.hardware.device import Device
from archsearch.latency.model import LatencyModel
from archsearch.pipeline.engine_choice import engine_target
from archsearch.pipeline.profile_request import ProfileRequest
from archsearch.pipeline.stand_ins import can_run, random_draft, write_shape
from archsearch.profiles import DraftedShape, Profile
from archsearch.progress import ProgressLine
from archsearch.workload import DTYPE_BYTES, Workload

ENGINE_DRAFTS = 6
"""Drafts with random weights that an engine of its own is profiled with."""
CONTEXTS: Final = (64, 256)
"""Tokens in the cache behind which an engine on GGUF files is measured."""
DRAFTED_BATCHES: Final = (1, 2, 4, 8)
DRAFTED_GAMMAS: Final = ((2, 4, 1, 3), (5, 2, 4, 1))
"""Gamma at each of DRAFTED_BATCHES, of two drafters."""
ENGINE_BYTES: Final = 3 << 30
"""Memory of an engine on a CPU beside its weights: libraries, buffers, a small cache."""


def check_engine_request(request: ProfileRequest) -> None:
    """Raise ArchsearchError, before anything is measured, where the engine to be profiled is absent
    or has no target to run."""
    name, ref = request.engine_name, request.target_ref
    if request.quick and not engine_facts(name).gguf:
        able = " or ".join(engines_that(lambda row: row.gguf))
        raise ArchsearchError(f"--quick is for --engine {able}; give the time with --budget")
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
    slowdown: Callable[[], float] = lambda: 1.0,
) -> int:
    """Measure the passes of `request.engine_name` in it (or, where it does not tell them, what it
    adds to the profile's) and record the rows; what is known is not measured again. Returns the
    number of new rows.

    On a CPU with room for two engines times are divided by plain steps of the target alone, in a
    second one; `slowdown` says elsewhere how slow the machine is. Raises ArchsearchError without a
    target.
    """
    with _plain_steps(request, profile, device, dtype, slowdown) as probe:
        return _profile_passes(request, profile, device, shapes, dtype, mode, probe)


@contextmanager
def _plain_steps(
    request: ProfileRequest,
    profile: Profile,
    device: Device,
    dtype: str,
    otherwise: Callable[[], float],
) -> Iterator[Callable[[], float]]:
    """What says how slow the machine is: plain steps where a second engine has room; their
    reference is kept in the profile."""
    from archsearch.engines.engine import EngineSettings
    from archsearch.engines.measure.plain_steps import PlainSteps
    from archsearch.engines.registry import make_engine

    name, ref = request.engine_name, request.target_ref
    if ref is None or device.kind != "cpu" or not can_run(name, ref):
        yield otherwise
        return
    weights = weight_bytes_per_pass(ref.architecture, DTYPE_BYTES[dtype])
    if (
        2.5 * (weights + ENGINE_BYTES) > device.memory_bytes
    ):  # two engines, half of a target for the draft
        yield otherwise
        return
    settings = EngineSettings(
        dtype=dtype, max_len=128, threads=device.threads, python=request.engine_python
    )
    key = f"{name} {dtype}"
    known = profile.probe_reference_s.get(key)
    probe = PlainSteps(
        lambda: make_engine(name, settings),
        engine_target(ref),
        ref.architecture.vocab_size,
        reference_s=known,
        otherwise=otherwise,
    )
    try:
        yield probe
    finally:
        probe.stop()
        if known is None and probe.reference_s is not None:
            profile.probe_reference_s[key] = probe.reference_s
            if profile.folder is not None:
                profile.save_header()


def _profile_passes(
    request: ProfileRequest,
    profile: Profile,
    device: Device,
    shapes: Sequence[Architecture],
    dtype: str,
    mode: str,
    slowdown: Callable[[], float],
) -> int:
    """`profile_engine` with what says how slow the machine is."""
    import tempfile

    from archsearch.engines.engine import EngineSettings, EngineStep
    from archsearch.engines.measure.passes import (
        BATCHES,
        MIN_STEPS,
        ONE_REQUEST_GAMMAS,
        QUICK_GAMMAS,
        PassRequest,
        measure_passes,
        measured_models,
        spread_drafts,
    )
    from archsearch.engines.registry import make_engine

    name, ref = request.engine_name, request.target_ref
    if ref is None:
        raise ArchsearchError(f"profiling {name} runs a target in it; name one with --target")
    limit = (
        parameters(ref.architecture) / 2
    )  # a draft that is not much smaller than its target never pays
    full = [shape.replace(draft_vocab_size=None) for shape in shapes]
    facts, quick = engine_facts(name), request.quick
    count = len(QUICK_GAMMAS if quick else ONE_REQUEST_GAMMAS) if facts.gguf else ENGINE_DRAFTS
    drafts = spread_drafts([shape for shape in full if parameters(shape) <= limit] or full, count)
    rows = [*profile.select("pass", dtype, mode), *profile.select("engine", dtype, mode)]
    known = measured_models(rows, name, ref.architecture, drafts)
    if known.issuperset({None, *drafts}):
        return profile_drafted(request, profile, device, dtype, mode, slowdown=slowdown)
    # Gamma by batch size needs a schedule; without one an engine is profiled at one request, where
    # it tells all its passes.
    batches = BATCHES if facts.schedules else (1,) * len(BATCHES)
    plan: dict[str, Any] = {}
    if (
        facts.gguf
    ):  # its passes are run apart from its rounds: a start a gamma, as few rounds as make a row
        # Luck may accept more of a draft, so that there are fewer rounds.
        rounds = math.ceil(1.3 * MIN_STEPS)
        plan = {
            "gammas": QUICK_GAMMAS if quick else ONE_REQUEST_GAMMAS,
            "contexts": CONTEXTS,
            "repeats": 1,
            "rounds": rounds,
        }
    settings = EngineSettings(
        dtype=dtype,
        concurrency=max(batches),
        max_len=512,
        mode=mode,
        tensor_parallel=request.tensor_parallel,
        threads=device.threads,
        device="cpu" if device.kind == "cpu" else "gpu",
        python=request.engine_python,
        time_passes=True,
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
        return Estimate(
            verify.value + drafting.value, math.hypot(verify.std, drafting.std), "modelled"
        )

    before = len(profile.rows)
    with tempfile.TemporaryDirectory(dir=profile.folder, prefix=".engine-") as temporary:
        base = Path(temporary)
        target: Any
        if can_run(name, ref):
            target = engine_target(ref)
        else:
            target, settings = (
                write_shape(ref.architecture, base / "target"),
                replace(settings, dummy_weights=True),
            )
        # Known ones keep their place in the list, because the place decides which gammas a draft is
        # measured with.
        folders = [
            (arch, base if arch in known else random_draft(arch, dtype, base)) for arch in drafts
        ]
        with ProgressLine(f"passes of {name}, {dtype}") as line:
            asked = PassRequest(
                target=target,
                architecture=ref.architecture,
                drafts=folders,
                dtype=dtype,
                mode=mode,
                vocabulary=ref.architecture.vocab_size,
                batches=batches,
                slowdown=slowdown,
                passes_s=passes_s if base_model is not None else None,
                known=known,
                **plan,
            )
            measure_passes(
                lambda: make_engine(name, settings), asked, record=profile.record, progress=line
            )
    profile_drafted(request, profile, device, dtype, mode, slowdown=slowdown)
    return len(profile.rows) - before


def profile_drafted(
    request: ProfileRequest,
    profile: Profile,
    device: Device,
    dtype: str,
    mode: str = "eager",
    *,
    slowdown: Callable[[], float] = lambda: 1.0,
) -> int:
    """Measure what rounds take with drafters that are no models (one law a family), on a CPU, where
    the engine tells the target's pass of each step; families that have their rows are left out.
    Returns the number of new rows."""
    import tempfile

    from archsearch.engines.engine import EngineSettings
    from archsearch.engines.measure.drafted import measure_drafted
    from archsearch.engines.registry import make_engine

    name, ref = request.engine_name, request.target_ref
    facts = engine_facts(name)
    rows = [DraftedShape.of(row) for row in profile.select("drafted", dtype, mode)]
    known = {shape.drafter.family for shape in rows if shape.engine == name}
    if ref is None or device.kind != "cpu" or not facts.dummy_weights:
        return 0
    with tempfile.TemporaryDirectory(dir=profile.folder, prefix=".drafted-") as temporary:
        cases = [
            case
            for case in drafted_cases(ref.architecture, facts, Path(temporary))
            if case.drafter.family not in known
        ]
        if not cases:
            return 0
        target = (
            engine_target(ref)
            if can_run(name, ref)
            else write_shape(ref.architecture, Path(temporary) / "target")
        )
        settings = EngineSettings(
            dtype=dtype,
            concurrency=max(DRAFTED_BATCHES),
            max_len=512,
            mode=mode,
            threads=device.threads,
            python=request.engine_python,
        )
        made_up = replace(settings, dummy_weights=True)
        with ProgressLine(f"rounds of {name} by family") as line:
            found = measure_drafted(
                lambda case: make_engine(
                    name, made_up if case.drafter.trains or not can_run(name, ref) else settings
                ),
                target,
                cases,
                {"engine": name, "dtype": dtype, "mode": mode},
                ref.architecture.vocab_size,
                slowdown=slowdown,
                record=profile.record,
                progress=line,
            )
    return len(found)


def drafted_cases(target: Architecture, facts: EngineFacts, base: Path) -> list[DraftedCase]:
    """Two drafters of each family that the engine is started with, unlike each other: configs under
    `base`, no weights.

    An engine that takes one gamma for a family is asked for another one of each.
    """
    rows = target.vocab_size
    heads: list[tuple[Drafter, tuple[int, ...]]] = []
    plans: tuple[tuple[str, tuple[int, int], tuple[tuple[int, ...], ...]], ...] = (
        ("eagle3", (1, 3), DRAFTED_GAMMAS),
        ("peagle", (2, 5), ((2,), (4,))),
    )
    for kind, layers, sweeps in plans:
        if kind in facts.confirms:
            for number, (depth, share) in enumerate(zip(layers, (6, 1.5), strict=True)):
                usual = family(kind).usual(target)
                decoder = usual.architecture.replace(
                    num_hidden_layers=depth, draft_vocab_size=int(rows / share)
                )
                heads.append((replace(usual, architecture=decoder), sweeps[number]))
    if "medusa" in facts.confirms:
        heads += [(Medusa(target, heads=4, shared_head=True), each) for each in ((2,), (4,))]
    cases = []
    for number, (drafter, gammas) in enumerate(heads):
        folder = base / f"{drafter.family}-{number}"
        write_json(folder / "config.json", drafter_config(drafter, target))
        spread = gammas if len(gammas) > 1 else gammas * len(DRAFTED_BATCHES)
        cases.append(DraftedCase(drafter, folder, dict(zip(DRAFTED_BATCHES, spread, strict=True))))
    if (
        "ngram" in facts.confirms and not facts.in_process
    ):  # an engine in this process runs the kernels that the profile times
        lookup = family("ngram").usual(target)
        cases += [
            DraftedCase(lookup, Ngram(), dict(zip(DRAFTED_BATCHES, gammas, strict=True)))
            for gammas in DRAFTED_GAMMAS
        ]
    return cases
