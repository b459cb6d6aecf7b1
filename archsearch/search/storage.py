"""Where studies are kept: a journal file, a database, Optuna's gRPC proxy; what goes wrong there in
one line.

The journal file is made to outlive a SIGKILL. Optuna's own lock is a symbolic link, which a killed
process leaves behind. Its owner is then waited for for 30 s; and where the journal was named by a
relative path, the link points nowhere, its age cannot be read, and the wait never ends. The lock
here is the kernel's (flock), which dies with its process.
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from archsearch.errors import ArchsearchError

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

GRPC: Final = "grpc://"
GRPC_PORT: Final = 13000
GRPC_TIMEOUT_S: Final = 20.0
MAKING_TRIES: Final = 10
MAKING_S: Final = 0.5


class FileLock:
    """An exclusive lock on the journal file itself, as Optuna's JournalFileBackend asks for it.
    Without `fcntl` (Windows): its open lock, on an absolute path."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._handle: IO[bytes] | None = None
        self._other: Any = None
        try:
            import fcntl  # noqa: F401
        except ImportError:
            from optuna.storages.journal import JournalFileOpenLock

            self._other = JournalFileOpenLock(self.path)

    def acquire(self) -> bool:
        if self._other is not None:
            return bool(self._other.acquire())
        import fcntl

        handle = open(self.path, "ab")  # noqa: SIM115 - closed by release
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except BaseException:
            handle.close()
            raise
        self._handle = handle
        return True

    def release(self) -> None:
        if self._other is not None:
            self._other.release()
        elif self._handle is not None:
            self._handle.close()  # which unlocks
            self._handle = None


def without_password(storage: str | None) -> str | None:
    """A storage's URL as it may be written down: `mysql://me:secret@host/db?password=secret`
    without the secrets. Of a query only names are kept: drivers call a password `password`,
    `passwd`, `sslkey`, ..."""
    if storage is None or "://" not in storage:
        return storage
    masked = re.sub(r"(://[^:/@]*):.*@", r"\1:***@", storage)
    place, mark, query = masked.partition("?")
    return place + mark + re.sub(r"(^|[&;])([^=&;]*)=[^&;]*", r"\1\2=***", query)


@contextmanager
def storage_errors(storage: str | Path) -> Iterator[None]:
    """What a storage raises as one line: it cannot be reached, its driver is missing, it has
    another schema.

    Raises ArchsearchError with that line.
    """
    name = without_password(str(storage))
    try:
        yield
    except ArchsearchError:
        raise
    except OSError as error:
        raise ArchsearchError(
            f"cannot open storage {name}: {error.strerror or error}; choose another --storage"
        ) from error
    except ImportError as error:
        missing = {"grpc": "grpcio"}.get(error.name or "", error.name or str(error))
        raise ArchsearchError(
            f"storage {name} needs the Python package {missing}; install it (pip install {missing})"
        ) from error
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise ArchsearchError(f"storage {name} {reason}") from error


def _reason(error: Exception) -> str | None:
    """What is wrong with a storage; None for an error that is none of a storage's."""
    kinds = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    said = " ".join(str(getattr(error, "orig", None) or error).split())
    said = re.sub(r"\S+://\S+", lambda found: without_password(found[0]) or "", said)[:200]
    if "no longer compatible" in said or "alembic" in said or "schema" in said.lower():
        return (
            "has the schema of another version of Optuna; make a new one, or: optuna storage"
            " upgrade --storage URL"
        )
    if "grpc" in kinds:
        return (
            "does not answer: is `optuna.storages.run_grpc_proxy_server` running there, and its"
            " port open?"
        )
    if (
        "no such table" in said
        or ("does not exist" in said and "relation" in said)
        or "no such column" in said
    ):
        return f"is a database of something else ({said}); name an empty one"
    if "sqlalchemy" in kinds or "optuna" in kinds:
        return f"cannot be used ({said}); is it running, and are name and password right?"
    return None


def open_storage(where: str | Path) -> BaseStorage:
    """An Optuna storage: of a URL (`sqlite:///x.db`, `postgresql+psycopg2://...`),
    `grpc://host:port` of Optuna's proxy, anything else the path of a journal file. Raises
    ArchsearchError where it cannot be used, in one line."""
    import optuna

    optuna.logging.set_verbosity(
        optuna.logging.WARNING
    )  # what it does with its studies is not this command's output
    text = str(where)
    if text.startswith(GRPC):
        return _grpc(text)
    if "://" in text:
        with storage_errors(text):
            return _database(text)
    from optuna.storages import JournalStorage

    try:
        Path(text).parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(text)
        drop_torn_line(text, lock)
        return JournalStorage(journal_backend(text, lock))
    except OSError as error:
        raise ArchsearchError(
            f"cannot write {text}: {error.strerror or error}; choose a folder you can write to"
        ) from error


def _database(url: str) -> BaseStorage:
    """A database's storage. Of several processes that open an empty one together, all but the first
    find its tables half made."""
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

    for attempt in range(MAKING_TRIES):
        try:
            return RDBStorage(url)
        except (IntegrityError, OperationalError, ProgrammingError) as error:
            if "already exists" not in str(error) or attempt + 1 == MAKING_TRIES:
                raise
            time.sleep(MAKING_S)
    raise AssertionError("not reached")


def _grpc(text: str) -> BaseStorage:
    host, _, port = text.removeprefix(GRPC).strip("/").partition(":")
    if not host or (port and not port.isdigit()):
        raise ArchsearchError(
            f"storage {text} is no address of a proxy; write grpc://host:{GRPC_PORT}"
        )
    with storage_errors(text):
        from optuna.storages import GrpcStorageProxy

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna calls it experimental
            proxy = GrpcStorageProxy(host=host, port=int(port or GRPC_PORT))
        wait = getattr(proxy, "wait_server_ready", None)
        if wait is not None:
            wait(timeout=GRPC_TIMEOUT_S)
    return proxy


def journal_backend(path: str, lock: FileLock) -> Any:
    """Optuna's journal file, without its fsync at every record: what a process wrote outlives its
    being killed, and a search of 2,000 shapes spent most of its time in them. A crash of the whole
    machine may cost the last records, which a continued search scores again."""
    import json

    from optuna.storages.journal import JournalFileBackend

    class Journal(JournalFileBackend):
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
            lock.acquire()
            try:
                size = os.path.getsize(path)
                try:
                    with open(path, "ab") as journal:
                        journal.write(lines.encode())
                except OSError:  # a full disk: no half record may stay for others to stumble over
                    os.truncate(path, size)
                    raise
            finally:
                lock.release()

    return Journal(path, lock)  # type: ignore[arg-type]  # acquire and release are all it asks of a lock


def drop_torn_line(path: str, lock: FileLock) -> None:
    """Cut a last line without its end off the journal: what a killed process or a full disk left of
    a record."""
    if not os.path.exists(path):
        return
    lock.acquire()
    try:
        with open(path, "rb+") as journal:
            size = journal.seek(0, os.SEEK_END)
            end = size
            while end > 0:
                start = max(0, end - 65536)
                journal.seek(start)
                found = journal.read(end - start).rfind(b"\n")
                if found >= 0:
                    end = start + found + 1
                    break
                end = start
            if end < size:
                journal.truncate(end)
    finally:
        lock.release()
