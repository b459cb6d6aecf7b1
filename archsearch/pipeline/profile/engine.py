"""The passes of an engine that runs in a process of its own, measured in it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final

from archsearch.acceptance.lookup import Ngram
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import parameters, weight_bytes_per_pass
from archsearch.drafters.drafter import Drafter
from archsearch.drafters.forms import drafter_config
from archsearch.drafters.heads import Medusa
from archsearch.drafters.registry import family
from archsearch.engine_facts import EngineFacts, engine_facts, names_of
from archsearch.engines import registry
from archsearch.engines.engine import Engine, EngineSettings, ModelSource
from archsearch.engines.measure.passes import (
    BATCHES,
    GAMMAS,
    MIN_STEPS,
    ONE_REQUEST_GAMMAS,
    QUICK_GAMMAS,
    Case,
    PassRequest,
    measure_passes,
    measured_models,
    spread_drafts,
)
from archsearch.engines.measure.rows import PlainSteps
from archsearch.engines.registry import check_interpreter_choice
from archsearch.errors import ArchsearchError
from archsearch.files import write_json
from archsearch.pipeline.in_engine import can_run, engine_target, random_draft, write_shape
from archsearch.pipeline.profile.run import ProfileRequest, ProfileRun
from archsearch.profiles import DraftedShape, Measurement
from archsearch.progress import ProgressLine, say
from archsearch.workload import DTYPE_BYTES

CONTEXTS: Final = (64, 256)
"""Tokens in the cache behind which an engine on GGUF files is measured."""
DRAFTED_GAMMAS: Final = ((2, 4, 1, 3), (5, 2, 4, 1))
"""Gamma at each of BATCHES, of two drafters."""
MOST_SLOWDOWN: Final = 3.0
"""Beyond it (chosen) dividing gives no times: beside one process on two cores plain steps were 14
times slower and single passes 1 to 3 times."""
ENGINE_BYTES: Final = 3 << 30
"""Memory of an engine on a CPU beside its weights: libraries, buffers, a small cache."""


def check_engine_request(request: ProfileRequest) -> None:
    """Raise ArchsearchError where the engine to be profiled is absent or has no target to run."""
    name = request.engine_name
    if request.quick and not engine_facts(name).gguf:
        able = names_of(lambda row: row.gguf)
        raise ArchsearchError(f"--quick is for --engine {able}; give the time with --budget")
    check_interpreter_choice(name, request.engine_python)
    if engine_facts(name).in_process or not request.engine:
        return
    can_run(name, request.target_in_engine())


def profile_engine(
    run: ProfileRun, dtype: str, *, slowdown: Callable[[], float] = lambda: 1.0
) -> None:
    """Measure the passes of the engine that was asked for in it on a CPU, and its rounds with
    drafters that are no models; what is known is not measured again.

    Times are divided by plain steps of the target alone: passes of it beside each of an engine on
    GGUF files, else, where two engines have room, steps of a second one; `slowdown` says elsewhere
    how slow the machine is. Raises ArchsearchError without a target.
    """
    request, profile = run.request, run.profile
    name, ref = request.engine_name, request.target_in_engine()
    facts = engine_facts(name)
    with tempfile.TemporaryDirectory(dir=profile.folder, prefix=".engine-") as temporary:
        base = Path(temporary)
        cases = _model_cases(run, dtype, base)
        if facts.dummy_weights:
            drafted = map(DraftedShape.of, profile.select("drafted", dtype, "eager"))
            known = {shape.drafter.family for shape in drafted if shape.engine == name}
            cases += drafted_cases(ref.architecture, facts, base, known)
        if not cases:
            return
        here = can_run(name, ref)
        target: ModelSource = (
            engine_target(ref, name, dtype)
            if here
            else write_shape(ref.architecture, base / "target")
        )
        plain = EngineSettings(
            dtype=dtype,
            max_len=128,
            threads=run.device.threads,
            python=request.engine_python,
            dummy_weights=not here,
        )
        most = max(batch for case in cases for batch, _ in case.pairs)
        settings = replace(plain, concurrency=most, max_len=512, time_passes=True)
        asked = PassRequest(target=target, architecture=ref.architecture, dtype=dtype, mode="eager")
        if facts.gguf:  # its passes are run apart from its rounds: a start a gamma, as few rounds
            # as make a row; luck may accept more of a draft, so that there are fewer
            rounds = math.ceil(1.3 * MIN_STEPS)
            asked = replace(asked, contexts=CONTEXTS, repeats=1, rounds=rounds)

        def engine(case: Case) -> Engine:
            made = not here or (isinstance(case.draft, Drafter) and case.draft.trains)
            return registry.make_engine(name, replace(settings, dummy_weights=made))

        left: list[Measurement] = []
        before = len(profile.probe_reference_s)

        def record(row: Measurement) -> None:
            if len(profile.probe_reference_s) > before:
                profile.save_header()  # before the rows that are divided by it
            if row.slowdown > MOST_SLOWDOWN:
                left.append(row)
            else:
                profile.record(row)

        with (
            nullcontext(slowdown)
            if facts.gguf
            else _plain_steps(run, target, plain, slowdown) as probe,
            ProgressLine(f"passes of {name}, {dtype}") as line,
        ):
            asked = replace(asked, slowdown=probe, references=profile.probe_reference_s)
            measure_passes(engine, asked, cases, record=record, progress=line)
    if left:
        slowest = max(row.slowdown for row in left)
        say(
            f"WARNING: {len(left)} rows were left out: the machine was {slowest:.0f} times slower"
            " than its quiet reference; stop other work and run the same command again"
        )


def _model_cases(run: ProfileRun, dtype: str, base: Path) -> list[Case]:
    """The target alone and drafts with random weights under `base`, where not measured yet. A
    draft's place in the list decides its gammas, so known ones keep theirs."""
    name, target = run.request.engine_name, run.request.target_in_engine().architecture
    facts, quick = engine_facts(name), run.request.quick
    gammas = (QUICK_GAMMAS if quick else ONE_REQUEST_GAMMAS) if facts.gguf else GAMMAS
    full = [shape.replace(draft_vocab_size=None) for shape in run.drafts]
    # a draft that is not much smaller than its target never pays
    small = [shape for shape in full if parameters(shape) <= parameters(target) / 2]
    drafts = spread_drafts(small or full, len(gammas))
    known = measured_models(run.profile.select("pass", dtype, "eager"), name)
    # Gamma by batch size needs a schedule; without one an engine is profiled at one request, where
    # it reports all its passes.
    batches = BATCHES if facts.schedules else (1,) * len(BATCHES)
    cases = [] if target in known else [Case([(batch, 0) for batch in batches])]
    return cases + [
        Case(
            list(zip(batches, gammas[number], strict=False)),
            draft,
            random_draft(draft, dtype, base),
            place=number,
        )
        for number, draft in enumerate(drafts)
        if draft not in known
    ]


def drafted_cases(
    target: Architecture, facts: EngineFacts, base: Path, known: Collection[str] = ()
) -> list[Case]:
    """Two drafters, unlike each other, of each family that the engine is started with and that is
    not `known`: configs under `base`, no weights; gammas differ too, where an engine takes one for
    a family."""
    found: list[tuple[Drafter, tuple[int, ...]]] = []
    plans: tuple[tuple[str, tuple[int, int], tuple[tuple[int, ...], ...]], ...] = (
        ("eagle3", (1, 3), DRAFTED_GAMMAS),
        ("peagle", (2, 5), ((2,), (4,))),
    )
    for kind, layers, sweeps in plans:
        if kind in facts.confirms:
            usual = family(kind).usual(target)
            for depth, share, gammas in zip(layers, (6, 1.5), sweeps, strict=True):
                rows = int(target.vocab_size / share)
                decoder = usual.architecture.replace(num_hidden_layers=depth, draft_vocab_size=rows)
                found.append((replace(usual, architecture=decoder), gammas))
    if "medusa" in facts.confirms:
        found += [(Medusa(target, heads=4, shared_head=True), each) for each in ((2,), (4,))]
    # an engine in this process runs the kernels that the profile times
    if "ngram" in facts.confirms and not facts.in_process:
        found += [(family("ngram").usual(target), gammas) for gammas in DRAFTED_GAMMAS]
    cases = []
    for number, (drafter, gammas) in enumerate(found):
        if drafter.family in known:
            continue
        source: ModelSource = Ngram()
        if drafter.family != "ngram":
            source = base / f"{drafter.family}-{number}"
            write_json(source / "config.json", drafter_config(drafter, target))
        spread = gammas if len(gammas) > 1 else gammas * len(BATCHES)
        cases.append(Case(list(zip(BATCHES, spread, strict=True)), drafter, source, tokens=48))
    return cases


@contextmanager
def _plain_steps(
    run: ProfileRun, target: ModelSource, settings: EngineSettings, otherwise: Callable[[], float]
) -> Iterator[Callable[[], float]]:
    """How slow the machine is: plain steps where a second engine has room; their reference is kept
    in the profile."""
    profile, shape = run.profile, run.request.target_in_engine().architecture
    name, dtype = run.request.engine_name, settings.dtype
    weights = weight_bytes_per_pass(shape, DTYPE_BYTES[dtype])
    # two engines, half of a target for the draft
    if 2.5 * (weights + ENGINE_BYTES) > run.memory:
        yield otherwise
        return
    key = f"{name} {dtype}"
    known = profile.probe_reference_s.get(key)
    probe = PlainSteps(
        lambda: registry.make_engine(name, settings),
        target,
        shape.vocab_size,
        reference_s=known,
        otherwise=otherwise,
    )
    try:
        yield probe
    finally:
        probe.stop()
        if known is None and probe.reference_s is not None:
            profile.probe_reference_s[key] = probe.reference_s
            profile.save_header()
