"""A Profile out of the measured kernel tables of NVIDIA's PyPI package aiconfigurator-core
(Apache-2.0).

The package ships Parquet files
`systems/data/<system>/<family>/<framework>/<version>/<op>_perf.parquet` with latencies in
milliseconds. Read here: GEMM, decode and context attention, custom all-reduce. Never imported: only
its files are opened.

How the rows were taken is read from the package's own collectors
(github.com/ai-dynamo/aiconfigurator, collector/) and told in `HOW`, which goes into every profile
made here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import re
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from archsearch.architecture.op_kinds import row_sizes
from archsearch.architecture.ops import AllReduce, Attention, Experts, Gemm, LatentAttention
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.files import atomic_path, read_json, umask
from archsearch.hardware.device import Device, load_device
from archsearch.importers import experts
from archsearch.profiles import Measurement, Profile, freeze_shape
from archsearch.progress import Progress, silent
from archsearch.workload import DTYPE_BYTES, dtype_name

PACKAGE: Final = "aiconfigurator-core"
PACKAGE_VERSIONS: Final = (
    "0.12.0",
)  # the layout moved twice within a year: other versions are refused, not guessed at
INSTALL: Final = 'pip install "archsearch[aiconfigurator]"'
LICENCE: Final = "Apache-2.0"
COPYRIGHT: Final = "Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES"
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
BAD_SHARE: Final = 0.1  # more unusable rows than this and the file is not believed
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

Op = Gemm | Attention | AllReduce | Experts | LatentAttention
Key = tuple[Op, str]  # an op and its mode


@dataclass
class Table:
    """Rows of one file: seconds by op and mode (the median where a shape occurs more than once)."""

    path: Path
    times_s: dict[Key, float] = field(default_factory=dict)
    read: int = 0
    ignored: dict[str, int] = field(default_factory=dict)
    kernel_sources: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()


# --- finding the files
# -----------------------------------------------------------------------------------------------


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


def _version_key(text: str) -> tuple[tuple[int, ...], bool, tuple[int, ...]]:
    """Sorts 0.9 < 0.24.0 and 1.3.0rc20 < 1.3.0rc23 < 1.3.0."""
    release = re.match(r"[\d.]*", text)
    head = release.group(0) if release else ""
    tail = text[len(head) :]
    early = re.match(r"[-.]?(a|b|rc|dev)", tail) is not None
    return (
        tuple(map(int, re.findall(r"\d+", head))),
        not early,
        tuple(map(int, re.findall(r"\d+", tail))),
    )


def _versions(folder: Path, file: str) -> list[str]:
    """Versions under `folder` that hold `file`, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path.parent.name for path in folder.glob(f"*/{file}")), key=_version_key)


# --- reading one file
# ------------------------------------------------------------------------------------------------


def _read(
    path: Path, numbers: Sequence[str], texts: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, list[Any]]:
    """Columns of a Parquet file by name. Numbers are floats, NaN where a value is missing; an
    `optional` column may be absent."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingDataError(f"reading {path.name} needs pyarrow; run {INSTALL}") from None
    try:
        names = parquet.read_schema(path).names
        missing = [name for name in (*numbers, *texts) if name not in names]
        if missing:
            raise ArchsearchError(
                f"kernel table {path} has no column {', '.join(missing)}; {_reinstall()}"
            )
        present = [name for name in optional if name in names]
        table = parquet.ParquetFile(path).read(columns=[*numbers, *texts, *present])
        columns: dict[str, list[Any]] = {name: table.column(name).to_pylist() for name in texts}
        for name in (*numbers, *present):
            column = table.column(name)
            if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
                raise ArchsearchError(
                    f"kernel table {path}: column {name} holds {column.type}, not numbers;"
                    f" {_reinstall()}"
                )
            columns[name] = [
                math.nan if value is None else float(value) for value in column.to_pylist()
            ]
    except FileNotFoundError:
        raise MissingDataError(f"kernel table not found: {path}; {_reinstall()}") from None
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ArchsearchError(
            f"kernel table {path} cannot be read ({reason}); {_reinstall()}"
        ) from error
    if not table.num_rows:
        raise ArchsearchError(f"kernel table {path} is empty; {_reinstall()}")
    return columns


def _reinstall() -> str:
    return f"use the tables of {PACKAGE} {PACKAGE_VERSIONS[-1]}"


def _check_identity(
    path: Path, columns: Mapping[str, list[Any]], device: Device, mixed: bool = False
) -> None:
    """Every row was measured on this very device and with the framework version that the folder is
    named after.

    All-reduce tables may carry older versions (L40S: rows of vLLM 0.14.0 under 0.22.0);
    `Table.versions` tells. `mixed`: rows of other versions are the reader's to leave out (B200: a
    development version of vLLM among the experts).
    """
    wrong = {str(name) for name in columns["device"]} - {device.name}
    if wrong:
        raise ArchsearchError(
            f"kernel table {path} was measured on {', '.join(sorted(wrong))}, not on {device.name}"
        )
    versions = {str(version) for version in columns["version"]}
    if (
        not mixed
        and path.parts[-4] != "comm"
        and any(not version.startswith(path.parent.name) for version in versions)
    ):
        raise ArchsearchError(
            f"kernel table {path} holds rows of version {', '.join(sorted(versions))} in the folder"
            f" of version {path.parent.name}; {_reinstall()}"
        )


def _collect(
    path: Path, columns: Mapping[str, list[Any]], rows: Sequence[int], make: Callable[[int], Key]
) -> Table:
    """Seconds by (op, mode) of the wanted rows. Unusable ones are counted; too many of them and the
    file is refused."""
    latencies = columns["latency"]
    seen: dict[Key, list[float]] = {}
    bad = 0
    for row in rows:
        latency = latencies[row]
        try:
            if not (math.isfinite(latency) and latency > 0):
                raise ValueError("latency")
            key = make(row)
        except (
            ValueError,
            OverflowError,
        ):  # a size that is NaN or not a whole positive number, too
            bad += 1
            continue
        seen.setdefault(key, []).append(latency * 1e-3)
    if rows and bad > BAD_SHARE * len(rows):
        raise ArchsearchError(
            f"kernel table {path}: {bad} of {len(rows)} rows are negative, zero, NaN or have no"
            f" whole sizes; {_reinstall()}"
        )
    table = Table(
        path, {key: statistics.median(times) for key, times in seen.items()}, read=len(rows)
    )
    repeated = sum(len(times) - 1 for times in seen.values())
    table.ignored = {
        name: count
        for name, count in (("unusable", bad), ("repeated shapes (median taken)", repeated))
        if count
    }
    table.versions = tuple(sorted({str(columns["version"][row]) for row in rows}))
    table.kernel_sources = tuple(sorted({str(columns["kernel_source"][row]) for row in rows}))
    return table


def _whole(value: float, least: int = 1) -> int:
    if not value >= least or value != int(value):
        raise ValueError(f"not a whole number of at least {least}: {value}")
    return int(value)


def read_gemm(path: Path, device: Device, dtype: str) -> Table:
    """Rows of a gemm_perf.parquet in one dtype: Gemm(m, n, k), mode graph."""
    columns = _read(
        path, ("m", "n", "k", "latency"), ("version", "device", "kernel_source", "gemm_dtype")
    )
    _check_identity(path, columns, device)
    m, n, k, wanted = columns["m"], columns["n"], columns["k"], DTYPES[dtype]
    rows = [row for row, name in enumerate(columns["gemm_dtype"]) if name in wanted]
    table = _collect(
        path,
        columns,
        rows,
        lambda row: (Gemm(_whole(m[row]), _whole(n[row]), _whole(k[row])), "graph"),
    )
    return without_slow_starts(table)


def without_slow_starts(table: Table) -> Table:
    """A GEMM table without its rows of one token that were disturbed, where most of them were.

    vLLM 0.24 in fp8 on B200: in 446 of 483 matrices one token takes about 14 us longer than two to
    sixteen, whatever the size (64 x 64 too), in the others nothing; the same on B300 and GB200. Its
    bfloat16 rows there, TensorRT-LLM's and SGLang's fp8 rows, and Hopper's, have no such thing (0.3
    to 0.5 us). Why is not known. Were it the engine's, a step of one request would take 1.5 times
    one of two.
    """
    by_matrix: dict[tuple[int, int], dict[int, float]] = {}
    for (op, _), seconds in table.times_s.items():
        if isinstance(op, Gemm) and op.m <= 16:
            by_matrix.setdefault((op.n, op.k), {})[op.m] = seconds
    ratios = {
        matrix: times[1] / statistics.median(seconds for m, seconds in times.items() if m > 1)
        for matrix, times in by_matrix.items()
        if 1 in times and len(times) > 1
    }
    slow = {matrix for matrix, ratio in ratios.items() if ratio > SLOW_START}
    if not slow or len(slow) <= SLOW_SHARE * len(ratios):
        return table
    kept = {
        (op, mode): seconds
        for (op, mode), seconds in table.times_s.items()
        if not (isinstance(op, Gemm) and op.m == 1 and (op.n, op.k) in slow)
    }
    return replace(
        table,
        times_s=kept,
        ignored={**table.ignored, "one token, disturbed": len(table.times_s) - len(kept)},
    )


def static_scales(path: Path, device: Device, table: Table) -> Table:
    """An fp8 GEMM table as servers of checkpoints with static scales run it.

    The collector lets every framework compute the scale of the activations; a static checkpoint
    brings it. What that costs is measured apart (computescale_perf: dynamic minus static
    quantisation), and under vLLM the quantisation itself (scale_matrix_perf) is fused into the norm
    or activation before it. No GEMM gets quicker than its weights can be read.
    """
    framework, version = path.parts[-3], path.parts[-2]
    known = []
    for name in STATIC_SCALES.get(framework, ()):
        file = path.parents[3] / "quantize" / framework / version / f"{name}_perf.parquet"
        if file.is_file():
            known.append(_quantise_s(file, device))
    if not known:
        return table
    times = {}
    for (op, mode), seconds in table.times_s.items():
        if isinstance(op, Gemm):
            least = min(seconds, op.weight_elements() / device.bandwidth_bytes_per_s)
            seconds = max(least, seconds - sum(cost(op) for cost in known))
        times[op, mode] = seconds
    return replace(table, times_s=times)


def _quantise_s(file: Path, device: Device) -> Callable[[Gemm], float]:
    """Seconds by tokens and inner size, the nearest of each in the file."""
    columns = _read(file, ("m", "k", "latency"), ("version", "device", "quant_dtype"))
    _check_identity(file, columns, device)
    times = {
        (m, k): t * 1e-3
        for m, k, t in zip(columns["m"], columns["k"], columns["latency"], strict=True)
    }
    tokens, sizes = sorted({m for m, _ in times}), sorted({k for _, k in times})

    @cache
    def nearest(value: int, these: tuple[float, ...]) -> float:
        return min(these, key=lambda known: abs(math.log(known / value)))

    return lambda op: times.get((nearest(op.m, tuple(tokens)), nearest(op.k, tuple(sizes))), 0.0)


def read_attention(path: Path, device: Device, dtype: str) -> Table:
    """Rows of a generation_ or context_attention_perf.parquet in one KV-cache dtype, mode graph.

    Generation: isl is 1 and step the KV length before the new token, so tokens=1, context=step.
    Context: step is 0 and isl the prompt, so tokens=isl, context=0.
    """
    numbers = (
        "batch_size",
        "isl",
        "num_heads",
        "num_key_value_heads",
        "head_dim",
        "step",
        "latency",
    )
    texts = ("version", "device", "kernel_source", "attn_dtype", "kv_cache_dtype")
    columns = _read(path, numbers, texts, ("window_size", "beam_width"))
    _check_identity(path, columns, device)
    wanted = DTYPES[dtype]
    compute = wanted if dtype != "float8_e4m3fn" else (*wanted, "bfloat16")
    beams = columns.get("beam_width", [1.0] * len(columns["latency"]))
    rows = [
        row
        for row, (cached, computed) in enumerate(
            zip(columns["kv_cache_dtype"], columns["attn_dtype"], strict=True)
        )
        if cached in wanted and computed in compute and beams[row] == 1
    ]
    windows = columns.get("window_size")

    def make(row: int) -> Key:
        window = _whole(windows[row], 0) if windows else 0
        heads, kv_heads, head_dim = (
            _whole(columns[name][row]) for name in ("num_heads", "num_key_value_heads", "head_dim")
        )
        tokens, context = _whole(columns["isl"][row]), _whole(columns["step"][row], 0)
        return (
            Attention(
                _whole(columns["batch_size"][row]),
                tokens,
                context,
                heads,
                kv_heads,
                head_dim,
                window or None,
            ),
            "graph",
        )

    return _collect(path, columns, rows, make)


def read_all_reduce(path: Path, device: Device, dtype: str) -> Table:
    """Rows of a custom_allreduce_perf.parquet: AllReduce(elements, ranks), modes graph and eager.

    message_size counts elements. Isolated spikes (slower than SPIKE times both neighbouring sizes)
    are left out: more data cannot take less time, so something else ran.
    """
    numbers, texts = (
        ("num_gpus", "message_size", "latency"),
        ("version", "device", "kernel_source", "allreduce_dtype"),
    )
    columns = _read(path, numbers, texts)
    _check_identity(path, columns, device)
    rows = [row for row, name in enumerate(columns["allreduce_dtype"]) if name in DTYPES[dtype]]

    def make(row: int) -> Key:
        mode = "eager" if str(columns["kernel_source"][row]).endswith("_eager") else "graph"
        return (
            AllReduce(_whole(columns["message_size"][row]), _whole(columns["num_gpus"][row])),
            mode,
        )

    table = _collect(path, columns, rows, make)
    spikes = []
    for ranks, mode in {
        (op.ranks, mode) for op, mode in table.times_s if isinstance(op, AllReduce)
    }:
        line = sorted(
            (op.elements, time, (op, mode))
            for (op, its_mode), time in table.times_s.items()
            if isinstance(op, AllReduce) and (op.ranks, its_mode) == (ranks, mode)
        )
        for before, here, after in zip(line, line[1:], line[2:], strict=False):
            if here[1] > SPIKE * max(before[1], after[1]):
                spikes.append(here[2])
    for key in spikes:
        del table.times_s[key]
    if spikes:
        table.ignored["spikes"] = len(spikes)
    return table


def read_experts(path: Path, device: Device, dtype: str, compact: bool = False) -> Table:
    """Rows of a moe_perf.parquet for a pass in `dtype`: Experts, mode graph; of unusable kernels
    none."""
    numbers = (
        "num_tokens",
        "hidden_size",
        "inter_size",
        "topk",
        "num_experts",
        "moe_tp_size",
        "moe_ep_size",
        "latency",
    )
    columns = _read(
        path, numbers, ("version", "device", "kernel_source", "moe_dtype", "distribution")
    )
    _check_identity(path, columns, device, mixed=True)
    version = path.parts[-2]
    rows = [
        row
        for row in experts.wanted(columns, dtype, path.parts[-3], device, compact)
        if str(columns["version"][row]).startswith(version)
    ]
    formats = experts.formats_of(device, dtype, path.parts[-3])
    table = _collect(
        path, columns, rows, lambda row: (experts.experts_of(columns, row, formats), "graph")
    )
    ops = {op: seconds for (op, _), seconds in table.times_s.items() if isinstance(op, Experts)}
    if bad := experts.badly_tuned(ops, device, dtype):
        table.ignored["kernels at a third of the bandwidth or less"] = len(bad)
        table.times_s = {
            key: seconds for key, seconds in table.times_s.items() if key[0] not in bad
        }
    return table


def read_latent(path: Path, device: Device, dtype: str, compact: bool = False) -> Table:
    """Rows of an mla_generation_ or mla_context_module_perf.parquet in one dtype of weights and
    cache: LatentAttention, graph."""
    texts = ("version", "device", "kernel_source", "gemm_type", "kv_cache_dtype", "architecture")
    columns = _read(path, ("batch_size", "isl", "step", "num_heads", "latency"), texts)
    _check_identity(path, columns, device)
    rows = experts.latent_wanted(columns, dtype, compact)
    return _collect(path, columns, rows, lambda row: (experts.latent_of(columns, row), "graph"))


MORE_READERS: Final[Mapping[str, tuple[str, str, Callable[[Path, Device, str, bool], Table]]]] = {
    "experts": ("moe", "moe_perf.parquet", read_experts),
    "latent decode": ("mla", "mla_generation_module_perf.parquet", read_latent),
    "latent context": ("mla", "mla_context_module_perf.parquet", read_latent),
}
"""Tables that not every framework has; they are read where they are there."""
READERS: Final[Mapping[str, tuple[str, str, Callable[[Path, Device, str], Table]]]] = {
    "gemm": ("gemm", "gemm_perf.parquet", read_gemm),
    "decode": ("attention", "generation_attention_perf.parquet", read_attention),
    "context": ("attention", "context_attention_perf.parquet", read_attention),
    "all_reduce": ("comm", "custom_allreduce_perf.parquet", read_all_reduce),
}


# --- from tables to a profile
# ----------------------------------------------------------------------------------------


def cache_state(op: Op, device: Device, dtype: str) -> str:
    """`warm` where the six weight copies of a GEMM row fit the last-level cache together, else
    `cold`.

    On L40S such rows show up to 2.9 times the bandwidth of the memory. Attention and all-reduce
    rows count as cold: they hold no weights (see `HOW` for the KV cache).
    """
    size = device.last_level_cache_bytes
    if (
        isinstance(op, Gemm)
        and size is not None
        and WEIGHT_COPIES * op.weight_elements() * DTYPE_BYTES[dtype] <= size
    ):
        return "warm"
    return "cold"


def _impossible(op: Op, device: Device, dtype: str, seconds: float) -> bool:
    """A cold GEMM row that reads its weights faster than the memory delivers: part of them came
    from the cache."""
    return (
        isinstance(op, Gemm)
        and cache_state(op, device, dtype) == "cold"
        and op.weight_elements() * DTYPE_BYTES[dtype] > seconds * device.bandwidth_bytes_per_s
    )


def disagreement(
    ours: Mapping[Any, float],
    others: Mapping[str, Mapping[Any, float]],
    keep: Callable[[Any], bool],
) -> dict[str, Any]:
    """How far frameworks differ on the same shapes of the same GPU: what one row may be off by.

    `relative_std`: the robust std (1.4826 MAD) of log(ours / other) over sqrt(2), median over the
    others; `ratio`: median of other / ours, which the std leaves out; `shapes`: how many were
    compared.
    """
    found: dict[str, Any] = {}
    stds = []
    for name, times in others.items():
        logs = [math.log(ours[key] / times[key]) for key in ours.keys() & times.keys() if keep(key)]
        if len(logs) < 20:
            continue
        middle = statistics.median(logs)
        std = 1.4826 * statistics.median([abs(log - middle) for log in logs]) / math.sqrt(2)
        stds.append(std)
        found[name] = {
            "shapes": len(logs),
            "ratio": round(math.exp(-middle), 3),
            "relative_std": round(std, 4),
        }
    return {"relative_std": round(statistics.median(stds), 4), "against": found} if stds else {}


def _small(key: Key) -> bool:
    """The regime of decoding and verification: up to 32 tokens in a pass."""
    op, mode = key
    if isinstance(op, Gemm):
        return op.m <= 32
    if isinstance(op, Attention):
        return op.batch * op.tokens <= 32
    return isinstance(op, AllReduce) and mode == "graph" and op.elements <= 32 * 8192


def import_tables(
    device: Device,
    *,
    framework: str = "vllm",
    data: Path | None = None,
    dtypes: Sequence[str] = ("bfloat16",),
    compact: bool = True,
    progress: Progress | None = None,
) -> Profile:
    """The profile of `device` composed from the kernel tables; it has no folder yet.

    `compact` keeps about 2,200 rows of a dtype from which the others can be told (provenance says
    how well), of further dtypes those of the same shapes, and of experts and latent attention those
    of known targets (`importers.experts`); otherwise all rows are kept, which makes a profile of
    about 60,000. Rows have one time each: `mode` graph (eager for eager all-reduce), `cache` warm
    for GEMMs whose six weight copies fit the last-level cache. Raises: ArchsearchError for a
    device, framework or dtype without tables and for files that are broken or belong elsewhere.
    """
    from archsearch.importers.compact import (
        COMPACT_ROWS,
        compress,
    )  # numpy: not on the way to --help

    names = tuple(dict.fromkeys(dtype_name(name) for name in dtypes))
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
    for name in names:
        if name not in DTYPES or name not in device.flops_per_s:
            raise ArchsearchError(
                f"no kernel tables of {device.key} in {name}; use one of"
                f" {', '.join(_known(device))}"
            )
    root, package_version = find_tables(data)
    system = root / SYSTEMS[device.key]
    versions = {kind: _pick_version(system, framework, kind) for kind in READERS}
    planned = float(sum(COMPACT_ROWS.values()) if compact else len(names))
    report = progress or silent
    done = 0

    stack = {PACKAGE: package_version, framework: versions["gemm"]}
    profile = Profile(device.to_dict(), stack)
    provenance: dict[str, Any] = {
        "package": PACKAGE,
        "version": package_version,
        "framework": framework,
        "framework_version": versions["gemm"],
        "table_versions": {},
        "device_name": device.name,
        "system": SYSTEMS[device.key],
        "licence": LICENCE,
        "copyright": COPYRIGHT,
        "url": SOURCE,
        "changes": (
            "milliseconds to seconds, sizes renamed, rows chosen as told in rows_kept and"
            " rows_ignored"
        ),
        "how": HOW,
        "not_in_tables": list(ABSENT),
        "weights_cached_below_bytes": (
            None if (size := device.last_level_cache_bytes) is None else size // WEIGHT_COPIES
        ),
        "cache_states": (
            "GEMM rows with weights up to weights_cached_below_bytes are marked warm (six copies"
            " fit the last-level cache together), all other rows cold; a KV cache below the size of"
            " that cache was warm all the same"
        ),
        "dtypes": list(names),
        "compact": compact,
        "told": (
            "relative errors of a plain interpolation of the kept rows on those left out; the"
            " choice of rows looked at both"
        ),
        "rows_available": {},
        "rows_kept": {},
        "rows_ignored": {},
        "kernel_sources": {},
        "row_relative_std": {},
        "frameworks_compared": {},
        "told_from_kept_rows": {},
    }
    chosen: dict[str, set[Key]] = {}
    for dtype in names:
        tables: dict[str, Table] = {}
        for kind, (family, file, reader) in READERS.items():
            report(f"reading {kind} {dtype}", done, planned)
            if not versions[kind]:
                continue
            path = system / family / framework / versions[kind] / file
            tables[kind] = reader(path, device, dtype)
            if kind == "gemm" and dtype == "float8_e4m3fn":
                tables[kind] = static_scales(path, device, tables[kind])
        tables |= _more_tables(system, framework, versions["gemm"], device, dtype, compact)
        if not tables["gemm"].times_s or not tables["decode"].times_s:
            lacking = "gemm" if not tables["gemm"].times_s else "decode"
            raise ArchsearchError(
                f"kernel table {tables[lacking].path} has no {dtype} rows; pass another --dtype or"
                " --framework"
            )
        for kind, table in tables.items():
            label = kind if dtype == names[0] else f"{kind} {dtype}"
            found = table.times_s
            fast = [
                key for key, seconds in found.items() if _impossible(key[0], device, dtype, seconds)
            ]
            times = {key: seconds for key, seconds in found.items() if key not in set(fast)}
            if fast:
                table.ignored["faster than the memory"] = len(fast)
            provenance["rows_available"][label] = table.read
            if table.ignored:
                provenance["rows_ignored"][label] = table.ignored
            if table.versions:
                provenance["table_versions"][kind] = ", ".join(table.versions)
            provenance["kernel_sources"][label] = list(table.kernel_sources)
            if (
                compact and kind in chosen
            ):  # a further dtype: the shapes that were chosen for the first
                times = {key: seconds for key, seconds in times.items() if key in chosen[kind]}
            elif compact and kind in COMPACT_ROWS:
                start = done

                def tick(
                    chosen: int, what: str = f"choosing {kind} rows", start: int = start
                ) -> None:
                    report(what, start + chosen, planned)

                plain: dict[Any, float] = times  # of GEMMs and attention only
                kept, told = compress(kind, plain, tick=tick)
                times = {key: seconds for key, seconds in times.items() if key in kept}
                done += COMPACT_ROWS[kind]
                chosen[kind] = set(times)
                provenance["told_from_kept_rows"][label] = told
            provenance["rows_kept"][label] = len(times)
            profile.add(
                Measurement(
                    op.kind,
                    freeze_shape(row_sizes(op)),
                    dtype,
                    mode,
                    cache_state(op, device, dtype),
                    (seconds,),
                )
                for (op, mode), seconds in sorted(
                    times.items(), key=lambda item: (item[0][1], _order(item[0][0]))
                )
            )
        if dtype == names[0]:
            for kind, table in ((kind, tables[kind]) for kind in READERS if kind in tables):
                compared = disagreement(
                    table.times_s, _others(system, framework, kind, device, dtype), _small
                )
                if compared:
                    name = "attention" if kind == "decode" else kind
                    provenance["frameworks_compared"][kind] = compared["against"]
                    if kind != "context":
                        provenance["row_relative_std"][name] = compared["relative_std"]
    profile.provenance = provenance
    profile.origin = (
        f"composed from kernel tables of {PACKAGE} {package_version} (NVIDIA, {LICENCE};"
        f" {FRAMEWORKS[framework]} {versions['gemm']} on {device.name}, CUDA graphs); not measured"
        " by archsearch"
    )
    return profile


def _more_tables(
    system: Path, framework: str, version: str, device: Device, dtype: str, compact: bool
) -> dict[str, Table]:
    """The tables of MORE_READERS that there are for the framework's version, without empty ones."""
    found = {}
    for kind, (family, file, reader) in MORE_READERS.items():
        path = system / family / framework / version / file
        if path.is_file():
            table = reader(path, device, dtype, compact)
            if table.times_s:
                found[kind] = table
    return found


def _known(device: Device) -> list[str]:
    return [name for name in DTYPES if name in device.flops_per_s]


def _order(op: Op) -> tuple[float, ...]:
    return tuple(
        0 if value is None or isinstance(value, str) else value for value in asdict(op).values()
    )


def _pick_version(system: Path, framework: str, kind: str) -> str:
    """The newest version with both gemm and decode attention tables; for all-reduce the newest
    there is, "" for none."""
    family, file, _ = READERS[kind]
    if kind == "all_reduce":
        found = _versions(system / family / framework, file)
        return found[-1] if found else ""
    both = [
        set(_versions(system / family / framework, file))
        for family, file, _ in (READERS["gemm"], READERS["decode"])
    ]
    shared = sorted(both[0] & both[1], key=_version_key)
    if not shared:
        have = sorted(path.name for path in (system / "gemm").glob("*") if path.name in FRAMEWORKS)
        raise ArchsearchError(
            f"no gemm and attention tables of {framework} in {system}; "
            + (f"pass --framework with one of {', '.join(have)}" if have else _reinstall())
        )
    return shared[-1] if (system / family / framework / shared[-1] / file).is_file() else ""


def _others(
    system: Path, framework: str, kind: str, device: Device, dtype: str
) -> dict[str, dict[Key, float]]:
    """Times of the other frameworks, by framework and version."""
    family, file, reader = READERS[kind]
    found = {}
    for other in FRAMEWORKS:
        versions = _versions(system / family / other, file) if other != framework else []
        if not versions:
            continue
        try:
            table = reader(system / family / other / versions[-1] / file, device, dtype)
        except (
            ArchsearchError
        ):  # only compared with: a broken table of a framework that nobody asked for stops nobody
            continue
        found[f"{other} {versions[-1]}"] = table.times_s
    return found


# --- writing
# --------------------------------------------------------------------------------------------------


def stack_folder(profile: Profile) -> str:
    """Folder name of an imported profile: `aiconfigurator-0.12.0-vllm-0.14.0`."""
    framework = profile.provenance["framework"]
    version, of_framework = (profile.provenance[key] for key in ("version", "framework_version"))
    return f"aiconfigurator-{version}-{framework}-{of_framework}"


def import_profile(
    device_name: str,
    *,
    framework: str = "vllm",
    data: Path | None = None,
    dtypes: Sequence[str] = ("bfloat16",),
    compact: bool = True,
    output: Path | None = None,
    root: Path = Path("profiles"),
    progress: Progress | None = None,
) -> Profile:
    """Compose the profile of a device (key or alias) and write it; returns it with its folder set.

    `output`: the folder, by default <root>/<device>/<stack> with root `profiles` in the working
    directory. It is built beside its place and renamed. Raises: as `import_tables`; ArchsearchError
    where `output` holds something that was not imported, which stays as it is.
    """
    device = load_device(device_name)
    if output is not None:
        _refuse_to_overwrite(output)
    profile = import_tables(
        device, framework=framework, data=data, dtypes=dtypes, compact=compact, progress=progress
    )
    folder = output if output is not None else root / device.key / stack_folder(profile)
    _refuse_to_overwrite(folder)
    write_profile(profile, folder)
    return profile


def _refuse_to_overwrite(folder: Path) -> None:
    """An imported profile may be replaced; anything else in the way is somebody's work."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if not folder.exists():
        return
    if not (folder / "profile.json").is_file():
        raise ArchsearchError(f"{folder} exists and is not a profile; pass another --output")
    header = read_json(folder / "profile.json", "profile")
    provenance = header.get("provenance") if isinstance(header, dict) else None
    if not (isinstance(provenance, dict) and provenance.get("package") == PACKAGE):
        raise ArchsearchError(
            f"{folder} holds a profile that was measured by archsearch; pass another --output to"
            " keep both"
        )


def write_profile(profile: Profile, folder: Path) -> None:
    """Write header and rows into a folder beside `folder`, then rename it there; the profile's
    folder is set.

    Raises ArchsearchError where it cannot be written.
    """
    import json

    from archsearch.files import write_json

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    except OSError as error:
        raise ArchsearchError(
            f"cannot write {folder}: {error.strerror or error}; choose a folder you can write to"
        ) from error
    old = building.with_name(building.name + ".old")
    try:
        write_json(building / "profile.json", profile.header())
        with (
            atomic_path(building / "rows.jsonl") as temporary,
            temporary.open("w", encoding="utf-8") as handle,
        ):
            for row in profile.rows.values():
                handle.write(json.dumps(row.to_dict(), separators=(",", ":")) + "\n")
        building.chmod(0o777 & ~umask())
        if folder.exists():
            os.replace(folder, old)
        os.replace(building, folder)
    except OSError as error:
        if old.exists() and not folder.exists():
            os.replace(old, folder)
        raise ArchsearchError(
            f"cannot write {folder}: {error.strerror or error}; free space or choose another folder"
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    profile.folder = folder
