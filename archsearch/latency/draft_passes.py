"""Steps of the target and passes of a draft, for a latency that prices passes of whole models."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import Pass, ShapeGrid, sizes
from archsearch.architecture.ops import Part, PassOps
from archsearch.drafters.drafter import Draft, Drafter, RoundPlan, RoundRows
from archsearch.engine_facts import EngineFacts
from archsearch.engine_rounds import EngineRounds
from archsearch.estimate import Array, Estimate, Many, Numbers
from archsearch.latency.drafted import NOTHING_S, DrafterRounds, rows_of
from archsearch.latency.rounds import (
    Passes,
    RoundTime,
    extra_s,
    free_layers,
    in_a_row,
    in_one,
    mean_rounds,
    plain_step,
    round_time,
    summed,
    verified_rows,
)
from archsearch.workload import Workload

if TYPE_CHECKING:
    from archsearch.latency.composed import ComposedPass


def nothing_drafted(workload: Workload) -> Passes:
    """A round of no draft tokens, as far as what the engine adds is concerned."""
    return Passes(
        NOTHING_S, NOTHING_S, NOTHING_S, 0, workload.batch_size, 0, 0, context=workload.context_len
    )


class LatencyOfRounds:
    """What a score asks of a latency. `round` and `free_layers` are by `rounds` where the engine's
    host is modelled, else the sum of `draft_s`, `verify_s` and `added_s`.

    A class that takes this in has `decode_s`, `verify_s` and `draft_s`; one with `rounds` `facts`
    and `draft_passes` too (`DraftPasses`).
    """

    engine: str | None = None
    rounds: EngineRounds | None = None
    # correlation of the relative errors of `decode_s` and `verify_s`
    target_correlation: float = 0.0
    # what composes a pass of its ops
    kernels: ComposedPass | None = None
    # prices drafts where they are in another precision than the target (`DraftPasses.with_drafts`)
    drafts_: Self | None = None

    @property
    def drafts(self) -> Self:
        """What prices the passes of a draft: itself, where nothing else was said."""
        return self.drafts_ or self

    def beside(self, draft: Draft) -> Self:
        """This latency for a draft: what comes with the target is in the target's precision."""
        if self.drafts_ is None or not isinstance(draft, Drafter) or draft.trains:
            return self
        _ = self.kernels  # the copy has them too
        changed = copy.copy(self)
        changed.drafts_ = None
        return changed

    @property
    def largest_batch(self) -> int | None:
        """The largest batch of which passes were measured; None where that is no limit."""
        return None

    def decode_s(self, target: Architecture, workload: Workload) -> Estimate:
        """One plain decode step of the target: a pass on 1 token per sequence."""
        raise NotImplementedError

    def verify_s(self, target: Architecture, workload: Workload, gamma: int) -> Estimate:
        """One target pass on gamma + 1 tokens per sequence."""
        raise NotImplementedError

    def first_tokens(self: Any, gamma: int) -> Any:
        """Tokens per sequence in the first pass of a draft in a round."""
        known = self.rounds.costs.first_pass_tokens if self.rounds else self.facts.first_tokens
        return known(gamma)

    def added_s(self, target: Architecture, workload: Workload, gamma: int) -> Estimate:
        """What the engine was measured to add to a round; nothing where its host is modelled, or
        nothing is known of it."""
        return NOTHING_S

    def added_layer_s(self, target: Architecture) -> float:
        """Seconds that the engine adds to each layer of a draft pass, where that was measured."""
        return 0.0

    def drafted_s(
        self, drafter: Drafter, rows: RoundRows, plan: RoundPlan
    ) -> tuple[Estimate, Estimate] | None:
        """(a drafter's kernels, all else of a round beside the target's pass), where the engine was
        measured with such ones."""
        return None

    def round(
        self: Any,
        target: Architecture,
        draft: Draft,
        workload: Workload,
        gamma: int,
        verify_s: Estimate | None = None,
    ) -> RoundTime:
        """One round of `gamma` draft tokens. `verify_s`: the target's pass, where it is known
        already."""
        if isinstance(draft, Drafter):
            if draft.model is None:
                return DrafterRounds(self, target, draft, workload).round(gamma, verify_s)
            self, draft = self.beside(draft), draft.model
        verify = verify_s or self.verify_s(target, workload, gamma)
        if self.rounds is not None:
            return round_time(
                self.rounds.costs, self.round_passes(target, draft, workload, gamma, verify)
            )
        return summed(
            self.draft_s(draft, workload, gamma), verify, self.added_s(target, workload, gamma)
        )

    def means_s(
        self: Any,
        target: Architecture,
        draft: Draft,
        workload: Workload,
        verify_s: Mapping[int, Estimate],
    ) -> Array | None:
        """Seconds of the rounds of the gammas of `verify_s`, without std; None where they are asked
        for one by one: passes are not composed of kernels, some rounds draft nothing, or experts
        are touched."""
        if isinstance(draft, Drafter):
            return DrafterRounds(self, target, draft, workload).means_s(verify_s)
        passes, gammas = getattr(self.drafts, "composed_", None), sizes(list(verify_s))
        if passes is None or self.rounds is None or draft.num_experts:
            return None
        served, ranks = self.facts.served_draft(draft), self.facts.ranks_of_draft(workload)
        (first, _), later = self.asked_passes(workload, gammas)
        ops = passes.pass_ops(served, [first], ranks)
        first_s = passes.mean_s(replace(ops, layers=sizes(ops.layers)))
        own = (Many(first_s), self.drafts.model_pass_s(served, later, ranks))
        asked = (target, draft, workload, gammas, in_one(verify_s.values()), own)
        return mean_rounds(self.rounds.costs, self.round_passes(*asked))

    def round_passes(
        self: Any,
        target: Architecture,
        draft: Architecture,
        workload: Workload,
        gamma: int,
        verify_s: Estimate,
        own: tuple[Estimate, Estimate] | None = None,
    ) -> Passes:
        """The GPU's passes of a round of `gamma` draft tokens; `own`: the draft's first and each
        later one, where they are others than it drafts with."""
        first, later = own or self.draft_passes(draft, workload, gamma)
        layers = draft.num_hidden_layers
        # a draft on one rank has nothing to sum, whatever its target does
        sharded = self.facts.ranks_of_draft(workload) > 1
        reduces = 2 * layers + 1 if sharded else 0  # two a layer, one for the embedding
        times, context = (verify_s, first, later), workload.context_len
        sizes = (gamma, workload.batch_size, layers, target.num_hidden_layers, reduces, context)
        return Passes(*times, *sizes, catches_up=self.facts.catches_up)

    def idle_s(self: Any, target: Architecture, draft: Draft, workload: Workload) -> Estimate:
        """What a loaded draft costs a step in which the schedule drafts nothing: its idle pass, and
        on a GPU what launching that takes longer than a plain step. What a round adds for the
        tokens it drafted is not charged (assumed: there are none); what it adds by itself is, where
        the engine's speculative step stays (`EngineFacts.idle_round`)."""
        if self.rounds is not None and self.facts.idle_round:
            costs = self.rounds.costs
            return Estimate(*extra_s(costs, nothing_drafted(workload)), costs.rests_on)
        if isinstance(draft, Drafter):
            if draft.model is None:
                ops = draft.idle(rows_of(self, workload, 1)) if self.facts.idle_pass else None
                return self.beside(draft).drafts.ops_s(ops) if ops is not None else NOTHING_S
            self, draft = self.beside(draft), draft.model
        idle = self.idle_draft_s(draft, workload)
        if self.rounds is None or not idle.value:
            return idle
        verify = self.verify_s(target, workload, 0)
        passes = self.round_passes(target, draft, workload, 1, verify, (idle, idle))
        time = round_time(self.rounds.costs.without_round(), passes)
        longer = time.round_s.value - self.decode_s(target, workload).value
        if longer <= idle.value:
            return idle
        # The target's step is in both and cancels; where the host decides, the overhead's std is
        # the whole round's.
        return Estimate(longer, math.hypot(idle.std, time.overhead_s.std), idle.source)

    def free_layers(
        self: Any, target: Architecture, draft: Draft, workload: Workload, gamma: int
    ) -> float | None:
        """Layers that a draft of this one's kernel times may have before the engine's host decides
        the round; None where no host is modelled, or the drafter is no model."""
        if isinstance(draft, Drafter):
            self, draft = self.beside(draft), draft.model  # type: ignore[assignment]
        if self.rounds is None or draft is None:
            return None
        verify = self.verify_s(target, workload, gamma)
        return free_layers(
            self.rounds.costs, self.round_passes(target, draft, workload, gamma, verify)
        )

    def with_rounds(self, rounds: EngineRounds) -> Self:
        """The same latency with another version of its engine, or other switches."""
        changed = copy.copy(self)
        changed.rounds = rounds
        changed._take_wait()
        changed.drafts_ = self.drafts_ and self.drafts_.with_rounds(rounds)
        return changed

    def _take_wait(self) -> None:
        """Takes over how long ranks wait at an all-reduce under `rounds`, and forgets what was
        priced with another wait."""

    @property
    def engine_version(self) -> str | None:
        """The version whose rounds are priced; None where nothing depends on it."""
        return self.rounds.version if self.rounds is not None else None


class DraftPasses(LatencyOfRounds):
    """What `LatencyOfRounds` asks, from `pass_s` and `facts` of the class that takes this in."""

    facts: EngineFacts
    dtype: str
    mode: str
    draft_logits: int | None = None
    """Tokens per sequence whose logits a draft's pass computes; None: all."""

    def pass_s(self, arch: Architecture, asked: Pass, ranks: int) -> Estimate:
        """Seconds of one forward pass, on a GPU with the choice of the next tokens (on a CPU that
        is part of what an engine adds). Cold: weights come from memory (the first draft token after
        a verification); otherwise the pass runs in a loop."""
        raise NotImplementedError

    def ops_s(self, ops: PassOps, cold: bool = True) -> Estimate:
        """Seconds of one pass given by its ops; `cold` as in `pass_s`."""
        raise NotImplementedError

    def grid_s(self, grid: ShapeGrid, passes: Sequence[Pass], ranks: int) -> list[Numbers]:
        """`pass_s` of each pass of each shape of a grid, without std."""
        raise NotImplementedError

    def with_drafts(self, dtype: str) -> Self:
        """The same latency with drafts of another precision than the target. Raises ArchsearchError
        where nothing prices them, with the precisions that are known."""
        changed = copy.copy(self)
        changed.drafts_ = None if dtype == self.dtype else self._in(dtype)
        return changed

    def _in(self, dtype: str) -> Self:
        """What prices drafts in `dtype` beside a target in this one's."""
        raise NotImplementedError

    def model_pass_s(
        self, arch: Architecture, asked: Pass, ranks: int, *, is_target: bool = False
    ) -> Estimate:
        """Seconds of one pass of a draft, or of the target (in a loop, but as the engine was
        measured)."""
        return self.pass_s(arch, asked, ranks)

    def decode_s(self, target: Architecture, workload: Workload) -> Estimate:
        step = self.verify_s(target, workload, 0)
        if self.rounds is None:
            return step
        return plain_step(self.rounds, step, target.num_hidden_layers, workload.batch_size)

    def verify_s(self, target: Architecture, workload: Workload, gamma: int) -> Estimate:
        batch, tokens = verified_rows(self.rounds, workload.batch_size, gamma)
        part = Part(batch, tokens, workload.context_len)
        return self.model_pass_s(target, (part, False), workload.tensor_parallel, is_target=True)

    def asked_passes(self, workload: Workload, gamma: int) -> tuple[Pass, Pass]:
        """(the first pass of a draft in a round, with its weights out of the cache; each later one,
        in a loop)."""
        first, later = (
            Part(workload.batch_size, tokens, workload.context_len, self.draft_logits)
            for tokens in (self.first_tokens(gamma), 1)
        )
        return (first, True), (later, False)

    def draft_passes(
        self, draft: Architecture, workload: Workload, gamma: int
    ) -> tuple[Estimate, Estimate]:
        """Seconds of `asked_passes`."""
        draft, ranks = self.facts.served_draft(draft), self.facts.ranks_of_draft(workload)
        first, later = self.asked_passes(workload, gamma)
        first_s = self.drafts.model_pass_s(draft, first, ranks)
        # an engine that drafts all tokens in one pass has no later one to price
        alone = self.facts.draft_passes(gamma) == 1
        return first_s, first_s if alone else self.drafts.model_pass_s(draft, later, ranks)

    def draft_s(self, draft: Architecture, workload: Workload, gamma: int) -> Estimate:
        """The draft's time for gamma tokens, and what the engine adds to each of its layers (what
        it adds to a token whatever the draft is in `added_s`)."""
        first, later = self.draft_passes(draft, workload, gamma)
        found = in_a_row(first, later, self.facts.draft_passes(gamma) - 1)
        added = gamma * draft.num_hidden_layers * self.added_layer_s(draft)
        return replace(found, value=found.value + added)

    def idle_draft_s(self, draft: Architecture, workload: Workload) -> Estimate:
        """What a draft costs in a round that drafts nothing, per round: vLLM keeps its cache in
        step with a pass without the head (of two tokens per sequence), other engines leave it
        alone."""
        if not self.facts.idle_pass:
            return NOTHING_S
        # no logits are needed: a head of one row costs next to nothing
        headless = draft.replace(draft_vocab_size=1)
        ranks = self.facts.ranks_of_draft(workload)
        return self.drafts.model_pass_s(headless, self.idle_pass(workload), ranks)

    def idle_pass(self, workload: Workload) -> Pass:
        """The pass that a draft without its head runs in a step that drafts nothing."""
        return Part(workload.batch_size, 2, workload.context_len), True
