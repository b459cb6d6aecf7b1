"""Rounds out of llama.cpp's stream of tokens: events of one round carry the same clock. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from answers import answer_of, drafting_rounds
from loop import Failed, Message


@dataclass(frozen=True)
class Told:
    """What the server said of one request: its answer, tokens written and drafted in each round
    behind the first token, and when it was sent (our clock)."""

    answer: Message
    written: Sequence[int]
    drafted: Sequence[int]
    sent_at: float
    prompt_tokens: int

    @cached_property
    def times(self) -> list[float]:
        """When the first token and the rounds were there: our clock for the first, the server's
        between them."""
        first = self.sent_at + self.answer["first_s"]
        return list(accumulate(self.answer["gaps_s"], initial=first))

    def step(self, number: int) -> Message:
        """What it has in a step: the prompt with the first token (0), or a round or plain step."""
        if number == 0:
            first = {"written": 1, "target_tokens": self.prompt_tokens}
            return first | {"seconds": self.answer["first_s"]}
        return {
            "seconds": self.answer["gaps_s"][number - 1],
            "gamma": self.drafted[number - 1],
            "written": self.written[number - 1],
            "target_tokens": self.drafted[number - 1] + 1,
            "context": float(self.prompt_tokens + 1 + sum(self.written[: number - 1])),
        }


def streamed(
    prompt: Message,
    events: Sequence[Message],
    clock: tuple[float, float],
    gamma: int,
    limit: int,
    ragged: bool = False,
) -> Told:
    """An answer of at most `limit` tokens.

    `events`: what /completion streamed with `timings_per_token`; `clock`: when it was sent and how
    long it took, by ours. The server's own clock (`predicted_ms`) starts with the first token and
    stays the same for all tokens of a round.
    """
    prompt_id, (sent_at, seconds) = prompt["id"], clock
    token_ids: list[int] = []
    times: list[float] = []
    lengths: list[int] = []
    drafted: list[int] = []
    before = 0
    for event in events:
        if "error" in event:
            raise Failed(
                f"the server broke off: {str(event['error'].get('message', event['error']))[:200]}"
            )
        tokens, timings = event.get("tokens") or [], event.get("timings") or {}
        if event.get("stop") or not tokens:
            continue
        at = timings.get("predicted_ms", 0.0) / 1e3
        if not token_ids or at > times[-1]:
            times.append(at)
            lengths.append(0)
            drafted.append(timings.get("draft_n", 0) - before)
            before = timings.get("draft_n", 0)
        lengths[-1] += len(tokens)
        token_ids += tokens
    if not token_ids:
        raise Failed(f"no token was written for prompt {prompt_id!r}")
    if not events[-1].get("stop"):
        raise Failed(f"the server broke off in the answer to prompt {prompt_id!r}")
    ended = events[-1].get("stop_type") == "eos"
    each = drafted[1:] if ragged else [gamma] * len(lengths[1:])
    whole = drafting_rounds(lengths[1:], each, limit - 1, ended)
    least = times[-1] - times[0] + 1e-9
    answer = answer_of(prompt_id, token_ids, max(seconds, least), (times, lengths), whole, gamma)
    return Told(answer, lengths[1:], drafted[1:], sent_at, len(prompt["token_ids"]))


def steps_of(requests: Sequence[Told]) -> list[Message]:
    """The engine's steps, in each of which every request that has begun writes: only where one
    begins is asked of our clock, so that it need not be right to less than a step."""
    ends: list[float] = []
    parts: list[list[Message]] = []
    reading: set[int] = set()
    for told in sorted(requests, key=lambda told: told.times[0]):
        at, begins = told.times[0], len(ends)
        if ends and at <= ends[-1]:
            begins = min(range(len(ends)), key=lambda step: abs(ends[step] - at))
        reading |= {step for step in range(begins) if ends[step] > told.sent_at} | {begins}
        for number, time in enumerate(told.times):
            if begins + number == len(ends):
                ends.append(time)
                parts.append([])
            parts[begins + number].append(told.step(number))
    return [_step(part, number in reading) for number, part in enumerate(parts)]


def _step(parts: Sequence[Message], prefill: bool) -> Message:
    running = [part for part in parts if "gamma" in part]
    return {
        "batch": len(parts),
        "prefill": prefill,
        "written": sum(part["written"] for part in parts),
        "seconds": statistics.median(part["seconds"] for part in running or parts),
        "gamma": max((part["gamma"] for part in running), default=0),
        "target_tokens": sum(part["target_tokens"] for part in parts),
        "context": sum(part["context"] for part in running) / max(len(running), 1),
    }
