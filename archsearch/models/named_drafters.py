"""Drafters by name: a family (`eagle3`), a head that somebody published (`eagle3:HUB_ID`), a
folder, or a model that drafts."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.published_drafters import published_as
from archsearch.drafters.drafter import FAMILY_NAMES, Drafter
from archsearch.drafters.models import Independent
from archsearch.drafters.read import drafter_of_config, family_of_config
from archsearch.drafters.registry import Found, family, found_as, found_for, is_family
from archsearch.errors import ArchsearchError
from archsearch.files import read_json
from archsearch.models.targets import TargetRef, hub_config_folder, resolve_target
from archsearch.workload import WEIGHT_BYTES


@dataclass(frozen=True)
class NamedDrafter:
    """A drafter that was asked for: `model` where it is one that exists (and was trained somehow),
    `notes` for the reader, `hub_id`: where it comes from (or its folder); "" for a shape that
    nobody published."""

    name: str
    drafter: Drafter
    model: TargetRef | None = None
    notes: list[str] = field(default_factory=list)
    hub_id: str = ""


def resolve_drafter(name: str, target: TargetRef) -> NamedDrafter:
    """The drafter called `name` for `target`: a family's name, `family:place` with a folder or hub
    id of a head, a folder of a head or of a model, or whatever `resolve_target` finds.

    Reads configs only. Raises ArchsearchError where there is no such thing, or it was made for
    another target.
    """
    kind, colon, place = name.partition(":")
    if colon and is_family(kind):
        return _placed(name, kind, place, target)
    if is_family(name):
        return _usual(name, target)
    folder = Path(os.path.expanduser(name))
    if folder.is_dir() and (folder / "config.json").is_file():
        config = read_json(folder / "config.json", "model config")
        if isinstance(config, Mapping) and family_of_config(config):
            return replace(_read(name, config, target, "", str(folder)), hub_id=str(folder))
    if (
        name.count("/") == 1
        and not folder.is_dir()
        and any(row.family != "independent" for row in published_as(name))
    ):
        found = found_as(name, target.name, target.architecture)
        if found is not None:
            return _known(name, found)
    try:
        model = resolve_target(name)
    except ArchsearchError as error:
        close = difflib.get_close_matches(name.lower(), FAMILY_NAMES, n=1, cutoff=0.7)
        if not close or "/" in name:
            raise
        raise ArchsearchError(
            f"unknown draft {name!r}: no family, catalogue name, folder or hub id; did you mean"
            f" {close[0]}?"
        ) from error
    return NamedDrafter(
        name, Independent(_kept(name, model.architecture)), model, hub_id=place_of(model)
    )


def place_of(model: TargetRef) -> str:
    """Where a model that drafts comes from: its hub id, or its folder."""
    return str(model.folder) if model.folder is not None else model.hub_id or ""


def _known(name: str, found: Found) -> NamedDrafter:
    """A drafter of the table, which nobody has to ask the hub about."""
    notes = (
        ["its dimensions are taken to be the usual ones"] if found.row.dimensions == "usual" else []
    )
    return NamedDrafter(name, found.drafter, notes=notes, hub_id=found.row.hub_id)


def _usual(name: str, target: TargetRef) -> NamedDrafter:
    """The published drafter of a family where one is known for the target, else the usual one."""
    kind = family(name)
    if kind is Independent:
        raise ArchsearchError(
            "--draft independent says no shape: name a model or a folder, or let archsearch search"
            " find one"
        )
    lacking = kind.lacking(target.architecture)
    notes = (
        [f"{target.name} has none ({lacking}): priced as if it had the usual one"]
        if lacking
        else []
    )
    found = found_for(target.name, target.architecture, [kind.family])
    if found:
        known = _known(name, found[0])
        return replace(known, notes=[*notes, f"the shape of {known.hub_id}", *known.notes])
    drafter = kind.usual(target.architecture)
    if drafter.trains and not lacking:
        notes.append(
            f"the usual shape for this target, {drafter.label()}: none published is known here"
        )
    return NamedDrafter(name, drafter, notes=notes)


def _placed(name: str, kind: str, place: str, target: TargetRef) -> NamedDrafter:
    """A head in a folder or on the hub, said to be of the family `kind`; a model for families that
    are models."""
    made = family(kind)
    if not place:
        raise ArchsearchError(f"--draft {name}: after the colon comes a folder or a hub id")
    folder = Path(os.path.expanduser(place))
    found = (
        None if folder.is_dir() else found_as(place, target.name, target.architecture, made.family)
    )
    if found is not None:
        return _known(name, found)
    if made.is_model:
        model = resolve_target(place)
        return NamedDrafter(
            name,
            made.of(target.architecture, _kept(name, model.architecture), {}),
            model,
            hub_id=place_of(model),
        )
    if not folder.is_dir():
        if place.count("/") != 1:
            raise ArchsearchError(f"{place!r} is no folder and no hub id (org/name)")
        folder = hub_config_folder(place)
    config = read_json(folder / "config.json", "head config")
    if not isinstance(config, Mapping):
        raise ArchsearchError(
            f"the config of {place} must be a JSON object, got {type(config).__name__}"
        )
    return replace(_read(name, config, target, made.family, place), hub_id=place)


def _read(
    name: str, config: Mapping[str, Any], target: TargetRef, kind: str, where: str
) -> NamedDrafter:
    try:
        drafter, notes = drafter_of_config(config, target.architecture, kind)
    except ArchsearchError as error:
        raise ArchsearchError(f"{where}: {error}") from error
    if drafter.architecture.served_dtype:
        drafter = replace(drafter, architecture=_kept(name, drafter.architecture))
    return NamedDrafter(name, drafter, notes=notes)


def _kept(name: str, layers: Architecture) -> Architecture:
    """A draft's layers with their weights as they were published. ArchsearchError for a format that
    nobody prices."""
    kept = layers.served_dtype
    if kept and kept not in WEIGHT_BYTES:
        raise ArchsearchError(
            f"the weights of draft {name} are quantised ({kept}), which is not priced; name an"
            " unquantised one"
        )
    return layers.in_format(kept)
