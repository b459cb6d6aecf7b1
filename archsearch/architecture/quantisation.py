"""Which format a checkpoint's weights are kept in, by the `quantization_config` that its
config.json carries.

Every tool that quantises writes its own dictionary (`quant_method`); what they have in common is
the width of the weights, which decides the time of a pass. The fields are those that transformers 5
(`utils/quantization_config.py`), compressed-tensors 0.12, ModelOpt 0.37, AutoAWQ, GPTQModel and
Quark write. What no row here knows is named, never taken for 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from archsearch.workload import WEIGHT_BYTES

Quantisation = Mapping[str, Any]
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
    reader = _READERS.get(method.removesuffix("-marlin"))
    if reader is None:
        return (
            f"quant_method {method!r}" if method else "a quantization_config without quant_method"
        )
    found = reader(quantisation)
    return found if found in WEIGHT_BYTES else f"{method} with {found}"


def _bits(quantisation: Quantisation) -> str:
    """AWQ, GPTQ, AutoRound: integers of `bits` bits, four where it is left out (transformers'
    default of AWQ)."""
    bits: Any = quantisation.get("bits", quantisation.get("w_bit", 4))
    floats = str(quantisation.get("data_type", "int")).lower()
    if "fp" in floats:
        return {"nv_fp": "nvfp4", "nv_fp4": "nvfp4", "mx_fp": "mxfp4", "mx_fp4": "mxfp4"}.get(
            floats, floats
        )
    return _INTEGERS.get(bits, f"{bits} bits")


def _bitsandbytes(quantisation: Quantisation) -> str:
    if quantisation.get("load_in_4bit") or quantisation.get("_load_in_4bit"):
        return "nf4"
    return (
        "load_in_8bit"
        if quantisation.get("load_in_8bit") or quantisation.get("_load_in_8bit")
        else "no width"
    )


def _compressed(quantisation: Quantisation) -> str:
    """compressed-tensors: groups of layers, each with the type, bits and group size of its
    weights."""
    groups = quantisation.get("config_groups")
    found = set()
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        bits: Any = weights.get("num_bits")
        group_size: Any = weights.get("group_size")
        floats = weights.get("type") == "float"
        if floats and bits == 4:
            found.add({16: "nvfp4", 32: "mxfp4"}.get(group_size, "4-bit floats"))
        else:
            found.add(
                FP8
                if floats and bits == 8
                else f"{bits}-bit floats"
                if floats
                else _INTEGERS.get(bits, f"{bits} bits")
            )
    if len(found) == 1:
        return found.pop()
    return (
        f"groups in {' and '.join(sorted(found))}"
        if found
        else f"format {quantisation.get('format')!r}"
    )


def _modelopt(quantisation: Quantisation) -> str:
    algorithm = quantisation.get("quant_algo")
    if algorithm is None:
        return _compressed(quantisation)
    return _MODELOPT.get(str(algorithm).upper(), f"quant_algo {algorithm!r}")


def _quark(quantisation: Quantisation) -> str:
    whole = quantisation.get("global_quant_config")
    weight = whole.get("weight") if isinstance(whole, Mapping) else None
    dtype = weight.get("dtype") if isinstance(weight, Mapping) else None
    if quantisation.get("layer_quant_config"):
        return "layers of several formats"
    return _QUARK.get(str(dtype), f"weights in {dtype}")


def _always(name: str) -> Callable[[Quantisation], str]:
    return lambda _: name


_READERS: Final[dict[str, Callable[[Quantisation], str]]] = {
    "fp8": _always(FP8),
    "fbgemm-fp8": _always(FP8),
    "modelopt-fp8": _always(FP8),
    "nvfp4": _always("nvfp4"),
    "modelopt-fp4": _always("nvfp4"),
    "mxfp4": _always("mxfp4"),
    "eetq": _always("int8"),
    "experts-int8": _always("int8"),
    "awq": _bits,
    "gptq": _bits,
    "auto-round": _bits,
    "intel/auto-round": _bits,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "quark": _quark,
}
