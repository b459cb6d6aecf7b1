"""Drafters with made-up weights (`load_format` dummy) as vLLM would run them with a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OWN_HEADS = ("eagle3", "peagle")


def keep_own_head(ask: Mapping[str, Any]) -> bool:
    """Let a made-up EAGLE head keep the rows that its config says; True where something was changed.

    vLLM takes a head whose file brings no `lm_head` to share the target's, and a made-up one brings no file: a head of 8,192 rows
    then multiplied by all 49,152 of the target's in each pass, and cut the logits.
    """
    if not ask.get("dummy_weights") or ask.get("family") not in _OWN_HEADS:
        return False
    try:
        from vllm.model_executor.models.interfaces import SupportsEagleBase
    except ImportError:  # a version that does not share
        return False
    SupportsEagleBase.has_own_lm_head = True
    return True
