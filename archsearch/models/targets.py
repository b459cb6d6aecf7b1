"""Finding a target by name, without loading it: configs only, no torch for what lies on this machine."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import from_hf_config, read_architecture
from archsearch.errors import ArchsearchError


@dataclass(frozen=True, slots=True)
class TargetRef:
    """A target that was found but not loaded: its shape and where its weights would come from.

    `folder`: a local model folder; `hub_id`: a repository on the Hugging Face hub; `weights`: where a catalogue entry says that
    weights lie (`package`, `module`, `gguf`), None when the catalogue knows the shape only.
    """

    name: str
    architecture: Architecture
    folder: Path | None = None
    hub_id: str | None = None
    weights: Mapping[str, str] | None = None

    def routed(self, skew: float | None) -> TargetRef:
        """The same with experts chosen by this routing skew (None: as its config says). ArchsearchError where it has none."""
        if skew is None:
            return self
        if not self.architecture.num_experts:
            raise ArchsearchError(f"--routing-skew is of a mixture of experts, and target {self.name!r} is none; leave it out")
        return replace(self, architecture=self.architecture.replace(routing_skew=skew))


def resolve_target(name: str) -> TargetRef:
    """The target called `name`: a folder with config.json, a catalogue name, or a hub id `org/name`.

    Reads configs only, never weights. Raises ArchsearchError: unknown name (with the closest names), a folder without
    config.json, a hub id whose config cannot be had.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return TargetRef(folder.resolve().name, read_architecture(folder), folder=folder.resolve())
    known = list(catalogue.names())
    if name in known:
        entry = catalogue.load(name)
        return TargetRef(name, entry.architecture, hub_id=entry.hub_id, weights=entry.weights)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and all(name.split("/")):
        return TargetRef(name, from_hf_config(_hub_config(name)), hub_id=name)
    close = difflib.get_close_matches(name.lower(), known, n=4, cutoff=0.4)
    hint = f"did you mean {', '.join(close)}?" if close else "`archsearch list targets` shows the names"
    raise ArchsearchError(f"unknown target {name!r}: no catalogue name, no folder and no hub id (org/name); {hint}")


def _hub_config(hub_id: str) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(hub_id, trust_remote_code=False).to_dict()  # else it asks, and may run code
    except (OSError, ValueError) as error:  # transformers' words for: offline, no such repository, gated, unknown model_type
        reason = str(error).strip().splitlines()[0]
        raise ArchsearchError(
            f"cannot read the config of {hub_id!r} from the Hugging Face hub ({reason}); check name and network, or give a folder"
        ) from error
