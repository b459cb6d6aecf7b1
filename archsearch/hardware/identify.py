"""Which device is this, really: the CPU from /proc and /sys, GPUs from NVML. A claim (`--gpu NAME`)
is checked against them.

A GPU is recognised by its full NVML name and its memory, never by a substring: "NVIDIA
A100-SXM4-40GB" and "-80GB" differ by a quarter in bandwidth, and a MIG slice carries the name of
the whole card inside its own.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.hardware.device import Device, devices, load_device
from archsearch.records import Inline

# NVML counts what CUDA reserves, datasheets count what is soldered: they differ by up to 2 %
MEMORY_TOLERANCE: Final = 0.03
BUSY_UTILISATION: Final = 0.05
# nvml.h, nvmlClocksEventReasons: those that slow the card down against the user's will
THROTTLE_REASONS: Final = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_SM_CLOCK: Final = 1  # NVML_CLOCK_SM
_MEMORY_CLOCK: Final = 2
_DEFAULT_CACHE: Final = 32 * 2**20
_DEFAULT_MEMORY: Final = 8 * 2**30
_DEFAULT_HZ: Final = 2.5e9
_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, slots=True)
class VisibleGpu:
    """One GPU as NVML shows it. `index`: NVML's own. `mig`: the profile (1g.10gb) when it is a
    slice, else None."""

    index: int
    name: str
    memory_bytes: int
    driver: str
    uuid: str = ""
    mig: str | None = None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """Another process with a CUDA context on a GPU; `memory_bytes` 0 where NVML does not tell."""

    pid: int
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class GpuState:
    """What a GPU is doing: clocks (MHz), power (W), temperature (C), utilisation (0 to 1), who else
    is on it. None: not reported."""

    gpu: Inline[VisibleGpu]
    memory_used_bytes: int | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    max_sm_clock_mhz: int | None
    max_memory_clock_mhz: int | None
    power_limit_w: float | None
    power_draw_w: float | None
    temperature_c: int | None
    throttle_reasons: tuple[str, ...]
    utilisation: float | None
    processes: tuple[GpuProcess, ...]

    @property
    def busy(self) -> bool:
        """Another process has a context on it, or it worked more than BUSY_UTILISATION of the last
        second."""
        return bool(self.processes) or (self.utilisation or 0.0) > BUSY_UTILISATION

    def busy_words(self) -> str:
        """`is used by python (pid 12, 3.0 GiB) and 97 % utilised`."""
        who = ", ".join(
            f"{Path(process.name.split(' ')[0]).name or process.name} (pid {process.pid},"
            f" {process.memory_bytes / 2**30:.1f} GiB)"
            for process in self.processes
        )
        use = "" if self.utilisation is None else f"{self.utilisation:.0%} utilised"
        return "is " + " and ".join(part for part in (f"used by {who}" if who else "", use) if part)


def _read(path: Path) -> str:
    """Contents of a /proc or /sys file, "" where it does not exist or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _slug(model: str) -> str:
    """ "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz" -> "intel-xeon-platinum-8481c"."""
    text = re.sub(r"\((r|tm)\)|@.*|\b(cpu|processor|\d+-core)\b", " ", model.lower())
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-") or "unknown"


def _size_bytes(text: str) -> int:
    """ "32768K" or "33554432" in bytes; 0 when it is neither."""
    match = re.match(r"(\d+)([KMG]?)", text)
    return int(match[1]) * _UNITS[match[2]] if match else 0


def _last_level_cache_bytes(root: Path) -> int:
    """All instances of the highest cache level together; 0 where /sys does not tell (lscpu reads
    the same files)."""
    instances: dict[int, dict[str, int]] = {}
    for index in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        level, size = _read(index / "level").strip(), _size_bytes(_read(index / "size"))
        if level.isdigit() and size and _read(index / "type").strip() != "Instruction":
            instances.setdefault(int(level), {})[_read(index / "shared_cpu_list").strip()] = size
    return sum(instances[max(instances)].values()) if instances else 0


def _memory_bytes(root: Path) -> int:
    """Memory this process may use: the machine's, or the container's limit where that is lower; 0
    where neither is known."""
    match = re.search(r"^MemTotal:\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    total = int(match[1]) * 1024 if match else 0
    if not total and root == Path("/"):
        try:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            total = 0
    limit = _read(root / "sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if total and limit.isdigit() else total


def available_threads(root: Path = Path("/")) -> int:
    """Logical CPUs this process may run on, at most its container's share (`docker --cpus`)."""
    able = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").partition(" ")
    return min(able, max(1, int(quota) // int(period))) if quota.isdigit() else able


def _peaks(flags: set[str], hz: float, threads: int) -> dict[str, float]:
    """A rough peak per dtype from the instruction set: vector lanes x 2 (multiply, add) x 2 units,
    and what bf16 units add."""
    lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
    float32 = threads * hz * lanes * 4
    bf16_factor = (
        16 if "amx_bf16" in flags else 2 if "avx512_bf16" in flags or "bf16" in flags else 1
    )
    return {"float32": float32, "bfloat16": float32 * bf16_factor}


def identify_cpu(threads: int | None = None, root: Path = Path("/")) -> Device:
    """This machine's CPU as a Device, key like `cpu-amd-epyc-f25m17-2t`.

    Family and model are part of the key because clouds blank the name; `threads` (default: all this
    process may use) because it decides every latency. Cache, memory and bf16 support are read; peak
    and bandwidth are guesses from the instruction set (listed in `unverified`) that only a profile
    replaces. `root` is the file system to read, for tests. Raises ArchsearchError for more threads
    than this process may use.
    """
    available = available_threads(root)
    threads = available if threads is None else threads
    if not 1 <= threads <= available:
        raise ArchsearchError(
            f"threads must lie between 1 and {available} (what this process may use), got {threads}"
        )
    first = _read(root / "proc/cpuinfo").split("\n\n")[0]  # of the processors
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    info = {key.strip(): value.strip() for key, value in pairs}
    model = (
        info.get("model name")
        or info.get("Processor")
        or platform.processor()
        or platform.machine()
        or "unknown"
    )
    family, number = info.get("cpu family", ""), info.get("model", "")
    parts = ["cpu", _slug(model)]
    if family and number:
        parts.append(f"f{family}m{number}")
    elif "CPU part" in info:  # ARM names its cores by implementer and part
        parts.append(f"i{info.get('CPU implementer', '')}p{info['CPU part']}".replace("0x", ""))
    flags = set((info.get("flags") or info.get("Features") or "").split())
    # On x86 bogomips is twice the constant clock; "cpu MHz" wanders with load and would change the
    # Device between two reads.
    hz = float(info["bogomips"]) / 2 * 1e6 if family and "bogomips" in info else _DEFAULT_HZ
    cache, memory = _last_level_cache_bytes(root), _memory_bytes(root)
    found = {"last_level_cache_bytes": cache, "memory_bytes": memory}
    guessed = (name for name, value in found.items() if not value)
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
        sources={
            "flops": "instruction set and clock",
            "bandwidth": "12 GB/s per thread up to 200 GB/s, a rule of thumb",
        },
        unverified=("flops_per_s", "bandwidth_bytes_per_s", *guessed),
    )


_NVML_WORDS: Final = {  # by nvmlReturn_t
    12: "no NVIDIA driver is installed here (libnvidia-ml is missing)",
    9: (
        "the NVIDIA driver is installed but not loaded; load it (modprobe nvidia) or restart the"
        " machine"
    ),
    18: (
        "the NVIDIA library and the loaded driver have different versions (it was updated while"
        " running); restart the machine"
    ),
    4: (
        "this user may not talk to the NVIDIA driver; check the rights of /dev/nvidia* or how the"
        " container was started (--gpus all)"
    ),
}


class _Nvml:
    """NVML while it is open. `problem`: one line that says what is missing and what to do; None
    where it answers."""

    def __init__(self) -> None:
        self.problem: str | None = None
        try:
            import pynvml
        except ImportError:
            self.problem = (
                "the Python package nvidia-ml-py is not installed; pip install nvidia-ml-py"
            )
            return
        self.library: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.problem = _NVML_WORDS.get(
                getattr(error, "value", None) or 0, f"the NVIDIA driver does not answer ({error})"
            )

    def __enter__(self) -> _Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        if self.problem is None:
            self.library.nvmlShutdown()

    def __call__(self, name: str, *arguments: object) -> Any:
        """The answer of `nvml<name>`; texts decoded."""
        value = getattr(self.library, f"nvml{name}")(*arguments)
        return value.decode() if isinstance(value, bytes) else value

    def ask(self, name: str, *arguments: object) -> Any:
        """The same; None where this driver, card or slice does not know it."""
        try:
            return self(name, *arguments)
        except (AttributeError, self.library.NVMLError):
            return None

    def handle(self, gpu: VisibleGpu) -> object:
        found = self.ask("DeviceGetHandleByUUID", gpu.uuid) if gpu.uuid else None
        return self("DeviceGetHandleByIndex", gpu.index) if found is None else found

    def describe(self, handle: object, index: int, driver: str) -> VisibleGpu:
        memory = int(self("DeviceGetMemoryInfo", handle).total)
        uuid = self.ask("DeviceGetUUID", handle) or ""
        return VisibleGpu(index, self("DeviceGetName", handle), memory, driver, uuid)

    def slices(self, handle: object, whole: VisibleGpu) -> list[VisibleGpu]:
        """The card, or in MIG mode its slices; itself, marked so, where it has not been cut yet."""
        mode = self.ask("DeviceGetMigMode", handle)
        if not mode or not mode[0]:
            return [whole]
        found = []
        for number in range(self.ask("DeviceGetMaxMigDeviceCount", handle) or 0):
            if (part := self.ask("DeviceGetMigDeviceHandleByIndex", handle, number)) is not None:
                cut = self.describe(part, whole.index, whole.driver)
                profile = cut.name.partition(" MIG ")[2] or f"{cut.memory_bytes / 2**30:.0f} GiB"
                found.append(dataclasses.replace(cut, mig=profile))
        return found or [dataclasses.replace(whole, mig="not cut into slices")]


def gpu_problem() -> str | None:
    """Why no GPU can be seen, in one line with what to do; None where NVML works and shows at least
    one."""
    with _Nvml() as nvml:
        if nvml.problem is not None:
            return nvml.problem
        count = nvml("DeviceGetCount")
    if not count:
        return "the NVIDIA driver shows no GPU"
    if not visible_gpus():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides the {count} GPUs of this machine; unset it"
    return None


def visible_gpus() -> list[VisibleGpu]:
    """GPUs that NVML shows and CUDA_VISIBLE_DEVICES leaves; empty without a driver or without NVML
    (see `gpu_problem`).

    A GPU in MIG mode is replaced by its slices: CUDA runs on one of those, never on the whole card.
    """
    with _Nvml() as nvml:
        if nvml.problem is not None:
            return []
        driver = nvml("SystemGetDriverVersion")
        gpus: list[VisibleGpu] = []
        for index in range(nvml("DeviceGetCount")):
            handle = nvml("DeviceGetHandleByIndex", index)
            gpus += nvml.slices(handle, nvml.describe(handle, index, driver))
    return _left_visible(gpus)


def _left_visible(gpus: list[VisibleGpu]) -> list[VisibleGpu]:
    """What CUDA_VISIBLE_DEVICES leaves, in its order. Reading stops at the first entry that names
    nothing, as CUDA does.

    Numbers are NVML's only under CUDA_DEVICE_ORDER=PCI_BUS_ID or when all cards are alike; in a
    mixed machine numbers hide nothing here, and the bench finds its card by UUID.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    left: list[VisibleGpu] = []
    ordered = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    alike = ordered or len({(gpu.name, gpu.memory_bytes) for gpu in gpus}) == 1
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit():
            if int(entry) >= len({gpu.index for gpu in gpus}):
                break
            if not alike:
                return gpus
            # Of a cut card CUDA takes the first slice.
            chosen = [gpu for gpu in gpus if gpu.index == int(entry)][:1]
        else:
            chosen = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)][:1]
        if not chosen:
            break
        left += chosen
    return list(dict.fromkeys(left))


def gpu_state(gpu: VisibleGpu) -> GpuState:
    """What `gpu` is doing now, from NVML. What the driver does not tell is None (or empty).

    Processes of this one are left out. Inside a container NVML may number processes as the host
    does: ask before CUDA is started here, and every process listed is another one. Raises
    MissingDataError where NVML is not there.
    """
    with _Nvml() as nvml:
        if nvml.problem is not None:
            raise MissingDataError(f"cannot read the state of {gpu.name}: {nvml.problem}")
        handle = nvml.handle(gpu)

        def ask(name: str, *arguments: object) -> Any:
            return nvml.ask(f"DeviceGet{name}", handle, *arguments)

        limit, draw = ask("EnforcedPowerLimit"), ask("PowerUsage")
        mask = ask("CurrentClocksEventReasons")
        if mask is None:  # its name before driver 535
            mask = ask("CurrentClocksThrottleReasons")
        rates, memory = ask("UtilizationRates"), ask("MemoryInfo")
        others = []
        for process in ask("ComputeRunningProcesses") or []:
            if process.pid != os.getpid():
                name = nvml.ask("SystemGetProcessName", process.pid) or "unknown"
                used = int(getattr(process, "usedGpuMemory", None) or 0)
                others.append(GpuProcess(process.pid, name, used))
        reasons = (words for bit, words in THROTTLE_REASONS.items() if (mask or 0) & bit)
        return GpuState(
            gpu=gpu,
            memory_used_bytes=int(memory.used) if hasattr(memory, "used") else None,
            sm_clock_mhz=ask("ClockInfo", _SM_CLOCK),
            memory_clock_mhz=ask("ClockInfo", _MEMORY_CLOCK),
            max_sm_clock_mhz=ask("MaxClockInfo", _SM_CLOCK),
            max_memory_clock_mhz=ask("MaxClockInfo", _MEMORY_CLOCK),
            power_limit_w=None if limit is None else limit / 1000,
            power_draw_w=None if draw is None else draw / 1000,
            temperature_c=ask("Temperature", 0),  # NVML_TEMPERATURE_GPU
            throttle_reasons=tuple(reasons),
            utilisation=None if rates is None else rates.gpu / 100,
            processes=tuple(others),
        )


def sm_clock_reader(gpu: VisibleGpu) -> Callable[[], float | None]:
    """A callable that reads the SM clock (MHz) in well under a millisecond; None where NVML does
    not tell."""
    nvml = _Nvml()  # stays open as long as the process: readings come between measurements
    if nvml.problem is not None:
        return lambda: None
    handle = nvml.handle(gpu)
    return lambda: nvml.ask("DeviceGetClockInfo", handle, _SM_CLOCK)


def idle_gpu(
    device: Device,
    *,
    allow_busy: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> GpuState:
    """The state of the first of the GPUs that are `device` and that nobody uses.

    Busy is: another process has a CUDA context on it, or it has worked more than BUSY_UTILISATION
    of the time; that figure, which a job that just ended may have left behind, is read again for
    2 s. Raises ArchsearchError naming the processes where
    all of them are busy (`allow_busy`: takes the first and says nothing).
    """
    if not (gpus := [gpu for gpu in visible_gpus() if matches(device, gpu)]):
        raise MissingDataError(
            f"no {device.name} is visible here: {gpu_problem() or 'another GPU is'}"
        )
    states = [gpu_state(gpu) for gpu in gpus]
    waited = 0.0
    while not allow_busy and all(state.busy for state in states) and waited < 2.0:
        if all(state.processes for state in states):
            break
        sleep(0.5)
        waited += 0.5
        states = [gpu_state(gpu) for gpu in gpus]
    for state in states:
        if allow_busy or not state.busy:
            return state
    words = "; ".join(f"GPU {state.gpu.index} {state.busy_words()}" for state in states)
    raise ArchsearchError(
        f"{device.name} is busy: {words}; a profile taken beside other work is wrong: stop it, or"
        " pass --allow-busy"
    )


def matches(device: Device, gpu: VisibleGpu) -> bool:
    """Whether NVML shows exactly this device: whole card, full name, and memory within
    MEMORY_TOLERANCE."""
    close = math.isclose(gpu.memory_bytes, device.memory_bytes, rel_tol=MEMORY_TOLERANCE)
    return gpu.name == device.name and close and (gpu.mig is None or " MIG " in device.name)


def resolve_device(name: str, threads: int | None = None) -> Device:
    """The device a search is for: `cpu` (or its own key) is this machine's CPU, anything else comes
    from the table, unchecked.

    Raises ArchsearchError for a name that is neither.
    """
    wanted = name.strip().lower()
    if wanted == "cpu":
        return identify_cpu(threads)
    if wanted.startswith("cpu-"):
        count = re.search(r"-(\d+)t$", wanted)
        here = identify_cpu(
            min(int(count[1]), available_threads()) if count and int(count[1]) else threads
        )
        if wanted != here.key:
            raise ArchsearchError(
                f"{name!r} is not this CPU ({here.key}); use --gpu cpu, or --profile for another"
                " machine's"
            )
        return here
    return load_device(name)


def check_claim(name: str, threads: int | None = None) -> Device:
    """The device `--gpu NAME` claims, once this machine has confirmed it.

    Raises ArchsearchError that says what was claimed, what is here, and which `--gpu` fits.
    """
    claimed = resolve_device(name, threads)
    if claimed.is_cpu:
        return claimed
    gpus = visible_gpus()
    if any(matches(claimed, gpu) for gpu in gpus):
        return claimed

    def sized(each: Device | VisibleGpu) -> str:
        return f"{each.name} with {each.memory_bytes / 2**20:.0f} MiB"

    wanted = f"--gpu {name} claims {sized(claimed)}"
    if not gpus:
        raise ArchsearchError(
            f"{wanted}, but no NVIDIA GPU is visible here: {gpu_problem()}; use --gpu cpu, or run"
            " this on that machine"
        )
    here = ", ".join(dict.fromkeys(map(sized, gpus)))
    every = devices().values()
    fitting = dict.fromkeys(each.key for gpu in gpus for each in every if matches(each, gpu))
    if fitting:
        advice = "use " + " or ".join(f"--gpu {key}" for key in fitting)
    elif gpus[0].mig is not None:
        advice = (
            f"this is a MIG slice ({gpus[0].mig}): its share of bandwidth and cache is not the"
            " card's and is not in the device table, and nothing here guesses it; turn MIG off"
            f" (nvidia-smi -mig 0), or {how_to_add(gpus[0])}"
        )
    else:
        advice = f"this GPU is not in the device table; {how_to_add(gpus[0])}"
    raise ArchsearchError(f"{wanted}, but here is {here}; {advice}")


def how_to_add(gpu: VisibleGpu) -> str:
    """What to write where, so that archsearch knows `gpu`: half a sentence."""
    known = {device.name: device.key for device in devices().values()}
    (nearest,) = difflib.get_close_matches(gpu.name, known, n=1, cutoff=0.0)
    key = _slug(gpu.name)
    return (
        f"write devices/{key}.yaml in this folder (a copy of"
        f" hardware/devices/{known[nearest]}.yaml of the package) with key: {key}, name:"
        f" {gpu.name}, memory_bytes: {gpu.memory_bytes} and the datasheet's bandwidth_bytes_per_s"
        " and flops_per_s"
    )
