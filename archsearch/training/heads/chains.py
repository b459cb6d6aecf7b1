"""Chains of draft tokens along a text: what a head proposes after every written token, gamma tokens
far, and how far it is right.

Start q of a text of n written tokens is the round that begins when token q is known (the target
wrote it): it drafts the tokens q + 1, q + 2, .. While all before were right, the head reads the
true text, so one pass along greedy text judges every chain exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from archsearch.errors import ArchsearchError
from archsearch.text.cache import CachedSequence
from archsearch.text.settings import side_by_side
from archsearch.training.batches import JUDGED_TOKENS, Batch, judging, make_batch
from archsearch.training.heads.eagle3 import Eagle3Head, Rows
from archsearch.training.heads.medusa import MedusaHeads

Head = Eagle3Head | MedusaHeads


@dataclass(frozen=True, slots=True)
class HeadBatch(Batch):
    """A batch with what heads need besides: `states` [texts, width, aux * hidden] and `next_ids`
    [texts, width] of an EAGLE-3 head; `first`: the row of each text at which its first round
    begins."""

    first: tuple[int, ...]
    states: Tensor | None
    next_ids: Tensor

    def chains(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """For every start whose token `step` + 1 ahead is in the text: its text, its number in the
        text, and the place of that token in `hidden` and `greedy_ids`; [chains] each."""
        texts, starts, places = [], [], []
        offset = 0
        for text, count in enumerate(self.written):
            inside = torch.arange(max(0, count - 1 - step))
            texts.append(torch.full_like(inside, text))
            starts.append(inside)
            places.append(inside + offset + 1 + step)
            offset += count
        return torch.cat(texts), torch.cat(starts), torch.cat(places)

    def rows(self) -> Rows:
        """What an EAGLE-3 head is unrolled over. ArchsearchError for texts without states."""
        if self.states is None:
            raise ArchsearchError("the texts have no auxiliary states; make them first")
        shape = (len(self.written), max(1, max(self.written) - 1))
        starts = torch.zeros(shape, dtype=torch.long, device=self.next_ids.device)
        for text, (first, count) in enumerate(zip(self.first, self.written, strict=True)):
            starts[text, : count - 1] = torch.arange(first, first + count - 1, device=starts.device)
        return Rows(self.states, self.next_ids, starts)


def head_batch(sequences: Sequence[CachedSequence]) -> HeadBatch:
    """Texts side by side, with their auxiliary states where they all have some."""
    plain = make_batch(sequences)
    next_ids = pad_sequence([s.token_ids[1:].long() for s in sequences], batch_first=True)
    known = [s.states for s in sequences if s.states is not None]
    states = pad_sequence(known, batch_first=True) if len(known) == len(sequences) else None
    first = tuple(sequence.prompt_tokens - 1 for sequence in sequences)
    own = {field.name: getattr(plain, field.name) for field in fields(plain)}
    return HeadBatch(**own, first=first, states=states, next_ids=next_ids)


def step_logits(head: Head, batch: HeadBatch, steps: int) -> Iterator[Tensor]:
    """At each step the logits [chains, kept] of the head for the chains of `batch.chains(step)`."""
    if isinstance(head, Eagle3Head):
        for step, normed in enumerate(head.unroll(batch.rows(), steps)):
            texts, starts, _ = batch.chains(step)
            yield functional.linear(normed[texts, starts], head.lm_head.weight)
        return
    texts, starts, places = batch.chains(0)
    # of those that wrote the last known token
    states = head(batch.hidden[places - 1].to(head.lm_head.weight.dtype))
    ahead = torch.tensor(batch.written)[texts] - 1 - starts  # tokens of its text after each start
    for step in range(steps):
        yield functional.linear(states[step][ahead > step], head.lm_head.weight)


def chain_matches(head: Head, sequences: Sequence[CachedSequence], gamma: int) -> list[np.ndarray]:
    """Per text [written - 1, gamma] bool: whether draft token k of the chain from each start is the
    target's greedy one, given that those before it are. False behind the end of the text."""
    found: list[np.ndarray] = []
    kept = head.lm_head.draft_token_ids
    with judging(head) as weight:
        lengths = [len(sequence) for sequence in sequences]
        for part in side_by_side(range(len(lengths)), lengths, JUDGED_TOKENS):
            batch = head_batch([sequences[i] for i in part]).to(weight.device)
            rounds = [max(0, count - 1) for count in batch.written]
            matches = np.zeros((len(rounds), max(rounds), gamma), dtype=bool)
            for step, logits in enumerate(step_logits(head, batch, gamma)):
                texts, starts, places = batch.chains(step)
                right = kept[logits.argmax(-1)] == batch.greedy_ids[places]
                matches[texts.numpy(), starts.numpy(), step] = right.cpu().numpy()
            found += [matches[text, :count] for text, count in enumerate(rounds)]
    return found


@dataclass(frozen=True, slots=True)
class ChainCounts:
    """Over many chains, by position: `judged`, those whose tokens before it were right, and `right`
    of these."""

    judged: tuple[int, ...]
    right: tuple[int, ...]

    @property
    def conditional(self) -> tuple[float, ...]:
        """The chance that each draft token is right, given that those before it are; 0 where none
        got so far."""
        return tuple(
            right / judged if judged else 0.0
            for right, judged in zip(self.right, self.judged, strict=True)
        )

    @property
    def tokens_a_round(self) -> float:
        """1 + the running products of `conditional`, summed: of rounds that may begin anywhere.
        Real rounds begin after a token that was not foreseen, in harder places, and write somewhat
        less (`acceptance.replay`)."""
        return 1.0 + float(np.cumprod(self.conditional).sum())


def count_chains(matches: Sequence[np.ndarray]) -> ChainCounts:
    """Counts over all starts of all texts; chains that leave the text are not judged beyond it."""
    gamma = matches[0].shape[1] if matches else 0
    judged, right = np.zeros(gamma, dtype=np.int64), np.zeros(gamma, dtype=np.int64)
    for rows in matches:
        # [starts, gamma]: a chain from the last start has one token left of its text, and so on
        inside = np.arange(gamma)[None] < (len(rows) - np.arange(len(rows)))[:, None]
        reach = np.logical_and.accumulate(rows, axis=1)
        before = np.concatenate([np.ones((len(rows), 1), dtype=bool), reach[:, :-1]], axis=1)
        judged += (inside & before).sum(0)
        right += (inside & reach).sum(0)
    return ChainCounts(tuple(judged.tolist()), tuple(right.tolist()))
