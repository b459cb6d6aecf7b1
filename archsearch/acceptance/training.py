"""How a draft that exists was trained, as far as its name, its shape or its folder say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from archsearch.acceptance.estimator import AcceptanceContext
from archsearch.acceptance.learnt import known_learning
from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.files import read_json
from archsearch.models.targets import TargetRef

# Training tokens of a head that nobody says anything of: from 3,000 samples (whose heads have tau
# 1.33 to 1.52 where published ones have 1.6 to 2.1) to what published ones saw. Decades are the
# std.
HEAD_GUESS: Final = 3e7
HEAD_GUESS_DECADES: Final = 1.0


def family_of_model(name: str, shape: Architecture) -> str:
    """The family of a model: of the catalogue's entry of that name or hub id, or of that shape; ""
    where it has neither."""
    entries = catalogue.entries()
    named = [
        entry for entry in entries if name.lower() in (entry.name, (entry.hub_id or "").lower())
    ]
    found = named or [entry for entry in entries if entry.architecture == shape]
    return found[0].family if found else ""


def training_of(draft: TargetRef, target: TargetRef) -> tuple[str, str]:
    """(one of TRAININGS, what to tell the user where that is a guess, else ""): of one family
    `shared`, of two `other`; a folder that holds a training record of ours `target`."""
    if draft.folder is not None and (draft.folder / "training.json").is_file():
        return "target", ""
    families = [family_of_model(model.name, model.architecture) for model in (draft, target)]
    if not all(families):
        return (
            "target",
            (
                "nobody says how it was trained, taken as made for this target (else --training"
                " shared or other)"
            ),
        )
    return ("shared" if families[0] == families[1] else "other"), ""


def trained_as(
    context: AcceptanceContext, draft: TargetRef | None, training: str, tokens: float | None = None
) -> AcceptanceContext:
    """The context of a draft that exists, trained as `training` says, on `tokens` of the target's
    text where they are known: a model of the catalogue that was made for its target began as what
    it is known as, and was tuned. `draft` None: a drafter that is no model of its own."""
    known = (
        known_learning(draft.architecture) if draft is not None and draft.folder is None else None
    )
    before = known.tokens if training == "target" and known is not None else None
    return replace(context, training=training, pretrain_tokens=before, trained_tokens=tokens)


def guessed_head(context: AcceptanceContext) -> AcceptanceContext:
    """The context of a head of whose training nobody says anything."""
    return replace(context, trained_tokens=HEAD_GUESS, tokens_std=HEAD_GUESS_DECADES)


def recorded_tokens(folder: Path | None) -> float | None:
    """How many tokens of the target's text a draft of ours saw, by its training.json; None where
    nobody wrote it down."""
    record = folder / "training.json" if folder is not None else None
    if record is None or not record.is_file():
        return None
    data = read_json(record, "training record")
    tokens = data.get("tokens") if isinstance(data, dict) else None
    return float(tokens) if isinstance(tokens, int | float) and tokens > 0 else None
