"""The journal file of a study, made to outlive a SIGKILL.

Optuna's own lock is a symbolic link, which a killed process leaves behind. Its owner is then waited for for 30 s; and where the
journal was named by a relative path, the link points nowhere, its age cannot be read, and the wait never ends. The lock here is
the kernel's (flock), which dies with its process.
"""

from __future__ import annotations

import os
from typing import IO, Any


class FileLock:
    """An exclusive lock on the journal file itself, as Optuna's JournalFileBackend asks for it. Without `fcntl` (Windows): its
    open lock, on an absolute path."""

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


def journal_backend(path: str, lock: FileLock) -> Any:
    """Optuna's journal file, without its fsync at every record: what a process wrote outlives its being killed, and a
    search of 2,000 shapes spent most of its time in them. A crash of the whole machine may cost the last records, which a
    continued search scores again."""
    import json

    from optuna.storages.journal import JournalFileBackend

    class Journal(JournalFileBackend):
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
            lock.acquire()
            try:
                with open(path, "ab") as journal:
                    journal.write(lines.encode())
            finally:
                lock.release()

    return Journal(path, lock)  # type: ignore[arg-type]  # acquire and release are all it asks of a lock


def drop_torn_line(path: str, lock: FileLock) -> None:
    """Cut a last line without its end off the journal: what a killed process or a full disk left of a record."""
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
