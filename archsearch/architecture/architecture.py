"""`Architecture`: the shape of a decoder-only transformer, in Hugging Face's field names.

It holds what decides cost and weights' shapes, nothing about weights' values. Both targets and drafts are Architectures.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from archsearch.architecture.attention import attention_kind, layer_windows
from archsearch.errors import InvalidShapeError


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer's shape.

    `draft_vocab_size`: rows of the language-model head when it is trimmed below `vocab_size` (FR-Spec, EAGLE-3); None means the
    full vocabulary. The input embedding always has `vocab_size` rows: a lookup costs memory, not time.
    `gated_mlp`: gate, up and down projections (Llama) rather than up and down (OPT).
    `learned_positions`: rows of a learned position table (OPT), 0 with rotary embeddings.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int | None = None
    tie_word_embeddings: bool = False
    gated_mlp: bool = True
    rms_norm: bool = True
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    learned_positions: int = 0
    window_pattern: str = "L"
    sliding_window: int | None = None
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    model_type: str = "llama"

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InvalidShapeError(f"{name} must be a positive whole number, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise InvalidShapeError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.learned_positions == 0 and self.head_dim % 2:
            raise InvalidShapeError(f"rotary embeddings need an even head_dim, got {self.head_dim}")
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size:
            raise InvalidShapeError(
                f"draft_vocab_size must lie between 1 and vocab_size={self.vocab_size}, got {self.draft_vocab_size}"
            )
        layer_windows(self.window_pattern, self.sliding_window, 1)

    @property
    def head_rows(self) -> int:
        """Rows of the language-model head: the tokens the model can propose."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def trimmed(self) -> bool:
        return self.head_rows < self.vocab_size

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def kv_group_size(self) -> int:
        """Query heads per KV head: 1 is MHA, all of them MQA, between GQA."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def attention_kind(self) -> str:
        return attention_kind(self.num_attention_heads, self.num_key_value_heads)

    def windows(self) -> list[int | None]:
        """The sliding window of each layer, None for full attention."""
        return layer_windows(self.window_pattern, self.sliding_window, self.num_hidden_layers)

    def replace(self, **changes: Any) -> Architecture:
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Architecture:
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = set(data) - known
        if unknown:
            raise InvalidShapeError(f"unknown architecture fields: {', '.join(sorted(unknown))}")
        return cls(**data)

    def label(self) -> str:
        """A short human name: `2x576 ffn1536 9h/3kv64 head8192`."""
        window = f" {self.window_pattern}{self.sliding_window}" if "S" in self.window_pattern else ""
        head = f" head{self.head_rows}" + ("t" if self.tie_word_embeddings else "")
        return (
            f"{self.num_hidden_layers}x{self.hidden_size} ffn{self.intermediate_size} "
            f"{self.num_attention_heads}h/{self.num_key_value_heads}kv{self.head_dim}{window}{head}"
        )
