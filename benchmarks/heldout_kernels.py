"""Held-out kernels: how well a tenth of NVIDIA's measured kernel tables predicts the other nine
tenths.

    python benchmarks/heldout_kernels.py [--tables DIR] [--devices h100-sxm,a100-sxm] [--seeds 5]
    [--json OUT]

The tables are those of aiconfigurator-core 0.12.0 (vLLM, bfloat16), read by
`archsearch.importers.aiconfigurator`; --tables is its `systems/data` folder where the package is
not installed. Rows: GEMMs with m <= 32 (all, and those with weights over 8 MB), decode attention
(one query token), and prompt attention for the record.

Splits, each over several seeds:
- rows: a random tenth of the rows is fitted, all others are predicted;
- shapes: harder. A tenth of the rows again, but out of a fifth of the (n, k) pairs of a GEMM, or of
  the (query heads, KV heads, head size) of an attention, drawn at random; only rows of the other
  four fifths are predicted, so no row fitted shares them.

Beside the model stand two that fit nothing: the roofline max(bytes / bandwidth, flops / peak) and
bytes / (0.8 bandwidth) + 3 us. Errors are |predicted / measured - 1|; `within` is the share of
log(measured / predicted) inside two of the model's relative std.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archsearch.architecture.ops import Attention, Gemm
from archsearch.hardware.device import Device, load_device
from archsearch.importers.aiconfigurator import import_tables
from archsearch.latency.ops import GpuTable, gpu_attention_sizes, gpu_gemm_sizes, op_of

Array = NDArray[np.float64]
Indices = NDArray[np.int_]
DTYPE, WIDTH = "bfloat16", 2
LARGE_BYTES = 8e6
# rows predicted per seed, at random where there are more: attention has up to 31,000
MOST_PREDICTED = 5_000
SMALL_M = 32


def bytes_of(op: Gemm | Attention) -> float:
    """What must move at least: weights or KV cache once, inputs and outputs once."""
    if isinstance(op, Gemm):
        return WIDTH * (op.weight_elements() + op.m * (op.n + op.k))
    return WIDTH * (op.kv_elements() + 2 * op.batch * op.tokens * op.q_heads * op.head_dim)


def flops_of(op: Gemm | Attention) -> float:
    """Arithmetic; a prompt's causal mask leaves half of it."""
    return op.flops() / 2 if isinstance(op, Attention) and op.tokens > 1 else op.flops()


def group_of(op: Gemm | Attention) -> tuple[int, ...]:
    """What the harder split keeps together."""
    return (op.n, op.k) if isinstance(op, Gemm) else (op.q_heads, op.kv_heads, op.head_dim)


def split_rows(ops: Sequence[Any], seed: int) -> tuple[Indices, Indices]:
    """A random tenth, and the rest."""
    order = np.random.default_rng(seed).permutation(len(ops))
    count = round(len(ops) / 10)
    return order[:count], order[count:]


def split_shapes(ops: Sequence[Any], seed: int) -> tuple[Indices, Indices]:
    """A tenth of the rows, all from a fifth of the shapes, and the rows of the other shapes."""
    generator = np.random.default_rng(seed)
    shapes = sorted({group_of(op) for op in ops})
    order = generator.permutation(len(shapes))
    known = {shapes[i] for i in order[: max(1, round(len(shapes) / 5))]}
    inside = np.array([group_of(op) in known for op in ops])
    fitted = generator.permutation(np.flatnonzero(inside))[: round(len(ops) / 10)]
    return fitted, np.flatnonzero(~inside)


SPLITS: dict[str, Callable[[Sequence[Any], int], tuple[Indices, Indices]]] = {
    "rows": split_rows,
    "shapes": split_shapes,
}


def summary(errors: Array) -> dict[str, float]:
    """Median, mean and 90th percentile, in percent."""
    return {
        "median": round(100 * float(np.median(errors)), 2),
        "mean": round(100 * float(errors.mean()), 2),
        "p90": round(100 * float(np.quantile(errors, 0.9)), 2),
    }


def judge(
    device: Device, ops: Sequence[Any], times_s: Array, split: str, seed: int
) -> dict[str, dict[str, Any]]:
    """Fit one tenth, predict the others: results by group of rows."""
    fitted, rest = SPLITS[split](ops, seed)
    rest = np.random.default_rng(seed).permutation(rest)[:MOST_PREDICTED]
    sizes = gpu_gemm_sizes if isinstance(ops[0], Gemm) else gpu_attention_sizes
    begin = time.perf_counter()
    table = GpuTable.fit(
        [ops[i] for i in fitted],
        times_s[fitted],
        sizes=sizes,
        multiprocessors=device.multiprocessors or 128,
    )
    fit_s = time.perf_counter() - begin
    asked, truth = [ops[i] for i in rest], times_s[rest]
    begin = time.perf_counter()
    predicted, stds = table.predict_all(asked)
    predict_s = (time.perf_counter() - begin) / len(asked)
    traffic = np.array([bytes_of(op) for op in asked])
    peak, bandwidth = device.peak_flops_per_s(DTYPE), device.bandwidth_bytes_per_s
    # the slower of the two (Williams et al. 2009)
    roofline = np.array([max(flops_of(op) / peak, bytes_of(op) / bandwidth) for op in asked])
    answers = {
        "model": predicted,
        "roofline": roofline,
        "bytes / (0.8 bandwidth) + 3 us": traffic / (0.8 * device.bandwidth_bytes_per_s) + 3e-6,
    }
    groups = {"all": np.ones(len(asked), dtype=bool)}
    if isinstance(ops[0], Gemm):
        large = np.array([WIDTH * op.weight_elements() > LARGE_BYTES for op in asked])
        groups |= {"weights over 8 MB": large, "weights up to 8 MB": ~large}
    result = {}
    for name, inside in groups.items():
        found: dict[str, Any] = {"fitted": len(fitted), "predicted": int(inside.sum())}
        found |= {
            key: summary(np.abs(answer[inside] / truth[inside] - 1.0))
            for key, answer in answers.items()
        }
        misfit = np.abs(np.log(truth / predicted)) / stds
        found["within_two_std"] = round(100 * float((misfit[inside] <= 2.0).mean()), 1)
        found["median_std"] = round(100 * float(np.median(stds[inside])), 2)
        found |= {"fit_s": round(fit_s, 2), "predict_ms": round(1e3 * predict_s, 3)}
        result[name] = found
    return result


def rows_of(device: Device, tables: Path | None) -> dict[str, tuple[list[Any], Array]]:
    """Ops and measured seconds by kind."""
    profile = import_tables(device, compact=False, data=tables, dtypes=(DTYPE,))
    found: dict[str, list[tuple[Any, float]]] = {
        "gemm": [],
        "decode attention": [],
        "prompt attention": [],
    }
    for row in profile.rows.values():
        if row.mode != "graph" or row.kind not in ("gemm", "attention"):
            continue
        op = op_of(row)
        if isinstance(op, Gemm):
            if op.m <= SMALL_M:
                found["gemm"].append((op, row.median_s))
        else:
            found["decode attention" if op.context else "prompt attention"].append(
                (op, row.median_s)
            )
    return {
        kind: ([op for op, _ in rows], np.array([seconds for _, seconds in rows]))
        for kind, rows in found.items()
        if rows
    }


def spread(seeds: list[dict[str, Any]], *path: str) -> list[float]:
    """Least, middle and most of a number over the seeds."""
    values = []
    for result in seeds:
        value: Any = result
        for name in path:
            value = value[name]
        values.append(float(value))
    return [min(values), round(float(np.mean(values)), 2), max(values)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tables",
        type=Path,
        help="systems/data of aiconfigurator-core (default: the installed package)",
    )
    parser.add_argument("--devices", default="a100-sxm,h100-sxm,h200,b200")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    everything: dict[str, Any] = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "results": [],
    }
    print(
        f"errors in %, means over {arguments.seeds} seeds; median of the model: mean (least..most)"
    )
    print(
        f"{'':66} fitted  asked  median                 mean    p90   within  roofline  0.8bw+3us"
    )
    for name in arguments.devices.split(","):
        device = load_device(name)
        for kind, (ops, times_s) in rows_of(device, arguments.tables).items():
            for split in SPLITS:
                runs = [judge(device, ops, times_s, split, seed) for seed in range(arguments.seeds)]
                for group in runs[0]:
                    each = [run[group] for run in runs]
                    least, middle, most = spread(each, "model", "median")
                    simple = [spread(each, key, "median")[1] for key in list(each[0])[3:5]]
                    print(
                        f"{device.key:16} {kind:17} {group:19} by {split:7} {each[0]['fitted']:7}"
                        f" {each[0]['predicted']:6}  {middle:6.2f} ({least:.2f}..{most:.2f}) "
                        f" {spread(each, 'model', 'mean')[1]:6.2f}"
                        f" {spread(each, 'model', 'p90')[1]:6.2f} "
                        f" {spread(each, 'within_two_std')[1]:5.1f} %  {simple[0]:7.2f} "
                        f" {simple[1]:7.2f}",
                        flush=True,
                    )
                    everything["results"].append(
                        {
                            "device": device.key,
                            "kind": kind,
                            "group": group,
                            "split": split,
                            "seeds": each,
                        }
                    )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
