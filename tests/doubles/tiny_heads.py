"""A tiny random target whose texts lie in a folder, with auxiliary states, and heads for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import from_hf_config
from archsearch.text.auxiliary import auxiliary_states
from archsearch.text.cache import (
    Fingerprint,
    TextCache,
    open_folder,
    save_shard,
    target_fingerprint,
)
from archsearch.training.heads.eagle3 import Eagle3Head, initialise_eagle3
from archsearch.training.heads.folder import eagle3_config
from tests.doubles.tiny_text import make_cache

VOCAB, HIDDEN, LAYERS = 48, 32, 6
KEPT = tuple(range(0, VOCAB, 2))
AUX = (1, 3, 4)


def make_deep_target(seed: int = 0) -> Any:
    """A random target deep enough for three auxiliary layers; its text repeats itself, so there is
    something to learn."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=None,
            eos_token_id=None,
            initializer_range=0.15,
            max_position_embeddings=128,
        )
    ).eval()


def write_texts(folder: Path, target: Any, count: int = 40) -> TextCache:
    """Greedy texts of `target`, in two shards of a cache."""
    sequences = make_cache(count=count, target=target).sequences
    fingerprint = Fingerprint(target_fingerprint(target), "p", {"kind": "written"})
    open_folder(folder, fingerprint, target.lm_head.weight)
    half = count // 2
    for number, part in enumerate((sequences[:half], sequences[half:])):
        save_shard(folder / f"shard-{number:05d}.safetensors", part, True)
    return TextCache.load(folder)


def make_eagle3(
    target: Any,
    layers: int = 1,
    kept: tuple[int, ...] = KEPT,
    aux: tuple[int, ...] = AUX,
    mask: int | None = None,
) -> Eagle3Head:
    """`mask`: the token of a P-EAGLE head's further rows."""
    arch = from_hf_config(target.config.to_dict())
    decoder: Architecture = arch.replace(
        num_hidden_layers=layers, draft_vocab_size=len(kept), tie_word_embeddings=False
    )
    return initialise_eagle3(target, eagle3_config(decoder, target), aux, kept, mask_token_id=mask)


def make_auxiliary(target: Any, cache: TextCache, aux: tuple[int, ...] = AUX) -> TextCache:
    return auxiliary_states(target, cache, aux)
