"""How idle OpenMP threads should wait: speed of training and of one decode step, alone and beside other busy processes.

    python benchmarks/thread_waiting.py [--busy 0,1] [--rounds 3] [--seconds 6] [--json FILE]

Every measurement is a process of its own, because the policy is read once, when torch loads. Policies and conditions alternate
inside each round, so drift hits all alike; printed are medians over rounds. `train`: forward and backward passes of a 2-layer
draft over made-up tokens, tokens/s; `decode`: one token through a 30-layer model of random weights (SmolLM2-135M's shape, bf16),
steps/s: small kernels, a barrier after each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
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
        hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=2048,
    )  # fmt: skip


def train_speed(seconds: float) -> float:
    """Training tokens per second."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(shape(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, 2048, (16, 128))

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    done, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        step()
        done += ids.numel()
    return done / (time.perf_counter() - begin)


def decode_speed(seconds: float) -> float:
    """Decode steps per second of one sequence, no cache: the passes read all weights all the same."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(shape(30)).to(torch.bfloat16).eval()
    token = torch.zeros((1, 1), dtype=torch.long)
    with torch.inference_mode():
        model(input_ids=token, use_cache=False)
        done, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            model(input_ids=token, use_cache=False)
            done += 1
    return done / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", default="0,1", help="numbers of other busy processes to try")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps({"train": train_speed(options.seconds), "decode": decode_speed(options.seconds)}))
        return
    found: dict[tuple[str, int, str], list[float]] = {}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    for _ in range(options.rounds):
        for busy in map(int, options.busy.split(",")):
            others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)]
            try:
                for policy, settings in POLICIES.items():
                    child = [sys.executable, __file__, "--child", "--seconds", str(options.seconds)]
                    text = subprocess.run(child, env=clean | settings, check=True, capture_output=True, text=True).stdout
                    print(f"busy {busy}  {policy:10} {text.strip()}", file=sys.stderr, flush=True)
                    for what, value in json.loads(text).items():
                        found.setdefault((what, busy, policy), []).append(value)
            finally:
                for other in others:
                    other.kill()
                    other.wait()
    print(f"{'':8} {'busy':>4}  {'policy':10} {'median':>9}  of default")
    for (what, busy, policy), values in sorted(found.items(), key=lambda item: item[0][:2]):
        middle = median(values)
        print(f"{what:8} {busy:4}  {policy:10} {middle:9.1f}  {middle / median(found[what, busy, 'default']):9.2f}")
    if options.json:
        rows = [{"what": w, "busy": b, "policy": p, "per_s": values} for (w, b, p), values in found.items()]
        write_json(options.json, {"rows": rows, "threads": os.cpu_count()})


if __name__ == "__main__":
    main()
