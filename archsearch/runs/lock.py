"""One process at a time writes into a run folder; a second one is refused and named the first.

The lock is the kernel's (flock), which dies with its process, so a killed one leaves nothing to
clear. The file says who holds it, and is touched while it is held: on a file system whose locks do
not reach other machines that is how they know.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from archsearch.errors import ArchsearchError
from archsearch.files import locked

LOCK_FILE: Final = ".lock"
TOUCH_S: Final = 15.0
FRESH_S: Final = 60.0


@contextmanager
def run_lock(folder: Path, what: str = "archsearch") -> Iterator[None]:
    """Hold the folder for `what` (the command). Raises ArchsearchError, with its process and
    machine, while another one does; a folder that cannot be written is left to who writes into
    it."""
    try:
        handle = (folder / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError:
        yield
        return
    with handle:
        free, known = locked(handle), _read(folder)
        if not free or _elsewhere(folder, known):
            holder = (
                "another process"
                if known is None
                else f"{known.get('command')} (process {known.get('pid')} on {known.get('host')},"
                f" since {known.get('since')})"
            )
            raise ArchsearchError(
                f"run {folder} is in use by {holder}; wait for it, stop it, or choose another --run"
            )
        stop = threading.Event()
        thread = threading.Thread(target=_touch, args=(folder / LOCK_FILE, stop), daemon=True)
        try:
            own = {"pid": os.getpid(), "host": socket.gethostname(), "command": what}
            _write(handle, own | {"since": time.strftime("%Y-%m-%d %H:%M:%S")})
            thread.start()
            yield
        finally:
            stop.set()
            if thread.ident is not None:
                thread.join()
            _write(handle, None)


def _elsewhere(folder: Path, known: dict[str, object] | None) -> bool:
    """Whether a process of another machine touched the lock a moment ago."""
    if known is None or known.get("host") == socket.gethostname():
        return False
    return abs(time.time() - (folder / LOCK_FILE).stat().st_mtime) < FRESH_S


def _read(folder: Path) -> dict[str, object] | None:
    try:
        data = json.loads((folder / LOCK_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _write(handle: IO[str], data: dict[str, object] | None) -> None:
    """The holder, or nobody. A full disk is no reason not to go on."""
    with suppress(OSError):
        handle.seek(0)
        handle.truncate()
        if data is not None:
            handle.write(json.dumps(data))
        handle.flush()


def _touch(path: Path, stop: threading.Event) -> None:
    with suppress(OSError):
        while not stop.wait(TOUCH_S):
            os.utime(path)
