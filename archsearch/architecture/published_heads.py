"""Heads on hidden states that people publish, by target: their dimensions, and where those come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.heads import LIKE_EAGLE3, FeatureHead, HeadKind

DRAFT_VOCABULARY: Final = 32_000  # rows of 24 of 27 public EAGLE-3 configurations (SpecForge, configs/*.json)
AUXILIARY_STATES: Final = 3  # EAGLE-3: a low, a middle and a high layer (arXiv 2503.01840)
PARALLEL_LAYERS: Final = 4  # P-EAGLE (SpecForge, configs/*.json: the one of its kind)
BLOCK_LAYERS: Final = 5  # DFlash on Qwen3-4B and 8B, and as many hidden states (SpecForge, configs/qwen3-4b-dflash.json)


@dataclass(frozen=True, slots=True)
class PublishedHead:
    """A head for the catalogue's `target`. `hub_id`: None for a shape of the usual kind that nobody published."""

    target: str
    kind: HeadKind
    hub_id: str | None
    head: FeatureHead
    source: str


@dataclass(frozen=True, slots=True)
class _Row:
    """What differs from `usual_head` in a published head."""

    hub_id: str
    source: str
    changes: dict[str, Any] = field(default_factory=dict)
    own_embedding: bool = False


_EAGLE1 = "one layer of the target's dimensions (SafeAILab/EAGLE, eagle/train/*.json; parameters in its README)"
_PUBLISHED: Final[dict[tuple[str, HeadKind], _Row]] = {
    ("vicuna-7b", "eagle"): _Row("yuhuili/EAGLE-Vicuna-7B-v1.3", _EAGLE1),
    ("vicuna-13b", "eagle"): _Row("yuhuili/EAGLE-Vicuna-13B-v1.3", _EAGLE1),
    ("vicuna-33b", "eagle"): _Row(
        "yuhuili/EAGLE-Vicuna-33B-v1.3",
        "13 KV heads where the target has 52 (SafeAILab/EAGLE, eagle/train/vicuna_33B_config.json)",
        {"num_key_value_heads": 13},
    ),
    ("llama-2-7b", "eagle"): _Row("yuhuili/EAGLE-llama2-chat-7B", _EAGLE1),
    ("llama-2-13b", "eagle"): _Row("yuhuili/EAGLE-llama2-chat-13B", _EAGLE1),
    ("llama-2-70b", "eagle"): _Row("yuhuili/EAGLE-llama2-chat-70B", _EAGLE1),
    ("llama-3-8b", "eagle"): _Row("yuhuili/EAGLE-LLaMA3-Instruct-8B", _EAGLE1),
    ("llama-3.1-8b", "eagle"): _Row("yuhuili/EAGLE-LLaMA3.1-Instruct-8B", _EAGLE1),
    ("vicuna-13b", "eagle3"): _Row(
        "yuhuili/EAGLE3-Vicuna1.3-13B", "one layer of the target's dimensions, whole vocabulary of 32,000 (its config.json)"
    ),
    ("llama-3.1-8b", "eagle3"): _Row(
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "SafeAILab/EAGLE, eagle/traineagle3/config.json: the target's dimensions"
    ),
    ("llama-3.3-70b", "eagle3"): _Row(
        "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
        "narrower than its target (SGLang PR 4716), dimensions of its config.json; with its own embedding they make the "
        "3.15 GB of the published file",
        {"hidden_size": 6144, "intermediate_size": 16384, "num_attention_heads": 48, "num_key_value_heads": 8},
        own_embedding=True,
    ),
    ("qwen3-32b", "eagle3"): _Row(
        "RedHatAI/Qwen3-32B-speculator.eagle3",
        "the target's dimensions, 64 heads of 128 (speculators PR 134); with a copy of the embedding they make the "
        "3,121,274,856 bytes of the published file",
    ),
    ("qwen3-4b", "dflash"): _Row("z-lab/Qwen3-4B-DFlash-b16", "SpecForge, configs/qwen3-4b-dflash.json"),
    ("qwen3-8b", "dflash"): _Row("z-lab/Qwen3-8B-DFlash-b16", "SpecForge, configs/qwen3-8b-dflash.json"),
}


def head_for(target: str, kind: HeadKind) -> PublishedHead:
    """The published head of a target of the catalogue, or `usual_head` of it where none is known here.

    Raises: ArchsearchError where the catalogue has no such target.
    """
    entry = catalogue.load(target)
    usual = usual_head(entry.architecture, kind)
    row = _PUBLISHED.get((entry.name, kind))
    if row is None:
        return PublishedHead(entry.name, kind, None, usual, f"usual shape of kind {kind} for this target; none published")
    decoder = usual.decoder.replace(**row.changes)
    head = FeatureHead(kind, decoder, usual.target_hidden_size, usual.states, row.own_embedding)
    return PublishedHead(entry.name, kind, row.hub_id, head, row.source)


def usual_head(target: Architecture, kind: HeadKind) -> FeatureHead:
    """A head of the dimensions that are usual for `target`: its own width, FFN and heads.

    `eagle` and `eagle3` are one plain Llama layer whatever the target is (speculators and SpecForge train them so), `peagle` four
    of them, `mtp` is a layer of the target's own type, `dflash` five layers with normed queries and keys.
    """
    rows = min(DRAFT_VOCABULARY, target.vocab_size) if kind in LIKE_EAGLE3 else None
    decoder = (target if kind == "mtp" else target.dense()).replace(
        first_dense_layers=0,
        num_hidden_layers={"dflash": BLOCK_LAYERS, "peagle": PARALLEL_LAYERS}.get(kind, 1),
        draft_vocab_size=rows,
        tie_word_embeddings=False,
        window_pattern="L",
        sliding_window=None,
    )
    if kind != "mtp":
        decoder = decoder.replace(attention_bias=False, qk_norm=kind == "dflash")
    states = {"eagle": 1, "eagle3": AUXILIARY_STATES, "peagle": AUXILIARY_STATES, "mtp": 1, "dflash": BLOCK_LAYERS}[kind]
    return FeatureHead(kind, decoder, target.hidden_size, states)
