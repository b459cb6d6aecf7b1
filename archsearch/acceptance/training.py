"""How a draft that exists was trained, as far as its name, its shape or its folder say."""

from __future__ import annotations

from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.models.targets import TargetRef


def family_of_model(name: str, shape: Architecture) -> str:
    """The family of a model: of the catalogue's entry of that name or hub id, or of that shape; "" where it has neither."""
    entries = catalogue.entries()
    named = [entry for entry in entries if name.lower() in (entry.name, (entry.hub_id or "").lower())]
    found = named or [entry for entry in entries if entry.architecture == shape]
    return found[0].family if found else ""


def training_of(draft: TargetRef, target: TargetRef) -> tuple[str, str]:
    """(one of TRAININGS, what to tell the user where that is a guess, else ""): of one family `shared`, of two `other`; a folder
    that holds a training record of ours `target`."""
    if draft.folder is not None and (draft.folder / "training.json").is_file():
        return "target", ""
    families = [family_of_model(model.name, model.architecture) for model in (draft, target)]
    if not all(families):
        return (
            "target",
            "nobody says how it was trained, taken as made for this target (else --training shared or other)",
        )
    return ("shared" if families[0] == families[1] else "other"), ""
