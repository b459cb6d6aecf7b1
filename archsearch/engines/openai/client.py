"""One streamed completion of an OpenAI-compatible server, timed where it arrives. Standard library only."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from archsearch.errors import ArchsearchError


class NoAnswer(Exception):
    """The server cannot be reached, or was lost before it had answered."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. Seconds since the run's start; `tokens` as the server counts them, else pieces of text that arrived;
    `prompt_tokens` 0 where it does not say. `error`: why it failed, "" where it did not."""

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


class OpenAIServer:
    """A server at `url` (with or without /v1)."""

    def __init__(self, url: str, timeout_s: float = 600.0) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:  # a port that is no number, or too large
            known = False
        if not known:
            raise ArchsearchError(f"{url!r} is no address of a server; write http://127.0.0.1:8000")
        self.url, self.timeout_s, self._parts = url.rstrip("/"), timeout_s, parts
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._hung_up = False

    def model(self) -> str:
        """The name of the first model that it serves. Raises NoAnswer, or ArchsearchError where it names none."""
        try:
            connection, line = self._connect()
            connection.request("GET", f"{self._root}/v1/models")
            response = connection.getresponse()
            body = response.read()
            self._close(connection, line)
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(_why(error)) from error
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, KeyError, TypeError, IndexError):
            raise ArchsearchError(f"the server at {self.url} names no model on /v1/models ({response.status})") from None

    def complete(self, model: str, prompt: str, tokens: int, temperature: float, began: float) -> Answer:
        """Stream `tokens` tokens after `prompt`; times count from `began` (time.monotonic). Raises NoAnswer where it is lost;
        what the server refuses is an Answer with its error."""
        data = {
            "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": temperature, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        sent = time.monotonic() - began
        connection, line = None, None
        try:
            connection, line = self._connect()
            connection.request("POST", f"{self._root}/v1/completions", json.dumps(data), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                words = response.read(400).decode("utf-8", "replace")
                now = time.monotonic() - began
                return Answer(sent, now, now, 0, 0, 0, f"status {response.status}: {' '.join(words.split())}")
            return self._read(response, sent, began)
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(_why(error)) from error
        finally:
            self._close(connection, line)

    def hang_up(self) -> None:
        """End every request that is under way, from another thread: it raises NoAnswer. No new one is sent."""
        with self._lock:
            self._hung_up = True
            for line in self._open:
                with contextlib.suppress(OSError):  # the server was quicker
                    line.shutdown(socket.SHUT_RDWR)

    def _close(self, connection: http.client.HTTPConnection | None, line: socket.socket | None) -> None:
        if connection is not None and line is not None:
            with self._lock:
                self._open.discard(line)
            connection.close()

    def _read(self, response: http.client.HTTPResponse, sent: float, began: float) -> Answer:
        first = done = 0.0
        usage: dict[str, Any] = {}
        pieces, finished, refused = 0, False, None
        for event in _events(response):
            if event == "[DONE]":
                finished = True
                break
            try:
                chunk = json.loads(event)
            except ValueError:
                continue
            if not isinstance(chunk, dict):
                continue
            refused = chunk.get("error") or refused
            usage = chunk.get("usage") or usage
            if any(choice.get("text") or choice.get("token_ids") for choice in chunk.get("choices") or []):
                done = time.monotonic() - began
                first = first or done
                pieces += 1
        if not finished:
            raise NoAnswer("the stream ended before the answer did")
        if not pieces:
            now = time.monotonic() - began
            why = "an answer without any text" if refused is None else " ".join(str(refused).split())[:400]
            return Answer(sent, now, now, 0, int(usage.get("prompt_tokens") or 0), 0, why)
        tokens = int(usage.get("completion_tokens") or pieces)
        return Answer(sent, first, done, tokens, int(usage.get("prompt_tokens") or 0), pieces)

    def _connect(self) -> tuple[http.client.HTTPConnection, socket.socket]:
        """A connection and its socket, which it lets go of as soon as an answer without a length begins."""
        kind: Any = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        found: http.client.HTTPConnection = kind(self._parts.hostname, self._parts.port, timeout=self.timeout_s)
        found.connect()
        line: socket.socket = found.sock
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            if self._hung_up:
                found.close()
                raise ConnectionAbortedError("hung up")
            self._open.add(line)
        return found, line


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of server-sent events."""
    for line in response:
        text = line.decode("utf-8", "replace").strip()
        if text.startswith("data:"):
            yield text[5:].strip()


def _why(error: BaseException) -> str:
    return str(error) or type(error).__name__
