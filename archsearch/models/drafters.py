"""Which kind of drafter a folder holds, by its config.json: a model that drafts, or heads on a target's hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from archsearch.files import read_json

HeadFamily = Literal["eagle3", "medusa"]
HEAD_FAMILIES: Final[tuple[HeadFamily, ...]] = ("eagle3", "medusa")

EAGLE3_ARCHITECTURES: Final = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
MEDUSA_ARCHITECTURES: Final = ("MedusaModel",)


def head_family(config: Mapping[str, Any]) -> HeadFamily | None:
    """The family of a config.json; None for one of a model that drafts on its own."""
    named = config.get("architectures") or []
    if any(name in EAGLE3_ARCHITECTURES for name in named):
        return "eagle3"
    return "medusa" if config.get("model_type") == "medusa" or any(name in MEDUSA_ARCHITECTURES for name in named) else None


def folder_family(folder: Path) -> HeadFamily | None:
    """The family of a drafter's folder. ArchsearchError where it has no config.json."""
    return head_family(read_json(folder / "config.json", "the drafter's config"))
