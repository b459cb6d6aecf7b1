"""What the target says on a draft's own vocabulary: its head cut to the rows that the draft has,
and the rows of a long vocabulary that one step is taken on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from archsearch.errors import ArchsearchError
from archsearch.text.cache import CachedSequence, TextCache
from archsearch.training.batches import Batch, kept_token_ids

_FULL_HEAD_LIMIT: Final = 16384  # above this many rows the loss is taken on a shortlist
# Without them a shortlisted full head learns nothing about the other rows.
_RANDOM_NEGATIVES: Final = 512


class Teacher:
    """`head` [rows, target hidden]: the target's, float32, on the draft's device; `index_of`
    [vocab]: the row of every token, -100 where the draft has none. Raises ArchsearchError for a
    draft of another vocabulary than the text's."""

    def __init__(
        self, draft: Any, cache: TextCache, sequences: Sequence[CachedSequence], shortlist: int
    ) -> None:
        self.kept, weight = kept_token_ids(draft), draft.lm_head.weight
        self.rows, vocab = int(weight.shape[0]), cache.vocab_size
        fits = self.rows == vocab if self.kept is None else int(self.kept.max()) < vocab
        if not fits:
            raise ArchsearchError(
                f"the draft's vocabulary ({self.rows} head rows) does not fit the text's target"
                f" ({vocab} tokens); give a draft of the same target"
            )
        # bfloat16 logits of 16 to 32 lie 0.125 apart: no distribution to learn.
        head = cache.head.to(weight.device).float()
        self.head = head if self.kept is None else head[self.kept]
        places = torch.arange(self.rows, device=weight.device)
        self.index_of = torch.full((vocab,), -100, dtype=torch.long, device=weight.device)
        self.index_of[places if self.kept is None else self.kept] = places
        self.frequent = None
        if self.rows > _FULL_HEAD_LIMIT:
            self.frequent = self._frequent(sequences)[:shortlist]

    def _frequent(self, sequences: Sequence[CachedSequence]) -> Tensor:
        """Rows of the draft's head, those first that the target writes most."""
        counts = torch.zeros(self.index_of.shape[0], dtype=torch.long)
        for sequence in sequences:
            counts += torch.bincount(sequence.written, minlength=counts.shape[0])
        order = counts.argsort(descending=True, stable=True).to(self.index_of.device)
        rows = self.index_of[order]
        return rows[rows >= 0]

    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """[n, rows]: of the target's states `hidden` [n, target hidden]."""
        head = self.head if rows is None else self.head[rows]
        with torch.no_grad():
            return functional.linear(hidden.to(head.dtype), head)

    def shortlist(self, batch: Batch, seed: int) -> Tensor | None:
        """Sorted head rows of a step: frequent tokens, those of the batch, and random ones; None
        where all are taken."""
        if self.frequent is None:
            return None
        generator = torch.Generator().manual_seed(seed)
        negatives = torch.randint(self.rows, (_RANDOM_NEGATIVES,), generator=generator)
        present = self.index_of[torch.cat([batch.greedy_ids, batch.token_ids])]
        negatives = negatives.to(present.device)
        return torch.cat([self.frequent, present[present >= 0], negatives]).unique()
