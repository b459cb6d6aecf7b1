"""One streamed completion of an OpenAI-compatible server, timed where it arrives, and what is wrong
with it in one line."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass, field
from typing import Any, Final

from archsearch.engines.openai.connection import API_KEY, Connection, Lost, Refused
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.files import parse_json

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
    usage: dict[str, Any] = field(default_factory=dict)

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


class OpenAIServer(Connection):
    """A server of completions."""

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

    def stream(self, data: dict[str, Any]) -> Stream:
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

    def tokens(self, data: dict[str, Any]) -> Stream:
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
