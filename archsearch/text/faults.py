"""What is wrong with prompts or answers that a draft is to learn from, in one sentence each;
nothing is refused here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from archsearch.text.cache import CachedSequence

# Fewer held-out and training prompts than that leave alpha all but unknown for others.
FEW_PROMPTS: Final = 32
MOST: Final = 0.5  # of the answers: what is wrong with so many is said
SHORT: Final = 1  # tokens of an answer that has nothing to draft
LOOP_TOKENS: Final = 24  # answers shorter than that may repeat themselves and mean it
LOOP_RUN: Final = 4  # tokens of a run that is looked for again
LOOP_SHARE: Final = 0.5  # of an answer's runs that came before in it: a target that goes in circles


def loops(token_ids: Sequence[int]) -> bool:
    """Whether an answer goes in circles: half of its runs of four tokens came before."""
    if len(token_ids) < LOOP_TOKENS:
        return False
    starts = range(len(token_ids) - LOOP_RUN + 1)
    runs = [tuple(token_ids[start : start + LOOP_RUN]) for start in starts]
    return len(set(runs)) < (1.0 - LOOP_SHARE) * len(runs)


def prompt_faults(texts: Sequence[str]) -> list[str]:
    """What is wrong with a set of prompts, by their texts."""
    faults, distinct = [], len({text.strip() for text in texts})
    some = f"{len(texts)} prompts, {distinct} of them distinct"
    if distinct < FEW_PROMPTS:
        alike = some if distinct < len(texts) else f"only {len(texts)} prompts"
        faults.append(
            f"{alike}: the draft learns their answers by heart, and nobody can say how it does on"
            " other prompts"
        )
    elif distinct < MOST * len(texts):
        faults.append(f"{some}: held-out prompts that were trained on flatter the draft")
    return faults


def answer_faults(answers: Sequence[CachedSequence]) -> list[str]:
    """What is wrong with what the target wrote."""
    faults, count = [], len(answers)
    if not count:
        return ["the target wrote no answer: there is nothing to learn"]
    short = sum(len(answer.written) <= SHORT for answer in answers)
    if short > MOST * count:
        faults.append(
            f"{short} of {count} answers are one token long or empty: there is nothing to draft in"
            " them, and no draft makes them faster"
        )
    circles = sum(loops(answer.written.tolist()) for answer in answers)
    if circles > MOST * count:
        faults.append(
            f"the target repeats itself in {circles} of {count} answers: a draft learns to repeat"
            " too, and its alpha and speed-up hold for such answers only"
        )
    return faults
