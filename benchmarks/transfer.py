"""How far off is a GPU that is answered from another's kernels by the datasheets? One command,
three tables.

    python benchmarks/transfer.py [--output DIR]

1. Kernels: every kernel row of a measured GPU, predicted from another measured GPU's
   (`archsearch.latency.transfer`) and from its own datasheet alone. H100 and H200 are one
   generation, as any GPU is that the search carries over; the other pairs are not, and show why
   only relatives are used.
2. Whole decode steps of three targets and three small models used as drafts, against the same steps
   composed of the GPU's own kernels.
3. Published plain decode steps of GPUs that nobody profiled. Nothing was fitted to them.

Errors are |predicted / measured - 1|; `rms` is the root mean square of log(predicted / measured),
which TRANSFER_STD rests on.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.catalogue import load
from archsearch.architecture.ops import Attention, Gemm, Op, Part
from archsearch.engine_rounds import engine_rounds
from archsearch.hardware.device import Device, load_device
from archsearch.latency.composed import ComposedPass
from archsearch.latency.datasheet import datasheet_s
from archsearch.latency.model import LatencyModel
from archsearch.latency.ops import OpModel, op_of
from archsearch.latency.roofline import RooflineLatency
from archsearch.latency.transfer import CarriedOps
from archsearch.profiles import Profile, find_profile
from archsearch.workload import Workload

DTYPE = "bfloat16"
PAIRS = (
    ("h100", "h200"),
    ("h200", "h100"),
    ("h100", "b200"),
    ("b200", "h100"),
    ("a100", "h100"),
    ("h100", "a100"),
)
STEPS = {
    "targets": (("llama-3.1-8b", 1), ("qwen3-32b", 1), ("llama-3.1-70b", 4)),
    "drafts": (("qwen2.5-0.5b", 1), ("llama-3.2-1b", 1), ("qwen3-1.7b", 1)),
}
LLAMA_70B_PCIE = "Llama-3.3-70B on two H100 80GB without NVLink, taken for H100 PCIe (2.0 TB/s)"
PUBLISHED: dict[str, tuple[str, str, int, dict[int, float]]] = {
    "Qwen3-32B on an H100 of 94 GB HBM2e (LRZ)": (
        "qwen3-32b",
        "h100-sxm5-94gb",
        1,
        {1: 33.94, 2: 34.03, 4: 34.21, 8: 34.5, 16: 35.11, 32: 36.67, 64: 38.02},
    ),
    LLAMA_70B_PCIE: (
        "llama-3.1-70b",
        "h100-pcie-80gb",
        2,
        {1: 43.31, 2: 43.9, 4: 44.87, 8: 46.7, 16: 50.7, 32: 52.0, 64: 57.22},
    ),
    **{
        f"{target} on an H20 (AngelSlim)": (target, "h20-sxm-96gb", 1, {1: round(1e3 / speed, 2)})
        for target, speed in (
            ("qwen3-1.7b", 390.53),
            ("qwen3-4b", 234.04),
            ("qwen3-8b", 153.81),
            ("qwen3-14b", 94.46),
            ("qwen3-32b", 43.3),
            ("qwen3-30b-a3b", 325.42),
        )
    },
}
"""Target, device, ranks and ms of a plain step by batch size, vLLM of early 2026, median
inter-token latency (github.com/tomasruizt/vllm-scripts, InstructCoder prompts), and of vLLM 0.11.2
(Tencent AngelSlim, README: tokens/s of one request on MT-bench, prompts inside). At larger batches
it holds steps that read prompts too."""
# InstructCoder: some hundred tokens of prompt and answer; 1024 more move a step by less than 1 % at
# batch 1
CONTEXT = 512


@cache
def own_ops(name: str) -> OpModel:
    """The measured ops of a device."""
    return OpModel(profile_of(name), DTYPE, "graph")


@cache
def profile_of(name: str) -> Profile:
    return Profile.load(find_profile(load_device(name).key))


def architecture_of(target: str) -> Architecture:
    return load(target).architecture


def group_of(op: Op) -> str:
    """Which line of the table a kernel belongs to."""
    if isinstance(op, Gemm):
        return (
            "decode GEMM (m <= 32, weights over 8 MB)"
            if op.m <= 32 and op.n * op.k > 4e6
            else "other GEMM"
        )
    if isinstance(op, Attention):
        return "decode attention" if op.context else "prompt attention"
    return op.kind.replace("_", "-")


def summary(log_ratios: Sequence[float]) -> dict[str, float]:
    """Median absolute error and bias in percent, and the root mean square of log(predicted /
    measured) in percent."""
    logs = np.array(log_ratios)
    return {
        "median": round(100 * float(np.median(np.abs(np.expm1(logs)))), 1),
        "bias": round(100 * float(np.expm1(np.median(logs))), 1),
        "rms": round(100 * float(np.sqrt((logs**2).mean())), 1),
    }


def kernels(source: str, name: str) -> dict[str, Any]:
    """Every kernel row of `name` predicted from `source`'s and from the datasheet, by group and
    kind."""
    device, measured = load_device(name), own_ops(source)
    rows = [row for row in profile_of(name).rows.values() if row.mode == "graph"]
    ops = [op_of(row) for row in rows]
    carried = CarriedOps(measured, device)
    carried.prepare(ops, True)
    found: dict[str, dict[str, list[float]]] = {}
    for op, row in zip(ops, rows, strict=True):
        answer, std = carried.op_s(op, True)
        logs = np.log([answer / row.median_s, datasheet_s(device, op, DTYPE) / row.median_s])
        for group in (group_of(op), f"all {op.kind}"):
            part = found.setdefault(group, {"carried": [], "datasheet": [], "inside": []})
            part["carried"].append(float(logs[0]))
            part["datasheet"].append(float(logs[1]))
            part["inside"].append(float(abs(logs[0]) <= 2 * std))
    return {
        group: {
            "rows": len(part["carried"]),
            "carried": summary(part["carried"]),
            "datasheet": summary(part["datasheet"]),
            "within_two_std": round(100 * float(np.mean(part["inside"])), 1),
        }
        for group, part in sorted(found.items())
    }


def steps(source: str, name: str, models: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Whole decode steps of `name` from `source`'s kernels, against those composed of its own."""
    device = load_device(name)
    own, carried = (
        ComposedPass(profile_of(name), DTYPE, "graph"),
        ComposedPass(profile_of(source), DTYPE, "graph", device),
    )
    sheet = RooflineLatency(device, DTYPE, "graph")
    cases: list[dict[str, Any]] = []
    for target, ranks in models:
        for batch in (1, 8, 32):
            for tokens in (1, 6):
                truth = own.step_s(
                    architecture_of(target), [Part(batch, tokens, 1024)], ranks
                ).value
                answer = carried.step_s(architecture_of(target), [Part(batch, tokens, 1024)], ranks)
                asked = Part(batch, tokens, 1024), False
                flat = sheet.pass_s(architecture_of(target), asked, ranks).value
                cases.append(
                    {
                        "target": target,
                        "ranks": ranks,
                        "batch": batch,
                        "tokens": tokens,
                        "own_ms": 1e3 * truth,
                        "carried_ms": 1e3 * answer.value,
                        "std_ms": 1e3 * answer.std,
                        "datasheet_ms": 1e3 * flat,
                    }
                )
    return {
        "carried": summary([float(np.log(case["carried_ms"] / case["own_ms"])) for case in cases]),
        "datasheet": summary(
            [float(np.log(case["datasheet_ms"] / case["own_ms"])) for case in cases]
        ),
        "within_two_std": (
            sum(abs(case["carried_ms"] - case["own_ms"]) <= 2 * case["std_ms"] for case in cases)
            / len(cases)
        ),
        "cases": cases,
    }


def published() -> dict[str, Any]:
    """Plain decode steps of GPUs that nobody profiled, in vLLM 0.16."""
    result = {}
    for title, (target, key, ranks, known) in PUBLISHED.items():
        device: Device = load_device(key)
        if title == LLAMA_70B_PCIE:
            device = replace(device, link_bytes_per_s=0.0)  # two cards without a bridge
        latencies = {
            "carried": LatencyModel(
                profile_of("h100"), DTYPE, "graph", "vllm", engine_rounds("vllm", "0.16.0"), device
            ),
            "datasheet": RooflineLatency(
                device, DTYPE, "graph", "vllm", engine_rounds("vllm", "0.16.0")
            ),
        }
        loads = {batch: Workload(batch, CONTEXT, ranks, DTYPE, "graph") for batch in known}
        rows = [
            _published_row(latencies, architecture_of(target), loads[batch], ms)
            for batch, ms in known.items()
        ]
        logs = {
            name: [float(np.log(row[f"{name}_ms"] / row["measured_ms"])) for row in rows]
            for name in latencies
        }
        result[title] = {name: summary(part) for name, part in logs.items()} | {"rows": rows}
    return result


def _published_row(
    latencies: dict[str, Any], arch: Architecture, workload: Workload, measured_ms: float
) -> dict[str, float]:
    row = {"batch": workload.batch_size, "measured_ms": measured_ms}
    for name, latency in latencies.items():
        answer = latency.decode_s(arch, workload)
        row |= {
            f"{name}_ms": round(1e3 * answer.value, 2),
            f"{name}_std_ms": round(1e3 * answer.std, 2),
        }
    return row


def text(result: dict[str, Any]) -> str:
    """All tables as markdown."""
    lines = [
        (
            "| kernels of | from | group | rows | carried: median, bias, rms % | datasheet: median"
            " % | within 2 std % |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for pair, groups in result["kernels"].items():
        source, name = pair.split(" to ")
        for group, part in groups.items():
            one = part["carried"]
            lines.append(
                f"| {name} | {source} | {group} | {part['rows']} | {one['median']},"
                f" {one['bias']:+}, {one['rms']} | {part['datasheet']['median']} |"
                f" {part['within_two_std']} |"
            )
    lines += [
        "",
        (
            "| whole steps of | from | carried: median, bias % | datasheet: median, bias % | within"
            " 2 std |"
        ),
        "|---|---|---|---|---|",
    ]
    for pair, part in result["steps"].items():
        source, name = pair.split(" to ")  # `h100 to h200, drafts`
        one, sheet = part["carried"], part["datasheet"]
        lines.append(
            f"| {name} | {source} | {one['median']}, {one['bias']:+} | {sheet['median']},"
            f" {sheet['bias']:+} | {part['within_two_std']:.0%} |"
        )
    for title, part in result["published"].items():
        lines += [
            "",
            f"{title}: carried {part['carried']}, datasheet {part['datasheet']}",
            "",
            "| batch | measured ms | carried ms | error | datasheet ms | error |",
            "|---|---|---|---|---|---|",
        ]
        for row in part["rows"]:
            errors = [
                row[f"{name}_ms"] / row["measured_ms"] - 1 for name in ("carried", "datasheet")
            ]
            lines.append(
                f"| {row['batch']} | {row['measured_ms']} | {row['carried_ms']} ±"
                f" {row['carried_std_ms']} | {errors[0]:+.1%} | {row['datasheet_ms']} |"
                f" {errors[1]:+.1%} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder for transfer.json and transfer.md")
    options = parser.parse_args(arguments)
    result = {
        "kernels": {f"{source} to {name}": kernels(source, name) for source, name in PAIRS},
        "steps": {
            f"{source} to {name}, {group}": steps(source, name, STEPS[group])
            for source, name in PAIRS
            for group in STEPS
        },
        "published": published(),
    }
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "transfer.json").write_text(
            json.dumps(result, indent=1) + "\n", encoding="utf-8"
        )
        (options.output / "transfer.md").write_text(text(result) + "\n", encoding="utf-8")
    print(text(result))
    return result


if __name__ == "__main__":
    main()
