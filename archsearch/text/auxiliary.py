"""Auxiliary states of texts that a cache holds: what a target's chosen layers take in, for heads
that read them (EAGLE-3).

The cache has the final state of every written token; a head on several layers needs a low, a middle
and a high one too, for the prompt as well, whose rows are keys and values of the head. One pass of
the layers that are needed makes them, once: they lie in shards beside the text's own. Kept in
bfloat16, 2 bytes a number whatever the target computes in: a head learns through far larger noise,
and float16 would overflow on the outlier channels of a residual stream.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from archsearch.errors import ArchsearchError
from archsearch.progress import Progress, silent
from archsearch.text.cache import (
    CachedSequence,
    TextCache,
    load_shard,
    target_fingerprint,
    write_bytes,
)
from archsearch.text.encode import by_length
from archsearch.text.settings import BatchLimits, prefill_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BYTES_PER_NUMBER: Final = 2
DISK_SPARE: Final = 1.02  # headers, and the file system's own blocks


@dataclass
class AuxiliaryStates:
    """The auxiliary states of texts, read from disk when they are asked for. `layers`: whose inputs
    they are (0: the embedding); `width`: numbers a token, all layers together."""

    layers: tuple[int, ...]
    width: int
    # text -> shard, first row, rows
    _places: dict[bytes, tuple[Path, int, int]] = field(default_factory=dict)
    _open: dict[Path, Any] = field(default_factory=dict)

    def of(self, sequence: CachedSequence) -> Tensor:
        """[tokens - 1, width] bfloat16: the states at every token of a text but its last.
        ArchsearchError for an unknown text."""
        place = self._places.get(_key(sequence))
        if place is None:
            raise ArchsearchError(
                "a text has no auxiliary states; they were made for other texts: make them again"
            )
        path, start, rows = place
        if path not in self._open:
            # Stays mapped while this object lives.
            self._open[path] = safe_open(path, framework="pt").__enter__()
        states: Tensor = self._open[path].get_slice("states")[start : start + rows]
        return states

    def add(self, path: Path, sequences: Sequence[CachedSequence]) -> None:
        """The shard at `path` holds the states of `sequences`, one after the other."""
        start = 0
        for sequence in sequences:
            self._places[_key(sequence)] = (path, start, len(sequence) - 1)
            start += len(sequence) - 1

    def join(self, other: AuxiliaryStates) -> AuxiliaryStates:
        return AuxiliaryStates(self.layers, self.width, self._places | other._places)


def check_layers(layers: Sequence[int], target_layers: int) -> tuple[int, ...]:
    """`layers` in order. Raises ArchsearchError for layers that the target has not, or one named
    twice."""
    chosen = tuple(sorted(layers))
    if (
        not chosen
        or len(set(chosen)) != len(chosen)
        or chosen[0] < 0
        or chosen[-1] >= target_layers
    ):
        raise ArchsearchError(
            f"auxiliary layers must be distinct and lie between 0 and {target_layers - 1} (the"
            f" target has {target_layers} layers), got {list(layers)}"
        )
    return chosen


def auxiliary_states(
    target: PreTrainedModel, cache: TextCache, layers: Sequence[int], progress: Progress = silent
) -> AuxiliaryStates:
    """The inputs of `layers` at every token of the texts in `cache`'s folder; what is on disk
    already is used.

    Only the layers below the last of `layers` run. Shards are written atomically, each belongs to
    one target, one list of layers and one list of texts. Raises ArchsearchError: layers the target
    has not, another target's texts, a disk too small (said before anything runs).
    """
    chosen = check_layers(layers, int(target.config.num_hidden_layers))
    fingerprint = target_fingerprint(target)
    if fingerprint != cache.target_fingerprint:
        raise ArchsearchError(
            f"the texts in {cache.folder} were written by another target; auxiliary states need"
            " their own"
        )
    found = AuxiliaryStates(chosen, len(chosen) * int(target.config.hidden_size))
    missing = []
    for path in sorted(cache.folder.glob("shard-*.safetensors")):
        job = _Shard(path, chosen, fingerprint, tuple(load_shard(path)))
        found.add(job.output, job.sequences)
        if not job.done():
            missing.append(job)
    total, done, begin = sum(job.tokens for job in missing), 0, time.monotonic()
    needed, free = total * found.width * BYTES_PER_NUMBER, shutil.disk_usage(cache.folder).free
    if needed * DISK_SPARE > free:
        raise ArchsearchError(
            f"auxiliary states of these texts take {needed / 1e9:.1f} GB in {cache.folder},"
            f" {free / 1e9:.1f} GB are free; free space, or name fewer layers"
        )
    for job in missing:
        for tokens in job.make(target):
            done += tokens
            rate = done / max(time.monotonic() - begin, 1e-9)
            progress(f"{rate:.0f} tokens/s", done, total)
    return found


@dataclass(frozen=True)
class _Shard:
    text: Path
    layers: tuple[int, ...]
    target: str
    sequences: tuple[CachedSequence, ...]

    @property
    def output(self) -> Path:
        names = "-".join(map(str, self.layers))
        return self.text.with_name(
            f"auxiliary-{names}-{self.text.stem.removeprefix('shard-')}.safetensors"
        )

    @property
    def tokens(self) -> int:
        return sum(len(sequence) - 1 for sequence in self.sequences)

    def identity(self) -> dict[str, str]:
        texts = hashlib.sha256(b"".join(_key(sequence) for sequence in self.sequences)).hexdigest()
        return {"target": self.target, "layers": json.dumps(self.layers), "texts": texts}

    def done(self) -> bool:
        if not self.output.exists():
            return False
        with safe_open(self.output, framework="pt") as shard:
            return {**(shard.metadata() or {})} == self.identity()

    def make(self, target: PreTrainedModel) -> Iterator[int]:
        """Run the target and write the shard; yields the tokens of every pass."""
        rows: dict[int, Tensor] = {}
        lengths = [len(sequence) for sequence in self.sequences]
        for places in by_length(lengths, prefill_tokens(target, BatchLimits())):
            batch = [self.sequences[place] for place in places]
            states = _layer_inputs(target, [one.token_ids[:-1] for one in batch], self.layers)
            for row, place in enumerate(places):
                rows[place] = states[row, : lengths[place] - 1].clone()
            yield sum(len(sequence) - 1 for sequence in batch)
        whole = torch.cat([rows[place] for place in range(len(self.sequences))])
        write_bytes(self.output, save({"states": whole}, metadata=self.identity()))


class _Enough(Exception):
    """The last layer that is needed was reached."""


def _layer_inputs(
    target: PreTrainedModel, texts: Sequence[Tensor], layers: Sequence[int]
) -> Tensor:
    """[texts, longest, layers * hidden] bfloat16 on the CPU: what each of `layers` takes in, side
    by side."""
    from archsearch.models.runtime import hooked, native_bf16

    fast = torch.autocast(target.device.type, torch.bfloat16, enabled=native_bf16(target.device))
    # Padding on the right: a causal model never looks there.
    ids = pad_sequence(list(texts), batch_first=True).long()
    seen: dict[int, Tensor] = {}

    def hook(layer: int) -> Any:
        def keep(module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[layer] = (args[0] if args else kwargs["hidden_states"]).to(torch.bfloat16).cpu()
            if layer == max(layers):
                raise _Enough

        return keep

    stack: Any = target.base_model.layers
    handles = [
        stack[layer].register_forward_pre_hook(hook(layer), with_kwargs=True) for layer in layers
    ]
    with hooked(handles), torch.inference_mode(), fast, suppress(_Enough):
        target.base_model(input_ids=ids.to(target.device), use_cache=False)
    return torch.cat([seen[layer] for layer in sorted(layers)], -1)


def _key(sequence: CachedSequence) -> bytes:
    return hashlib.sha256(sequence.token_ids.long().numpy().tobytes()).digest()
