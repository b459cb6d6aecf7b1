"""How fast a target writes text: trees of the code in turn on the same prompts, beside the matrix
products alone.

    git archive COMMIT archsearch | tar x -C /some/old
    python benchmarks/writer.py --tree old=/some/old --tree new=. --prompts FILE [--json FILE]

Every round runs each tree once in a process of its own, in turn, so that a busy machine slows all
alike; with one thread the processor's time is reported too, which a shared machine changes least.
`--roof` times what no writer goes below: the target's matrix products on the same batch, and on
prompts packed to full passes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np


def once(arguments: argparse.Namespace) -> None:
    """One run of the code on the path: a JSON line."""
    import resource

    import torch

    from archsearch.models.load import load_target
    from archsearch.models.targets import resolve_target
    from archsearch.text.generate import generate_text
    from archsearch.text.prompts import read_prompts
    from archsearch.text.settings import Writing

    torch.set_num_threads(1)
    target, tokenizer = load_target(resolve_target(arguments.target), arguments.dtype)
    prompts = read_prompts(arguments.prompts)[: arguments.count]
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        begin, cpu = time.monotonic(), time.process_time()
        cache = generate_text(
            target, tokenizer, prompts, cache_dir=folder, writing=Writing(arguments.answer_tokens)
        )
        row: dict[str, Any] = {
            "wall_s": time.monotonic() - begin,
            "cpu_s": time.process_time() - cpu,
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row |= {"written": cache.written_tokens, "read": sum(s.prompt_tokens for s in cache.sequences)}
    row |= {"answers": len(cache.sequences), "peak_gb": (peak - base) / 2**20}
    if arguments.roof:
        row["roof_s"] = roof(target, row)
    print(json.dumps(row))


def roof(target: Any, row: dict[str, Any]) -> float:
    """Seconds (of the processor) of the matrix products alone: every answer's row in each step,
    prompts in passes of 1024."""
    import torch

    modules = [m for m in target.base_model.modules() if isinstance(m, torch.nn.Linear)]
    head = target.get_output_embeddings()

    def seconds(rows: int, with_head: bool) -> float:
        took = []
        for _ in range(3):
            begin = time.process_time()
            for module in [*modules, head] if with_head else modules:
                module(torch.zeros(rows, module.in_features, dtype=target.dtype))
            took.append(time.process_time() - begin)
        return min(took)

    with torch.inference_mode():
        rows = int(row["answers"])
        return row["written"] / rows * seconds(rows, True) + row["read"] / 1024 * seconds(
            1024, False
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--roof", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        once(arguments)
        return 0
    rows = []
    for number in range(arguments.rounds):
        for name, folder in (tree.split("=", 1) for tree in arguments.tree):
            command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--once"]
            environment = {
                **os.environ,
                "PYTHONPATH": str(Path(folder).resolve()),
                "OMP_NUM_THREADS": "1",
            }
            found = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True
            ).stdout
            rows.append(
                {"tree": name, "round": number, **json.loads(found.strip().splitlines()[-1])}
            )
            print(rows[-1], flush=True)
            if arguments.json:
                Path(arguments.json).write_text(
                    json.dumps({"command": sys.argv, "rows": rows}, indent=1)
                )
    for name in dict.fromkeys(row["tree"] for row in rows):
        own = [row for row in rows if row["tree"] == name]
        processor, clock = (
            np.median([row["written"] / row[key] for row in own]) for key in ("cpu_s", "wall_s")
        )
        peak = max(row["peak_gb"] for row in own)
        print(
            f"{name:8} {processor:6.0f} tokens/s of the processor, {clock:6.0f} by the clock,"
            f" {peak:.1f} GB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
