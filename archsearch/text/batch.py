"""Answers under way: prompts go in by tokens and memory, answers that ended make room for the next
prompts.

Prompts come in the order given, as many at once as fit and should end in time, packed into passes
of equal size; the beginning that all share is read once. Answers are written for all rows together,
one token a pass (`blocks` says where keys and values lie); which rows lie beside one changes float
noise only.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from archsearch.text.auxiliary import layer_inputs
from archsearch.text.blocks import Block, Passes, Segment, merged
from archsearch.text.cache import CachedSequence
from archsearch.text.prompts import EncodedPrompt
from archsearch.text.settings import (
    ROWS,
    Writing,
    best_tokens,
    draw,
    kv_tokens,
    prefill_tokens,
    warped_probs,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Of a block's rows: so many must have ended before it is copied without them.
IDLE_SHARE: Final = 0.125
# A row joins a block from this share of the block's columns on, at the middle of the answers.
SIMILAR: Final = 0.8
LEAST_ROWS: Final = 8  # a smaller block joins another: each takes its own calls
STEPS: Final = 3  # of a batch before their seconds count; assumed
# Of the time left until a deadline: more is not spent on reading before something is written.
READ_SHARE: Final = 1 / 3
WRITES: Final = "writes"
READS: Final = "reads prompts"

# (what is done now, answers ended, tokens written)
Report = Callable[[str, int, int], None]


@dataclass(slots=True, eq=False)
class Row:
    """An answer under way. `noise` [max_new_tokens]: what its tokens are drawn with, None where
    nothing is sampled; `states`: each [tokens, width], of its tokens in their order."""

    prompt: EncodedPrompt
    noise: Tensor | None = None
    ids: list[int] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)  # each [hidden]
    states: list[Tensor] = field(default_factory=list)
    ended: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt.token_ids, *self.ids)

    def sequence(self) -> CachedSequence:
        # A read that was cut short left some of them only.
        whole = sum(map(len, self.states)) == len(self.tokens) - 1
        return CachedSequence(
            torch.tensor(self.tokens),
            len(self.prompt.token_ids),
            torch.stack([h.cpu() for h in self.hidden]),
            torch.tensor(self.greedy),
            self.prompt.category,
            self.prompt.id,
            torch.cat(self.states) if whole else None,
        )


class BatchWriter:
    """Writes answers to prompts, one batch of them after the other. Memory: the rows' columns of
    keys and values, room for whole answers included, stay within `most_tokens` (one row is always
    taken, however long). The rows under way, `alive`, are those of its blocks, in their order."""

    def __init__(
        self, target: PreTrainedModel, head: Tensor, ends: tuple[int, ...], writing: Writing
    ) -> None:
        self.target, self.head, self.ends, self.writing = target, head, ends, writing
        self.most_rows, self.most_tokens = ROWS, kv_tokens(target)
        self.pass_tokens = prefill_tokens(target)

    def row(
        self, prompt: EncodedPrompt, seed: int, place: int, begun: CachedSequence | None = None
    ) -> Row:
        """A prompt's answer to be written; what is sampled hangs on `seed` and `place`. `begun`: an
        answer that was cut."""
        row, writing = Row(prompt), self.writing
        if writing.temperature > 0:
            generator = torch.Generator().manual_seed((seed * 1_000_003 + place) % 2**63)
            row.noise = torch.rand(writing.max_new_tokens, dtype=torch.float64, generator=generator)
        if begun is not None:
            row.ids, row.greedy = begun.written.tolist(), begun.greedy_ids.tolist()
            row.hidden = list(begun.hidden)
            row.states = [] if begun.states is None else [begun.states]
        return row

    def write_rows(
        self,
        rows: Sequence[Row],
        report: Report,
        deadline: float | None = None,
        ended: Callable[[Row], None] = lambda row: None,
    ) -> bool:
        """Write the answers of `rows`, and say whether all came to their end.

        `ended` is called with each row when it ends. The deadline (time.monotonic) is checked
        before every pass after the first. Prompts not reached have no answer; those under way are
        cut.
        """
        self.report, self.deadline, self.ended = report, deadline, ended
        self.waiting = [row for row in rows if not row.ended]  # the next one first
        shared = common_prefix([row.prompt.token_ids for row in self.waiting])
        self.passes = Passes(self.target, shared)
        self.blocks: list[Block] = []
        self.alive: list[Row] = []
        # [alive, hidden]: the states that predict each row's next token
        self.tail: Tensor | None = None
        self.shared: list[Tensor] = []  # what the chosen layers took in of the shared beginning
        self.written = self.done = self.ended_tokens = 0
        self.begin = time.monotonic()
        self.step_s: dict[int, float] = {}  # the last step, by its rows
        self.stepped, self.chosen = 0, 0.0  # steps since rows came; when tokens were chosen
        self.read_s = 0.0  # a row's, when last read
        kept = layer_inputs(self.target, self.writing.layers)
        # `inputs`: of the chosen layers in the last passes
        with torch.inference_mode(), self.passes.attention(), kept as self.inputs:
            return self._run()

    def _run(self) -> bool:
        if not self.waiting:
            return True
        self._read_shared()
        while self.waiting or self.live:
            if self._room_to_refill():
                self._refill()
            if self.alive:
                self._choose()
            self.report(WRITES, self.done, self.written)
            if self._late():
                return not self.waiting and not self.live
            self._leave()
            if self.alive:
                self._step()
        return True

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    # -- rows in and out

    @property
    def live(self) -> int:
        return sum(not row.ended for row in self.alive)

    @property
    def held(self) -> int:
        """Tokens that the blocks have room for."""
        return sum(block.tokens for block in self.blocks)

    def _fitting(self) -> int:
        """How many of those that wait fit beside the live ones, with room for a whole answer
        each."""
        room = self.most_tokens - self.held
        most = min(len(self.waiting), self.most_rows - self.live, self._finishing())

        def too_many(count: int) -> bool:
            groups = self._groups(self.waiting[:count])
            return sum(len(group) * self._capacity(group) for group in groups) > room

        fitting = bisect_left(range(1, most + 1), True, key=too_many)
        return fitting if fitting or self.blocks else 1

    def _finishing(self) -> int:
        """How many more answers are begun: those that should end by the deadline, by the seconds of
        a step and of each of its rows, which a few tell first; beginnings are easier to draft than
        what follows. Where a step's own seconds take half of the time, what its first third reads.
        Assumed: half, third, and that steps stay as quick; as caches grow, some may be cut."""
        if self.deadline is None:
            return self.most_rows
        if self.stepped < STEPS and (self.live or not self.step_s):
            return 0 if self.live else LEAST_ROWS
        left_s, length = self.deadline - time.monotonic(), float(self.writing.max_new_tokens)
        if self.done >= max(self.live, LEAST_ROWS):
            length = self.ended_tokens / self.done
        budget_s = self.deadline - self.begin
        readable = max(0, int((left_s - (1.0 - READ_SHARE) * budget_s) / self.read_s))
        few, many = min(self.step_s), max(self.step_s)
        row_s = self.step_s[many] / many
        if many >= 2 * few:
            more_s = (self.step_s[many] - self.step_s[few]) / (many - few)
            row_s = min(row_s, max(0.0, more_s))  # noise may say more
        elif self.step_s[many] * length > left_s:
            return min(many, readable)
        fixed_s = self.step_s[many] - many * row_s
        if 2 * fixed_s * length > budget_s:
            return readable
        to_write = sum(max(0.0, length - len(row.ids)) for row in self.alive if not row.ended)
        free_s = left_s - fixed_s * length - row_s * to_write
        return min(3 * many, max(0, int(free_s / (row_s * length + self.read_s))))

    def _room_to_refill(self) -> bool:
        """Whether so many rows can come in that a pass over their prompts pays."""
        live = self.live
        least = min(len(self.waiting), max(1.0, IDLE_SHARE * live))
        return 0 < least <= self.most_rows - live and self._fitting() >= least

    def _capacity(self, group: Sequence[Row]) -> int:
        """Columns of a block: the longest row, and what the least written one has still to write
        behind it."""
        left = self.writing.max_new_tokens - min(len(row.ids) for row in group)
        return max(len(row.tokens) for row in group) + left

    def _groups(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Rows of similar length together, the shortest first."""
        groups: list[list[Row]] = []
        longest = 0
        half = self.writing.max_new_tokens // 2
        for row in sorted(rows, key=lambda row: len(row.prompt.token_ids), reverse=True):
            length = len(row.prompt.token_ids) + half
            if not groups or length < SIMILAR * longest:
                groups.append([])
                longest = length
            groups[-1].append(row)
        return [group[::-1] for group in groups[::-1]]

    def _refill(self) -> None:
        self._leave(least=1)
        count = self._fitting()
        new, self.waiting = self.waiting[:count], self.waiting[count:]
        groups = self._groups(new)
        blocks = []
        for group in groups:
            lengths = [len(row.tokens) for row in group]
            blocks.append(Block(lengths, max(lengths), self._capacity(group)))
        begin = time.monotonic()
        read = self._read(groups, blocks)
        self.read_s, self.stepped = (time.monotonic() - begin + 1e-6) / max(1, len(read)), 0
        self.waiting = [row for row in new if row not in read] + self.waiting
        for group, block in zip(groups, blocks, strict=True):
            slots = [slot for slot, row in enumerate(group) if row in read]
            if 0 < len(slots) < len(group):
                block.keep(slots)
            if slots:
                self.blocks.append(block)
                self.alive += (rows := [group[slot] for slot in slots])
                tails = torch.stack([read[row] for row in rows])
                self.tail = tails if self.tail is None else torch.cat([self.tail, tails])
        self._merge_small()

    def _leave(self, least: int | None = None) -> None:
        """Rows that ended leave a block as soon as an eighth of it is idle (or `least` rows)."""
        kept: list[int] = []
        blocks, first, changed = [], 0, False
        for block in self.blocks:
            slots = [slot for slot in range(block.rows) if not self.alive[first + slot].ended]
            idle, rows = block.rows - len(slots), block.rows
            if idle and idle >= (IDLE_SHARE * rows if least is None else least):
                changed = True
                if slots:
                    block.keep(slots)
            else:
                slots = list(range(rows))
            if slots:
                blocks.append(block)
            kept += [first + slot for slot in slots]
            first += rows
        if changed and self.tail is not None:
            self.blocks, self.alive = blocks, [self.alive[place] for place in kept]
            self.tail = self.tail[torch.tensor(kept, device=self.tail.device, dtype=torch.long)]
            self._merge_small()

    def _merge_small(self) -> None:
        """Neighbours of which one is small become one block, where the memory for its padding is
        there."""
        place = 0
        while place + 1 < len(self.blocks):
            pair = self.blocks[place : place + 2]
            rows, tokens = sum(block.rows for block in pair), sum(block.tokens for block in pair)
            columns = max(block.columns for block in pair)
            needed = rows * (columns + max(block.capacity - block.columns for block in pair))
            small = min(block.rows for block in pair) < LEAST_ROWS or not self.passes.together
            fits = self.held - tokens + needed <= self.most_tokens
            if small and fits and needed <= 2 * tokens:
                self.blocks[place : place + 2] = [merged(pair)]
            else:
                place += 1

    # -- passes of the target

    def _read_shared(self) -> None:
        count = self.passes.shared
        if not count:
            return
        tokens = self.waiting[0].prompt.token_ids[:count]
        prefix = Block([count], count, count)
        for start in range(0, count, self.pass_tokens):
            stop = min(start + self.pass_tokens, count)
            self.passes.read([Segment(prefix, 0, start, stop)], [tokens[start:stop]])
            self.shared += self._kept([stop - start])
            self.report(READS, self.done, self.written)
        self.passes.prefix = prefix

    def _read(self, groups: Sequence[Sequence[Row]], blocks: Sequence[Block]) -> dict[Row, Tensor]:
        """The last state [hidden] of every row that was read to its end; those that time did not
        reach are missing."""
        found: dict[Row, Tensor] = {}
        now = time.monotonic()
        limit = None if self.deadline is None else now + READ_SHARE * (self.deadline - now)
        for work in self._passes_over(groups, blocks):
            if limit is not None and time.monotonic() >= limit and (found or self.alive):
                break
            if self._late() and self.written:
                break
            tokens = [row.tokens[s.start : s.stop] for row, s in work]
            states = self.passes.read([segment for _, segment in work], tokens)
            kept = self._kept([len(part) for part in tokens])
            for (row, segment), part in zip(work, kept, strict=False):
                if segment.start == self.passes.shared:
                    row.states = list(self.shared)
                row.states.append(part)
            for state, (row, segment) in zip(states, work, strict=True):
                if segment.stop == len(row.tokens):
                    found[row] = state.clone()
            self.report(READS, self.done, self.written)
        return found

    def _passes_over(
        self, groups: Sequence[Sequence[Row]], blocks: Sequence[Block]
    ) -> Iterator[list[tuple[Row, Segment]]]:
        """The rows' tokens after the shared ones, behind each other and cut into passes of
        `pass_tokens`."""
        work: list[tuple[Row, Segment]] = []
        left = self.pass_tokens
        for group, block in zip(groups, blocks, strict=True):
            for slot, row in enumerate(group):
                start, end = self.passes.shared, len(row.tokens)
                while start < end:
                    stop = min(end, start + left)
                    work.append((row, Segment(block, slot, start, stop)))
                    left -= stop - start
                    start = stop
                    if not left:
                        yield work
                        work, left = [], self.pass_tokens
        if work:
            yield work

    def _step(self) -> None:
        self.tail = self.passes.step(self.blocks, [row.ids[-1] for row in self.alive]).clone()
        self.stepped += 1
        for row, part in zip(self.alive, self._kept([1] * len(self.alive)), strict=False):
            if not row.ended:
                row.states.append(part)

    def _kept(self, counts: Sequence[int]) -> Sequence[Tensor]:
        """What the chosen layers took in for the tokens of the last passes, in parts of `counts`
        [count, width]; () where nothing is kept."""
        if not self.inputs:
            return ()
        whole = torch.cat([one.flatten(0, 1) for one in self.inputs])
        self.inputs.clear()
        return whole.split(list(counts))

    def _choose(self) -> None:
        writing, tail = self.writing, self.tail
        assert tail is not None
        logits = torch.nn.functional.linear(tail, self.head)  # [alive, vocab]
        greedy = best_tokens(logits)
        chosen = greedy
        if writing.temperature > 0:
            last = writing.max_new_tokens - 1
            drawn = [row.noise[min(len(row.ids), last)] for row in self.alive]  # type: ignore
            noise = torch.stack(drawn)
            probs = warped_probs(logits, writing.temperature, writing.top_p)
            chosen = draw(probs, noise.to(logits.device))
        tokens = zip(self.alive, chosen.tolist(), greedy.tolist(), strict=True)
        if self.stepped:  # rows leave until others come in: what more took is old
            self.step_s = {n: s for n, s in self.step_s.items() if n < len(self.alive)}
            self.step_s[len(self.alive)] = time.monotonic() - self.chosen
        for slot, (row, token, best) in enumerate(tokens):
            if row.ended:
                continue
            row.ids.append(token)
            row.greedy.append(best)
            row.hidden.append(tail[slot])
            row.ended = token in self.ends or len(row.ids) >= writing.max_new_tokens
            self.written += 1
            if row.ended:
                self.done += 1
                self.ended_tokens += len(row.ids)
                self.ended(row)
                row.states.clear()
        self.chosen = time.monotonic()


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """Length of the beginning that all rows share, at most one less than the shortest row (its last
    token must be run)."""
    return len(os.path.commonprefix([tuple(row[:-1]) for row in rows]))  # of any tuples
