"""HTTP to one vLLM server: short questions, streamed answers with the time of each chunk, and its errors as one line each."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from archsearch.errors import ArchsearchError, RunFailed

QUESTION_S: Final = 30.0  # for the short questions: version, models, metrics


class Lost(Exception):
    """The connection failed; the message says how."""


@dataclass(slots=True)
class Stream:
    """One streamed answer: tokens and arrival (perf_counter) of each chunk, the text, why it ended."""

    started: float
    chunks: list[tuple[int, ...]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""
    finish: str | None = None


class Server:
    """HTTP to one server. Raises Lost when the connection fails, ArchsearchError for an address that is none."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url if "://" in url else f"//{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ArchsearchError(f"{url!r} is no server address; write it as http://127.0.0.1:8000")
        if parts.username is not None or parts.query or parts.fragment:
            raise ArchsearchError(
                "a server address is scheme, host and port only, as in http://127.0.0.1:8000; a key goes into VLLM_API_KEY"
            )
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        key = os.environ.get("VLLM_API_KEY")
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._open: set[socket.socket] = set()
        self._guard = threading.Lock()
        self._hung_up = False

    def hang_up(self) -> None:
        """End every request in flight: their threads get Lost at once, and the server stops writing for them."""
        with self._guard:
            self._hung_up = True
            sockets = list(self._open)
        for connected in sockets:
            try:
                connected.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it was closed meanwhile

    def listen_again(self) -> None:
        """Undo `hang_up`."""
        with self._guard:
            self._hung_up = False

    def ask(self, method: str, path: str, data: dict[str, Any] | None = None, timeout_s: float = QUESTION_S) -> tuple[int, str]:
        """(status, body) of one short request. Raises Lost where the server does not answer within `timeout_s` seconds."""
        body = None if data is None else json.dumps(data)
        connection = self._connect(timeout_s)
        connected = connection.sock
        try:
            connection.request(method, self._prefix + path, body, self._headers)
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise Lost(_reason(error, timeout_s)) from error
        finally:
            self._close(connection, connected)

    def stream(self, data: dict[str, Any]) -> Stream:
        """A streamed completion. ArchsearchError for a request that the server refuses, RunFailed for an error of its own."""
        connection = self._connect(min(self.timeout_s, QUESTION_S))
        connected = connection.sock
        try:
            assert connected is not None
            connected.settimeout(self.timeout_s)
            answer = Stream(time.perf_counter())
            connection.request("POST", self._prefix + "/v1/completions", json.dumps(data), self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise refusal(self.url, response.status, response.read().decode("utf-8", "replace"))
            self._read(response, answer)
            return answer
        except (OSError, http.client.HTTPException) as error:
            raise Lost(_reason(error, self.timeout_s)) from error
        finally:
            self._close(connection, connected)

    def _read(self, response: http.client.HTTPResponse, answer: Stream) -> None:
        pending = b""
        while True:
            # read1: what has arrived, with the time it arrived. Lines of one read came together.
            data = response.read1(65536)
            now = time.perf_counter()
            if not data:
                raise Lost("the server closed the connection in the middle of an answer")
            if now - answer.started > self.timeout_s:
                raise Lost(f"no whole answer within {self.timeout_s:g} s")
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                content = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if content == b"[DONE]":
                    if answer.finish is None:
                        raise Lost("the answer ended without a reason")
                    return
                if content:
                    try:
                        chunk = json.loads(content)
                    except ValueError as error:
                        raise RunFailed(f"the server at {self.url} sent a chunk that is not JSON: {content[:80]!r}") from error
                    self._take(chunk, now, answer)

    def _take(self, chunk: dict[str, Any], now: float, answer: Stream) -> None:
        if "error" in chunk:
            error = chunk["error"]
            raise RunFailed(
                f"the server at {self.url} failed: {error.get('message', error) if isinstance(error, dict) else error}"
            )
        for choice in chunk.get("choices", ()):
            if "token_ids" not in choice:
                raise ArchsearchError(
                    f"the server at {self.url} sends no token ids (return_token_ids); it is too old or no vLLM server"
                )
            tokens = tuple(choice["token_ids"] or ())
            if tokens:
                answer.chunks.append(tokens)
                answer.times.append(now)
            answer.text += choice.get("text") or ""
            answer.finish = choice.get("finish_reason") or answer.finish

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=timeout_s)
        try:
            connection.connect()
        except OSError as error:
            raise Lost(_reason(error, timeout_s)) from error
        with self._guard:
            if self._hung_up:
                connection.close()
                raise Lost("stopped")
            self._open.add(connection.sock)
        return connection

    def _close(self, connection: http.client.HTTPConnection, connected: socket.socket | None) -> None:
        with self._guard:
            if connected is not None:
                self._open.discard(connected)
        connection.close()
        if connected is not None:
            connected.close()


def _reason(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    if isinstance(error, http.client.IncompleteRead | http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError):
        return "the server closed the connection in the middle of an answer"
    return (error.strerror or str(error) if isinstance(error, OSError) else str(error)) or type(error).__name__


def refusal(url: str, status: int, body: str) -> ArchsearchError:
    """The exception for an HTTP status that is not 200: ArchsearchError for 4xx, RunFailed for 5xx, with the server's message."""
    try:
        data = json.loads(body)
        error = data.get("error", data)
        words = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        words = body
    words = " ".join(words.split())[:300] or http.client.responses.get(status, "no message")
    if status in (401, 403):
        return ArchsearchError(f"the server at {url} wants a key ({status}: {words}); put it into VLLM_API_KEY")
    kind = ArchsearchError if 400 <= status < 500 else RunFailed
    return kind(f"the server at {url} refused the request ({status}): {words}")
