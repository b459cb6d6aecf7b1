"""The published head of a target of the catalogue, for tests that hold heads to their cards."""

from __future__ import annotations

from dataclasses import dataclass

from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import PassOps
from archsearch.architecture.published_drafters import published_for
from archsearch.drafters.drafter import RoundRows
from archsearch.drafters.heads import FeatureDrafter
from archsearch.drafters.registry import family


@dataclass(frozen=True, slots=True)
class PublishedHead:
    """A head for the catalogue's `target`. `hub_id`: None for a shape of the usual kind that nobody
    published."""

    target: str
    hub_id: str | None
    head: FeatureDrafter
    source: str


def usual_head(target: Architecture, kind: str) -> FeatureDrafter:
    made = family(kind)
    assert issubclass(made, FeatureDrafter)
    return made.usual(target)


def head_for(target: str, kind: str) -> PublishedHead:
    """The published head of a target of the catalogue, or the usual one where none is known here.

    Raises: ArchsearchError where the catalogue has no such target.
    """
    entry = catalogue.load(target)
    usual = usual_head(entry.architecture, kind)
    row = next(
        (row for row in published_for(entry.name, entry.architecture) if row.family == kind), None
    )
    if row is None:
        return PublishedHead(
            entry.name,
            None,
            usual,
            f"usual shape of kind {kind} for this target; none published",
        )
    head = type(usual).published(row, entry.architecture)
    return PublishedHead(entry.name, row.hub_id, head, row.source)


def first_pass(head: FeatureDrafter, batch: int, gamma: int, context: int, **more: int) -> PassOps:
    """The pass with which the head begins a round of `gamma`."""
    return head.first_pass(RoundRows(batch, context, gamma, **more))


def later_step(head: FeatureDrafter, batch: int, context: int, **more: int) -> PassOps:
    """A further pass of a chain."""
    step = head.plan(RoundRows(batch, context, 2, **more)).step
    assert step is not None
    return step
