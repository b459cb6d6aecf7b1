"""How long a curve takes to price, and how far its points lie from the same points priced one by
one.

    python benchmarks/curve_speed.py            # 512 points; CPU seconds of this process

Models are fitted before the clock starts; what they remember of kernels is cleared before every
curve.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from archsearch.acceptance.prior import PriorAcceptance
from archsearch.models.targets import resolve_drafter, resolve_target
from archsearch.pipeline.latency import choose_latency
from archsearch.search.objective import Scorer
from archsearch.traffic.curve import curve, sweep_of
from archsearch.workload import WorkloadRequest

RANGES = {"batch": "1:512", "context": "128:32768", "alpha": "0:1", "gamma": "1:16"}


def forget(latency: Any) -> None:
    """Clear what was priced before."""
    latency._passes.clear()
    latency.composed_._gemm._seen.clear()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ref = resolve_target("llama-3.1-70b")
    asked = WorkloadRequest(
        gpu="a100", tensor_parallel=4, context_len=1024, engine="vllm", engine_version="0.30.0"
    )
    source, workload = choose_latency(asked, ref.architecture)
    scorer = Scorer(ref.architecture, workload, source.latency, PriorAcceptance())
    seconds: dict[str, float] = {}
    for name in ("llama-3.1-8b", "eagle3"):
        drafter = resolve_drafter(name, ref).drafter
        for axis, span in RANGES.items():
            forget(source.latency)
            began = time.process_time()
            found = curve(scorer, drafter, sweep_of(axis, f"{span}:{options.points}", 131072))
            seconds[f"{name}, {axis}, {len(found.points)} points"] = time.process_time() - began
    drafter = resolve_drafter("llama-3.1-8b", ref).drafter
    found = curve(scorer, drafter, sweep_of("batch", f"1:512:{options.points}", 131072))
    off = [
        abs(p.speedup.value / scorer.at_batch(int(p.x))(drafter).speedup.value - 1.0)
        for p in found.points[:: len(found.points) // 24]
    ]
    result = {"cpu_seconds": seconds, "largest_difference": max(off), "points_checked": len(off)}
    if options.json:
        print(json.dumps(result))
        return
    for name, value in seconds.items():
        print(f"{name:40s} {value:5.2f} s")
    print(f"largest difference from {len(off)} points priced one by one: {max(off):.2%}")


if __name__ == "__main__":
    main()
