"""Who serves what: the engine, its version and its switches, chosen where they were left open,
refused where they cannot be; a mix of work."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from archsearch.drafters.drafter import RoundKind
from archsearch.engine_facts import ENGINES, EngineFacts, engine_facts, names_of
from archsearch.engine_rounds import (
    HOST,
    EngineRounds,
    engine_rounds,
    host_speed,
    known_engines,
    known_options,
    newest_version,
    parse_options,
    version_in,
)
from archsearch.engines.environments.environment import installed
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.hardware.device import Device
from archsearch.hardware.identify import resolve_device
from archsearch.latency.round_fit import measured_version
from archsearch.models.gguf_file import kind_of_drafts
from archsearch.profiles import Profile, find_profile
from archsearch.profiles import installed as package_version
from archsearch.traffic.mix import LoadPart, Mix, read_mix
from archsearch.traffic.traces import Lengths
from archsearch.workload import (
    DTYPE_BYTES,
    GGUF_DTYPES,
    MEMORY_FRACTION,
    LoadRequest,
    Mode,
    WorkloadRequest,
    served_name,
)


def default_engine(device: Device, mode: Mode | None) -> str:
    """The engine of a device where none is named: on a GPU vLLM, or transformers for a mode without
    CUDA graphs."""
    return "transformers" if device.is_cpu or mode == "eager" else "vllm"


def default_mode(device: Device, engine: str) -> Mode:
    """Serving engines replay CUDA graphs on GPUs, transformers launches kernel by kernel."""
    return "eager" if device.is_cpu or engine_facts(engine).in_process else "graph"


def with_engine(asked: WorkloadRequest, drafter: RoundKind = "draft_model") -> WorkloadRequest:
    """The request with its engine and, on a GPU, its version chosen, and held against all that was
    asked for. `drafter`: the kind that is to run. Raises ArchsearchError where no such engine runs
    so."""
    device = device_of(asked)
    facts = engine_facts(asked.engine or default_engine(device, asked.mode))
    check_engine(facts, device)
    rounds = rounds_of(asked, facts.name, device, drafter)
    check_batch(facts, device, asked.batch_size)
    usual = default_mode(device, facts.name)
    if not device.is_cpu and asked.mode not in (None, usual):
        off = [
            name
            for name in ("enforce_eager", "disable_cuda_graph")
            if name in known_options(facts.name)
        ]
        switch = f", or --engine-option {off[0]}=1" if off else ""
        other = "use --engine vllm" if usual == "eager" else f"use --engine transformers{switch}"
        how = "without CUDA graphs" if usual == "eager" else "with CUDA graphs"
        raise ArchsearchError(f"--mode {asked.mode}: {facts.title} runs {how} on a GPU; {other}")
    return replace(
        asked, engine=facts.name, engine_version=rounds.version if rounds is not None else None
    )


def engine_requests(
    asked: WorkloadRequest,
    engines: Sequence[str],
    versions: Sequence[str],
    drafter: RoundKind,
) -> list[WorkloadRequest]:
    """`asked` for each of `engines` in each of its `versions` (`0.16.0` where one engine is asked
    for, else `vllm=0.16.0`), with the switches that it has. Neither: for the engine of `asked`, or
    the device's default. Raises ArchsearchError for a version of an engine that was not named, a
    switch that no engine has, or an engine that cannot."""
    by_engine: dict[str, list[str]] = {name: [] for name in engines}
    for text in versions:
        name, named, version = text.rpartition("=")
        if not named and len(by_engine) > 1:
            raise ArchsearchError(
                f"--engine-version {text}: of which engine? write {next(iter(by_engine))}={text}"
            )
        name = (
            name
            or next(iter(by_engine), None)
            or asked.engine
            or default_engine(device_of(asked), asked.mode)
        )
        engine_facts(name)
        by_engine.setdefault(name, []).append(version)
    if not by_engine:
        return [with_engine(asked, drafter)]
    switches: dict[str, tuple[str, ...]] = dict.fromkeys(by_engine, ())
    for text in asked.engine_options:
        owners = [name for name in by_engine if text.partition("=")[0] in known_options(name)]
        for name in owners or by_engine:  # one that no engine has is refused by the first
            switches[name] += (text,)
    return [
        with_engine(
            replace(asked, engine=name, engine_version=version, engine_options=switches[name]),
            drafter,
        )
        for name, wanted in by_engine.items()
        for version in tuple(dict.fromkeys(wanted)) or (None,)
    ]


def check_engine(facts: EngineFacts, device: Device) -> None:
    """Raise ArchsearchError where the engine does not run on the device, or nothing is known of
    it."""
    if not _runs_on(facts, device):
        able = ", ".join(name for name, row in ENGINES.items() if _runs_on(row, device))
        raise ArchsearchError(
            f"{facts.title} cannot be priced on {device.key}; use --engine {able}"
        )


def check_dtype(
    dtype: str, facts: EngineFacts, device: Device | None = None, option: str = "--dtype"
) -> None:
    """Raise ArchsearchError for a format of GGUF files and an engine that does not compute in it,
    or a GPU."""
    if dtype in GGUF_DTYPES and device is not None and not device.is_cpu:
        near = f", {'int8' if DTYPE_BYTES[dtype] > 0.75 else 'int4'} weights of about as many bits"
        raise ArchsearchError(
            f"{dtype} is priced on a CPU only, not on {device.key}; {option} float16 prices the"
            f" model in 16 bits{near if option == '--dtype' else ''}"
        )
    if dtype in GGUF_DTYPES and not facts.gguf:
        raise ArchsearchError(
            f"{dtype} is a format of GGUF files, in which {facts.title} does not compute; add"
            f" --engine {names_of(lambda row: row.gguf)}"
        )


def dtype_of_drafts(asked: str | None, facts: EngineFacts, device: Device, dtype: str) -> str:
    """The precision of drafts and heads that do not come with a target in `dtype`: the one `asked`;
    on GPUs 16 bits beside fewer, else the target's (in llama.cpp `kind_of_drafts`). Raises
    ArchsearchError for what cannot be.

    Engines read a draft's own config for it: vLLM takes the target's quantization for MTP only
    (config/speculative.py; 0.25.1 kept EAGLE-3 heads in 16 bits beside fp8 targets), SGLang only
    where --quantization was given and --speculative-draft-model-quantization was not
    (server_args.py).
    """
    if asked is not None:
        if "," in asked:
            raise ArchsearchError(f"--draft-dtype {asked}: only `search` chooses; name one here")
        if (asked := served_name(asked)) not in DTYPE_BYTES:
            raise ArchsearchError(
                f"--draft-dtype {asked}: only `estimate` prices drafts with weights in it"
            )
        check_dtype(asked, facts, device, "--draft-dtype")
        if device.is_cpu and not facts.gguf and asked != dtype:
            raise ArchsearchError(
                f"{facts.title} runs drafts on a CPU in the target's precision ({dtype}), not in"
                f" {asked}; leave --draft-dtype out, or add --engine llama.cpp"
            )
        return asked
    if device.is_cpu:
        return kind_of_drafts(dtype) if facts.gguf else dtype
    return "bfloat16" if DTYPE_BYTES[dtype] < 2 else dtype


def check_batch(facts: EngineFacts, device: Device, batch_size: int) -> None:
    """Raise ArchsearchError where the engine does not run so many requests at once."""
    if not facts.batches and batch_size > 1:
        able = " or ".join(
            name for name, row in ENGINES.items() if row.batches and _runs_on(row, device)
        )
        raise ArchsearchError(
            f"{facts.title} runs one request at a time, not --batch-size {batch_size}; use --engine"
            f" {able}"
        )


def _runs_on(facts: EngineFacts, device: Device) -> bool:
    if device.is_cpu:  # what an engine adds there is measured by running it
        return bool(facts.make)
    if facts.cpu_only or (facts.nvidia_only and device.vendor != "NVIDIA"):
        return False
    return bool(facts.make) or facts.name in known_engines()


def rounds_of(
    asked: WorkloadRequest, engine: str, device: Device, drafter: RoundKind
) -> EngineRounds | None:
    """How the engine's version runs rounds of a drafter on a GPU; None on a CPU. Raises
    ArchsearchError for a version or switch it lacks."""
    if device.is_cpu:
        for option in ("engine_options", "engine_version", "host"):
            if getattr(asked, option):
                named = option.replace("_", "-").removesuffix("s")
                raise ArchsearchError(
                    f"--{named} is for GPUs: on a CPU the engine that is installed is measured as"
                    " it runs, on this host"
                )
        return None
    version = asked.engine_version
    if version is None:  # an empty one is a mistake, which is refused below
        version = installed_version(engine, device)
    if version is None:
        with suppress(MissingDataError):  # there is no profile
            profile = Profile.load(asked.profile or find_profile(device.key))
            version = measured_version(profile, engine)
    options = parse_options(engine, asked.engine_options)
    if asked.host is not None:
        host_speed(asked.host)  # refuses what is none, also where no host is modelled
        options[HOST] = asked.host
    return engine_rounds(engine, version, options, drafter)


def installed_version(engine: str, device: Device) -> str | None:
    """The version that is installed here for such a device; None where there is none."""
    facts = engine_facts(engine)
    if facts.in_process:
        return package_version(engine)
    found = installed(engine) if facts.recipe else None
    return version_in(found.version) if found is not None and found.device == device.kind else None


def served_words(
    engine: str, rounds: EngineRounds | None, device: Device, *, how: bool = True
) -> str:
    """`vllm 0.33.0 (the newest known; VLLM_USE_V2_MODEL_RUNNER=0), a CUDA graph per layer of the
    draft`; `how`: with the last."""
    here = installed_version(engine, device)
    if rounds is None:
        return f"{engine} {here} (installed here)" if here is not None else engine
    about = [f"{name}={value}" for name, value in rounds.options.items()]
    if rounds.version == here:
        about.insert(0, "installed here")
    elif rounds.version == newest_version(engine):
        about.insert(0, "the newest known")
    if rounds.measured:
        about.append(f"{rounds.measured} rounds of it measured")
    more = f" ({'; '.join(about)})" if about else ""
    return f"{engine} {rounds.version}{more}" + (f", {rounds.costs.title}" if how else "")


def device_of(asked: WorkloadRequest) -> Device:
    """A profile's own device, else the one named."""
    if asked.profile is not None:
        return Device.from_dict(Profile.load(asked.profile).device)
    return resolve_device(asked.gpu or "cpu")


ANSWER: Final = 256
"""Tokens of an answer where only a batch size and a context were given; shorter where the context
is."""
LIMITS: Final = ("tpot_ms", "ttft_ms", "memory_gib", "parameters")


def asked_mix(load: LoadRequest, asked: WorkloadRequest) -> tuple[Mix | None, WorkloadRequest]:
    """The mix that was asked for, or None, and the request with what it says of the server; batch
    size and context are then its heaviest part's. Raises ArchsearchError for a file that holds no
    mix, or contradicts the options."""
    if not load.asks:
        return None, asked
    if load.workload is not None:
        return of_mix(read_mix(load.workload), load, asked)
    # requests that keep the batch in flight and, on the mean, the context in the cache
    answer = min(ANSWER, max(2, 2 * asked.context_len))
    lengths = Lengths.of([max(0, asked.context_len - answer // 2)]), Lengths.of([answer])
    part = LoadPart("requests", 1.0, *lengths, concurrency=asked.batch_size)
    return of_mix(Mix((part,), memory_fraction=asked.memory_fraction), load, asked)


def reach_of(asked: WorkloadRequest, mix: Mix | None) -> int:
    """Positions that a draft must have."""
    return asked.context_len if mix is None else mix.reach


def of_mix(mix: Mix, load: LoadRequest, asked: WorkloadRequest) -> tuple[Mix, WorkloadRequest]:
    """`asked_mix` of one that is known; options go first. Raises ArchsearchError as it does."""
    given = {name: getattr(load, f"max_{name}") for name in LIMITS}
    limits = {name: value for name, value in given.items() if value is not None}
    mix = replace(mix, limits=replace(mix.limits, **limits))
    mix = replace(mix, objective=load.objective or mix.objective)
    if asked.memory_fraction != MEMORY_FRACTION:
        mix = replace(mix, memory_fraction=asked.memory_fraction)
    changes: dict[str, Any] = {}
    for name in ("tensor_parallel", "draft_tensor_parallel"):
        named, given = getattr(mix, name), getattr(asked, name)
        if named is not None and given is not None and named != given:
            option = f"--{name.replace('_', '-')}"
            raise ArchsearchError(
                f"{option} {given}, but the workload says {name}: {named}; leave one out"
            )
        changes[name] = named if given is None else given
    changes["memory_fraction"] = mix.memory_fraction
    batch, context = mix.main.concurrency or 1, mix.main.context
    return mix, replace(asked, batch_size=batch, context_len=context, **changes)
