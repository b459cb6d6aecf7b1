"""Rounds and passes of OpenVINO GenAI, out of what it counts by step. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def asked(written: int, gamma: int, max_new_tokens: int) -> int:
    """Draft tokens that OpenVINO GenAI asks for in the round after `written` tokens: the last token
    is always the target's."""
    return max(0, min(gamma, max_new_tokens - written - 1))


def draft_passes(
    durations: Sequence[float], lengths: Sequence[int], gamma: int, max_new_tokens: int
) -> list[list[float]] | None:
    """The draft's passes by hand-over, out of all of them one after the other; None where they do
    not add up.

    Each step notes one entry at least: an empty one where nothing was drafted (the first step, and
    a round for the last token).
    """
    split: list[list[float]] = []
    position = written = 0
    for index, length in enumerate(lengths):
        count = asked(written, gamma, max_new_tokens) if index else 0
        split.append(list(durations[position : position + count]))
        position += max(count, 1)
        written += length
    return split if position == len(durations) else None


def draft_pass_tokens(passes: int, first: bool, prompt: int, previous_whole: bool) -> list[int]:
    """Tokens in each pass of one request's draft. The first pass of a round also takes what the
    draft has not seen: the prompt in the first round, its own last token after a round that was
    accepted whole."""
    if not passes:
        return []
    return [prompt + 1 if first else 2 if previous_whole else 1] + [1] * (passes - 1)


def trimmed(lengths: Sequence[int], total: int) -> list[int]:
    """`lengths` cut so that they add up to `total`: tokens that the engine counted behind the end
    of the text are dropped."""
    kept: list[int] = []
    left = total
    for length in lengths:
        if left <= 0:
            break
        kept.append(min(length, left))
        left -= kept[-1]
    return kept
