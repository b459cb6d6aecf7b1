"""Which files make a model folder: weights, tokenizer, a draft's own and its gamma; and which
family of drafters it holds. Nothing here loads torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from archsearch.architecture.hf_fields import Config
from archsearch.drafters.read import layer_ids
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


def is_gguf(path: Path) -> bool:
    """Whether `path` is a GGUF file, by its name."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def has_tokenizer(folder: Path) -> bool:
    """Whether `folder` holds a tokenizer of its own."""
    return any((folder / name).is_file() for name in TOKENIZERS)


def gamma_settings(gamma: int, least: float = 0.0) -> dict[str, object]:
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


HeadFamily = Literal["eagle3", "medusa", "peagle"]
HEAD_FAMILIES: Final[tuple[HeadFamily, ...]] = ("eagle3", "medusa", "peagle")
"""Heads that are trained here."""
UNTRAINED: Final = {
    "ngram": "n-gram lookup needs no training: archsearch confirm RUN --family ngram",
    "suffix": "suffix decoding needs no training",
    "early_exit": "an early exit uses the target's own layers; nothing is trained",
    "mtp": "MTP layers come with the target's own checkpoint; they cannot be trained here",
}


def head_family_of(name: str) -> HeadFamily:
    """The family called `name`, where heads of it can be trained here; else ArchsearchError with
    the reason."""
    if name in HEAD_FAMILIES:
        return name
    reason = UNTRAINED.get(name, f"drafters of family {name!r} cannot be trained here")
    raise ArchsearchError(f"{reason}; --family takes independent, {', '.join(HEAD_FAMILIES)}")


def aux_layers(config: Config, folder: Path) -> tuple[int, ...]:
    """The layers whose inputs an EAGLE-3 or P-EAGLE head reads. Raises ArchsearchError where its
    config does not say."""
    ids = layer_ids(config)
    if not ids:
        raise ArchsearchError(
            f"{folder / 'config.json'} does not name eagle_aux_hidden_state_layer_ids; engines"
            " would guess, and a wrong guess accepts next to nothing: write them"
        )
    return ids
