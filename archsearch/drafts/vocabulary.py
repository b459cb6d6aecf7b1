"""The tokens that a trimmed head keeps, chosen once and kept with the drafter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from archsearch.records import load, save
from archsearch.text.cache import TextCache
from archsearch.text.vocabulary import DraftVocabulary, choose_draft_vocab, token_frequencies

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE: Final = "vocabulary.json"


def stored_vocabulary(
    folder: Path, rows: int, caches: Sequence[TextCache], tokenizer: PreTrainedTokenizerBase
) -> DraftVocabulary:
    """The `rows` tokens that the drafter in `folder` keeps, by their frequency in `caches` when it
    was first asked for: texts that have grown since would choose others, and a checkpoint would not
    fit."""
    if (stored := load(folder / FILE, "draft vocabulary", DraftVocabulary)) is not None:
        return stored
    vocabulary = choose_draft_vocab(token_frequencies(*caches), rows, tokenizer)
    save(folder / FILE, vocabulary)
    return vocabulary
