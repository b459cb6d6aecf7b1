"""One streamed completion of an OpenAI-compatible server, timed where it arrives."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from archsearch.engines.openai.connection import Connection, Lost, Refused
from archsearch.errors import ArchsearchError
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


class OpenAIServer(Connection):
    """A server of completions, asked for one after another."""

    def model(self) -> str:
        """The name of the first model that it serves. Raises Lost, or ArchsearchError where it
        names none."""
        status, body = self.ask("GET", "/v1/models", timeout_s=min(self.timeout_s, 30.0))
        try:
            name = parse_json(body)["data"][0]["id"]
            if not isinstance(name, str):
                raise TypeError
        except (ValueError, KeyError, TypeError, IndexError):
            why = (
                "wants a key; put it into VLLM_API_KEY"
                if status in (401, 403)
                else "names no model on /v1/models"
            )
            raise ArchsearchError(f"the server at {self.url} {why} ({status})") from None
        return name

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
            return self._read(data, sent, began)
        except Lost as error:
            if self.hung_up:
                raise
            why = f"{LOST}{error}"
        except (Refused, Odd) as error:
            why = str(error)
        now = time.perf_counter() - began
        return Answer(sent, now, now, 0, 0, 0, why)

    def _read(self, data: dict[str, Any], sent: float, began: float) -> Answer:
        first = done = 0.0
        pieces, written, given = 0, None, 0
        for now, content in self.events(data):
            if content == b"[DONE]":
                break
            text, usage = _chunk(content)
            if usage is not None:
                written, given = (
                    _count(usage, "completion_tokens"),
                    _count(usage, "prompt_tokens") or 0,
                )
            if text:
                done = now - began
                first = first or done
                pieces += 1
        if not pieces:
            raise Odd("an answer without any text")
        if written is not None and not 1 <= written <= data["max_tokens"]:
            raise Odd(
                f"the server counts {written} tokens in an answer of at most {data['max_tokens']}"
            )
        return Answer(sent, first, done, pieces if written is None else written, given, pieces)


def _chunk(content: bytes) -> tuple[bool, dict[str, Any] | None]:
    """Whether a chunk brought text, and its usage. Raises Odd."""
    try:
        chunk = parse_json(content)
    except ValueError as error:
        raise Odd(f"a chunk that is not JSON ({error})") from None
    if not isinstance(chunk, dict):
        raise Odd(f"a chunk that is no object: {content[:60]!r}")
    if chunk.get("error"):
        raise Odd(" ".join(str(chunk["error"]).split())[:400])
    choices, usage = chunk.get("choices") or [], chunk.get("usage")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise Odd(f"a chunk without a list of choices: {content[:60]!r}")
    if not isinstance(usage, dict | None):
        raise Odd(f"a chunk whose usage is no object: {content[:60]!r}")
    return any(choice.get("text") or choice.get("token_ids") for choice in choices), usage


def _count(usage: dict[str, Any], name: str) -> int | None:
    """A count of tokens; None where the server does not say. Raises Odd for what counts nothing."""
    count = usage.get(name)
    if count is not None and not (type(count) is int and 0 <= count < 2**31):
        raise Odd(f"{name} is {str(count)[:40]!r}")
    return count
