"""A round of any drafter: its plan (`drafters.drafter.RoundPlan`) priced pass by pass and put
together as the engine runs it.

On a GPU the engine's class for that kind of drafter decides (engine_rounds.yaml). On a CPU, where
the engine was measured with such drafters, its law says what a round takes beside the target's pass
(`added`); else the parts add up, with what the engine was measured to add to a round of as
many draft passes. Drafters that are models: `LatencyOfRounds.round`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from archsearch.architecture.architecture import Architecture
from archsearch.drafters.drafter import Drafter, RoundKind, RoundPlan, RoundRows
from archsearch.engine_rounds import EngineRounds, engine_rounds
from archsearch.estimate import Estimate, weakest_source
from archsearch.latency.rounds import Passes, RoundTime, round_time, summed
from archsearch.workload import Workload

if TYPE_CHECKING:
    from archsearch.latency.draft_passes import DraftPasses

HOST_STD: Final = 1.0  # relative std of what a drafter takes on the host: assumed, not measured
_NOTHING: Final = Estimate(0.0, 0.0, "modelled")


def drafter_round(
    latency: DraftPasses,
    target: Architecture,
    drafter: Drafter,
    workload: Workload,
    gamma: int,
    verify_s: Estimate | None,
) -> RoundTime:
    """One round of `gamma` tokens of a drafter, as `LatencyOfRounds.round`.

    Of a drafter that finds nothing to propose in some rounds (`drafts_share`) it is the mean round:
    one without a proposal is a plain step of the target.
    """
    rows = rows_of(latency, workload, gamma)
    plan = drafter.plan(rows)
    if plan.verified is not None:
        verify_s = latency.verify_s(target, workload, plan.verified - 1)
    verify = verify_s or latency.verify_s(target, workload, gamma)
    measured = latency.drafted_s(drafter, rows, plan) if latency.rounds is None else None

    def drafting(read: Estimate) -> RoundTime:
        """A round in which every sequence has something to verify; `read`: the target's pass."""
        if measured is not None:
            return summed(measured[0], read, measured[1])
        return _drafting(
            latency, target, drafter, workload, _priced(latency, drafter, rows, plan), read
        )

    return (
        drafting(verify)
        if drafter.drafts_share >= 1.0
        else _mean_round(latency, target, drafter, workload, drafting, verify)
    )


def rows_of(latency: DraftPasses, workload: Workload, gamma: int) -> RoundRows:
    """The rows of a round in the latency's engine."""
    facts = latency.facts
    return RoundRows(
        workload.batch_size,
        workload.context_len,
        gamma,
        facts.ranks_of_draft(workload),
        fused=latency.mode == "graph",
        scattered=facts.scattered_head,
    )


def drafter_idle_s(latency: DraftPasses, drafter: Drafter, workload: Workload) -> Estimate:
    """What a loaded drafter costs a step in which the schedule drafts nothing."""
    idle = drafter.idle(rows_of(latency, workload, 1)) if latency.facts.idle_pass else None
    return latency.ops_s(idle) if idle is not None else _NOTHING


def _priced(
    latency: DraftPasses, drafter: Drafter, rows: RoundRows, plan: RoundPlan
) -> tuple[RoundPlan, Estimate, Estimate]:
    """The plan with the seconds of its first pass and of each later step; a step is the same at
    every gamma, so it is kept."""
    first = (
        latency.ops_s(plan.first)
        if plan.first is not None
        else Estimate(plan.host_s, HOST_STD * plan.host_s, "modelled")
    )
    if plan.step is None:
        return plan, first, Estimate(0.0, 0.0, first.source)
    kept: dict[tuple[Drafter, RoundRows], Estimate] = latency.__dict__.setdefault(
        "_later_steps", {}
    )
    key = (drafter, replace(rows, gamma=1))
    if key not in kept:
        if len(kept) > 100_000:
            kept.clear()
        kept[key] = latency.ops_s(plan.step, cold=False)
    return plan, first, kept[key]


def _drafting(
    latency: DraftPasses,
    target: Architecture,
    drafter: Drafter,
    workload: Workload,
    priced: tuple[RoundPlan, Estimate, Estimate],
    verify: Estimate,
) -> RoundTime:
    """A round in which every sequence has something to verify."""
    plan, first, later = priced
    launched = max(1, plan.launched)
    if latency.rounds is not None:
        rounds = running(latency.rounds, drafter.rounds)
        reduces = plan.first.all_reduces() if plan.first is not None else 0
        layers = target.num_hidden_layers
        scattered = (
            latency.facts.scattered_head and drafter.has_layers and drafter.architecture.trimmed
        )
        sizes = (launched, workload.batch_size, plan.layers, layers, reduces)
        costs = rounds.costs if plan.verified is None else rounds.costs.of_trees()
        return round_time(costs, Passes(verify, first, later, *sizes, scattered=scattered))
    value, std = first.value + plan.steps * later.value, first.std + plan.steps * later.std
    value += launched * plan.layers * latency.added_layer_s(target)
    return summed(
        Estimate(value, std, first.source), verify, latency.added_s(target, workload, launched)
    )


def _mean_round(
    latency: DraftPasses,
    target: Architecture,
    drafter: Drafter,
    workload: Workload,
    drafting: Callable[[Estimate], RoundTime],
    verify: Estimate,
) -> RoundTime:
    """The mean over rounds of which `drafts_share` draft, for each sequence by itself.

    An engine that fills drafts up verifies all of them in every round. Else, where at least one of
    the batch drafts, a round whose verification reads gamma + 1 rows of those that draft and one of
    the others, linear in between; where none does, a plain step. What looks for a draft does so in
    every round. A pass that a graph does not fit waits for the host.
    """
    costs = running(latency.rounds, drafter.rounds).costs if latency.rounds is not None else None
    if costs is not None and costs.padded:
        return drafting(verify)
    share = drafter.drafts_share
    # chances that at least one, and that all of the batch draft
    some, every = 1.0 - (1.0 - share) ** workload.batch_size, share**workload.batch_size
    of_them = share / some if some > 0.0 else 0.0  # that draft, where one does
    alone, plain = latency.verify_s(target, workload, 0), latency.decode_s(target, workload)
    read_std = (1.0 - of_them) * alone.std + of_them * verify.std
    read = Estimate(alone.value + of_them * (verify.value - alone.value), read_std, verify.source)
    time = drafting(read)
    rest = plain.value - alone.value  # of a plain step, beside its pass
    # over all rounds: those in which some draft, and plain steps
    passes = Estimate(
        some * read.value + (1.0 - some) * alone.value,
        some * read.std + (1.0 - some) * alone.std,
        read.source,
    )
    added, added_std = some * time.overhead_s.value + (1.0 - some) * rest, time.overhead_s.std
    if costs is not None:
        host, layers = costs.ragged_layer_s, target.num_hidden_layers
        # a pass in which only some draft fits no graph of the target, nor does one in which none do
        ragged = ((some - every, read.value), (1.0 - some, alone.value))
        waits = math.fsum(
            chance * max(0.0, layers * host.value - of_pass) for chance, of_pass in ragged
        )
        added += waits + (1.0 - some) * costs.waits_s.value
        waits_std = layers * host.std * (1.0 - every) if waits > 0.0 else 0.0
        added_std = math.hypot(added_std, waits_std, (1.0 - some) * costs.waits_s.std)
    overhead = Estimate(added, added_std, time.overhead_s.source)
    parts = (time.draft_s, passes, overhead)
    source = weakest_source(passes.source, time.draft_s.source)
    total = Estimate(
        math.fsum(part.value for part in parts), math.hypot(*(part.std for part in parts)), source
    )
    return RoundTime(time.draft_s, passes, overhead, total, time.host_s, time.bound)


def running(rounds: EngineRounds, kind: RoundKind) -> EngineRounds:
    """How the engine of `rounds` runs another kind of drafter; the measured fit of the same kind is
    kept."""
    if rounds.drafter == kind:
        return rounds
    return _known(rounds.engine, rounds.version, tuple(sorted(rounds.options.items())), kind)


@lru_cache(maxsize=256)
def _known(
    engine: str, version: str, options: tuple[tuple[str, str], ...], kind: RoundKind
) -> EngineRounds:
    found = engine_rounds(engine, version, dict(options), kind)
    assert found is not None  # `rounds` came from the same table
    return found
