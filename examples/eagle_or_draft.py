"""EAGLE-3 or a draft model for my Llama-3.1-8B? At one request and under load, in two engines.

    python examples/eagle_or_draft.py [--gpu h100] [--target llama-3.1-8b] [--drafts eagle3
    llama-3.2-1b ngram]

Prices drafters that exist by the kernels of the GPU, the rounds of each engine and what was
published of their acceptance, and says where they cannot be told apart. Runs in about two minutes,
without a GPU. What would decide it: alpha on your own prompts (archsearch acceptance), and the
rounds of your own engine (archsearch profile --engine vllm).
"""

from __future__ import annotations

import argparse

from archsearch.pipeline.estimate import EstimateRequest, estimate_drafts
from archsearch.workload import WorkloadRequest

BATCHES = (1, 8, 64)
ENGINES = ("vllm", "sglang")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--target", default="llama-3.1-8b")
    parser.add_argument("--drafts", nargs="+", default=["eagle3", "llama-3.2-1b", "ngram"])
    arguments = parser.parse_args()
    for batch in BATCHES:
        asked = WorkloadRequest(gpu=arguments.gpu, batch_size=batch)
        answer = estimate_drafts(
            EstimateRequest(arguments.target, tuple(arguments.drafts), asked, engines=ENGINES)
        )
        print(f"\nbatch size {batch}: {answer.target} on {answer.device}")
        print(f"  {'draft':<16}{'engine':<14}{'gamma':>5}{'alpha':>14}{'speed-up':>16}  group")
        for row in answer.drafts:
            score, alpha, gain = row.score, row.score.alpha, row.score.speedup
            print(
                f"  {row.draft:<16}{score.engine:<14}{score.gamma:>5}{alpha.value:>7.2f} ±"
                f" {alpha.std:.2f}{gain.value:>8.2f}x ± {gain.std:.2f}  {row.group}"
            )
        best = answer.drafts[0]
        same = {
            row.draft
            for row in answer.drafts
            if row.score.engine == best.score.engine and row.group == best.group
        }
        tie = (
            f"; the error bars do not tell it from {', '.join(sorted(same - {best.draft}))}"
            if len(same) > 1
            else ""
        )
        print(
            f"  -> {best.draft} in {best.score.engine}"
            + (tie if best.pays else ": but none pays; serve the target alone")
        )
        for warning in answer.warnings:
            print(f"  WARNING: {warning}")


if __name__ == "__main__":
    main()
