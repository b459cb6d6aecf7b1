"""Whole decode steps composed of measured kernels, against measured servers.

    python benchmarks/decode_steps.py [--systems DIR] [--calibrate] [--fp8] [--json] [--output DIR]

The PyPI package aiconfigurator-core 0.12.0 (Apache-2.0, Copyright (c) 2025-2026 NVIDIA) ships
kernel tables and, in systems/silicon_sample.csv, the time per output token (TPOT) of servers that
ran whole models. This composes the step of every dense Llama and Qwen row of H100 and H200 out of
the tables of the same GPU and framework and compares.

A TPOT is not a bare step: while a request decodes, the others of the closed loop are prefilled.
From the schedulers' rules, with concurrency c (cut to what the KV cache holds), input length isl
and output length osl:

    TensorRT-LLM, vLLM: a new request joins the running batch. TPOT = D + (c - 1) / osl x (M - D),
    with D the decode step of c
        sequences at the mean context isl + osl / 2 and M the same step with one whole prefill in
        it.
    SGLang: prefills run first and alone, up to 16384 tokens at a time (its max_prefill_tokens), so
    requests that arrive together
        stay together; of n such batches of P seconds a request waits for half of the others after
        its first token. TPOT = D + (n - 1) / 2 x P / osl.

What is not in the tables (waiting at all-reduces, host time of the engine) is fitted to the
calibration rows alone, every tenth row by a hash of its id. They are listed and left out of every
figure. Nothing else is fitted.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import statistics
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.catalogue import load
from archsearch.architecture.ops import AllReduce, Part
from archsearch.capacity import memory_bytes, usable_bytes
from archsearch.engine_rounds import plain_costs
from archsearch.hardware.device import load_device
from archsearch.latency.composed import ComposedPass, sync_waits
from archsearch.latency.constants import constants
from archsearch.profiles import Measurement
from archsearch.workload import Workload

MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "Qwen/Qwen3-32B": "qwen3-32b",
}
DEVICES = {"h100_sxm": "h100-sxm5-80gb", "h200_sxm": "h200-sxm-141gb"}
DTYPES = {"": "bfloat16", "bfloat16": "bfloat16", "fp8": "float8_e4m3fn"}
ENGINE_OF = {"trtllm": "tensorrt-llm"}  # where the data writes an engine otherwise
PREFILL_TOKENS = {"trtllm": 8192, "vllm": 8192, "sglang": 16384}
DATA = (
    "measured TPOT: aiconfigurator-core 0.12.0, systems/silicon_sample.csv (Apache-2.0, Copyright"
    " (c) 2025-2026 NVIDIA)"
)
THEIRS = {"median": 0.104, "mean": 0.178, "bias_by_tp": {1: -0.01, 2: -0.04, 4: -0.08, 8: -0.15}}
"""aiconfigurator 0.12 on 748 rows of the same file; bias on Llama-3.1-8B, H100, TensorRT-LLM."""


@dataclass(frozen=True)
class Row:
    """One measured server."""

    id: str
    model: str
    system: str
    backend: str
    dtype: str
    isl: int
    osl: int
    concurrency: int
    ranks: int
    tpot_s: float

    @property
    def calibrates(self) -> bool:
        return int(hashlib.sha256(self.id.encode()).hexdigest(), 16) % 10 == 0

    @property
    def device(self) -> str:
        return {**DEVICES, "b200_sxm": "b200-sxm"}[self.system]

    @property
    def arch(self) -> Architecture:
        return load(MODELS[self.model]).architecture


def read_rows(path: Path) -> tuple[list[Row], Counter[str]]:
    """The rows of the right kind, and how many others were left out, by reason."""
    rows, left = [], Counter[str]()
    with path.open(encoding="utf-8") as handle:
        for line in csv.DictReader(handle):
            if line["model_path"] not in MODELS:
                left["another model (mixture of experts, MLA, 4-bit)"] += 1
            elif line["system"] not in DEVICES:
                left["another GPU"] += 1
            elif line["mode"] != "agg":
                left["prefill and decode on different GPUs"] += 1
            elif line["gemm_quant_mode"] not in DTYPES:
                left[f"weights in {line['gemm_quant_mode']}"] += 1
            elif float(line["pp_size"]) != 1 or float(line["attention_dp_size"] or 1) not in (0, 1):
                left["pipeline or data parallel"] += 1
            else:
                rows.append(
                    Row(
                        line["id"],
                        line["model_path"],
                        line["system"],
                        line["backend"],
                        DTYPES[line["gemm_quant_mode"]],
                        int(line["isl"]),
                        int(line["osl"]),
                        int(float(line["batch_size"])),
                        int(float(line["tp_size"])),
                        float(line["silicon_tpot_ms"]) / 1e3,
                    )
                )
    return rows, left


VERSIONS = {"vllm": "0.12.0", "sglang": "0.5.1", "tensorrt-llm": "1.0.0"}
"""The versions that the rows were measured with."""


@dataclass(frozen=True)
class HostCosts:
    """What an engine's scheduler adds to a plain step: `step_s` + `sequence_s` per sequence, with
    the std of the sum."""

    step_s: float
    sequence_s: float
    relative_std: float
    source: str


def shipped_costs(engine: str) -> HostCosts:
    """Those that archsearch ships for the version of the rows."""
    costs = plain_costs(engine, VERSIONS[engine])
    at_64 = costs.at(64)
    return HostCosts(
        costs.step_s.value, costs.sequence_s.value, at_64.std / max(at_64.value, 1e-9), costs.source
    )


@dataclass(frozen=True)
class Constants:
    """What is calibrated: the wait per all-reduce, one for all engines, and each engine's host
    time."""

    sync_s: float
    engines: dict[str, HostCosts]
    residual_std: float = 0.0  # robust relative std of the calibration rows around the fit

    def to_dict(self) -> dict[str, Any]:
        return {
            "sync_s": self.sync_s,
            "residual_std": self.residual_std,
            "engines": {name: asdict(costs) for name, costs in self.engines.items()},
        }


NONE = Constants(0.0, {})


@dataclass(frozen=True)
class Terms:
    """TPOT of one row in parts: device work without any waiting, and what multiplies the
    constants."""

    backend: str
    decode_s: float
    prefill_s: float
    waits: float
    batch: int
    relative_std: float

    def tpot_s(self, constants: Constants) -> float:
        costs = constants.engines.get(self.backend)
        host = costs.step_s + costs.sequence_s * self.batch if costs else 0.0
        return self.decode_s + self.prefill_s + constants.sync_s * self.waits + host


def server_terms(passes: ComposedPass, row: Row) -> Terms:
    """TPOT of a closed loop of `concurrency` requests (see the head of this file)."""
    arch, ranks = row.arch, row.ranks
    context = row.isl + row.osl // 2
    workload = Workload(1, context, ranks, row.dtype, "graph")
    use = memory_bytes(arch, None, workload)
    room = int((usable_bytes(load_device(row.device), workload) - use.weight_bytes) // use.kv_bytes)
    batch = max(1, min(row.concurrency, room))
    decode = [Part(batch, 1, context)]

    def step_s(parts: list[Part]) -> float:
        """Device time of a step without the waits of ranks for one another, which are counted
        apart."""
        return sum(
            value
            for name, (value, _) in passes.ops_terms(passes.pass_ops(arch, parts, ranks)).items()
            if name != "step"
        )

    decode_s = step_s(decode)
    budget = PREFILL_TOKENS[row.backend]
    if row.backend == "sglang":
        together = min(batch, max(1, budget // row.isl))
        groups = math.ceil(batch / together)
        prefill_s = (groups - 1) / 2 * step_s([Part(together, row.isl, 0, 1)]) / row.osl
    else:
        running = [Part(batch - 1, 1, context)] if batch > 1 else []
        mixed_s = step_s([Part(1, row.isl, 0, 1), *running])
        prefill_s = (batch - 1) / row.osl * (mixed_s - decode_s)
    reduces = sum(
        count
        for op, count in (
            passes.pass_ops(arch, decode, ranks).in_layers
            + passes.pass_ops(arch, decode, ranks).outside
        ).items()
        if isinstance(op, AllReduce)
    )
    return Terms(
        row.backend,
        decode_s,
        prefill_s,
        sync_waits(reduces, ranks),
        batch,
        passes.step_s(arch, decode, ranks).relative_std,
    )


def calibrate(pairs: Sequence[tuple[Row, Terms]]) -> Constants:
    """The constants, >= 0, that fit the calibration rows best in relative terms; the device's part
    is taken as it is."""
    names = sorted({row.backend for row, _ in pairs})
    measured = np.array([row.tpot_s for row, _ in pairs])
    device = np.array([terms.tpot_s(NONE) for _, terms in pairs])
    columns = [[terms.waits for _, terms in pairs]]
    for name in names:
        columns += [
            [float(row.backend == name) for row, _ in pairs],
            [terms.batch * (row.backend == name) for row, terms in pairs],
        ]
    features = np.array(columns).T
    values = _fit(features / measured[:, None], (measured - device) / measured).tolist()
    left = device + features @ values - measured
    engines = {}
    for number, name in enumerate(names):
        step_s, sequence_s = values[1 + 2 * number : 3 + 2 * number]
        mine = np.array([row.backend == name for row, _ in pairs])
        host = step_s + sequence_s * np.array([terms.batch for _, terms in pairs])[mine]
        relative = float(np.median(np.abs(left[mine])) * 1.4826 / max(float(np.median(host)), 1e-9))
        engines[name] = HostCosts(
            step_s, sequence_s, min(1.0, max(0.2, relative)), f"fitted to {mine.sum()} servers"
        )
    return Constants(values[0], engines, float(1.4826 * np.median(np.abs(left / measured))))


def _fit(features: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Coefficients >= 0 with the smallest absolute error (iteratively reweighted): one odd server
    must not set a constant."""
    from scipy.optimize import nnls

    weights = np.ones(len(wanted))
    for _ in range(30):
        costs, _ = nnls(features * weights[:, None], wanted * weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(features @ costs - wanted), 0.01))
    return np.asarray(costs)


def figures(pairs: Sequence[tuple[Row, float]]) -> dict[str, Any]:
    """Errors of predictions against measured TPOT."""
    errors = [predicted / row.tpot_s - 1 for row, predicted in pairs]
    if not errors:
        return {"rows": 0}

    def bias(key: Callable[[Row], Any]) -> dict[str, list[float]]:
        groups: dict[Any, list[float]] = {}
        for (row, _), error in zip(pairs, errors, strict=True):
            groups.setdefault(key(row), []).append(error)
        return {
            str(name): [
                round(statistics.fmean(g), 4),
                round(statistics.median(map(abs, g)), 4),
                len(g),
            ]
            for name, g in sorted(groups.items())
        }

    sizes = [abs(error) for error in errors]
    return {
        "rows": len(errors),
        "median_absolute_error": statistics.median(sizes),
        "mean_absolute_error": statistics.fmean(sizes),
        "within_10_percent": sum(size <= 0.10 for size in sizes) / len(sizes),
        "bias": statistics.fmean(errors),
        "by_tensor_parallel": bias(lambda row: row.ranks),
        "by_backend": bias(lambda row: row.backend),
        "by_batch": bias(lambda row: row.concurrency),
        "by_model_and_tensor_parallel": bias(
            lambda row: f"{MODELS[row.model]} {row.system} {row.backend} tp{row.ranks}"
        ),
    }


def package_systems() -> Path:
    """The folder `systems` of the installed package."""
    spec = find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        sys.exit(
            "pip install aiconfigurator-core==0.12.0 pyarrow, or pass --systems DIR (its folder"
            " aiconfigurator_core/systems)"
        )
    return Path(spec.origin).parent / "systems"


def near(row: Measurement) -> bool:
    """Rows that these models can need: fitting all 60,000 takes minutes a table and changes nothing
    for them."""
    sizes = row.sizes()
    if row.kind == "gemm":
        return min(sizes["n"], sizes["k"]) >= 512 and (sizes["m"] <= 17 or sizes["m"] % 2 == 0)
    if row.kind == "attention":
        return (
            sizes["head_dim"] == 128
            and sizes["window"] is None
            and sizes["kv_heads"] <= 8
            and sizes["q_heads"] in (4, 8, 16, 32, 64)
        )
    return True


def make_passes(systems: Path) -> Callable[[str, str, str], ComposedPass]:
    """Composed passes by (system, backend, dtype), from the tables of that GPU and framework,
    without engine costs."""
    from archsearch.importers.aiconfigurator import import_tables

    @cache
    def passes(system: str, backend: str, dtype: str) -> ComposedPass:
        names = ("bfloat16",) if dtype == "bfloat16" else ("bfloat16", dtype)
        profile = import_tables(
            load_device(DEVICES[system]),
            framework=backend,
            data=systems,
            dtypes=names,
            compact=False,
        )
        profile.rows = {key: row for key, row in profile.rows.items() if near(row)}
        return ComposedPass(profile, dtype, "graph")

    return passes


def compare(
    rows: Sequence[Row], passes: Callable[[str, str, str], ComposedPass]
) -> list[tuple[Row, Terms]]:
    """Every row with its composed terms."""
    return [(row, server_terms(passes(row.system, row.backend, row.dtype), row)) for row in rows]


def run(pairs: Sequence[tuple[Row, Terms]], constants: Constants) -> dict[str, Any]:
    """All figures; calibration rows are left out of every one."""
    scored = [(row, terms) for row, terms in pairs if not row.calibrates]

    def some(keep: Callable[[Row, Terms], bool], using: Constants = constants) -> dict[str, Any]:
        kept = [(row, terms) for row, terms in scored if keep(row, terms)]
        found = figures([(row, terms.tpot_s(using)) for row, terms in kept])
        inside = [
            abs(terms.tpot_s(using) / row.tpot_s - 1) <= 2 * terms.relative_std
            for row, terms in kept
        ]
        return found | {"within_2_std": statistics.fmean(inside) if inside else None}

    return {
        "bf16": some(lambda row, terms: row.dtype == "bfloat16"),
        "bf16_without_constants": some(lambda row, terms: row.dtype == "bfloat16", NONE),
        "bf16_kv_cache_full": some(
            lambda row, terms: row.dtype == "bfloat16" and terms.batch < row.concurrency
        ),
        "fp8": some(lambda row, terms: row.dtype != "bfloat16"),
    }


def transfer(pairs: Sequence[tuple[Row, Terms]]) -> dict[str, Any]:
    """Does the wait per all-reduce carry over? From the calibration rows of one engine alone; and
    from Llama's to Qwen's rows."""
    usable = [
        (row, terms)
        for row, terms in pairs
        if row.dtype == "bfloat16" and terms.batch == row.concurrency
    ]
    calibration = [(row, terms) for row, terms in usable if row.calibrates]
    alone = {
        backend: (
            calibrate([(row, terms) for row, terms in calibration if row.backend == backend]).sync_s
        )
        for backend in sorted({row.backend for row, _ in calibration})
    }
    llama = calibrate([(row, terms) for row, terms in calibration if "Llama" in row.model])
    others = [
        (row, terms.tpot_s(Constants(llama.sync_s, {})))
        for row, terms in usable
        if "Llama" not in row.model
    ]
    found = figures(others)
    names = ("rows", "median_absolute_error", "bias", "by_tensor_parallel")
    return {
        "sync_s of one engine's rows alone": alone,
        "Qwen with Llama's sync_s, no host time": {name: found.get(name) for name in names},
    }


def text(result: dict[str, Any]) -> str:
    lines = []
    for name in ("bf16", "bf16_without_constants", "bf16_kv_cache_full", "fp8"):
        part = result["figures"][name]
        if not part["rows"]:
            continue
        lines.append(
            f"{name}: {part['rows']} rows, TPOT median error {part['median_absolute_error']:.1%}, "
            f"mean {part['mean_absolute_error']:.1%}, within 10 % {part['within_10_percent']:.0%}, "
            f"within two std {part['within_2_std']:.0%}, bias {part['bias']:+.1%}"
        )
        for by in ("by_tensor_parallel", "by_backend", "by_batch", "by_model_and_tensor_parallel"):
            lines.append(f"  {by.replace('_', ' ')} (bias, median error, rows):")
            lines += [
                f"    {key:>36}  {b:+6.1%}  {m:5.1%}  {n}" for key, (b, m, n) in part[by].items()
            ]
    lines.append(
        f"aiconfigurator 0.12: median {THEIRS['median']:.1%}, mean {THEIRS['mean']:.1%} of 748"
        f" rows; bias by tensor parallel {THEIRS['bias_by_tp']}"
    )
    lines.append(f"left out: {result['left_out']}")
    lines.append(
        f"calibration rows, left out of the figures: {len(result['calibration_rows'])} (listed in"
        " the JSON)"
    )
    for name, transferred in result["transfer"].items():
        lines.append(f"{name}: {transferred}")
    lines.append(f"calibrated now: {result['calibrated_now']}")
    lines.append(f"shipped: {result['shipped']}")
    return "\n".join(lines)


def main(
    arguments: Sequence[str] | None = None,
    passes: Callable[[str, str, str], ComposedPass] | None = None,
) -> dict[str, Any]:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", type=Path, help="the package's folder systems")
    parser.add_argument(
        "--calibrate", action="store_true", help="use the costs fitted now instead of those shipped"
    )
    parser.add_argument(
        "--fp8", action="store_true", help="8-bit rows too, shown apart: ten minutes more"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for decode_steps.json")
    options = parser.parse_args(arguments)
    systems = options.systems or package_systems()
    rows, left = read_rows(systems / "silicon_sample.csv")
    if not options.fp8:
        left["weights in fp8 (--fp8 shows them apart)"] = sum(
            row.dtype != "bfloat16" for row in rows
        )
        rows = [row for row in rows if row.dtype == "bfloat16"]
    pairs = compare(rows, passes or make_passes(systems))
    # 16-bit rows whose batch fits set the constants
    now = calibrate(
        [
            (r, t)
            for r, t in pairs
            if r.calibrates and r.dtype == "bfloat16" and t.batch == r.concurrency
        ]
    )
    known = {backend: shipped_costs(ENGINE_OF.get(backend, backend)) for backend in PREFILL_TOKENS}
    shipped = Constants(constants()["graph"]["sync_s"], known)
    used = now if options.calibrate else shipped
    result = {
        "figures": run(pairs, used),
        "left_out": dict(left),
        "calibration_rows": [row.id for row in rows if row.calibrates],
        "calibrated_now": now.to_dict(),
        "shipped": shipped.to_dict(),
        "transfer": transfer(pairs),
        "aiconfigurator": THEIRS,
        "data": DATA,
    }
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        predictions = [
            {
                "id": row.id,
                "calibration": row.calibrates,
                "tpot_s": row.tpot_s,
                "decode_s": terms.decode_s,
                "prefill_s": terms.prefill_s,
                "batch": terms.batch,
                "predicted_s": terms.tpot_s(used),
            }
            for row, terms in pairs
        ]
        (options.output / "decode_steps.json").write_text(
            json.dumps(result | {"rows": predictions}, indent=1) + "\n"
        )
    print(text(result))
    if options.json:
        print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
