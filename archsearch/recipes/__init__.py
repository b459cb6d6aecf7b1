"""Folders from which the libraries that train drafters on GPUs make the drafter of an answer."""

from __future__ import annotations

from archsearch.recipes.folder import write_recipe
from archsearch.recipes.initial import initial_weights
from archsearch.recipes.plan import LIBRARIES, Recipe, Stage, choose_library, share_gpus

__all__ = [
    "LIBRARIES",
    "Recipe",
    "Stage",
    "choose_library",
    "initial_weights",
    "share_gpus",
    "write_recipe",
]
