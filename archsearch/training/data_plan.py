"""Where the next minute is better spent: writing text or training on it.

Both make the tokens that a training is worth (`curves.effective_tokens`) more, and acceptance rises
with those alone; so the best division of the minutes needs no acceptance, only three speeds: tokens
that the target writes in a second, tokens that a draft is trained on in a second, and how much text
there can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from archsearch.training.curves import effective_tokens

_STEPS: Final = 201


@dataclass(frozen=True, slots=True)
class Supply:
    """Text that can be had from one source: at most `tokens` (prompts included, as a training
    counts them), `tokens_per_s` of them a second. `worth`: of one such token, in tokens of the
    greedy answers to the user's prompts."""

    name: str
    tokens: float
    tokens_per_s: float
    worth: float = 1.0


@dataclass(frozen=True, slots=True)
class Split:
    """`text_s` of the seconds for writing, which brings the text to `epoch_tokens`; the rest trains
    on `tokens` in all, worth `effective` new ones."""

    text_s: float
    train_s: float
    epoch_tokens: float
    tokens: float
    effective: float


def text_after(seconds: float, supplies: Sequence[Supply]) -> float:
    """Tokens that `seconds` of writing bring, each worth what its source is; the sources in their
    order."""
    found, left = 0.0, seconds
    for supply in supplies:
        if supply.tokens_per_s <= 0 or supply.tokens <= 0:
            continue
        used = min(left, supply.tokens / supply.tokens_per_s)
        found += used * supply.tokens_per_s * supply.worth
        left -= used
        if left <= 0:
            break
    return found


def split_at(
    text_s: float,
    seconds: float,
    supplies: Sequence[Supply],
    train_per_s: float,
    *,
    epoch_tokens: float = 0.0,
    tokens: float = 0.0,
) -> Split:
    """What comes of `text_s` of the `seconds` for text. `epoch_tokens`, `tokens`: text and training
    that are there already."""
    epoch = epoch_tokens + text_after(text_s, supplies)
    seen = tokens + max(seconds - text_s, 0.0) * train_per_s
    return Split(
        text_s, seconds - text_s, epoch, seen, effective_tokens(seen, epoch) if epoch > 0 else 0.0
    )


def best_split(
    seconds: float,
    supplies: Sequence[Supply],
    train_per_s: float,
    *,
    epoch_tokens: float = 0.0,
    tokens: float = 0.0,
) -> Split:
    """The division of `seconds` whose training is worth most new tokens; of equals the one with
    least text."""
    shares = [
        split_at(text_s, seconds, supplies, train_per_s, epoch_tokens=epoch_tokens, tokens=tokens)
        for text_s in np.linspace(0.0, max(seconds, 0.0), _STEPS).tolist()
    ]
    return max(shares, key=lambda split: (split.effective, -split.text_s))
