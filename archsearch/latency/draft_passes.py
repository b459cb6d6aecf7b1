"""Steps of the target and passes of a draft, for a latency that prices passes of whole models."""

from __future__ import annotations

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import Part
from archsearch.engine_facts import EngineFacts
from archsearch.estimate import Estimate
from archsearch.latency.grid_ops import Pass
from archsearch.latency.rounds import LatencyOfRounds, plain_step, verified_rows
from archsearch.workload import Workload


class DraftPasses(LatencyOfRounds):
    """What `LatencyOfRounds` asks, from `forward_s` and `facts` of the class that takes this in."""

    facts: EngineFacts
    draft_logits: int | None = None
    """Tokens per sequence whose logits a draft's pass computes; None: all."""

    def forward_s(
        self,
        arch: Architecture,
        *,
        batch: int = 1,
        tokens: int = 1,
        context: int = 256,
        ranks: int = 1,
        cold: bool = False,
        logits: int | None = None,
    ) -> Estimate:
        """Seconds of one forward pass."""
        raise NotImplementedError

    def model_pass_s(
        self, arch: Architecture, asked: Pass, ranks: int, *, is_target: bool = False
    ) -> Estimate:
        """Seconds of one pass of a draft, or of the target (in a loop, but as the engine was
        measured)."""
        part, cold = asked
        return self.forward_s(
            arch,
            batch=part.batch,
            tokens=part.tokens,
            context=part.context,
            ranks=ranks,
            cold=cold,
            logits=part.logits,
        )

    def decode_s(self, target: Architecture, workload: Workload) -> Estimate:
        """One plain decode step of the target."""
        step = self.verify_s(target, workload, 0)
        if self.rounds is None:
            return step
        return plain_step(self.rounds, step, target.num_hidden_layers, workload.batch_size)

    def verify_s(self, target: Architecture, workload: Workload, gamma: int) -> Estimate:
        """One target pass over gamma + 1 tokens per sequence."""
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
        first_s = self.model_pass_s(draft, first, ranks)
        alone = self.facts.draft_passes(gamma) == 1
        return first_s, first_s if alone else self.model_pass_s(draft, later, ranks)

    def draft_s(self, draft: Architecture, workload: Workload, gamma: int) -> Estimate:
        """The draft's time for gamma tokens, and what the engine adds to each of its layers (what
        it adds to a token whatever the draft is in `added_s`)."""
        first, later = self.draft_passes(draft, workload, gamma)
        more = self.facts.draft_passes(gamma) - 1
        value = first.value + more * later.value
        value += gamma * draft.num_hidden_layers * self.added_layer_s(draft)
        return Estimate(value, first.std + more * later.std, first.source)

    def idle_draft_s(self, draft: Architecture, workload: Workload) -> Estimate:
        """What a draft costs in a round that drafts nothing, per round: vLLM keeps its cache in
        step with a pass without the head (of two tokens per sequence), other engines leave it
        alone."""
        if not self.facts.idle_pass:
            return Estimate(0.0, 0.0, "modelled")
        headless = draft.replace(draft_vocab_size=1)
        ranks = self.facts.ranks_of_draft(workload)
        return self.model_pass_s(headless, self.idle_pass(workload), ranks)

    def idle_pass(self, workload: Workload) -> Pass:
        """The pass that a draft without its head runs in a step that drafts nothing."""
        return Part(workload.batch_size, 2, workload.context_len), True
