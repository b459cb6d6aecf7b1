"""The tokens that a trimmed head keeps, chosen once and kept with the drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from archsearch.files import read_json, write_json
from archsearch.text.cache import TextCache
from archsearch.text.vocabulary import DraftVocabulary, choose_draft_vocab, token_frequencies

FILE: Final = "vocabulary.json"


def stored_vocabulary(
    folder: Path, rows: int, caches: Sequence[TextCache], tokenizer: Any
) -> DraftVocabulary:
    """The `rows` tokens that the drafter in `folder` keeps, by their frequency in `caches` when it
    was first asked for: texts that have grown since would choose others, and a checkpoint would not
    fit."""
    stored = folder / FILE
    if stored.exists():
        return DraftVocabulary(**read_json(stored, "draft vocabulary"))
    vocabulary = choose_draft_vocab(token_frequencies(*caches), rows, tokenizer)
    write_json(stored, asdict(vocabulary))
    return vocabulary
