"""Targets that the table knows: drafts of theirs, and of their family's other sizes, condition what is believed of a new draft.

A target is known by its shape (fine-tunes share it) where the catalogue has that shape. Published drafts that were made for it
also say how a new one is taken to be trained: as they were, with their study's and lot's level.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from archsearch.acceptance.fitted import load_fit
from archsearch.acceptance.published import Levels, Query, Spread, coefficients_for, design, lot_of
from archsearch.acceptance.table import OWN_LOT, OWN_STUDY, Published, load_published, own_drafts
from archsearch.acceptance.terms import lot_term
from archsearch.architecture.architecture import Architecture


@dataclass(frozen=True)
class KnownTarget:
    """`mean` and `covariance` over COEFFICIENTS for new drafts of one target; `made`: (training, tokens) of its published drafts,
    None where none was made for it; `words`: what it rests on."""

    mean: np.ndarray
    covariance: np.ndarray
    made: tuple[str, float | None] | None
    words: str


@lru_cache(maxsize=16)
def known_target(target: Architecture) -> KnownTarget | None:
    """What the table says of drafts for `target`; None where it has neither the target nor its family."""
    key, family = _name_of(target)
    rows = [row for row in load_published() if row.level and row.target_key == key] if key else []
    relatives = [row for row in load_published() if row.level and row.target_family == family] if family else []
    own = [anchor for anchor in own_drafts() if anchor.target == key]
    if not (relatives or own):
        return None
    lots = _lots(rows)
    named = {lot_term(row.family, row.training): (row.study, lot_of(row)) for row in lots.values()}
    if own:
        named["lot target"] = (OWN_STUDY, OWN_LOT)
    made = lots.get("made")
    study = OWN_STUDY if own else made.study if made is not None else ""
    mean, covariance = coefficients_for(_levels(), Query(family, key, named, study))
    return KnownTarget(
        mean, covariance, None if made is None else (made.training, made.trained_tokens), _words(rows, relatives, made)
    )


@cache
def _levels() -> Levels:
    fit = load_fit()
    return Levels(design(drifts=fit.drift), Spread(**fit.spread))


def _name_of(target: Architecture) -> tuple[str, str]:
    """(the table's key of a target's shape, its family); "" for what the table does not have."""
    from archsearch.architecture import catalogue

    alike = [entry for entry in catalogue.entries() if _same(entry.architecture, target)]
    keys = {row.target_key for row in load_published() if row.level} | {anchor.target for anchor in own_drafts()}
    key = next((entry.name for entry in alike if entry.name in keys), "")
    families = {row.target_family for row in load_published() if row.level}
    return key, next((entry.family for entry in alike if entry.family in families), "")


def _same(first: Architecture, second: Architecture) -> bool:
    """Whether two targets have the same weights in shape: what a fine-tune does not change."""
    fields = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return all(getattr(first, name) == getattr(second, name) for name in fields)


def _lots(rows: list[Published]) -> dict[str, Published]:
    """The lot with the most rows of each kind and training, by a row of it; `made`: that of independent drafts made for the
    target, on its text or pruned from its family with so many tokens (off-the-shelf drafts have none of their own)."""
    sizes = Counter(lot_of(row) for row in rows)
    found: dict[str, Published] = {}
    for row in sorted(rows, key=lambda row: -sizes[lot_of(row)]):
        found.setdefault(lot_term(row.family, row.training), row)
    independent = [row for row in found.values() if row.family == "independent" and row.training != "other"]
    made = [row for row in independent if row.training == "target" or row.trained_tokens]
    return found | ({"made": made[0]} if made else {})


def _words(rows: list[Published], relatives: list[Published], made: Published | None) -> str:
    """One line for people: how many published drafts it rests on, and which of them a new one is taken to be like."""
    drafts = {(row.study, row.draft, row.family) for row in rows}
    names = sorted({row.target for row in rows})
    others = {row.target for row in relatives} - set(names)
    parts = []
    if drafts:
        parts.append(f"{len(drafts)} published draft{'s' if len(drafts) > 1 else ''} of {', '.join(names)}")
    if others:
        parts.append(f"those of {len(others)} other targets of its family")
    text = " and ".join(parts)
    if made is not None:
        alike = len({row.draft for row in rows if lot_of(row) == lot_of(made)})
        ones = f"{alike} independent ones" if alike > 1 else "independent one"
        text += f"; a new draft is taken to be made as the {ones} of {made.study}"
    return text
