"""Auxiliary states of texts that a cache holds: what a target's chosen layers take in, for heads
that read them (EAGLE-3).

The cache has the final state of every written token; a head on several layers needs a low, a middle
and a high one too, for the prompt as well, whose rows are keys and values of the head: kept while
the target writes (`Writing.layers`), or made by one pass of the layers that are needed. They lie in
shards beside the text's own, in bfloat16, 2 bytes a number whatever the target computes in: a head
learns through far larger noise, and float16 would overflow on the outlier channels of a residual
stream.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
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
from archsearch.text.settings import by_length, prefill_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BYTES_PER_NUMBER: Final = 2
DISK_SPARE: Final = 1.02  # headers, and the file system's own blocks
# In memory, of one shard that is being written; what is more is read later.
MOST_KEPT_BYTES: Final = 2 << 30


def check_layers(layers: Sequence[int], target_layers: int) -> tuple[int, ...]:
    """`layers` in order. Raises ArchsearchError for layers that the target has not, or one named
    twice."""
    chosen = tuple(sorted(layers))
    if not chosen or chosen != tuple(sorted({*chosen} & {*range(target_layers)})):
        raise ArchsearchError(
            f"auxiliary layers must be distinct and lie between 0 and {target_layers - 1} (the"
            f" target has {target_layers} layers), got {list(layers)}"
        )
    return chosen


def auxiliary_states(
    target: PreTrainedModel, cache: TextCache, layers: Sequence[int], progress: Progress = silent
) -> TextCache:
    """The texts of `cache` with the inputs of `layers` at every token but the last of each, mapped
    from disk; those of its folder that are not there yet are made.

    Only the layers below the last of `layers` run. Raises ArchsearchError: layers the target has
    not, another target's texts, a disk too small (before anything runs), texts not in the folder.
    """
    chosen = check_layers(layers, int(target.config.num_hidden_layers))
    fingerprint = target_fingerprint(target)
    if fingerprint != cache.target_fingerprint:
        raise ArchsearchError(
            f"the texts in {cache.folder} were written by another target; auxiliary states need"
            " their own"
        )
    paths = sorted(cache.folder.glob("shard-*.safetensors"))
    shards = [ShardStates(path, chosen, fingerprint, tuple(load_shard(path))) for path in paths]
    missing = [shard for shard in shards if not shard.done()]
    total, done, begin = sum(sum(shard.counts) for shard in missing), 0, time.monotonic()
    needed = total * len(chosen) * int(target.config.hidden_size) * BYTES_PER_NUMBER
    free = shutil.disk_usage(cache.folder).free
    if needed * DISK_SPARE > free:
        raise ArchsearchError(
            f"auxiliary states of these texts take {needed / 1e9:.1f} GB in {cache.folder},"
            f" {free / 1e9:.1f} GB are free; free space, or name fewer layers"
        )
    for shard in missing:
        for tokens in shard.make(target):
            done += tokens
            rate = done / max(time.monotonic() - begin, 1e-9)
            progress(f"{rate:.0f} tokens/s", done, total)
    known = {_key(each): each.states for shard in shards for each in shard.known()}
    if not known.keys() >= set(map(_key, cache.sequences)):
        raise ArchsearchError(
            "a text has no auxiliary states; they were made for other texts: make them again"
        )
    sequences = [replace(each, states=known[_key(each)]) for each in cache.sequences]
    return replace(cache, sequences=sequences, layers=chosen)


@dataclass(frozen=True)
class ShardStates:
    """The states of the texts in one shard, and their file beside it."""

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
    def counts(self) -> list[int]:
        return [len(sequence) - 1 for sequence in self.sequences]

    def identity(self) -> dict[str, str]:
        texts = hashlib.sha256(b"".join(map(_key, self.sequences))).hexdigest()
        return {"target": self.target, "layers": json.dumps(self.layers), "texts": texts}

    def done(self) -> bool:
        if not self.output.exists():
            return False
        with safe_open(self.output, framework="pt") as shard:
            return {**(shard.metadata() or {})} == self.identity()

    def known(self) -> Sequence[CachedSequence]:
        """The texts with their states, where these are on disk; without, where they are not."""
        if not self.layers or not self.done():
            return self.sequences
        parts = load_file(self.output)["states"].split(self.counts)
        return [replace(s, states=part) for s, part in zip(self.sequences, parts, strict=True)]

    def keep(self) -> None:
        """Write the states that the texts came with; where one came without, or the disk is too
        small, they are read once they are needed."""
        states = [each.states for each in self.sequences if each.states is not None]
        size, free = sum(each.nbytes for each in states), shutil.disk_usage(self.text.parent).free
        if len(states) == len(self.sequences) and size * DISK_SPARE < free:
            self._write(states)

    def _write(self, states: Sequence[Tensor]) -> None:
        content = save({"states": torch.cat(list(states))}, metadata=self.identity())
        write_bytes(self.output, content)

    def make(self, target: PreTrainedModel) -> Iterator[int]:
        """Run the target and write the shard; yields the tokens of every pass."""
        counts = self.counts
        rows = [torch.empty(0)] * len(counts)
        for places in by_length(counts, prefill_tokens(target)):
            texts = [self.sequences[place].token_ids[:-1] for place in places]
            states = _layer_inputs(target, texts, self.layers)
            for row, place in enumerate(places):
                rows[place] = states[row, : counts[place]].clone()
            yield sum(counts[place] for place in places)
        self._write(rows)


class _Enough(Exception):
    """The last layer that is needed was reached."""


@contextmanager
def layer_inputs(
    target: PreTrainedModel, layers: Sequence[int], enough: bool = False
) -> Iterator[list[Tensor]]:
    """Every pass of the target adds to the list [texts, tokens, layers * hidden] bfloat16 on the
    CPU: what each of `layers` (in order) takes in, side by side. `enough`: it ends there."""
    from archsearch.models.runtime import hooked

    seen: list[Tensor] = []
    found: list[Tensor] = []

    def keep(module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"]).to(torch.bfloat16))
        if len(seen) == len(layers):
            found.append(torch.cat(seen, -1).cpu())
            seen.clear()
            if enough:
                raise _Enough

    stack: Any = target.base_model.layers if layers else ()
    handles = [stack[each].register_forward_pre_hook(keep, with_kwargs=True) for each in layers]
    with hooked(handles):
        yield found


def _layer_inputs(
    target: PreTrainedModel, texts: Sequence[Tensor], layers: Sequence[int]
) -> Tensor:
    """[texts, longest, layers * hidden]: what each of `layers` takes in."""
    from archsearch.models.runtime import native_bf16

    fast = torch.autocast(target.device.type, torch.bfloat16, enabled=native_bf16(target.device))
    # Padding on the right: a causal model never looks there.
    ids = pad_sequence(list(texts), batch_first=True).long()
    with (
        layer_inputs(target, layers, enough=True) as found,
        torch.inference_mode(),
        fast,
        suppress(_Enough),
    ):
        target.base_model(input_ids=ids.to(target.device), use_cache=False)
    return found[0]


def _key(sequence: CachedSequence) -> bytes:
    return hashlib.sha256(sequence.token_ids.long().numpy().tobytes()).digest()
