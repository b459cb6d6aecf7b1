"""A model as GGUF, the file llama.cpp loads. Written only where it can be done exactly; otherwise
one line names llama.cpp's own converter.

Tensors keep their values; LLaMA's Q and K rows change order, because llama.cpp rotates neighbouring
pairs where transformers rotates halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import from_hf_config, read_architecture
from archsearch.architecture.hf_fields import Config
from archsearch.drafters.read import family_of_config
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.files import read_json
from archsearch.models.files import aux_layers
from archsearch.workload import GGUF_DTYPES

if TYPE_CHECKING:
    import gguf
    from torch import Tensor
    from transformers import PreTrainedModel

CONVERTER: Final = "use llama.cpp's own converter: python convert_hf_to_gguf.py"
FLOAT16_MAX: Final = 65504.0
GGUF_KINDS: Final = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "q8_0": "Q8_0",
    "q4_0": "Q4_0",
    "q4_1": "Q4_1",
    "q5_0": "Q5_0",
    "q5_1": "Q5_1",
}
"""Precisions of matrices that `write_gguf` writes, by the name that archsearch gives them."""
BLOCK: Final = 32  # numbers that share a scale in Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1 (ggml)
# model_type -> GGUF architecture.
_FAMILIES: Final = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_HEAD_NAMES: Final = {
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    "model.layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
}
"""Tensors that an EAGLE-3 head has and no model of layers."""
_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Final = {
    _LLAMA3_SPLIT: "llama-bpe",
    _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2",
}


@dataclass(frozen=True)
class GgufModel:
    """What a GGUF file says of itself: its shape, and in which dtype most of its matrices are, as
    llama.cpp's name of the file's type has it (`q4_k_m`). `unread`: what transformers, which reads
    its weights, leaves out ("": nothing)."""

    architecture: Architecture
    dtype: str
    unread: str = ""


@lru_cache(maxsize=8)
def read_gguf(path: Path) -> GgufModel:
    """Shape and precision of a model out of its header. Raises ArchsearchError for a file that is
    no GGUF, a model that `write_gguf` would not write either, and a type of file that is not known
    here."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        plain = (key for key in reader.fields if not key.startswith("tokenizer."))
        fields: dict[str, Any] = {key: reader.fields[key].contents() for key in plain}
        kind = str(fields["general.architecture"])
        if kind not in _FAMILIES.values():
            known = ", ".join(dict.fromkeys(_FAMILIES.values()))
            raise ArchsearchError(f"it holds a model of the kind {kind}; known here: {known}")
        if int(fields.get("split.count", 1)) > 1:
            raise ArchsearchError("one part of several; join them: llama-gguf-split --merge")
        tokens = reader.fields["tokenizer.ggml.tokens"]
        number = int(fields["general.file_type"])
        of = {key.removeprefix(f"{kind}."): value for key, value in fields.items()}
        if of.get("expert_count"):
            raise ArchsearchError("it holds a mixture of experts, which is not read here")
        heads = of["attention.head_count"]
        config = {
            "model_type": kind,
            "vocab_size": len(tokens.data),
            "hidden_size": of["embedding_length"],
            "intermediate_size": of["feed_forward_length"],
            "num_hidden_layers": of["block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": of.get("attention.head_count_kv", heads),
            "head_dim": of.get("attention.key_length"),
            "max_position_embeddings": of["context_length"],
            "rope_theta": of.get("rope.freq_base", 10_000.0),
            "tie_word_embeddings": all(each.name != "output.weight" for each in reader.tensors),
        }
        architecture = from_hf_config(config)
    except OSError as error:
        raise ArchsearchError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, IndexError, KeyError, TypeError, UnicodeDecodeError) as error:
        ours = isinstance(error, (ArchsearchError, KeyError))
        raise ArchsearchError(
            f"{path} is no GGUF of a language model that is known here, or not whole:"
            f" {error if ours else 'get it again'}"
        ) from error
    types = {f"MOSTLY_{name.upper()}": name for name in GGUF_DTYPES}
    types |= {"ALL_F32": "float32", "MOSTLY_F16": "float16", "MOSTLY_BF16": "bfloat16"}
    names = {int(each): each.name for each in gguf.LlamaFileType}
    dtype = types.get(names.get(number, ""))
    if dtype is None:
        raise ArchsearchError(
            f"{path} is of the type {names.get(number, number)}, which is not known here; give one"
            f" of {', '.join(types.values())}"
        )
    stretched = of.get("rope.scaling.type", "none") != "none" or any(
        each.name == "rope_freqs.weight" for each in reader.tensors
    )
    parts = {
        "stretched positions": stretched,
        "sliding windows": of.get("attention.sliding_window"),
    }
    return GgufModel(architecture, dtype, " and ".join(name for name in parts if parts[name]))


def check_written(dtype: str) -> None:
    """Raise ArchsearchError for a precision in which `write_gguf` writes no draft."""
    if dtype not in GGUF_KINDS:
        known = ", ".join(GGUF_KINDS)
        raise ArchsearchError(f"a draft's GGUF is written in {known}, not in {dtype}")


def kind_of_drafts(dtype: str) -> str:
    """The precision of drafts beside a target in `dtype`: the same where it is written here (of
    K-quants it is not), else Q8_0."""
    return dtype if dtype in GGUF_KINDS else "q8_0"


def write_gguf(
    draft_folder: Path,
    path: Path,
    *,
    dtype: str = "float16",
    tokenizer_gguf: Path | None = None,
    tokens_needed: bool = True,
) -> None:
    """Write the model of `draft_folder` to `path`.

    `dtype`, one of GGUF_KINDS: float32 keeps every weight as it is; the others round matrices
    (norms stay float32; embedding and head at least Q8_0; rows that do not divide into blocks of 32
    are float16). An EAGLE-3 head becomes llama.cpp's `eagle3`, which shares the target's embedding.
    The tokenizer is copied out of `tokenizer_gguf`, or read from the draft's own folder; with
    `tokens_needed` False a folder without one gets made-up texts, for whoever speaks in ids. Raises
    MissingDataError without weights or tokenizer, ArchsearchError where the shape or the tokenizer
    cannot be said exactly.
    """
    import gguf
    import numpy as np
    import torch
    from safetensors import safe_open

    arch = read_architecture(draft_folder)
    config = read_json(draft_folder / "config.json", "model config")
    weights = draft_folder / "model.safetensors"
    if not weights.is_file():
        raise MissingDataError(
            f"no model.safetensors in {draft_folder}; llama.cpp needs weights: train the draft"
            " first"
        )
    head = family_of_config(config) == "eagle3"
    family = "eagle3" if head else _family(arch, config, draft_folder)
    writer = gguf.GGUFWriter(path, family)
    try:
        _add_shape(writer, arch, config)
        if head:
            _add_states(writer, arch, config, draft_folder)
        if tokenizer_gguf is not None:
            _copy_tokenizer(writer, tokenizer_gguf, arch.vocab_size)
        elif tokens_needed or (draft_folder / "tokenizer.json").is_file():
            _add_tokenizer(writer, draft_folder, arch.vocab_size)
        else:  # llama.cpp serves no model without: texts for ids that nobody reads
            writer.add_tokenizer_model("rwkv")  # it assumes no end token of its own for this kind
            writer.add_token_list([f"t{number}" for number in range(arch.vocab_size)])
            writer.add_token_types([int(gguf.TokenType.NORMAL)] * arch.vocab_size)
        plain = "llama" if head else family
        architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == plain)
        names = gguf.get_tensor_name_map(architecture, arch.num_hidden_layers)
        kinds = {name: gguf.GGMLQuantizationType[kind] for name, kind in GGUF_KINDS.items()}
        with safe_open(weights, framework="pt") as file:
            for name in sorted(file.keys()):
                if name == "lm_head.weight" and arch.tie_word_embeddings and not arch.trimmed:
                    continue
                if head and name in ("t2d", "embed_tokens.weight"):
                    continue  # the target's embedding is shared
                if head and name == "d2t":  # offsets; llama.cpp wants the ids themselves
                    ids = file.get_tensor(name).numpy()
                    writer.add_tensor(name, ids + np.arange(len(ids)))
                    continue
                tensor = file.get_tensor(name).to(torch.float32)
                if plain == "llama":
                    tensor = _permuted(name, tensor, arch)
                common = name  # what a model of layers calls it
                if head:
                    common = name.replace("midlayer.", "layers.0.")
                    common = f"model.{common}" if common.startswith("layers.") else common
                mapped = _HEAD_NAMES.get(common) or names.get_name(
                    common, try_suffixes=(".weight", ".bias")
                )
                if mapped is None:
                    raise ArchsearchError(
                        f"GGUF has no name for tensor {name} of {draft_folder}; {CONVERTER}"
                    )
                kind = kinds[_precision(mapped, tensor, dtype)]
                data = gguf.quants.quantize(tensor.contiguous().numpy(), kind)
                writer.add_tensor(mapped, data, raw_dtype=kind)
        mostly = "ALL_F32" if dtype == "float32" else f"MOSTLY_{GGUF_KINDS[dtype]}"
        writer.add_file_type(gguf.LlamaFileType[mostly])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def round_as_written(model: PreTrainedModel, dtype: str) -> None:
    """Round the weights of `model` as `write_gguf` does in `dtype`, so that it writes the text of
    that file."""
    import gguf
    import torch

    for name, weight in model.named_parameters():
        last = name.endswith(("embed_tokens.weight", "lm_head.weight"))
        kind = gguf.GGMLQuantizationType[
            GGUF_KINDS[_precision("output" if last else name, weight, dtype)]
        ]
        data = gguf.quants.quantize(weight.detach().float().cpu().numpy(), kind)
        weight.data.copy_(torch.from_numpy(gguf.quants.dequantize(data, kind)))


def _precision(name: str, tensor: Tensor, dtype: str) -> str:
    """In which of GGUF_KINDS a tensor is written."""
    if tensor.ndim == 1 or dtype == "float32":
        return "float32"
    if dtype in GGUF_DTYPES:
        if tensor.shape[-1] % BLOCK == 0:
            # As llama.cpp's own quantisation: what chooses the token keeps eight bits.
            return "q8_0" if name.startswith(("token_embd", "output")) else dtype
        dtype = "float16"
    return "bfloat16" if dtype == "float16" and tensor.abs().max() > FLOAT16_MAX else dtype


def _family(arch: Architecture, config: Config, folder: Path) -> str:
    """The GGUF architecture name. Raises ArchsearchError where this writer cannot say the shape."""
    kind = str(config.get("model_type"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = str(rope.get("rope_type", rope.get("type", "default")))
    reasons = {
        f"model_type {kind}": kind not in _FAMILIES,
        f"window pattern {arch.window_pattern}": arch.sliding_window is not None,
        f"rope type {rope_type}": rope_type != "default",
        "attention biases": (
            kind in ("llama", "mistral") and (arch.attention_bias or arch.attention_output_bias)
        ),
        "MLP biases": arch.mlp_bias,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ArchsearchError(
            f"archsearch writes no GGUF for {', '.join(found)}; {CONVERTER} {folder}"
        )
    return _FAMILIES[kind]


def _add_shape(writer: gguf.GGUFWriter, arch: Architecture, config: Config) -> None:
    for name, value in {
        "type": "model",
        "name": arch.label(),
        "vocab_size": arch.vocab_size,
        "block_count": arch.num_hidden_layers,
        "context_length": arch.max_position_embeddings,
        "embedding_length": arch.hidden_size,
        "feed_forward_length": arch.intermediate_size,
        "head_count": arch.num_attention_heads,
        "head_count_kv": arch.num_key_value_heads,
        **dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), arch.head_dim),
        "rope_freq_base": arch.rope_theta,
        "layer_norm_rms_eps": float(config.get("rms_norm_eps", 1e-6)),
    }.items():
        getattr(writer, f"add_{name}")(value)


def _add_states(writer: gguf.GGUFWriter, arch: Architecture, config: Config, folder: Path) -> None:
    """What an EAGLE-3 head reads of its target. Raises ArchsearchError for several layers, and
    where the config does not name those whose inputs it reads."""
    if arch.num_hidden_layers != 1:
        raise ArchsearchError(
            f"llama.cpp runs an EAGLE-3 head of 1 layer, not of {arch.num_hidden_layers}"
        )
    writer.add_array("eagle3.target_layers", list(aux_layers(config, folder)))
    width = int(config.get("target_hidden_size") or arch.hidden_size)
    writer.add_uint32("eagle3.target_hidden_size", width)
    writer.add_bool("eagle3.norm_before_residual", bool(config.get("norm_before_residual")))


def _permuted(name: str, tensor: Tensor, arch: Architecture) -> Tensor:
    """Rows of Q and K [heads * head_dim, hidden] from halves (transformers) to neighbouring pairs
    (llama.cpp)."""
    heads = {
        "q_proj.weight": arch.num_attention_heads,
        "k_proj.weight": arch.num_key_value_heads,
    }.get(".".join(name.split(".")[-2:]))
    if heads is None:
        return tensor
    return tensor.reshape(heads, 2, arch.head_dim // 2, -1).swapaxes(1, 2).reshape(tensor.shape)


# -- tokenizers


def _copy_tokenizer(writer: gguf.GGUFWriter, source: Path, vocab_size: int) -> None:
    """Every `tokenizer.*` field of the target's GGUF, unchanged."""
    import gguf

    reader = gguf.GGUFReader(source)
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    if tokens is None or len(tokens.data) != vocab_size:
        count = "no tokens" if tokens is None else f"{len(tokens.data)} tokens"
        raise ArchsearchError(
            f"the target's GGUF {source} holds {count}, the draft needs {vocab_size}; {CONVERTER}"
        )
    for key, entry in reader.fields.items():
        if key.startswith("tokenizer."):
            inner = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, entry.contents(), entry.types[0], sub_type=inner)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> None:
    """Tokens, merges and special ids of a byte-level BPE tokenizer.json whose way of splitting text
    llama.cpp knows."""
    import gguf
    from transformers import AutoTokenizer

    from archsearch.models.runtime import quiet_transformers

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise MissingDataError(
            f"no tokenizer.json in {folder}; llama.cpp needs one: give a target that has it, or"
            f" {CONVERTER}"
        )
    data = read_json(path, "tokenizer")
    pre = pre_tokenizer_name(data)
    if pre is None:
        raise ArchsearchError(
            f"{path} is no byte-level BPE that archsearch knows llama.cpp's name for; {CONVERTER}"
            f" {folder}"
        )
    added = {int(token["id"]): token for token in data.get("added_tokens", [])}
    texts = {int(number): text for text, number in data["model"]["vocab"].items()}
    texts |= {number: token["content"] for number, token in added.items()}
    if texts and max(texts) >= vocab_size:
        raise ArchsearchError(
            f"{path} has token ids up to {max(texts)}, the draft only {vocab_size}; use the"
            " target's tokenizer"
        )
    kinds = gguf.TokenType
    types = [kinds.NORMAL if number in texts else kinds.UNUSED for number in range(vocab_size)]
    for number, token in added.items():
        types[number] = kinds.CONTROL if token.get("special") else kinds.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([texts.get(number, f"[PAD{number}]") for number in range(vocab_size)])
    writer.add_token_types([int(kind) for kind in types])
    merges = data["model"]["merges"]
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    )
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(folder)
    for name in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    whole = tokenizer("a").input_ids
    writer.add_add_bos_token(bool(whole) and whole[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(bool(whole) and whole[-1] == tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def pre_tokenizer_name(tokenizer: Mapping[str, Any]) -> str | None:
    """llama.cpp's name for how a tokenizer.json splits text (`tokenizer.ggml.pre`), None where it
    is none of those known here."""
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        return None
    before = tokenizer.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", []) if before.get("type") == "Sequence" else [before]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    own_regex, first = steps[-1].get("use_regex", True), steps[0]
    name = "gpt-2" if len(steps) == 1 and own_regex else None
    if len(steps) == 2 and first.get("type") == "Digits":
        name = "smollm" if first.get("individual_digits") and own_regex else None
    elif len(steps) == 2 and first.get("type") == "Split" and not own_regex:
        if first.get("behavior") == "Isolated" and not first.get("invert"):
            name = _SPLITS.get(first.get("pattern", {}).get("Regex"))
    normalizer = tokenizer.get("normalizer")
    if normalizer is not None and not (name == "qwen2" and normalizer == {"type": "NFC"}):
        return None
    return name if bool(model.get("ignore_merges")) == (name == "llama-bpe") else None
