"""A mix of work from a YAML file: kinds of requests with their shares, lengths and load, limits,
and what is to be made best.

    objective: throughput            # speedup, tpot, throughput or tokens_per_device
    memory_fraction: 0.9
    tensor_parallel: 4             # devices that share the target; draft_tensor_parallel: the draft
    limits: {tpot_ms: 40, ttft_ms: 800, memory_gib: 60, parameters: 2.0e+9, training_exaflop: 50}
                                     # of means; ttft_p99_ms: of 99 % of requests at a rate
    parts:
      - name: chat
        weight: 70                   # share of the tokens that are served
        concurrency: 4               # requests in flight; or requests_per_second
        prompt_tokens: {mean: 600, std: 400}
        output_tokens: 250
        temperature: 0.7
        domain: chat
        prefix_cache_hit: 0.5        # share of the prompt that is in the cache already

Lengths are a number, {mean, std}, {low, high} or {values, weights}.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from archsearch.acceptance.estimator import DOMAINS
from archsearch.errors import ArchsearchError
from archsearch.estimate import number
from archsearch.files import read_yaml
from archsearch.records import as_data
from archsearch.traffic.traces import Lengths, mean_context
from archsearch.workload import MEMORY_FRACTION, OBJECTIVES, Objective

MOST_IN_FLIGHT: Final = 1_000_000_000
HEAVIEST: Final = 1e100  # of weights that add up to a number


@dataclass(frozen=True, slots=True)
class LoadPart:
    """One kind of request. `weight`: its share of the tokens that are served; `concurrency` or
    `requests_per_second` is None. `temperature`, `domain` None: as asked elsewhere."""

    name: str
    weight: float
    prompt: Lengths
    output: Lengths
    concurrency: int | None = None
    requests_per_second: float | None = None
    temperature: float | None = None
    domain: str | None = None
    prefix_cache_hit: float = 0.0

    @property
    def context(self) -> int:
        """Tokens in the cache of a request that decodes."""
        return mean_context(self.prompt, self.output)

    def to_dict(self) -> dict[str, Any]:
        """As `mix_of` reads it."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        lengths = {f"{name}_tokens": as_data(data.pop(name)) for name in ("prompt", "output")}
        return {name: value for name, value in data.items() if value is not None} | lengths


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What must hold in every part of the load (None: nothing asked). `tpot_ms` and `ttft_ms` are
    of means, `ttft_p99_ms` of what one request in a hundred exceeds, where they come at a rate.
    `training_exaflop`: 6 FLOPs a parameter and token."""

    tpot_ms: float | None = None
    ttft_ms: float | None = None
    ttft_p99_ms: float | None = None
    memory_gib: float | None = None
    parameters: float | None = None
    training_exaflop: float | None = None

    def asked(self) -> dict[str, float]:
        """Those that are asked for."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Mix:
    """What a server is asked to do. The weights of `parts` add up to 1. `tensor_parallel`,
    `draft_tensor_parallel`: devices that share the target and the draft, None: as asked
    elsewhere."""

    parts: tuple[LoadPart, ...]
    objective: Objective = "speedup"
    limits: ServingLimits = ServingLimits()
    memory_fraction: float = MEMORY_FRACTION
    tensor_parallel: int | None = None
    draft_tensor_parallel: int | None = None

    @property
    def main(self) -> LoadPart:
        """The heaviest part, the first of equals."""
        return max(self.parts, key=lambda part: part.weight)

    @property
    def longest(self) -> int:
        """Tokens in the cache of a request that decodes, of the part where they are most."""
        return max(part.context for part in self.parts)

    @property
    def in_flight(self) -> int:
        """Most requests in flight; 2 where a rate decides, which lets requests meet."""
        return max(part.concurrency or 2 for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """As `mix_of` reads it."""
        own = ("objective", "memory_fraction", "tensor_parallel", "draft_tensor_parallel")
        parts = [part.to_dict() for part in self.parts]
        # the order counts: a continued run compares the text
        return {name: getattr(self, name) for name in own} | {
            "limits": self.limits.asked(),
            "parts": parts,
        }


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
    _only(data, {field.name for field in fields(Mix)}, what)
    objective = data.get("objective", "speedup")
    if objective not in OBJECTIVES:
        raise ArchsearchError(f"{what}: objective {objective!r} is none of {', '.join(OBJECTIVES)}")
    read = [_part(each, f"{what}, part {number}") for number, each in enumerate(given, start=1)]
    parts = _named_apart(read)
    total = math.fsum(part.weight for part in parts)
    if not total > 0:
        raise ArchsearchError(
            f"{what}: the weights of its parts add up to {total:g}; give at least one a positive"
            " weight"
        )
    shared = tuple(replace(part, weight=part.weight / total) for part in parts if part.weight > 0)
    fraction = _number(data, "memory_fraction", MEMORY_FRACTION, what)
    if not 0 < fraction <= 1:
        raise ArchsearchError(f"{what}: memory_fraction must lie between 0 and 1, got {fraction:g}")
    limits = _limits(data.get("limits") or {}, what)
    if limits.ttft_p99_ms is not None and any(part.requests_per_second is None for part in shared):
        raise ArchsearchError(
            f"{what}: ttft_p99_ms needs requests_per_second in every part: a fixed number in flight"
            " does not come by chance"
        )
    ranks, draft_ranks = (
        _devices(data.get(name), f"{what}: {name}")
        for name in ("tensor_parallel", "draft_tensor_parallel")
    )
    return Mix(shared, objective, limits, fraction, ranks, draft_ranks)


def _named_apart(parts: Sequence[LoadPart]) -> list[LoadPart]:
    """The parts with names that differ: limits are kept by name, and of two alike one would be
    lost."""
    found: list[LoadPart] = []
    for place, part in enumerate(parts, start=1):
        taken = any(part.name == other.name for other in found)
        found.append(replace(part, name=f"{part.name} ({place})") if taken else part)
    return found


def _devices(value: Any, what: str) -> int | None:
    if value is not None and not _counts(value):
        raise ArchsearchError(f"{what} must be a whole number of at least 1, got {value!r}")
    return value


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _part(data: Any, what: str) -> LoadPart:
    if not isinstance(data, Mapping):
        raise ArchsearchError(
            f"{what}: it must have weight, prompt_tokens, output_tokens and a load, got {data!r}"
        )
    names = {field.name for field in fields(LoadPart)} - {"prompt", "output"}
    _only(data, names | {"prompt_tokens", "output_tokens"}, what)
    what = f"{what} ({data['name']})" if "name" in data else what
    for name in ("prompt_tokens", "output_tokens"):
        if name not in data:
            raise ArchsearchError(f"{what}: {name} is missing")
    weight, hit = _number(data, "weight", 1.0, what), _number(data, "prefix_cache_hit", 0.0, what)
    if not 0 <= weight <= HEAVIEST or not 0 <= hit <= 1:
        raise ArchsearchError(
            f"{what}: weight must not be negative (or above {HEAVIEST:g}) and prefix_cache_hit lie"
            f" between 0 and 1, got {weight:g}, {hit:g}"
        )
    flight, rate = data.get("concurrency"), data.get("requests_per_second")
    if (flight is None) == (rate is None):
        raise ArchsearchError(f"{what}: give either concurrency or requests_per_second")
    if flight is not None and not (_counts(flight) and flight <= MOST_IN_FLIGHT):
        raise ArchsearchError(
            f"{what}: concurrency must be a whole number of at least 1 and at most"
            f" {MOST_IN_FLIGHT:,}, got {str(flight)[:40]!r}"
        )
    if rate is not None and not _number(data, "requests_per_second", 0.0, what) > 0:
        raise ArchsearchError(f"{what}: requests_per_second must be positive, got {rate!r}")
    temperature = data.get("temperature")
    if temperature is not None and not 0 <= _number(data, "temperature", 0.0, what) <= 5:
        raise ArchsearchError(f"{what}: temperature must lie between 0 and 5, got {temperature!r}")
    domain = data.get("domain")
    if domain is not None and domain not in DOMAINS:
        raise ArchsearchError(f"{what}: domain {domain!r} is none of {', '.join(DOMAINS)}")
    output = Lengths.read(data["output_tokens"], f"{what}, output_tokens")
    if min(output.values) < 1:
        raise ArchsearchError(
            f"{what}, output_tokens: at least 1 token must be written, got {min(output.values)}"
        )
    return LoadPart(
        str(data.get("name", what.rpartition(" ")[2])),
        weight,
        Lengths.read(data["prompt_tokens"], f"{what}, prompt_tokens"),
        output,
        flight,
        None if rate is None else float(rate),
        None if temperature is None else float(temperature),
        domain,
        hit,
    )


def _limits(data: Any, what: str) -> ServingLimits:
    names = [field.name for field in fields(ServingLimits)]
    if not isinstance(data, Mapping):
        raise ArchsearchError(f"{what}: limits must name some of {', '.join(names)}, got {data!r}")
    _only(data, set(names), f"{what}, limits")
    found = {name: _number(data, name, 0.0, f"{what}, limits") for name in data}
    if low := [name for name, value in found.items() if not value > 0]:
        raise ArchsearchError(f"{what}, limits: {low[0]} must be positive, got {found[low[0]]:g}")
    return ServingLimits(**found)


def _number(data: Mapping[str, Any], name: str, default: float, what: str) -> float:
    value = data.get(name, default)
    try:
        return number(value)
    except ValueError:
        raise ArchsearchError(f"{what}: {name} must be a number, got {value!r}") from None


def _only(data: Mapping[str, Any], known: set[str], what: str) -> None:
    if odd := [str(name) for name in data if name not in known]:
        raise ArchsearchError(
            f"{what}: {', '.join(odd)} is unknown; it has {', '.join(sorted(known))}"
        )
