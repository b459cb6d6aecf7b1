"""A vLLM server's own counts: what its Prometheus metrics say, and how they are dealt to
answers."""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Counters:
    """What /metrics has counted since the server started, all its engines together.

    `speculative`: it runs with a draft. `accepted` [gamma]: accepted draft tokens by position;
    `generated`: tokens written; `in_flight`: requests that run or wait.
    """

    speculative: bool
    drafts: int
    drafted: int
    accepted: tuple[int, ...]
    generated: int
    in_flight: int

    def since(self, before: Counters) -> Counters:
        """What was counted between `before` and now; `in_flight` is now's."""
        return replace(
            self,
            drafts=self.drafts - before.drafts,
            drafted=self.drafted - before.drafted,
            accepted=tuple(a - b for a, b in zip(self.accepted, before.accepted, strict=True)),
            generated=self.generated - before.generated,
        )


def parse_metrics(text: str) -> Counters | None:
    """Counters out of Prometheus text; None where it has none of vLLM's (a server started with
    --disable-log-stats)."""
    sums: dict[str, float] = {}
    accepted: dict[int, float] = {}
    for name, labels, value in re.findall(r"^vllm:(\w+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE):
        position = re.search(r'position="(\d+)"', labels)
        if name == "spec_decode_num_accepted_tokens_per_pos_total" and position:
            accepted[int(position[1])] = accepted.get(int(position[1]), 0.0) + float(value)
        else:
            sums[name] = sums.get(name, 0.0) + float(value)
    if "generation_tokens_total" not in sums:
        return None
    return Counters(
        speculative="spec_decode_num_drafts_total" in sums,
        drafts=round(sums.get("spec_decode_num_drafts_total", 0.0)),
        drafted=round(sums.get("spec_decode_num_draft_tokens_total", 0.0)),
        accepted=tuple(round(accepted[position]) for position in sorted(accepted)),
        generated=round(sums["generation_tokens_total"]),
        in_flight=round(
            sums.get("num_requests_running", 0.0) + sums.get("num_requests_waiting", 0.0)
        ),
    )


def deal(lengths: Sequence[int], weights: Sequence[int]) -> list[list[int]]:
    """Round lengths [n] dealt to results in proportion to `weights`: each gets its share of every
    length, within one round.

    All of them are dealt, so sums over the results are the sums of `lengths`.
    """
    hands: list[list[int]] = [[] for _ in weights]
    heap = [(0.5 / max(weight, 1e-9), index) for index, weight in enumerate(weights)]
    heapq.heapify(heap)
    for length in sorted(lengths, reverse=True):
        due, index = heap[0]
        hands[index].append(length)
        heapq.heapreplace(heap, (due + 1.0 / max(weights[index], 1e-9), index))
    return hands
