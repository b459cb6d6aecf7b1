"""A Profile out of the measured kernel tables of NVIDIA's PyPI package aiconfigurator-core
(Apache-2.0).

The package ships Parquet files
`systems/data/<system>/<family>/<framework>/<version>/<op>_perf.parquet` with latencies in
milliseconds (READERS: which are read). Never imported: only its files are opened.

How the rows were taken is read from the package's own collectors
(github.com/ai-dynamo/aiconfigurator, collector/) and said in `HOW`, which goes into every profile
made here.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from packaging.version import InvalidVersion, Version

from archsearch.architecture.op_kinds import row_sizes
from archsearch.architecture.ops import AllReduce, Attention, Experts, Gemm, LatentAttention
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.files import scratch_dir, take_place, write_json, writing
from archsearch.hardware.device import Device, load_device
from archsearch.importers import experts
from archsearch.importers.compact import COMPACT_ROWS, compress
from archsearch.profiles import Measurement, Profile, freeze_shape, package_of
from archsearch.progress import Progress, silent
from archsearch.records import as_data
from archsearch.workload import DTYPE_BYTES, dtype_name

if TYPE_CHECKING:
    from pandas import DataFrame

PACKAGE: Final = "aiconfigurator-core"
# The layout moved twice within a year: other versions are refused, not guessed at.
PACKAGE_VERSIONS: Final = ("0.12.0",)
INSTALL: Final = 'pip install "archsearch[aiconfigurator]"'
LICENCE: Final = "Apache-2.0"
SOURCE: Final = "https://github.com/ai-dynamo/aiconfigurator"
FRAMEWORKS: Final = {"vllm": "vLLM", "trtllm": "TensorRT-LLM", "sglang": "SGLang"}

# Device key -> folder under systems/data. The device column of every file is checked against
# Device.name besides.
SYSTEMS: Final = {
    "a100-sxm4-80gb": "a100_sxm",
    "h100-sxm5-80gb": "h100_sxm",
    "h200-sxm-141gb": "h200_sxm",
    "b200-sxm": "b200_sxm",
    "b300-sxm": "b300_sxm",
    "gb200-nvl72": "gb200",
    "l40s": "l40s",
    "rtx-pro-6000-server": "rtx_pro_6000_server",
}
DTYPES: Final = {
    "bfloat16": ("bfloat16",),
    "float16": ("float16", "half"),
    "float8_e4m3fn": ("fp8",),
}

WEIGHT_COPIES: Final = 6  # collect_gemm.py: outside_loop_count = 6 for bfloat16 and fp8
STATIC_SCALES: Final = {"trtllm": ("computescale",), "vllm": ("computescale", "scale_matrix")}
"""What a server of a checkpoint with static scales does not run, by framework (see
`static_scales`)."""
BAD_SHARE: Final = 0.1  # with more unusable rows than this a file is refused
# a product of one token slower than this times the same one of 2 to 16 tokens was disturbed ...
SLOW_START: Final = 1.1
SLOW_SHARE: Final = 0.5  # ... where more than this share of a table's matrices is so
SPIKE: Final = 1.5  # an all-reduce slower than this times both neighbouring sizes was disturbed

HOW: Final = (
    "CUDA graphs of the framework's own layer on one GPU, 3 warm-ups, mean over at least 6 replays,"
    " clocks meant to be locked; no host time and no eager launch gaps, except in eager all-reduce"
    " rows. GEMM: 6 layers with separate weights run in turn, time divided by 6. Attention: one"
    " call per graph replay on one KV cache, so a row holds the gap between two replays and, where"
    " the framework runs it as a kernel of its own, the write of the new keys and values."
    " All-reduce: graph and eager."
)
ABSENT: Final = (
    "verification attention (several query tokens against a cache)",
    "norms, activations, rotary embeddings, residual adds, embedding look-ups, sampling",
    "whole layers and whole models",
    "engine overhead",
)

CACHE_STATES: Final = (
    "GEMM rows with weights up to weights_cached_below_bytes are marked warm (six copies fit the"
    " last-level cache together), all other rows cold; a KV cache below the size of that cache was"
    " warm all the same"
)

Op = Gemm | Attention | AllReduce | Experts | LatentAttention
Key = tuple[Op, str]  # an op and its mode


@dataclass(kw_only=True)
class Provenance:
    """What the header of a profile made here says of its rows; counts by kind of table, of further
    dtypes by kind and dtype."""

    package: str = PACKAGE
    version: str
    framework: str
    framework_version: str
    table_versions: dict[str, str] = field(default_factory=dict)
    device_name: str
    system: str
    licence: str = LICENCE
    copyright: str = "Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES"
    url: str = SOURCE
    changes: str = (
        "milliseconds to seconds, sizes renamed, rows chosen as in rows_kept and rows_ignored"
    )
    how: str = HOW
    not_in_tables: tuple[str, ...] = ABSENT
    weights_cached_below_bytes: int | None
    cache_states: str = CACHE_STATES
    dtypes: list[str]
    compact: bool
    rows_available: dict[str, int] = field(default_factory=dict)
    rows_kept: dict[str, int] = field(default_factory=dict)
    rows_ignored: dict[str, dict[str, int]] = field(default_factory=dict)
    kernel_sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    row_relative_std: dict[str, float] = field(default_factory=dict)
    frameworks_compared: dict[str, dict[str, Compared]] = field(default_factory=dict)

    def count(self, kind: str, label: str, table: Table, kept: int) -> None:
        """Note what a table of `kind` held, and how many of its rows are kept."""
        self.rows_available[label], self.rows_kept[label] = table.read, kept
        self.kernel_sources[label] = table.kernel_sources
        if table.ignored:
            self.rows_ignored[label] = table.ignored
        if table.versions:
            self.table_versions[kind] = ", ".join(table.versions)

    def compare(self, kind: str, ours: Table, others: Mapping[str, Mapping[Key, float]]) -> None:
        """Note how far other frameworks are from a table of `kind`."""
        std, compared = disagreement(ours.times_s, others, _small)
        if compared:
            self.frameworks_compared[kind] = compared
            if kind != "context":
                self.row_relative_std["attention" if kind == "decode" else kind] = std


@dataclass(frozen=True, slots=True)
class Compared:
    """Another framework on the same `shapes` of the same GPU: `ratio`, median of its time over
    ours, and the `relative_std` of one row, which leaves that ratio out."""

    shapes: int
    ratio: float
    relative_std: float


@dataclass
class Table:
    """Rows of one file: seconds by op and mode (the median where a shape occurs more than once).
    `read`: how many were there; `ignored`: how many were left out, by why."""

    path: Path
    times_s: dict[Key, float] = field(default_factory=dict)
    read: int = 0
    ignored: dict[str, int] = field(default_factory=dict)
    kernel_sources: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()

    def without(self, keys: set[Key], why: str) -> Table:
        """The table less `keys`, which are counted."""
        if not keys:
            return self
        times = {key: seconds for key, seconds in self.times_s.items() if key not in keys}
        return replace(self, times_s=times, ignored={**self.ignored, why: len(keys)})


# -- finding the files


def find_tables(data: Path | None = None) -> tuple[Path, str]:
    """The folder `systems/data` and the package version ("unknown" for a bare copy of the folder).

    `data`: that folder, or any folder above it (systems, aiconfigurator_core, an unzipped wheel);
    None looks for the installed package without importing it. Raises: ArchsearchError where there
    is none, or in a version that was never read.
    """
    if data is None:
        spec = importlib.util.find_spec("aiconfigurator_core")
        places = list(spec.submodule_search_locations or []) if spec else []
        if not places:
            raise MissingDataError(
                f"the package {PACKAGE} is not installed; run {INSTALL}, or pass --tables DIR"
            )
        data = Path(places[0])
        where = f"the installed {PACKAGE}"
    else:
        where = str(data)
    if not data.is_dir():
        raise ArchsearchError(
            f"no folder {data}; pass --tables the systems/data folder of {PACKAGE}, or {INSTALL}"
        )
    for inner in ("", "data", "systems/data", "aiconfigurator_core/systems/data"):
        root = data / inner
        if any((root / system).is_dir() for system in SYSTEMS.values()):
            break
    else:
        raise ArchsearchError(
            f"no kernel tables in {where} (looked for systems/data/a100_sxm and others); pass"
            f" --tables the systems/data folder of {PACKAGE} {PACKAGE_VERSIONS[-1]}"
        )
    version = _package_version(root)
    if version != "unknown" and version not in PACKAGE_VERSIONS:
        raise ArchsearchError(
            f"{where} is {PACKAGE} {version}; its tables are read in version"
            f" {', '.join(PACKAGE_VERSIONS)} only: run {INSTALL}"
        )
    return root, version


def _package_version(root: Path) -> str:
    """From the dist-info that lies beside the package folder; installed packages have one there
    too."""
    site = root.resolve().parent.parent.parent  # <site>/aiconfigurator_core/systems/data
    for found in importlib.metadata.distributions(path=[str(site)]):
        if (found.metadata["Name"] or "").replace("_", "-").lower() == PACKAGE:
            return found.version
    return "unknown"


def _version(folder: str) -> Version:
    """By which folders are sorted; one whose name is no version is never the newest."""
    try:
        return Version(folder)
    except InvalidVersion:
        return Version("0")


# -- reading one file


def _read(
    path: Path, device: Device, numbers: str, texts: str = "", optional: str = ""
) -> DataFrame:
    """Columns of a Parquet file, and `version`, `device`, `latency` besides. Numbers
    are floats, NaN where a value is missing; an `optional` one may be absent. All rows are of this
    device."""
    wanted, texts_ = [*numbers.split(), "latency"], [*texts.split(), "version", "device"]
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingDataError(f"reading {path.name} needs pyarrow; run {INSTALL}") from None
    try:
        names = parquet.read_schema(path).names
        missing = [name for name in (*wanted, *texts_) if name not in names]
        if missing:
            raise _broken(path, f" has no column {', '.join(missing)}")
        wanted += [name for name in optional.split() if name in names]
        table = parquet.ParquetFile(path).read(columns=[*wanted, *texts_])
        for name in wanted:
            kind = table.column(name).type
            if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
                raise _broken(path, f": column {name} holds {kind}, not numbers")
    except FileNotFoundError:
        raise MissingDataError(f"kernel table not found: {path}; {_reinstall()}") from None
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:120]
        raise _broken(path, f" cannot be read ({reason})") from error
    if not table.num_rows:
        raise _broken(path, " is empty")
    frame: DataFrame = table.to_pandas().astype(
        dict.fromkeys(wanted, float) | dict.fromkeys(texts_, str)
    )
    wrong = set(frame.device) - {device.name}
    if wrong:
        raise ArchsearchError(
            f"kernel table {path} was measured on {', '.join(sorted(wrong))}, not on {device.name}"
        )
    return frame


def _reinstall() -> str:
    return f"use the tables of {PACKAGE} {PACKAGE_VERSIONS[-1]}"


def _broken(path: Path, what: str) -> ArchsearchError:
    return ArchsearchError(f"kernel table {path}{what}; {_reinstall()}")


def _one_version(path: Path, frame: DataFrame) -> None:
    """Every row was measured with the framework version that the folder is named after.

    Not asked of all-reduce tables, which may carry older ones (L40S: rows of vLLM 0.14.0 under
    0.22.0; see `Table.versions`), and of experts, whose reader leaves others out (B200: a
    development version of vLLM).
    """
    versions = set(frame.version)
    if any(not version.startswith(path.parent.name) for version in versions):
        found = f"{', '.join(sorted(versions))} in the folder of version {path.parent.name}"
        raise _broken(path, f" holds rows of version {found}")


def _collect(
    path: Path, frame: DataFrame, sizes: str, make: Callable[[Any], Key], zero: str = ""
) -> Table:
    """Seconds by (op, mode) of the rows of `frame`: what `make` says of one, whose `sizes` are
    whole numbers of at least 1, those in `zero` of at least 0. Unusable rows are counted; too many
    of them and the file is refused."""
    counts = frame[[*sizes.split(), *zero.split()]]
    least = [1] * len(sizes.split()) + [0] * len(zero.split())
    whole = (counts >= least).all(axis=1) & (counts % 1 == 0).all(axis=1)
    usable = whole & (frame.latency > 0) & (frame.latency < math.inf)
    bad = int((~usable).sum())
    if bad > BAD_SHARE * len(frame):
        some = f"{bad} of {len(frame)} rows"
        raise _broken(path, f": {some} are negative, zero, NaN or have no whole sizes")
    seen: dict[Key, list[float]] = {}
    for row in frame[usable].astype(dict.fromkeys(counts.columns, int)).itertuples(index=False):
        seen.setdefault(make(row), []).append(row.latency * 1e-3)
    times = {key: statistics.median(found) for key, found in seen.items()}
    repeated = sum(map(len, seen.values())) - len(seen)
    ignored = {"unusable": bad, "repeated shapes (median taken)": repeated}
    left_out = {name: count for name, count in ignored.items() if count}
    named = (tuple(sorted(set(frame[column]))) for column in ("kernel_source", "version"))
    return Table(path, times, len(frame), left_out, *named)


def read_gemm(path: Path, device: Device, dtype: str, compact: bool) -> Table:
    """Rows of a gemm_perf.parquet in one dtype: Gemm(m, n, k), mode graph."""
    frame = _read(path, device, "m n k", "kernel_source gemm_dtype")
    _one_version(path, frame)
    rows = frame[frame.gemm_dtype.isin(DTYPES[dtype])]
    table = _collect(path, rows, "m n k", lambda row: (Gemm(row.m, row.n, row.k), "graph"))
    return without_slow_starts(table)


def without_slow_starts(table: Table) -> Table:
    """A GEMM table without its rows of one token that were disturbed, where most of them were.

    vLLM 0.24 in fp8 on B200: in 446 of 483 matrices one token takes about 14 us longer than two to
    sixteen, whatever the size (64 x 64 too), in the others nothing; the same on B300 and GB200. Its
    bfloat16 rows there, TensorRT-LLM's and SGLang's fp8 rows, and Hopper's have no such thing (0.3
    to 0.5 us). Were it the engine's, a step of one request would take 1.5 times one of two.
    """
    by_matrix: dict[tuple[int, int], dict[int, float]] = {}
    for (op, _), seconds in table.times_s.items():
        if isinstance(op, Gemm) and op.m <= 16:
            by_matrix.setdefault((op.n, op.k), {})[op.m] = seconds
    asked = {size: times for size, times in by_matrix.items() if 1 in times and len(times) > 1}
    slow: set[Key] = {
        (Gemm(1, *size), "graph")
        for size, times in asked.items()
        if times[1] > SLOW_START * statistics.median(times[m] for m in times if m > 1)
    }
    few = len(slow) <= SLOW_SHARE * len(asked)
    return table if few else table.without(slow, "one token, disturbed")


def static_scales(table: Table, device: Device) -> Table:
    """An fp8 GEMM table as servers of checkpoints with static scales run it.

    The collector lets every framework compute the scale of the activations, which a static
    checkpoint brings. That is measured apart (computescale_perf: dynamic minus static
    quantisation), and under vLLM the quantisation itself (scale_matrix_perf) is fused into the norm
    or activation before it. No GEMM gets quicker than its weights can be read.
    """
    framework, version = table.path.parts[-3:-1]
    folder = table.path.parents[3] / "quantize" / framework / version
    files = [folder / f"{name}_perf.parquet" for name in STATIC_SCALES.get(framework, ())]
    known = [_quantise_s(file, device) for file in files if file.is_file()]
    times: dict[Key, float] = {}
    for (op, mode), seconds in table.times_s.items():
        if isinstance(op, Gemm) and known:
            least = min(seconds, op.weight_elements() / device.bandwidth_bytes_per_s)
            seconds = max(least, seconds - sum(cost(op) for cost in known))
        times[op, mode] = seconds
    return replace(table, times_s=times)


def _quantise_s(file: Path, device: Device) -> Callable[[Gemm], float]:
    """Seconds by tokens and inner size, the nearest of each in the file."""
    frame = _read(file, device, "m k", "quant_dtype")
    _one_version(file, frame)
    times = {(row.m, row.k): row.latency * 1e-3 for row in frame.itertuples()}
    tokens, sizes = (tuple(sorted(set(frame[name]))) for name in "mk")

    @cache
    def nearest(value: int, these: tuple[float, ...]) -> float:
        return min(these, key=lambda known: abs(math.log(known / value)))

    return lambda op: times.get((nearest(op.m, tokens), nearest(op.k, sizes)), 0.0)


def read_attention(path: Path, device: Device, dtype: str, compact: bool) -> Table:
    """Rows of a generation_ or context_attention_perf.parquet in one KV-cache dtype, mode graph.

    Generation: isl is 1 and step the KV length before the new token, so tokens=1, context=step.
    Context: step is 0 and isl the prompt, so tokens=isl, context=0.
    """
    numbers = "batch_size isl num_heads num_key_value_heads head_dim step"
    texts = "kernel_source attn_dtype kv_cache_dtype"
    frame = _read(path, device, numbers, texts, "window_size beam_width")
    _one_version(path, frame)
    cached = DTYPES[dtype]
    computed = cached if dtype != "float8_e4m3fn" else (*cached, "bfloat16")
    rows = frame[frame.kv_cache_dtype.isin(cached) & frame.attn_dtype.isin(computed)]
    if "beam_width" in rows:
        rows = rows[rows.beam_width == 1]

    def make(row: Any) -> Key:
        heads = (row.num_heads, row.num_key_value_heads, row.head_dim)
        window = getattr(row, "window_size", 0) or None
        return Attention(row.batch_size, row.isl, row.step, *heads, window), "graph"

    zero = "step window_size" if "window_size" in rows else "step"
    return _collect(path, rows, numbers.removesuffix(" step"), make, zero)


def read_all_reduce(path: Path, device: Device, dtype: str, compact: bool) -> Table:
    """Rows of a custom_allreduce_perf.parquet: AllReduce(elements, ranks), modes graph and eager.

    message_size counts elements. Isolated spikes (slower than SPIKE times both neighbouring sizes)
    are left out: more data cannot take less time, so something else ran.
    """
    frame = _read(path, device, "num_gpus message_size", "kernel_source allreduce_dtype")

    def make(row: Any) -> Key:
        mode = "eager" if row.kernel_source.endswith("_eager") else "graph"
        return AllReduce(row.message_size, row.num_gpus), mode

    rows = frame[frame.allreduce_dtype.isin(DTYPES[dtype])]
    table = _collect(path, rows, "num_gpus message_size", make)
    lines: dict[tuple[int, str], list[tuple[int, float, Key]]] = {}
    for (op, mode), time in table.times_s.items():
        if isinstance(op, AllReduce):
            lines.setdefault((op.ranks, mode), []).append((op.elements, time, (op, mode)))
    spikes = {
        key
        for line in map(sorted, lines.values())
        for (_, before, _), (_, here, key), (_, after, _) in zip(
            line, line[1:], line[2:], strict=False
        )
        if here > SPIKE * max(before, after)
    }
    return table.without(spikes, "spikes")


def read_experts(path: Path, device: Device, dtype: str, compact: bool) -> Table:
    """Rows of a moe_perf.parquet for a pass in `dtype`: Experts, mode graph; of unusable kernels
    none."""
    frame = _read(path, device, experts.SIZES, "kernel_source moe_dtype distribution")
    framework, version = path.parts[-3:-1]
    rows = frame[experts.wanted(frame, dtype, framework, device, compact)]
    rows = rows[rows.version.str.startswith(version)]
    formats = experts.formats_of(device, dtype, framework)
    table = _collect(
        path, rows, experts.SIZES, lambda row: (experts.experts_of(row, formats), "graph")
    )
    ops = {op: seconds for (op, _), seconds in table.times_s.items() if isinstance(op, Experts)}
    bad: set[Key] = {(op, "graph") for op in experts.badly_tuned(ops, device, dtype)}
    return table.without(bad, "kernels at a third of the bandwidth or less")


def read_latent(path: Path, device: Device, dtype: str, compact: bool) -> Table:
    """Rows of an mla_generation_ or mla_context_module_perf.parquet in one dtype of weights and
    cache: LatentAttention, graph."""
    texts = "kernel_source gemm_type kv_cache_dtype architecture"
    frame = _read(path, device, "batch_size isl num_heads step", texts)
    _one_version(path, frame)
    rows = frame[experts.latent_wanted(frame, dtype, compact)]
    sizes = "batch_size isl num_heads"
    return _collect(path, rows, sizes, lambda row: (experts.latent_of(row), "graph"), "step")


READERS: Final = {
    "gemm": ("gemm", "gemm_perf.parquet", read_gemm),
    "decode": ("attention", "generation_attention_perf.parquet", read_attention),
    "context": ("attention", "context_attention_perf.parquet", read_attention),
    "all_reduce": ("comm", "custom_allreduce_perf.parquet", read_all_reduce),
    "experts": ("moe", "moe_perf.parquet", read_experts),
    "latent decode": ("mla", "mla_generation_module_perf.parquet", read_latent),
    "latent context": ("mla", "mla_context_module_perf.parquet", read_latent),
}
"""Family, file and reader by kind. Those after ALWAYS are read where they hold rows."""
ALWAYS: Final = ("gemm", "decode", "context", "all_reduce")


# -- from tables to a profile


def cache_state(op: Op, device: Device, dtype: str) -> str:
    """`warm` where the six weight copies of a GEMM row fit the last-level cache together, else
    `cold`.

    On L40S such rows show up to 2.9 times the bandwidth of the memory. Attention and all-reduce
    rows count as cold: they hold no weights (see `HOW` for the KV cache).
    """
    size = device.last_level_cache_bytes
    if not isinstance(op, Gemm) or size is None:
        return "cold"
    fits = WEIGHT_COPIES * op.weight_elements() * DTYPE_BYTES[dtype] <= size
    return "warm" if fits else "cold"


def disagreement(
    ours: Mapping[Key, float],
    others: Mapping[str, Mapping[Key, float]],
    keep: Callable[[Key], bool],
) -> tuple[float, dict[str, Compared]]:
    """How far frameworks differ on the same shapes of the same GPU: what one row may be off by.

    The robust std (1.4826 MAD) of log(ours / other) over sqrt(2), median over the others, and what
    each of them says; (0, {}) where none has 20 of the shapes.
    """
    found: dict[str, Compared] = {}
    stds = []
    for name, times in others.items():
        logs = [math.log(ours[key] / times[key]) for key in ours.keys() & times.keys() if keep(key)]
        if len(logs) < 20:
            continue
        middle = statistics.median(logs)
        std = 1.4826 * statistics.median([abs(log - middle) for log in logs]) / math.sqrt(2)
        stds.append(std)
        found[name] = Compared(len(logs), round(math.exp(-middle), 3), round(std, 4))
    return (round(statistics.median(stds), 4) if stds else 0.0), found


def _small(key: Key) -> bool:
    """The regime of decoding and verification: up to 32 tokens in a pass."""
    op, mode = key
    if isinstance(op, Gemm):
        return op.m <= 32
    if isinstance(op, Attention):
        return op.batch * op.tokens <= 32
    return isinstance(op, AllReduce) and mode == "graph" and op.elements <= 32 * 8192


@dataclass
class Source:
    """The tables of one framework about one device, below `system`. `versions` by kind, "" for a
    table that there is not: the newest with both GEMMs and decode attention, for all-reduce the
    newest there is."""

    system: Path
    device: Device
    framework: str
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        both = [set(self._there("gemm")), set(self._there("decode"))]
        shared = sorted(both[0] & both[1], key=_version)
        if not shared:
            folders = sorted(path.name for path in (self.system / "gemm").glob("*"))
            have = ", ".join(name for name in folders if name in FRAMEWORKS)
            raise ArchsearchError(
                f"no gemm and attention tables of {self.framework} in {self.system}; "
                + (f"pass --framework with one of {have}" if have else _reinstall())
            )
        for kind in READERS:
            found = self._there(kind)
            if kind == "all_reduce":
                self.versions[kind] = found[-1] if found else ""
            else:
                self.versions[kind] = shared[-1] if shared[-1] in found else ""

    def _there(self, kind: str, framework: str = "") -> list[str]:
        """Versions of a framework that hold the file of a kind, oldest first."""
        family, file, _ = READERS[kind]
        folder = self.system / family / (framework or self.framework)
        return sorted((path.parent.name for path in folder.glob(f"*/{file}")), key=_version)

    def _table(self, kind: str, framework: str, version: str, *how: Any) -> Table:
        family, file, reader = READERS[kind]
        return reader(self.system / family / framework / version / file, self.device, *how)

    def tables(self, dtype: str, compact: bool) -> dict[str, Table]:
        """By kind. Raises ArchsearchError where GEMMs or decode attention have no rows in
        `dtype`."""
        found = {}
        for kind, version in self.versions.items():
            if version:
                table = self._table(kind, self.framework, version, dtype, compact)
                if kind == "gemm" and dtype == "float8_e4m3fn":
                    table = static_scales(table, self.device)
                if kind in ALWAYS or table.times_s:
                    found[kind] = table
        for kind in ("gemm", "decode"):
            if not found[kind].times_s:
                raise ArchsearchError(
                    f"kernel table {found[kind].path} has no {dtype} rows; pass another --dtype or"
                    " --framework"
                )
        return found

    def others(self, kind: str, dtype: str) -> dict[str, dict[Key, float]]:
        """Times of the other frameworks, by framework and version. A broken table of a framework
        that nobody asked for stops nobody."""
        found = {}
        for other in FRAMEWORKS:
            versions = self._there(kind, other) if other != self.framework else []
            if versions:
                with contextlib.suppress(ArchsearchError):
                    table = self._table(kind, other, versions[-1], dtype, False)
                    found[f"{other} {versions[-1]}"] = table.times_s
        return found


def _checked_dtypes(device: Device, framework: str, dtypes: Sequence[str]) -> list[str]:
    """The dtypes by name, once the tables know framework, device and all of them."""
    names = list(dict.fromkeys(dtype_name(name) for name in dtypes))
    if framework not in FRAMEWORKS:
        raise ArchsearchError(
            f"unknown framework {framework!r}; the tables know {', '.join(FRAMEWORKS)}"
        )
    if device.key not in SYSTEMS:
        raise ArchsearchError(
            f"{PACKAGE} holds no measured kernel tables of {device.key}; it has"
            f" {', '.join(SYSTEMS)}: use one of them, or measure here with: archsearch profile"
            f" --gpu {device.key}"
        )
    known = [name for name in DTYPES if name in device.flops_per_s]
    for name in names:
        if name not in known:
            raise ArchsearchError(
                f"no kernel tables of {device.key} in {name}; use one of {', '.join(known)}"
            )
    return names


def import_tables(
    device: Device,
    *,
    framework: str = "vllm",
    data: Path | None = None,
    dtypes: Sequence[str] = ("bfloat16",),
    compact: bool = True,
    progress: Progress = silent,
) -> Profile:
    """The profile of `device` composed from the kernel tables; it has no folder yet.

    `compact` keeps the rows that predict the others (docs/profiles.md), of further dtypes those of
    the same shapes, and of experts and latent attention those of known targets
    (`importers.experts`). Rows have one time each. Raises: ArchsearchError for a device, framework
    or dtype without tables and for files that are broken or belong elsewhere.
    """
    names = _checked_dtypes(device, framework, dtypes)
    root, package_version = find_tables(data)
    source = Source(root / SYSTEMS[device.key], device, framework)
    cache_bytes = device.last_level_cache_bytes
    about = Provenance(
        version=package_version,
        framework=framework,
        framework_version=source.versions["gemm"],
        device_name=device.name,
        system=source.system.name,
        weights_cached_below_bytes=None if cache_bytes is None else cache_bytes // WEIGHT_COPIES,
        dtypes=names,
        compact=compact,
    )
    stack = {PACKAGE: package_version, framework: about.framework_version}
    profile = Profile(device.to_dict(), stack)
    planned = float(sum(COMPACT_ROWS.values()) if compact else len(names))
    choice = _Choice(progress, planned)
    for dtype in names:
        progress(f"reading {dtype}", choice.done, planned)
        for kind, whole in source.tables(dtype, compact).items():
            label = kind if dtype == names[0] else f"{kind} {dtype}"
            # weights that come faster than the memory delivers lay in the cache, in part
            fast: set[Key] = {
                (op, mode)
                for (op, mode), seconds in whole.times_s.items()
                if isinstance(op, Gemm)
                and cache_state(op, device, dtype) == "cold"
                and op.weight_elements() * DTYPE_BYTES[dtype]
                > seconds * device.bandwidth_bytes_per_s
            }
            table = whole.without(fast, "faster than the memory")
            times = choice.of(kind, table.times_s) if compact else table.times_s
            about.count(kind, label, table, len(times))
            profile.add(_rows(times, device, dtype))
            if dtype == names[0] and kind in ALWAYS:
                about.compare(kind, whole, source.others(kind, dtype))
    profile.provenance = as_data(about)
    profile.origin = (
        f"composed from kernel tables of {PACKAGE} {package_version} (NVIDIA, {LICENCE};"
        f" {FRAMEWORKS[framework]} {about.framework_version} on {device.name}, CUDA graphs); not"
        " measured by archsearch"
    )
    return profile


@dataclass
class _Choice:
    """Which rows of each kind a compact profile keeps; `done` of `planned` rows are chosen."""

    progress: Progress
    planned: float
    done: int = 0
    chosen: dict[str, Collection[Key]] = field(default_factory=dict)

    def of(self, kind: str, times: dict[Key, float]) -> dict[Key, float]:
        """Those of `times` that are kept: of a further dtype the shapes of the first."""
        if kind in COMPACT_ROWS and kind not in self.chosen:
            plain: Mapping[Any, float] = times  # of GEMMs and attention only

            def tick(rows: int) -> None:
                self.progress(f"choosing {kind} rows", self.done + rows, self.planned)

            self.chosen[kind] = compress(plain, COMPACT_ROWS[kind], tick=tick)
            self.done += COMPACT_ROWS[kind]
        kept = self.chosen.get(kind, times)
        return {key: seconds for key, seconds in times.items() if key in kept}


def _rows(times: Mapping[Key, float], device: Device, dtype: str) -> list[Measurement]:
    """Rows of a profile, by mode and sizes."""

    def order(key: Key) -> tuple[object, ...]:
        return key[1], [
            0 if value is None or isinstance(value, str) else value for value in astuple(key[0])
        ]

    def row(op: Op, mode: str) -> Measurement:
        shape, cache = freeze_shape(row_sizes(op)), cache_state(op, device, dtype)
        return Measurement(op.kind, shape, dtype, mode, cache, (times[op, mode],))

    return [row(*key) for key in sorted(times, key=order)]


# -- writing


def stack_folder(profile: Profile) -> str:
    """Folder name of an imported profile: `aiconfigurator-0.12.0-vllm-0.14.0`."""
    names = ("version", "framework", "framework_version")
    return "-".join(["aiconfigurator", *(profile.provenance[name] for name in names)])


def import_profile(
    device_name: str, *, output: Path | None = None, root: Path = Path("profiles"), **options: Any
) -> Profile:
    """Compose the profile of a device (key or alias) with the `options` of `import_tables` and
    write it; returns it with its folder set.

    `output`: the folder, by default <root>/<device>/<stack>. Raises: as `import_tables`;
    ArchsearchError where `output` holds something that was not imported, which stays as it is.
    """
    device = load_device(device_name)
    if output is not None:
        _refuse_to_overwrite(output)
    profile = import_tables(device, **options)
    folder = output or root / device.key / stack_folder(profile)
    _refuse_to_overwrite(folder)
    write_profile(profile, folder)
    return profile


def _refuse_to_overwrite(folder: Path) -> None:
    """An imported profile may be replaced; anything else in the way is somebody's work."""
    if not folder.exists() or folder.is_dir() and not any(folder.iterdir()):
        return
    if not (folder / "profile.json").is_file():
        raise ArchsearchError(f"{folder} exists and is not a profile; pass another --output")
    if package_of(folder) != PACKAGE:
        raise ArchsearchError(
            f"{folder} holds a profile that was measured by archsearch; pass another --output to"
            " keep both"
        )


def write_profile(profile: Profile, folder: Path) -> None:
    """Write header and rows into a folder beside `folder`, then rename it there; the profile's
    folder is set.

    Raises ArchsearchError where it cannot be written.
    """
    with writing(folder), scratch_dir(folder) as scratch:
        new = scratch / "new"
        write_json(new / "profile.json", profile.header())
        lines = (json.dumps(row.to_dict(), separators=(",", ":")) for row in profile.rows.values())
        (new / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        take_place(new, folder, scratch)
    profile.folder = folder
