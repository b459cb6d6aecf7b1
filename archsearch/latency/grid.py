"""Rounds of many drafts at once: what a latency of `DraftPasses` predicts for each shape of a
`ShapeGrid`. There is no std: ask for it of one shape.

Passes are priced by the same formulas (`grid_s`); how a round is put together from them is here,
over arrays, beside `latency.rounds` (tests/search/test_exact.py holds the two to 1e-9).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import ShapeGrid
from archsearch.engine_rounds import RoundCosts
from archsearch.estimate import Array, Estimate, Many, Numbers
from archsearch.latency.draft_passes import nothing_drafted
from archsearch.latency.drafted import NOTHING_S
from archsearch.latency.rounds import RoundTime, extra_s, mean_rounds
from archsearch.workload import Workload


class GridLatency:
    """Rounds of all drafts of `grid` beside one target, for some gammas."""

    def __init__(
        self,
        latency: Any,
        target: Architecture,
        grid: ShapeGrid,
        workload: Workload,
        gammas: Sequence[int],
    ) -> None:
        self.latency, self.target, self.workload = latency, target, workload
        self.gammas = tuple(gammas)
        self.grid: Any = latency.facts.served_draft(grid)
        self.ranks = latency.facts.ranks_of_draft(workload)
        self._asked = {gamma: latency.asked_passes(workload, gamma) for gamma in self.gammas}
        self._verified = {gamma: latency.verify_s(target, workload, gamma) for gamma in self.gammas}
        self._decode_s = latency.decode_s(target, workload).value

    def rounds(self) -> Iterator[RoundTime]:
        """A round of each gamma; its `draft_s` and `round_s` are `Many`."""
        latency = self.latency
        # gammas share passes (the later one above all): each is priced once
        passes = list(dict.fromkeys(each for both in self._asked.values() for each in both))
        found = latency.drafts.grid_s(self.grid, passes, self.ranks)
        seconds = dict(zip(passes, found, strict=True))
        for gamma in self.gammas:
            first, later = (seconds[each] for each in self._asked[gamma])
            more = latency.facts.draft_passes(gamma) - 1
            draft = first + more * later if more else first
            read = self._verified[gamma]
            if latency.rounds is not None:
                whole = self._launched(latency.rounds.costs, read, gamma, first, later)
            else:
                layers = self.grid.num_hidden_layers
                draft = draft + gamma * layers * latency.added_layer_s(self.grid)
                added = latency.added_s(self.target, self.workload, gamma).value
                whole = draft + read.value + added
            times: Any = Many(np.asarray(draft)), Many(np.asarray(whole))
            yield RoundTime(times[0], read, NOTHING_S, times[1])

    def idle(self) -> Numbers:
        """`LatencyOfRounds.idle_s`: what the drafts cost a step that drafts nothing."""
        latency, facts = self.latency, self.latency.facts
        if latency.rounds is not None and facts.idle_round:
            return extra_s(latency.rounds.costs, nothing_drafted(self.workload))[0]
        if not facts.idle_pass:
            return 0.0
        headless = self.grid.replace(draft_vocab_size=1)
        (idle,) = latency.drafts.grid_s(headless, [latency.idle_pass(self.workload)], self.ranks)
        if latency.rounds is None:
            return idle
        costs = latency.rounds.costs.without_round()
        verify = latency.verify_s(self.target, self.workload, 0)
        longer = self._launched(costs, verify, 1, idle, idle) - self._decode_s
        # no step is quicker than the idle pass on the GPU
        return np.where(longer <= idle, idle, longer)

    def _launched(
        self, costs: RoundCosts, read: Estimate, gamma: int, first: Numbers, later: Numbers
    ) -> Array:
        """`rounds.round_time` of an engine whose host is modelled; `read`: the target's pass."""
        asked = (self.target, self.grid, self.workload, gamma, read, (Many(first), Many(later)))
        return mean_rounds(costs, self.latency.round_passes(*asked))
