"""Writing so that a killed process or a full disk never leaves half a file."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from archsearch.errors import ArchsearchError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed over it when the block ends well and removed when it does not; of a killed process
    the next write to `path` removes it.

    Raises ArchsearchError where the path cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_left(path)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{_prefix(path)}{os.getpid()}-", suffix=path.suffix)
        os.close(handle)
    except OSError as error:
        raise ArchsearchError(f"cannot write {path}: {error.strerror or error}; choose a folder you can write to") from error
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise ArchsearchError(f"cannot write {path}: {error.strerror or error}; free space or choose another folder") from error
    finally:
        temporary.unlink(missing_ok=True)


def _prefix(path: Path) -> str:
    """How temporary files of this machine's processes begin, up to the process."""
    return f".{path.name}.{re.sub('[^A-Za-z0-9]', '_', socket.gethostname())}-"


def _drop_left(path: Path) -> None:
    """Remove what processes that no longer live left of writing `path`: a killed one may leave gigabytes."""
    for left in path.parent.glob(f"{glob.escape(_prefix(path))}*"):
        number = left.name.removeprefix(_prefix(path)).partition("-")[0]
        if number.isdigit() and not _alive(int(number)):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


@contextmanager
def scratch_dir(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, gone when the block ends; of a killed process the next one for `path` removes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _drop_left(path)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{_prefix(path)}{os.getpid()}-") as name:
        yield Path(name)


@contextmanager
def plain_os_errors() -> Iterator[None]:
    """A full disk or a folder that cannot be written as an OSError, also where a library has an error of its own for it."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # safetensors and tokenizers: Rust's words, the number among them
        found = re.search(r"(?:os error|code:) (\d+)", str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number)) from error


def _alive(process: int) -> bool:
    if os.name == "nt":  # asking there would end it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any) -> None:
    """Write indented JSON atomically."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, what: str) -> Any:
    """Parsed JSON; a missing or broken file is one clear line that calls it `what`.

    Raises ArchsearchError for either.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArchsearchError(f"{what} not found: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArchsearchError(f"cannot read {what} {path}: {error}") from error
    except json.JSONDecodeError as error:
        raise ArchsearchError(f"{what} {path} is not JSON (line {error.lineno}: {error.msg})") from None


def ensure_writable_dir(path: Path) -> Path:
    """Create `path` and prove that it can be written before long work starts."""
    with atomic_path(path / ".archsearch-write-test"):
        pass
    (path / ".archsearch-write-test").unlink(missing_ok=True)
    return path
