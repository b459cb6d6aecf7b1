"""Files: written so that a killed process or a full disk never leaves half of one, read so that
nothing from elsewhere ends in more than one line."""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from archsearch.errors import ArchsearchError

MOST_NODES: Final = 20_000  # of a YAML file once its aliases are written out
MOST_BYTES: Final = 1_000_000
BEYOND: Final = "an integer of more than 64 bits"
_LONG_INTEGER: Final = re.compile(r"\d{19}")


def locked(handle: IO[Any], *, wait: bool = False) -> bool:
    """Take the kernel's lock on an open file, which dies with the process; False where another one
    has it and is not to be waited for. True where the system has no such locks (Windows)."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        if wait:
            raise
        return False
    return True


OLD: Final = "old"


@contextmanager
def writing(what: object, advice: str = "free space or choose another folder") -> Iterator[None]:
    """An OSError of the block as an ArchsearchError: `what` cannot be written, and `advice`."""
    try:
        yield
    except OSError as error:
        raise ArchsearchError(
            f"cannot write {what}: {error.strerror or error}; {advice}"
        ) from error


def take_place(new: Path, place: Path, scratch: Path) -> None:
    """Put the folder `new` where `place` is; what was there goes, with `scratch`, only once the
    new one is in its place."""
    old = scratch / OLD
    if place.exists():
        os.replace(place, old)
    try:
        os.replace(new, place)
    except OSError:
        if old.exists():
            os.replace(old, place)
        raise


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed over it when the block ends well and removed when it
    does not; of a killed process the next write to `path` removes it.

    Raises ArchsearchError where the path cannot be written.
    """
    with writing(path, "choose a folder you can write to"):
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_left(path)
        handle, name = tempfile.mkstemp(
            dir=path.parent, prefix=f"{_prefix(path)}{os.getpid()}-", suffix=path.suffix
        )
        os.close(handle)
    temporary = Path(name)
    try:
        with writing(path):
            yield temporary
            os.chmod(temporary, 0o666 & ~umask())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _prefix(path: Path) -> str:
    """How temporary files of this machine's processes begin, up to the process."""
    return f".{path.name}.{re.sub('[^A-Za-z0-9]', '_', socket.gethostname())}-"


def umask() -> int:
    """Which permissions this process withholds from what it writes."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def left_behind(path: Path) -> list[Path]:
    """What processes that no longer live left of writing `path`."""
    found = path.parent.glob(f"{glob.escape(_prefix(path))}*")
    numbers = ((left, left.name.removeprefix(_prefix(path)).partition("-")[0]) for left in found)
    return [left for left, number in numbers if number.isdigit() and not _alive(int(number))]


def _drop_left(path: Path) -> None:
    """Remove what killed processes left of writing `path`: it may be gigabytes."""
    for left in left_behind(path):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


@contextmanager
def scratch_dir(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, gone when the block ends; of a killed process the next one
    for `path` removes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _drop_left(path)
    with tempfile.TemporaryDirectory(
        dir=path.parent, prefix=f"{_prefix(path)}{os.getpid()}-"
    ) as name:
        yield Path(name)


@contextmanager
def plain_os_errors() -> Iterator[None]:
    """A full disk or a folder that cannot be written as an OSError, also where a library has an
    error of its own for it."""
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


def digest(data: object) -> str:
    """SHA-256 of data as JSON, in whatever order its keys are."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


def write_json(path: Path, data: object) -> None:
    """Write indented JSON atomically."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, what: str) -> Any:
    """Parsed JSON; a missing or broken file is one clear line that calls it `what`.

    Raises ArchsearchError for either.
    """
    try:
        if path.exists() and not path.is_file():  # a FIFO would be waited for, for ever
            raise ArchsearchError(f"{what} {path} is no file")
        content = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ArchsearchError(f"{what} not found: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArchsearchError(f"cannot read {what} {path}: {error}") from error
    try:
        return parse_json(content)
    except ValueError as error:
        raise ArchsearchError(f"{what} {path} is not JSON ({error})") from None


def parse_json(text: str | bytes) -> Any:
    """What `text` holds. ValueError, one line, for all that can be wrong with text from elsewhere:
    no JSON, nested too deeply, a number too long, half of a surrogate pair (no file could hold it
    again)."""
    try:
        data = json.loads(text)
        if _LONG_INTEGER.search(text if isinstance(text, str) else text.decode()):
            _nodes(data, {}, set())
        if (b"\\u" if isinstance(text, bytes) else "\\u") in text:  # type: ignore[operator]
            json.dumps(data, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from None
    except UnicodeError:
        raise ValueError("a character that is no Unicode: half of a surrogate pair") from None
    except ValueError:  # Python's limit on digits, against their quadratic cost
        raise ValueError("a number of thousands of digits") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except OverflowError:
        raise ValueError(BEYOND) from None
    return data


def read_yaml(path: Path, what: str) -> object:
    """The content of a YAML file, called `what`: plain values only (no Python tags), and no more of
    them than a person writes, aliases written out. What is wrong is one line with the file and the
    line. Raises ArchsearchError for what it cannot read."""
    import yaml

    try:
        if path.exists() and not path.is_file():
            raise ArchsearchError(f"{what} {path} is no file")
        size = path.stat().st_size
        data = None if size > MOST_BYTES else yaml.safe_load(path.read_text(encoding="utf-8-sig"))
        nodes = _nodes(data, {}, set())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        said = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ArchsearchError(f"{path}:{line} is not YAML: {said}") from None
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or error
        raise ArchsearchError(f"cannot read {what} {path}: {words}") from error
    except OverflowError:
        raise ArchsearchError(f"{path} holds {BEYOND}") from None
    except UnicodeEncodeError:
        raise ArchsearchError(
            f"{path} holds a character that is no Unicode: half of a surrogate pair"
        ) from None
    except (RecursionError, ValueError) as error:  # nested thousands deep; a date that is none
        words = type(error).__name__
        raise ArchsearchError(f"{path} is not YAML that can be read: {words}") from None
    if size > MOST_BYTES:
        raise ArchsearchError(f"{path} has {size:,} bytes; {what} has at most {MOST_BYTES:,}")
    if nodes > MOST_NODES:
        raise ArchsearchError(
            f"{path} has more than {MOST_NODES:,} values once its aliases are written out; "
            "write it without"
        )
    return data


def shipped_yaml(path: Path) -> Any:
    """A file of archsearch's own, by libyaml, which is quick."""
    import yaml

    return yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def csv_rows(path: Path) -> csv.DictReader[str]:
    """The rows of a table in which lines that begin with # are comments."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return csv.DictReader(line for line in lines if not line.startswith("#"))


def _nodes(data: object, counted: dict[int, int], open_: set[int]) -> int:
    """Values in `data`, those of an alias counted wherever it occurs; of one that holds itself more
    than any file may have. OverflowError for an integer beyond 64 bits, UnicodeEncodeError for half
    of a surrogate pair."""
    if not isinstance(data, dict | list):
        if isinstance(data, str):
            data.encode()
        if isinstance(data, int) and abs(data) >= 2**63:
            raise OverflowError
        return 1
    if id(data) in open_:
        return MOST_NODES + 1
    if id(data) not in counted:
        open_.add(id(data))
        parts = data.values() if isinstance(data, dict) else data
        counted[id(data)] = 1 + sum(_nodes(part, counted, open_) for part in parts)
        open_.discard(id(data))
    return counted[id(data)]


def ensure_writable_dir(path: Path) -> None:
    """Create `path` and prove that it can be written before long work starts."""
    with atomic_path(path / ".archsearch-write-test"):
        pass
    (path / ".archsearch-write-test").unlink(missing_ok=True)
