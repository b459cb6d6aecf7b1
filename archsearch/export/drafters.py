"""What engines are told of a drafter that is no independent draft: the config.json of its shape, vLLM's speculative config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import to_hf_config
from archsearch.drafters.drafter import Drafter
from archsearch.drafters.heads import DFlash, FeatureDrafter
from archsearch.drafters.lookup import NGram, Suffix
from archsearch.drafters.medusa import Medusa
from archsearch.schedule import Ranges, largest_gamma

# vllm/config/speculative.py of 0.32: `method`, and what else the family needs.
VLLM: Final[Mapping[str, Mapping[str, Any]]] = {
    "independent": {"method": "draft_model"},
    "pard": {"method": "draft_model", "parallel_drafting": True},
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
    "eagle": {"method": "eagle"},
    "mtp": {"method": "mtp"},
    "dflash": {"method": "dflash"},
    "medusa": {"method": "medusa"},
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
}
ARCHITECTURES: Final = {
    "eagle3": "LlamaForCausalLMEagle3",
    "peagle": "LlamaForCausalLMEagle3",
    "eagle": "LlamaForCausalLM",  # vLLM makes EagleLlamaForCausalLM of it
    "dflash": "DFlashDraftModel",
}


def drafter_config(drafter: Drafter, target: Architecture) -> dict[str, Any] | None:
    """config.json of a drafter's shape in the format that engines share; None where there is none to write.

    EAGLE-3: SafeAILab's and SpecForge's, with the auxiliary layers always named (engines guess where they are not).
    """
    if isinstance(drafter, Medusa):
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "truncated_vocab_size": target.vocab_size,
            "num_heads": drafter.heads,
            "num_hidden_layers": drafter.residual,
            "original_lm_head": drafter.shared_head,
        }
    if drafter.is_model:
        config = to_hf_config(drafter.architecture)
        return config | {"pard_token": mask_token(target)} if drafter.family == "pard" else config
    if not isinstance(drafter, FeatureDrafter) or drafter.family not in ARCHITECTURES:
        return None
    config = to_hf_config(drafter.architecture.replace(draft_vocab_size=None))
    config |= {
        "architectures": [ARCHITECTURES[drafter.family]],
        "draft_vocab_size": drafter.architecture.head_rows,
        "target_hidden_size": drafter.target_hidden_size,
        "norm_before_residual": False,
        "tie_word_embeddings": False,
    }
    if isinstance(drafter, DFlash):
        return config | block_fields(drafter, target)
    if drafter.family == "peagle":
        config["ptd_token_id"] = mask_token(target)
    if drafter.states > 1:
        ids = auxiliary_layers(target.num_hidden_layers, drafter.states)
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(ids), "use_aux_hidden_state": True}
    return config


def block_fields(drafter: DFlash, target: Architecture) -> dict[str, Any]:
    """What a DFlash config has of its own (z-lab's form). `target_layer_ids` name outputs of layers, one less than the inputs
    that EAGLE-3 names; vLLM adds one."""
    inputs = auxiliary_layers(target.num_hidden_layers, drafter.states)
    ids = [max(0, layer - 1) for layer in inputs]
    return {
        "model_type": "qwen3",
        "block_size": drafter.block,
        "num_target_layers": target.num_hidden_layers,
        "dflash_config": {"mask_token_id": mask_token(target), "target_layer_ids": ids},
    }


def mask_token(target: Architecture) -> int:
    """The row of the target's embedding that stands for a token still to be drafted: the last one, which tokenizers reserve or
    pad with. Who trains such a drafter writes the one that it was trained with."""
    return target.vocab_size - 1


def auxiliary_layers(layers: int, states: int) -> tuple[int, ...]:
    """Evenly from layer 2 to the third from the end: (2, N/2, N - 3) for three of them, the default of every engine."""
    if states == 3:
        return tuple(sorted({min(2, layers - 1), layers // 2, max(0, layers - 3)}))
    first, last = min(2, layers - 1), max(0, layers - 3)
    return tuple(sorted({round(first + (last - first) * place / (states - 1)) for place in range(states)}))


def vllm_drafter_config(drafter: Drafter, model: str, gamma: int, schedule: Ranges = ()) -> dict[str, Any]:
    """vLLM's --speculative-config for a drafter of any family; `model`: its folder. {} where vLLM does not run it."""
    known = VLLM.get(drafter.family)
    if known is None:
        return {}
    config = dict(known)
    if drafter.trains:
        config["model"] = model
    config["num_speculative_tokens"] = largest_gamma(schedule, gamma)
    if isinstance(drafter, Suffix):
        config["suffix_decoding_max_tree_depth"] = drafter.max_n
    elif isinstance(drafter, NGram):
        config |= {"prompt_lookup_min": drafter.min_n, "prompt_lookup_max": drafter.max_n}
    if len(schedule) > 1 or any(entry[2] != config["num_speculative_tokens"] for entry in schedule):
        config["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in schedule]
    return config
