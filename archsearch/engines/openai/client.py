"""Servers that speak OpenAI's completions, whoever wrote them: HTTP in standard library only,
bounded in time and bytes, whatever the server sends."""

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
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from archsearch.errors import ArchsearchError, RunFailed
from archsearch.files import parse_json

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


class OpenAIServer:
    """A server of completions at `url` (with or without /v1); a key is taken from VLLM_API_KEY.
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
        data: dict[str, object] | None = None,
        timeout_s: float = QUESTION_S,
    ) -> tuple[int, str]:
        """(status, body) of one short request. Raises Lost where no answer of at most MOST_BYTES
        comes within `timeout_s` seconds."""
        with self._response(method, path, data, timeout_s) as response:
            body = response.read(MOST_BYTES)
            if len(body) == MOST_BYTES:
                raise Lost(f"an answer of more than {MOST_BYTES >> 20} MiB")
            return response.status, body.decode("utf-8", "replace")

    def events(self, data: dict[str, object]) -> Iterator[tuple[float, bytes]]:
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
                    raise ConnectionResetError
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
        self, method: str, path: str, data: dict[str, object] | None, timeout_s: float
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

    def model(self) -> str:
        """The name of the first model that it serves. Raises Lost, or ArchsearchError where it
        names none."""
        status, body = self.ask("GET", "/v1/models", timeout_s=min(self.timeout_s, 30.0))
        try:
            name = parse_json(body)["data"][0]["id"]
            if not isinstance(name, str):
                raise TypeError
        except (ValueError, KeyError, TypeError, IndexError):
            key = status in (401, 403)
            why = f"wants a key; put it into {API_KEY}" if key else "names no model on /v1/models"
            raise ArchsearchError(f"the server at {self.url} {why} ({status})") from None
        return name

    def stream(self, data: dict[str, object]) -> Stream:
        """A streamed completion. Raises Lost, Refused and Odd."""
        answer = Stream(time.perf_counter())
        for now, content in self.events(data):
            if content != b"[DONE]":
                answer.take(content, now)
        return answer

    def complete(
        self, model: str, prompt: str, tokens: int, temperature: float, began: float
    ) -> Answer:
        """Stream `tokens` tokens after `prompt`; times count from `began` (time.perf_counter).
        Whatever the server sends is an Answer, with its error where it is none. Raises Lost after
        `hang_up`."""
        data = {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": temperature,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        sent = time.perf_counter() - began
        try:
            found = self.stream(data)
            if not found.times:
                raise Odd("an answer without any text")
            given = found.counted("prompt_tokens") or 0
            pieces, written = len(found.times), found.counted("completion_tokens")
            if written is not None and not 1 <= written <= tokens:
                raise Odd(f"the server counts {written} tokens in an answer of at most {tokens}")
            first, done = found.times[0] - began, found.times[-1] - began
            return Answer(sent, first, done, pieces if written is None else written, given, pieces)
        except Lost as error:
            if self.hung_up:
                raise
            why = f"{LOST}{error}"
        except (Refused, Odd) as error:
            why = str(error)
        now = time.perf_counter() - began
        return Answer(sent, now, now, 0, 0, 0, why)

    def tokens(self, data: dict[str, object]) -> Stream:
        """A streamed completion with its token ids, as vLLM sends them. Raises Lost;
        ArchsearchError for a request that the server refuses, RunFailed for an error of its own."""
        try:
            found = self.stream(data)
        except Refused as error:
            raise refusal(self.url, error.status, error.body) from error
        except Odd as error:
            raise RunFailed(f"the server at {self.url}: {error}") from error
        if not found.ids:
            raise ArchsearchError(
                f"the server at {self.url} sends no token ids (return_token_ids); it is too old"
                " or no vLLM server"
            )
        if found.finish is None:
            raise Lost("the answer ended without a reason")
        return found


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


LOST: Final = "lost: "  # how the error of an answer begins whose connection failed


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. Seconds since the run's start; `tokens` as the server counts them, else pieces
    of text that arrived; `prompt_tokens` 0 where it does not say. `error`: why it failed, "" where
    it did not."""

    sent_s: float
    first_s: float
    done_s: float
    tokens: int
    prompt_tokens: int
    pieces: int
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first."""
        return (self.done_s - self.first_s) / max(self.tokens - 1, 1)


class Odd(Exception):
    """What a server sent is no completion; the message says how."""


@dataclass(slots=True)
class Stream:
    """One streamed answer: arrival (perf_counter) of each chunk that brought tokens and their ids
    (() where the server sends none, which `ids` says), the text, why it ended, what the server
    counts."""

    started: float
    times: list[float] = field(default_factory=list)
    chunks: list[tuple[int, ...]] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    ids: bool = True
    usage: dict[str, object] = field(default_factory=dict)

    def take(self, content: bytes, now: float) -> None:
        """A chunk that arrived `now`. Raises Odd."""
        try:
            chunk = parse_json(content)
        except ValueError as error:
            raise Odd(f"a chunk that is not JSON ({error})") from None
        if not isinstance(chunk, dict):
            raise Odd(f"a chunk that is no object: {content[:60]!r}")
        if chunk.get("error"):
            failure = chunk["error"]
            words = failure.get("message", failure) if isinstance(failure, dict) else failure
            raise Odd(f"it failed: {' '.join(str(words).split())[:400]}")
        choices, usage = chunk.get("choices") or [], chunk.get("usage")
        if not isinstance(choices, list) or not all(isinstance(each, dict) for each in choices):
            raise Odd(f"a chunk without a list of choices: {content[:60]!r}")
        if not isinstance(usage, dict | None):
            raise Odd(f"a chunk whose usage is no object: {content[:60]!r}")
        self.usage = usage or self.usage
        for choice in choices:
            tokens, text = choice.get("token_ids") or [], choice.get("text") or ""
            finish = choice.get("finish_reason")
            ids = isinstance(tokens, list) and all(type(token) is int for token in tokens)
            if not ids or not isinstance(text, str) or not isinstance(finish, str | None):
                raise Odd(f"a chunk with fields of another type: {content[:80]!r}")
            has_ids = "token_ids" in choice
            if tokens or (text and not has_ids):
                self.times.append(now)
                self.chunks.append(tuple(tokens))
            self.ids &= has_ids
            self.text += text
            self.finish = finish or self.finish

    def counted(self, name: str) -> int | None:
        """A count of tokens; None where the server does not say. Raises Odd for what counts
        nothing."""
        count = self.usage.get(name)
        if count is not None and not (type(count) is int and 0 <= count < 2**31):
            raise Odd(f"{name} is {str(count)[:40]!r}")
        return count


def refusal(url: str, status: int, body: str) -> ArchsearchError:
    """The exception for an HTTP status that is not 200: ArchsearchError for 4xx, RunFailed for 5xx,
    with the server's message."""
    try:
        data = json.loads(body)
        error = data.get("error", data)
        words = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError, RecursionError):
        words = body
    words = " ".join(words.split())[:300] or http.client.responses.get(status, "no message")
    if status in (401, 403):
        return ArchsearchError(
            f"the server at {url} wants a key ({status}: {words}); put it into {API_KEY}"
        )
    kind = ArchsearchError if 400 <= status < 500 else RunFailed
    return kind(f"the server at {url} refused the request ({status}): {words}")
