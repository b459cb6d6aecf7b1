"""Other interpreters, run so that nothing of this one leads them astray and none stays behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from archsearch.errors import RunFailed


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
    lock: int | None


def run_logged(
    command: list[str], log: Log, what: str, on_line: Callable[[str], None] | None = None
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
                if on_line is not None:
                    on_line(line.strip())
        status = process.wait()
    if status:
        raise RunFailed(f"{what} failed: {_useful(last)} (the whole log: {log.path})")


def _useful(lines: deque[str]) -> str:
    """The line that says why: the last error, else the last line that is neither a hint nor a
    warning."""
    errors = [line for line in lines if re.match(r"(ERROR|error|Error|OSError|.*Error):", line)]
    plain = [
        line for line in lines if not line.startswith(("[notice]", "WARNING", "hint:", "note:"))
    ]
    return (errors or plain or ["no output"])[-1].removeprefix("ERROR: ")[:300]
