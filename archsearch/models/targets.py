"""Finding a target by name, without loading it: configs only, no torch for what lies on this
machine; and what is asked of the Hugging Face hub: once, without the retries that take minutes
where there is no network."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import from_hf_config, read_architecture
from archsearch.architecture.published_drafters import published_as
from archsearch.errors import ArchsearchError


@dataclass(frozen=True, slots=True)
class TargetRef:
    """A target that was found but not loaded: its shape and where its weights would come from.

    `folder`: a local model folder; `hub_id`: a repository on the Hugging Face hub; `weights`: where
    a catalogue entry says that weights lie (`package`, `module`, `gguf`), None when the catalogue
    knows the shape only.
    """

    name: str
    architecture: Architecture
    folder: Path | None = None
    hub_id: str | None = None
    weights: Mapping[str, str] | None = None

    def routed(self, skew: float | None) -> TargetRef:
        """The same with experts chosen by this routing skew (None: as its config says).
        ArchsearchError where it has none."""
        if skew is None:
            return self
        if not self.architecture.num_experts:
            raise ArchsearchError(
                f"--routing-skew is of a mixture of experts, and target {self.name!r} is none;"
                " leave it out"
            )
        return replace(self, architecture=self.architecture.replace(routing_skew=skew))


def resolve_target(name: str) -> TargetRef:
    """The target called `name`: a folder with config.json, a catalogue name (in any case) or the
    hub id of one, which are read here, or another hub id `org/name`.

    Reads configs only, never weights. Raises ArchsearchError: unknown name (with the closest
    names), a folder without config.json, a hub id whose config cannot be had.
    """
    folder = Path(os.path.expanduser(name))  # an unknown ~user stays as it is
    if folder.is_dir():
        return TargetRef(folder.resolve().name, read_architecture(folder), folder=folder.resolve())
    entry = catalogue.named(name)
    if entry is not None:
        asked = (
            name if "/" in name else entry.hub_id
        )  # a base model has the shape of the tuned one, not its weights
        return TargetRef(entry.name, entry.architecture, hub_id=asked, weights=entry.weights)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and all(name.split("/")):
        made_for = published_as(name)
        if made_for and made_for[0].family != "independent":
            targets = ", ".join(made_for[0].targets)
            raise ArchsearchError(
                f"{name} is a drafter of the family {made_for[0].family} for {targets}, not a"
                " target"
            )
        return TargetRef(name, from_hf_config(_hub_config(name)), hub_id=name)
    close = difflib.get_close_matches(name.lower(), catalogue.names(), n=4, cutoff=0.4)
    hint = (
        f"did you mean {', '.join(close)}?"
        if close
        else "`archsearch list targets` shows the names"
    )
    raise ArchsearchError(
        f"unknown target {name!r}: no catalogue name, no folder and no hub id (org/name); {hint}"
    )


def _hub_config(hub_id: str) -> dict[str, Any]:
    from transformers import AutoConfig

    folder = hub_config_folder(hub_id)
    with hub_errors(config_words(hub_id)):  # transformers' words for an unknown model_type
        # Trusted, it would ask, and might run code.
        return AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()


TIMEOUT_S: Final = 10.0
_CLIENTS: Final = ("httpx", "httpcore", "requests", "urllib3")


@contextmanager
def hub_errors(message: str) -> Iterator[None]:
    """What keeps the hub from answering (no network, no such repository, a gated one) as one line:
    `message`, in which {} is the reason. Raises ArchsearchError."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except Exception as error:
        # The connection errors of some clients are no OSError.
        if not isinstance(error, OSError | ValueError | HfHubHTTPError) and not type(
            error
        ).__module__.startswith(_CLIENTS):
            raise
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ArchsearchError(message.replace("{}", said)) from error


def config_words(hub_id: str) -> str:
    """What is said where a repository's config cannot be had: see `hub_errors`."""
    return (
        f"cannot read the config of {hub_id!r} from the Hugging Face hub ({{}}); check name and"
        " network, or give a folder"
    )


def hub_config_folder(hub_id: str) -> Path:
    """The folder that holds config.json of a repository: of the local cache where it is there, else
    fetched. Raises ArchsearchError, after one request."""
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )

    with hub_errors(config_words(hub_id)):
        known = try_to_load_from_cache(hub_id, "config.json")
        if isinstance(known, str):
            return Path(known).parent
        url = hf_hub_url(hub_id, "config.json")
        get_hf_file_metadata(url, timeout=TIMEOUT_S, retry_on_errors=False)
        return Path(hf_hub_download(hub_id, "config.json")).parent
