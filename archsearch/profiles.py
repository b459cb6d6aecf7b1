"""`Profile`: what was measured on one device with one software stack. Data only: it times nothing
and predicts nothing.

On disk a folder `profiles/<device>/<stack>/`, whose files docs/profiles.md describes. Rows are
appended as they are made: a killed process loses the row in flight and nothing else."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_fields import check_types
from archsearch.architecture.op_kinds import OP_KINDS
from archsearch.drafters.drafter import Drafter
from archsearch.drafters.registry import read_drafter
from archsearch.errors import ArchsearchError, InvalidShapeError, MissingDataError
from archsearch.files import parse_json, read_json, write_json, writing
from archsearch.paths import data_dir
from archsearch.records import Stored, as_data, from_data
from archsearch.threads import DEFAULT, waiting_policy
from archsearch.workload import MODES, served_name

SCHEMA_VERSION: Final = 1
WHOLE_KINDS: Final = ("layer", "forward", "engine", "pass", "rest", "drafted", "round")
"""Kinds of rows beside those of single ops (OP_KINDS); `RowShape` says what each is about."""

DIFFERENCE_KINDS: Final = ("engine", "rest")
"""Kinds whose times are differences of timings: noise may take one below zero, and cutting it off
there would bias the rest."""
# A difference that many stds below zero is a disturbed measurement, not noise.
REFUSED_STDS: Final = 3.0
# What versions before 0.2.0 stored, without a std, for a difference that came out below it.
CUT_OFF_S: Final = 1e-6

MOST_ELEMENTS: Final = 10**15
MAY_BE_ZERO: Final = ("context", "q_rank", "rope")  # of single ops
CACHE_STATES: Final = ("warm", "cold")
NOISY_IQR: Final = 0.10  # torch.utils.benchmark warns at the same share of the median
BUSY_SHARE: Final = 0.25  # of noisy rows, where a machine was busy
GROSSLY_NOISY_IQR: Final = 0.25  # a repeat that something else disturbed: measure again, do not fit
THROTTLED_DROP: Final = 0.10

Shape = tuple[tuple[str, object], ...]


def freeze_shape(shape: Mapping[str, object]) -> Shape:
    """A hashable, ordered form of a row's sizes; nested mappings (an architecture) become tuples
    too."""
    return tuple(
        sorted(
            (key, freeze_shape(value) if isinstance(value, Mapping) else value)
            for key, value in shape.items()
        )
    )


def thaw_shape(shape: Shape) -> dict[str, object]:
    """The inverse of `freeze_shape`."""
    return {key: thaw_shape(value) if isinstance(value, tuple) else value for key, value in shape}


def _is_number(value: object) -> bool:
    """What JSON calls a number: no truth value, no text, and none that no float holds."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and 0 < value < math.inf


@dataclass(frozen=True)
class Measurement:
    """Repeated timings of one thing. `times_s`: seconds per call, each already divided by the
    slowdown of the reference probe that bracketed it.

    `cache`: `warm` when the weights stay in the last-level cache between calls, `cold` when they
    come from memory. `slowdown`: median of the bracketing probe over the profile's reference probe
    (1.0 = the machine was as quiet as then). `std_s`: standard error of the median where it is
    known otherwise than from the spread of `times_s` (of a difference of two medians). `kernel`:
    which of several kernels ran, where torch chooses one and the profiler knows it; "" elsewhere.
    """

    kind: str
    shape: Shape
    dtype: str
    mode: str
    cache: str
    times_s: tuple[float, ...]
    slowdown: float = 1.0
    throttled: bool = False
    std_s: float | None = None
    kernel: str = ""

    @property
    def key(self) -> tuple[str, Shape, str, str, str]:
        """What identifies a row: kind, shape, dtype, mode, cache state."""
        return (self.kind, self.shape, self.dtype, self.mode, self.cache)

    @cached_property
    def line(self) -> str:
        """What fingerprints take of it."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @property
    def median_s(self) -> float:
        """Median of the repeats, seconds."""
        return statistics.median(self.times_s)

    @property
    def iqr_s(self) -> float:
        """Interquartile range of the repeats, seconds; 0 where there are fewer than three."""
        return _iqr_s(self.times_s) or 0.0

    @property
    def noisy(self) -> bool:
        """Interquartile range above 10 % of the median; a difference has one near zero, which says
        nothing."""
        whole = self.kind not in DIFFERENCE_KINDS
        return whole and self.iqr_s > NOISY_IQR * abs(self.median_s)

    @property
    def grossly_noisy(self) -> bool:
        """Interquartile range above 25 % of the median: something else ran; the row says little."""
        return self.iqr_s > GROSSLY_NOISY_IQR * abs(self.median_s)

    @property
    def error_s(self) -> float | None:
        """Standard error of the median in seconds: `std_s`, else `median_error_s` of the times;
        None where neither is known."""
        return median_error_s(self.times_s) if self.std_s is None else self.std_s

    @property
    def relative_std(self) -> float:
        """Standard error of the median, relative; 0 where it is not known."""
        return (self.error_s or 0.0) / (abs(self.median_s) or math.inf)

    @property
    def impossible(self) -> bool:
        """A difference below zero by more than its noise explains: something disturbed one of the
        two timings."""
        return self.median_s < -REFUSED_STDS * (self.error_s or math.inf)

    @property
    def cut_off(self) -> bool:
        """A difference that an older version cut off at CUT_OFF_S: it was below that, nobody knows
        by how much."""
        return self.kind in DIFFERENCE_KINDS and self.std_s is None and self.median_s == CUT_OFF_S

    def sizes(self) -> dict[str, Any]:
        """The shape as a mapping."""
        return thaw_shape(self.shape)

    def to_dict(self) -> dict[str, object]:
        """A line of rows.jsonl; times in seconds, four digits. `std_s` and `kernel` are left out
        where empty: a row without them keeps its line, and the profile its fingerprint."""
        row: dict[str, object] = {
            "kind": self.kind,
            "shape": self.sizes(),
            "dtype": self.dtype,
            "mode": self.mode,
            "cache": self.cache,
            "times_s": [float(f"{t:.4g}") for t in self.times_s],
            "slowdown": round(self.slowdown, 3),
            "throttled": self.throttled,
        }
        std_s = {} if self.std_s is None else {"std_s": float(f"{self.std_s:.4g}")}
        return row | std_s | ({"kernel": self.kernel} if self.kernel else {})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """Read back `to_dict`. Raises KeyError, TypeError or ValueError for kinds, sizes, cache
        states and times that cannot be."""
        if not isinstance(data, Mapping) or not isinstance(data["shape"], Mapping):
            raise ValueError("a row must be an object with an object as its shape")
        kind, dtype, mode, cache = texts = [
            data[name] for name in ("kind", "dtype", "mode", "cache")
        ]
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise ValueError(f"kind, dtype, mode and cache must be text, got {str(wrong[0])[:40]}")
        served_name(dtype)
        for name, value, known in (
            ("mode", mode, MODES),
            ("kind", kind, (*WHOLE_KINDS, *OP_KINDS)),
            ("cache state", cache, CACHE_STATES),
        ):
            if value not in known:
                raise ValueError(f"unknown {name} {value!r}")
        given, std_s = data["times_s"], data.get("std_s")
        if not isinstance(given, list) or not all(map(_is_number, given)):
            raise ValueError(f"times_s must be a list of numbers, got {str(given)[:40]}")
        times, signed = tuple(map(float, given)), kind in DIFFERENCE_KINDS
        if not times or not all(math.isfinite(t) and (signed or t > 0) for t in times):
            raise ValueError(
                f"times must be {'finite' if signed else 'positive'} numbers, got {times}"
            )
        slowdown, throttled = data.get("slowdown", 1.0), data.get("throttled", False)
        for name, value in (("slowdown", slowdown), ("std_s", std_s)):
            if not (_is_positive(value) or (name == "std_s" and value is None)):
                raise ValueError(f"{name} must be a positive number, got {str(value)[:40]}")
        if not isinstance(throttled, bool):
            raise ValueError(f"throttled must be true or false, got {str(throttled)[:40]}")
        row = cls(
            kind,
            freeze_shape(data["shape"]),
            dtype,
            mode,
            cache,
            times,
            float(slowdown),
            throttled,
            None if std_s is None else float(std_s),
            str(data.get("kernel", "")),
        )
        if kind in OP_KINDS:
            op = OP_KINDS[kind].op
            check_sizes(op, data["shape"])
            op(**data["shape"])
        else:
            SHAPES[kind].of(row)
        return row


@lru_cache(maxsize=8)  # a command reads a profile more than once
def _rows(path: Path, raw: bytes) -> dict[Any, Measurement]:
    rows = {}
    lines = raw.decode("utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = _row(line)
        except (KeyError, TypeError, ValueError) as error:
            if number == len(lines):  # empty, or in flight when a process was killed
                break
            raise ArchsearchError(
                f"profile row {path}:{number} is broken ({error}); delete that line and continue"
            ) from error
        rows[row.key] = row
    return rows


@lru_cache(maxsize=32768)
def _row(line: str) -> Measurement:
    row = Measurement.from_dict(parse_json(line))
    hash(row.key)
    return row


def check_sizes(op: type[object], sizes: Mapping[str, object]) -> None:
    """Refuse sizes that no row of this op has: of another type, or a zero where something is
    counted. Raises InvalidShapeError."""
    types = op.__annotations__  # of a NamedTuple: references to the names
    names = {name: str(getattr(kind, "__forward_arg__", kind)) for name, kind in types.items()}
    check_types(names, sizes, MOST_ELEMENTS)
    for name in types.keys() & sizes.keys():
        if sizes[name] == 0 and name not in MAY_BE_ZERO:
            raise InvalidShapeError(f"{name} must be positive, got 0")


def median_error_s(times_s: Sequence[float]) -> float | None:
    """Standard error of the median of `times_s`: 1.2533 sigma / sqrt(n), sigma from the IQR; None
    with fewer than three times."""
    iqr = _iqr_s(times_s)
    return None if iqr is None else 1.2533 * iqr / 1.349 / math.sqrt(len(times_s))


def _iqr_s(times_s: Sequence[float]) -> float | None:
    if len(times_s) < 3:
        return None
    low, _, high = statistics.quantiles(times_s, n=4, method="inclusive")
    return high - low


Size = Annotated[int, Stored(low=1, high=MOST_ELEMENTS)]
SizeOrZero = Annotated[int, Stored(low=0, high=MOST_ELEMENTS)]


class RowShape:
    """What a row of one of WHOLE_KINDS is about."""

    @classmethod
    def of(cls, row: Measurement) -> Self:
        """Raises ArchsearchError for sizes that are none."""
        return from_data(cls, row.sizes(), known_only=True)

    def to_dict(self) -> dict[str, object]:
        return as_data(self)


@dataclass(frozen=True, slots=True)
class ForwardShape(RowShape):
    """Of kind `forward` (a whole model) or `layer` (one of a stack of them): a pass of `tokens` new
    tokens for each of `batch` sequences against `context` cached ones."""

    architecture: Annotated[Architecture, Stored(inline=True)]
    batch: Size
    tokens: Size
    context: SizeOrZero


@dataclass(frozen=True, slots=True)
class PassShape(RowShape):
    """Of kind `pass`: a pass of target or draft as `engine` itself timed it; `tokens` are per
    sequence."""

    engine: str
    role: Literal["target", "draft"]
    architecture: Architecture
    batch: Size
    tokens: Size
    context: SizeOrZero


@dataclass(frozen=True, slots=True)
class RestShape(RowShape):
    """Of kind `rest`: a step of `batch` requests beside its passes; gamma 0 is a plain step.
    `first_tokens`: tokens per sequence in the draft's first pass of the round; None where the row
    does not say."""

    engine: str
    gamma: SizeOrZero
    batch: Size
    first_tokens: SizeOrZero | None = None


@dataclass(frozen=True, slots=True)
class DraftedShape(RowShape):
    """Of kind `drafted`: all that a round of `batch` requests takes beside the target's pass where
    `drafter` proposed `gamma` tokens to each; `context`: tokens in the cache."""

    engine: str
    drafter: Drafter
    gamma: SizeOrZero
    batch: Size
    context: SizeOrZero

    @classmethod
    def of(cls, row: Measurement) -> Self:
        sizes = row.sizes()
        architecture = Architecture.from_dict(sizes.pop("architecture"))
        drafter = read_drafter(architecture, sizes["drafter"])
        return from_data(cls, sizes | {"drafter": drafter}, known_only=True)

    def to_dict(self) -> dict[str, object]:
        return as_data(self) | {"architecture": self.drafter.architecture.to_dict()}


@dataclass(frozen=True, slots=True)
class RoundShape(RowShape):
    """Of kind `round`: whole rounds of `batch` requests as `engine` of `version` with its switches
    `options` ran them; gamma 0 (and no draft) is a plain step. `context`: tokens cached in
    mid-run."""

    engine: str
    version: str
    options: tuple[tuple[str, str], ...]
    target: Architecture
    draft: Architecture | None
    gamma: SizeOrZero
    batch: Size
    context: SizeOrZero
    tensor_parallel: Size = 1

    @classmethod
    def of(cls, row: Measurement) -> Self:
        sizes = row.sizes()
        options = sorted(sizes["options"].items())
        return from_data(cls, sizes | {"options": options}, known_only=True)

    def to_dict(self) -> dict[str, object]:
        return as_data(self) | {"options": dict(self.options)}


@dataclass(frozen=True, slots=True)
class EngineShape(RowShape):
    """Of kind `engine`: what an engine adds to a plain token (gamma 0) or a round, at a target's
    vocabulary. `draft_layers`: None in rows of the first version."""

    engine: str
    gamma: SizeOrZero
    vocab_size: Size
    draft_layers: SizeOrZero | None = None


SHAPES: Final[Mapping[str, type[RowShape]]] = {
    "layer": ForwardShape,
    "forward": ForwardShape,
    "engine": EngineShape,
    "pass": PassShape,
    "rest": RestShape,
    "drafted": DraftedShape,
    "round": RoundShape,
}


_DEVICE_SIZES: Final = ("last_level_cache_bytes", "memory_bytes", "multiprocessors")
_HEADER: Final[Mapping[str, Callable[[object], bool]]] = {
    "device": lambda value: (
        isinstance(value, dict)
        and isinstance(value.get("key", ""), str)
        and all(value.get(name) is None or _is_positive(value[name]) for name in _DEVICE_SIZES)
    ),
    "stack": lambda value: (
        isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
    ),
    "probe_reference_s": lambda value: (
        isinstance(value, dict) and all(map(_is_positive, value.values()))
    ),
    "known_error": lambda value: isinstance(value, dict),
    "origin": lambda value: isinstance(value, str),
    "provenance": lambda value: isinstance(value, dict),
}
"""What the fields of profile.json are like."""


@dataclass
class Profile:
    """All measurements of a device under a software stack. Rows are unique by `Measurement.key`;
    the last one wins.

    `provenance`: how the rows were made. Imported ones name their `package`, its version and
    licence; rows that archsearch measured on a GPU say driver, clocks and limits; {} for a CPU.
    """

    device: dict[str, Any]
    stack: dict[str, str]
    probe_reference_s: dict[str, float] = field(default_factory=dict)
    known_error: dict[str, Any] = field(default_factory=dict)
    origin: str = "measured on this device by archsearch profile"
    provenance: dict[str, Any] = field(default_factory=dict)
    rows: dict[tuple[object, ...], Measurement] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def imported(self) -> bool:
        """Whether the rows come from somebody else's tables."""
        return "package" in self.provenance

    def add(self, rows: Iterable[Measurement]) -> None:
        """Put rows in, in memory only; a row of the same key is replaced."""
        for row in rows:
            self.rows[row.key] = row

    def record(self, row: Measurement) -> None:
        """Add a row and, where the profile has a folder, append it to rows.jsonl at once.

        Raises ArchsearchError where the file cannot be written.
        """
        self.rows[row.key] = row
        if self.folder is None:
            return
        path = self.folder / "rows.jsonl"
        with writing(path, "free space or pass --output; rows so far are kept"):
            _end_last_line(path)
            with path.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(row.to_dict()) + "\n")
                handle.flush()
                os.fsync(handle.fileno())

    def select(
        self, kind: str, dtype: str, mode: str, cache: str | None = None
    ) -> list[Measurement]:
        """Rows of a kind, dtype and mode, in one cache state or in all."""
        return [
            row
            for row in self.rows.values()
            if row.kind == kind and row.dtype == dtype and row.mode == mode
            if cache in (None, row.cache)
        ]

    def combinations(self) -> list[tuple[str, str]]:
        """The (dtype, mode) pairs with forward or gemm rows, most rows first."""
        counts = Counter((row.dtype, row.mode) for row in self.rows.values())
        return [pair for pair, _ in counts.most_common()]

    @property
    def noisy_share(self) -> float:
        """Share of the rows whose repeats spread by more than 10 %."""
        return sum(row.noisy for row in self.rows.values()) / len(self.rows) if self.rows else 0.0

    def fingerprint(self) -> str:
        """Hash of device, stack and rows: what a run writes down so that it can be repeated."""
        identity: list[object] = [self.device, self.stack, self.probe_reference_s]
        if self.provenance:  # profiles made before it existed keep their hash
            identity.append(self.provenance)
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
        for line in sorted(row.line for row in self.rows.values()):
            digest.update(line.encode())
        return digest.hexdigest()[:16]

    def header(self) -> dict[str, object]:
        """profile.json: device, stack, origin; all but the rows."""
        names = ("device", "stack", "origin", "provenance", "probe_reference_s", "known_error")
        fields = {name: getattr(self, name) for name in names}
        return {"schema_version": SCHEMA_VERSION, **fields}

    def save_header(self) -> None:
        """Write profile.json. Raises ValueError for a profile without a folder."""
        if self.folder is None:
            raise ValueError("a profile without a folder cannot be saved")
        write_json(self.folder / "profile.json", self.header())

    @classmethod
    def load(cls, folder: Path) -> Profile:
        """Read a profile folder. MissingDataError where there is none; ArchsearchError for another
        schema version or a broken row. A last line cut short by a kill is dropped."""
        if not (folder / "profile.json").is_file():
            raise MissingDataError(
                f"no profile in {folder} (profile.json is missing); make one with: archsearch"
                " profile --gpu NAME"
            )
        header = header_of(folder)
        version = header.get("schema_version") if isinstance(header, dict) else None
        if version != SCHEMA_VERSION:
            raise ArchsearchError(
                f"profile {folder} has schema version {version}, this archsearch reads"
                f" {SCHEMA_VERSION}; measure it again"
            )
        broken = [
            name for name, good in _HEADER.items() if name in header and not good(header[name])
        ]
        broken += [name for name in ("device", "stack", "probe_reference_s") if name not in header]
        if broken:
            raise ArchsearchError(
                f"profile {folder / 'profile.json'} is broken: its {broken[0]} is missing or of"
                " another form; measure it again"
            )
        profile = cls(folder=folder, **{name: header[name] for name in _HEADER if name in header})
        path = folder / "rows.jsonl"
        profile.rows = dict(_rows(path, path.read_bytes() if path.exists() else b""))
        return profile

    @classmethod
    def open(cls, folder: Path, device: dict[str, object], stack: dict[str, str]) -> Profile:
        """Load the profile in `folder` to continue it, or start an empty one there.

        Raises ArchsearchError for a profile of another device.
        """
        if (folder / "profile.json").is_file():
            profile = cls.load(folder)
            if profile.device.get("key") != device.get("key"):
                raise ArchsearchError(
                    f"profile {folder} belongs to {profile.device.get('key')}, this device is"
                    f" {device.get('key')}; pass another --output"
                )
            return profile
        profile = cls(device, stack, folder=folder)
        profile.save_header()
        return profile


def current_stack() -> dict[str, str]:
    """The software that decides latencies here, read from package metadata (nothing heavy is
    imported)."""
    found = {name: installed(name) or "none" for name in ("torch", "transformers")}
    return found | {"python": platform.python_version()}


@lru_cache
def installed(name: str) -> str | None:
    """The version of a package that is installed here, read from its metadata; None where it is
    not."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu_stack() -> dict[str, str]:
    """`current_stack`, and how idle threads wait: it moves the latencies of a CPU. Profiles without
    it were made by default."""
    return current_stack() | {"waiting": waiting_policy()}


def stack_key(stack: Mapping[str, str]) -> str:
    """Folder name of a software stack: what changes kernels or host time."""
    waiting = stack.get("waiting", DEFAULT)
    own = "" if waiting == DEFAULT else f"-{waiting}"
    key = f"torch-{stack['torch']}-transformers-{stack['transformers']}{own}"
    return re.sub(r"[+= ]", "-", key)


def profile_roots() -> list[Path]:
    """Where profiles are looked for: the working directory first, then those that ship with
    archsearch."""
    return list(dict.fromkeys([Path("profiles").resolve(), data_dir("profiles").resolve()]))


def list_profiles() -> list[Path]:
    """All profile folders, the user's own first."""
    return [
        header.parent
        for root in profile_roots()
        if root.is_dir()
        for header in sorted(root.glob("*/*/profile.json"))
    ]


def profiles_of(device_key: str) -> list[Path]:
    """The profiles of a device: rows of this tool's own profiler before imported tables, those of
    the working directory before those that ship, then the most rows first."""
    roots = profile_roots()
    found = [folder for folder in list_profiles() if folder.parent.name == device_key]
    return sorted(
        found,
        key=lambda folder: (
            package_of(folder) is not None,
            roots.index(folder.parents[1]),
            -_size(folder / "rows.jsonl"),
        ),
    )


def find_profile(device_key: str, stack: Mapping[str, str] | None = None, *, own: str = "") -> Path:
    """The profile of a device: the same software stack where there is one, else the one with most
    rows. `own`: the name of a run's profile folder; of a CPU no other will do.

    Raises MissingDataError with the command that makes one.
    """
    found, cpu = profiles_of(device_key), device_key.startswith("cpu-")
    names = [own] if stack is None else map(stack_key, (stack, {**stack, "waiting": DEFAULT}))
    same = [folder for name in names for folder in found if folder.name == name]
    if not found or (own and cpu and not same):
        key = f"{device_key}/{own}".rstrip("/")
        raise MissingDataError(
            f"no profile of {key}; make one on that device with: archsearch profile --gpu"
            f" {'cpu' if cpu else device_key}"
            + (f", or copy the run's to profiles/{key}, or search anew here" if own else "")
        )
    return (same or found)[0]


def draft_step_errors(known: Mapping[str, Any]) -> dict[str, float]:
    """Of a profile's `known_error`: the median of a draft step, by dtype, and mode on a GPU."""
    checked = {name: part.get("draft step") for name, part in known.items()}
    return {name: part["median_absolute_error"] for name, part in checked.items() if part}


def header_of(folder: Path) -> Any:
    """profile.json of a folder."""
    return read_json(folder / "profile.json", "profile")


def package_of(folder: Path) -> str | None:
    """Whose tables the profile in a folder was imported from; None of one that was measured."""
    header = header_of(folder)
    provenance = header.get("provenance") if isinstance(header, dict) else None
    return provenance.get("package") if isinstance(provenance, dict) else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _end_last_line(path: Path) -> None:
    """End the last line of rows.jsonl where it holds a row (a file that was joined or edited by
    hand), cut it off where it is what a killed process left of one."""
    if not path.exists():
        return
    with path.open("r+b") as handle:
        size = handle.seek(0, os.SEEK_END)
        handle.seek(max(0, size - 1))
        if size == 0 or handle.read(1) == b"\n":
            return
        handle.seek(0)
        start = handle.read().rfind(b"\n") + 1
        handle.seek(start)
        try:
            Measurement.from_dict(parse_json(handle.read().decode("utf-8", errors="replace")))
        except (KeyError, TypeError, ValueError):
            handle.truncate(start)
        else:
            handle.write(b"\n")
