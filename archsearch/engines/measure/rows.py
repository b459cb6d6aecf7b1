"""What all that measures in an engine shares: made-up prompts, made-up acceptance, rows of a
Profile out of times."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

from archsearch.engines.engine import EnginePrompt
from archsearch.profiles import Measurement, freeze_shape

RATE: Final = 0.7  # synthetic acceptance of each draft token, given those before
MOST_TIMES: Final = 200  # of a row that are kept, evenly over the run
COMMON_IDS: Final = 1000  # ids of made-up prompts lie below it


def made_up(
    vocabulary: int, length: int, count: int = 1, *, rng: random.Random | None = None
) -> list[EnginePrompt]:
    """`count` prompts of `length` tokens."""
    rng, most = rng or random.Random(0), min(COMMON_IDS, vocabulary)
    return [
        EnginePrompt(str(number), tuple(rng.randrange(most) for _ in range(length)))
        for number in range(count)
    ]


def synthetic(gamma: int) -> tuple[float, ...]:
    """The shares of rounds in which each draft token is accepted."""
    return tuple(RATE ** (position + 1) for position in range(gamma))


def row_of(
    kind: str, shape: Any, how: tuple[str, str, str], times: Sequence[float], slowdown: float = 1.0
) -> Measurement:
    """The row of a shape; `how`: dtype, mode, cache state."""
    kept = tuple(times[:: -(-len(times) // MOST_TIMES)])
    return Measurement(kind, freeze_shape(shape.to_dict()), *how, kept, slowdown)
