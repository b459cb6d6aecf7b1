"""Which files make a model folder: weights, tokenizer, a draft's own and its gamma. Nothing here
loads torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from archsearch.errors import ArchsearchError

WEIGHTS_FILE: Final = "model.safetensors"
"""A draft's weights. Written last: a draft folder that holds them is whole."""
WEIGHT_FILES: Final = (
    WEIGHTS_FILE,
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Any of these is weights, of a target or of a draft from elsewhere."""
DRAFT_VOCAB_FILE: Final = "draft_vocab.json"
DRAFT_FILES: Final = ("config.json", WEIGHTS_FILE, DRAFT_VOCAB_FILE)
TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Any of these is a tokenizer; the other files of TOKENIZER_FILES only describe one."""
TOKENIZER_FILES: Final = (
    *TOKENIZERS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
)
"""What is copied with a tokenizer."""


def has_weights(folder: Path) -> bool:
    """Whether `folder` holds weights that can be loaded."""
    return any((folder / name).is_file() for name in WEIGHT_FILES)


def has_tokenizer(folder: Path) -> bool:
    """Whether `folder` holds a tokenizer of its own."""
    return any((folder / name).is_file() for name in TOKENIZERS)


def gamma_settings(gamma: int, least: float = 0.0) -> dict[str, Any]:
    """generation_config fields of a draft that make transformers draft `gamma` tokens a round,
    fewer where a token has a probability below `least`.

    Raises ArchsearchError for a gamma below 1 and a probability that is none.
    """
    if gamma < 1 or not 0.0 <= least < 1.0:
        raise ArchsearchError(
            f"gamma must be at least 1 and the least probability from 0 to below 1, got {gamma} and"
            f" {least:g}"
        )
    return {
        "num_assistant_tokens": gamma,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": least,
    }
