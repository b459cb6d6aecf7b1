"""Drafters with made-up weights (`load_format` dummy) as vLLM would run them with a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OWN_HEADS = ("eagle3", "peagle")


def keep_own_head(ask: Mapping[str, Any]) -> bool:
    """Let a made-up EAGLE head keep the rows that its config says; True where something was
    changed.

    vLLM takes a head whose file brings no `lm_head` to share the target's, and a made-up one brings
    no file: a head of 8,192 rows then multiplied by all 49,152 of the target's in each pass, and
    cut the logits.
    """
    if not ask.get("dummy_weights") or ask.get("family") not in _OWN_HEADS:
        return False
    try:
        from vllm.model_executor.models.interfaces import SupportsEagleBase
    except ImportError:  # a version that does not share
        return False
    SupportsEagleBase.has_own_lm_head = True
    return True


def join_context_weights(ask: Mapping[str, Any]) -> bool:
    """Let a made-up DFlash drafter join its layers' key and value weights where one from a file
    does, while they are loaded; True where something was changed.

    vLLM does it for made-up weights in the first round only. Its CPU build has packed and freed
    them by then (0.32: "size mismatch, got input (8), mat (8x64), vec (0)").
    """
    if not ask.get("dummy_weights") or ask.get("family") != "dflash":
        return False
    try:
        from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    except ImportError:  # a version that keeps it elsewhere
        return False
    load = DummyModelLoader.load_weights

    def load_and_join(self: Any, model: Any, model_config: Any) -> None:
        load(self, model, model_config)
        join = getattr(getattr(model, "model", None), "_build_fused_kv_buffers", None)
        if join is not None:
            join()

    DummyModelLoader.load_weights = load_and_join
    return True
