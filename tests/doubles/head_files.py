"""Heads read back from the folders that `archsearch.training.heads.folder` writes."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.models.files import WEIGHTS_FILE
from archsearch.training.heads.eagle3 import Eagle3Head
from archsearch.training.heads.folder import aux_layers, read_head_config
from archsearch.training.heads.medusa import MedusaHeads


def load_eagle3(folder: Path, embedding: Tensor) -> Eagle3Head:
    """The EAGLE-3 or P-EAGLE head of a folder in the common format, in float32. `embedding` [vocab,
    hidden]: the target's."""
    family, config = read_head_config(folder)
    if family == "medusa" or config.get("norm_before_residual"):
        raise ArchsearchError(
            f"{folder} holds no EAGLE-3 head of the kind trained here (norm_before_residual must be"
            " false)"
        )
    tensors = _tensors(folder)
    rows = int(config.get("draft_vocab_size") or config["vocab_size"])
    kept = torch.arange(rows) + tensors.pop("d2t", torch.zeros(rows, dtype=torch.long)).long()
    tensors.pop("t2d", None)
    known = {
        name: value
        for name, value in config.items()
        if name not in ("architectures", "archsearch", "torch_dtype", "model_type")
    }
    llama = LlamaConfig(**known)
    width, mask = (
        int(config.get("target_hidden_size") or llama.hidden_size),
        config.get("ptd_token_id"),
    )
    head = Eagle3Head(
        llama,
        width,
        aux_layers(config, folder),
        kept.tolist(),
        embedding,
        None if mask is None else int(mask),
    )
    _fill(head, tensors, folder, ("embedding.weight", "lm_head.draft_token_ids"))
    return head.eval()


def load_medusa(folder: Path) -> MedusaHeads:
    """The Medusa heads of a folder written here, in float32."""
    _, config = read_head_config(folder)
    kept = config.get("archsearch", {}).get("draft_token_ids") or list(
        range(int(config["vocab_size"]))
    )
    gamma = int(config["num_heads"])
    heads = MedusaHeads(int(config["hidden_size"]), int(config["vocab_size"]), gamma, kept)
    tensors = _tensors(folder)
    named = {f"blocks.{j}.weight": tensors[f"blocks.{j}.layers.0.weight"] for j in range(gamma)}
    named["lm_heads.0.weight"] = tensors["lm_head.weight"][kept]
    _fill(heads, named, folder, ("lm_heads.0.draft_token_ids",))
    return heads.eval()


def _tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise MissingDataError(f"no weights in {folder}; train the head first")
    return load_file(path)


def _fill(
    module: torch.nn.Module, tensors: dict[str, Tensor], folder: Path, own: tuple[str, ...]
) -> None:
    try:
        missing, unexpected = module.load_state_dict(
            {name: value.float() for name, value in tensors.items()}, strict=False
        )
    except RuntimeError as error:
        raise ArchsearchError(
            f"the weights in {folder} do not fit its config: {str(error).splitlines()[-1].strip()}"
        ) from error
    absent = [name for name in missing if name not in own]
    if absent or unexpected:
        raise ArchsearchError(
            f"the weights in {folder} do not fit its config: missing {absent}, unknown"
            f" {list(unexpected)}"
        )
