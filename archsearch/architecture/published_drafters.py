"""Drafts and heads that anybody can download, by target: published_drafters.csv, each row with
its source; and the dimensions of heads that are usual where nobody published one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.heads import LIKE_EAGLE3, FeatureHead, HeadKind
from archsearch.errors import ArchsearchError
from archsearch.files import csv_rows

TABLE: Final = Path(__file__).parent / "published_drafters.csv"


@dataclass(frozen=True, slots=True)
class PublishedDrafter:
    """A row of the table; columns are explained at the head of the file. `changes`: (name, value)
    of each."""

    family: str
    hub_id: str
    targets: tuple[str, ...]
    made_for: str
    shape: str
    changes: tuple[tuple[str, int], ...]
    own_embedding: bool
    dimensions: str
    made: str
    source: str


@cache
def published_drafters(path: Path = TABLE) -> tuple[PublishedDrafter, ...]:
    """All rows. Raises ArchsearchError naming the row that is broken, or what it names that the
    catalogue lacks."""
    known = set(catalogue.stems())
    found = []
    for row in csv_rows(path):
        try:
            parts = [part.partition("=") for part in row["changes"].split()]
            read: dict[str, Any] = {
                **row,
                "targets": tuple(row["targets"].split()),
                "changes": tuple((name, int(value)) for name, _, value in parts),
                "own_embedding": row["own_embedding"] == "yes",
            }
            item = PublishedDrafter(**read)
        except (KeyError, ValueError, AttributeError, TypeError) as error:
            hub_id = row.get("hub_id")
            raise ArchsearchError(f"{path}: row {hub_id!r} is broken: {error}") from error
        unknown = [name for name in (*item.targets, item.shape) if name and name not in known]
        if unknown or not (item.family and item.hub_id and item.targets and item.source):
            raise ArchsearchError(
                f"{path}: row {item.hub_id!r} lacks a column, or names {unknown}, not in the"
                " catalogue"
            )
        found.append(item)
    return tuple(found)


def published_for(name: str, target: Architecture) -> tuple[PublishedDrafter, ...]:
    """The rows for a target: those that name it where `name` is a catalogue entry's, else all of
    targets of its shape (a folder, a fine-tune)."""
    known = set(catalogue.stems())
    names = {name.lower()} & known or {entry.name for entry in catalogue.alike(target)}
    return tuple(row for row in published_drafters() if names & set(row.targets))


def published_as(hub_id: str) -> tuple[PublishedDrafter, ...]:
    """The rows of a hub id (case does not matter): one for each family that it drafts as."""
    return tuple(row for row in published_drafters() if row.hub_id.lower() == hub_id.lower())


def made_for(hub_id: str) -> str:
    """The checkpoint that a drafter was made for where it is not the catalogue's; "" else."""
    return next((row.made_for for row in published_as(hub_id)), "")


# rows of 24 of 27 public EAGLE-3 configurations (SpecForge, configs/*.json)
DRAFT_VOCABULARY: Final = 32_000
AUXILIARY_STATES: Final = 3  # EAGLE-3: a low, a middle and a high layer (arXiv 2503.01840)
PARALLEL_LAYERS: Final = 4  # P-EAGLE (SpecForge, configs/*.json: the one of its kind)
# DFlash on Qwen3-4B and 8B, and as many hidden states (SpecForge, configs/qwen3-4b-dflash.json)
BLOCK_LAYERS: Final = 5


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


@lru_cache(maxsize=64)  # asked for every shape of a search
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
