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
    its rows read.

    `shared`: one matrix of vocabulary rows for all heads, else one each. Rows are those of the
    `kept` tokens.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        gamma: int,
        kept: Sequence[int],
        *,
        shared: bool = True,
    ) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size, self.gamma, self.shared = (
            hidden_size,
            vocab_size,
            gamma,
            shared,
        )
        self.blocks = nn.ModuleList(
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(gamma)
        )
        self.lm_heads = nn.ModuleList(
            TrimmedHead(hidden_size, vocab_size, kept) for _ in range(1 if shared else gamma)
        )

    @property
    def lm_head(self) -> Any:
        """The first head's rows: all heads keep the same tokens."""
        return self.lm_heads[0]

    def get_input_embeddings(self) -> None:
        """None: heads read no tokens."""

    def rows(self, head: int) -> Tensor:
        """[kept, hidden]: what `head` (from 0) compares its state with."""
        kept: Any = self.lm_heads[0 if self.shared else head]
        weight: Tensor = kept.weight
        return weight

    def forward(self, hidden: Tensor) -> list[Tensor]:
        return [hidden + functional.silu(block(hidden)) for block in self.blocks]


def initialise_medusa(
    target: Any, gamma: int, kept: Sequence[int], *, shared: bool = True
) -> MedusaHeads:
    """Heads that all begin as the target's own head, cut to the kept tokens."""
    config = target.config
    heads = MedusaHeads(int(config.hidden_size), int(config.vocab_size), gamma, kept, shared=shared)
    with torch.no_grad():
        blocks: Any = heads.blocks
        for block in blocks:
            block.weight.zero_()
        own: Any = heads.lm_heads
        for head in own:
            head.weight.copy_(target.get_output_embeddings().weight.detach()[head.draft_token_ids])
    return heads
