"""Finding a target or a drafter by name, without loading it: configs only, no torch for what lies
on this machine; and what is asked of the Hugging Face hub: once, without the retries that take
minutes where there is no network. A drafter is named by a family (`eagle3`), a head that somebody
published (`eagle3:HUB_ID`), a folder, or a model that drafts."""

from __future__ import annotations

import difflib
import functools
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import from_hf_config, read_architecture
from archsearch.architecture.hf_fields import Config
from archsearch.architecture.published_drafters import published_as
from archsearch.drafters.drafter import FAMILY_NAMES, Drafter
from archsearch.drafters.models import Independent
from archsearch.drafters.read import drafter_of_config, family_of_config
from archsearch.drafters.registry import Found, family, found_as, found_for, is_family
from archsearch.errors import ArchsearchError, first_line
from archsearch.files import read_json
from archsearch.models.files import is_gguf
from archsearch.models.gguf_file import read_gguf
from archsearch.workload import GGUF_DTYPES, WEIGHT_BYTES


@dataclass(frozen=True, slots=True)
class TargetRef:
    """A target that was found but not loaded: its shape and where its weights would come from.

    `folder`: a local model folder; `hub_id`: a repository on the Hugging Face hub; `weights`: where
    a catalogue entry says that weights lie (`package`, `module`, `gguf`), or a file (`gguf`, and
    its `dtype`); None when the catalogue knows the shape only.
    """

    name: str
    architecture: Architecture
    folder: Path | None = None
    hub_id: str | None = None
    weights: Mapping[str, str] | None = None

    @property
    def file_dtype(self) -> str | None:
        """The precision of a GGUF file that was given, in which an engine on such files runs it."""
        return (self.weights or {}).get("dtype")

    def dtype_in(self, takes_gguf: bool) -> str | None:
        """`file_dtype` in an engine that runs such files; None in another, which takes a copy of
        a quantised file in 16 bits or more: said once."""
        if self.file_dtype in GGUF_DTYPES and not takes_gguf:
            _say_copied(self.name, self.file_dtype)
        return self.file_dtype if takes_gguf else None

    @property
    def nowhere(self) -> bool:
        """Whether nobody says where weights would come from."""
        return self.folder is None and self.weights is None and self.hub_id is None

    @property
    def place(self) -> str:
        """Where an engine finds it: its folder, hub id or GGUF file; "" for a shape alone."""
        file = (self.weights or {}).get("gguf") if self.file_dtype else None
        return str(self.folder or self.hub_id or file or "")

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


@functools.cache
def _say_copied(name: str, dtype: str) -> None:
    logging.getLogger(__name__).warning(
        "%s holds %s, in which this engine does not compute: a copy in 16 bits or more is meant;"
        " --engine llama.cpp takes the file as it is",
        name,
        dtype,
    )


def resolve_target(name: str) -> TargetRef:
    """The target called `name`: a folder with config.json, a GGUF file, a catalogue name (in any
    case) or the hub id of one, which are read here, or another hub id `org/name`.

    Reads configs only, never weights. Raises ArchsearchError: unknown name (with the closest
    names), a folder without config.json, a hub id whose config cannot be had, what `read_gguf`
    refuses.
    """
    folder = Path(os.path.expanduser(name))  # an unknown ~user stays as it is
    if folder.is_dir():
        return TargetRef(folder.resolve().name, read_architecture(folder), folder=folder.resolve())
    if is_gguf(folder):
        file = folder.resolve()
        found = read_gguf(file)
        kept = {"gguf": str(file), "dtype": found.dtype}
        return TargetRef(file.stem, found.architecture, weights=kept)
    entry = catalogue.named(name)
    if entry is not None:
        # A base model has the shape of the tuned one, not its weights.
        asked = name if "/" in name else entry.hub_id
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
    raise ArchsearchError(
        f"unknown target {name!r}: no catalogue name, no folder, no .gguf file and no hub id"
        f" (org/name); {catalogue.meant(name, catalogue.names())}"
    )


def shape_here(name: str) -> Architecture | None:
    """The shape of a target; None for one that is not on this machine: nothing is asked of the
    network."""
    if "/" in name and not os.path.isdir(os.path.expanduser(name)):
        return None
    try:
        return resolve_target(name).architecture
    except ArchsearchError:
        return None


def _hub_config(hub_id: str) -> dict[str, object]:
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
        raise ArchsearchError(message.replace("{}", first_line(error))) from error


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


def resolve_drafter(name: str, target: TargetRef, context_len: int = 1) -> NamedDrafter:
    """The drafter called `name` for `target`: a family's name, `family:place` with a folder or hub
    id of a head, a folder of a head or of a model, or whatever `resolve_target` finds. Of a family
    the first that reaches `context_len` where one does.

    Reads configs only. Raises ArchsearchError where there is no such thing, or it was made for
    another target.
    """
    kind, colon, place = name.partition(":")
    if colon and is_family(kind):
        return _placed(name, kind, place, target)
    if is_family(name):
        return _usual(name, target, context_len)
    folder = Path(os.path.expanduser(name))
    if folder.is_dir() and (folder / "config.json").is_file():
        config = read_json(folder / "config.json", "model config")
        if isinstance(config, Mapping) and family_of_config(config):
            return _read(name, config, target, "", str(folder))
    heads = any(row.family != "independent" for row in published_as(name))
    if heads and name.count("/") == 1 and not folder.is_dir():
        if found := found_as(name, target.name, target.architecture):
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
        name, Independent(_kept(name, model.architecture)), model, hub_id=model.place
    )


def _known(name: str, found: Found) -> NamedDrafter:
    """A drafter of the table, which nobody has to ask the hub about."""
    notes = (
        ["its dimensions are taken to be the usual ones"] if found.row.dimensions == "usual" else []
    )
    return NamedDrafter(name, found.drafter, model_of(found), notes, found.row.hub_id)


def model_of(found: Found) -> TargetRef | None:
    """The model of a published drafter that is one; None of a head."""
    hub_id, drafter = found.row.hub_id, found.drafter
    return TargetRef(hub_id, drafter.architecture, hub_id=hub_id) if drafter.is_model else None


def _usual(name: str, target: TargetRef, context_len: int) -> NamedDrafter:
    """The published drafter of a family where one is known for the target, else the usual one."""
    kind = family(name)
    if kind is Independent:
        raise ArchsearchError(
            "--draft independent says no shape: name a model or a folder, or let archsearch search"
            " find one"
        )
    if why := kind.lacking(target.architecture):
        raise ArchsearchError(
            f"{target.name} cannot be served with {name}: {why}; leave out --draft {name}"
        )
    asked = target.name, target.architecture, [kind.family]
    if found := found_for(*asked, context_len) or found_for(*asked):
        known = _known(name, found[0])
        return replace(known, notes=[f"the shape of {known.hub_id}", *known.notes])
    drafter = kind.usual(target.architecture)
    usual = f"the usual shape for this target, {drafter.label()}: none published is known here"
    return NamedDrafter(name, drafter, notes=[usual] if drafter.trains else [])


def _placed(name: str, kind: str, place: str, target: TargetRef) -> NamedDrafter:
    """A head in a folder or on the hub, said to be of the family `kind`; a model for families that
    are models."""
    made = family(kind)
    if not place:
        raise ArchsearchError(f"--draft {name}: after the colon comes a folder or a hub id")
    folder = Path(os.path.expanduser(place))
    asked = target.name, target.architecture, made.family
    if not folder.is_dir() and (found := found_as(place, *asked)) is not None:
        return _known(name, found)
    if made.is_model:
        model = resolve_target(place)
        drafter = made.of(target.architecture, _kept(name, model.architecture), {})
        return NamedDrafter(name, drafter, model, hub_id=model.place)
    if not folder.is_dir():
        if place.count("/") != 1:
            raise ArchsearchError(f"{place!r} is no folder and no hub id (org/name)")
        folder = hub_config_folder(place)
    config = read_json(folder / "config.json", "head config")
    if not isinstance(config, Mapping):
        raise ArchsearchError(
            f"the config of {place} must be a JSON object, got {type(config).__name__}"
        )
    return _read(name, config, target, made.family, place)


def _read(name: str, config: Config, target: TargetRef, kind: str, where: str) -> NamedDrafter:
    try:
        drafter, notes = drafter_of_config(config, target.architecture, kind)
    except ArchsearchError as error:
        raise ArchsearchError(f"{where}: {error}") from error
    if drafter.architecture.served_dtype:
        drafter = replace(drafter, architecture=_kept(name, drafter.architecture))
    return NamedDrafter(name, drafter, notes=notes, hub_id=where)


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
