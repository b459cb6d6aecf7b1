"""Folders of heads in the formats that engines load (docs/families.md), written and read.

EAGLE-3: the form that SafeAILab, SpecForge and Model-Optimizer write, which vLLM, SGLang,
TensorRT-LLM, llama.cpp's converter and optimum-intel read. The layers whose inputs fc reads and
`norm_before_residual` are always written: an engine that guesses them otherwise accepts next to
nothing, without a word.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import LlamaConfig

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import to_hf_config
from archsearch.architecture.hf_fields import SIZES
from archsearch.drafters.forms import TRANSFORMER_FIELDS, feature_fields, medusa_fields
from archsearch.drafters.read import MASK_FIELDS
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.files import read_json, write_json
from archsearch.models.drafts import padded_head
from archsearch.models.files import WEIGHTS_FILE, aux_layers
from archsearch.text.cache import write_bytes
from archsearch.training.heads.eagle3 import Eagle3Head
from archsearch.training.heads.medusa import MedusaHeads


def target_facts(arch: Architecture, name: str, fingerprint: str = "") -> dict[str, object]:
    """The target of a head, as its config names it; `fingerprint`: of its weights."""
    sizes = {"hidden_size": arch.hidden_size, "layers": arch.num_hidden_layers}
    return {"name": name, **sizes, "vocab_size": arch.vocab_size, "fingerprint": fingerprint}


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


def save_eagle3(head: Eagle3Head, folder: Path, target: Mapping[str, object]) -> None:
    """Write config.json and model.safetensors of an EAGLE-3 or P-EAGLE head; weights last."""
    kept = head.lm_head.draft_token_ids
    tensors = {name: tensor.detach().float() for name, tensor in head.saved().items()}
    sizes, mask = (len(kept), head.target_hidden_size), head.mask_token_id
    config = _llama_fields(head.config) | feature_fields("eagle3", *sizes, head.aux_layers, mask)
    _write(folder, config, tensors | head_maps(kept, head.config.vocab_size), target=target)


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
    heads: MedusaHeads,
    folder: Path,
    target: Mapping[str, object],
    mean_state: Tensor | None = None,
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
    config = medusa_fields(heads.hidden_size, heads.vocab_size, heads.gamma, 1, True)
    config |= {"medusa_fc_bias": False}
    _write(folder, config, tensors, target=target, draft_token_ids=kept.tolist())


def _write(
    folder: Path, config: dict[str, object], tensors: dict[str, Tensor], **own: object
) -> None:
    write_json(folder / "config.json", config | {"torch_dtype": "float32", "archsearch": own})
    write_weights(folder, tensors)


def write_weights(folder: Path, tensors: dict[str, Tensor]) -> None:
    """model.safetensors of a head."""
    from safetensors.torch import save

    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_bytes(folder / WEIGHTS_FILE, save(whole, metadata={"format": "pt"}))


# -- reading

_OF_TARGET: Final = ("verifier_lm_head.weight", "verifier_norm.weight")
_OTHER_NORMS: Final = "norm_before_residual norm_before_fc fc_norm norm_output".split()


def read_eagle3(folder: Path, embedding: Tensor) -> Eagle3Head:
    """The EAGLE-3 or P-EAGLE head in `folder`, as archsearch, SpecForge or speculators write it, in
    float32. `embedding` [vocab, hidden]: the target's.

    Raises ArchsearchError for a head that is another function than those here: other norms, an
    embedding or tokens that are not the target's; MissingDataError for weights that cannot be read
    or do not fit its config.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = read_json(folder / "config.json", "the head's config")
    nested = config.get("transformer_layer_config")
    layers = nested or config
    usual = {"norm_before_residual": bool(nested)}  # where the form of speculators leaves it out
    if found := [name for name in _OTHER_NORMS if config.get(name, usual.get(name))]:
        raise ArchsearchError(
            f"the head in {folder} has {found[0]}, which heads here do not: train one without"
        )
    try:
        given = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise MissingDataError(f"cannot read the weights in {folder}: {error}") from error
    tensors = {
        name.removeprefix("model.").replace("midlayer.", "layers.0."): tensor
        for name, tensor in given.items()
        if name not in _OF_TARGET
    }
    own = tensors.pop("embed_tokens.weight", None)
    if own is not None and not torch.equal(own, embedding.to(own.dtype)):
        raise ArchsearchError(
            f"the head in {folder} has an embedding of its own, those here read the target's:"
            " train it with embed_requires_grad false"
        )
    rows = tensors.get("lm_head.weight", embedding)
    maps = tensors.pop("d2t", torch.zeros(len(embedding))).long()
    kept = maps + torch.arange(len(maps))
    there = tensors.pop("t2d", None)
    if len(kept) != len(rows) or not (
        there is None or set(there.nonzero()[:, 0].tolist()) == set(kept.tolist())
    ):
        raise ArchsearchError(
            f"the maps d2t and t2d of the head in {folder} do not name the tokens of its"
            f" {len(rows)} rows: write both anew"
        )
    if "lm_head.weight" in tensors:  # heads here have their rows by ascending token
        tensors["lm_head.weight"] = rows[kept.argsort()]
    mask = next((config[name] for name in MASK_FIELDS if config.get(name) is not None), None)
    shape = LlamaConfig(**{n: layers[n] for n in TRANSFORMER_FIELDS[1:] if n in layers})
    width = int(config.get("target_hidden_size") or shape.hidden_size)
    head = Eagle3Head(shape, width, aux_layers(config, folder), kept.tolist(), embedding, mask)
    wanted = head.saved()
    both = wanted.keys() & tensors.keys()
    faults: dict[str, Collection[str]] = {
        "is missing": wanted.keys() - both,
        "is of no part that its config names": tensors.keys() - both,
        "has another shape": [n for n in both if wanted[n].shape != tensors[n].shape],
        "holds NaN or infinity": [n for n in both if not tensors[n].isfinite().all()],
    }
    for how, names in faults.items():
        if names:
            wrong = f"{min(names)} {how}"
            raise MissingDataError(f"the weights in {folder} do not fit its config: {wrong}")
    head.load_state_dict(tensors, strict=False)
    return head
