"""What text of a given size promises: alpha where a draft has learnt all that it can teach, from
the curve of one training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.training.curves import REPEATS, AlphaPoint, CurvePrior, extrapolate

LEARNT_EPOCHS: Final = 3.0 * REPEATS  # where all but a twentieth of what repeating brings has come


@dataclass(frozen=True, slots=True)
class TextPromise:
    """`prompts` of the kind that was trained on, the distinct tokens that the target writes for
    them, and alpha when they are learnt (a measurement on the same held-out texts; add the std over
    texts for others)."""

    prompts: int
    distinct_tokens: int
    alpha: Estimate


def promise(
    points: Sequence[AlphaPoint],
    epoch_tokens: int,
    *,
    prompts: int,
    distinct_tokens: int,
    more_prompts: int,
    prior: CurvePrior | None = None,
) -> TextPromise:
    """What `more_prompts` would bring where `prompts` brought text of `distinct_tokens` written
    tokens, `epoch_tokens` with its prompts, and a training on that text has the curve `points`.

    The curve is carried on along its effective tokens (`curves.effective_tokens`). Raises
    ArchsearchError without points or text.
    """
    if prompts < 1 or more_prompts < 1 or epoch_tokens < 1:
        raise ArchsearchError(
            f"a promise needs text: {prompts} prompts with {epoch_tokens} tokens, asked for"
            f" {more_prompts}"
        )
    share = more_prompts / prompts
    epoch = max(1, round(epoch_tokens * share))
    alpha = extrapolate(
        points, round(LEARNT_EPOCHS * epoch), prior, annealed=False, epoch_tokens=epoch
    )
    return TextPromise(more_prompts, round(distinct_tokens * share), alpha)
