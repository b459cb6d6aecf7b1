"""The families by name (docs/architecture.md, "Add a family of drafters"; a space in
search_spaces/ besides), and the published drafters of a target, as values."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_fields import short
from archsearch.architecture.published_drafters import PublishedDrafter, published_as, published_for
from archsearch.drafters.drafter import FAMILY_NAMES, Drafter
from archsearch.drafters.heads import DFlash, Eagle, Eagle3, Medusa, Mtp, PEagle
from archsearch.drafters.lookup import NGram, Suffix
from archsearch.drafters.models import Chain, EarlyExit, Independent, Pard
from archsearch.errors import ArchsearchError, InvalidShapeError

_CLASSES: Final = (
    Independent,
    Eagle3,
    Eagle,
    Mtp,
    Medusa,
    NGram,
    Suffix,
    PEagle,
    Pard,
    DFlash,
    EarlyExit,
    Chain,
)
FAMILIES: Final[dict[str, type[Drafter]]] = {each.family: each for each in _CLASSES}
ALIASES: Final = {
    "eagle1": "eagle",
    "eagle-1": "eagle",
    "eagle-3": "eagle3",
    "n-gram": "ngram",
    "p-eagle": "peagle",
}


def family(name: str) -> type[Drafter]:
    """The class of the family `name`. Raises ArchsearchError, with the names there are, for an
    unknown one."""
    known = ALIASES.get(name.lower(), name.lower().replace("-", "_"))
    if known not in FAMILIES:
        close = difflib.get_close_matches(known, FAMILY_NAMES, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ArchsearchError(
            f"unknown family of drafters {name!r}{hint}; use one of {', '.join(FAMILY_NAMES)}"
        )
    return FAMILIES[known]


def is_family(name: str) -> bool:
    """Whether `name` names a family."""
    return ALIASES.get(name.lower(), name.lower().replace("-", "_")) in FAMILIES


def read_drafter(architecture: Architecture, data: Mapping[str, object] | None) -> Drafter:
    """What `Drafter.to_dict` wrote; None (files of versions that knew no other): an independent
    draft. Raises ArchsearchError for what is none."""
    if data is None:
        return Independent(architecture)
    if not isinstance(data, Mapping):
        raise InvalidShapeError(f"a drafter must be an object with its family, got {short(data)}")
    return family(str(data["family"])).from_fields(architecture, data)


def as_drafter(draft: Architecture | Drafter) -> Drafter:
    """A drafter; a bare shape is an independent draft's."""
    return Independent(draft) if isinstance(draft, Architecture) else draft


@dataclass(frozen=True)
class Found:
    """A published drafter and its row of the table."""

    drafter: Drafter
    row: PublishedDrafter


def short_of(drafter: Drafter, target: Architecture, context_len: int) -> bool:
    """Whether its positions end within a context that the target's reach. Beyond them vLLM skips
    it, verifies tokens that nobody drafted (issue 58080) or stops (48894, 57941)."""
    own = drafter.architecture.max_position_embeddings
    return own < min(context_len, target.max_position_embeddings)


def found_for(
    name: str, target: Architecture, families: Sequence[str], context_len: int = 1
) -> list[Found]:
    """The published drafters of a target (`name`: as it was asked for) of some families that reach
    so far, in the table's order; of those that run the same the first one."""
    found: dict[Drafter, Found] = {}
    for row in published_for(name, target):
        if row.family not in families:
            continue
        try:
            drafter = family(row.family).published(row, target)
            drafter.check(target)
        except InvalidShapeError:  # another vocabulary: no engine takes it as it is
            continue
        if not short_of(drafter, target, context_len):
            reach = {"max_position_embeddings": target.max_position_embeddings}
            runs = replace(drafter, architecture=drafter.architecture.replace(**reach))
            found.setdefault(runs, Found(drafter, row))
    return list(found.values())


def found_as(hub_id: str, name: str, target: Architecture, kind: str = "") -> Found | None:
    """The published drafter called `hub_id` for a target, of the family `kind` where one is said;
    None where the table has no such row. Raises ArchsearchError where it was made for others."""
    if not (rows := published_as(hub_id)):
        return None
    if not (asked := [row for row in rows if kind in ("", row.family)]):
        raise ArchsearchError(f"{hub_id} is a drafter of the family {rows[0].family}, not {kind}")
    if not (mine := [row for row in asked if row in published_for(name, target)]):
        made_for = ", ".join(dict.fromkeys(target for row in asked for target in row.targets))
        raise ArchsearchError(
            f"{hub_id} was made for {made_for}, not for {name}; choose a drafter of this target"
        )
    return Found(family(mine[0].family).published(mine[0], target), mine[0])
