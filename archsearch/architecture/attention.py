"""Attention variants: MHA, GQA, MQA, and which layers slide a window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from archsearch.errors import InvalidShapeError


def attention_kind(num_attention_heads: int, num_key_value_heads: int) -> str:
    """`MHA`, `GQA` or `MQA`."""
    if num_key_value_heads == num_attention_heads:
        return "MHA"
    return "MQA" if num_key_value_heads == 1 else "GQA"


def layer_windows(
    window_pattern: str, sliding_window: int | None, num_layers: int
) -> list[int | None]:
    """The window of each layer (tokens), None for full attention.

    `window_pattern` is made of L (full) and S (sliding) and is tiled over the layers: "SSSL" with 8
    layers gives SSSLSSSL. Raises InvalidShapeError for other letters, and for an S without
    `sliding_window`.
    """
    if not window_pattern or set(window_pattern) - {"L", "S"}:
        raise InvalidShapeError(f"window_pattern must be made of L and S, got {window_pattern!r}")
    if "S" in window_pattern and not sliding_window:
        raise InvalidShapeError(
            f"window_pattern {window_pattern!r} needs sliding_window to be set to a number of"
            " tokens"
        )
    return [
        sliding_window if window_pattern[i % len(window_pattern)] == "S" else None
        for i in range(num_layers)
    ]


@lru_cache(maxsize=4096)
def counted_windows(
    window_pattern: str, sliding_window: int | None, num_layers: int
) -> Mapping[int | None, int]:
    """How many layers have each window of `layer_windows`."""
    return Counter(layer_windows(window_pattern, sliding_window, num_layers))
