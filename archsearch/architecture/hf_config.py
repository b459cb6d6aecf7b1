"""Architecture to and from a Hugging Face config.json.

Reading applies the defaults that transformers 5 applies when a field is absent (they differ by
family). Writing picks the first family whose config reads back as the same shape, so what a reader
cannot see is never lost silently; what no family can say (a trimmed head, the pattern "SSSL" on two
layers) travels in the extra key `archsearch.architecture`, which readers here trust.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_families import (
    NOT_MODELLED,
    SAME_AS,
    extend,
    quantised,
    required,
    text_config,
)
from archsearch.architecture.hf_fields import Config, check_fields, short
from archsearch.errors import ArchsearchError, InvalidShapeError
from archsearch.files import read_json


@dataclass(frozen=True, slots=True)
class _Family:
    """What transformers 5 assumes for a model_type when config.json leaves a field out. `None`:
    derived from the other fields. `causal_lm`: the class of what is written as it."""

    causal_lm: str = ""
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    sliding_window: int | None = None
    tie_word_embeddings: bool = False


MOST_SKEW: Final = 10.0  # the popular expert takes all

_MISTRAL: Final = _Family(
    "MistralForCausalLM", 8, max_position_embeddings=131072, sliding_window=4096
)
_QWEN2: Final = _Family("Qwen2ForCausalLM", 32, max_position_embeddings=32768, sliding_window=4096)
FAMILIES: Final = {
    "llama": _Family("LlamaForCausalLM"),
    "mistral": _MISTRAL,
    "ministral": replace(_MISTRAL, causal_lm="MinistralForCausalLM"),
    "qwen2": _QWEN2,
    "qwen3": replace(_QWEN2, causal_lm="Qwen3ForCausalLM", head_dim=128),
    "opt": _Family("OPTForCausalLM", tie_word_embeddings=True),
}

SIDE_FILES: Final = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
READ_ONLY: Final = {
    "mixtral": _Family(num_key_value_heads=8, max_position_embeddings=131072),
    "qwen3_moe": _Family(num_key_value_heads=4, head_dim=128, max_position_embeddings=32768),
    "gpt_oss": _Family(num_key_value_heads=8, head_dim=64, max_position_embeddings=131072),
    "llama4_text": _Family(num_key_value_heads=8, max_position_embeddings=4096 * 32),
    "glm4_moe": _Family(num_key_value_heads=8, head_dim=128, max_position_embeddings=131072),
    "deepseek_v3": _Family(max_position_embeddings=4096),
    "gemma3_text": _Family(
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    ),
    "phi3": _Family(max_position_embeddings=4096),
}
"""Targets that no draft is written as; `hf_families` reads what they have of their own."""


def from_hf_config(config: Config) -> Architecture:
    """The Architecture a config.json describes; its `archsearch.architecture`, where present, is
    taken at its word.

    Raises InvalidShapeError for a model_type that is not supported, a missing field or a variant
    that is not modelled.
    """
    ours = config.get("archsearch")
    if isinstance(ours, Mapping) and "architecture" in ours:
        return _from_our_key(ours["architecture"])
    check_fields(config)
    config = text_config(config)
    check_fields(config)
    given = config.get("model_type")
    model_type = SAME_AS.get(str(given), str(given))
    config = {**config, "model_type": model_type}
    if model_type in NOT_MODELLED:
        raise InvalidShapeError(
            f"model_type {model_type!r} has {NOT_MODELLED[model_type]}, which is not modelled"
        )
    if model_type not in FAMILIES | READ_ONLY:
        known = ", ".join([*FAMILIES, *READ_ONLY, *SAME_AS])
        raise InvalidShapeError(
            f"model_type {short(given)} is not supported; use a model of one of {known}"
        )
    arch = _from_opt(config) if model_type == "opt" else _from_rotary(config, model_type)
    if model_type in READ_ONLY:
        arch = _skewed(ours, extend(config, arch))
    return quantised(config, arch)


def _skewed(ours: object, arch: Architecture) -> Architecture:
    """`arch` with the routing skew that `archsearch.routing_skew` in config.json names."""
    if (skew := ours.get("routing_skew") if isinstance(ours, Mapping) else None) is None:
        return arch
    if isinstance(skew, bool) or not isinstance(skew, int | float) or not 0 <= skew <= MOST_SKEW:
        raise InvalidShapeError(
            f"archsearch.routing_skew in config.json must be a number of 0 to {MOST_SKEW:g}, got"
            f" {short(skew)}"
        )
    return arch.replace(routing_skew=float(skew))


def _from_our_key(fields: object) -> Architecture:
    if not isinstance(fields, Mapping):
        raise InvalidShapeError(
            "archsearch.architecture in config.json must hold named fields, got"
            f" {type(fields).__name__}"
        )
    try:
        return Architecture.from_dict(dict(fields))
    except TypeError as error:  # a required field is missing
        raise InvalidShapeError(
            f"archsearch.architecture in config.json is incomplete: {error}"
        ) from None


def _rope_theta(config: Config) -> float:
    for place in (config.get("rope_parameters"), config.get("rope_scaling"), config):
        if isinstance(place, Mapping) and isinstance(place.get("rope_theta"), int | float):
            return float(place["rope_theta"])
    return 10000.0


def _from_rotary(config: Config, model_type: str) -> Architecture:
    """Llama, Mistral, Ministral, Qwen2, Qwen3: rotary positions, RMSNorm, gated MLP."""
    family = (FAMILIES | READ_ONLY)[model_type]
    hidden, heads, layers = (
        required(config, name)
        for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    # Absent and null differ: null always means "as many as the query heads" ("hidden_size / heads"
    # for head_dim).
    kv_heads = config.get("num_key_value_heads", family.num_key_value_heads)
    head_dim = config.get("head_dim", family.head_dim)
    windows = _windows(config, model_type, layers)
    all_biases = model_type in ("llama", "qwen3", "qwen3_moe") and bool(
        config.get("attention_bias", False)
    )
    return Architecture(
        hidden_size=hidden,
        intermediate_size=required(config, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads if kv_heads is None else kv_heads,
        head_dim=hidden // heads if head_dim is None else head_dim,
        vocab_size=required(config, "vocab_size"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", family.tie_word_embeddings)),
        attention_bias=all_biases or model_type == "qwen2",
        attention_output_bias=all_biases,
        mlp_bias=model_type == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        window_pattern=minimal_pattern(windows),
        sliding_window=next((window for window in windows if window), None),
        max_position_embeddings=config.get(
            "max_position_embeddings", family.max_position_embeddings
        ),
        rope_theta=_rope_theta(config),
        model_type=model_type,
    )


def _windows(config: Config, model_type: str, layers: int) -> list[int | None]:
    """The sliding window of each layer as the family's modelling code in transformers 5 applies
    it."""
    # those read their own
    if model_type == "llama" or (model_type in READ_ONLY and model_type != "mixtral"):
        return [None] * layers
    window = config.get("sliding_window", (FAMILIES | READ_ONLY)[model_type].sliding_window)
    qwen = model_type in ("qwen2", "qwen3")
    if window is None or (qwen and not config.get("use_sliding_window", False)):
        return [None] * layers
    # AutoConfig turns a mistral with layer_types into a ministral
    if (types := config.get("layer_types")) is None:
        first = config.get("max_window_layers", 28) if qwen else 0
        return [window if layer >= first else None for layer in range(layers)]
    if len(types) != layers or set(types) - {"sliding_attention", "full_attention"}:
        raise InvalidShapeError(
            f"layer_types must name sliding_attention or full_attention per layer ({layers}), got"
            f" {short(types)}"
        )
    return [window if kind == "sliding_attention" else None for kind in types]


def minimal_pattern(windows: list[int | None]) -> str:
    """The shortest string of L and S that gives `windows` when tiled over the layers."""
    letters = "".join("S" if window else "L" for window in windows)
    for period in range(1, len(letters) + 1):
        if all(letter == letters[i % period] for i, letter in enumerate(letters)):
            return letters[:period]
    return "L"


def _from_opt(config: Config) -> Architecture:
    """OPT: learned positions (offset 2), LayerNorm, biases, plain MLP, tied embeddings."""
    hidden, heads = required(config, "hidden_size"), required(config, "num_attention_heads")
    if config.get("word_embed_proj_dim", hidden) not in (hidden, None) or not config.get(
        "do_layer_norm_before", True
    ):
        raise InvalidShapeError(
            "this OPT projects its embeddings or normalises after the block (as opt-350m): not"
            " modelled; use another size"
        )
    if not config.get("layer_norm_elementwise_affine", True) or config.get(
        "_remove_final_layer_norm", False
    ):
        raise InvalidShapeError(
            "this OPT has layer norms without weights or no final layer norm, which is not modelled"
        )
    if hidden % heads:
        raise InvalidShapeError(
            f"OPT needs hidden_size ({hidden}) to be a multiple of num_attention_heads ({heads})"
        )
    bias = bool(config.get("enable_bias", True))
    positions = config.get("max_position_embeddings", FAMILIES["opt"].max_position_embeddings)
    return Architecture(
        hidden_size=hidden,
        intermediate_size=required(config, "ffn_dim"),
        num_hidden_layers=required(config, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        vocab_size=required(config, "vocab_size"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", True)),
        gated_mlp=False,
        rms_norm=False,
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=bias,
        learned_positions=positions + 2,  # OPTLearnedPositionalEmbedding reserves two rows
        max_position_embeddings=positions,
        model_type="opt",
    )


def to_hf_config(arch: Architecture, **extra: Any) -> dict[str, Any]:
    """A config.json that AutoConfig and AutoModelForCausalLM load, and `from_hf_config` reads back
    as `arch`.

    A trimmed head is written as a full untied one (the shape every engine loads). `extra` (token
    ids, rms_norm_eps, dtype, a target's rope_parameters, ...) overrides what is written here.
    Raises InvalidShapeError when no family can hold the shape.
    """
    full = arch.replace(
        draft_vocab_size=None, tie_word_embeddings=arch.tie_word_embeddings and not arch.trimmed
    )
    for model_type in dict.fromkeys((arch.model_type, *FAMILIES)):
        config = _config_in(full, model_type) if model_type in FAMILIES else None
        if config is not None and _same_shape(config, full):
            break
    else:
        raise InvalidShapeError(f"no Hugging Face model family can hold this shape: {arch.label()}")
    config |= extra
    if from_hf_config(config) != arch:
        config["archsearch"] = {**extra.get("archsearch", {}), "architecture": arch.to_dict()}
    return config


def _config_in(arch: Architecture, model_type: str) -> dict[str, object] | None:
    """`arch` in a family's own field names; None where the family's config class would refuse it.
    It may still lose something."""
    common: dict[str, object] = {
        "architectures": [FAMILIES[model_type].causal_lm],
        "model_type": model_type,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "num_hidden_layers": arch.num_hidden_layers,
        "num_attention_heads": arch.num_attention_heads,
        "max_position_embeddings": arch.max_position_embeddings,
        "tie_word_embeddings": arch.tie_word_embeddings,
    }
    if model_type in ("llama", "opt") and arch.hidden_size % arch.num_attention_heads:
        return None  # LlamaConfig refuses it
    if model_type == "opt":
        return common | {
            "ffn_dim": arch.intermediate_size,
            "word_embed_proj_dim": arch.hidden_size,
            "do_layer_norm_before": True,
            "enable_bias": arch.attention_bias,
        }
    config = common | {
        "intermediate_size": arch.intermediate_size,
        "num_key_value_heads": arch.num_key_value_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        # Both places: transformers 5 reads rope_parameters, older readers (and vLLM releases on
        # them) the top level.
        "rope_theta": arch.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": arch.rope_theta},
    }
    windows = arch.windows()
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    window = arch.sliding_window if any(windows) else None
    match model_type:
        case "llama":
            config |= {"attention_bias": arch.attention_bias, "mlp_bias": arch.mlp_bias}
        case "mistral":
            config |= {"sliding_window": window}
        case "ministral":
            config |= {"sliding_window": window, "layer_types": kinds}
        case _:
            config |= {
                "use_sliding_window": window is not None,
                "sliding_window": window,
                "layer_types": kinds,
            }
            if model_type == "qwen3":
                config["attention_bias"] = arch.attention_bias
    return config


def _same_shape(config: Config, arch: Architecture) -> bool:
    """Whether `config` reads back as `arch`, up to its family's name and how its window pattern is
    spelt."""
    read = from_hf_config(config)
    spelling = {
        "model_type": read.model_type,
        "window_pattern": read.window_pattern,
        "sliding_window": read.sliding_window,
    }
    return read.windows() == arch.windows() and read == arch.replace(**spelling)


def _with_side_files(config: Config, folder: Path) -> Config:
    """`config` with the quantisation that older tools write beside it: ModelOpt, AutoGPTQ,
    llm-awq."""
    if "quantization_config" in config:
        return config
    for name, method in SIDE_FILES.items():
        if (folder / name).is_file():
            found = read_json(folder / name, "quantisation config")
            inner = found.get("quantization", found) if isinstance(found, Mapping) else {}
            return {**config, "quantization_config": {"quant_method": method, **inner}}
    return config


def read_architecture(path: Path) -> Architecture:
    """The Architecture of a model folder or of a config.json file.

    Raises ArchsearchError when there is no config.json, it is not JSON, or it describes a model
    that is not supported.
    """
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise ArchsearchError(
            f"no config.json in {path}; give a model folder that holds one, or a catalogue name"
        )
    config = read_json(file, "model config")
    if not isinstance(config, Mapping):
        raise ArchsearchError(
            f"model config {file} must be a JSON object, got {type(config).__name__}"
        )
    config = _with_side_files(config, file.parent)
    try:
        return from_hf_config(config)
    except InvalidShapeError as error:
        raise InvalidShapeError(f"{file}: {error}") from None
