"""Targets that the table knows: drafts of theirs, and of their family's other sizes, condition the
prediction for a new draft.

A target is known by its shape (fine-tunes share it) where the catalogue has that shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final

import numpy as np

from archsearch.acceptance.published import (
    Levels,
    Lot,
    Query,
    Spread,
    coefficients_for,
    design,
    lot_of,
)
from archsearch.acceptance.table import OWN_LOT, OWN_STUDY, Published, load_published, own_drafts
from archsearch.acceptance.terms import load_fit, lot_term
from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture

# How much of what the published drafts of a target show in common a next one of their kind, on a
# user's text and engine, has too. Assumed.
LOT_SHARED: Final = 0.7


@dataclass(frozen=True)
class KnownTarget:
    """`mean` and `covariance` over COEFFICIENTS for new drafts of one target; `words`: what they
    rest on."""

    mean: np.ndarray
    covariance: np.ndarray
    words: str


@lru_cache(maxsize=16)
def known_target(target: Architecture) -> KnownTarget | None:
    """What the table says of drafts for `target`; None where it has neither the target nor its
    family."""
    key, family = _name_of(target)
    # rows of the target itself, and of other sizes of its family
    rows = [row for row in load_published() if row.level and row.target_key == key] if key else []
    relatives = (
        [row for row in load_published() if row.level and row.target_family == family]
        if family
        else []
    )
    own = [anchor for anchor in own_drafts() if anchor.target == key]
    if not (relatives or own):
        return None
    named = _lots(rows) | ({"lot target": (Lot(OWN_STUDY, OWN_LOT),)} if own else {})
    mean, covariance = coefficients_for(
        _levels(), Query(family, key, named, OWN_STUDY if own else "")
    )
    return KnownTarget(mean, covariance, _words(rows, relatives))


@cache
def _levels() -> Levels:
    fit = load_fit()
    return Levels(design(drifts=fit.drift), Spread(**fit.spread))


def _name_of(target: Architecture) -> tuple[str, str]:
    """(the table's key of a target's shape, its family); "" for what the table does not have."""
    alike = catalogue.alike(target)
    keys = {row.target_key for row in load_published() if row.level} | {
        anchor.target for anchor in own_drafts()
    }
    key = next((entry.name for entry in alike if entry.name in keys), "")
    families = {row.target_family for row in load_published() if row.level}
    return key, next((entry.family for entry in alike if entry.family in families), "")


def _lots(rows: list[Published]) -> dict[str, tuple[Lot, ...]]:
    """By LOT_TERMS the lots of the target that a new draft is like, all alike. A draft that is yet
    to be made, or somebody else's, is like none."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        found.setdefault(lot_term(row.family, row.training), {})[lot_of(row)] = row.study
    if "lot eagle1" in found:  # the same lab's next head would be measured as that one was
        found.setdefault("lot eagle3", found["lot eagle1"])
    return {
        term: tuple(Lot(study, lot, LOT_SHARED / len(lots)) for lot, study in lots.items())
        for term, lots in found.items()
        if term not in ("lot target", "lot other")
    }


def _words(rows: list[Published], relatives: list[Published]) -> str:
    """One line for people: how many published drafts it rests on."""
    drafts = {(row.study, row.draft, row.family) for row in rows}
    names = sorted({row.target for row in rows})
    others = {row.target for row in relatives} - set(names)
    parts = []
    if drafts:
        parts.append(
            f"{len(drafts)} published draft{'s' if len(drafts) > 1 else ''} of {', '.join(names)}"
        )
    if others:
        parts.append(f"those of {len(others)} other targets of its family")
    return " and ".join(parts)
