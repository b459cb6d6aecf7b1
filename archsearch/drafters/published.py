"""Published drafters of a target, as values: what exists already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.published_drafters import PublishedDrafter, published_as, published_for
from archsearch.drafters.drafter import Drafter
from archsearch.drafters.registry import family
from archsearch.errors import ArchsearchError, InvalidShapeError


@dataclass(frozen=True)
class Found:
    """A published drafter and its row of the table."""

    drafter: Drafter
    row: PublishedDrafter


def found_for(name: str, target: Architecture, families: Sequence[str]) -> list[Found]:
    """The published drafters of a target (`name`: as it was asked for) of some families, in the
    table's order; of those that run the same the first one."""
    found: dict[Drafter, Found] = {}
    for row in published_for(name, target):
        if row.family not in families:
            continue
        try:
            drafter = family(row.family).published(row, target)
            drafter.check(target)
        except InvalidShapeError:  # another vocabulary: no engine takes it as it is
            continue
        found.setdefault(drafter, Found(drafter, row))
    return list(found.values())


def found_as(hub_id: str, name: str, target: Architecture, kind: str = "") -> Found | None:
    """The published drafter called `hub_id` for a target, of the family `kind` where one is said;
    None where the table has no such row. Raises ArchsearchError where it was made for others."""
    rows = published_as(hub_id)
    if not rows:
        return None
    if kind and not any(row.family == kind for row in rows):
        raise ArchsearchError(f"{hub_id} is a drafter of the family {rows[0].family}, not {kind}")
    rows = tuple(row for row in rows if kind in ("", row.family))
    mine = [row for row in rows if row in published_for(name, target)]
    if not mine:
        made_for = ", ".join(dict.fromkeys(target for row in rows for target in row.targets))
        raise ArchsearchError(
            f"{hub_id} was made for {made_for}, not for {name}; choose a drafter of this target"
        )
    return Found(family(mine[0].family).published(mine[0], target), mine[0])
