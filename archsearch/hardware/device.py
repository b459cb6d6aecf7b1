"""`Device`: datasheet facts of the hardware, one YAML file each in `devices/`. Facts only; nothing
here looks at this machine."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from archsearch.errors import ArchsearchError, first_line
from archsearch.files import read_yaml, shipped_yaml
from archsearch.records import as_data
from archsearch.workload import DTYPE_BYTES, dtype_name

_FOLDER = Path(__file__).parent / "devices"


@dataclass(frozen=True, slots=True)
class Device:
    """One processor as its vendor describes it (dense peaks, never the sparse ones).

    `name`: exactly what NVML prints. `memory_bytes`: what the driver reports where known.
    `flops_per_s`: peak by dtype name; a dtype that is missing is not supported.
    `sustained_flops_per_s`: the best a GEMM was measured to reach, by dtype.
    `last_level_cache_bytes`: None where unknown. `link_bytes_per_s`: per direction to a neighbour,
    0 without a link; `link_ranks`: how many devices it joins at most (2: a bridge), None: all of a
    machine; `per_machine`: how many it has, None: any number. `unverified`: fields whose source is
    weak. `native_bf16`: the processor multiplies bfloat16 itself.
    """

    key: str
    name: str
    kind: str
    architecture: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    flops_per_s: Mapping[str, float] = field(hash=False)
    vendor: str = ""
    aliases: tuple[str, ...] = ()
    last_level_cache_bytes: int | None = None
    link_bytes_per_s: float = 0.0
    link_ranks: int | None = None
    per_machine: int | None = None
    sustained_flops_per_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    multiprocessors: int | None = None
    compute_capability: str | None = None
    threads: int | None = None
    native_bf16: bool = True
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    unverified: tuple[str, ...] = ()
    note: str = ""

    @property
    def is_cpu(self) -> bool:
        """Whether it is a CPU; else it is a GPU."""
        return self.kind == "cpu"

    def peak_flops_per_s(self, dtype: str) -> float:
        """Peak for `dtype` (any alias); ArchsearchError names what the device supports."""
        name = dtype_name(dtype)
        if name not in self.flops_per_s:
            raise ArchsearchError(
                f"{self.key} does not compute in {name}; use one of {', '.join(self.flops_per_s)}"
            )
        return self.flops_per_s[name]

    def to_dict(self) -> dict[str, object]:
        """Plain data for run.yaml and profiles."""
        return as_data(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Device:
        """Read back `to_dict`."""
        values = dict(data)
        for name in ("flops_per_s", "sustained_flops_per_s", "sources"):
            values[name] = dict(values.get(name) or {})
        for name in ("aliases", "unverified"):
            values[name] = tuple(values.get(name) or ())
        return cls(**values)


@cache
def devices() -> Mapping[str, Device]:
    """Every known device by key: the table that ships, and what `devices/*.yaml` in the working
    directory adds to it.

    Raises ArchsearchError for an added file that is no device or takes a key that exists. YAML
    files without `key` are not ours.
    """
    files = sorted(_FOLDER.glob("*.yaml"))
    loaded = {data["key"]: Device.from_dict(data) for data in map(shipped_yaml, files)}
    for file in sorted(Path("devices").glob("*.yaml")):
        try:
            data = read_yaml(file, "the device's file")
            if not isinstance(data, Mapping) or "key" not in data:
                continue
            device = _added(data)
        except (ArchsearchError, TypeError, ValueError) as error:
            raise ArchsearchError(
                f"{file} does not describe a device: {first_line(error)}; mend or remove it"
            ) from error
        if device.key in loaded:
            raise ArchsearchError(
                f"{file}: a device with the key {device.key!r} exists already; give it another key"
            )
        loaded[device.key] = device
    return MappingProxyType(loaded)


def _added(data: Mapping[str, object]) -> Device:
    """A device a user wrote down. TypeError or ValueError says what is wrong."""
    device = Device.from_dict({"kind": "gpu", "architecture": "", **data})
    numbers = {
        "memory_bytes": device.memory_bytes,
        "bandwidth_bytes_per_s": device.bandwidth_bytes_per_s,
        **device.flops_per_s,
    }
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"{name} must be a positive number, got {value!r}")
    if not device.flops_per_s:
        raise ValueError("flops_per_s must give the peak of at least one dtype")
    if unknown := set(device.flops_per_s) - set(DTYPE_BYTES):
        raise ValueError(
            f"flops_per_s has unknown dtypes {', '.join(sorted(unknown))}; use"
            f" {', '.join(DTYPE_BYTES)}"
        )
    return device


def _bare(name: str) -> str:
    """A name without case, spaces, dashes and what vendors put before it."""
    return re.sub(r"nvidia|geforce|tesla|amd|instinct|[\W_]", "", name.lower())


def load_device(name: str) -> Device:
    """The device with this key, alias or full name, which count before one another in this order,
    as `_bare` reads them; ArchsearchError with the closest when there is none.

    CPUs are not in the table: `archsearch.hardware.identify.resolve_device` knows `cpu`.
    """
    every = devices().values()
    by_name = {_bare(device.name): device for device in every}
    by_name |= {_bare(alias): device for device in every for alias in device.aliases}
    by_name |= {_bare(device.key): device for device in every}
    if found := by_name.get(_bare(name)):
        return found
    close = difflib.get_close_matches(_bare(name), by_name, n=4, cutoff=0.4)
    keys = ", ".join(dict.fromkeys(by_name[each].key for each in close))
    hint = f"did you mean {keys}?" if close else "see `archsearch list devices`"
    raise ArchsearchError(
        f"no device called {name!r}; {hint} (a new one goes into devices/NAME.yaml of the working"
        " directory)"
    )
