"""Rounds of many drafts at once: what a latency of `DraftPasses` predicts for each shape of a
`ShapeGrid`. There is no std: ask for it of one shape.

Passes are priced by the same formulas (`grid_s`); how a round is put together from them is here,
over arrays, beside `latency.rounds` (tests/search/test_exact.py holds the two to 1e-9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import Array, ShapeGrid
from archsearch.engine_rounds import RoundCosts
from archsearch.estimate import Estimate
from archsearch.latency.draft_passes import nothing_drafted
from archsearch.latency.rounds import (
    Passes,
    extra_s,
    host_time,
    larger_of_arrays,
    launch_value,
    waits_s,
)
from archsearch.workload import Workload

NOTHING: Final = Estimate(0.0, 0.0, "given")


@dataclass(frozen=True)
class GridRound:
    """Rounds of `gamma` draft tokens, seconds, [bodies, layers, windows, heads] or what broadcasts
    to it."""

    gamma: int
    draft_s: Array
    round_s: Array


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

    def rounds(self) -> Iterator[GridRound]:
        """Rounds by gamma."""
        latency = self.latency
        # gammas share passes (the later one above all): each is priced once
        passes = list(dict.fromkeys(each for both in self._asked.values() for each in both))
        seconds = dict(zip(passes, latency.grid_s(self.grid, passes, self.ranks), strict=True))
        layers = self.grid.num_hidden_layers
        for gamma in self.gammas:
            first, later = (seconds[each] for each in self._asked[gamma])
            more = latency.facts.draft_passes(gamma) - 1
            draft = first + more * later if more else first
            if latency.rounds is not None:
                whole = self._launched(gamma, first, later, draft, layers)
            else:
                draft = draft + gamma * layers * latency.added_layer_s(self.grid)
                added = latency.added_s(self.target, self.workload, gamma).value
                whole = draft + self._verified[gamma].value + added
            yield GridRound(gamma, np.asarray(draft), np.asarray(whole))

    def idle(self) -> Any:
        """`LatencyOfRounds.idle_s`: what the drafts cost a step that drafts nothing."""
        latency, facts = self.latency, self.latency.facts
        if latency.rounds is not None and facts.idle_round:
            return extra_s(latency.rounds.costs, nothing_drafted(self.workload)).value
        if not facts.idle_pass:
            return 0.0
        headless = self.grid.replace(draft_vocab_size=1)
        (idle,) = latency.grid_s(headless, [latency.idle_pass(self.workload)], self.ranks)
        if latency.rounds is None:
            return idle
        costs = replace(
            latency.rounds.costs, round_s=replace(latency.rounds.costs.round_s, value=0.0)
        )
        verify = latency.verify_s(self.target, self.workload, 0)
        layers = headless.num_hidden_layers
        longer = self._launched(1, idle, idle, idle, layers, (costs, verify)) - self._decode_s
        # no step is quicker than the idle pass on the GPU
        return np.where(longer <= idle, idle, longer)

    def _launched(
        self,
        gamma: int,
        first: Array,
        later: Array,
        draft: Array,
        layers: Any,
        own: tuple[RoundCosts, Estimate] | None = None,
    ) -> Array:
        """`rounds.round_time` of an engine whose host is modelled; `own`: other costs, and
        another verification."""
        costs, read = own or (self.latency.rounds.costs, self._verified[gamma])
        verify = read.value
        batch, context, target_layers = (
            self.workload.batch_size,
            self.workload.context_len,
            self.target.num_hidden_layers,
        )
        costs = costs.launching(batch * (gamma + 1))
        passes = Passes(NOTHING, NOTHING, NOTHING, gamma, batch, 0, target_layers, context=context)
        sharded = int(self.ranks > 1)

        def by_depth(of: Callable[[RoundCosts, Passes], Estimate]) -> Any:
            """Seconds and std of what depends on a draft's depth alone, each like `layers`."""
            found = [
                of(costs, replace(passes, draft_layers=n, draft_all_reduces=sharded * (2 * n + 1)))
                for n in layers.ravel().tolist()
            ]
            return np.array([(each.value, each.std) for each in found]).T.reshape(2, *layers.shape)

        extra, extra_std = by_depth(extra_s)
        if costs.order == "overlapped":
            std = np.hypot(read.std, extra_std)
            return larger_of_arrays(draft + verify + extra, std, *by_depth(host_time))
        launch = launch_value(costs, layers, (2 * layers + 1) * sharded)
        target_host = target_layers * costs.host_target_layer_s.value
        waits = waits_s(launch, target_host, (first, later, verify), gamma - 1)
        return np.asarray(draft + verify + extra + waits)
