"""Drafts and heads that anybody can download, by target: published_drafters.csv, each row with
its source."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
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
