"""Answers out of hand-overs of tokens, counted in one way by every engine. Standard library only:
workers import it by name."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any


def round_statistics(round_lengths: Sequence[int], gamma: int) -> tuple[int, ...]:
    """`accepted_by_position` [gamma] out of the lengths (accepted + 1) of whole rounds. Raises
    ValueError for a length that no round of `gamma` has."""
    if any(not 1 <= length <= gamma + 1 for length in round_lengths):
        raise ValueError(
            f"a round of gamma {gamma} writes 1 to {gamma + 1} tokens, got"
            f" {sorted(set(round_lengths))}"
        )
    return tuple(sum(length > place + 1 for length in round_lengths) for place in range(gamma))


def drafting_rounds(
    lengths: Sequence[int], drafted: Sequence[int], room: int, ended: bool
) -> list[tuple[int, int]]:
    """(draft tokens, tokens written) of the whole rounds: those that neither the limit nor the end
    token cut short.

    `lengths`: tokens written by each round, in order; `drafted`: draft tokens judged in each, 0
    where nothing was found; `room`: tokens that may be written from the first of them on, which
    decides, never the outcome: that would bias. Engines draft fewer tokens where less room is left;
    a text that `ended` cut its last round at the end token.
    """
    whole: list[tuple[int, int]] = []
    for number, (length, drafts) in enumerate(zip(lengths, drafted)):  # noqa: B905 - one may go on
        if drafts and room >= drafts + 1 and not (ended and number == len(lengths) - 1):
            whole.append((drafts, length))
        room -= length
    return whole


def answer_of(
    prompt_id: str,
    token_ids: Sequence[int],
    seconds: float,
    handed: tuple[Sequence[float], Sequence[int]],
    whole: Sequence[tuple[int, int]] = (),
    gamma: int = 0,
) -> dict[str, Any]:
    """The fields of a GenerationResult but the text. `handed`: arrival and tokens of each
    hand-over, the first with the prompt; `whole`: see `drafting_rounds`; `gamma`: the largest,
    which is how long the counts are."""
    times, lengths = handed
    decode = times[-1] - times[0]
    written = [length for _, length in whole]
    return {
        "prompt_id": prompt_id,
        "token_ids": tuple(token_ids),
        "seconds": seconds,
        "first_s": seconds - decode,
        "decode_seconds": decode,
        "decode_tokens": len(token_ids) - lengths[0],
        "rounds": len(whole),
        "drafted": sum(drafts for drafts, _ in whole),
        "accepted_by_position": round_statistics(written, gamma),
        "round_lengths": tuple(written),
        "unrefused": sum(drafts < gamma and length > drafts for drafts, length in whole),
        "gaps_s": tuple(later - earlier for earlier, later in pairwise(times)),
    }
