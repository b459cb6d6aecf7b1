"""Medusa heads read back from the folders that `archsearch.training.heads.folder` writes."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from archsearch.models.files import WEIGHTS_FILE
from archsearch.training.heads.medusa import MedusaHeads


def load_medusa(folder: Path) -> MedusaHeads:
    """The Medusa heads of a folder written here, in float32."""
    config = json.loads((folder / "config.json").read_text())
    kept = config.get("archsearch", {}).get("draft_token_ids") or list(
        range(int(config["vocab_size"]))
    )
    gamma = int(config["num_heads"])
    heads = MedusaHeads(int(config["hidden_size"]), int(config["vocab_size"]), gamma, kept)
    tensors = load_file(folder / WEIGHTS_FILE)
    named = {f"blocks.{j}.weight": tensors[f"blocks.{j}.layers.0.weight"] for j in range(gamma)}
    named["lm_heads.0.weight"] = tensors["lm_head.weight"][kept]
    missing, unexpected = heads.load_state_dict(named, strict=False)
    assert missing == ["lm_heads.0.draft_token_ids"] and not unexpected
    return heads.eval()
