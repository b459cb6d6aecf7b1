"""`Architecture`: the shape of a decoder-only transformer, in Hugging Face's field names.

It holds what decides cost and weights' shapes, nothing about weights' values. Both targets and
drafts are Architectures.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from archsearch.architecture.hf_fields import MOST, MOST_LAYERS, SIZES, check_types, is_whole, short
from archsearch.errors import InvalidShapeError
from archsearch.workload import WEIGHT_BYTES


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


_counted_windows = lru_cache(maxsize=4096)(lambda *shape: Counter(layer_windows(*shape)))


_DENSE_TYPES: Final = {"qwen3_moe": "qwen3"}
_WRITTEN_TYPES: Final = ("llama", "mistral", "ministral", "qwen2", "qwen3", "opt")


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer's shape.

    `draft_vocab_size`: rows of the language-model head when it is trimmed below `vocab_size`
    (FR-Spec, EAGLE-3); None means the full vocabulary. The input embedding always has `vocab_size`
    rows: a lookup costs memory, not time. `gated_mlp`: gate, up and down projections (Llama) rather
    than up and down (OPT). `learned_positions`: rows of a learned position table (OPT), 0 with
    rotary embeddings.

    Mixture of experts (`num_experts` > 0): all layers but the first `first_dense_layers` route a
    token to `num_experts_per_tok` experts of `moe_intermediate_size` FFN columns, beside shared
    experts of `shared_expert_size` columns in all; `intermediate_size` is then the FFN of dense
    layers. `expert_format`: the format that experts are kept in ("mxfp4") where it is not the dtype
    of the rest; `routing_skew`: how unevenly tokens choose them (see `experts`), None: as usual;
    `expert_parallel`: ranks hold whole experts rather than columns of all. `served_dtype`: the
    format that the published weights are in where they are quantised (`architecture.quantisation`);
    `weight_format`: the one (of WEIGHT_BYTES) in which the weights of all layers are read while the
    pass, its cache, embedding and head are in 16 bits, "" for the pass's own dtype. MLA
    (`kv_lora_rank` > 0): keys and values come out of a latent of `kv_lora_rank` numbers beside
    `qk_rope_head_dim` rotated ones, both shared by all heads; `head_dim` is that of queries,
    `v_head_dim` of values. `attention_sinks`: a learned logit a head (gpt-oss); `sandwich_norms`:
    norms behind attention and FFN too (Gemma 3); `mtp_layers`: that its checkpoint holds besides.
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
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_size: int = 0
    first_dense_layers: int = 0
    expert_format: str = ""
    served_dtype: str = ""
    weight_format: str = ""
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    attention_sinks: bool = False
    sandwich_norms: bool = False
    routing_skew: float | None = None
    expert_parallel: bool = False
    mtp_layers: int = 0

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if not is_whole(value, 1, MOST_LAYERS if name == "num_hidden_layers" else MOST):
                raise InvalidShapeError(
                    f"{name} must be a positive whole number that a model can have, got"
                    f" {short(value)}"
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise InvalidShapeError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of"
                f" num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.learned_positions == 0 and self.head_dim % 2:
            raise InvalidShapeError(f"rotary embeddings need an even head_dim, got {self.head_dim}")
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size:
            raise InvalidShapeError(
                f"draft_vocab_size must lie between 1 and vocab_size={self.vocab_size}, got"
                f" {self.draft_vocab_size}"
            )
        layer_windows(self.window_pattern, self.sliding_window, 1)
        self._check_experts()
        self._check_latent()

    def _check_experts(self) -> None:
        sizes = (
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            self.shared_expert_size,
            self.first_dense_layers,
        )
        if min(self.num_experts, *sizes) < 0:
            raise InvalidShapeError(
                f"sizes of experts must not be negative, got {min(self.num_experts, *sizes)}"
            )
        for name in ("expert_format", "weight_format"):
            if (given := getattr(self, name)) and given not in WEIGHT_BYTES:
                raise InvalidShapeError(
                    f"{name} must be one of {', '.join(WEIGHT_BYTES)}, got {given!r}"
                )
        if not self.num_experts:
            if any(sizes) or self.expert_format:
                raise InvalidShapeError(
                    "experts' sizes are given but num_experts is 0; set num_experts or leave"
                    " them out"
                )
            return
        if not 1 <= self.num_experts_per_tok <= self.num_experts or not self.moe_intermediate_size:
            raise InvalidShapeError(
                f"{self.num_experts} experts need moe_intermediate_size and num_experts_per_tok"
                f" between 1 and as many, got {self.moe_intermediate_size} and"
                f" {self.num_experts_per_tok}"
            )

    def _check_latent(self) -> None:
        if min(self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim, self.v_head_dim) < 0:
            raise InvalidShapeError(
                "the ranks and head sizes of latent attention must not be negative"
            )
        if self.kv_lora_rank and not (
            0 < self.qk_rope_head_dim < self.head_dim and self.v_head_dim
        ):
            raise InvalidShapeError(
                f"latent attention needs qk_rope_head_dim below head_dim ({self.head_dim}) and"
                f" v_head_dim, got {self.qk_rope_head_dim} and {self.v_head_dim}"
            )

    @property
    def head_rows(self) -> int:
        """Rows of the language-model head: the tokens the model can propose."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def trimmed(self) -> bool:
        """Whether the head has fewer rows than the vocabulary."""
        return self.head_rows < self.vocab_size

    @property
    def q_size(self) -> int:
        """Width of all queries together: query heads times head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all keys (or values) together: KV heads times head_dim."""
        return self.num_key_value_heads * self.head_dim

    @property
    def kv_numbers(self) -> int:
        """Numbers that a layer keeps of a token: keys and values, or the latent that replaces
        them."""
        return self.kv_lora_rank + self.qk_rope_head_dim if self.kv_lora_rank else 2 * self.kv_size

    @property
    def moe_layers(self) -> int:
        """Layers with experts; they come last."""
        return max(0, self.num_hidden_layers - self.first_dense_layers) if self.num_experts else 0

    @property
    def kv_group_size(self) -> int:
        """Query heads per KV head: 1 is MHA, all of them MQA, between GQA."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def attention_kind(self) -> str:
        """MHA, GQA, MQA or MLA."""
        if self.kv_lora_rank:
            return "MLA"
        if self.num_key_value_heads == self.num_attention_heads:
            return "MHA"
        return "MQA" if self.num_key_value_heads == 1 else "GQA"

    def windows(self) -> list[int | None]:
        """The sliding window of each layer, None for full attention."""
        return layer_windows(self.window_pattern, self.sliding_window, self.num_hidden_layers)

    def layers_by_window(self) -> Mapping[int | None, int]:
        """How many layers have each window, None for full attention."""
        return _counted_windows(self.window_pattern, self.sliding_window, self.num_hidden_layers)

    @property
    def mixed(self) -> bool:
        """Whether its layers differ in their windows."""
        return len(self.layers_by_window()) > 1

    def replace(self, **changes: Any) -> Architecture:
        """The same shape with some fields changed. Raises InvalidShapeError for what no model can
        have."""
        return dataclasses.replace(self, **changes)

    def without_experts(self) -> Architecture:
        """The same layers with a plain FFN of `intermediate_size`."""
        return self.replace(
            num_experts=0,
            num_experts_per_tok=0,
            moe_intermediate_size=0,
            shared_expert_size=0,
            first_dense_layers=0,
            expert_format="",
        )

    def in_format(self, name: str) -> Architecture:
        """The same with the weights of its layers kept in a format of WEIGHT_BYTES; experts that
        have one of their own keep it. "": in the dtype of the pass."""
        experts = (
            name
            if self.num_experts and self.expert_format in ("", self.weight_format)
            else self.expert_format
        )
        return self.replace(weight_format=name, expert_format=experts)

    def dense(self) -> Architecture:
        """The plain transformer of the same width, layers, heads and vocabulary: what a draft of
        this target may look like.

        Experts give way to one FFN of `intermediate_size`, a latent to keys and values of its own
        size in as many heads.
        """
        plain = _later_fields()
        head_dim = self.v_head_dim or self.head_dim
        kind = self.model_type
        if kind not in _WRITTEN_TYPES:
            kind = _DENSE_TYPES.get(kind, "llama")
        # gpt-oss: biases of experts, and of all that attends
        if self.mlp_bias and self.num_experts:
            plain |= dict.fromkeys(("mlp_bias", "attention_bias", "attention_output_bias"), False)
        return self.replace(**plain, head_dim=head_dim, model_type=kind)

    def to_dict(self) -> dict[str, object]:
        """All fields by name; those of experts and latents only where they say something, so that
        files stay as they were."""
        later, given = _later_fields(), ((name, getattr(self, name)) for name in self.__slots__)
        return {name: value for name, value in given if later.get(name, ...) != value}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Architecture:
        """Read back `to_dict`. Raises InvalidShapeError for fields it does not know and values of
        another type."""
        known = {field.name: str(field.type) for field in dataclasses.fields(cls)}
        if unknown := set(data) - set(known):
            raise InvalidShapeError(f"unknown architecture fields: {', '.join(sorted(unknown))}")
        check_types(known, data)
        return cls(**data)

    def label(self) -> str:
        """A short human name: `2x576 ffn1536 9h/3kv64 head8192`.

        >>> Architecture(576, 1536, 2, 9, 3, 64, 49152, draft_vocab_size=8192).label()
        '2x576 ffn1536 9h/3kv64 head8192'
        """
        ffn, cached = f"ffn{self.intermediate_size}", f"{self.num_key_value_heads}kv{self.head_dim}"
        if self.num_experts:
            ffn = f"moe{self.num_experts_per_tok}/{self.num_experts}x{self.moe_intermediate_size}"
            ffn += f"+{self.shared_expert_size}" if self.shared_expert_size else ""
        if self.kv_lora_rank:
            cached = f"mla{self.kv_lora_rank}+{self.qk_rope_head_dim}"
        window = self.window_pattern
        window = f" {window}{self.sliding_window}" if "S" in window else ""
        return (
            f"{self.num_hidden_layers}x{self.hidden_size} {ffn} {self.num_attention_heads}h/"
            f"{cached}{window} head{self.head_rows}{'t' if self.tie_word_embeddings else ''}"
        )


def _later_fields() -> dict[str, object]:
    """The fields of experts and latents, which are the last ones, as a plain transformer has
    them."""
    fields = {field.name: field.default for field in dataclasses.fields(Architecture)}
    return dict(list(fields.items())[list(fields).index("num_experts") :])
