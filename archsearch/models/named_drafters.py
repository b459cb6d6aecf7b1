"""Drafters by name: a family (`eagle3`), a head that somebody published (`eagle3:HUB_ID`), a folder, or a model that drafts."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from archsearch.drafters.drafter import FAMILY_NAMES, Drafter
from archsearch.drafters.models import Independent
from archsearch.drafters.read import drafter_of_config, family_of_config
from archsearch.drafters.registry import family, is_family
from archsearch.errors import ArchsearchError
from archsearch.files import read_json
from archsearch.models.targets import TargetRef, resolve_target


@dataclass(frozen=True)
class NamedDrafter:
    """A drafter that was asked for: `model` where it is one that exists (and was trained somehow), `notes` for the reader."""

    name: str
    drafter: Drafter
    model: TargetRef | None = None
    notes: list[str] = field(default_factory=list)


def resolve_drafter(name: str, target: TargetRef) -> NamedDrafter:
    """The drafter called `name` for `target`: a family's name, `family:place` with a folder or hub id of a head, a folder of a
    head or of a model, or whatever `resolve_target` finds.

    Reads configs only. Raises ArchsearchError where there is no such thing, or it was made for another target.
    """
    kind, colon, place = name.partition(":")
    if colon and is_family(kind):
        return _placed(name, kind, place, target)
    if is_family(name):
        return _usual(name, target)
    folder = Path(name).expanduser()
    if folder.is_dir() and (folder / "config.json").is_file():
        config = read_json(folder / "config.json", "model config")
        if isinstance(config, Mapping) and family_of_config(config):
            return _read(name, config, target, "", str(folder))
    try:
        model = resolve_target(name)
    except ArchsearchError as error:
        close = difflib.get_close_matches(name.lower(), FAMILY_NAMES, n=1, cutoff=0.7)
        if not close or "/" in name:
            raise
        raise ArchsearchError(
            f"unknown draft {name!r}: no family, catalogue name, folder or hub id; did you mean {close[0]}?"
        ) from error
    return NamedDrafter(name, Independent(model.architecture), model)


def _usual(name: str, target: TargetRef) -> NamedDrafter:
    """The published drafter of a family where one is known for the target, else the usual one."""
    kind = family(name)
    if kind is Independent:
        raise ArchsearchError("--draft independent says no shape: name a model or a folder, or let archsearch search find one")
    lacking = kind.lacking(target.architecture)
    notes = [f"{target.name} has none ({lacking}): priced as if it had the usual one"] if lacking else []
    found = _published(name, target)
    if found is not None:
        drafter, hub_id = found
        return NamedDrafter(name, drafter, notes=[*notes, f"the shape of {hub_id}"])
    drafter = kind.usual(target.architecture)
    if drafter.trains and not lacking:
        notes.append(f"the usual shape for this target, {drafter.label()}: none published is known here")
    return NamedDrafter(name, drafter, notes=notes)


def _published(name: str, target: TargetRef) -> tuple[Drafter, str] | None:
    from archsearch.architecture import catalogue

    known = next((entry for entry in catalogue.names() if entry == target.name.lower()), None)
    return family(name).published(known) if known is not None else None


def _placed(name: str, kind: str, place: str, target: TargetRef) -> NamedDrafter:
    """A head in a folder or on the hub, said to be of the family `kind`; a model for families that are models."""
    made = family(kind)
    if not place:
        raise ArchsearchError(f"--draft {name}: after the colon comes a folder or a hub id")
    if made.is_model:
        model = resolve_target(place)
        return NamedDrafter(name, made.of(target.architecture, model.architecture, {}), model)
    folder = Path(place).expanduser()
    config = read_json(folder / "config.json", "head config") if folder.is_dir() else _hub_config(place)
    if not isinstance(config, Mapping):
        raise ArchsearchError(f"the config of {place} must be a JSON object, got {type(config).__name__}")
    return _read(name, config, target, made.family, place)


def _read(name: str, config: Mapping[str, Any], target: TargetRef, kind: str, where: str) -> NamedDrafter:
    try:
        drafter, notes = drafter_of_config(config, target.architecture, kind)
    except ArchsearchError as error:
        raise ArchsearchError(f"{where}: {error}") from error
    return NamedDrafter(name, drafter, notes=notes)


def _hub_config(hub_id: str) -> Any:
    """config.json of a repository on the Hugging Face hub, of any kind."""
    if hub_id.count("/") != 1:
        raise ArchsearchError(f"{hub_id!r} is no folder and no hub id (org/name)")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return read_json(Path(hf_hub_download(hub_id, "config.json")), "head config")
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ArchsearchError(
            f"cannot read the config of {hub_id!r} from the Hugging Face hub ({reason}); check name and network, or give a folder"
        ) from error
