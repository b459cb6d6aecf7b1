"""Checkpoints on disk: written whole or not at all, read with one clear line where they are
broken."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from archsearch.errors import ArchsearchError
from archsearch.text.cache import write_bytes


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically."""
    buffer = io.BytesIO()
    torch.save(_on_cpu(state), buffer)
    write_bytes(path, buffer.getbuffer())


def _on_cpu(value: Any) -> Any:
    """The same state with its tensors in the CPU's memory, so that any machine can go on from
    it."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return (
        type(value)(_on_cpu(item) for item in value) if isinstance(value, list | tuple) else value
    )


def load_state(path: Path) -> dict[str, Any]:
    """A checkpoint of `save_state`. Raises ArchsearchError for a file that is none."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, KeyError) as error:
        raise ArchsearchError(
            f"cannot read the checkpoint {path}: {str(error).splitlines()[0]}; delete it"
        ) from error
    return state
