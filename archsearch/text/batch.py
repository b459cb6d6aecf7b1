"""One batch of answers under way: prompts go in by tokens and memory, answers that ended make room for the next prompts.

Columns of the cache, for every row: the beginning that all prompts share (system message, chat frame; run once), then padding,
then the rest of the row's prompt and its answer, which end at the right. Positions are the row's own, so padding and the order in
which rows came change nothing but float noise.

    shared | padding ...... | rest of the prompt | answer so far
    shared | padding .................. | rest of another | answer
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from archsearch.text.cache import CachedSequence
from archsearch.text.growing_cache import GrowingCache
from archsearch.text.prompts import EncodedPrompt
from archsearch.text.sampling import draw, warped_probs
from archsearch.text.settings import Writing, kv_tokens, prefill_tokens

if TYPE_CHECKING:
    import torch

IDLE_SHARE: Final = 0.25  # of the rows: so many must have ended before the cache is copied without them
WRITES: Final = "writes"
READS: Final = "reads prompts"

# (what is done now, answers ended, tokens written)
Report = Callable[[str, int, int], None]


@dataclass(slots=True)
class Row:
    """An answer under way. `noise` [max_new_tokens]: what its tokens are drawn with, None where nothing is sampled."""

    prompt: EncodedPrompt
    noise: torch.Tensor | None = None
    ids: list[int] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)  # each [hidden]
    ended: bool = False

    def sequence(self) -> CachedSequence:
        import torch

        return CachedSequence(
            torch.tensor([*self.prompt.token_ids, *self.ids]), len(self.prompt.token_ids), torch.stack(self.hidden).cpu(),
            torch.tensor(self.greedy), self.prompt.category, self.prompt.id,
        )  # fmt: skip


class BatchWriter:
    """Writes answers to a list of prompts. Memory: rows x (longest + max_new_tokens) columns of keys and values stay within the
    limits of `writing` (one row is always taken, however long)."""

    def __init__(self, target: Any, head: torch.Tensor, ends: tuple[int, ...], writing: Writing) -> None:
        self.target, self.head, self.ends, self.writing = target, head, ends, writing
        self.most_tokens = kv_tokens(target, writing.limits)
        self.pass_tokens = prefill_tokens(target, writing.limits)

    def write(
        self, prompts: Sequence[EncodedPrompt], report: Report, deadline: float | None = None, seed: int = 0
    ) -> tuple[list[CachedSequence], bool]:
        """Answers in the order of `prompts`, and whether all ended by themselves or by max_new_tokens, not by the `deadline`.

        Short prompts come first. The deadline (time.monotonic) is looked at before every pass after the first; prompts that were
        not reached have no answer, those under way are cut. `seed`: of what is sampled, with each prompt's place.
        """
        import torch

        rows = [Row(prompt, self._noise(seed, place)) for place, prompt in enumerate(prompts)]
        batch = _Batch(self, rows, report, deadline)
        with torch.inference_mode():
            finished = batch.run()
        return [row.sequence() for row in rows if row.ids], finished

    def _noise(self, seed: int, place: int) -> torch.Tensor | None:
        import torch

        if self.writing.temperature <= 0:
            return None
        generator = torch.Generator().manual_seed((seed * 1_000_003 + place) % 2**63)
        return torch.rand(self.writing.max_new_tokens, dtype=torch.float64, generator=generator)


class _Batch:
    """The state of one batch while it runs."""

    def __init__(self, writer: BatchWriter, rows: Sequence[Row], report: Report, deadline: float | None) -> None:
        self.writer, self.report, self.deadline = writer, report, deadline
        self.rows = rows
        self.waiting = sorted(rows, key=lambda row: len(row.prompt.token_ids))  # the next one first
        self.shared = common_prefix([row.prompt.token_ids for row in rows])
        self.alive: list[Row] = []  # one per row of the cache
        self.spans: list[int] = []  # tokens of each row after the shared ones
        self.kv = GrowingCache(writer.target.config, reserve=1)
        self.prefix = GrowingCache(writer.target.config, reserve=self.shared)
        self.tail: torch.Tensor | None = None  # [alive, hidden]: the states that predict each row's next token
        self.written = self.done = 0

    def run(self) -> bool:
        self._read_shared()
        while self.waiting or any(not row.ended for row in self.alive):
            if self._room_to_refill():
                self._refill()
            self._choose()
            self.report(WRITES, self.done, self.written)
            if self._late():
                return not self.waiting and all(row.ended for row in self.alive)
            if any(not row.ended for row in self.alive):
                self._leave()
                self._step()
        return True

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    # -- rows in and out ----------------------------------------------------------------------------------------------------

    def _live(self) -> list[int]:
        return [slot for slot, row in enumerate(self.alive) if not row.ended]

    def _columns(self, live: Sequence[int]) -> int:
        return self.shared + max((self.spans[slot] for slot in live), default=0)

    def _fitting(self, live: Sequence[int]) -> int:
        """How many of those that wait fit beside `live`: the longest row and a whole answer for each must find room."""
        limits, room = self.writer.writing.limits, self.writer.most_tokens
        least = self._columns(live)
        count = 0
        for number, row in enumerate(self.waiting, start=1):  # ascending: the last one is the longest
            columns = max(least, len(row.prompt.token_ids)) + self.writer.writing.max_new_tokens
            rows = len(live) + number
            if rows > limits.rows or (rows * columns > room and rows > 1):
                break
            count = number
        return count

    def _room_to_refill(self) -> bool:
        """Whether so many rows can come in that copying the cache pays."""
        live = self._live()
        count = self._fitting(live)
        return count > 0 and (not live or count >= min(len(self.waiting), max(1.0, IDLE_SHARE * len(live))))

    def _refill(self) -> None:
        """Run the next prompts through the target and put them beside the answers under way."""
        import torch

        live = self._live()
        caches: list[GrowingCache] = []
        tails: list[torch.Tensor] = []
        read = 0
        for group in self._groups(self.waiting[: self._fitting(live)]):
            if self._late() and (live or caches or self.written):
                break
            found = self._prefill(group)
            if found is None:
                break
            caches.append(found[0])
            tails.append(found[1])
            read += len(group)
        added, self.waiting = self.waiting[:read], self.waiting[read:]
        if not added:
            return
        if live and self.tail is not None:
            tails.insert(0, self.tail[live])
        self.alive = [*(self.alive[slot] for slot in live), *added]
        self.spans = [*(self.spans[slot] for slot in live), *(len(row.prompt.token_ids) - self.shared for row in added)]
        columns = self._columns(range(len(self.alive)))
        self.kv.exchange(live, caches, self.shared, columns, columns + self.writer.writing.max_new_tokens)
        self.tail = torch.cat(tails)

    def _leave(self) -> None:
        """Rows that ended leave as soon as a quarter of the batch is idle (with prompts waiting, `_refill` takes them out)."""
        import torch

        live = self._live()
        if len(live) > (1 - IDLE_SHARE) * len(self.alive) or self.tail is None:
            return
        self.kv.select(torch.tensor(live, device=self.tail.device))
        self.alive, self.spans = [self.alive[slot] for slot in live], [self.spans[slot] for slot in live]
        self.tail = self.tail[live]

    # -- passes of the target ---------------------------------------------------------------------------------------------------

    def _groups(self, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
        """Rows that go through the target in one pass: their tokens, padding included, stay within one pass's."""
        start = 0
        while start < len(rows):
            stop = start + 1
            while stop < len(rows):
                width = len(rows[stop].prompt.token_ids) - self.shared  # ascending: the longest so far
                if (stop + 1 - start) * width > self.writer.pass_tokens:
                    break
                stop += 1
            yield rows[start:stop]
            start = stop

    def _read_shared(self) -> None:
        """Run the beginning that all prompts share, once."""
        tokens = self.waiting[0].prompt.token_ids[: self.shared]
        for start in range(0, self.shared, self.writer.pass_tokens):
            self._pass(self._ids([tokens[start : start + self.writer.pass_tokens]]), None, None, self.prefix)
            self.report(READS, self.done, self.written)

    def _prefill(self, group: Sequence[Row]) -> tuple[GrowingCache, torch.Tensor] | None:
        """The group's keys and values in a cache of their own, and the last states [group, hidden]; None when time ran out.

        A prompt longer than one pass goes through in several.
        """
        import torch

        rest = [row.prompt.token_ids[self.shared :] for row in group]
        width = max(map(len, rest))
        kv = self.prefix.repeated(len(group), self.shared + width)
        ids = self._ids([(*[0] * (width - len(r)), *r) for r in rest])  # [group, width]
        spans = torch.tensor([len(r) for r in rest], device=ids.device)  # [group]
        columns = torch.arange(width, device=ids.device)
        seen = columns >= (width - spans)[:, None]  # [group, width]
        positions = (columns - (width - spans)[:, None]).clamp_min(0) + self.shared  # [group, width]
        mask = torch.cat([seen.new_ones(len(group), self.shared), seen], dim=1).long()  # [group, shared + width]
        states = None
        for start in range(0, width, self.writer.pass_tokens):
            if start and self._late() and (self.written or self.alive):
                return None
            stop = min(start + self.writer.pass_tokens, width)
            states = self._pass(ids[:, start:stop], mask[:, : self.shared + stop], positions[:, start:stop], kv)
            self.report(READS, self.done, self.written)
        assert states is not None
        return kv, states

    def _step(self) -> None:
        """One more token for every row."""
        import torch

        device = self.writer.head.device
        chosen = self._ids([[row.ids[-1]] for row in self.alive])  # [alive, 1]
        spans = torch.tensor(self.spans, device=device)  # [alive], without the new token
        columns = torch.arange(self.kv.columns + 1, device=device)
        mask = (columns < self.shared) | (columns >= self.kv.columns - spans[:, None])  # [alive, columns + 1]
        self.tail = self._pass(chosen, mask.long(), (self.shared + spans)[:, None], self.kv)
        self.spans = [span + 1 for span in self.spans]

    def _pass(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None, kv: GrowingCache
    ) -> torch.Tensor:
        """The final states [rows, hidden] at the last of `ids` [rows, tokens]; `mask` [rows, stored + tokens]."""
        output = self.writer.target.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=kv.cache, use_cache=True
        )
        states: torch.Tensor = output.last_hidden_state[:, -1].clone()
        return states

    def _ids(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        import torch

        return torch.tensor(rows, device=self.writer.head.device)

    def _choose(self) -> None:
        """Write the next token of every row that has not ended."""
        import torch
        import torch.nn.functional as functional

        writing, tail = self.writer.writing, self.tail
        assert tail is not None
        logits = functional.linear(tail, self.writer.head)  # [alive, vocab]
        greedy = logits.argmax(-1)
        chosen = greedy
        if writing.temperature > 0:
            noise = torch.stack([row.noise[min(len(row.ids), writing.max_new_tokens - 1)] for row in self.alive])  # type: ignore[index]
            chosen = draw(warped_probs(logits, writing.temperature, writing.top_p), noise.to(logits.device))
        for slot, (row, token, best) in enumerate(zip(self.alive, chosen.tolist(), greedy.tolist(), strict=True)):
            if row.ended:
                continue
            row.ids.append(token)
            row.greedy.append(best)
            row.hidden.append(tail[slot])
            row.ended = token in self.writer.ends or len(row.ids) >= writing.max_new_tokens
            self.written += 1
            self.done += row.ended


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """Length of the beginning that all rows share, at most one less than the shortest row (its last token must be run)."""
    shared = 0
    for tokens in zip(*(row[:-1] for row in rows), strict=False):
        if len(set(tokens)) > 1:
            break
        shared += 1
    return shared
