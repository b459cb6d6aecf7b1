"""A KV cache that writes into reserved memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class GrowingCache:
    """A KV cache that writes into reserved memory: HF's DynamicCache copies every key and value at every step instead.

    `cache` is what a Hugging Face model takes as past_key_values; memory grows by half when the reserve is used up.
    """

    def __init__(self, config: Any, reserve: int) -> None:
        from transformers.cache_utils import Cache

        layer = _growing_layer()
        self.cache: Any = Cache(layers=[layer(reserve) for _ in range(config.get_text_config(decoder=True).num_hidden_layers)])

    def expand(self, rows: int) -> None:
        """One row becomes `rows` equal rows."""
        import torch

        for layer in self.cache.layers:
            layer.take(torch.zeros(rows, dtype=torch.long, device=layer.keys.device))

    def part(self, start: int, stop: int) -> Any:
        """A cache of rows start..stop that writes into the same memory (which must not have to grow meanwhile)."""
        from transformers.cache_utils import Cache

        return Cache(layers=[layer.part(start, stop) for layer in self.cache.layers])

    def advance(self, tokens: int) -> None:
        """Tell the cache that parts of it have filled its first `tokens` columns."""
        for layer in self.cache.layers:
            layer.show(tokens)

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows, in this order."""
        for layer in self.cache.layers:
            layer.take(rows)


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

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            used = self.keys.shape[2] if self.is_initialized else 0
            if not self.is_initialized:
                self.dtype, self.device = key_states.dtype, key_states.device
                self.is_initialized = True
                self.buffers = [self._room(key_states, self.reserve), self._room(value_states, self.reserve)]
            total = used + key_states.shape[2]
            if total > self.buffers[0].shape[2]:
                grown = max(total, self.buffers[0].shape[2] * 3 // 2)
                self.buffers = [self._copy(b[:, :, :used], grown) for b in self.buffers]
            for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
                buffer[:, :, used:total] = states
            self.show(total)
            return self.keys, self.values

        def show(self, tokens: int) -> None:
            self.keys, self.values = (b[:, :, :tokens] for b in self.buffers)

        def part(self, start: int, stop: int) -> GrowingLayer:
            layer = GrowingLayer(self.reserve)
            layer.dtype, layer.device, layer.is_initialized = self.dtype, self.device, True
            layer.buffers = [b[start:stop] for b in self.buffers]
            layer.show(self.keys.shape[2])
            return layer

        def take(self, rows: torch.Tensor) -> None:
            used, capacity = self.keys.shape[2], self.buffers[0].shape[2]
            self.buffers = [self._copy(b[:, :, :used], capacity, rows) for b in self.buffers]
            self.show(used)

        @staticmethod
        def _room(like: torch.Tensor, capacity: int, rows: int | None = None) -> torch.Tensor:
            return like.new_empty((like.shape[0] if rows is None else rows, like.shape[1], capacity, like.shape[3]))

        def _copy(self, states: torch.Tensor, capacity: int, rows: torch.Tensor | None = None) -> torch.Tensor:
            room = self._room(states, capacity, None if rows is None else int(rows.shape[0]))
            room[:, :, : states.shape[2]] = states if rows is None else states.index_select(0, rows)
            return room

    _layer_classes.append(GrowingLayer)
    return GrowingLayer
