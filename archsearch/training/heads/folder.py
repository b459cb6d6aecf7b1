"""Folders of heads in the formats that engines load: written, read, and checked against a target.

EAGLE-3: the form that SafeAILab, SpecForge and Model-Optimizer write, which vLLM, SGLang,
TensorRT-LLM, llama.cpp's converter and optimum-intel read. The layers whose inputs fc reads and
`norm_before_residual` are always written: an engine that guesses them otherwise accepts next to
nothing, without a word. Medusa: vLLM's. Its 0.32 refuses a head of fewer rows than the vocabulary,
so all rows are written, those of dropped tokens as in a draft's padded head.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import LlamaConfig

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import to_hf_config
from archsearch.architecture.hf_fields import SIZES
from archsearch.drafters.forms import feature_fields, medusa_fields
from archsearch.drafters.read import family_of_config
from archsearch.errors import ArchsearchError
from archsearch.files import read_json, write_json
from archsearch.models.drafts import padded_head
from archsearch.models.files import HEAD_FAMILIES, WEIGHTS_FILE, HeadFamily, aux_layers
from archsearch.records import as_data
from archsearch.text.cache import write_bytes
from archsearch.training.heads.eagle3 import Eagle3Head
from archsearch.training.heads.medusa import MedusaHeads


@dataclass(frozen=True)
class TargetFacts:
    """What a head must fit of its target: `name` for messages; `fingerprint` of its weights, ""
    where it is not known."""

    name: str
    hidden_size: int
    layers: int
    vocab_size: int
    fingerprint: str = ""

    @classmethod
    def of(cls, arch: Architecture, name: str, fingerprint: str = "") -> TargetFacts:
        return cls(name, arch.hidden_size, arch.num_hidden_layers, arch.vocab_size, fingerprint)


_FROM_TARGET: Final = (
    "rms_norm_eps hidden_act max_position_embeddings bos_token_id eos_token_id"
).split()


def eagle3_config(decoder: Architecture, target: Any) -> LlamaConfig:
    """The transformers config of a head's layers: shape of `decoder`; eps, activation and positions
    of `target`."""
    fields = to_hf_config(decoder.replace(draft_vocab_size=None, model_type="llama"))
    for name in (*_FROM_TARGET, "rope_parameters"):
        if getattr(target.config, name, None) is not None:
            fields[name] = getattr(target.config, name)
    for name in ("model_type", "archsearch", "rope_theta"):
        fields.pop(name, None)
    config = LlamaConfig(**fields)
    config.tie_word_embeddings = False
    return config


def save_eagle3(head: Eagle3Head, folder: Path, target: TargetFacts) -> None:
    """Write config.json and model.safetensors of an EAGLE-3 or P-EAGLE head; weights last."""
    kept = head.lm_head.draft_token_ids
    tensors = {name: tensor.detach().float() for name, tensor in head.saved().items()}
    sizes, mask = (len(kept), head.target_hidden_size), head.mask_token_id
    config = _llama_fields(head.config) | feature_fields("eagle3", *sizes, head.aux_layers, mask)
    config |= {"torch_dtype": "float32", "archsearch": {"target": as_data(target)}}
    _write(folder, config, tensors | head_maps(kept, head.config.vocab_size))


def head_maps(kept: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Of a trimmed head: row -> token id less the row; token id -> whether the head has it. {} for
    a whole one: vLLM has no place for its maps and refuses the file."""
    if len(kept) == vocab_size:
        return {}
    present = torch.zeros(vocab_size, dtype=torch.bool)
    present[kept] = True
    return {"d2t": (kept - torch.arange(len(kept))).long(), "t2d": present}


def _llama_fields(config: LlamaConfig) -> dict[str, object]:
    fields = {name: getattr(config, name) for name in (*SIZES, *_FROM_TARGET)}
    rope: dict[str, object] = dict(config.rope_parameters or {})
    # Both places: transformers 5 reads rope_parameters, older readers the top level.
    places = {"rope_theta": rope["rope_theta"], "rope_parameters": rope}
    if rope.get("rope_type", "default") != "default":
        places["rope_scaling"] = {k: value for k, value in rope.items() if k != "rope_theta"}
    own = {"model_type": "llama", "attention_bias": False, "mlp_bias": False}
    return own | fields | places


def save_medusa(
    heads: MedusaHeads, folder: Path, target: TargetFacts, mean_state: Tensor | None = None
) -> None:
    """Write config.json and model.safetensors. `mean_state` [hidden]: mean final state, what
    padding rows point away from."""
    kept = heads.lm_head.draft_token_ids
    blocks: Any = heads.blocks
    tensors = {
        f"blocks.{j}.layers.0.weight": block.weight.detach().float()
        for j, block in enumerate(blocks)
    }
    tensors["lm_head.weight"] = padded_head(heads.lm_head, mean_state).float()
    config = medusa_fields(heads.hidden_size, heads.vocab_size, heads.gamma, 1, True) | {
        "medusa_fc_bias": False,
        "torch_dtype": "float32",
        "archsearch": {"target": as_data(target), "draft_token_ids": kept.tolist()},
    }
    _write(folder, config, tensors)


def _write(folder: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> None:
    write_json(folder / "config.json", config)
    write_weights(folder, tensors)


def write_weights(folder: Path, tensors: dict[str, Tensor]) -> None:
    """model.safetensors of a head."""
    from safetensors.torch import save

    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_bytes(folder / WEIGHTS_FILE, save(whole, metadata={"format": "pt"}))


# -- reading


def read_head_config(folder: Path) -> tuple[HeadFamily, dict[str, Any]]:
    """(family, config) of a head's folder. Raises ArchsearchError for a folder that holds something
    else."""
    config = read_json(folder / "config.json", "the head's config")
    found = family_of_config(config)
    family = next((each for each in HEAD_FAMILIES if each == found), None)
    if family is None:
        raise ArchsearchError(
            f"{folder} holds no EAGLE-3, P-EAGLE or Medusa head (architectures"
            f" {config.get('architectures')})"
        )
    return family, config


def check_head(folder: Path, target: TargetFacts) -> HeadFamily:
    """The family of the head in `folder`. Raises ArchsearchError, in one line, where it is of
    another target: vocabulary, width, auxiliary layers, or the weights that it was trained
    beside."""
    family, config = read_head_config(folder)
    width = int(config.get("target_hidden_size") or config["hidden_size"])
    layers = () if family == "medusa" else aux_layers(config, folder)
    named = config.get("archsearch", {}).get("target", {})
    other = target.fingerprint and named.get("fingerprint") not in (None, "", target.fingerprint)
    wrong = ""
    if int(config["vocab_size"]) != target.vocab_size:
        wrong = (
            f"its vocabulary has {config['vocab_size']} tokens, {target.name} has"
            f" {target.vocab_size}"
        )
    elif width != target.hidden_size:
        wrong = (
            f"it reads states of width {width}, those of {target.name} have {target.hidden_size}"
        )
    elif layers and max(layers) >= target.layers:
        wrong = (
            f"it reads the inputs of layers {list(layers)}, {target.name} has layers 0 to"
            f" {target.layers - 1}"
        )
    elif other:
        wrong = (
            f"it was trained on the states of {named.get('name')}, whose weights are not those of"
            f" {target.name}"
        )
    if wrong:
        raise ArchsearchError(
            f"the head in {folder} is not for this target: {wrong}; use a head of this target"
        )
    return family
