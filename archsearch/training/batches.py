"""Batches of text side by side, a draft's pass over them, and what the target says there on the
draft's own vocabulary: its head cut to the rows that the draft has, and the rows of a long
vocabulary that one step is taken on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from archsearch.errors import ArchsearchError
from archsearch.models.drafts import head_token_ids
from archsearch.models.runtime import native_bf16
from archsearch.text.cache import CachedSequence, TextCache
from archsearch.text.settings import by_length, side_by_side

if TYPE_CHECKING:
    from transformers import PreTrainedModel


JUDGED_TOKENS: Final = 4096  # side by side, where drafts are judged


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences side by side, right-padded: `input_ids` [rows, width]; `positions` [n] into the
    flattened inputs, where written tokens are predicted; there `hidden` [n, target hidden],
    `greedy_ids`, `token_ids` [n]. `tokens`: inputs without padding; `written`: tokens written of
    each text."""

    input_ids: Tensor
    positions: Tensor
    hidden: Tensor
    greedy_ids: Tensor
    token_ids: Tensor
    tokens: int
    written: tuple[int, ...]

    def by_text(self, rows: Tensor) -> tuple[Tensor, ...]:
        """`rows` [n, ...] of the written tokens, those of each text apart."""
        return rows.split(list(self.written))

    def to(self, device: torch.device) -> Self:
        if self.input_ids.device == device:
            return self
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        moved = {name: value.to(device) for name, value in values if isinstance(value, Tensor)}
        return replace(self, **moved)  # type: ignore[arg-type]


def make_batch(sequences: Sequence[CachedSequence]) -> Batch:
    """One right-padded batch; the last token of each sequence is predicted, never an input."""
    input_ids = pad_sequence([s.token_ids[:-1].long() for s in sequences], batch_first=True)
    width = input_ids.shape[1]
    # the state at token i predicts token i + 1: from the prompt's last token to the last but one
    positions = [
        torch.arange(s.prompt_tokens - 1, len(s) - 1) + row * width
        for row, s in enumerate(sequences)
    ]
    return Batch(
        input_ids,
        torch.cat(positions),
        torch.cat([s.hidden for s in sequences]),
        torch.cat([s.greedy_ids for s in sequences]),
        torch.cat([s.written for s in sequences]),
        sum(len(s) - 1 for s in sequences),
        tuple(len(s.greedy_ids) for s in sequences),
    )


def batches_of(
    sequences: Sequence[CachedSequence], tokens: int, device: torch.device
) -> Iterator[tuple[list[int], Batch]]:
    """(indices of sequences, a batch of them on `device`) of about `tokens` tokens each, shortest
    texts first."""
    for chosen in by_length([len(s) for s in sequences], tokens):
        yield chosen, make_batch([sequences[i] for i in chosen]).to(device)


def plan_epoch(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of the sequences of each batch: neighbours in length together (about 1% padding),
    batches in random order.

    A pure function of its arguments: every draft sees the same batches, and a resumed run goes on
    where it stopped.
    """
    rng = np.random.default_rng([seed, epoch])
    # A little noise on the length mixes who is whose neighbour from epoch to epoch.
    order = np.argsort(np.asarray(lengths) * (1 + 0.02 * rng.random(len(lengths))), kind="stable")
    batches = list(side_by_side(order.tolist(), lengths, batch_tokens))
    return [batches[i] for i in rng.permutation(len(batches))]


def split_heldout(
    sequences: Sequence[CachedSequence], count: int
) -> tuple[list[CachedSequence], list[CachedSequence]]:
    """(training, held-out): at most `count` and a tenth of the sequences are held out, the same
    ones for every draft and seed."""
    held = min(count, len(sequences) // 10)
    chosen = set(np.random.default_rng(0).permutation(len(sequences))[:held].tolist())
    train = [s for i, s in enumerate(sequences) if i not in chosen]
    return train, [s for i, s in enumerate(sequences) if i in chosen]


def draft_states(draft: PreTrainedModel, batch: Batch) -> Tensor:
    """The draft's final hidden states [n, hidden] at the positions that predict a written token."""
    # No mask: padding is on the right, where a causal model does not look.
    states = draft.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    return states.reshape(-1, states.shape[-1])[batch.positions]


@contextmanager
def judging(model: Any) -> Iterator[Tensor]:
    """A draft or head in eval mode, in the arithmetic in which it is judged; yields the rows of its
    head."""
    weight, training = model.lm_head.weight, model.training
    model.eval()
    with torch.inference_mode(), autocast(weight, None if weight.dtype == torch.float32 else False):
        yield weight
    model.train(training)


def greedy_matches(draft: PreTrainedModel, sequences: Sequence[CachedSequence]) -> list[np.ndarray]:
    """Per sequence [n] bool: whether the draft's argmax is the target's greedy token, given the
    true text before it: along greedy text any gamma can be replayed afterwards."""
    kept = head_token_ids(draft)
    results = [np.empty(0, dtype=bool)] * len(sequences)
    with judging(draft) as weight:
        for chosen, batch in batches_of(sequences, JUDGED_TOKENS, weight.device):
            best = functional.linear(draft_states(draft, batch).to(weight.dtype), weight).argmax(-1)
            matches = ((best if kept is None else kept[best]) == batch.greedy_ids).cpu()
            for i, part in zip(chosen, batch.by_text(matches), strict=True):
                results[i] = part.numpy()
    return results


def heldout_divergence(
    draft: PreTrainedModel, head: Tensor, sequences: Sequence[CachedSequence]
) -> tuple[float, float]:
    """(Kullback-Leibler divergence of the draft from the target in nats a token, share of the
    target's greedy tokens that the draft has) on texts of the target.

    `head` [vocab, target hidden]: the target's. A trimmed vocabulary renormalises the target.
    """
    kept = head_token_ids(draft)
    weight = draft.lm_head.weight
    rows = head.to(weight.device).float()
    rows = rows if kept is None else rows[kept]
    nats, known, count = 0.0, 0, 0
    with torch.inference_mode():
        for _, batch in batches_of(sequences, JUDGED_TOKENS, weight.device):
            states = draft_states(draft, batch)
            # two [512, vocab] tables at a time: all of a batch would not fit a small machine
            for part in torch.arange(len(batch.greedy_ids), device=weight.device).split(512):
                said = functional.log_softmax(functional.linear(states[part], weight).float(), -1)
                meant = functional.log_softmax(
                    functional.linear(batch.hidden[part].float(), rows), -1
                )
                nats += float(functional.kl_div(said, meant, reduction="sum", log_target=True))
            known += (
                len(batch.greedy_ids)
                if kept is None
                else int(torch.isin(batch.greedy_ids, kept).sum())
            )
            count += len(batch.greedy_ids)
    # Of a draft that says what the target says, rounding takes the sum below zero.
    return max(nats, 0.0) / max(count, 1), known / max(count, 1)


def autocast(weight: Tensor, enabled: bool | None) -> torch.autocast:
    """bfloat16 arithmetic where it is wanted, or (None) where the machine is faster with it."""
    use = native_bf16(weight.device) if enabled is None else enabled
    return torch.autocast(weight.device.type, torch.bfloat16, enabled=use)


_FULL_HEAD_LIMIT: Final = 16384  # above this many rows the loss is taken on a shortlist
# Without them a shortlisted full head learns nothing about the other rows.
_RANDOM_NEGATIVES: Final = 512


class Teacher:
    """`head` [rows, target hidden]: the target's, float32, on the draft's device; `index_of`
    [vocab]: the row of every token, -100 where the draft has none; `frequent`: of a long head, the
    rows that the target writes most. Raises ArchsearchError for a draft of another vocabulary than
    the text's."""

    def __init__(
        self, draft: Any, cache: TextCache, sequences: Sequence[CachedSequence], shortlist: int
    ) -> None:
        self.kept, weight = head_token_ids(draft), draft.lm_head.weight
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
            counts = torch.bincount(torch.cat([s.written for s in sequences]), minlength=vocab)
            rows = self.index_of[counts.argsort(descending=True, stable=True).to(weight.device)]
            self.frequent = rows[rows >= 0][:shortlist]

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
