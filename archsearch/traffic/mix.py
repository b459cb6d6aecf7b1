"""A mix of work from a YAML file (docs/serving.md shows one): kinds of requests with their shares,
lengths and load, limits, and what is to be made best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from archsearch.acceptance.estimator import DOMAINS
from archsearch.errors import ArchsearchError
from archsearch.files import read_yaml
from archsearch.records import Maybe, Share, Stored, as_data, from_data
from archsearch.traffic.traces import Lengths, mean_context
from archsearch.workload import MEMORY_FRACTION, Objective

_T = TypeVar("_T")
MOST_IN_FLIGHT: Final = 1_000_000_000
HEAVIEST: Final = 1e100  # of weights that add up to a number
LENGTHS: Final = ("prompt_tokens", "output_tokens")


Limit = Annotated[float | None, Stored(omit=True, above=0.0)]
Devices = Annotated[int | None, Stored(low=1)]


@dataclass(frozen=True, slots=True)
class LoadPart:
    """One kind of request. `weight`: its share of the tokens that are served; `concurrency` or
    `requests_per_second` is None. `temperature`, `domain` None: as asked elsewhere."""

    name: str
    weight: Annotated[float, Stored(low=0.0, high=HEAVIEST)]
    prompt: Annotated[Lengths, Stored("prompt_tokens")]
    output: Annotated[Lengths, Stored("output_tokens")]
    concurrency: Annotated[int | None, Stored(omit=True, low=1, high=MOST_IN_FLIGHT)] = None
    requests_per_second: Limit = None
    temperature: Annotated[float | None, Stored(omit=True, low=0.0, high=5.0)] = None
    domain: Maybe[str] = None
    prefix_cache_hit: Share = 0.0
    refill: Annotated[bool, Stored(omit=True)] = True

    @property
    def context(self) -> int:
        """Tokens in the cache of a request that decodes."""
        return mean_context(self.prompt, self.output)

    def to_dict(self) -> dict[str, object]:
        """As `mix_of` reads it."""
        return _with_last(self, *LENGTHS)


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What must hold in every part of the load (None: nothing asked). `tpot_ms` and `ttft_ms` are
    of means, `ttft_p99_ms` of what one request in a hundred exceeds, where they come at a rate.
    `training_exaflop`: 6 FLOPs a parameter and token."""

    tpot_ms: Limit = None
    ttft_ms: Limit = None
    ttft_p99_ms: Limit = None
    memory_gib: Limit = None
    parameters: Limit = None
    training_exaflop: Limit = None


@dataclass(frozen=True, slots=True)
class Mix:
    """What a server is asked to do. The weights of `parts` add up to 1. `tensor_parallel`,
    `draft_tensor_parallel`: devices that share the target and the draft, None: as asked
    elsewhere."""

    parts: tuple[LoadPart, ...]
    objective: Objective = "speedup"
    limits: ServingLimits = ServingLimits()
    memory_fraction: Annotated[float, Stored(above=0.0, high=1.0)] = MEMORY_FRACTION
    tensor_parallel: Devices = None
    draft_tensor_parallel: Devices = None

    @property
    def main(self) -> LoadPart:
        """The heaviest part, the first of equals."""
        return max(self.parts, key=lambda part: part.weight)

    @property
    def longest(self) -> int:
        """Tokens in the cache of a request that decodes, of the part where they are most."""
        return max(part.context for part in self.parts)

    @property
    def reach(self) -> int:
        """Tokens at the end of the longest request."""
        return max(max(part.prompt.values) + max(part.output.values) for part in self.parts)

    @property
    def in_flight(self) -> int:
        """Most requests in flight; 2 where a rate decides, which lets requests meet."""
        return max(part.concurrency or 2 for part in self.parts)

    def to_dict(self) -> dict[str, object]:
        """As `mix_of` reads it."""
        return _with_last(self, "limits", "parts")


def _with_last(record: object, *names: str) -> dict[str, object]:
    """As data, in an order that counts: a continued run compares the text."""
    data = as_data(record)
    return data | {name: data.pop(name) for name in names}


def read_mix(path: Path) -> Mix:
    """The mix of a YAML file. Raises ArchsearchError, with the name of what is wrong, for anything
    that is none."""
    data = read_yaml(path, "the workload")
    return mix_of(data, f"workload {path.name}")


def mix_of(data: Any, what: str) -> Mix:
    """The mix of a mapping, see `read_mix`. Raises ArchsearchError for what is no mix."""
    given = data.get("parts") if isinstance(data, Mapping) else None
    if not isinstance(given, list) or not given:
        raise ArchsearchError(
            f"{what}: it must have a list of parts, each with weight, lengths and a load"
        )
    read = [_part(each, f"{what}, part {number}") for number, each in enumerate(given, start=1)]
    parts = _named_apart(read)
    total = math.fsum(part.weight for part in parts)
    if not total > 0:
        raise ArchsearchError(
            f"{what}: the weights of its parts add up to {total:g}; give at least one a positive"
            " weight"
        )
    shared = tuple(replace(part, weight=part.weight / total) for part in parts if part.weight > 0)
    limits = _read(ServingLimits, data.get("limits") or {}, f"{what}, limits")
    mix = _read(Mix, {**data, "parts": shared, "limits": limits}, what)
    if limits.ttft_p99_ms is not None and any(part.requests_per_second is None for part in shared):
        raise ArchsearchError(
            f"{what}: ttft_p99_ms needs requests_per_second in every part: a fixed number in flight"
            " does not come by chance"
        )
    return mix


def _named_apart(parts: Sequence[LoadPart]) -> list[LoadPart]:
    """The parts with names that differ: limits are kept by name, and of two alike one would be
    lost."""
    found: list[LoadPart] = []
    for place, part in enumerate(parts, start=1):
        taken = any(part.name == other.name for other in found)
        found.append(replace(part, name=f"{part.name} ({place})") if taken else part)
    return found


def _part(data: object, what: str) -> LoadPart:
    if not isinstance(data, Mapping):
        raise ArchsearchError(
            f"{what}: it must have weight, prompt_tokens, output_tokens and a load, got {data!r}"
        )
    name = str(data.get("name", what.rpartition(" ")[2]))
    what = f"{what} ({name})" if "name" in data else what
    lengths = {key: Lengths.read(data[key], f"{what}, {key}") for key in LENGTHS if key in data}
    part = _read(LoadPart, {"weight": 1.0, **data, "name": name, **lengths}, what)
    if (part.concurrency is None) == (part.requests_per_second is None):
        raise ArchsearchError(f"{what}: give either concurrency or requests_per_second")
    if not (part.refill or part.concurrency):
        raise ArchsearchError(f"{what}: refill: false needs concurrency, of how many that start")
    if part.domain is not None and part.domain not in DOMAINS:
        raise ArchsearchError(f"{what}: domain {part.domain!r} is none of {', '.join(DOMAINS)}")
    if (least := min(part.output.values)) < 1:
        raise ArchsearchError(
            f"{what}, output_tokens: at least 1 token must be written, got {least}"
        )
    return part


def _read(kind: type[_T], data: object, what: str) -> _T:
    given = data if isinstance(data, Mapping) and kind is not Mix else {}
    for name in (name for name, value in given.items() if value is None):
        # a limit that was forgotten would be no limit
        raise ArchsearchError(f"{what}: {name} is empty; give its value, or leave it out")
    try:
        return from_data(kind, data, known_only=True)
    except ArchsearchError as error:
        raise ArchsearchError(f"{what}: {error}") from None
