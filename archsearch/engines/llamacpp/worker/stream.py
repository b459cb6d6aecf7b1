"""Rounds out of llama.cpp's stream of tokens: events of one round carry the same clock. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loop import Failed


def answer_of(prompt_id: str, events: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """An answer: its tokens, the tokens of each round behind the first token (`lengths`), and their
    times.

    `events`: what /completion streamed with `timings_per_token`; `seconds`: of the whole request,
    by our clock. The server's own clock (`predicted_ms`) starts with the first token and stays the
    same for all tokens of a round.
    """
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
    decode = times[-1] - times[0]
    return {
        "prompt_id": prompt_id,
        "token_ids": token_ids,
        "seconds": max(seconds, decode),
        "first_s": max(seconds - decode, 1e-9),
        "decode_seconds": decode,
        "decode_tokens": len(token_ids) - lengths[0],
        "gaps_s": [b - a for a, b in zip(times[:-1], times[1:], strict=True)],
        "lengths": lengths[1:],
        "ended": events[-1].get("stop_type") == "eos",
        "asked": drafted[1:],
    }


def steps_of(
    result: dict[str, Any], prompt_tokens: int, gamma: int, limit: int
) -> list[dict[str, Any]]:
    """The engine's steps: the prompt with the first token, then a round or a plain step each. Takes
    `asked` out of `result`."""
    first = {
        "batch": 1,
        "written": 1,
        "seconds": result["first_s"],
        "target_tokens": prompt_tokens,
        "prefill": True,
    }
    steps = [first]
    written = 1
    for seconds, length, drafted in zip(
        result["gaps_s"], result["lengths"], result.pop("asked"), strict=True
    ):
        steps.append(
            {
                "batch": 1,
                "written": length,
                "seconds": seconds,
                "gamma": drafted if gamma else 0,
                "target_tokens": drafted + 1,
                "context": float(prompt_tokens + written),
            }
        )
        written += length
    return steps
