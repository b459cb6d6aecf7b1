"""A latency that needs no profile: a roofline with a constant per layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import kv_cache_bytes, weight_bytes_per_pass
from archsearch.estimate import Estimate
from archsearch.latency.draft_passes import LatencyOfRounds
from archsearch.search.objective import Scorer
from archsearch.search.space import Limits, SearchSpace
from archsearch.workload import Workload
from benchmarks.search_speed import flops_per_token


@dataclass
class RooflineLatency(LatencyOfRounds):
    bytes_per_s: float = 12e9
    flops_per_s: float = 2e11
    layer_s: float = 0.3e-3
    overhead: float = 0.0
    relative_std: float = 0.1
    target_calls: list[str] = field(default_factory=list)
    known: dict[tuple[Architecture, Workload, int], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def _pass(self, arch: Architecture, workload: Workload, tokens: int) -> float:
        key = (arch, workload, tokens)  # a draft's step is asked for with every gamma
        if key not in self.known:
            self.known[key] = self._seconds(*key)
        return self.known[key]

    def _seconds(self, arch: Architecture, workload: Workload, tokens: int) -> float:
        size = weight_bytes_per_pass(arch, workload.dtype_bytes)
        size += kv_cache_bytes(
            arch, workload.context_len, workload.dtype_bytes, workload.batch_size
        )
        work = flops_per_token(arch, workload.context_len) * tokens * workload.batch_size
        return (
            max(size / self.bytes_per_s, work / self.flops_per_s)
            + arch.num_hidden_layers * self.layer_s
        )

    def _estimate(self, value: float) -> Estimate:
        return Estimate(value, self.relative_std * value, "roofline")

    def decode_s(self, target, workload):
        self.target_calls.append("decode")
        return self._estimate(self._pass(target, workload, 1))

    def verify_s(self, target, workload, gamma):
        self.target_calls.append(f"verify {gamma}")
        return self._estimate(self._pass(target, workload, gamma + 1))

    def draft_s(self, draft, workload, gamma):
        return self._estimate(gamma * self._pass(draft, workload, 1))

    def added_s(self, target, workload, gamma):
        return Estimate(self.overhead, 0.1 * self.overhead, "given")


@pytest.fixture
def smollm2():
    return Architecture(576, 1536, 30, 9, 3, 64, 49152, tie_word_embeddings=True)


@pytest.fixture
def roofline():
    return RooflineLatency


@pytest.fixture
def make_scorer(smollm2):
    """A Scorer of SmolLM2 with the prior; keywords go to the latency, `limits` to the scorer."""

    def make(limits: Limits | None = None, workload: Workload | None = None, **latency) -> Scorer:
        known = RooflineLatency(**latency)
        scorer = Scorer(smollm2, workload or Workload(), known, PriorAcceptance())
        return scorer.with_limits(limits or Limits())

    return make


@pytest.fixture
def small_space():
    """Quick to enumerate, with every kind of dimension and some invalid combinations."""
    return SearchSpace.from_dict(
        {
            "dimensions": {
                "num_hidden_layers": {"min": 1, "max": 4},
                "hidden_size": [256, 384, 576, 768],
                "ffn_ratio": [1, "target"],
                "num_key_value_heads": [1, 3],
                "kv_group_size": [1, 3, 4],
                "window_pattern": ["L", "S"],
                "sliding_window": [128],
                "draft_vocab_size": [4096, 8192, "target"],
            },
            "constraints": {"attention_width": [0.25, 1.5]},
        },
        "small",
    )
