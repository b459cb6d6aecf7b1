"""Which device is this, really: the CPU from /proc and /sys, GPUs from NVML. A claim (`--gpu NAME`) is checked against them.

A GPU is recognised by its full NVML name and its memory, never by a substring: "NVIDIA A100-SXM4-40GB" and "-80GB" differ by a
quarter in bandwidth, and a MIG slice carries the name of the whole card inside its own.
"""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from archsearch.errors import ArchsearchError
from archsearch.hardware.device import Device, devices, load_device

MEMORY_TOLERANCE: Final = 0.03  # NVML counts what CUDA reserves, datasheets count what is soldered: they differ by up to 2 %
_DEFAULT_CACHE: Final = 32 * 2**20
_DEFAULT_MEMORY: Final = 8 * 2**30
_DEFAULT_HZ: Final = 2.5e9
_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, slots=True)
class VisibleGpu:
    """One GPU as NVML shows it."""

    index: int
    name: str
    memory_bytes: int
    driver: str


def _read(path: Path) -> str:
    """Contents of a /proc or /sys file, "" where it does not exist or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cpuinfo(root: Path) -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo (keys as printed there); empty where there is none."""
    first = _read(root / "proc/cpuinfo").split("\n\n")[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _slug(model: str) -> str:
    """ "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz" -> "intel-xeon-platinum-8481c"."""
    text = re.sub(r"\((r|tm)\)|@.*|\b(cpu|processor|\d+-core)\b", " ", model.lower())
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-") or "unknown"


def _size_bytes(text: str) -> int:
    """ "32768K", "32 MiB" or "33554432" in bytes; 0 when it is none of them."""
    match = re.match(r"\s*([\d.]+)\s*([KMG]?)", text)
    return int(float(match[1]) * _UNITS[match[2]]) if match else 0


def _last_level_cache_bytes(root: Path) -> int:
    """All instances of the highest cache level together, from /sys, else lscpu; 0 where neither knows."""
    instances: dict[int, dict[str, int]] = {}
    for index in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        level, size = _read(index / "level").strip(), _size_bytes(_read(index / "size"))
        if level.isdigit() and size and _read(index / "type").strip() != "Instruction":
            instances.setdefault(int(level), {})[_read(index / "shared_cpu_list").strip()] = size
    if instances:
        return sum(instances[max(instances)].values())
    if root != Path("/"):
        return 0
    try:
        text = subprocess.run(["lscpu"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    caches = re.findall(r"^L(\d) cache:\s*(.+)$", text, re.MULTILINE)
    return _size_bytes(max(caches)[1]) if caches else 0


def _memory_bytes(root: Path) -> int:
    """Memory this process may use: the machine's, or the container's limit where that is lower; 0 where nothing tells."""
    match = re.search(r"^MemTotal:\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    total = int(match[1]) * 1024 if match else 0
    if not total and root == Path("/"):
        try:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            total = 0
    limit = _read(root / "sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if total and limit.isdigit() else total


def available_threads() -> int:
    """Logical CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _peaks(flags: set[str], hz: float, threads: int) -> dict[str, float]:
    """A rough peak per dtype from the instruction set: vector lanes x 2 (multiply, add) x 2 units, and what bf16 units add."""
    lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
    float32 = threads * hz * lanes * 4
    bf16_factor = 16 if "amx_bf16" in flags else 2 if "avx512_bf16" in flags or "bf16" in flags else 1
    return {"float32": float32, "bfloat16": float32 * bf16_factor}


def identify_cpu(threads: int | None = None, root: Path = Path("/")) -> Device:
    """This machine's CPU as a Device, key like `cpu-amd-epyc-f25m17-2t`.

    Family and model are part of the key because clouds blank the name; `threads` (default: all this process may use) because it
    decides every latency. Cache, memory and bf16 support are read; peak and bandwidth are guesses from the instruction set
    (listed in `unverified`) that only a profile replaces. `root` is the file system to read, for tests.
    """
    available = available_threads()
    threads = available if threads is None else threads
    if not 1 <= threads <= available:
        raise ArchsearchError(f"threads must lie between 1 and {available} (what this process may use), got {threads}")
    info = _cpuinfo(root)
    model = info.get("model name") or info.get("Processor") or platform.processor() or platform.machine() or "unknown"
    family, number = info.get("cpu family", ""), info.get("model", "")
    parts = ["cpu", _slug(model)]
    if family and number:
        parts.append(f"f{family}m{number}")
    elif "CPU part" in info:  # ARM names its cores by implementer and part
        parts.append(f"i{info.get('CPU implementer', '')}p{info['CPU part']}".replace("0x", ""))
    flags = set((info.get("flags") or info.get("Features") or "").split())
    # On x86 bogomips is twice the constant clock; "cpu MHz" wanders with load and would change the Device between two reads.
    hz = float(info["bogomips"]) / 2 * 1e6 if family and "bogomips" in info else _DEFAULT_HZ
    cache, memory = _last_level_cache_bytes(root), _memory_bytes(root)
    unverified = ["flops_per_s", "bandwidth_bytes_per_s"]
    unverified += [name for name, value in (("last_level_cache_bytes", cache), ("memory_bytes", memory)) if not value]
    return Device(
        key="-".join([*parts, f"{threads}t"]),
        name=model,
        kind="cpu",
        architecture=platform.machine(),
        vendor=info.get("vendor_id", ""),
        memory_bytes=memory or _DEFAULT_MEMORY,
        bandwidth_bytes_per_s=min(12e9 * threads, 200e9),
        flops_per_s=_peaks(flags, hz, threads),
        last_level_cache_bytes=cache or _DEFAULT_CACHE,
        threads=threads,
        native_bf16=bool({"avx512_bf16", "amx_bf16", "bf16"} & flags),
        sources={"flops": "instruction set and clock", "bandwidth": "12 GB/s per thread up to 200 GB/s, a rule of thumb"},
        unverified=tuple(unverified),
    )


def visible_gpus() -> list[VisibleGpu]:
    """GPUs NVML shows; empty without a driver or without NVML."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            gpus.append(VisibleGpu(index, _text(pynvml.nvmlDeviceGetName(handle)), memory, driver))
        return gpus
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def matches(device: Device, gpu: VisibleGpu) -> bool:
    """Whether NVML shows exactly this device: full name, and memory within MEMORY_TOLERANCE."""
    return gpu.name == device.name and math.isclose(gpu.memory_bytes, device.memory_bytes, rel_tol=MEMORY_TOLERANCE)


def resolve_device(name: str, threads: int | None = None) -> Device:
    """The device a search is for: `cpu` (or its own key) is this machine's CPU, anything else comes from the table, unchecked."""
    wanted = name.strip().lower()
    if wanted == "cpu":
        return identify_cpu(threads)
    if wanted.startswith("cpu-"):
        count = re.search(r"-(\d+)t$", wanted)
        here = identify_cpu(min(int(count[1]), available_threads()) if count and int(count[1]) else threads)
        if wanted != here.key:
            raise ArchsearchError(f"{name!r} is not this CPU ({here.key}); use --gpu cpu, or --profile for another machine's")
        return here
    return load_device(name)


def check_claim(name: str, threads: int | None = None) -> Device:
    """The device `--gpu NAME` claims, once this machine has confirmed it.

    Raises ArchsearchError that says what was claimed, what is here, and which `--gpu` fits.
    """
    claimed = resolve_device(name, threads)
    if claimed.kind == "cpu":
        return claimed
    gpus = visible_gpus()
    if any(matches(claimed, gpu) for gpu in gpus):
        return claimed
    wanted = f"--gpu {name} claims {claimed.name} with {claimed.memory_bytes / 2**20:.0f} MiB"
    if not gpus:
        raise ArchsearchError(f"{wanted}, but no NVIDIA GPU is visible here; use --gpu cpu, or run this on that machine")
    here = ", ".join(f"{gpu.name} with {gpu.memory_bytes / 2**20:.0f} MiB" for gpu in gpus)
    fitting = list(dict.fromkeys(device.key for gpu in gpus for device in devices().values() if matches(device, gpu)))
    advice = " or ".join(f"--gpu {key}" for key in fitting) if fitting else "--gpu cpu: this GPU is not in the device table"
    raise ArchsearchError(f"{wanted}, but here is {here}; use {advice}")
