"""What the worker reads of model folders (configs, the size of the KV cache), and
drafters with made-up weights (`load_format` dummy) as vLLM would run them with a file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from loop import UserError

_BLOCK = 128  # tokens in a block of vLLM's cache on a CPU


def read_json(source: str, name: str) -> dict[str, object] | None:
    """A JSON file of a model folder, or of a hub id as transformers finds it; None where there is
    none."""
    path = os.path.join(source, name)
    if not os.path.isdir(source):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        try:
            path = hf_hub_download(source, name)
        except EntryNotFoundError:
            return None
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        return dict(json.load(file))


def read_config(source: str) -> dict[str, object]:
    """Raises UserError where there is no config.json."""
    config = read_json(source, "config.json")
    if config is None:
        raise UserError(f"no config.json in {source}")
    return config


def text_config(config: Mapping[str, object]) -> Mapping[str, Any]:
    """The language model's part of a config.json; of a head in the form of speculators, that of its
    layers."""
    nested = (config.get(name) for name in ("text_config", "transformer_layer_config"))
    return next((part for part in nested if isinstance(part, dict)), config)


def cache_bytes_per_token(configs: Sequence[Mapping[str, object]], bytes_per_value: int) -> int:
    """Bytes of keys and values of one token, all layers of all models; vLLM gives every layer a
    page of the widest one's size."""
    layers, widest = 0, 0
    for config in configs:
        text = text_config(config)
        if "num_attention_heads" not in text:  # Medusa heads have no keys and values
            continue
        heads = int(text["num_attention_heads"])
        head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
        layers += int(text["num_hidden_layers"])
        widest = max(
            widest, 2 * int(text.get("num_key_value_heads") or heads) * head_dim * bytes_per_value
        )
    return layers * widest


def cache_gib(
    configs: Sequence[Mapping[str, object]], dtype: str, requests: int, length: int
) -> int:
    """GiB for the keys and values of `requests` texts of `length` tokens in all models, and a
    tenth, at least 1."""
    tokens = requests * math.ceil(length / _BLOCK) * _BLOCK
    each = cache_bytes_per_token(configs, 4 if dtype == "float32" else 2)
    return max(1, math.ceil(1.1 * tokens * each / 2**30))


_OWN_HEADS = ("eagle3", "peagle")


def keep_own_head(ask: Mapping[str, object]) -> None:
    """Let a made-up EAGLE head keep the rows that its config says.

    vLLM takes a head whose file brings no `lm_head` to share the target's, and a made-up one brings
    no file: one of 8,192 rows then multiplied by all 49,152 of the target's in each pass.
    """
    if not ask.get("dummy_weights") or ask.get("family") not in _OWN_HEADS:
        return
    try:
        from vllm.model_executor.models.interfaces import SupportsEagleBase
    except ImportError:  # a version that does not share
        return
    SupportsEagleBase.has_own_lm_head = True


def join_context_weights(ask: Mapping[str, object]) -> None:
    """Let a made-up DFlash drafter join its layers' key and value weights where one from a file
    does, while they are loaded.

    vLLM does it for made-up weights in the first round only. Its CPU build has packed and freed
    them by then (0.32: "size mismatch, got input (8), mat (8x64), vec (0)").
    """
    if not ask.get("dummy_weights") or ask.get("family") != "dflash":
        return
    try:
        from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    except ImportError:  # a version that keeps it elsewhere
        return
    load = DummyModelLoader.load_weights

    def load_and_join(self: object, model: object, model_config: object) -> None:
        load(self, model, model_config)
        join = getattr(getattr(model, "model", None), "_build_fused_kv_buffers", None)
        if join is not None:
            join()

    DummyModelLoader.load_weights = load_and_join
