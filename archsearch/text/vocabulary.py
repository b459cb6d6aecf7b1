"""Which tokens a draft should be able to propose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from archsearch.errors import ArchsearchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from archsearch.text.cache import TextCache


@dataclass(frozen=True, slots=True)
class TokenFrequencies:
    """How often every token of the vocabulary [vocab_size] was written by the target, and stood in
    prompts or plain text."""

    written: np.ndarray
    text: np.ndarray


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The tokens a draft can propose (sorted ids) and the share of the target's written tokens that
    they cover."""

    token_ids: tuple[int, ...]
    coverage: float


def token_frequencies(cache: TextCache, *others: TextCache) -> TokenFrequencies:
    """Counts over one or several caches; plain text counts as text, never as written."""
    written = np.zeros(cache.vocab_size, dtype=np.int64)
    text = np.zeros(cache.vocab_size, dtype=np.int64)
    for one in (cache, *others):
        for sequence in one.sequences:
            ids = sequence.token_ids.numpy()
            read = len(ids) if one.plain else sequence.prompt_tokens
            np.add.at(text, ids[:read], 1)
            np.add.at(written, ids[read:], 1)
    return TokenFrequencies(written, text)


def choose_draft_vocab(
    frequencies: TokenFrequencies, size: int, tokenizer: PreTrainedTokenizerBase
) -> DraftVocabulary:
    """The `size` tokens a draft should keep: special tokens and the end of text always, then what
    the target writes most, then what prompts and plain text hold most, then the lowest ids
    (byte-pair merges are numbered by frequency). After FR-Spec (arXiv 2502.14856), which ranks by
    the frequency in a corpus only. Raises ArchsearchError for a size below the special tokens or
    above the vocabulary.
    """
    vocab_size = int(frequencies.written.shape[0])
    if not 0 < size <= vocab_size:
        raise ArchsearchError(
            f"a draft vocabulary must hold between 1 and {vocab_size} tokens, got {size}"
        )
    always = {int(i) for i in tokenizer.all_special_ids if 0 <= int(i) < vocab_size}
    if tokenizer.eos_token_id is not None:
        always.add(int(tokenizer.eos_token_id))
    if size < len(always):
        raise ArchsearchError(
            f"a draft vocabulary of {size} tokens cannot hold the {len(always)} special tokens;"
            " choose more"
        )
    special = np.zeros(vocab_size, dtype=bool)
    special[sorted(always)] = True
    # lexsort: the last key is the first criterion.
    order = np.lexsort((np.arange(vocab_size), -frequencies.text, -frequencies.written, ~special))
    kept = np.sort(order[:size])
    total = int(frequencies.written.sum())
    coverage = float(frequencies.written[kept].sum() / total) if total else 0.0
    return DraftVocabulary(tuple(int(i) for i in kept), coverage)
