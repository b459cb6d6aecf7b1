"""Many drafts at once: bodies x layers x windows x heads, as arrays that broadcast.

A space multiplies a few thousand bodies (widths and heads) by depths, window patterns and
vocabularies. What one layer costs is a matter of the body, what the head costs of the body and its
rows: priced once each, they are put together by broadcasting. The arrays stand where
`Architecture`'s numbers stand, so `layer_ops`, `head_ops` and the counts read them as they read one
shape.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.attention import layer_windows
from archsearch.architecture.counts import body_parameters

Ints = NDArray[np.int64]
Array = NDArray[np.float64]
AXES: Final = ("bodies", "layers", "windows", "heads")


@dataclass(frozen=True)
class Window:
    """A window pattern with its tokens, as `Architecture` has them."""

    pattern: str
    tokens: int | None


@dataclass(frozen=True)
class Head:
    """Rows of the language-model head (None: all of the vocabulary), and whether it shares the
    embedding's weights."""

    rows: int | None
    tied: bool


@dataclass(frozen=True)
class ShapeGrid:
    """All of `bodies` x `layers` x `windows` x `heads`, every combination a valid shape of its own.

    `like`: one of them, which has what all share. Arrays [bodies]: `hidden_size`,
    `intermediate_size`, `num_attention_heads`, `num_key_value_heads`, `head_dim`. Results broadcast
    to `shape`, [bodies, layers, windows, heads].
    """

    like: Architecture
    hidden_size: Ints
    intermediate_size: Ints
    num_attention_heads: Ints
    num_key_value_heads: Ints
    head_dim: Ints
    layers: tuple[int, ...]
    windows: tuple[Window, ...]
    heads: tuple[Head, ...]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Lengths of AXES."""
        return len(self.hidden_size), len(self.layers), len(self.windows), len(self.heads)

    @property
    def size(self) -> int:
        """How many shapes."""
        return int(np.prod(self.shape))

    def part(self, bodies: slice) -> ShapeGrid:
        """The same of some of the bodies."""
        return replace(
            self,
            hidden_size=self.hidden_size[bodies],
            intermediate_size=self.intermediate_size[bodies],
            num_attention_heads=self.num_attention_heads[bodies],
            num_key_value_heads=self.num_key_value_heads[bodies],
            head_dim=self.head_dim[bodies],
        )

    def at(self, index: tuple[int, int, int, int]) -> Architecture:
        """One shape, by its place on AXES."""
        body, depth, window, head = index
        return self.like.replace(
            hidden_size=int(self.hidden_size[body]),
            intermediate_size=int(self.intermediate_size[body]),
            num_attention_heads=int(self.num_attention_heads[body]),
            num_key_value_heads=int(self.num_key_value_heads[body]),
            head_dim=int(self.head_dim[body]),
            num_hidden_layers=self.layers[depth],
            window_pattern=self.windows[window].pattern,
            sliding_window=self.windows[window].tokens,
            draft_vocab_size=self.heads[head].rows,
            tie_word_embeddings=self.heads[head].tied,
        )

    def with_full_heads(self) -> ShapeGrid:
        """The same with all rows in every head."""
        return replace(self, heads=tuple(replace(head, rows=None) for head in self.heads))

    def sharded(self, ranks: int) -> ShapeGrid:
        """What one rank of `ranks` holds, as `capacity.shard` has it of one shape."""
        if ranks == 1:
            return self

        def share(rows: int) -> int:
            return -(-rows // ranks)

        return replace(
            self,
            like=self.like.replace(vocab_size=share(self.like.vocab_size), draft_vocab_size=None),
            num_attention_heads=self.num_attention_heads // ranks,
            intermediate_size=self.intermediate_size // ranks,
            num_key_value_heads=(self.num_key_value_heads // ranks).clip(1),
            heads=tuple(
                replace(head, rows=None if head.rows is None else share(head.rows))
                for head in self.heads
            ),
        )

    # -- as arrays that broadcast
    # ----------------------------------------------------------------------------------------------

    def body(self) -> Shapes:
        """Fields [bodies]; layers and head are those of `like`."""
        return Shapes(self.like, {name: getattr(self, name) for name in BODY_FIELDS})

    def whole(self) -> Shapes:
        """Fields that broadcast to `shape`, windows aside."""
        fields: dict[str, Any] = {
            name: getattr(self, name)[:, None, None, None] for name in BODY_FIELDS
        }
        fields["num_hidden_layers"] = np.array(self.layers)[None, :, None, None]
        fields["draft_vocab_size"] = self.head_rows()[None, None, None, :]
        return Shapes(self.like, fields)

    def head_rows(self) -> Ints:
        """[heads]"""
        return np.array([head.rows or self.like.vocab_size for head in self.heads])

    def trimmed(self) -> NDArray[np.bool_]:
        """[heads]"""
        return self.head_rows() < self.like.vocab_size

    def layers_by_window(self) -> dict[int | None, Ints]:
        """How many layers have each window (None: full attention), [layers, windows]."""
        counted = [
            [Counter(layer_windows(w.pattern, w.tokens, depth)) for w in self.windows]
            for depth in self.layers
        ]
        tokens = sorted(
            {window for row in counted for counts in row for window in counts},
            key=lambda window: window or 0,
        )
        return {
            window: np.array([[counts[window] for counts in row] for row in counted])
            for window in tokens
        }

    def body_parameters(self) -> Ints:
        """Parameters without embeddings and head, [bodies, layers, 1, 1]."""
        return np.asarray(body_parameters(self.whole()))  # type: ignore[arg-type]

    def parameters(self) -> Ints:
        """All parameters, [bodies, layers, 1, heads]."""
        tied = np.array([head.tied for head in self.heads])
        width = self.hidden_size[:, None, None, None]
        tables = width * (self.like.vocab_size + self.like.learned_positions)
        return self.body_parameters() + tables + width * np.where(tied, 0, self.head_rows())

    def weight_bytes_per_pass(self, dtype_bytes: int) -> Ints:
        """Bytes of weights that a pass reads, [bodies, layers, 1, heads]."""
        return (
            self.body_parameters() + self.hidden_size[:, None, None, None] * self.head_rows()
        ) * dtype_bytes

    def kv_cache_bytes(self, context_len: int, dtype_bytes: int, batch_size: int = 1) -> Ints:
        """Bytes of KV cache, [bodies, layers, windows, 1]."""
        tokens = sum(
            (
                count * (min(context_len, window) if window else context_len)
                for window, count in self.layers_by_window().items()
            ),
            start=np.zeros((len(self.layers), len(self.windows)), dtype=np.int64),
        )
        width = self.num_key_value_heads * self.head_dim
        return 2 * batch_size * dtype_bytes * width[:, None, None, None] * tokens[None, :, :, None]

    def kv_bytes_per_token(self, dtype_bytes: int) -> Ints:
        """Bytes of KV cache of one token, before windows cut it, [bodies, layers, 1, 1]."""
        width = (self.num_key_value_heads * self.head_dim)[:, None, None, None]
        return 2 * dtype_bytes * width * np.array(self.layers)[None, :, None, None]


BODY_FIELDS: Final = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


class Shapes:
    """Stands where an `Architecture` stands in a formula: some of its numbers are arrays, the rest
    are those of `like`."""

    def __init__(self, like: Architecture, arrays: dict[str, Any]) -> None:
        self._like = like
        self.__dict__.update(arrays)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._like, name)

    @property
    def q_size(self) -> Any:
        """Width of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> Any:
        """Width of all key (or value) heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def head_rows(self) -> Any:
        """Rows of the head."""
        rows = self.draft_vocab_size
        return self.vocab_size if rows is None else rows
