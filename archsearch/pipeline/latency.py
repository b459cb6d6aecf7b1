"""Which latency model answers: a profile, or the datasheet; and what is said about it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from archsearch.acceptance.estimator import AcceptanceEstimator, GivenAcceptance
from archsearch.acceptance.known import AskedText, earlier, known_drafts
from archsearch.acceptance.known_targets import known_target
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.acceptance.registry import CHOICES
from archsearch.architecture.architecture import Architecture
from archsearch.capacity import memory_bytes, usable_bytes
from archsearch.drafters.drafter import RoundKind
from archsearch.engine_facts import engine_facts
from archsearch.engine_rounds import EngineRounds
from archsearch.errors import ArchsearchError, InvalidShapeError, MissingDataError
from archsearch.files import read_json, write_json
from archsearch.hardware.device import Device, devices
from archsearch.hardware.identify import resolve_device
from archsearch.latency.attention import attention_words, format_words, kernel_words
from archsearch.latency.composed import composable
from archsearch.latency.draft_passes import LatencyOfRounds
from archsearch.latency.engine_passes import SEVERAL_TOKENS
from archsearch.latency.model import LatencyModel
from archsearch.latency.roofline import RooflineLatency
from archsearch.latency.transfer import STEP_ERRORS, distance, same_generation
from archsearch.models.targets import TargetRef, resolve_target
from archsearch.pipeline.serving import (
    check_dtype,
    default_engine,
    default_mode,
    device_of,
    dtype_of_drafts,
    installed_version,
    rounds_of,
    served_words,
)
from archsearch.profiles import (
    BUSY_SHARE,
    Profile,
    cpu_stack,
    draft_step_errors,
    find_profile,
    profiles_of,
)
from archsearch.records import as_data
from archsearch.report.phrases import ServedBy
from archsearch.speedup import tau
from archsearch.threads import DEFAULT
from archsearch.workload import (
    DTYPE_BYTES,
    WEIGHT_BYTES,
    Mode,
    Workload,
    WorkloadRequest,
    dtype_name,
    served_name,
)

DTYPE_PREFERENCE = ("bfloat16", "float16", "float32")
RANKS = (1, 2, 4, 8)
# of a step: what a CPU's profile cannot tell apart; assumed (in turns the two were 3 to 17 % apart)
AS_FAST: Final = 0.05
TYPICAL_ALPHA: Final = 0.5  # for choosing a dtype only; assumed
GAMMAS: Final = (1, 2, 3, 4)


@dataclass(frozen=True)
class LatencySource:
    """A latency model and where it comes from, in words and as data for run.yaml. `served`: which
    engine of which version serves, and how it runs a draft, in words; `rounds`: the same as data,
    on a GPU. `version` None: nobody knows."""

    latency: LatencyOfRounds
    device: Device
    dtype: str
    mode: Mode
    threads: int | None
    profile: dict[str, Any]
    words: str
    engine: str = "transformers"
    rounds: EngineRounds | None = None
    version: str | None = None
    served: str = ""

    def running(self, drafter: RoundKind) -> LatencySource:
        """The same, saying how another kind of drafter runs there."""
        if self.rounds is None:
            return self
        rounds = self.rounds.running(drafter)
        return replace(self, rounds=rounds, served=served_words(self.engine, rounds, self.device))

    @property
    def by(self) -> ServedBy:
        """The same as answers show it."""
        how = self.rounds.costs.title if self.rounds is not None else None
        return ServedBy(self.engine, self.version, how, self.served)


def fitting_ranks(device: Device, target: Architecture, workload: Workload) -> int:
    """The fewest devices (RANKS) of a machine that hold the target with a tenth of their memory to
    spare for a draft. `workload`: of one. Raises ArchsearchError where not even all do."""
    usable, most = usable_bytes(device, workload), device.per_machine or RANKS[-1]
    for ranks in (each for each in RANKS if each <= most):
        shared = replace(workload, tensor_parallel=ranks)
        try:
            needed = memory_bytes(target, None, shared).total_bytes
        except InvalidShapeError:  # heads do not divide
            continue
        if device.is_cpu or needed <= 0.9 * usable:
            return ranks
    one = memory_bytes(target, None, workload).total_bytes
    raise ArchsearchError(
        f"the target with its KV cache needs {one / 2**30:.0f} GiB;"
        f" {'eight' if most > 1 else 'one'} {device.key} with {usable / 2**30:.0f} GiB usable each,"
        " as many as a machine has, do not hold it and a tenth for a draft; lower --batch-size or"
        " the context (--context, the prompts of a load), name a larger --gpu, or ask without that"
        f" tenth (--tensor-parallel {most})"
    )


def served_target(ref: TargetRef, asked: WorkloadRequest) -> TargetRef:
    """`ref` as it will be served: with the routing skew that was asked for, and its layers' weights
    in the format that `--dtype` names, else in that of the published ones. fp8 is the dtype of the
    pass where the device was measured so, and a format of weights alone elsewhere (on Ampere).
    Raises ArchsearchError for published weights in a format that nobody prices, and for quantised
    weights on a CPU."""
    ref = ref.routed(asked.routing_skew)
    name = None if asked.dtype is None else served_name(asked.dtype)
    published = ref.architecture.served_dtype
    plain = "--dtype bfloat16 prices the model before it was quantised"
    if name is None and published and published not in WEIGHT_BYTES:
        raise ArchsearchError(
            f"the weights of {ref.name} are quantised ({published}), which is not priced; {plain},"
            f" --dtype int4 or another of {', '.join(WEIGHT_BYTES)} as if they were in that"
        )
    name = name or published
    if name not in WEIGHT_BYTES:
        return replace(ref, architecture=ref.architecture.in_format(""))
    device = device_of(asked)
    if device.is_cpu:
        raise ArchsearchError(
            f"weights in {name} are not priced on a CPU, where none of their kernels was measured;"
            f" {plain} (or name a --gpu)"
        )
    own = _computes_in(name, _profile_and_device(asked)[0], device, asked)
    return replace(ref, architecture=ref.architecture.in_format("" if own else name))


def _computes_in(
    name: str, profile: Profile | None, device: Device, asked: WorkloadRequest
) -> bool:
    """Whether `device` computes in a dtype, and was measured in it, has no profile, or tables of
    the engine's answer."""
    if name not in device.flops_per_s:
        return False
    if profile is None or any(dtype == name for dtype, _ in profile.combinations()):
        return True
    engine = asked.engine or default_engine(device, asked.mode)
    mode = asked.mode or default_mode(device, engine)
    return engine_tables(profile, device, name, mode, engine) is not None


def choose_latency(
    asked: WorkloadRequest, target: Architecture, drafter: RoundKind = "draft_model"
) -> tuple[LatencySource, Workload]:
    """The latency model that answers, and the workload with everything chosen that was left open.

    The model is that of the profile named, or of the device's; where nobody profiled it, the
    kernels of a relative carried over by the datasheets, and without one the datasheet roofline
    (each said so). Without a dtype: that of quantised published weights, else `fastest_dtype`.
    `drafter`: a kind whose rounds the engine must run. Raises ArchsearchError where no number of
    devices holds the target, or the engine's version runs no such drafter, MissingDataError without
    a usable profile.
    """
    profile, device = _profile_and_device(asked)
    if target.weight_format:  # all but the weights is in 16 bits
        asked = replace(
            asked, dtype=next(name for name in DTYPE_PREFERENCE if name in device.flops_per_s)
        )
    elif asked.dtype is not None:
        asked = replace(asked, dtype=dtype_name(asked.dtype))
    engine = asked.engine or default_engine(device, asked.mode)
    asked, facts = replace(asked, engine=engine), engine_facts(engine)
    check_dtype(asked.dtype or "", facts, device)
    served_in = target.served_dtype  # of the published weights, where they are quantised
    able = not asked.dtype and served_in in DTYPE_BYTES and not device.is_cpu
    if able and _computes_in(served_in, profile, device, asked):
        asked = replace(asked, dtype=served_in)
    mode = asked.mode or default_mode(device, engine)
    rounds = rounds_of(asked, engine, device, drafter)
    if profile is None:
        source = _unprofiled(device, mode, asked, rounds)
    else:
        source = _profiled(profile, device, mode, asked, target, rounds)
    served, rounds = served_words(engine, source.rounds, device), source.rounds
    version = rounds.version if rounds is not None else installed_version(engine, device)
    words = source.words + format_words(getattr(source.latency, "tables", None), target)
    experts = f"{target.expert_format} (experts)" if target.expert_format else source.dtype
    about = {
        **source.profile,
        "served": served,
        "weights": target.weight_format or experts,
        "quantise": _to_quantise(target, source.dtype),
    }
    source = replace(source, version=version, served=served, profile=about, words=words)
    work = _workload(asked, device, target, source.dtype, mode, rounds)
    drafts = dtype_of_drafts(asked.draft_dtype, facts, device, source.dtype)
    if drafts == source.dtype:
        return source, work
    latency: Any = source.latency
    try:
        latency, words = latency.with_drafts(drafts), f"{words}; drafts in {drafts}"
    except MissingDataError as error:
        if asked.draft_dtype is not None:
            raise
        return replace(source, words=f"{words}; drafts priced in {source.dtype}: {error}"), work
    source = replace(source, latency=latency, profile={**about, "drafts": drafts}, words=words)
    return source, replace(work, draft_dtype=drafts)


def _to_quantise(target: Architecture, dtype: str) -> str:
    """What the published weights are yet to be brought into, "" for nothing: the name of a format
    where they are in 16 bits; others, which no engine brings into it, are named too."""
    kept, published = target.weight_format or dtype, target.served_dtype
    if target.expert_format != target.weight_format and kept in WEIGHT_BYTES:  # of experts alone
        published = published or target.expert_format
    if published:
        return "" if kept == published else f"{kept} (published: {published})"
    return kept if kept in WEIGHT_BYTES else ""


def _profile_and_device(asked: WorkloadRequest) -> tuple[Profile | None, Device]:
    if asked.profile is not None:
        profile = Profile.load(asked.profile)
        return profile, Device.from_dict(profile.device)
    device = resolve_device(asked.gpu or "cpu")
    try:
        folder = find_profile(device.key, cpu_stack() if device.is_cpu else None)
        return Profile.load(folder), device
    except MissingDataError:
        if device.is_cpu:
            raise
    return None, device


def _workload(
    asked: WorkloadRequest,
    device: Device,
    target: Architecture,
    dtype: str,
    mode: Mode,
    rounds: EngineRounds | None,
) -> Workload:
    cache = rounds.cache_dtype(dtype) if rounds else dtype
    alone = Workload(
        asked.batch_size,
        asked.context_len,
        dtype=dtype,
        mode=mode,
        temperature=asked.temperature,
        memory_fraction=asked.memory_fraction,
        cache_dtype=None if cache == dtype else cache,
    )
    ranks = asked.tensor_parallel or fitting_ranks(device, target, alone)
    if device.per_machine and ranks > device.per_machine:
        raise ArchsearchError(
            f"{ranks} {device.key} are {ranks} machines, and no network between machines is priced:"
            " leave --tensor-parallel out"
        )
    return replace(alone, tensor_parallel=ranks, draft_tensor_parallel=asked.draft_tensor_parallel)


def tables_of(device: Device, dtype: str) -> Profile | None:
    """Kernels in `dtype` of a GPU, else of the nearest of its generation: imported tables before
    what torch ran, the user's own first."""
    near = [
        other
        for other in devices().values()
        if dtype in device.flops_per_s
        and dtype in other.flops_per_s
        and same_generation(device, other)
    ]
    measured = None
    for other in sorted(near, key=lambda other: distance(device, other, dtype)):
        for folder in profiles_of(other.key):
            profile = Profile.load(folder)
            if composable(profile, dtype):
                if profile.imported:
                    return profile
                measured = measured or profile
    return measured


def _unprofiled(
    device: Device, mode: Mode, asked: WorkloadRequest, rounds: EngineRounds | None
) -> LatencySource:
    """Of a GPU that nobody profiled; the datasheet alone where no relative was measured in the
    dtype."""
    name = asked.dtype or next(d for d in DTYPE_PREFERENCE if d in device.flops_per_s)
    profile, engine = tables_of(device, name), str(asked.engine)
    latency: LatencyOfRounds
    if profile is None:
        latency = RooflineLatency(device, name, mode, engine, rounds)
        data = {"hash": None, "source": "roofline", "dtype": name, "mode": mode}
        words = (
            f"datasheet roofline of {device.name}, {mode} mode: nobody has profiled it here; "
            "expect errors of 15-25 % on large layers and 25-50 % on small ones"
        )
    else:
        own = Profile(device.to_dict(), {}, origin="nothing was measured")
        latency = LatencyModel(own, name, mode, engine, rounds, profile)
        relative = str(profile.device["key"])
        data = {
            "carried_from": str(profile.folder),
            "hash": profile.fingerprint(),
            "source": f"kernels of {relative}, carried over by the datasheets",
            "dtype": name,
            "mode": mode,
            "origin": f"{profile.origin}; carried over from {relative} by the datasheets",
        }
        errors = ", ".join(f"{error:.0%} of {what}" for what, error in STEP_ERRORS.items())
        named = attention_words(profile, mode)
        words = (
            f"kernels of {relative} carried over to {device.key} by the datasheets, {name}, {mode}"
            f" mode (error seen between measured GPUs: {errors}; profile {profile.folder}:"
            f" {profile.origin}){f'; {named}' if named else ''}"
        )
    words += _round_words(rounds)
    return LatencySource(latency, device, name, mode, None, data, words, engine, rounds)


def _profiled(
    profile: Profile,
    device: Device,
    mode: Mode,
    asked: WorkloadRequest,
    target: Architecture,
    rounds: EngineRounds | None,
) -> LatencySource:
    # Composed tables hold graph rows only; the eager answer is put together from them and a
    # published host time.
    found = profile.combinations()
    names = [asked.dtype] if asked.dtype else []
    if not names:  # weights of 8 bits are another model, to be asked for
        able = list(dict.fromkeys(d for d, m in found if m == mode or profile.imported))
        names = [name for name in able if name in DTYPE_PREFERENCE] or able
    engine, models = str(asked.engine), {}
    for name in names:
        check_dtype(name, engine_facts(engine))  # of a profile that knows no other
        try:
            tables = engine_tables(profile, device, name, mode, engine)
            models[name] = LatencyModel(profile, name, mode, engine, rounds, tables)
        except MissingDataError as error:
            if asked.dtype and engine_facts(engine).gguf and device.is_cpu:
                raise MissingDataError(
                    f"profile {profile.folder} holds no passes of {engine} in {name}; measure them:"
                    f" archsearch profile --gpu cpu --target T --engine {engine} --dtype {name}"
                ) from error
            if asked.dtype or len(names) == 1:
                raise
    if not models:
        raise MissingDataError(
            f"profile {profile.folder} has no usable rows in {mode} mode; run archsearch profile"
            " longer"
        )
    own = {name: model for name, model in models.items() if model.engine_ is not None}
    models = own or models  # what the engine itself was measured in, where it was

    workloads = {
        name: _workload(asked, device, target, name, mode, model.rounds)
        for name, model in models.items()
    }
    step_s = {name: models[name].decode_s(target, workloads[name]).value for name in models}
    best = fastest_dtype(
        step_s, lambda name, gamma: models[name].verify_s(target, workloads[name], gamma).value
    )
    first, model = min(step_s, key=step_s.__getitem__), models[best]
    words = _words(model, device)
    if first != best:
        faster = step_s[best] / step_s[first] - 1
        words += f"; alone the target decodes {faster:.1%} faster in {first}"
    words += kernel_words(model.tables, target, best) + _engine_words(model, device, engine)
    about, threads = _about(model), device.threads
    return LatencySource(model, device, best, mode, threads, about, words, engine, model.rounds)


def engine_tables(
    profile: Profile, device: Device, dtype: str, mode: str, engine: str
) -> Profile | None:
    """Tables in place of torch's kernels on a GPU, where `engine` runs its own: of several requests
    or tokens torch's attention takes up to four times as long."""
    if device.is_cpu or profile.imported or mode != "graph":
        return None
    found = None if engine_facts(engine).in_process else tables_of(device, dtype)
    return found if found is not None and found.imported else None


def _about(model: LatencyModel) -> dict[str, object]:
    """The profile of a model, and its tables, for run.yaml."""
    own, tables = model.profile, model.tables
    about = {"folder": str(own.folder), "hash": own.fingerprint(), "origin": own.origin}
    if tables is not own:
        about["tables"] = str(tables.folder)
        about["hash"] += f"+{tables.fingerprint()}"
        pace = "; at the pace of GEMMs measured here" if model.pace != 1.0 else ""
        about["origin"] = f"{tables.origin}{pace}"
    return {**about, "dtype": model.dtype, "mode": model.mode}


def fastest_dtype(step_s: Mapping[str, float], verify_s: Callable[[str, int], float]) -> str:
    """The dtype in which the target decodes fastest; of those within AS_FAST of it, which a profile
    can hardly tell apart, the one in which a token takes least once there is a draft that costs
    nothing (docs/decisions/006). `verify_s`: of a dtype and one of GAMMAS."""
    if len(step_s) == 1:
        return next(iter(step_s))

    def token_s(name: str) -> float:
        rounds = (verify_s(name, gamma) / tau(TYPICAL_ALPHA, gamma) for gamma in GAMMAS)
        return min(step_s[name], *rounds)

    slowest = (1.0 + AS_FAST) * min(step_s.values())
    return min((name for name in step_s if step_s[name] <= slowest), key=token_s)


def _engine_words(model: LatencyModel, device: Device, engine: str) -> str:
    """What is known of the engine that will serve; "" for the one whose passes the profile
    measures."""
    if model.engine_ is not None:
        return f"; passes as {engine} ran them ({len(model.engine_.rows)} rows)"
    if not engine_facts(engine).in_process and device.is_cpu:
        power = f"n^({SEVERAL_TOKENS.value:.1f} ± {SEVERAL_TOKENS.std:.1f})"
        several = f", a pass over n tokens is taken as {power} of one"
        return (
            f"; WARNING: passes of transformers, {engine}'s own kernels were not measured"
            f"{several if engine_facts(engine).gguf else ''} (archsearch profile --gpu cpu"
            f" --target T --engine {engine} --dtype {model.dtype})"
        )
    return _round_words(model.rounds)


def _round_words(rounds: EngineRounds | None) -> str:
    """The engine's version; "" where that plays no part."""
    if rounds is None:
        return ""
    known = "assumed, none was found" if rounds.costs.assumed else "published"
    known = f"{rounds.measured} measured here" if rounds.measured else known
    return f"; rounds of {rounds.label().removesuffix(f', {rounds.costs.title}')} ({known})"


def _words(model: LatencyModel, device: Device) -> str:
    profile, dtype, mode = model.profile, model.dtype, model.mode
    words = f"profile {profile.folder} ({len(profile.rows)} rows, {dtype}, {mode} mode)"
    stale = [
        f"{name} {there} there, {version} here"
        for name, version in cpu_stack().items()
        if device.is_cpu
        and name != "python"
        and (there := profile.stack.get(name, DEFAULT if name == "waiting" else None)) != version
    ]
    if stale:
        words += f"; WARNING: made with {', '.join(stale)}"
    attention = f"; {named}" if (named := attention_words(model.tables, mode)) else ""
    if model.tables is not profile:
        words += f"; kernels as engines run them, not torch's: {model.tables.folder}"
        if model.pace != 1.0:
            words += f", of which GEMMs took {model.pace:.2f} times as long here"
        return words + attention
    if profile.imported:
        words += f": {profile.origin}{attention}"
        if mode == "eager":
            words += (
                "; eager host time is a published constant of another stack, not measured: a rough"
                " estimate"
            )
        return words
    errors = draft_step_errors(profile.known_error)
    error = errors.get(f"{dtype} {mode}", errors.get(dtype))
    if error is not None:
        words += f", known error of a draft step {error:.1%}"
    elif not profile.known_error:
        words += ", never checked (archsearch profile --check 20)"
    if (noisy := profile.noisy_share) > BUSY_SHARE:
        words += f"; WARNING: made on a busy machine, {noisy:.0%} of its rows noisy: profile again"
    return words + attention


def acceptance_for(
    choice: str,
    target: str,
    *,
    asked: AskedText | None = None,
    temperature: float = 0.0,
    state: Path | None = None,
) -> tuple[AcceptanceEstimator, str]:
    """The estimator that `--alpha` names, and what it rests on in words: a number, or a row of
    `acceptance.registry`, fitted to what earlier runs measured for this target, as far as their
    text is like the `asked` one. `state`: the file that keeps the prior that a search began with,
    written when it is new; what the earlier runs moved is its `earlier`."""
    if choice not in CHOICES:
        return GivenAcceptance(float(choice)), "given"
    if state is not None and state.exists():
        data = read_json(state, "prior of the run")
        return PriorAcceptance.from_dict(data), str(data.get("words", "as this run began"))
    asked = asked or AskedText()
    known = known_drafts(target, asked=asked, exclude=state.parent if state is not None else None)
    estimator, words = CHOICES[choice].make(), "nothing was measured for this target before"
    moved = None
    if isinstance(estimator, PriorAcceptance):
        shape = resolve_target(target).architecture
        published = known_target(shape)
        moved = earlier(shape, known, asked, temperature)
        words = moved.words() if moved is not None else words
        words = f"{published.words}; {words}" if published else words
        estimator = estimator.about(shape)
    estimator = estimator.fit([draft.observation for draft in known])
    if state is not None and isinstance(estimator, PriorAcceptance):
        earlier_runs = as_data(moved) if moved is not None else None
        write_json(state, {"words": words, "earlier": earlier_runs, **estimator.to_dict()})
    return estimator, words


def machine_slowdown(source: LatencySource) -> float | None:
    """How much slower this CPU is than when its profile was started, by the profile's own probe;
    None without one. A busy machine slows target and draft alike: speed-ups keep."""
    if not isinstance(source.latency, LatencyModel) or not source.device.is_cpu:
        return None
    reference = source.latency.profile.probe_reference_s.get(source.dtype)
    if reference is None:
        return None
    import torch

    from archsearch.profiling.timer import Probe, WeightPool

    with torch.inference_mode():
        probe = Probe(WeightPool(96 << 20, getattr(torch, source.dtype)))
        return statistics.median(probe() for _ in range(60)) / reference
