"""Where engines live that bring their own torch: one virtual environment each, made by `archsearch
engine install`.

An environment is ready when its marker file is there. The marker is written last, after the engine
was imported once in its own interpreter, so a killed install is never taken for a finished one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.version import Version

from archsearch import profiles
from archsearch.engine_facts import engines_that, has_recipe
from archsearch.engine_rounds import version_in
from archsearch.engines.environments.processes import (
    Facts,
    Log,
    import_facts,
    lock_of,
    pip_install,
    remove_broken,
    run_logged,
)
from archsearch.engines.environments.recipes import (
    GB,
    DeviceKind,
    Recipe,
    device_here,
    environment_dir,
    recipe,
)
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.files import read_json, writing
from archsearch.progress import Progress, silent
from archsearch.records import Inline, from_data, save

MARKER: Final = "archsearch-environment.json"
LOG: Final = "install.log"


@dataclass(frozen=True, slots=True)
class Installed:
    """A finished environment. `seconds`: the whole install with its check; `bytes`: its size on
    disk."""

    engine: str
    python: Path
    version: str
    device: str
    packages: tuple[str, ...]
    seconds: float
    bytes: int


def variable(engine: str) -> str:
    """The environment variable that names an interpreter for `engine`: ARCHSEARCH_VLLM_PYTHON."""
    return f"ARCHSEARCH_{engine.upper().replace('.', '_')}_PYTHON"


def installed(engine: str) -> Installed | None:
    """The environment that `install` finished for `engine`; None where there is none or only a
    killed one."""
    folder = environment_dir(engine)
    marker = folder / MARKER
    python = folder / "bin" / "python"
    if not marker.is_file() or not python.exists():
        return None
    data = read_json(marker, "the engine environment's marker")
    return from_data(Installed, data | {"engine": engine, "python": str(python)})


def find_python(engine: str, python: Path | None = None) -> Path:
    """The interpreter that has `engine`: `python` (--engine-python), else
    $ARCHSEARCH_<ENGINE>_PYTHON, then the environment that `install` made.

    Raises ArchsearchError for one that is no executable file, MissingDataError when there is none.
    """
    if python is not None:
        return check_interpreter(python, "--engine-python names")
    known = recipe(engine)
    named = os.environ.get(variable(engine))
    if named:
        return check_interpreter(Path(named), f"{variable(engine)} names")
    found = installed(engine)
    if found is None:
        size = known.bytes[device_here()] / GB
        raise MissingDataError(
            f"{known.title} is not installed; run: archsearch engine install {engine} (about"
            f" {size:g} GB), or name an interpreter that has it with --engine-python"
        )
    return found.python


def check_interpreter(python: Path, who: str) -> Path:
    """`python`, absolute (links kept: a link is how a virtual environment is recognised);
    ArchsearchError when it cannot be run.

    `who`: what named it, as the beginning of the message ("--engine-python names").
    """
    path = Path(os.path.abspath(python.expanduser()))
    if path.is_dir():
        raise ArchsearchError(
            f"{who} {path}, a folder; name the interpreter in it, as in {path / 'bin' / 'python'}"
        )
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ArchsearchError(
            f"{who} {path}, which is no file that can be run; name a Python interpreter"
        )
    return path


def install(
    engine: str,
    *,
    python: Path | None = None,
    device: DeviceKind | None = None,
    progress: Progress = silent,
) -> Installed:
    """Make the environment of `engine` with the interpreter `python` (None: this one), pip-install
    the pinned packages for `device` (None: what NVML sees), import the engine in it, and mark it as
    finished.

    A finished environment of the same packages is returned as it is; anything else under its name
    is removed first. Raises ArchsearchError for what the user can mend (Python version, disk,
    another install that runs), RunFailed when pip or the first import fails: the message has the
    last useful line and where the log is.
    """
    known = recipe(engine)
    kind: DeviceKind = device or device_here()
    packages = known.packages[kind]
    maker = check_interpreter(python or Path(sys.executable), "--python names")
    folder = environment_dir(engine)
    with writing(folder.parent, "set ARCHSEARCH_CACHE to a folder you can write"):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_of(engine) as lock:
        ready = installed(engine)
        if ready is not None and ready.packages == packages:
            return ready
        _check_python_version(maker, known)
        _check_disk(folder, known, kind)
        started = time.monotonic()
        _remove_folder(folder)
        progress("making the environment", 0.0, 100.0)
        # Outside the environment: it outlives a failed one.
        log_path = folder.parent / f"{engine}-{LOG}"
        with open(log_path, "w", encoding="utf-8") as file:
            log = Log(file, log_path, lock)
            run_logged(
                [str(maker), "-m", "venv", str(folder)],
                log,
                f"making the environment of {known.title}",
            )
            inside = folder / "bin" / "python"
            pip_install(inside, packages, kind, known, progress, log)
            remove_broken(inside, known, log)
        progress(f"importing {known.module}", 97.0, 100.0)
        facts = import_facts(engine, inside, f"; the log is {log_path}")
        done = Installed(
            engine,
            inside,
            facts.version,
            kind,
            packages,
            time.monotonic() - started,
            _folder_bytes(folder),
        )
        os.replace(log_path, folder / LOG)
        save(folder / MARKER, done)
    return done


@dataclass(frozen=True)
class Checked:
    """`tested`: the version archsearch is tested with; `warning`: where it is another one."""

    engine: str
    python: Path
    facts: Inline[Facts]
    tested: str
    warning: str | None


def check(engine: str, python: Path | None = None) -> Checked:
    """Import `engine` in its interpreter (None: the one `find_python` finds) and say what is there.
    Raises ArchsearchError when the version is too old, RunFailed when the import fails."""
    known = recipe(engine)
    inside = find_python(engine, python)
    facts = import_facts(engine, inside, "")
    found = facts.version
    number = Version(version_in(found) or "0")
    if number < Version(known.oldest):
        raise ArchsearchError(
            f"{known.title} {found} in {inside} is too old, archsearch is written for"
            f" {known.oldest} or newer; run: archsearch engine install {engine}"
        )
    warning = None
    if number != Version(known.tested):
        warning = (
            f"{known.title} {found} is not the tested version {known.tested}; numbers may differ"
        )
    return Checked(engine, inside, facts, known.tested, warning)


def remove(engine: str) -> int:
    """Delete the environment that `install` made, finished or not; returns the bytes freed.

    Raises MissingDataError where there is none.
    """
    folder = environment_dir(engine)
    if not folder.exists():
        raise MissingDataError(
            f"{recipe(engine).title} has no environment at {folder}; nothing to remove"
        )
    with lock_of(engine):
        size = _folder_bytes(folder)
        _remove_folder(folder)
    (folder.parent / f"{engine}-{LOG}").unlink(missing_ok=True)
    return size


@dataclass(frozen=True)
class Place:
    """An engine and whether it is there; `where`: its interpreter; `bytes` on disk."""

    engine: str
    installed: bool
    version: str | None = None
    where: str | None = None
    bytes: int | None = None
    device: str | None = None
    note: str = ""


def overview() -> list[Place]:
    """Every engine, without running anything. transformers is part of archsearch's own
    environment."""
    own, here = "in archsearch's own environment", sys.executable
    rows = [
        Place(engine, True, profiles.installed(engine), here, note=own)
        for engine in engines_that(lambda row: row.in_process)
    ]
    for engine in engines_that(has_recipe):
        known, named, ready = recipe(engine), os.environ.get(variable(engine)), installed(engine)
        note = f"run: archsearch engine install {engine}"
        if named:
            words = f"named by {variable(engine)}; not checked"
            found = Place(engine, Path(named).exists(), where=named, note=words)
        elif ready is not None:
            where, about = str(ready.python), (ready.bytes, ready.device)
            note = "" if ready.version == known.tested else f"tested: {known.tested}"
            found = Place(engine, True, ready.version, where, *about, note)
        else:
            stopped = "an install was stopped; " if environment_dir(engine).exists() else ""
            found = Place(engine, False, note=stopped + note)
        rows.append(found)
    return rows


def _check_python_version(maker: Path, known: Recipe) -> None:
    low, high = known.pythons
    try:
        answer = subprocess.run(
            [str(maker), "-c", "import sys; print(*sys.version_info[:2])"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        major, minor = (int(word) for word in answer.stdout.split())
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ArchsearchError(
            f"{maker} does not run as a Python interpreter; name another with --python"
        ) from error
    if major != 3 or not low <= minor <= high:
        raise ArchsearchError(
            f"{known.title} {known.tested} needs Python 3.{low} to 3.{high}, {maker} is"
            f" {major}.{minor}; name another with --python"
        )


def _check_disk(folder: Path, known: Recipe, kind: DeviceKind) -> None:
    """Room for the environment and for what pip downloads and keeps meanwhile (about a third
    more)."""
    needed = known.bytes[kind] * 4 // 3
    free = shutil.disk_usage(folder.parent).free
    if folder.exists():
        free += _folder_bytes(folder)
    if free < needed:
        raise ArchsearchError(
            f"{known.title} needs about {needed / GB:.1f} GB at {folder.parent}, {free / GB:.1f} GB"
            " are free; free space or set ARCHSEARCH_CACHE to a folder on a larger disk"
        )


def _folder_bytes(folder: Path) -> int:
    """Bytes on disk of everything below `folder`; hard links and files that vanish meanwhile count
    once or not."""
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
