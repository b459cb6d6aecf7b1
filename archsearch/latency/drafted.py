"""A round of any drafter: its plan (`drafters.drafter.RoundPlan`) priced pass by pass and put
together as the engine runs it.

On a GPU the engine's class for that kind of drafter decides (engine_rounds.yaml). On a CPU the law
of an engine that was measured with such drafters says what a round takes beside the target's pass
(`added`); else the parts add up, with what was measured of rounds of as many draft passes. Drafters
that are models: `LatencyOfRounds.round`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import sizes
from archsearch.drafters.drafter import Drafter, RoundPlan, RoundRows
from archsearch.engine_rounds import RoundCosts
from archsearch.estimate import Array, Estimate, Many
from archsearch.latency.rounds import (
    Passes,
    RoundTime,
    in_a_row,
    in_one,
    mean_rounds,
    round_time,
    summed,
)
from archsearch.workload import Workload

if TYPE_CHECKING:
    from archsearch.latency.draft_passes import DraftPasses

HOST_STD: Final = 1.0  # relative std of what a drafter takes on the host: assumed, not measured
NOTHING_S: Final = Estimate(0.0, 0.0, "modelled")


def rows_of(latency: DraftPasses, workload: Workload, gamma: int) -> RoundRows:
    """The rows of a round in the latency's engine."""
    facts, fused = latency.facts, latency.mode == "graph"
    how = (facts.ranks_of_draft(workload), fused, facts.scattered_head)
    return RoundRows(workload.batch_size, workload.context_len, gamma, *how)


@dataclass(frozen=True)
class DrafterRounds:
    """Rounds of a drafter that is no model."""

    latency: DraftPasses
    target: Architecture
    drafter: Drafter
    workload: Workload

    def round(self, gamma: int, verify_s: Estimate | None = None) -> RoundTime:
        """One round of `gamma` tokens, as `LatencyOfRounds.round`.

        Of a drafter that finds nothing to propose in some rounds (`drafts_share`) it is the mean
        round: one without a proposal is a plain step of the target.
        """
        latency, rows = self.latency, rows_of(self.latency, self.workload, gamma)
        plan = self.drafter.plan(rows)
        if plan.verified is not None:
            verify_s = latency.verify_s(self.target, self.workload, plan.verified - 1)
        verify = verify_s or latency.verify_s(self.target, self.workload, gamma)
        always = self.drafter.drafts_share >= 1.0
        return (self._drafting if always else self._mean_round)(rows, plan, verify)

    def means_s(self, verify_s: Mapping[int, Estimate]) -> Array | None:
        """`LatencyOfRounds.means_s`."""
        kernels, costs, drafter = self._drafts.kernels, self._costs, self.drafter
        if kernels is None or costs is None:
            return None
        if drafter.drafts_share < 1.0 or drafter.architecture.num_experts:
            return None
        rows = rows_of(self.latency, self.workload, sizes(list(verify_s)))
        plan = drafter.plan(rows)
        if plan.first is None or plan.verified is not None:
            return None
        first = Many(kernels.mean_s(replace(plan.first, layers=sizes(plan.first.layers))))
        times = (in_one(verify_s.values()), first, self._later_s(plan))
        return mean_rounds(costs, self._passes(plan, times, rows.gamma + 1))

    @property
    def _costs(self) -> RoundCosts | None:
        """Of a round; None where the engine's host is not modelled."""
        rounds = self.latency.rounds
        return None if rounds is None else rounds.running(self.drafter.rounds).costs

    @property
    def _drafts(self) -> DraftPasses:
        return self.latency.beside(self.drafter).drafts

    def _later_s(self, plan: RoundPlan) -> Estimate:
        return NOTHING_S if plan.step is None else self._drafts.ops_s(plan.step, cold=False)

    def _passes(self, plan: RoundPlan, times: tuple[Any, Any, Any], verified: Any) -> Passes:
        """The passes of a plan; `times`: of the target's, which reads `verified` tokens of a
        sequence, the first and each later one."""
        drafter, first, layers = self.drafter, plan.first, self.target.num_hidden_layers
        scatters = self.latency.facts.scattered_head and drafter.has_layers
        reduces, launched = (first.all_reduces(), plan.launched) if first is not None else (0, 1)
        counts = (launched, self.workload.batch_size, plan.layers, layers, reduces)
        scattered = scatters and drafter.architecture.trimmed
        return Passes(*times, *counts, scattered=scattered, verified=verified)

    def _drafting(
        self, rows: RoundRows, plan: RoundPlan, verify: Estimate, share: float = 1.0
    ) -> RoundTime:
        """A round in which `share` of the sequences have a draft to verify; `verify`: the target's
        pass."""
        latency, costs = self.latency, self._costs
        measured = latency.drafted_s(self.drafter, rows, plan) if costs is None else None
        if measured is not None:
            return summed(measured[0], verify, measured[1])
        first = Estimate(plan.host_s, HOST_STD * plan.host_s, "modelled")
        if plan.first is not None:
            first = self._drafts.ops_s(plan.first)
        later = self._later_s(plan)
        if costs is not None:
            costs = costs if plan.verified is None else costs.of_trees()
            verified = plan.verified or 1.0 + share * rows.gamma
            return round_time(costs, self._passes(plan, (verify, first, later), verified))
        launched, draft = max(1, plan.launched), in_a_row(first, later, plan.steps)
        value = draft.value + launched * plan.layers * latency.added_layer_s(self.target)
        added = latency.added_s(self.target, self.workload, launched)
        return summed(replace(draft, value=value), verify, added)

    def _mean_round(self, rows: RoundRows, plan: RoundPlan, verify: Estimate) -> RoundTime:
        """The mean over rounds of which `drafts_share` draft, for each sequence by itself.

        An engine that fills drafts up verifies all of them in every round. Else, where at least one
        of the batch drafts, a round whose verification reads gamma + 1 rows of those that draft and
        one of the others, linear in between; where none does, a plain step. What looks for a draft
        does so in every round. A pass that a graph does not fit waits for the host.
        """
        costs, workload = self._costs, self.workload
        if costs is not None and costs.padded:
            return self._drafting(rows, plan, verify)
        share = self.drafter.drafts_share
        # chances that at least one, and that all of the batch draft
        some, every = 1.0 - (1.0 - share) ** workload.batch_size, share**workload.batch_size
        of_them = share / some if some > 0.0 else 0.0  # that draft, where one does
        alone = self.latency.verify_s(self.target, workload, 0)
        plain = self.latency.decode_s(self.target, workload)
        read_std = (1.0 - of_them) * alone.std + of_them * verify.std
        read = Estimate(
            alone.value + of_them * (verify.value - alone.value), read_std, verify.source
        )
        time = self._drafting(rows, plan, read, of_them)
        rest = plain.value - alone.value  # of a plain step, beside its pass
        # over all rounds: those in which some draft, and plain steps
        passes = Estimate(
            some * read.value + (1.0 - some) * alone.value,
            some * read.std + (1.0 - some) * alone.std,
            read.source,
        )
        added, added_std = some * time.overhead_s.value + (1.0 - some) * rest, time.overhead_s.std
        if costs is not None:
            host, layers = costs.ragged_layer_s, self.target.num_hidden_layers
            # a pass in which only some draft, or none, fits no graph of the target
            ragged = ((some - every, read.value), (1.0 - some, alone.value))
            waits = math.fsum(
                chance * max(0.0, layers * host.value - of_pass) for chance, of_pass in ragged
            )
            added += waits + (1.0 - some) * costs.waits_s.value
            waits_std = layers * host.std * (1.0 - every) if waits > 0.0 else 0.0
            added_std = math.hypot(added_std, waits_std, (1.0 - some) * costs.waits_s.std)
        overhead = Estimate(added, added_std, time.overhead_s.source)
        whole = summed(time.draft_s, passes, overhead)
        return replace(whole, host_s=time.host_s, bound=time.bound)
