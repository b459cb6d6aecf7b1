"""Folders from which the libraries that train drafters on GPUs make the drafter of an answer."""

from archsearch.recipes.initial import initial_weights

__all__ = ["initial_weights"]
