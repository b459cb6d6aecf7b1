"""`archsearch doctor`: what this machine has, what is missing, and the command that fixes it. It
measures nothing."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from archsearch import __version__
from archsearch.engine_facts import engine_facts, engine_title
from archsearch.engine_rounds import engine_rounds, known_engines, newest_version, version_in
from archsearch.engines.environments.environment import overview
from archsearch.hardware.device import Device, devices
from archsearch.hardware.identify import (
    VisibleGpu,
    gpu_problem,
    gpu_state,
    how_to_add,
    identify_cpu,
    matches,
    visible_gpus,
)
from archsearch.paths import cache_dir
from archsearch.profiles import cpu_stack, header_of, installed, profiles_of, stack_key
from archsearch.report.terminal.profile import Diagnosis, Finding, Level

# a demo's cache and run; an engine's environment wants more and says so itself
LEAST_DISK_BYTES: Final = 5 * 10**9
LEAST_MEMORY_BYTES: Final = 4 * 2**30  # the demo's target and drafts with their training states
BUSY_SHARE: Final = 0.25  # of all threads: beyond that timings of this CPU are those of a busy one


def doctor() -> Diagnosis:
    """Every finding, as they matter."""
    looks: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": _versions,
        "device": _device,
        "profile": _profiles,
        "engines": _engines,
        "disk": lambda: _disk(Path.cwd()),
        "memory": _memory,
        "load": _load,
    }
    found: list[Finding] = []
    for topic, look in looks.items():
        try:  # a broken file or a driver that answers oddly costs only this part
            found.extend(replace(each, topic=topic) for each in look())
        except (OSError, ValueError, KeyError) as error:
            words = " ".join(str(error).split()) or type(error).__name__
            found.append(Finding("mend", words, topic=topic))
    return Diagnosis(__version__, tuple(found), all(each.level != "stop" for each in found))


def _versions() -> Iterator[Finding]:
    python, pip = platform.python_version(), f"{sys.executable} -m pip install"
    wrong = list(_unmet(_requirements()))
    for requirement, there in wrong:
        name, wanted = requirement.name, requirement.specifier
        text = f"{name} {there or 'is not installed'}; archsearch needs {wanted or 'it'}"
        yield Finding("mend" if there else "stop", text, f"{pip} {shlex.quote(f'{name}{wanted}')}")
    if not wrong:
        versions = {name: installed(name) for name in ("torch", "transformers", "optuna")}
        named = ", ".join(f"{name} {there}" for name, there in versions.items() if there)
        yield Finding("ok", f"archsearch {__version__}, Python {python}, {named}")
        if versions["torch"] is None or versions["transformers"] is None:
            text = (
                "no torch: answers as usual, but profile, train, confirm, acceptance and demo"
                " need it"
            )
            yield Finding("note", text, 'pip install "archsearch[torch]"')


def _requirements() -> list[str]:
    """What archsearch's own metadata asks for; nothing where it was never installed."""
    try:
        return metadata.requires("archsearch") or []
    except metadata.PackageNotFoundError:
        return []


def _unmet(requirements: list[str]) -> Iterator[tuple[Requirement, str | None]]:
    """(requirement, version that is there or None) of each that is not met; extras aside."""
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        there = installed(requirement.name)
        if there is None or not requirement.specifier.contains(there, prereleases=True):
            yield requirement, there


def _device() -> Iterator[Finding]:
    cpu = identify_cpu()
    half = "; no bfloat16 of its own, which makes float32 the faster dtype on most targets"
    threads = "1 thread" if cpu.threads == 1 else f"{cpu.threads} threads"
    memory = f"{cpu.memory_bytes / 2**30:.1f} GiB{'' if cpu.native_bf16 else half}"
    yield Finding("ok", f"{cpu.key}: {cpu.name}, {threads}, {memory}")
    gpus = visible_gpus()
    if not gpus:
        why = gpu_problem()
        yield Finding("note", f"no GPU: {why}; searches for one (--gpu h100) need none here")
    for gpu in gpus:
        known, memory = _known(gpu), f"{gpu.memory_bytes / 2**30:.0f} GiB"
        text = f"GPU {gpu.index}: {gpu.name}, {memory}, driver {gpu.driver}"
        if known is None:
            text += f"; it is not in the device table: {how_to_add(gpu)}"
            yield Finding("mend", text, "archsearch list devices")
            continue
        yield Finding("ok", f"{text} (--gpu {known.key})")
        build = installed("torch") or ""
        if "+cpu" in build:
            text = f"torch {build} is the build without CUDA: nothing can be trained or timed on"
            pinned = f"torch=={build.partition('+')[0]}"
            command = f"{sys.executable} -m pip install --force-reinstall {pinned}"
            yield Finding("mend", f"{text} the GPU", command)


def _known(gpu: VisibleGpu) -> Device | None:
    return next((device for device in devices().values() if matches(device, gpu)), None)


def _profiles() -> Iterator[Finding]:
    there = [identify_cpu(), *filter(None, map(_known, visible_gpus()))]
    yield from map(_profile_of, {device.key: device for device in there}.values())


def _profile_of(device: Device) -> Finding:
    """Whether a device was profiled, by whom, with which software, and checked."""
    command = f"archsearch profile --gpu {'cpu' if device.is_cpu else device.key}"
    found = profiles_of(device.key)
    if not found:
        text = f"{device.key} has no profile; latencies would be guessed or refused"
        return Finding("mend", text, command)
    stack = cpu_stack() if device.is_cpu else None
    same = [folder for folder in found if stack is not None and folder.name == stack_key(stack)]
    folder = (same or found)[0]
    where, header = f"{device.key}: {folder}", header_of(folder)
    if "package" in (header.get("provenance") or {}):
        text = f"{where} holds imported kernel tables, nothing measured here"
        return Finding("mend", text, command)
    if stack is not None and not same:
        return Finding("mend", f"{where} was made with other software ({folder.name})", command)
    if not header.get("known_error"):
        return Finding("note", f"{where}, never checked", f"{command} --check 20")
    return Finding("ok", f"{where}, checked")


def _engines() -> Iterator[Finding]:
    rows = {row.engine: row for row in overview()}
    priced = known_engines()
    for name in dict.fromkeys((*rows, *priced)):
        row, title = rows.get(name), engine_title(name)
        if row is None:
            yield Finding("note", f"{title}: priced and exported for, not run by archsearch")
        elif row.installed:
            note = f"; {row.note}" if row.note else ""
            named = f"{title} {row.version or ''}".rstrip()
            yield Finding("ok", f"{named}: {row.where}{note}")
        else:
            stopped = "an install was stopped" if "stopped" in row.note else "not installed"
            yield Finding("note", f"{title}: {stopped}", f"archsearch engine install {name}")
        if name in priced:
            yield _draft_class(name, row.version if row and row.installed else None)


def _draft_class(name: str, installed: str | None) -> Finding:
    """How the engine's version launches an independent draft on a GPU; a switch that brings graphs
    back is named."""
    here = version_in(installed) if installed else None
    rounds = engine_rounds(name, here or newest_version(name))
    assert rounds is not None  # the engine is one of known_engines()
    which = "" if here is not None else " (the newest known)"
    text = (
        f"{engine_facts(name).title} {rounds.version}{which} on a GPU runs a draft model:"
        f" {rounds.costs.title}"
    )
    if not rounds.without_graphs:
        return Finding("note" if rounds.costs.graph == "none" else "ok", text)
    other, switches = rounds.remedy if rounds.remedy is not None else (rounds.version, {})
    set_here = other == rounds.version
    command = " ".join(f"export {k}={v}" for k, v in switches.items()) if set_here else ""
    remedy = f"; {rounds.remedy_words()}" if rounds.remedy_words() and not command else ""
    level: Level = "mend" if visible_gpus() else "note"  # without a GPU it concerns other machines
    return Finding(level, f"{text}; {rounds.without_graphs}{remedy}", command)


def _disk(folder: Path) -> Iterator[Finding]:
    for name, path, command in (
        ("runs", folder, "cd to a folder on a larger disk"),
        ("cache", cache_dir(), "export ARCHSEARCH_CACHE=/a/larger/disk"),
    ):
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        free = shutil.disk_usage(there).free
        held = 0
        for each in cache_dir().rglob("*") if name == "cache" else ():
            with suppress(OSError):  # another process may have removed it
                held += each.lstat().st_size
        more = f"; {held / 1e9:.1f} GB in it, all of which can be made again" if held else ""
        if not there.is_dir() or not os.access(there, os.W_OK):
            level: Level = "stop" if name == "runs" else "mend"
            other = command.replace("larger", "writable")
            yield Finding(level, f"{name}: {path} cannot be written", other)
        elif free < LEAST_DISK_BYTES:
            text = f"{name}: {free / 1e9:.1f} GB free at {path}, 5 GB are wanted{more}"
            yield Finding("mend", text, command)
        else:
            yield Finding("ok", f"{name}: {free / 1e9:.0f} GB free at {path}{more}")


def _memory(meminfo: Path = Path("/proc/meminfo")) -> Iterator[Finding]:
    total = identify_cpu().memory_bytes
    text = meminfo.read_text() if meminfo.is_file() else ""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    if match is None:
        yield Finding("note", f"{total / 2**30:.1f} GiB; how much is free is not known here")
        return
    free = int(match[1]) * 1024
    words = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if free < LEAST_MEMORY_BYTES:
        yield Finding("mend", f"{words}; the demo trains with 4", "ps aux --sort=-rss | head")
    else:
        yield Finding("ok", words)


def _load() -> Iterator[Finding]:
    share, command = _busy_share(), "ps aux --sort=-pcpu | head"
    if share is None:
        yield Finding("note", "how busy the CPU is is not known here", command)
    elif share > BUSY_SHARE:
        text = f"others use {share:.0%} of the CPU: what is timed now is a busy machine's"
        yield Finding("mend", text, command)
    else:
        yield Finding("ok", f"others use {share:.0%} of the CPU")
    for gpu in visible_gpus():
        state = gpu_state(gpu)
        if state.busy:
            yield Finding("mend", f"GPU {gpu.index} {state.busy_words()}", "nvidia-smi")
        for reason in state.throttle_reasons:
            text = f"GPU {gpu.index} is slowed down: {reason}"
            yield Finding("note", text, "nvidia-smi -q -d PERFORMANCE")


def _busy_share(stat: Path = Path("/proc/stat"), seconds: float = 0.5) -> float | None:
    """Of all threads' time; None where the system does not tell."""

    def ticks() -> tuple[int, int] | None:
        words = stat.read_text().split("\n", 1)[0].split() if stat.is_file() else []
        if len(words) < 5:
            return None
        times = [int(word) for word in words[1:9]]  # user nice system idle iowait irq softirq steal
        return sum(times), times[3] + times[4]

    first = ticks()
    time.sleep(seconds)
    last = ticks()
    if first is None or last is None or last[0] == first[0]:
        return None
    return 1.0 - (last[1] - first[1]) / (last[0] - first[0])
