"""Settings of engines for a drafter that is no independent draft: the config.json of its shape,
vLLM's speculative config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import to_hf_config
from archsearch.architecture.hf_fields import Config
from archsearch.drafters.drafter import Drafter
from archsearch.drafters.heads import DFlash, FeatureDrafter, Medusa
from archsearch.drafters.lookup import NGram, Suffix
from archsearch.schedule import Ranges, largest_gamma

# vllm/config/speculative.py of 0.32: `method`, and what else the family needs.
VLLM: Final[Mapping[str, Mapping[str, object]]] = {
    **{name: {"method": name} for name in "eagle3 eagle mtp dflash medusa ngram suffix".split()},
    "independent": {"method": "draft_model"},
    "pard": {"method": "draft_model", "parallel_drafting": True},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
}
TRANSFORMER_FIELDS: Final = (
    "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads"
    " num_key_value_heads head_dim vocab_size rms_norm_eps max_position_embeddings hidden_act"
    " attention_bias mlp_bias rope_theta rope_parameters rope_scaling tie_word_embeddings"
).split()
ARCHITECTURES: Final = {
    "eagle3": "LlamaForCausalLMEagle3",
    "peagle": "LlamaForCausalLMEagle3",
    "eagle": "LlamaForCausalLM",  # vLLM makes EagleLlamaForCausalLM of it
    "dflash": "DFlashDraftModel",
}


def drafter_config(drafter: Drafter, target: Architecture) -> dict[str, object] | None:
    """config.json of a drafter's shape in the format that engines share; None where there is none
    to write.

    EAGLE-3: SafeAILab's and SpecForge's, with the auxiliary layers always named (engines guess
    where they are not).
    """
    if isinstance(drafter, Medusa):
        sizes = target.hidden_size, target.vocab_size
        return medusa_fields(*sizes, drafter.heads, drafter.residual, drafter.shared_head)
    if drafter.is_model:
        config = to_hf_config(drafter.architecture)
        return config | {"pard_token": mask_token(target)} if drafter.family == "pard" else config
    if not isinstance(drafter, FeatureDrafter) or drafter.family not in ARCHITECTURES:
        return None
    config = to_hf_config(drafter.architecture.replace(draft_vocab_size=None))
    plain = drafter.states < 2 or isinstance(drafter, DFlash)
    config |= feature_fields(
        drafter.family,
        drafter.architecture.head_rows,
        drafter.target_hidden_size,
        () if plain else auxiliary_layers(target.num_hidden_layers, drafter.states),
        mask_token(target) if drafter.family == "peagle" else None,
    )
    return config | block_fields(drafter, target) if isinstance(drafter, DFlash) else config


def medusa_fields(
    hidden_size: int, vocab_size: int, heads: int, residual: int, shared_head: bool
) -> dict[str, object]:
    """The config of Medusa heads."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": vocab_size,
        "num_heads": heads,
        "num_hidden_layers": residual,
        "original_lm_head": shared_head,
    }


def feature_fields(
    family: str, rows: int, width: int, layers: Sequence[int], mask: int | None
) -> dict[str, object]:
    """What the config of a head on hidden states has besides its layers'. `rows`: of its head;
    `width`: of a state; `layers`: of the target, whose inputs it reads (empty: its last state);
    `mask`: the token that rows read which are still to be drafted."""
    fields: dict[str, object] = {
        "architectures": [ARCHITECTURES[family]],
        "draft_vocab_size": rows,
        "target_hidden_size": width,
        "norm_before_residual": False,
        "tie_word_embeddings": False,
    }
    if mask is not None:
        fields["ptd_token_id"] = mask
    if layers:
        named = {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True}
        fields["eagle_config"] = named
    return fields


def block_fields(drafter: DFlash, target: Architecture) -> dict[str, object]:
    """What a DFlash config has of its own (z-lab's form). `target_layer_ids` name outputs of
    layers, one less than the inputs that EAGLE-3 names; vLLM adds one."""
    inputs = auxiliary_layers(target.num_hidden_layers, drafter.states)
    ids = [max(0, layer - 1) for layer in inputs]
    return {
        "model_type": "qwen3",
        "block_size": drafter.block,
        "num_target_layers": target.num_hidden_layers,
        "dflash_config": {"mask_token_id": mask_token(target), "target_layer_ids": ids},
    }


def mask_token(target: Architecture) -> int:
    """The row of the target's embedding used for a token still to be drafted: the last one, which
    tokenizers reserve or pad with. Trained drafters name the one that they were trained with."""
    return target.vocab_size - 1


def auxiliary_layers(layers: int, states: int = 3) -> tuple[int, ...]:
    """Evenly from layer 2 to the third from the end: (2, N/2, N - 3) for three of them, the default
    of every engine; fewer for targets of less than 6 layers."""
    first, last = min(2, layers - 1), max(0, layers - 3)
    if states == 3:
        return tuple(sorted({first, layers // 2, last}))
    return tuple(
        sorted({round(first + (last - first) * place / (states - 1)) for place in range(states)})
    )


def vllm_config(
    family: str,
    model: str,
    gamma: int,
    schedule: Ranges = (),
    draft_tensor_parallel: int | None = None,
) -> dict[str, object]:
    """vLLM's --speculative-config for a drafter in the folder `model`, "" for one that has none:
    `gamma`, or with a schedule its largest gamma and the ranges. {} where vLLM does not run the
    family."""
    if family not in VLLM:
        return {}
    most = largest_gamma(schedule, gamma)
    config = {**VLLM[family], **({"model": model} if model else {}), "num_speculative_tokens": most}
    if draft_tensor_parallel is not None:
        config["draft_tensor_parallel_size"] = draft_tensor_parallel
    if len(schedule) > 1 or any(entry[2] != most for entry in schedule):
        config["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in schedule]
    return config


def vllm_drafter_config(
    drafter: Drafter, model: str, gamma: int, schedule: Ranges = (), ranks: int | None = None
) -> dict[str, object]:
    """The same for a drafter, with what its lookup needs."""
    config = vllm_config(drafter.family, model if drafter.trains else "", gamma, schedule, ranks)
    if isinstance(drafter, Suffix):
        config["suffix_decoding_max_tree_depth"] = drafter.max_n
    elif isinstance(drafter, NGram):
        config |= {"prompt_lookup_min": drafter.min_n, "prompt_lookup_max": drafter.max_n}
    return config


def speculators_config(config: Config, gamma: int, target: str) -> dict[str, Any]:
    """The speculators form (0.7) of an EAGLE-3 head's config. `norm_before_residual` is always
    there: vLLM takes its absence for true in this form, and for false in the other."""
    states = config["target_hidden_size"]
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.7.0",
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": bool(config["norm_before_residual"]),
        **dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad"), False),
        "target_hidden_size": None if states == config["hidden_size"] else states,
        "eagle_aux_hidden_state_layer_ids": list(
            config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        ),
        "transformer_layer_config": transformer_layers(config),
        "speculators_config": proposals("eagle3", gamma, target, ["LlamaForCausalLM"]),
    }


def transformer_layers(config: Config) -> dict[str, object]:
    """What speculators keeps of a config of layers."""
    return {name: config[name] for name in TRANSFORMER_FIELDS if name in config}


def proposals(
    algorithm: str, gamma: int, target: str, architectures: list[str]
) -> dict[str, object]:
    """How a drafter proposes and who verifies, in the speculators form."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": gamma,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"name_or_path": target, "architectures": architectures},
    }
