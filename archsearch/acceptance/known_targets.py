"""Targets that the table of published acceptance knows: drafts of theirs, and of their family's
other sizes, condition the prediction for a new draft.

A target is known by its shape (fine-tunes share it) where the catalogue has that shape.
known_targets.npz holds what `benchmarks/acceptance_fit.py` made of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

import numpy as np

from archsearch.acceptance.terms import symmetric
from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture

KNOWN_FILE: Final = Path(__file__).parent / "known_targets.npz"


@dataclass(frozen=True)
class KnownTarget:
    """`mean` and `covariance` over COEFFICIENTS for new drafts of one target; `words`: what they
    rest on."""

    mean: np.ndarray
    covariance: np.ndarray
    words: str


@cache
def known_targets() -> dict[str, KnownTarget]:
    """By name in the catalogue."""
    with np.load(KNOWN_FILE, allow_pickle=False) as data:
        made = [
            KnownTarget(mean, symmetric(upper), str(words))
            for mean, upper, words in zip(data["mean"], data["upper"], data["words"], strict=True)
        ]
        return {str(name): made[row] for name, row in zip(data["names"], data["rows"], strict=True)}


@lru_cache(maxsize=16)
def known_target(target: Architecture) -> KnownTarget | None:
    """What the table says of drafts for `target`; None where it has neither the target nor its
    family."""
    named = map(known_targets().get, (entry.name for entry in catalogue.alike(target)))
    return next(filter(None, named), None)
