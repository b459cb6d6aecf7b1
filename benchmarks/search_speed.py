"""Speed and quality of the search: candidates a second, distinct shapes, CPU seconds, gap to the
exact optimum over seeds.

    python benchmarks/search_speed.py [--target smollm2-135m] [--space demo] [--profile DIR]
    [--trials 300] [--seeds 5]

Without --profile a roofline of a made-up CPU stands in for the latency model, so the numbers are
comparable anywhere.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import (
    body_parameters,
    cached_tokens,
    expert_params,
    kv_cache_bytes,
    parameters,
    weight_bytes_per_pass,
)
from archsearch.estimate import Estimate
from archsearch.latency.draft_passes import LatencyOfRounds
from archsearch.search.exact import rank_alone
from archsearch.search.objective import Scorer, grouped
from archsearch.search.space import load_space
from archsearch.search.study import How, search
from archsearch.workload import Workload


def active_parameters(arch: Architecture) -> int:
    """Parameters that a token meets: all but the experts it is not routed to."""
    idle = arch.moe_layers * expert_params(arch) if arch.num_experts else 0
    idle = idle * (arch.num_experts - arch.num_experts_per_tok) // max(1, arch.num_experts)
    return parameters(arch) - idle


def flops_per_token(arch: Architecture, context_len: int) -> int:
    """FLOPs of a forward pass per new token: 2 per weight plus attention over the context."""
    idle = parameters(arch) - active_parameters(arch)
    weights = body_parameters(arch) - idle + arch.head_rows * arch.hidden_size
    return 2 * weights + 4 * cached_tokens(arch, context_len) * arch.q_size


@dataclass(frozen=True)
class StandInLatency(LatencyOfRounds):
    """max(bytes / bandwidth, flops / peak) plus a constant per layer and per pass."""

    bytes_per_s: float = 12e9
    flops_per_s: float = 2e11
    layer_s: float = 0.3e-3
    pass_s: float = 0.5e-3

    def forward_s(self, arch: Architecture, workload: Workload, tokens: int) -> Estimate:
        size = weight_bytes_per_pass(arch, workload.dtype_bytes)
        size += kv_cache_bytes(
            arch, workload.context_len, workload.dtype_bytes, workload.batch_size
        )
        work = flops_per_token(arch, workload.context_len) * tokens * workload.batch_size
        value = (
            max(size / self.bytes_per_s, work / self.flops_per_s)
            + arch.num_hidden_layers * self.layer_s
            + self.pass_s
        )
        return Estimate(value, 0.1 * value, "roofline")

    def decode_s(self, target: Architecture, workload: Workload) -> Estimate:
        return self.forward_s(target, workload, 1)

    def verify_s(self, target: Architecture, workload: Workload, gamma: int) -> Estimate:
        return self.forward_s(target, workload, gamma + 1)

    def draft_s(self, draft: Architecture, workload: Workload, gamma: int) -> Estimate:
        step = self.forward_s(draft, workload, 1)
        return Estimate(gamma * step.value, gamma * step.std, step.source)

    def added_s(self, target: Architecture, workload: Workload, gamma: int) -> Estimate:
        return Estimate(0.0, 0.0, "given")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--space", default="demo")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mode", default="eager")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument(
        "--no-enumeration", action="store_true", help="for spaces too large to enumerate"
    )
    arguments = parser.parse_args()

    target = catalogue.load(arguments.target).architecture
    space = load_space(arguments.space)
    workload = Workload(
        1, arguments.context, arguments.tensor_parallel, arguments.dtype, arguments.mode
    )
    latency: LatencyOfRounds = StandInLatency()
    if arguments.profile:
        from archsearch.latency.model import LatencyModel
        from archsearch.profiles import Profile

        latency = LatencyModel(Profile.load(arguments.profile), workload.dtype, workload.mode)
    space = space.served(longest=arguments.context + 96)
    scorer = Scorer(target, workload, latency, PriorAcceptance()).with_limits(space.limits(target))

    exact = None
    if not arguments.no_enumeration:
        start = time.perf_counter()
        alone = rank_alone(space, scorer)
        seconds = time.perf_counter() - start
        rate = f"{alone.shapes / seconds:.0f} candidates/s"
        print(
            f"enumeration: {alone.shapes} shapes in {seconds:.1f} s, {rate} (space of"
            f" {space.size(target)})"
        )
        exact = [
            score.with_rank(rank) for rank, (*_, score) in enumerate(alone.ranked[:5], start=1)
        ]
        groups = grouped(exact, scorer.acceptance, lambda score: scorer.context)
        for score in exact:
            gain = f"{score.speedup.value:.4f} +- {score.speedup.std:.2f}"
            print(f"  {score.rank}. {gain}  gamma {score.gamma}  {score.architecture.label()}")
        print(f"  {len(groups[0])} of the best {len(exact)} cannot be told apart")

    times, gaps, found = [], [], []
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as folder:
            start = time.process_time()
            journal = Path(folder) / "journal.log"
            result = search(
                space, scorer, trials=arguments.trials, seed=seed, storage=journal, how=How("tpe")
            )
            times.append(time.process_time() - start)
        best = result.best[0].speedup.value
        found.append(result.finished)
        gaps.append(1.0 - best / exact[0].speedup.value if exact else best)
    what = "gap to the exact best (%)" if exact else "best speed-up"
    shown = ", ".join(f"{100 * gap:.2f}" if exact else f"{gap:.4f}" for gap in gaps)
    print(
        f"search: {min(found)} distinct shapes in {statistics.median(times):.1f} CPU s (median),"
        f" {what}: {shown}"
    )


if __name__ == "__main__":
    main()
