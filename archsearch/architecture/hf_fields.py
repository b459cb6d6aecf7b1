"""The type and bounds of every field of a config.json that is read, checked before any of it is
used."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, Final

from archsearch.errors import InvalidShapeError

MOST_LAYERS: Final = 1024
MOST: Final = 100_000_000  # of any other size: beyond every vocabulary and width
SIZES: Final = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    " head_dim vocab_size"
).split()
"""What every model has."""
_FROM_ONE: Final = [
    *SIZES,
    *(
        "draft_vocab_size target_hidden_size max_position_embeddings sliding_window ffn_dim"
        " word_embed_proj_dim num_local_experts num_experts n_routed_experts"
        " num_experts_per_tok experts_per_token moe_intermediate_size intermediate_size_mlp"
        " kv_lora_rank interleave_moe_layer_step attention_chunk_size sliding_window_pattern"
        " _sliding_window_pattern qk_nope_head_dim qk_rope_head_dim v_head_dim num_heads"
        " medusa_num_heads"
    ).split(),
]
_FROM_ZERO: Final = (
    "max_window_layers n_shared_experts first_k_dense_replace q_lora_rank medusa_num_layers"
    " num_nextn_predict_layers"
).split()
_FLAGS: Final = (
    "tie_word_embeddings attention_bias mlp_bias use_sliding_window enable_bias"
    " do_layer_norm_before layer_norm_elementwise_affine _remove_final_layer_norm"
    " use_qk_norm original_lm_head norm_before_residual"
).split()
Config = Mapping[str, Any]
"""A config.json as transformers writes it."""
_PLAIN: Final[Mapping[str, Any]] = {"int": int, "bool": bool, "str": str, "float": int | float}


def short(value: object) -> str:
    """`value` as it is quoted in an error.

    >>> short("x" * 100)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    text = repr(value)
    return text if len(text) <= 60 else text[:40] + "..."


def is_whole(value: object, low: int, high: int = MOST) -> bool:
    """Whether `value` is an integer of `low` to `high`; True and False are none."""
    return type(value) is int and low <= value <= high


def check_types(types: Mapping[str, str], data: Mapping[str, Any], most: int = MOST) -> None:
    """Refuse values of `data` that are not of the type their annotation in `types` names; numbers
    must be finite, not negative and, whole ones, at most `most`. Annotations that are no plain type
    pass. Raises InvalidShapeError with the field and its value."""
    for name, value in data.items():
        kind, _, null = types.get(name, "").partition(" | ")
        if (null and value is None) or kind not in _PLAIN:
            continue
        fits = isinstance(value, _PLAIN[kind]) and isinstance(value, bool) == (kind == "bool")
        if not fits or (
            kind in ("int", "float")
            and not 0 <= value <= (most if kind == "int" else sys.float_info.max)
        ):
            raise InvalidShapeError(f"{name} must be of type {types[name]}, got {short(value)}")


def check_fields(config: Config) -> None:
    """Refuse fields of another type or beyond all bounds; those that are absent or null are passed
    over. Raises InvalidShapeError with the field and its value."""

    def refuse(name: str, what: str) -> None:
        raise InvalidShapeError(f"{name} must be {what}, got {short(config[name])}")

    given = {name: value for name, value in config.items() if value is not None}
    for names, low in ((_FROM_ONE, 1), (_FROM_ZERO, 0)):
        for name in names:
            most = MOST_LAYERS if name == "num_hidden_layers" else MOST
            if name in given and not is_whole(given[name], low, most):
                refuse(name, f"a whole number of {low} to {most:,}")
    for name in _FLAGS:
        if name in given and not isinstance(given[name], bool):
            refuse(name, "true or false")
    for name in ("model_type", "speculators_model_type"):
        if name in given and not isinstance(given[name], str):
            refuse(name, "a name")
    for name in ("layer_types", "architectures"):
        kinds = given.get(name, [])
        if not isinstance(kinds, list | tuple) or not all(isinstance(kind, str) for kind in kinds):
            refuse(name, "a list of names")
    if not isinstance(given.get("quantization_config", {}), Mapping):
        refuse("quantization_config", "an object")
    theta = given.get("rope_theta", 1.0)
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
        refuse("rope_theta", "a positive number")
