"""HTTP to one server that speaks OpenAI's completions: short questions, and streams with the time
at which each event arrived. Bounded in time and bytes, whatever the server sends. Standard library
only."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

from archsearch.errors import ArchsearchError

API_KEY: Final = "VLLM_API_KEY"  # vLLM's own name for it
QUESTION_S: Final = 30.0  # for the short questions: version, models, metrics
MOST_BYTES: Final = 64 * 2**20  # of one answer: thousands of times what tokens take
MOST_LINE_BYTES: Final = 4 * 2**20


class Lost(Exception):
    """The connection failed; the message says how."""


class Refused(Exception):
    """The server answered with `status`, which is not 200, and `body`."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"status {status}: {' '.join(body.split())[:400]}")
        self.status, self.body = status, body


class Connection:
    """HTTP to the server at `url` (with or without /v1); a key is taken from VLLM_API_KEY.
    `timeout_s`: seconds for one streamed answer, from its first byte sent to its last received.

    Raises ArchsearchError for an address that is none, or that holds a name or a password.
    """

    def __init__(self, url: str, timeout_s: float = 600.0) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port, known = parts.port, parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:  # a port that is no number, or too large
            known = False
        if known and ("@" in parts.netloc or parts.query or parts.fragment):
            raise ArchsearchError(
                "a server address is scheme, host and port only, as in http://127.0.0.1:8000; a"
                f" key goes into {API_KEY}"
            )
        if not known or port == 0:
            shown = "the address" if "@" in url else repr(url)
            raise ArchsearchError(
                f"{shown} is no server address; write it as http://127.0.0.1:8000"
            )
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        key = os.environ.get(API_KEY)
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._open: set[socket.socket] = set()
        self._guard = threading.Lock()
        self.hung_up = False

    def hang_up(self) -> None:
        """End every request in flight: their threads get Lost at once, and the server stops
        writing."""
        with self._guard:
            self.hung_up = True
            for line in self._open:
                _shut(line)

    def listen_again(self) -> None:
        """Undo `hang_up`."""
        with self._guard:
            self.hung_up = False

    def ask(
        self,
        method: str,
        path: str,
        data: dict[str, Any] | None = None,
        timeout_s: float = QUESTION_S,
    ) -> tuple[int, str]:
        """(status, body) of one short request. Raises Lost where no answer of at most MOST_BYTES
        comes within `timeout_s` seconds."""
        with self._response(method, path, data, timeout_s) as response:
            body = response.read(MOST_BYTES)
            if len(body) == MOST_BYTES:
                raise Lost(f"an answer of more than {MOST_BYTES >> 20} MiB")
            return response.status, body.decode("utf-8", "replace")

    def events(self, data: dict[str, Any]) -> Iterator[tuple[float, bytes]]:
        """(time.perf_counter() of arrival, content) of every event of a streamed completion, the
        last one b"[DONE]". Raises Refused, and Lost where the stream ends before, is too long or
        too slow."""
        with self._response("POST", "/v1/completions", data, self.timeout_s) as response:
            if response.status != 200:
                raise Refused(response.status, response.read(4096).decode("utf-8", "replace"))
            pending, received = b"", 0
            while True:
                # read1: what has arrived, with the time it arrived. Lines of one read came
                # together.
                found = response.read1(65536)
                now = time.perf_counter()
                if not found:
                    raise Lost("the server closed the connection in the middle of an answer")
                received += len(found)
                *lines, pending = (pending + found).split(b"\n")
                if received > MOST_BYTES or len(pending) > MOST_LINE_BYTES:
                    raise Lost(f"an answer without end ({received >> 20} MiB so far)")
                for line in lines:
                    content = line[5:].strip() if line.startswith(b"data:") else b""
                    if content:
                        yield now, content
                    if content == b"[DONE]":
                        return

    @contextmanager
    def _response(
        self, method: str, path: str, data: dict[str, Any] | None, timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host or "", self._port, timeout=min(timeout_s, QUESTION_S))
        line, late = None, threading.Event()
        try:
            connection.connect()
            line = connection.sock
            line.settimeout(timeout_s)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._guard:
                if self.hung_up:
                    raise Lost("stopped")
                self._open.add(line)
            # A socket's own limit is one read: a server that sends a byte now and then never meets
            # it.
            with _ended_after(timeout_s, line, late):
                body = None if data is None else json.dumps(data)
                connection.request(method, self._prefix + path, body, self._headers)
                yield connection.getresponse()
        except Lost as error:
            if late.is_set():
                raise Lost(_slow(timeout_s)) from error
            raise
        except (OSError, ValueError, http.client.HTTPException) as error:
            slow = late.is_set() or isinstance(error, TimeoutError)
            raise Lost(_slow(timeout_s) if slow else _reason(error)) from error
        finally:
            with self._guard:
                self._open.discard(line)  # type: ignore[arg-type]
            connection.close()
            if line is not None:
                line.close()


@contextmanager
def _ended_after(timeout_s: float, line: socket.socket, late: threading.Event) -> Iterator[None]:
    def end() -> None:
        late.set()
        _shut(line)

    timer = threading.Timer(min(timeout_s, threading.TIMEOUT_MAX), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shut(line: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was closed meanwhile
        line.shutdown(socket.SHUT_RDWR)


def _slow(timeout_s: float) -> str:
    return f"no whole answer within {timeout_s:g} s"


def _reason(error: Exception) -> str:
    ended = (
        http.client.IncompleteRead,
        http.client.RemoteDisconnected,
        ConnectionResetError,
        BrokenPipeError,
    )
    if isinstance(error, ended):
        return "the server closed the connection in the middle of an answer"
    words = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return " ".join(words.split())[:200] or type(error).__name__
