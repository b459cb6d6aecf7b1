"""Medusa heads: each reads the target's final state and proposes a token further on (arXiv
2401.10774).

Head j is h -> h + SiLU(W h), then rows of the vocabulary; at the state that wrote token i it
proposes token i + 1 + j (j from 1). W begins at 0, so every head begins as the target's own. The
heads do not see each other's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from archsearch.models.drafts import TrimmedHead


class MedusaHeads(nn.Module):
    """`gamma` heads of a target; forward: [..., hidden] -> per head the state [..., hidden] that
    its rows read: one matrix of rows, of the `kept` tokens, serves all heads."""

    def __init__(self, hidden_size: int, vocab_size: int, gamma: int, kept: Sequence[int]) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size, self.gamma = hidden_size, vocab_size, gamma
        self.blocks = nn.ModuleList(
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(gamma)
        )
        # A list of one: checkpoints know its weight as lm_heads.0.weight.
        self.lm_heads = nn.ModuleList([TrimmedHead(hidden_size, vocab_size, kept)])

    @property
    def lm_head(self) -> Any:
        """The rows [kept, hidden] that every head compares its state with."""
        return self.lm_heads[0]

    def get_input_embeddings(self) -> None:
        """None: heads read no tokens."""

    def forward(self, hidden: Tensor) -> list[Tensor]:
        return [hidden + functional.silu(block(hidden)) for block in self.blocks]


def initialise_medusa(target: Any, gamma: int, kept: Sequence[int]) -> MedusaHeads:
    """Heads that all begin as the target's own head, cut to the kept tokens."""
    config = target.config
    heads = MedusaHeads(int(config.hidden_size), int(config.vocab_size), gamma, kept)
    with torch.no_grad():
        for parameter in heads.blocks.parameters():
            parameter.zero_()  # SiLU(0) = 0: each head passes on the target's own state
        own = target.get_output_embeddings().weight.detach()
        heads.lm_head.weight.copy_(own[heads.lm_head.draft_token_ids])
    return heads
