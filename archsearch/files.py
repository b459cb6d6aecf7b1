"""Writing so that a killed process or a full disk never leaves half a file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from archsearch.errors import ArchsearchError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed over it when the block ends well and removed when it does not.

    Raises ArchsearchError where the path cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
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
