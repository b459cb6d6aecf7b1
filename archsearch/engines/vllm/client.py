"""Streamed answers of one vLLM server, with the time of each chunk, and its errors as one line
each."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass, field
from typing import Any

from archsearch.engines.openai.connection import API_KEY, Connection, Lost, Refused
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.files import parse_json


@dataclass(slots=True)
class Stream:
    """One streamed answer: tokens and arrival (perf_counter) of each chunk, the text, why it
    ended."""

    started: float
    chunks: list[tuple[int, ...]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""
    finish: str | None = None


class Server(Connection):
    """One vLLM server. Its questions raise Lost when the connection fails."""

    def stream(self, data: dict[str, Any]) -> Stream:
        """A streamed completion. ArchsearchError for a request that the server refuses, RunFailed
        for an error of its own."""
        answer = Stream(time.perf_counter())
        try:
            for now, content in self.events(data):
                if content != b"[DONE]":
                    self._take(content, now, answer)
        except Refused as error:
            raise refusal(self.url, error.status, error.body) from error
        if answer.finish is None:
            raise Lost("the answer ended without a reason")
        return answer

    def _take(self, content: bytes, now: float, answer: Stream) -> None:
        try:
            chunk = parse_json(content)
        except ValueError as error:
            raise RunFailed(
                f"the server at {self.url} sent a chunk that is not JSON: {content[:80]!r}"
            ) from error
        if isinstance(chunk, dict) and "error" in chunk:
            told = chunk["error"]
            words = str(told.get("message", told) if isinstance(told, dict) else told)
            raise RunFailed(f"the server at {self.url} failed: {' '.join(words.split())[:300]}")
        choices = chunk.get("choices", []) if isinstance(chunk, dict) else None
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise RunFailed(
                f"the server at {self.url} sent a chunk without a list of choices: {content[:80]!r}"
            )
        for choice in choices:
            if "token_ids" not in choice:
                raise ArchsearchError(
                    f"the server at {self.url} sends no token ids (return_token_ids); it is too old"
                    " or no vLLM server"
                )
            tokens, text, finish = (
                choice["token_ids"] or [],
                choice.get("text") or "",
                choice.get("finish_reason"),
            )
            ids = isinstance(tokens, list) and all(type(token) is int for token in tokens)
            if not ids or not isinstance(text, str) or not isinstance(finish, str | None):
                raise RunFailed(
                    f"the server at {self.url} sent a chunk with fields of another type:"
                    f" {content[:80]!r}"
                )
            if tokens:
                answer.chunks.append(tuple(tokens))
                answer.times.append(now)
            answer.text += text
            answer.finish = finish or answer.finish


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
