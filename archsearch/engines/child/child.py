"""An engine in a process of its own: another interpreter, because engines pin their own torch;
killed whole, so nothing stays.

One JSON object a line goes in on the child's stdin, one comes back on its original stdout. The
worker's script imports nothing of archsearch. An answer is {"ok": {...}} or {"error": one line,
"kind": "user" | "memory" | "failed" | "bug", "trace": text}.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

from archsearch.errors import ArchsearchError, MissingDataError, RunFailed

_STOP_S: Final = 10.0
_KEPT_LINES: Final = 60
_LOOK_S: Final = 0.25  # how often to look whether the child is still there


class Child:
    """A worker process. `ask` sends one request and waits for its answer; `close` ends the process
    and all it started.

    Raises MissingDataError where the interpreter does not exist. A child that dies, hangs longer
    than `timeout_s` or answers with an error is closed (an error of kind `user` leaves it running)
    and ends in one line: ArchsearchError for what the user can mend, RunFailed for the rest.
    """

    def __init__(
        self,
        python: Path,
        script: Path,
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.name, self.timeout_s = name, timeout_s
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._answers: queue.Queue[str | None] = queue.Queue()
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "ARCHSEARCH_PARENT": str(os.getpid()),
            # Weights in huge pages (where the kernel gives them on request): without, where small
            # pages happen to lie makes the same engine on a CPU up to 20 % slower from one start to
            # the next.
            "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
            **(env or {}),
        }
        # Ours must not shadow the packages of the engine's environment.
        environment.pop("PYTHONPATH", None)
        try:
            self._process = subprocess.Popen(
                [str(python), str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=environment,
                # a process group of its own: workers that the engine starts die with it
                start_new_session=True,
            )
        except OSError as error:
            raise MissingDataError(
                f"cannot run {python}: {error.strerror or error}; name {name}'s interpreter with"
                f" --engine-python, or run: archsearch engine install {name}"
            ) from error
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin = self._process.stdin
        self._readers = []
        for target, stream in (
            (self._read_answers, self._process.stdout),
            (self._read_log, self._process.stderr),
        ):
            self._readers.append(threading.Thread(target=target, args=(stream,), daemon=True))
            self._readers[-1].start()
        atexit.register(self.close)

    def _read_answers(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._answers.put(line)
        self._answers.put(None)

    def _read_log(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                if line.strip():
                    self._lines.append(line.rstrip())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def log(self) -> list[str]:
        """The last lines of the child's stderr."""
        return list(self._lines)

    def ask(self, request: Mapping[str, object], timeout_s: float | None = None) -> dict[str, Any]:
        """Send `request`, return what is under "ok" in the answer.

        Raises ArchsearchError for what the user can mend, RunFailed where the engine fails, ends,
        runs out of memory or does not answer within `timeout_s` seconds (None: the child's own
        limit).
        """
        limit = timeout_s or self.timeout_s
        try:
            self._stdin.write(json.dumps(dict(request)) + "\n")
            self._stdin.flush()
            line = self._wait(limit)
        except (BrokenPipeError, ValueError, OSError):
            line = None
        except queue.Empty:
            self.close(0.0)  # it hangs: nothing is gained by waiting for it
            raise RunFailed(
                f"{self.name} did not answer {request.get('do', '')!r} within {limit:.0f} s and was"
                " stopped; allow more time with --timeout, or ask for less"
            ) from None
        except BaseException:  # Ctrl-C: no process may stay behind
            self.close(0.0)
            raise
        if line is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
            self.close()
            code = self._process.returncode
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            memory = " (out of memory?)" if code == -signal.SIGKILL else ""
            raise RunFailed(
                f"{self.name} {how}{memory} during {request.get('do', '')!r}{self._last_words()}"
            )
        try:
            answer = json.loads(line)
        except json.JSONDecodeError:
            self.close()
            raise RunFailed(
                f"{self.name} answered with something that is no JSON: {line.strip()[:200]!r}"
            ) from None
        if "ok" in answer:
            return dict(answer["ok"])
        kind, error = answer.get("kind", "bug"), str(answer.get("error", "unknown error"))
        if kind == "user":
            raise ArchsearchError(error)
        self.close()
        if kind == "memory":
            raise RunFailed(
                f"{self.name} is out of memory: {error}; lower --concurrency or --max-len, or use a"
                " smaller dtype"
            )
        trace = f"\n{answer['trace'].rstrip()}" if kind == "bug" and answer.get("trace") else ""
        raise RunFailed(f"{self.name} failed: {error}{trace}")

    def _wait(self, limit_s: float) -> str | None:
        """The next line of the child; None when it ended without one, also where a process that it
        started lives on and keeps its stdout open. Raises queue.Empty after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while True:
            ended = not self.running
            left = deadline - time.monotonic()
            try:
                return self._answers.get(timeout=max(0.0, min(_LOOK_S, left)))
            except queue.Empty:
                if ended:  # before the wait: what it wrote last had time to come through
                    return None
                if left <= _LOOK_S:
                    raise

    def _last_words(self) -> str:
        """The last line of its stderr that reads like an error, or just the last."""
        lines = self.log
        telling = [line for line in lines if "Error" in line or "error" in line]
        chosen = (telling or lines)[-1:]
        return f": {chosen[0].strip()[:300]}" if chosen else ""

    def close(self, grace_s: float = _STOP_S) -> None:
        """End the child and its process group: closing stdin first, after `grace_s` SIGTERM, then
        SIGKILL. Safe to call twice."""
        atexit.unregister(self.close)
        with contextlib.suppress(OSError, ValueError):
            self._stdin.close()
        for number, wait_s in (
            (0, grace_s if self.running else 0.0),
            (signal.SIGTERM, _STOP_S),
            (signal.SIGKILL, _STOP_S),
        ):
            if number:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, number)
            try:
                self._process.wait(wait_s)
            except subprocess.TimeoutExpired:
                continue
            if number or not _group_alive(self._process.pid):
                break
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for reader in self._readers:
            reader.join(_STOP_S)


def _group_alive(group: int) -> bool:
    """Whether any process of the group is left."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
