"""Keys and values of answers under way, in blocks of rows of similar length, and the attention that
reads them.

One pass of the target runs all rows together (one matrix product per weight) while each block is
attended on its own columns: rows of 40 and of 1,300 tokens lie side by side without padding one to
the other. Prompts are read without padding, behind each other in one row of the pass. Within a
block a row ends at the right, as its tokens do:

    padding ...... | shared beginning | rest of the prompt | answer so far
    padding .................. | shared beginning | rest of another | answer

The target runs with an attention function of ours (transformers' AttentionInterface). Targets that
take none, or whose states come out otherwise than by their own attention, are run block by block
with a mask.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

ATTENTION: Final = "archsearch_blocks"
KNOWN_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})


@dataclass(slots=True, eq=False)
class Block:
    """Rows whose keys and values lie together: per layer [rows, kv heads, capacity, head_dim], of
    which `columns` are used.

    `spans`: tokens of each row; they are its last columns.
    """

    spans: list[int]
    columns: int
    capacity: int
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return len(self.spans)

    @property
    def tokens(self) -> int:
        """How many tokens' keys and values it has room for."""
        return self.rows * self.capacity

    def store(
        self, layer: int, like: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's memory, made at its first use; zeros, since what is masked must be finite."""
        if layer == len(self.keys):
            for side, states in ((self.keys, like[0]), (self.values, like[1])):
                side.append(
                    states.new_zeros(self.rows, states.shape[1], self.capacity, states.shape[3])
                )
        return self.keys[layer], self.values[layer]

    def keep(self, slots: Sequence[int]) -> None:
        """Keep these rows, in this order; layer by layer, so that old and new memory are held for
        one layer only."""
        import torch

        self.spans = [self.spans[slot] for slot in slots]
        for side in (self.keys, self.values):
            for layer, states in enumerate(side):
                chosen = torch.tensor(slots, device=states.device)
                room = states.new_empty(len(slots), *states.shape[1:])
                room[:, :, : self.columns] = states[:, :, : self.columns].index_select(0, chosen)
                side[layer] = room

    def seen(self, window: int | None = None) -> torch.Tensor | None:
        """[rows, columns + 1] bool: what a row's next token sees; None where that is everything."""
        import torch

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

    @property
    def first(self) -> int:
        """The column of the row's first token."""
        return self.block.columns - self.block.spans[self.slot]


class Passes:
    """Passes of a target over blocks. `shared`: how many tokens all rows begin with, whose keys and
    values lie in `prefix` once they were read; `together`: all blocks in one pass (asked of the
    target where None)."""

    def __init__(self, target: Any, shared: int = 0, together: bool | None = None) -> None:
        self.target, self.shared = target, shared
        self.layers = int(target.config.get_text_config(decoder=True).num_hidden_layers)
        self.together = takes_blocks(target) if together is None else together
        self.prefix: Block | None = None

    def read(self, segments: Sequence[Segment], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """The final states [segments, hidden] at the last token of each segment; `tokens`: those of
        each."""
        import torch

        device = self.target.device
        ids = torch.tensor(
            [[token for part in tokens for token in part]], device=device
        )  # [1, all tokens]
        positions = torch.cat([torch.arange(s.start, s.stop, device=device) for s in segments])[
            None
        ]
        ends = torch.tensor([len(part) for part in tokens], device=device).cumsum(0) - 1
        if self.together:
            return self._run(_Reading(segments, self), ids, positions)[0, ends]
        states = []
        for segment, part in zip(segments, tokens, strict=True):
            alone = torch.tensor([list(part)], device=device)
            where = torch.arange(segment.start, segment.stop, device=device)[None]
            mask = torch.ones(1, segment.stop, dtype=torch.long, device=device)
            states.append(self._run(_OneRow(segment, self), alone, where, mask)[0, -1])
        return torch.stack(states)

    def step(self, blocks: Sequence[Block], tokens: Sequence[int]) -> torch.Tensor:
        """One more token for every row of all blocks, in their order: the final states [rows,
        hidden]."""
        import torch

        device = self.target.device
        ids = torch.tensor(tokens, device=device)[:, None]
        positions = torch.tensor([span for block in blocks for span in block.spans], device=device)[
            :, None
        ]
        if self.together:
            states = self._run(_Stepping(blocks), ids, positions)[:, -1]
        else:
            parts, row = [], 0
            for block in blocks:
                place = slice(row, row + block.rows)
                seen = block.seen()
                mask = None if seen is None else seen.long()
                parts.append(self._run(_OneBlock(block), ids[place], positions[place], mask)[:, -1])
                row += block.rows
            states = torch.cat(parts)
        for block in blocks:
            block.columns += 1
            block.spans = [span + 1 for span in block.spans]
        return states

    def _run(
        self,
        plan: _Plan,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        cache = _cache(self.layers, plan)
        output = self.target.base_model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        states: torch.Tensor = output.last_hidden_state
        return states

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


# ------------------------------------------------------------------------------------------- where
# a pass's keys and values go


class _Plan:
    """What one pass does with a layer's keys and values: `update` stores them, `attend` reads."""

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def attend(
        self, layer: int, query: torch.Tensor, scale: float | None, window: int | None
    ) -> torch.Tensor:
        """[batch, heads, tokens, head_dim]"""
        raise NotImplementedError


class _Stepping(_Plan):
    """One token for every row of several blocks."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self.masks: dict[int | None, list[torch.Tensor | None]] = {}

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        row = 0
        for block in self.blocks:
            for side, states in zip(
                block.store(layer, (keys, values)), (keys, values), strict=True
            ):
                side[:, :, block.columns] = states[row : row + block.rows, :, 0]
            row += block.rows
        return keys, values

    def attend(
        self, layer: int, query: torch.Tensor, scale: float | None, window: int | None
    ) -> torch.Tensor:
        import torch

        if window not in self.masks:
            self.masks[window] = [_added(block.seen(window), query.dtype) for block in self.blocks]
        found, row = [], 0
        for block, mask in zip(self.blocks, self.masks[window], strict=True):
            keys, values = (
                side[layer][:, :, : block.columns + 1] for side in (block.keys, block.values)
            )
            found.append(_attend_one(query[row : row + block.rows], keys, values, mask, scale))
            row += block.rows
        return torch.cat(found)


class _Reading(_Plan):
    """Segments of several rows behind each other, [1, heads, all tokens, head_dim]."""

    def __init__(self, segments: Sequence[Segment], passes: Passes) -> None:
        self.segments, self.passes = segments, passes
        self.masks: dict[tuple[int, int, int | None], torch.Tensor | None] = {}

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        place = 0
        for segment in self.segments:
            count = segment.stop - segment.start
            _put(
                segment,
                layer,
                keys[:, :, place : place + count],
                values[:, :, place : place + count],
                self.passes,
            )
            place += count
        return keys, values

    def attend(
        self, layer: int, query: torch.Tensor, scale: float | None, window: int | None
    ) -> torch.Tensor:
        import torch

        found, place = [], 0
        for segment in self.segments:
            count, block, first = segment.stop - segment.start, segment.block, segment.first
            row = slice(segment.slot, segment.slot + 1)
            keys, values = (
                s[layer][row, :, first : first + segment.stop] for s in (block.keys, block.values)
            )
            kind = (count, segment.stop, window)
            if kind not in self.masks:
                self.masks[kind] = _causal(count, segment.stop, window, query.device)
            found.append(
                _attend_many(
                    query[:, :, place : place + count], keys, values, self.masks[kind], scale
                )
            )
            place += count
        return torch.cat(found, dim=2)


class _OneRow(_Plan):
    """A segment on its own, for targets that attend by themselves."""

    def __init__(self, segment: Segment, passes: Passes) -> None:
        self.segment, self.passes = segment, passes

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        segment = self.segment
        _put(segment, layer, keys, values, self.passes)
        row, first = slice(segment.slot, segment.slot + 1), segment.first
        block = segment.block
        return (
            block.keys[layer][row, :, first : first + segment.stop],
            block.values[layer][row, :, first : first + segment.stop],
        )

    def seen(self) -> int:
        return self.segment.start


class _OneBlock(_Plan):
    """One token for every row of one block, for targets that attend by themselves."""

    def __init__(self, block: Block) -> None:
        self.block = block

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _Stepping([self.block]).update(layer, keys, values)
        columns = self.block.columns + 1
        return self.block.keys[layer][:, :, :columns], self.block.values[layer][:, :, :columns]

    def seen(self) -> int:
        return self.block.columns


def _added(seen: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """[rows, 1, 1, columns]: what is added to scores; made once for all layers, where torch would
    convert a bool mask in each."""
    import torch

    return (
        None
        if seen is None
        else torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)[:, None, None]
    )


def _put(
    segment: Segment, layer: int, keys: torch.Tensor, values: torch.Tensor, passes: Passes
) -> None:
    """Store a segment's keys and values, and before a row's first ones those of the beginning that
    all rows share."""
    block, first = segment.block, segment.first
    sides = block.store(layer, (keys, values))
    for side, states in zip(sides, (keys, values), strict=True):
        side[segment.slot, :, first + segment.start : first + segment.stop] = states[0]
    prefix = passes.prefix
    if prefix is not None and prefix is not block and segment.start == passes.shared:
        for side, states in zip(sides, (prefix.keys[layer], prefix.values[layer]), strict=True):
            side[segment.slot, :, first : first + passes.shared] = states[0, :, : passes.shared]


# --------------------------------------------------------------------------------------------------
# attention


def _attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """One query token a row, [rows, heads, 1, head_dim]."""
    import torch

    heads, kv_heads = query.shape[1], keys.shape[1]
    halves = query.device.type == "cpu" and query.dtype != torch.float32
    if (
        halves
        and heads > kv_heads
        and _grouped_is_quicker(query.dtype, heads, kv_heads, query.shape[3])
    ):
        return _attend_grouped(query, keys, values, mask, scale)
    return _attend_packed(query, keys, values, mask, scale)


def _attend_grouped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    from torch.nn.functional import scaled_dot_product_attention

    return scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
    )


def _attend_packed(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Heads that share keys as tokens of one query: on CUDA a mask and grouped heads together fall
    back to the slow kernel."""
    from torch.nn.functional import scaled_dot_product_attention

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
    import torch

    query = torch.ones(32, heads, 1, width, dtype=dtype)
    keys, values = torch.ones(2, 32, kv_heads, 128, width, dtype=dtype)
    mask = torch.zeros(32, 1, 1, 128, dtype=dtype)
    least = {_attend_grouped: float("inf"), _attend_packed: float("inf")}
    for turn in range(4):  # the first one warms up
        for attend in least:
            begin = time.perf_counter()
            attend(query, keys, values, mask, None)
            if turn:
                least[attend] = min(least[attend], time.perf_counter() - begin)
    return least[_attend_grouped] < least[_attend_packed]


def _attend_many(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Several tokens of one row, [1, heads, tokens, head_dim]; no mask is causal."""
    from torch.nn.functional import scaled_dot_product_attention

    groups = query.shape[1] // keys.shape[1]
    if groups > 1:
        keys, values = (states.repeat_interleave(groups, dim=1) for states in (keys, values))
    return scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scale, is_causal=mask is None
    )


def _causal(count: int, total: int, window: int | None, device: Any) -> torch.Tensor | None:
    """[count, total] bool: what the last `count` of `total` tokens see; None where torch's own
    causal mask says it."""
    import torch

    if count == total and (window is None or total <= window):
        return None
    token = torch.arange(total - count, total, device=device)[:, None]
    column = torch.arange(total, device=device)
    seen = column <= token
    return seen if window is None else seen & (column > token - window)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """What the target calls instead of its attention: the layer's plan knows where its keys and
    values lie."""
    plan, layer = key.archsearch_plan  # type: ignore[attr-defined]
    return plan.attend(layer, query, scaling, sliding_window).transpose(1, 2).contiguous(), None


_layer_classes: list[type] = []


def _cache(layers: int, plan: _Plan) -> Any:
    """A transformers cache whose layers do what `plan` says."""
    from transformers.cache_utils import Cache

    if not _layer_classes:
        _define()
    return Cache(layers=[_layer_classes[0](number, plan) for number in range(layers)])


def _define() -> None:
    """The cache layer's class and the attention function, on first use: transformers is slow to
    import."""
    from transformers import AttentionInterface
    from transformers.cache_utils import DynamicLayer

    class PlannedLayer(DynamicLayer):
        def __init__(self, number: int, plan: Any) -> None:
            super().__init__()
            self.number, self.plan = number, plan

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            keys, values = self.plan.update(self.number, key_states, value_states)
            keys.archsearch_plan = (self.plan, self.number)
            return keys, values

        def get_seq_length(self) -> int:
            return int(self.plan.seen()) if hasattr(self.plan, "seen") else 0

    AttentionInterface.register(ATTENTION, _attention)
    _layer_classes.append(PlannedLayer)


# --------------------------------------------------------------------------------------------------
# which targets


def takes_blocks(target: Any) -> bool:
    """Whether the target runs several blocks in one pass, with the states of its own attention;
    asked once per model."""
    known = getattr(target, "_archsearch_blocks", None)
    if known is None:
        known = _may_take_blocks(target) and _agrees(target)
        target._archsearch_blocks = known
    return bool(known)


def _may_take_blocks(target: Any) -> bool:
    config = target.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    settable = getattr(target, "_can_set_attn_implementation", lambda: False)
    return (
        target.config._attn_implementation == "sdpa" and kinds <= KNOWN_LAYERS and bool(settable())
    )


def _agrees(target: Any) -> bool:
    """Two rows read and continued by blocks, beside the target's own pass over each: True where
    states agree."""
    import torch

    if not _layer_classes:
        _define()
    passes = Passes(target, together=True)
    vocab = int(target.get_input_embeddings().weight.shape[0])
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
