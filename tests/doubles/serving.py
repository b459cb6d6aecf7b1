"""A latency by formula, for what is served: a target's pass grows with the rows it reads, a draft's
is a share of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from archsearch.architecture.architecture import Architecture
from archsearch.drafters.drafter import Draft
from archsearch.engine_facts import EngineFacts, engine_facts
from archsearch.estimate import Estimate
from archsearch.latency.draft_passes import LatencyOfRounds
from archsearch.latency.rounds import RoundTime, summed
from archsearch.workload import Workload

TARGET = Architecture(512, 1536, 8, 8, 8, 64, 1000, max_position_embeddings=8192)
DRAFT = TARGET.replace(num_hidden_layers=1)


@dataclass
class FormulaLatency(LatencyOfRounds):
    """A pass of `rows` rows takes `base` + rows x `row` and reads `kv` a token of each sequence's
    cache; a draft pass `share` of a one-row pass of the same batch; `off`: what a step costs that
    drafts nothing."""

    base: float = 10e-3
    row: float = 1e-4
    kv: float = 1e-7
    share: float = 0.1
    off: float = 0.0
    std: float = 0.02
    engine: str | None = None
    rounds: Any = None
    target_correlation: float = 0.9
    largest_batch: int | None = None
    engine_version: str | None = None

    @property
    def facts(self) -> EngineFacts:
        return engine_facts(self.engine)

    def verify_s(self, target: Architecture, workload: Workload, gamma: int) -> Estimate:
        rows = workload.batch_size * (gamma + 1)
        value = math.fsum(
            (self.base, rows * self.row, workload.batch_size * workload.context_len * self.kv)
        )
        return Estimate(value, self.std * value, "modelled")

    def decode_s(self, target: Architecture, workload: Workload) -> Estimate:
        return self.verify_s(target, workload, 0)

    def round(
        self,
        target: Architecture,
        draft: Draft,
        workload: Workload,
        gamma: int,
        verify_s: Estimate | None = None,
    ) -> RoundTime:
        value = gamma * self.share * self.decode_s(target, workload).value
        drafting = Estimate(value, self.std * value, "modelled")
        return summed(
            drafting,
            verify_s or self.verify_s(target, workload, gamma),
            Estimate(0.0, 0.0, "modelled"),
        )

    def idle_s(self, target: Architecture, draft: Draft, workload: Workload) -> Estimate:
        return Estimate(self.off, 0.0, "modelled")

    def free_layers(
        self, target: Architecture, draft: Draft, workload: Workload, gamma: int
    ) -> float | None:
        return None

    def with_rounds(self, rounds: Any) -> FormulaLatency:
        return self
