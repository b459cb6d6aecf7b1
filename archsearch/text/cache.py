"""Text with the target's view of it, on disk: a folder of shards (safetensors) with the target's
head beside them.

A draft learns from what its target *writes* (on-policy text: Online Speculative Decoding, arXiv
2310.07177), kept with the target's final hidden states, one vector per written token: its logits
are `hidden @ head.T`, so a distillation needs no further pass of the target.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from archsearch import records
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.files import atomic_path, digest
from archsearch.records import as_data, load

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT: Final = 1
META_FILE: Final = "cache.json"
SHARD_PROMPTS: Final = 384  # a kill loses at most one shard


@dataclass(frozen=True, slots=True)
class CachedSequence:
    """One text with the target's view of it. With n written tokens (all but the prompt):

    `token_ids` [prompt_tokens + n] int; `hidden` [n, hidden_size]: the target's state that predicts
    each written token; `greedy_ids` [n]: the target's argmax there (equal to the written token in
    greedy text); `states` [tokens - 1, width] bfloat16: at all but the last token,
    for heads (`auxiliary`); None where they are not asked for.
    """

    token_ids: Tensor
    prompt_tokens: int
    hidden: Tensor
    greedy_ids: Tensor
    category: str
    id: str
    states: Tensor | None = None

    @property
    def written(self) -> Tensor:
        """[n]: the tokens after the prompt."""
        return self.token_ids[self.prompt_tokens :]

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return tuple(self.token_ids[: self.prompt_tokens].tolist())

    def ended(self, most: int, ends: Collection[int]) -> bool:
        """Whether `most` tokens are written, or one of `ends`."""
        return len(self.written) >= most or int(self.token_ids[-1]) in ends

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What texts were made for and how: identities of the target and of the prompts, settings of
    the writing (`kind`: "written" or "plain")."""

    target: str
    prompts: str
    settings: Mapping[str, object]

    def differs(self, other: Fingerprint) -> list[str]:
        """What is another one in `other`, in words."""
        words = {
            "target": "another target",
            "prompts": "other prompts",
            "settings": "other settings",
        }
        return [text for key, text in words.items() if getattr(self, key) != getattr(other, key)]


@dataclass(frozen=True, slots=True)
class CacheMeta:
    """cache.json. `complete`: every prompt was answered to its end."""

    fingerprint: Fingerprint
    complete: bool = False
    format: int = FORMAT


def read_meta(folder: Path) -> CacheMeta | None:
    """cache.json of a folder, None where there is none. ArchsearchError where it is broken or of
    another version."""
    meta = load(folder / META_FILE, "text cache", CacheMeta)
    if meta is not None and meta.format != FORMAT:
        raise ArchsearchError(
            f"{folder} was written by another version of archsearch; delete it and run again"
        )
    return meta


@dataclass(eq=False)
class TextCache:
    """Texts with the target's hidden states: a folder of shards and the target's head. Made by
    write_answers or encode_text. `layers`: of which its sequences have auxiliary `states`."""

    folder: Path
    meta: CacheMeta
    sequences: list[CachedSequence]
    head: Tensor
    layers: tuple[int, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Identity of target, prompts and settings; the number of finished shards is not part of
        it."""
        return digest(as_data(self.meta.fingerprint))[:16]

    @property
    def target_fingerprint(self) -> str:
        return self.meta.fingerprint.target

    @property
    def plain(self) -> bool:
        """Whether the target read these texts and did not write them."""
        return self.meta.fingerprint.settings.get("kind") == "plain"

    @property
    def vocab_size(self) -> int:
        return int(self.head.shape[0])

    @property
    def hidden_size(self) -> int:
        return int(self.head.shape[1])

    @property
    def dtype(self) -> str:
        """What the target computed in when it wrote the texts, by name."""
        return str(self.head.dtype).removeprefix("torch.")

    @property
    def written_tokens(self) -> int:
        return sum(int(s.greedy_ids.shape[0]) for s in self.sequences)

    @property
    def complete(self) -> bool:
        """Whether every prompt was answered to its end (the budget was long enough)."""
        return self.meta.complete

    def part(self, sequences: list[CachedSequence]) -> TextCache:
        """The same cache with some of its sequences."""
        return replace(self, sequences=sequences)

    @classmethod
    def load(cls, folder: Path | str) -> TextCache:
        """Read a finished or partly finished cache. Raises ArchsearchError for one of another
        version, MissingDataError for none and for an empty one."""
        folder = Path(folder)
        if (meta := read_meta(folder)) is None:
            raise MissingDataError(f"text cache not found: {folder / META_FILE}")
        head = load_file(folder / "head.safetensors")["head"]
        paths = sorted(folder.glob("shard-*.safetensors"))
        sequences = [sequence for path in paths for sequence in load_shard(path)]
        if not sequences:
            raise MissingDataError(
                f"the text cache {folder} is still empty; run again with a longer budget"
            )
        return cls(folder, meta, sequences, head)


def target_fingerprint(target: PreTrainedModel) -> str:
    """Identity of a target: its shape and samples of its weights (rows spread over every
    matrix)."""
    config = sorted(target.config.to_dict().items())
    parts = [json.dumps({k: v for k, v in config if k in _SHAPE_KEYS}, default=str)]
    for name, parameter in target.named_parameters():
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)][:64].to(torch.float32).cpu()
        found = hashlib.sha256(sample.numpy().tobytes()).hexdigest()
        parts.append(f"{name}{tuple(parameter.shape)}{found}")
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


_SHAPE_KEYS: Final = frozenset(
    {"model_type", "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"}
)


def open_folder(folder: Path, fingerprint: Fingerprint, head: Tensor) -> CacheMeta:
    """Create the cache folder, or check what lies there. Raises ArchsearchError where that was made
    for another target, other texts or settings."""
    if (meta := read_meta(folder)) is not None:
        if changed := " and ".join(meta.fingerprint.differs(fingerprint)):
            raise ArchsearchError(
                f"the text cache {folder} was made for {changed}; delete it or name another folder"
            )
        return meta
    write_bytes(
        folder / "head.safetensors", save({"head": head.detach().cpu().contiguous().clone()})
    )
    meta = CacheMeta(fingerprint)
    records.save(folder / META_FILE, meta)
    return meta


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write atomically. By bytes: on a full disk safetensors and torch raise errors of their own, a
    plain write an OSError."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def save_shard(path: Path, sequences: Sequence[CachedSequence], complete: bool) -> None:
    """Write sequences as one safetensors file; `complete`: none will be added."""
    tensors = {
        "token_ids": torch.cat([s.token_ids.to(torch.int32) for s in sequences]),
        "lengths": torch.tensor([len(s) for s in sequences], dtype=torch.int32),
        "prompt_tokens": torch.tensor([s.prompt_tokens for s in sequences], dtype=torch.int32),
        "hidden": torch.cat([s.hidden for s in sequences]).cpu(),
        "greedy_ids": torch.cat([s.greedy_ids.to(torch.int32) for s in sequences]),
    }
    notes = {
        "rows": json.dumps([[s.category, s.id] for s in sequences]),
        "complete": json.dumps(complete),
    }
    write_bytes(path, save(tensors, metadata=notes))


def shard_complete(path: Path) -> bool:
    """Whether a shard is there and finished."""
    if not path.exists():
        return False
    with safe_open(path, framework="pt") as shard:
        return bool(json.loads(shard.metadata()["complete"]))


def load_shard(path: Path) -> Iterator[CachedSequence]:
    """The sequences of a shard, in order."""
    with safe_open(path, framework="pt") as shard:
        rows = json.loads(shard.metadata()["rows"])
        tensors = {name: shard.get_tensor(name) for name in shard.keys()}
    start = written = 0
    for (category, identity), length, prompt in zip(
        rows, tensors["lengths"].tolist(), tensors["prompt_tokens"].tolist(), strict=True
    ):
        count = length - prompt
        yield CachedSequence(
            tensors["token_ids"][start : start + length].long(),
            prompt,
            tensors["hidden"][written : written + count],
            tensors["greedy_ids"][written : written + count].long(),
            category,
            identity,
        )
        start, written = start + length, written + count
