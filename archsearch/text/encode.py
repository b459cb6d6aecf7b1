"""Text that others wrote, with the target's states, from forward passes: plain text, and given
answers to prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from archsearch.errors import ArchsearchError
from archsearch.progress import Progress, silent
from archsearch.text.batch import Report
from archsearch.text.cache import SHARD_PROMPTS, CachedSequence, TextCache
from archsearch.text.generate import CacheJob, Store, Work, make_cache, plain_head
from archsearch.text.prompts import EncodedPrompt
from archsearch.text.settings import by_length, prefill_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PIECE_TOKENS: Final = 256


def encode_text(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    cache_dir: Path | str,
    max_tokens: int = PIECE_TOKENS,
    budget_s: float | None = None,
    progress: Progress = silent,
) -> TextCache:
    """Plain text with the target's states, from one forward pass: every token after the first
    counts as written.

    Longer texts are cut into pieces of `max_tokens`. Budget, resuming, refusal as in write_answers.
    Raises ArchsearchError for text without a piece of two tokens.
    """
    begin = time.monotonic()
    pieces = list(_pieces(texts, tokenizer, max_tokens))
    if not pieces:
        raise ArchsearchError("the plain text holds no piece of two tokens or more; give more text")
    head = plain_head(target)
    pass_tokens = prefill_tokens(target)

    def write(work: Sequence[Work], deadline: float | None, report: Report, store: Store) -> bool:
        done = tokens = 0
        for start in range(0, len(work), SHARD_PROMPTS):
            part = work[start : start + SHARD_PROMPTS]
            for places in by_length([len(one.text.token_ids) for one in part], pass_tokens):
                if done and deadline is not None and time.monotonic() >= deadline:
                    return False
                batch = [part[place] for place in places]
                read = _read(target, head, [one.text for one in batch])
                for one, sequence in zip(batch, read, strict=True):
                    store(one.number, sequence, True)
                done += len(batch)
                tokens += sum(len(one.text.token_ids) - 1 for one in batch)
                report("reads", done, tokens)
        return True

    job = CacheJob(
        Path(cache_dir), target, head, pieces, {"kind": "plain", "max_tokens": max_tokens}, write
    )
    return make_cache(job, begin, budget_s, progress)


def _pieces(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> Iterator[EncodedPrompt]:
    for number, text in enumerate(texts):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for part, start in enumerate(range(0, len(ids), max_tokens)):
            if len(ids) - start >= 2:
                yield EncodedPrompt(
                    tuple(ids[start : start + max_tokens]), "plain", f"text-{number}-{part}"
                )


def _read(
    target: PreTrainedModel, head: torch.Tensor, batch: Sequence[EncodedPrompt]
) -> Iterator[CachedSequence]:
    # Padding on the right needs no mask: a causal model never looks there. [batch, width]
    ids = pad_sequence([torch.tensor(p.token_ids) for p in batch], batch_first=True).to(head.device)
    with torch.inference_mode():
        # [batch, width, hidden]
        states = target.base_model(input_ids=ids, use_cache=False).last_hidden_state
        for row, piece in enumerate(batch):
            hidden = states[row, : len(piece.token_ids) - 1]
            greedy = functional.linear(hidden, head).argmax(-1).cpu()
            yield CachedSequence(
                torch.tensor(piece.token_ids),
                1,
                hidden.cpu().clone(),
                greedy,
                piece.category,
                piece.id,
            )
