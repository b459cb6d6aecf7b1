"""A KV cache in reserved memory, whose rows can be exchanged while a batch is under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class GrowingCache:
    """A KV cache that writes into reserved memory: HF's DynamicCache copies every key and value at every step instead.

    `cache` is what a Hugging Face model takes as past_key_values; memory grows by half when the reserve is used up.
    """

    def __init__(self, config: Any, reserve: int) -> None:
        from transformers.cache_utils import Cache

        self._config = config
        layer = _growing_layer()
        self.cache: Any = Cache(layers=[layer(reserve) for _ in range(config.get_text_config(decoder=True).num_hidden_layers)])

    @property
    def columns(self) -> int:
        """Tokens per row that are stored."""
        layer = self.cache.layers[0]
        return int(layer.keys.shape[2]) if layer.is_initialized else 0

    def repeated(self, rows: int, reserve: int) -> GrowingCache:
        """A cache of its own with the first row `rows` times over and room for `reserve` columns."""
        import torch

        reserve = max(reserve, self.columns)
        copy = GrowingCache(self._config, reserve)
        if self.columns:
            for layer, ours in zip(copy.cache.layers, self.cache.layers, strict=True):
                layer.start(ours, torch.zeros(rows, dtype=torch.long, device=ours.keys.device), reserve)
        return copy

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows, in this order."""
        for layer in self.cache.layers:
            layer.start(layer, rows, layer.buffers[0].shape[2])

    def exchange(self, keep: Sequence[int], added: Sequence[GrowingCache], shared: int, columns: int, capacity: int) -> None:
        """Drop all rows but `keep`, append those of `added`, and lay all out in `columns` columns with room for `capacity`.

        The first `shared` columns stay where they are; the rest of every row stands at the right, zeros (to be masked) before it.
        What does not fit into `columns` is cut at the left of the rest: the caller sees to it that only padding stands there.
        Layer by layer, so that both the old and the new memory are held for one layer only.
        """
        for number, layer in enumerate(self.cache.layers):
            parts = [(layer, list(keep))] if keep else []
            parts += [(other.cache.layers[number], list(range(other.cache.layers[number].keys.shape[0]))) for other in added]
            layer.arrange(parts, shared, columns, capacity)
            for other in added:
                other.cache.layers[number].free()


_layer_classes: list[type] = []


def _growing_layer() -> type:
    """The cache layer's class, defined on first use because transformers is slow to import."""
    if _layer_classes:
        return _layer_classes[0]
    from transformers.cache_utils import DynamicLayer

    class GrowingLayer(DynamicLayer):
        """Keys and values [rows, kv heads, tokens, head_dim] as views of a reserve [rows, kv heads, capacity, head_dim]."""

        def __init__(self, reserve: int) -> None:
            super().__init__()
            self.reserve = reserve
            self.keys: Any
            self.values: Any
            self.buffers: list[torch.Tensor] = []

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            used = self.keys.shape[2] if self.is_initialized else 0
            if not self.is_initialized:
                self._own(key_states, [_room(states, states.shape[0], self.reserve) for states in (key_states, value_states)])
            total = used + key_states.shape[2]
            if total > self.buffers[0].shape[2]:
                grown = max(total, self.buffers[0].shape[2] * 3 // 2)
                self.buffers = [_copy(b[:, :, :used], grown) for b in self.buffers]
            for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
                buffer[:, :, used:total] = states
            self._show(total)
            return self.keys, self.values

        def start(self, other: GrowingLayer, rows: torch.Tensor, capacity: int) -> None:
            """Hold these rows of another layer (or of this one)."""
            used = other.keys.shape[2]
            self._own(other.keys, [_copy(states, capacity, rows) for states in (other.keys, other.values)])
            self._show(used)

        def arrange(self, parts: list[tuple[GrowingLayer, list[int]]], shared: int, columns: int, capacity: int) -> None:
            rows = sum(len(chosen) for _, chosen in parts)
            buffers = []
            for side in (0, 1):
                first = parts[0][0].buffers[side]
                room = _room(first, rows, capacity)  # [rows, kv heads, capacity, head_dim]
                row = 0
                for layer, chosen in parts:
                    used = layer.keys.shape[2]
                    states = layer.buffers[side][chosen, :, :used]  # [chosen, kv heads, used, head_dim]
                    tail = min(used, columns) - shared
                    place = room[row : row + len(chosen)]
                    place[:, :, :shared] = states[:, :, :shared]
                    place[:, :, shared : columns - tail] = 0  # masked, but what is there must be finite
                    place[:, :, columns - tail : columns] = states[:, :, used - tail :]
                    row += len(chosen)
                buffers.append(room)
            self._own(parts[0][0].keys, buffers)
            self._show(columns)

        def free(self) -> None:
            self.buffers = []
            self.keys = self.values = None
            self.is_initialized = False

        def _own(self, like: torch.Tensor, buffers: list[torch.Tensor]) -> None:
            self.dtype, self.device, self.is_initialized = like.dtype, like.device, True
            self.buffers = buffers

        def _show(self, tokens: int) -> None:
            self.keys, self.values = (b[:, :, :tokens] for b in self.buffers)

    _layer_classes.append(GrowingLayer)
    return GrowingLayer


def _room(like: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
    """Uninitialised [rows, kv heads, capacity, head_dim]."""
    return like.new_empty((rows, like.shape[1], capacity, like.shape[3]))


def _copy(states: torch.Tensor, capacity: int, rows: torch.Tensor | None = None) -> torch.Tensor:
    room = _room(states, states.shape[0] if rows is None else int(rows.shape[0]), capacity)
    room[:, :, : states.shape[2]] = states if rows is None else states.index_select(0, rows)
    return room
