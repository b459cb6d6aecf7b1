"""How idle OpenMP threads should wait: speed of training and of one decode step, alone and beside
other busy processes.

    python benchmarks/thread_waiting.py [--busy 0,1] [--rounds 12] [--seconds 1] [--json FILE]

Each policy has a process of its own, because libgomp reads it once, when torch loads. They take
turns of a second, so that a host that is slow for a while is slow for all alike; printed are
medians of the ratio to the default policy's turn in the same round. `train`: forward and backward
passes of a 2-layer draft over made-up tokens, tokens/s; `decode`: one token through a model of 30
layers with random weights (SmolLM2-135M's shape, bf16), steps/s: small kernels, a barrier after
each. `steal`: share of the time in which the hypervisor ran somebody else, where the system says
so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from archsearch.files import write_json

POLICIES: dict[str, dict[str, str]] = {
    "1 thread": {"OMP_NUM_THREADS": "1"},
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spin 1k": {"GOMP_SPINCOUNT": "1000"},
    "spin 10k": {"GOMP_SPINCOUNT": "10000"},
    "spin 100k": {"GOMP_SPINCOUNT": "100000"},
}
BUSY = "while True:\n    pass"


def shape(layers: int) -> Any:
    """SmolLM2-135M's width with `layers` layers and a head of 2,048 rows."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=2048,
    )


def train_step() -> Callable[[], int]:
    """One training step; says its tokens."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(shape(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, 2048, (16, 64))

    def step() -> int:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return ids.numel()

    return step


def decode_step() -> Callable[[], int]:
    """One pass of one token, no cache: it reads all weights all the same."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(shape(30)).to(torch.bfloat16).eval()
    token = torch.zeros((1, 1), dtype=torch.long)

    def step() -> int:
        with torch.inference_mode():
            model(input_ids=token, use_cache=False)
        return 1

    return step


def serve(seconds: float) -> None:
    """For every line on stdin ("train" or "decode") run for `seconds` and print the speed."""
    steps = {"train": train_step(), "decode": decode_step()}
    for step in steps.values():
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        step = steps[line.strip()]
        done, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            done += step()
        print(done / (time.perf_counter() - begin), flush=True)


def steal() -> tuple[int, int]:
    """(ticks that the hypervisor gave to others, all ticks) since boot; zeros where the system does
    not say."""
    try:
        ticks = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    except (OSError, ValueError):
        return 0, 0
    return ticks[7] if len(ticks) > 7 else 0, sum(ticks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--busy", default="0,1", help="numbers of other busy processes to try")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--policies", default=",".join(POLICIES), help="some of: %(default)s")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(options.seconds)
        return
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMP_", "GOMP_", "KMP_"))
    }
    command = [sys.executable, __file__, "--child", "--seconds", str(options.seconds)]
    children = {
        policy: subprocess.Popen(
            command,
            env=clean | POLICIES[policy],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for policy in options.policies.split(",")
    }
    for child in children.values():
        assert child.stdout is not None and child.stdout.readline().strip() == "ready"
    rows: list[dict[str, Any]] = []
    for number in range(options.rounds):
        for busy in map(int, options.busy.split(",")):
            others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)]
            for what in ("train", "decode"):
                for policy, child in children.items():
                    assert child.stdin is not None and child.stdout is not None
                    before = steal()
                    child.stdin.write(f"{what}\n")
                    child.stdin.flush()
                    speed = float(child.stdout.readline())
                    after = steal()
                    stolen = (after[0] - before[0]) / max(1, after[1] - before[1])
                    rows.append(
                        {
                            "round": number,
                            "busy": busy,
                            "what": what,
                            "policy": policy,
                            "per_s": speed,
                            "steal": stolen,
                        }
                    )
            for other in others:
                other.kill()
                other.wait()
    for child in children.values():
        child.kill()
    report(rows)
    if options.json:
        write_json(options.json, {"rows": rows, "threads": os.cpu_count()})


def report(rows: Sequence[Mapping[str, Any]]) -> None:
    """A line for each policy and condition."""
    speeds: dict[tuple[str, int, str], dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        speeds.setdefault((row["what"], row["busy"], row["policy"]), {})[row["round"]] = row
    print(f"{'':8} {'busy':>4}  {'policy':10} {'median':>9}  of default (quartiles)   steal")
    for (what, busy, policy), found in sorted(speeds.items(), key=lambda item: item[0][:2]):
        default = speeds.get((what, busy, "default"), found)
        ratios = [row["per_s"] / default[number]["per_s"] for number, row in found.items()]
        low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        speed, stolen = (
            median(row["per_s"] for row in found.values()),
            median(row["steal"] for row in found.values()),
        )
        print(
            f"{what:8} {busy:4}  {policy:10} {speed:9.1f}  {middle:6.2f} ({low:.2f} to {high:.2f}) "
            f"  {stolen:10.0%}"
        )


if __name__ == "__main__":
    main()
