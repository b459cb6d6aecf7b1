"""Keys and values of answers under way, in blocks of rows of similar length, and the attention that
reads them.

One pass of the target runs all rows together (one matrix product per weight) while each block is
attended on its own columns, without padding short rows to long ones. Prompts are read behind each
other in one row of the pass. Within a block a row ends at the right, as its tokens do:

    padding ...... | shared beginning | rest of the prompt | answer so far
    padding .................. | shared beginning | rest of another | answer

The target runs with an attention function of ours (transformers' AttentionInterface). Targets that
take none, or whose states come out otherwise, are run block by block with a mask.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from archsearch.models.runtime import causal_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION: Final = "archsearch_blocks"
KNOWN_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})


ALL: Final = slice(None)
Sides = tuple[Tensor, Tensor]  # keys and values


@dataclass(slots=True, eq=False)
class Block:
    """Rows whose keys and values lie together: per layer [rows, kv heads, capacity, head_dim], of
    which `columns` are used.

    `spans`: tokens of each row; they are its last columns.
    """

    spans: list[int]
    columns: int
    capacity: int
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return len(self.spans)

    @property
    def tokens(self) -> int:
        """How many tokens' keys and values it has room for."""
        return self.rows * self.capacity

    def store(self, layer: int, like: Sides) -> Sides:
        """The layer's memory, made at its first use; zeros, since what is masked must be finite."""
        if layer == len(self.keys):
            for side, states in ((self.keys, like[0]), (self.values, like[1])):
                shape = (self.rows, states.shape[1], self.capacity, states.shape[3])
                side.append(states.new_zeros(shape))
        return self.keys[layer], self.values[layer]

    def columns_of(self, layer: int, columns: slice, rows: slice = ALL) -> Sides:
        """Keys and values of a layer in some columns of some rows."""
        return self.keys[layer][rows, :, columns], self.values[layer][rows, :, columns]

    def keep(self, slots: Sequence[int]) -> None:
        """Keep these rows, in this order; layer by layer, so that old and new memory are held for
        one layer only."""
        self.spans = [self.spans[slot] for slot in slots]
        for side in (self.keys, self.values):
            for layer, states in enumerate(side):
                chosen = torch.tensor(slots, device=states.device)
                room = states.new_empty(len(slots), *states.shape[1:])
                room[:, :, : self.columns] = states[:, :, : self.columns].index_select(0, chosen)
                side[layer] = room

    def seen(self, window: int | None = None) -> Tensor | None:
        """[rows, columns + 1] bool: what a row's next token sees; None where that is everything."""
        if min(self.spans) == self.columns and (window is None or self.columns < window):
            return None
        columns = torch.arange(self.columns + 1, device=self.keys[0].device if self.keys else None)
        seen = columns >= self.columns - torch.tensor(self.spans, device=columns.device)[:, None]
        return seen if window is None else seen & (columns > self.columns - window)


def merged(blocks: Sequence[Block]) -> Block:
    """One block with the rows of all, in their order."""
    columns = max(block.columns for block in blocks)
    capacity = columns + max(block.capacity - block.columns for block in blocks)
    whole = Block([span for block in blocks for span in block.spans], columns, capacity)
    for layer in range(len(blocks[0].keys)):
        room = whole.store(layer, (blocks[0].keys[layer], blocks[0].values[layer]))
        row = 0
        for block in blocks:
            for side, states in zip(room, (block.keys[layer], block.values[layer]), strict=True):
                side[row : row + block.rows, :, columns - block.columns : columns] = states[
                    :, :, : block.columns
                ]
            row += block.rows
    return whole


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start` to `stop` of a row of a block, read in one pass."""

    block: Block
    slot: int
    start: int
    stop: int

    def columns(self, start: int, stop: int) -> slice:
        """Where tokens `start` to `stop` of its row lie."""
        first = self.block.columns - self.block.spans[self.slot]
        return slice(first + start, first + stop)

    def stored(self, layer: int) -> Sides:
        """Keys and values [1, kv heads, stop, head_dim] of its row up to its end."""
        rows = slice(self.slot, self.slot + 1)
        return self.block.columns_of(layer, self.columns(0, self.stop), rows)


class Passes:
    """Passes of a target over blocks. `shared`: how many tokens all rows begin with, whose keys and
    values lie in `prefix` once they were read; `together`: all blocks in one pass (asked of the
    target where None)."""

    def __init__(
        self, target: PreTrainedModel, shared: int = 0, together: bool | None = None
    ) -> None:
        self.target, self.shared = target, shared
        self.layers = int(target.config.get_text_config(decoder=True).num_hidden_layers)
        self.together = takes_blocks(target) if together is None else together
        self.prefix: Block | None = None

    def read(self, segments: Sequence[Segment], tokens: Sequence[Sequence[int]]) -> Tensor:
        """The final states [segments, hidden] at the last token of each segment; `tokens`: those of
        each."""
        if not self.together and len(segments) > 1:
            return torch.cat(
                [self.read([one], [ids]) for one, ids in zip(segments, tokens, strict=True)]
            )
        device = self.target.device
        ids = torch.tensor([[token for part in tokens for token in part]], device=device)
        positions = torch.cat([torch.arange(s.start, s.stop, device=device) for s in segments])
        ends = torch.tensor([len(part) for part in tokens], device=device).cumsum(0) - 1
        mask = None
        if not self.together:
            mask = torch.ones(1, segments[0].stop, dtype=torch.long, device=device)
        return self._run(_Reading(segments, self), ids, positions[None], mask)[0, ends]

    def step(self, blocks: Sequence[Block], tokens: Sequence[int]) -> Tensor:
        """One more token for every row of all blocks, in their order: the final states [rows,
        hidden]."""
        if not self.together and len(blocks) > 1:
            left = iter(tokens)
            return torch.cat(
                [self.step([block], [next(left) for _ in block.spans]) for block in blocks]
            )
        device = self.target.device
        ids = torch.tensor(tokens, device=device)[:, None]
        spans = [span for block in blocks for span in block.spans]
        positions = torch.tensor(spans, device=device)[:, None]
        seen = None if self.together else blocks[0].seen()
        mask = None if seen is None else seen.long()
        states = self._run(_Stepping(blocks, self), ids, positions, mask)[:, -1]
        for block in blocks:
            block.columns += 1
            block.spans = [span + 1 for span in block.spans]
        return states

    def _run(self, plan: _Plan, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """The final states [rows, tokens, hidden]."""
        from transformers.cache_utils import Cache

        layer = _layer_class()  # which does what `plan` says
        return self.target.base_model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=Cache(layers=[layer(number, plan) for number in range(self.layers)]),
            use_cache=True,
        ).last_hidden_state

    @contextlib.contextmanager
    def attention(self) -> Iterator[None]:
        """While it lasts the target attends with `ATTENTION`, where it can."""
        if not self.together:
            yield
            return
        before = self.target.config._attn_implementation
        self.target.set_attn_implementation(ATTENTION)
        try:
            yield
        finally:
            self.target.set_attn_implementation(before)


# -- where a pass's keys and values go


class _Stepping:
    """What a pass does with a layer's keys and values: of one token for every row of several
    blocks; of one block for a target that attends by itself. `before`: columns that the target's
    own attention takes to be there already."""

    def __init__(self, blocks: Sequence[Block], passes: Passes) -> None:
        self.blocks, self.together = blocks, passes.together
        self.before = 0 if passes.together else blocks[0].columns
        self.masks: dict[int | None, list[Tensor | None]] = {}

    def update(self, layer: int, keys: Tensor, values: Tensor) -> Sides:
        """Store them; what the target's own attention reads, where it attends by itself."""
        row = 0
        for block in self.blocks:
            sides = zip(block.store(layer, (keys, values)), (keys, values), strict=True)
            for side, states in sides:
                side[:, :, block.columns] = states[row : row + block.rows, :, 0]
            row += block.rows
        if self.together:
            return keys, values
        block = self.blocks[0]
        return block.columns_of(layer, slice(block.columns + 1))

    def attend(self, layer: int, query: Tensor, scale: float | None, window: int | None) -> Tensor:
        """[batch, heads, tokens, head_dim]"""
        if window not in self.masks:
            self.masks[window] = [_added(block.seen(window), query.dtype) for block in self.blocks]
        found, row = [], 0
        for block, mask in zip(self.blocks, self.masks[window], strict=True):
            part = query[row : row + block.rows]
            stored = block.columns_of(layer, slice(block.columns + 1))
            found.append(_attend_one(part, *stored, mask, scale))
            row += block.rows
        return torch.cat(found)


class _Reading:
    """As `_Stepping`: segments of several rows behind each other, [1, heads, all tokens, head_dim];
    a single one for a target that attends by itself."""

    def __init__(self, segments: Sequence[Segment], passes: Passes) -> None:
        self.segments, self.passes = segments, passes
        self.before = 0 if passes.together else segments[0].start
        self.masks: dict[tuple[int, int, int | None], Tensor | None] = {}

    def update(self, layer: int, keys: Tensor, values: Tensor) -> Sides:
        place = 0
        for segment in self.segments:
            part = slice(place, place := place + segment.stop - segment.start)
            self._put(segment, layer, (keys[:, :, part], values[:, :, part]))
        return (keys, values) if self.passes.together else self.segments[0].stored(layer)

    def _put(self, segment: Segment, layer: int, states: Sides) -> None:
        """Store a segment's keys and values, and before a row's first ones those of the beginning
        that all rows share."""
        shared, prefix = self.passes.shared, self.passes.prefix
        parts = [(segment.columns(segment.start, segment.stop), states)]
        if prefix not in (None, segment.block) and segment.start == shared:
            parts.append((segment.columns(0, shared), prefix.columns_of(layer, slice(0, shared))))
        for columns, given in parts:
            for side, part in zip(segment.block.store(layer, states), given, strict=True):
                side[segment.slot, :, columns] = part[0]

    def attend(self, layer: int, query: Tensor, scale: float | None, window: int | None) -> Tensor:
        found, place = [], 0
        for segment in self.segments:
            count = segment.stop - segment.start
            kind = (count, segment.stop, window)
            if kind not in self.masks:  # where torch's own causal mask says it: none
                whole = count == segment.stop and (window is None or count <= window)
                self.masks[kind] = None if whole else causal_mask(*kind, query.device)
            part = query[:, :, place : place + count]
            found.append(_attend_many(part, *segment.stored(layer), self.masks[kind], scale))
            place += count
        return torch.cat(found, dim=2)


_Plan = _Stepping | _Reading


def _added(seen: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """[rows, 1, 1, columns]: what is added to scores; made once for all layers, where torch would
    convert a bool mask in each."""
    if seen is None:
        return None
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)[:, None, None]


# -- attention


def _attend_one(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """One query token a row, [rows, heads, 1, head_dim]."""
    heads, kv_heads = query.shape[1], keys.shape[1]
    halves = query.device.type == "cpu" and query.dtype != torch.float32
    kind = (query.dtype, heads, kv_heads, query.shape[3])
    if halves and heads > kv_heads and _grouped_is_quicker(*kind):
        return _attend_grouped(query, keys, values, mask, scale=scale)
    return _attend_packed(query, keys, values, mask, scale)


_attend_grouped = functools.partial(scaled_dot_product_attention, enable_gqa=True)


def _attend_packed(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Heads that share keys as tokens of one query: on CUDA a mask and grouped heads together fall
    back to the slow kernel."""
    rows, heads, _, width = query.shape
    groups = heads // keys.shape[1]
    packed = query.reshape(rows, keys.shape[1], groups, width)
    wide = None if mask is None else mask.expand(-1, -1, groups, -1)
    found = scaled_dot_product_attention(packed, keys, values, attn_mask=wide, scale=scale)
    return found.reshape(rows, heads, 1, -1)


@functools.cache
def _grouped_is_quicker(dtype: torch.dtype, heads: int, kv_heads: int, width: int) -> bool:
    """Whether this CPU attends heads that share keys quicker one by one than packed, in 16 bits:
    with AMX 1.4 times, with AVX512 alone it takes four times as long. Timed once a process, 32 rows
    of 128 columns, the least of three."""
    query = torch.ones(32, heads, 1, width, dtype=dtype)
    keys, values = torch.ones(2, 32, kv_heads, 128, width, dtype=dtype)
    mask = torch.zeros(32, 1, 1, 128, dtype=dtype)
    ways: tuple[Callable[..., Tensor], ...] = (_attend_grouped, _attend_packed)
    least = dict.fromkeys(ways, float("inf"))
    for turn in range(4):  # the first one warms up
        for attend in least:
            begin = time.perf_counter()
            attend(query, keys, values, mask, scale=None)
            if turn:
                least[attend] = min(least[attend], time.perf_counter() - begin)
    return least[_attend_grouped] < least[_attend_packed]


def _attend_many(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Several tokens of one row, [1, heads, tokens, head_dim]; no mask is causal."""
    groups = query.shape[1] // keys.shape[1]
    if groups > 1:
        keys, values = (states.repeat_interleave(groups, dim=1) for states in (keys, values))
    return scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scale, is_causal=mask is None
    )


def _attention(
    module: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **other: object,
) -> tuple[Tensor, None]:
    """What the target calls instead of its attention: the layer's plan knows where its keys and
    values lie."""
    plan, layer = key.archsearch_plan  # type: ignore[attr-defined]
    return plan.attend(layer, query, scaling, sliding_window).transpose(1, 2).contiguous(), None


@functools.cache
def _layer_class() -> type[Any]:
    """The cache layer's class; the attention function is registered with it, on first use:
    transformers is slow to import."""
    from transformers import AttentionInterface
    from transformers.cache_utils import DynamicLayer

    class PlannedLayer(DynamicLayer):
        def __init__(self, number: int, plan: Any) -> None:
            super().__init__()
            self.number, self.plan = number, plan

        def update(self, key_states: Any, value_states: Any, *args: object, **kwargs: Any) -> Any:
            keys, values = self.plan.update(self.number, key_states, value_states)
            keys.archsearch_plan = (self.plan, self.number)
            return keys, values

        def get_seq_length(self) -> int:
            return int(self.plan.before)

    AttentionInterface.register(ATTENTION, _attention)
    return PlannedLayer


# -- which targets


_takes_blocks: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def takes_blocks(target: PreTrainedModel) -> bool:
    """Whether the target runs several blocks in one pass, with the states of its own attention;
    asked once per model."""
    if target not in _takes_blocks:
        config = target.config.get_text_config(decoder=True)
        kinds = set(getattr(config, "layer_types", None) or ())
        settable = getattr(target, "_can_set_attn_implementation", lambda: False)
        plain = target.config._attn_implementation == "sdpa" and kinds <= KNOWN_LAYERS
        _takes_blocks[target] = plain and settable() and _agrees(target)
    return _takes_blocks[target]


def _agrees(target: PreTrainedModel) -> bool:
    """Two rows read and continued by blocks, beside the target's own pass over each: True where
    states agree."""
    _layer_class()
    passes = Passes(target, together=True)
    vocab = int(target.config.get_text_config(decoder=True).vocab_size)
    rows = [[(7 * i + 3) % vocab for i in range(count)] for count in (5, 9)]
    blocks = [Block([len(row) - 1], len(row) - 1, len(row)) for row in rows]
    with torch.inference_mode():
        try:
            with passes.attention():
                segments = [
                    Segment(block, 0, 0, len(row) - 1)
                    for block, row in zip(blocks, rows, strict=True)
                ]
                passes.read(segments, [row[:-1] for row in rows])
                found = passes.step(blocks, [row[-1] for row in rows])
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            return False
        for states, row in zip(found, rows, strict=True):
            ids = torch.tensor([row], device=target.device)
            own = target.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, -1].float()
            if not bool((states.float() - own).norm() <= 0.05 * own.norm()):
                return False
    return True
