"""Many drafts at once: bodies x layers x windows x heads, as one `Architecture` of arrays.

A space multiplies a few thousand bodies (widths and heads) by depths, window patterns and
vocabularies. What one layer costs is a matter of the body, what the head costs of the body and its
rows: arrays that broadcast price each once, by the formulas of one shape, and each distinct op of
theirs is priced once (`priced`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from archsearch.architecture.architecture import Architecture, layer_windows
from archsearch.architecture.ops import Op, Part

AXES: Final = ("bodies", "layers", "windows", "heads")
BODY_FIELDS: Final = (
    "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim"
).split()


class Sizes(np.ndarray):
    """Whole numbers as the sizes of an op, which is counted by its sizes: equal where all are."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash((self.shape, self.tobytes()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, np.ndarray) and np.array_equal(np.asarray(self), np.asarray(other))


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


@dataclass(frozen=True, eq=False)
class ShapeGrid(Architecture):
    """All of bodies x layers x windows x heads, every combination a valid shape of its own.

    BODY_FIELDS are [bodies, 1, 1, 1], `num_hidden_layers` [1, layers, 1, 1], `draft_vocab_size`
    (None: all heads are full) and `tie_word_embeddings` [1, 1, 1, heads]; `windows_of` replaces
    `window_pattern` and `sliding_window`. What is counted of it broadcasts to `shape`.
    """

    windows_of: tuple[Window, ...] = ()

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __post_init__(self) -> None:
        """Each shape was checked by itself."""

    @classmethod
    def of(
        cls,
        like: Architecture,
        bodies: dict[str, NDArray[np.int64]],
        layers: list[int],
        windows: list[Window],
        heads: list[Head],
    ) -> ShapeGrid:
        """From one of the shapes, which has what all share, and BODY_FIELDS as arrays [bodies]."""
        rows = np.array([head.rows or like.vocab_size for head in heads])
        shared: dict[str, Any] = {field.name: getattr(like, field.name) for field in fields(like)}
        shared |= {name: _along(0, values) for name, values in bodies.items()}
        shared["num_hidden_layers"] = _along(1, np.array(layers))
        shared["draft_vocab_size"] = _along(3, rows)
        shared["tie_word_embeddings"] = _along(3, np.array([head.tied for head in heads]))
        return cls(**shared, windows_of=tuple(windows))

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of AXES."""
        sizes: list[Any] = [self.hidden_size, self.num_hidden_layers, self.tie_word_embeddings]
        bodies, layers, heads = (size.size for size in sizes)
        return bodies, layers, len(self.windows_of), heads

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def head_rows(self) -> Any:
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    def part(self, bodies: slice) -> ShapeGrid:
        """The same of some of the bodies."""
        part: Any = self.replace(**{name: getattr(self, name)[bodies] for name in BODY_FIELDS})
        return part

    def at(self, index: tuple[int, ...]) -> Architecture:
        """One shape, by its place on AXES."""
        window = self.windows_of[index[2]]
        found: dict[str, Any] = {
            field.name: getattr(self, field.name) for field in fields(Architecture)
        }
        for name, value in found.items():
            if isinstance(value, np.ndarray):
                found[name] = np.broadcast_to(value, self.shape)[index].item()
        if found["draft_vocab_size"] == self.vocab_size:
            found["draft_vocab_size"] = None
        found |= {"window_pattern": window.pattern, "sliding_window": window.tokens}
        return Architecture(**found)

    def places_of(self, arch: Architecture) -> list[tuple[int, ...]]:
        alike = np.all(
            [np.equal(getattr(self, name), getattr(arch, name)) for name in BODY_FIELDS], axis=0
        )
        places = itertools.product(np.flatnonzero(alike).tolist(), *map(range, self.shape[1:]))
        return [place for place in places if self.at(place) == arch]

    def layers_by_window(self) -> Any:
        """How many layers have each window (None: full attention), [1, layers, windows, 1]."""
        depths: Any = self.num_hidden_layers
        counted = [
            [Counter(layer_windows(w.pattern, w.tokens, depth)) for w in self.windows_of]
            for depth in depths.ravel().tolist()
        ]
        tokens = sorted(
            {window for row in counted for counts in row for window in counts},
            key=lambda window: window or 0,
        )
        return {
            window: sizes(np.array([[counts[window] for counts in row] for row in counted]))[
                None, :, :, None
            ]
            for window in tokens
        }


def sizes(values: ArrayLike) -> Any:
    """Numbers as sizes."""
    return np.asarray(values).view(Sizes)


def _along(axis: int, values: NDArray[np.int64]) -> NDArray[np.int64]:
    return sizes(values).reshape([-1 if each == axis else 1 for each in range(len(AXES))])


Pass = tuple[Part, bool]
"""What is read, and whether the weights come from memory."""


def priced(op: Op, price: Callable[[Sequence[Op]], Sequence[float]]) -> Any:
    """Seconds of an op whose sizes may be arrays, of the arrays' shape. `price`: seconds of each of
    several ops."""
    sizes = {field.name: getattr(op, field.name) for field in fields(op)}
    if not (names := [name for name, value in sizes.items() if isinstance(value, np.ndarray)]):
        return price([op])[0]
    arrays = tuple(sizes[name] for name in names)
    alike, where = _distinct(*arrays)
    each = [type(op)(**{**sizes, **dict(zip(names, row, strict=True))}) for row in alike]
    return np.asarray(price(each))[where]


@lru_cache(maxsize=512)
def _distinct(*arrays: Sizes) -> tuple[list[tuple[int, ...]], NDArray[np.int64]]:
    """The distinct rows of sizes, and which of them is at each place."""
    together = [np.asarray(each) for each in np.broadcast_arrays(*arrays)]
    key = np.zeros(together[0].size, dtype=np.int64)
    for array in together:
        flat = array.ravel()
        key = key * (int(flat.max()) + 1) + flat
    _, first, where = np.unique(key, return_index=True, return_inverse=True)
    rows = zip(*(array.ravel()[first].tolist() for array in together), strict=True)
    return list(rows), where.reshape(together[0].shape)
