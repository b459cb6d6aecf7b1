"""A mix of work as it was asked for: from a file, or one kind of request from the options of the
workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from archsearch.engine_facts import EngineFacts
from archsearch.errors import ArchsearchError
from archsearch.hardware.device import Device
from archsearch.pipeline.serving import check_batch
from archsearch.traffic.mix import LoadPart, Mix, ServingLimits, mix_of, read_mix
from archsearch.traffic.traces import Lengths
from archsearch.workload import MEMORY_FRACTION, OBJECTIVES, LoadRequest, WorkloadRequest

ANSWER: Final = 256
"""Tokens of an answer where only a batch size and a context were given; shorter where the context
is."""
LIMITS: Final = {
    "tpot_ms": "max_tpot_ms",
    "ttft_ms": "max_ttft_ms",
    "memory_gib": "max_memory_gib",
    "parameters": "max_parameters",
}


def asked_mix(load: LoadRequest, asked: WorkloadRequest) -> tuple[Mix | None, WorkloadRequest]:
    """The mix that was asked for, None for none, and the request with what it says of the server;
    batch size and context are then those of its heaviest part. Raises ArchsearchError for a file
    that holds no mix, or contradicts the options."""
    if not load.asks:
        return None, asked
    if load.objective is not None and load.objective not in OBJECTIVES:
        raise ArchsearchError(
            f"--objective {load.objective}: choose one of {', '.join(OBJECTIVES)}"
        )
    mix = read_mix(load.workload) if load.workload is not None else one_kind(asked)
    mix = with_limits(mix, load)
    if load.objective is not None:
        mix = replace(mix, objective=load.objective)
    if asked.memory_fraction != MEMORY_FRACTION:
        mix = replace(mix, memory_fraction=asked.memory_fraction)
    return mix, request_of(mix, asked)


def request_of(mix: Mix, asked: WorkloadRequest) -> WorkloadRequest:
    """The request with the batch size and context of the mix's heaviest part, and the server that
    the mix names.

    Raises ArchsearchError where mix and request name different tensor parallelism.
    """
    changes: dict[str, Any] = {}
    for name in ("tensor_parallel", "draft_tensor_parallel"):
        named, given = getattr(mix, name), getattr(asked, name)
        if named is not None and given is not None and named != given:
            option = f"--{name.replace('_', '-')}"
            raise ArchsearchError(
                f"{option} {given}, but the workload says {name}: {named}; leave one out"
            )
        changes[name] = named if given is None else given
    return replace(
        asked,
        batch_size=mix.main.concurrency or 1,
        context_len=mix.main.context,
        memory_fraction=mix.memory_fraction,
        **changes,
    )


def one_kind(asked: WorkloadRequest) -> Mix:
    """Requests that keep `batch_size` in flight and, on the mean, `context_len` tokens in the
    cache."""
    answer = min(ANSWER, max(2, 2 * asked.context_len))
    prompt = max(0, asked.context_len - answer // 2)
    part = LoadPart(
        "requests", 1.0, Lengths.of([prompt]), Lengths.of([answer]), concurrency=asked.batch_size
    )
    return Mix((part,), memory_fraction=asked.memory_fraction)


def with_limits(mix: Mix, load: LoadRequest) -> Mix:
    """The mix with the limits that were given as options instead of its own.

    Raises ArchsearchError for one that is not positive.
    """
    given = {
        name: getattr(load, option)
        for name, option in LIMITS.items()
        if getattr(load, option) is not None
    }
    if low := [name for name, value in given.items() if not value > 0]:
        raise ArchsearchError(
            f"--max-{low[0].partition('_')[0]} must be positive, got {given[low[0]]:g}"
        )
    return replace(mix, limits=replace(mix.limits, **given)) if given else mix


def check_flight(mix: Mix, facts: EngineFacts, device: Device) -> None:
    """Raise ArchsearchError where the engine does not run so many requests at once as a part
    needs."""
    check_batch(facts, device, mix.in_flight)


def read_back(data: Mapping[str, Any]) -> Mix:
    """A mix that a run folder keeps."""
    return mix_of(data, "the workload of the run")


__all__ = [
    "LoadRequest",
    "ServingLimits",
    "asked_mix",
    "check_flight",
    "one_kind",
    "read_back",
    "request_of",
    "with_limits",
]
