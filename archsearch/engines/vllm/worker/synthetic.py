"""Synthetic acceptance in vLLM's CPU build, whose forms of the rejection kernels lack it: tokens
are accepted by chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def accept_by_chance(
    output: Any,
    cu_num_tokens: Any,
    draft_ids: Any,
    instead_ids: Any,
    bonus_ids: Any,
    uniform: Any,
    rates: Any,
    mine: Any,
) -> None:
    """vLLM's synthetic acceptance: draft token i is accepted where its uniform number is below
    rates[i].

    output [batch, gamma + 1] is filled up to the first refused token, whose place takes
    `instead_ids` (the target's choice), or with `bonus_ids` [batch] after the last. `draft_ids`,
    `instead_ids`, `uniform`: [tokens]; `rates` [gamma] are conditional on all before being
    accepted. Rows that are not `mine` [batch] (None: all are) stay untouched; draft token -1 is
    padding.
    """
    import torch

    drafts, instead, chances = draft_ids.tolist(), instead_ids.tolist(), uniform.tolist()
    limits, bonus = rates.tolist(), bonus_ids.flatten().tolist()
    start = 0
    for row, end in enumerate(cu_num_tokens.tolist()):
        if mine is None or bool(mine[row]):
            tokens: list[int] = []
            for position in range(end - start):
                draft = drafts[start + position]
                if draft < 0 or chances[start + position] >= limits[position]:
                    tokens.append(instead[start + position])
                    break
                tokens.append(draft)
            else:
                tokens.append(bonus[row])
            output[row, : len(tokens)] = torch.tensor(tokens, dtype=output.dtype)
        start = end


class EvenChances:
    """Numbers between 0 and 1 for synthetic acceptance, spread evenly (steps of the golden ratio)
    and not drawn.

    The asked rates are met after tens of rounds, where independent draws need thousands; a round's
    time does not depend on it.
    """

    STEP = 0.6180339887498949

    def __init__(self) -> None:
        self.place = 0.0

    def begin(self, seed: int) -> None:
        """Start a call: the same seed gives the same chances."""
        self.place = seed * 0.7548776662466927 % 1.0

    def like(self, uniform: Any, cu_num_tokens: Any, rates: Any) -> Any:
        """Conditional chances [tokens] such that one number u a round decides it: position i is
        accepted where u < the product of rates[0..i]."""
        values: list[float] = []
        start, limits = 0, rates.tolist()
        for end in cu_num_tokens.tolist():
            self.place = (self.place + self.STEP) % 1.0
            reach = 1.0
            for position in range(end - start):
                values.append(self.place / reach if reach > 0.0 else 1.0)
                reach *= limits[position]
            start = end
        return uniform.new_tensor(values)


CHANCES = EvenChances()


GREEDY = (
    "output_token_ids cu_num_draft_tokens draft_token_ids target_argmax bonus_token_ids is_greedy"
    " max_spec_len uniform_probs synthetic_conditional_rates SYNTHETIC_MODE"
)
"""The arguments of rejection_greedy_sample_kernel, in order."""
RANDOM = (
    "output_token_ids cu_num_draft_tokens draft_token_ids draft_probs target_probs bonus_token_ids"
    " recovered_token_ids uniform_probs is_greedy max_spec_len vocab_size"
    " synthetic_conditional_rates NO_DRAFT_PROBS SYNTHETIC_MODE"
)
"""Those of rejection_random_sample_kernel."""


def by_chance(plain: Callable[..., None], names: str) -> Callable[..., None]:
    """`plain`, vLLM's CPU form of the kernel with the arguments `names`, with synthetic acceptance
    added."""

    def sample(*args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(names.split(), args)), **kwargs}  # noqa: B905 - the last have defaults
        if not given.get("SYNTHETIC_MODE"):
            plain(*args, **kwargs)
            return
        greedy, rates = given["is_greedy"], given["synthetic_conditional_rates"]
        drafted = given["cu_num_draft_tokens"]
        accept_by_chance(
            given["output_token_ids"],
            drafted,
            given["draft_token_ids"],
            given["target_argmax" if names == GREEDY else "recovered_token_ids"],
            given["bonus_token_ids"],
            CHANCES.like(given["uniform_probs"], drafted, rates),
            rates,
            greedy if names == GREEDY else ~greedy,
        )

    return sample
