"""The published head of a target of the catalogue, for tests that hold heads to their cards."""

from __future__ import annotations

from dataclasses import dataclass

from archsearch.architecture import catalogue
from archsearch.architecture.heads import FeatureHead, HeadKind
from archsearch.architecture.published_drafters import head_of, published_for, usual_head


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
