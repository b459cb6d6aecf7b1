"""What a config.json says beyond a plain transformer: experts, latent attention, windows of Gemma
3, gpt-oss and Llama 4.

`FAMILIES` are read, never written: drafts are plain transformers. Each reader takes what
`hf_config` has read of the fields that all families share and adds its own; a variant that is not
modelled is an InvalidShapeError with the field and its value.

`weight_format` says in which format a checkpoint's weights are kept, whose width decides the time
of a pass; every tool that quantises writes its own dictionary (`quant_method`). The fields are
those that transformers 5
(`utils/quantization_config.py`), compressed-tensors 0.12, ModelOpt 0.37, AutoAWQ, GPTQModel and
Quark write. What no row here knows is named, never taken for 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_fields import Config
from archsearch.errors import InvalidShapeError
from archsearch.workload import WEIGHT_BYTES

FP8: Final = "float8_e4m3fn"
_INTEGERS: Final = {4: "int4", 8: "int8"}
_MODELOPT: Final = {
    "FP8": FP8,
    "FP8_PB_WO": FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8,
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "W4A16_AWQ": "int4",
    "W4A8_AWQ": "int4",
    "INT8_SQ": "int8",
    "W8A8_SQ_PER_CHANNEL": "int8",
    "W8A16": "int8",
    "W4A16": "int4",
    "MXFP4": "mxfp4",
}
_QUARK: Final = {
    "fp8_e4m3": FP8,
    "fp4": "mxfp4",
    "int4": "int4",
    "uint4": "int4",
    "int8": "int8",
    "uint8": "int8",
}


def weight_format(quantisation: object) -> str:
    """The format of quantised weights: "" without quantisation, one of WEIGHT_BYTES where it is
    priced, else what it is in words (`hqq`, `gptq with 3 bits`), which nobody prices.

    >>> weight_format({"quant_method": "gptq", "bits": 4, "group_size": 128})
    'int4'
    >>> weight_format({"quant_method": "gptq", "bits": 3})
    'gptq with 3 bits'
    """
    if not isinstance(quantisation, Mapping) or not quantisation:
        return ""
    method = (
        str(quantisation.get("quant_method") or quantisation.get("quantization_method") or "")
        .lower()
        .replace("_", "-")
    )
    if not method and "quant_algo" in quantisation:
        method = "modelopt"
    if (reader := _QUANTISED.get(method.removesuffix("-marlin"))) is None:
        if method:
            return f"quant_method {method!r}"
        return "a quantization_config without quant_method"
    found = reader if isinstance(reader, str) else reader(quantisation)
    return found if found in WEIGHT_BYTES else f"{method} with {found}"


def _bits(quantisation: Config) -> str:
    """AWQ, GPTQ, AutoRound: integers of `bits` bits, four where it is left out (transformers'
    default of AWQ)."""
    bits = quantisation.get("bits", quantisation.get("w_bit", 4))
    floats = str(quantisation.get("data_type", "int")).lower()
    if "fp" in floats:
        return {"nv_fp": "nvfp4", "nv_fp4": "nvfp4", "mx_fp": "mxfp4", "mx_fp4": "mxfp4"}.get(
            floats, floats
        )
    return _INTEGERS.get(bits, f"{bits} bits")


def _bitsandbytes(quantisation: Config) -> str:
    if quantisation.get("load_in_4bit") or quantisation.get("_load_in_4bit"):
        return "nf4"
    if quantisation.get("load_in_8bit") or quantisation.get("_load_in_8bit"):
        return "load_in_8bit"
    return "no width"


def _compressed(quantisation: Config) -> str:
    """compressed-tensors: groups of layers, each with the type, bits and group size of its
    weights."""
    groups = quantisation.get("config_groups")
    found = set()
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        bits: Any = weights.get("num_bits")
        size: Any = weights.get("group_size")
        if weights.get("type") != "float":
            found.add(_INTEGERS.get(bits, f"{bits} bits"))
        else:
            narrow = {16: "nvfp4", 32: "mxfp4"}.get(size) if bits == 4 else None
            found.add(narrow or (FP8 if bits == 8 else f"{bits}-bit floats"))
    if len(found) == 1:
        return found.pop()
    if found:
        return f"groups in {' and '.join(sorted(found))}"
    return f"format {quantisation.get('format')!r}"


def _modelopt(quantisation: Config) -> str:
    if (algorithm := quantisation.get("quant_algo")) is None:
        return _compressed(quantisation)
    return _MODELOPT.get(str(algorithm).upper(), f"quant_algo {algorithm!r}")


def _quark(quantisation: Config) -> str:
    whole = quantisation.get("global_quant_config")
    weight = whole.get("weight") if isinstance(whole, Mapping) else None
    dtype = weight.get("dtype") if isinstance(weight, Mapping) else None
    if quantisation.get("layer_quant_config"):
        return "layers of several formats"
    return _QUARK.get(str(dtype), f"weights in {dtype}")


_QUANTISED: Final[dict[str, str | Callable[[Config], str]]] = {
    "fp8": FP8,
    "fbgemm-fp8": FP8,
    "modelopt-fp8": FP8,
    "nvfp4": "nvfp4",
    "modelopt-fp4": "nvfp4",
    "mxfp4": "mxfp4",
    "eetq": "int8",
    "experts-int8": "int8",
    "awq": _bits,
    "gptq": _bits,
    "auto-round": _bits,
    "intel/auto-round": _bits,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "quark": _quark,
}


SAME_AS: Final = {"kimi_k2": "deepseek_v3"}
"""Types whose config.json has the fields of another type, which their code is a copy of."""
NOT_MODELLED: Final = {
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_moe"),
        "linear attention (a gated delta net) in three of four layers",
    ),
    "kimi_linear": "linear attention in three of four layers",
    "minimax": "linear (lightning) attention",
    "deepseek_v32": "sparse attention, whose indexer chooses the keys",
    "glm_moe_dsa": "sparse attention, whose indexer chooses the keys",
    "gemma3n_text": "embeddings of every layer and several residual streams",
    **dict.fromkeys(
        ("nemotron_h", "jamba", "falcon_h1", "granitemoehybrid"), "state-space (Mamba) layers"
    ),
}
"""The part of a type that no kernel here prices: such a target is refused by it."""
SIZES: Final = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size"
).split()
TEXT_OF: Final = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
"""Types whose config.json keeps the language model under `text_config`, and the type of that."""
EXPERTS_ONLY: Final = ("mxfp4", "experts_int8")
"""Methods that leave all but the experts of a mixture in 16 bits."""


def text_config(config: Config) -> Config:
    """The part of `config` that describes the language model, with the quantisation that is
    written beside it.

    Raises InvalidShapeError where a model with more than language lacks text_config.
    """
    kind = config.get("model_type")
    inner = config.get("text_config")
    if kind not in TEXT_OF:
        return config
    if not isinstance(inner, Mapping):
        raise InvalidShapeError(
            f"config.json of model_type {kind!r} needs text_config, the fields of its language"
            " model"
        )
    outer = {name: config[name] for name in ("quantization_config", "archsearch") if name in config}
    text = {**outer, **inner, "model_type": TEXT_OF[str(kind)]}
    if absent := [name for name in SIZES if name not in text]:
        text |= {
            name: value
            for name, value in class_defaults(text["model_type"]).items()
            if name in absent
        }
    return text


@lru_cache(maxsize=8)
def class_defaults(model_type: str) -> Config:
    """What transformers takes where the nested config of a type leaves a field out, as
    `save_pretrained` does with each that is the default; nothing where transformers is not
    installed or does not know the type."""
    try:
        from transformers import CONFIG_MAPPING

        return CONFIG_MAPPING[model_type]().to_dict()
    except (ImportError, KeyError):
        return {}


def extend(config: Config, base: Architecture) -> Architecture:
    """`base` (what all families share) with what the family of `config` adds.

    Raises InvalidShapeError for a missing field or a variant that is not modelled.
    """
    shape = _READERS[str(config["model_type"])](config, base)
    more = "num_nextn_predict_layers"
    return shape.replace(mtp_layers=required(config, more)) if config.get(more) else shape


def quantised(config: Config, arch: Architecture) -> Architecture:
    """`arch` with what `quantization_config` says of its weights: `served_dtype`, or
    `expert_format` where it is of the experts alone. `models.targets.TargetRef.served` prices it,
    or refuses a format that nobody prices by its name."""
    given = config.get("quantization_config")
    found = weight_format(given)
    if (
        isinstance(given, Mapping)
        and given.get("quant_method") in EXPERTS_ONLY
        and arch.num_experts
    ):
        return arch.replace(expert_format=found)
    return arch.replace(served_dtype=found) if found else arch


def required(config: Config, *names: str) -> int:
    """The first of `names` that is there. Raises InvalidShapeError for none."""
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    raise InvalidShapeError(
        f"config.json of model_type {config.get('model_type')!r} needs {' or '.join(names)}"
    )


def _only(config: Config, name: str, allowed: tuple[object, ...]) -> None:
    if name in config and config[name] not in allowed:
        raise InvalidShapeError(
            f"{name}={config[name]!r} of model_type {config.get('model_type')!r} is not modelled;"
            f" known: {', '.join(map(repr, allowed))}"
        )


def _pattern(config: Config, base: Architecture, window: int, period: int) -> dict[str, object]:
    """`period` - 1 layers with a window, then one without; `layer_types` that say otherwise are
    refused, but of Llama 4, which names its chunks."""
    letters = "S" * (period - 1) + "L"
    kinds = ["sliding_attention"] * (period - 1) + ["full_attention"]
    types, layers = config.get("layer_types"), base.num_hidden_layers
    usual = [kinds[n % period] for n in range(layers)]
    if types is not None and list(types) != usual and base.model_type != "llama4_text":
        raise InvalidShapeError(
            f"layer_types of model_type {base.model_type!r} other than one full layer in {period}"
            " are not modelled"
        )
    return {"window_pattern": letters[:layers], "sliding_window": window}


def _mixture(config: Config, *names: str, columns: int = 0) -> dict[str, int]:
    """Routed experts of `columns` each (0: as the config says), whose number is one of `names`;
    shared experts and plain layers before them as DeepSeek's config has them, where it does."""
    columns = columns or required(config, "moe_intermediate_size")
    return {
        "num_experts": required(config, *names),
        "num_experts_per_tok": required(config, "num_experts_per_tok", "experts_per_token"),
        "moe_intermediate_size": columns,
        "shared_expert_size": columns * int(config.get("n_shared_experts") or 0),
        "first_dense_layers": int(config.get("first_k_dense_replace") or 0),
    }


def _qwen3_moe(config: Config, base: Architecture) -> Architecture:
    _only(config, "decoder_sparse_step", (1,))
    _only(config, "mlp_only_layers", ([], None))
    return base.replace(**_mixture(config, "num_experts", "num_local_experts"), qk_norm=True)


def _gpt_oss(config: Config, base: Architecture) -> Architecture:
    """Biases everywhere, a sink a head, every other layer (the first among them) with a window."""
    biases = bool(config.get("attention_bias", True))
    return base.replace(
        **_mixture(config, "num_local_experts", "num_experts", columns=base.intermediate_size),
        attention_bias=biases,
        attention_output_bias=biases,
        mlp_bias=True,
        attention_sinks=True,
        **_pattern(config, base, int(config.get("sliding_window") or 128), 2),
    )


def _llama4(config: Config, base: Architecture) -> Architecture:
    """Chunked attention on three of four layers counts as a window of a chunk; its norm of queries
    and keys has no weights.

    Where every second layer has experts (Maverick) as many count as come first without: what a pass
    runs is the same, whatever their order.
    """
    columns, layers = required(config, "intermediate_size"), base.num_hidden_layers
    listed = config.get("moe_layers")
    step = required({"interleave_moe_layer_step": 1, **config}, "interleave_moe_layer_step")
    with_experts = len(listed) if isinstance(listed, list) and listed else layers // step
    mixture = _mixture(config, "num_local_experts", columns=columns)
    mixture |= {"shared_expert_size": columns, "first_dense_layers": layers - with_experts}
    return base.replace(
        **mixture,
        intermediate_size=required(config, "intermediate_size_mlp", "intermediate_size"),
        **_pattern(config, base, int(config.get("attention_chunk_size") or 8192), 4),
    )


def _deepseek(config: Config, base: Architecture) -> Architecture:
    _only(config, "moe_layer_freq", (1,))
    nope, rope = required(config, "qk_nope_head_dim"), required(config, "qk_rope_head_dim")
    return base.replace(
        **_mixture(config, "n_routed_experts", "num_local_experts"),
        head_dim=nope + rope,
        num_key_value_heads=base.num_attention_heads,
        q_lora_rank=int(config.get("q_lora_rank") or 0),
        kv_lora_rank=required(config, "kv_lora_rank"),
        qk_rope_head_dim=rope,
        v_head_dim=required(config, "v_head_dim"),
    )


def _glm4_moe(config: Config, base: Architecture) -> Architecture:
    """GLM-4.5 and GLM-4.5-Air: plain attention with biases on queries, keys and values; DeepSeek's
    experts beside it."""
    return base.replace(
        **_mixture(config, "n_routed_experts", "num_local_experts"),
        attention_bias=bool(config.get("attention_bias", False)),
        qk_norm=bool(config.get("use_qk_norm", False)),
    )


def _gemma3(config: Config, base: Architecture) -> Architecture:
    """Norms before and behind attention and FFN, normed queries and keys, five layers with a window
    and one without."""
    window = int(config.get("sliding_window") or 4096)
    period = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
    pattern = _pattern(config, base, window, period)
    return base.replace(qk_norm=True, sandwich_norms=True, **pattern)


def _phi3(config: Config, base: Architecture) -> Architecture:
    """Phi-3 and Phi-4: Llama with q, k, v and gate, up each stored as one matrix."""
    window = config.get("sliding_window")
    return base.replace(window_pattern="S", sliding_window=int(window)) if window else base


_READERS: Final[dict[str, Callable[[Config, Architecture], Architecture]]] = {
    "mixtral": lambda config, base: base.replace(
        **_mixture(config, "num_local_experts", columns=base.intermediate_size)
    ),
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "deepseek_v3": _deepseek,
    "glm4_moe": _glm4_moe,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
}
