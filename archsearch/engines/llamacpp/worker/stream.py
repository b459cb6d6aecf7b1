"""Rounds out of llama.cpp's stream of tokens: events of one round carry the same clock. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from answers import answer_of, drafting_rounds
from loop import Failed


def streamed(
    prompt_id: str,
    events: Sequence[dict[str, Any]],
    seconds: float,
    gamma: int,
    limit: int,
    ragged: bool = False,
) -> tuple[dict[str, Any], list[int], list[int]]:
    """An answer of at most `limit` tokens; tokens written and drafted in each round behind the
    first token.

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
    if not events[-1].get("stop"):
        raise Failed(f"the server broke off in the answer to prompt {prompt_id!r}")
    ended = events[-1].get("stop_type") == "eos"
    each = drafted[1:] if ragged else [gamma] * len(lengths[1:])
    whole = drafting_rounds(lengths[1:], each, limit - 1, ended)
    least = times[-1] - times[0] + 1e-9
    answer = answer_of(prompt_id, token_ids, max(seconds, least), (times, lengths), whole, gamma)
    return answer, lengths[1:], drafted[1:]


def steps_of(
    result: dict[str, Any],
    rounds: tuple[Sequence[int], Sequence[int]],
    prompt_tokens: int,
    gamma: int,
) -> list[dict[str, Any]]:
    """The engine's steps: the prompt with the first token, then a round or a plain step each.
    `rounds`: tokens written and drafted in each."""
    first = {"written": 1, "seconds": result["first_s"], "target_tokens": prompt_tokens}
    steps: list[dict[str, Any]] = [{"batch": 1, "prefill": True, **first}]
    written = 1
    for seconds, length, drafted in zip(result["gaps_s"], *rounds, strict=True):
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
