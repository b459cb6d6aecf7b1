"""Heads on hidden states that people publish (rows of `published_drafters`), and the dimensions
that are usual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.heads import LIKE_EAGLE3, FeatureHead, HeadKind
from archsearch.architecture.published_drafters import PublishedDrafter, published_for

DRAFT_VOCABULARY: Final = (
    32_000  # rows of 24 of 27 public EAGLE-3 configurations (SpecForge, configs/*.json)
)
AUXILIARY_STATES: Final = 3  # EAGLE-3: a low, a middle and a high layer (arXiv 2503.01840)
PARALLEL_LAYERS: Final = 4  # P-EAGLE (SpecForge, configs/*.json: the one of its kind)
# DFlash on Qwen3-4B and 8B, and as many hidden states (SpecForge, configs/qwen3-4b-dflash.json)
BLOCK_LAYERS: Final = 5


@dataclass(frozen=True, slots=True)
class PublishedHead:
    """A head for the catalogue's `target`. `hub_id`: None for a shape of the usual kind that nobody
    published."""

    target: str
    kind: HeadKind
    hub_id: str | None
    head: FeatureHead
    source: str


def head_for(target: str, kind: HeadKind) -> PublishedHead:
    """The published head of a target of the catalogue, or `usual_head` of it where none is known
    here.

    Raises: ArchsearchError where the catalogue has no such target.
    """
    entry = catalogue.load(target)
    row = next(
        (row for row in published_for(entry.name, entry.architecture) if row.family == kind), None
    )
    if row is None:
        usual = usual_head(entry.architecture, kind)
        return PublishedHead(
            entry.name,
            kind,
            None,
            usual,
            f"usual shape of kind {kind} for this target; none published",
        )
    return PublishedHead(
        entry.name, kind, row.hub_id, head_of(row, entry.architecture, kind), row.source
    )


def head_of(row: PublishedDrafter, target: Architecture, kind: HeadKind) -> FeatureHead:
    """The head of a row of the table for `target`: the usual one but for what the row says."""
    usual = usual_head(target, kind)
    fields = {name: value for name, value in row.changes if hasattr(usual.decoder, name)}
    return FeatureHead(
        kind,
        usual.decoder.replace(**fields),
        usual.target_hidden_size,
        usual.states,
        row.own_embedding,
    )


def usual_head(target: Architecture, kind: HeadKind) -> FeatureHead:
    """A head of the dimensions that are usual for `target`: its own width, FFN and heads.

    `eagle` and `eagle3` are one plain Llama layer whatever the target is (speculators and SpecForge
    train them so), `peagle` four of them, `mtp` is a layer of the target's own type, `dflash` five
    layers with normed queries and keys.
    """
    rows = min(DRAFT_VOCABULARY, target.vocab_size) if kind in LIKE_EAGLE3 else None
    decoder = (target.in_format("") if kind == "mtp" else target.dense()).replace(
        first_dense_layers=0,
        num_hidden_layers={"dflash": BLOCK_LAYERS, "peagle": PARALLEL_LAYERS}.get(kind, 1),
        draft_vocab_size=rows,
        tie_word_embeddings=False,
        window_pattern="L",
        sliding_window=None,
    )
    if kind != "mtp":
        decoder = decoder.replace(attention_bias=False, qk_norm=kind == "dflash")
    states = {
        "eagle": 1,
        "eagle3": AUXILIARY_STATES,
        "peagle": AUXILIARY_STATES,
        "mtp": 1,
        "dflash": BLOCK_LAYERS,
    }[kind]
    return FeatureHead(kind, decoder, target.hidden_size, states)
