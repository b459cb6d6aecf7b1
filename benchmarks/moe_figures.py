"""Mixtures of experts, latent attention and fp8 against measured servers, and what verification
costs there.

    python benchmarks/moe_figures.py [--systems DIR] [--profiles DIR] [--only GROUP ...] [--output
    DIR]

1. Steps of gpt-oss-120b, Qwen3-235B-A22B-FP8, DeepSeek-V3/R1 and of dense fp8 models, composed out
   of the kernel tables of aiconfigurator-core 0.12.0 (Apache-2.0, Copyright (c) 2025-2026 NVIDIA)
   of the same GPU and framework, against the time per output token in its silicon_sample.csv. As in
   decode_steps.py, whose rules of prefill and constants are used as they ship; nothing is fitted
   but, in a second figure, how long ranks wait where all-reduce and norm are one kernel. Rows
   marked as calibration there (every tenth) are left out of the figures. What a server runs is what
   its engine's source and its published recipe say (`fuses`, `on_blackwell`), by version and model,
   not what its times say.
2. Rounds of speculation on MoE targets over plain steps, on the profiles that ship, against
   published ones: DFlash (arXiv 2602.06036, table 3) and SpecBundle (SpecForge, data.json; its
   hardware is not stated: H200 is taken).

Rows that are left out, each with its reason, are counted in `left_out`: data-parallel attention,
tensor and expert parallelism mixed, a tensor parallelism that is the product of the two (16 GPUs
that are 4), a concurrency that the row's own source contradicts, a time per token below that of a
quarter of the concurrency, twins, groups of one label whose times differ by more than 1.3
(DeepSeek: the source ran MTP too), and servers that another tool misses by a factor as well
(`ODD`).

--profiles: where imported tables are kept between runs (importing takes minutes). Groups: gpt-oss,
qwen3-235b, fp8-dense, deepseek, verification.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parent))
import decode_steps as steps
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.catalogue import load
from archsearch.architecture.ops import Attention, Op
from archsearch.hardware.device import load_device
from archsearch.importers.aiconfigurator import import_tables, write_profile
from archsearch.latency.composed import ComposedPass
from archsearch.latency.constants import constants
from archsearch.profiles import Measurement, Profile

GROUPS: Final = {
    "gpt-oss": {"openai/gpt-oss-120b": "gpt-oss-120b"},
    "qwen3-235b": {"Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b"},
    "deepseek": {
        "deepseek-ai/DeepSeek-V3": "deepseek-v3",
        "deepseek-ai/DeepSeek-R1": "deepseek-r1",
    },
    "fp8-dense": {name: entry for name, entry in steps.MODELS.items()},
}
DTYPES: Final = {
    "gpt-oss": "bfloat16",
    "qwen3-235b": "float8_e4m3fn",
    "deepseek": "float8_e4m3fn",
    "fp8-dense": "float8_e4m3fn",
}
GOALS: Final = {"gpt-oss": 0.08, "qwen3-235b": 0.08, "fp8-dense": 0.06, "verification": 0.10}
DEVICES: Final = {**steps.DEVICES, "b200_sxm": "b200-sxm"}
LABEL: Final = (
    "model_path",
    "system",
    "backend",
    "backend_version",
    "precision",
    "isl",
    "osl",
    "batch_size",
    "tp_size",
    "moe_ep_size",
)
ODD: Final = {
    (
        "nvidia/Llama-3.1-8B-Instruct-FP8",
        "h200_sxm",
        "vllm",
    ): "aiconfigurator is off by 83 to 202 % too",
    ("Qwen/Qwen3-32B", "h100_sxm", "vllm"): "aiconfigurator is off by 17 to 139 % too",
    ("Qwen/Qwen3-235B-A22B-FP8", "h200_sxm", "vllm"): "33 to 59 ms at batch 4: eager or untuned",
}
UNFUSED: Final = (
    "Qwen/Qwen3-32B",
    "nvidia/Llama-3.1-8B-Instruct-FP8",
    "meta-llama/Llama-3.1-8B-Instruct",
)
"""Models that TensorRT-LLM ran with all-reduce and norm apart: dense Qwen3, Llamas no wider than
4,096 (pull request 6205)."""
MODULES: Final = ("trtllm", "vllm")  # frameworks with rows of whole MLA blocks


@dataclass(frozen=True)
class MoeRow(steps.Row):
    """A measured server; `expert_ranks` of them hold whole experts."""

    entry: str = ""
    expert_ranks: int = 1
    version: str = ""

    @property
    def fuses(self) -> bool:
        """Whether its all-reduces and the norms after them are one kernel.

        vLLM: by default from 0.17 (pull request 34299), before that on B200 by the recipes of
        InferenceX, whose servers these are (pull requests 3 and 789, issue 798: pass_config).
        TensorRT-LLM: Qwen3's experts in 0.20 already, gpt-oss, DeepSeek, and Llamas wider than
        4,096 from 2025-08 on (pull request 6205).
        """
        if self.backend == "vllm":
            version = re.match(r"\d+(\.\d+)+", self.version)
            return self.system == "b200_sxm" or (
                version is not None and Version(version.group()) >= Version("0.17")
            )
        return self.backend == "trtllm" and self.model not in UNFUSED

    @property
    def on_blackwell(self) -> bool:
        """gpt-oss on B200: an 8-bit cache (InferenceX issue 798 of vLLM, pull request 110 of
        TensorRT-LLM), and MXFP4 weights times 8-bit activations under vLLM as well
        (VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8; pull request 789)."""
        return self.system == "b200_sxm" and self.entry.startswith("gpt-oss")

    @property
    def arch(self) -> Architecture:
        arch = load(self.entry).architecture
        served = self.dtype if self.dtype != "bfloat16" else ""
        return arch.replace(served_dtype=served, expert_parallel=self.expert_ranks > 1)


def read_group(path: Path, group: str) -> tuple[list[MoeRow], Counter[str]]:
    """The rows of a group that can be compared, and how many others there are, by reason."""
    models = GROUPS[group]
    with path.open(encoding="utf-8") as handle:
        lines = [
            line
            for line in csv.DictReader(handle)
            if line["model_path"] in models and line["mode"] == "agg"
        ]
    if group == "fp8-dense":
        lines = [
            line
            for line in lines
            if line["gemm_quant_mode"] == "fp8" and line["system"] in steps.DEVICES
        ]
    left, kept, seen = Counter[str](), [], set()
    spread = _disagreeing(lines) if group == "deepseek" else set()
    slow = _too_quick(lines)
    for line in lines:
        reason = _reason(line, group) or (
            "one label, times that differ" if _label(line) in spread else ""
        )
        reason = reason or (
            "quicker than at a quarter of the concurrency" if line["id"] in slow else ""
        )
        twin = (line["system"], line["backend"], line["isl"], line["osl"], line["silicon_tpot_ms"])
        if not reason and twin in seen:
            reason = "a twin of another row"
        if reason:
            left[reason] += 1
            continue
        seen.add(twin)
        kept.append(_row(line, group))
    return kept, left


def _number(text: str) -> float:
    return float(text) if text else 1.0


def _reason(line: dict[str, str], group: str) -> str:
    """Why a row cannot be compared; "" where it can."""
    if line["system"] not in DEVICES:
        return "another GPU"
    if odd := ODD.get((line["model_path"], line["system"], line["backend"])):
        return f"{line['model_path']} on {line['system']} {line['backend']}: {odd}"
    if _number(line["pp_size"]) != 1 or _number(line["attention_dp_size"]) not in (0, 1):
        return "pipeline or data parallel"
    if group != "fp8-dense":
        split, whole, ranks = (
            _number(line[name]) for name in ("moe_tp_size", "moe_ep_size", "tp_size")
        )
        if split > 1 and whole > 1:
            return "columns and experts both split, or a product of the two as tensor parallelism"
        if split * whole != ranks:
            return "parallelism of experts and of the rest differ"
    if group == "deepseek" and (line["precision"] != "fp8" or line["backend"] not in MODULES):
        return "fp4 weights, or no table of MLA blocks of this framework"
    asked = re.search(r"silicon_concurrency=(\d+)", line["silicon_data_source"])
    if asked and float(asked.group(1)) != float(line["batch_size"]):
        return "a concurrency that its source contradicts"
    return ""


def _label(line: dict[str, str]) -> tuple[str, ...]:
    return tuple(line[name] for name in LABEL)


def _disagreeing(lines: Iterable[dict[str, str]]) -> set[tuple[str, ...]]:
    """Labels whose rows differ by more than a factor of 1.3."""
    times: dict[tuple[str, ...], list[float]] = {}
    for line in lines:
        times.setdefault(_label(line), []).append(float(line["silicon_tpot_ms"]))
    return {label for label, found in times.items() if max(found) > 1.3 * min(found)}


def _too_quick(lines: Sequence[dict[str, str]]) -> set[str]:
    """Rows that are quicker than the same server at a quarter of the concurrency or less."""
    same = (
        "model_path",
        "system",
        "backend",
        "isl",
        "osl",
        "tp_size",
        "moe_tp_size",
        "moe_ep_size",
        "precision",
    )
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for line in lines:
        groups.setdefault(tuple(line[name] for name in same), []).append(line)
    found = set()
    for group in groups.values():
        for line in group:
            fewer = [
                float(other["silicon_tpot_ms"])
                for other in group
                if 4 * float(other["batch_size"]) <= float(line["batch_size"])
            ]
            if fewer and float(line["silicon_tpot_ms"]) < max(fewer):
                found.add(line["id"])
    sets: dict[tuple[str, ...], list[str]] = {}
    for line in lines:
        sets.setdefault(
            tuple(line[name] for name in ("model_path", "system", "backend", "batch_size")), []
        ).append(line["id"])
    for ids in (
        sets.values()
    ):  # where most of a server's rows at a concurrency are, none of them is believed
        if 2 * len(found & set(ids)) > len(ids):
            found.update(ids)
    return found


def _row(line: dict[str, str], group: str) -> MoeRow:
    return MoeRow(
        line["id"],
        line["model_path"],
        line["system"],
        line["backend"],
        DTYPES[group],
        int(line["isl"]),
        int(line["osl"]),
        int(float(line["batch_size"])),
        int(float(line["tp_size"])),
        float(line["silicon_tpot_ms"]) / 1e3,
        GROUPS[group][line["model_path"]],
        int(_number(line["moe_ep_size"])) if group != "fp8-dense" else 1,
        line["backend_version"],
    )


def near(row: Measurement) -> bool:
    """Rows that these models can need; fitting all would take minutes a table and change nothing
    for them."""
    sizes = row.sizes()
    if row.kind == "gemm":
        power = sizes["m"] & (sizes["m"] - 1) == 0 and sizes["m"] <= 8192
        return power and min(sizes["n"], sizes["k"]) >= 128 and max(sizes["n"], sizes["k"]) >= 512
    if row.kind == "attention":
        group = sizes["q_heads"] / sizes["kv_heads"]
        shape = (
            sizes["q_heads"] in (4, 8, 16, 32, 64)
            and sizes["kv_heads"] in (1, 2, 4, 8)
            and group in (4, 8, 16)
        )
        width = (
            sizes["head_dim"] == 128
            and not sizes["window"]
            or sizes["head_dim"] == 64
            and group == 8
        )
        return shape and width and sizes["batch"] <= 512
    if row.kind == "experts":
        return (sizes["hidden"], sizes["inter"]) in EXPERTS
    return row.kind != "latent_attention" or (
        sizes["heads"] in (16, 32, 64, 128) and sizes["batch"] <= 512
    )


EXPERTS: Final = {
    (hidden, inter // ranks)
    for hidden, inter in ((4096, 1536), (2880, 2880), (7168, 2048))
    for ranks in (1, 2, 4, 8)
}


class EightBitCache(ComposedPass):
    """16-bit weights over a cache in 8 bits."""

    def __init__(self, profile: Profile, dtype: str, mode: str) -> None:
        super().__init__(profile, dtype, mode)
        self._cache = ComposedPass(profile, "float8_e4m3fn", mode)

    def op_s(self, op: Op) -> tuple[float, float]:
        return self._cache.op_s(op) if isinstance(op, Attention) else super().op_s(op)


@cache
def passes(
    systems: Path, kept: Path | None, system: str, backend: str, dtype: str, blackwell: bool = False
) -> ComposedPass:
    """What composes steps from the tables of a GPU and framework; `blackwell` as
    `MoeRow.on_blackwell`.

    vLLM's table of B200 has MXFP4 experts with 16-bit activations only. The kernel with 8-bit ones
    is FlashInfer's, which SGLang calls too: its rows with 16-bit activations are those of vLLM to
    within a few per cent, so its others are taken.
    """
    profile = tables(systems, kept, system, backend)
    if not blackwell:
        return ComposedPass(profile, dtype, "graph")
    if backend == "vllm":
        theirs = [
            row for row in tables(systems, kept, system, "sglang").rows.values() if is_mxfp4(row)
        ]
        profile.rows = {key: row for key, row in profile.rows.items() if not is_mxfp4(row)}
        profile.add(theirs)
    return EightBitCache(profile, dtype, "graph")


def is_mxfp4(row: Measurement) -> bool:
    return row.kind == "experts" and row.sizes()["format"] == "mxfp4"


def tables(systems: Path, kept: Path | None, system: str, backend: str) -> Profile:
    """The rows of a GPU and framework that these models can need; imported once where they are
    kept."""
    folder = kept / f"{system}-{backend}" if kept else None
    if folder is not None and (folder / "profile.json").is_file():
        profile = Profile.load(folder)
    else:
        names = ("bfloat16", "float8_e4m3fn")
        profile = import_tables(
            load_device(DEVICES[system]),
            framework=backend,
            data=systems,
            dtypes=names,
            compact=False,
        )
        profile.rows = {key: row for key, row in profile.rows.items() if near(row)}
        if folder is not None:
            write_profile(profile, folder)
    profile.rows = {key: row for key, row in profile.rows.items() if near(row)}
    return profile


def host_costs(row: MoeRow) -> steps.HostCosts:
    """What the engine of the row's version adds to a step, as shipped."""
    engine = steps.ENGINE_OF.get(row.backend, row.backend)
    version = re.match(r"\d+(\.\d+)+", row.version)
    costs = steps.plain_costs(engine, version.group() if version else steps.VERSIONS[engine])
    return steps.HostCosts(costs.step_s.value, costs.sequence_s.value, 0.0, costs.source)


def predict(
    rows: Sequence[MoeRow], systems: Path, kept: Path | None
) -> list[tuple[MoeRow, steps.Terms, float]]:
    """Each row with its terms and its predicted seconds per token."""
    found = []
    for row in sorted(rows, key=lambda row: (row.system, row.backend)):
        terms = steps.server_terms(
            passes(systems, kept, row.system, row.backend, row.dtype, row.on_blackwell), row
        )
        sync_s = constants()["graph"]["fused_sync_s" if row.fuses else "sync_s"]
        found.append(
            (row, terms, terms.tpot_s(steps.Constants(sync_s, {row.backend: host_costs(row)})))
        )
    return found


def fitted_wait(found: Sequence[tuple[MoeRow, steps.Terms, float]]) -> float:
    """Seconds per fused all-reduce with the smallest mean relative error over its calibration rows;
    as shipped without any."""
    rows = [(row, terms) for row, terms, _ in found if row.calibrates and row.fuses]
    shipped = float(constants()["graph"]["fused_sync_s"])
    if len(rows) < 5:
        return shipped

    def error(sync_s: float) -> float:
        costs = [
            terms.tpot_s(steps.Constants(sync_s, {row.backend: host_costs(row)})) / row.tpot_s
            for row, terms in rows
        ]
        return statistics.fmean(abs(cost - 1) for cost in costs)

    return min((0.1e-6 * step for step in range(151)), key=error)


def end_to_end(group: str, systems: Path, kept: Path | None) -> dict[str, Any]:
    """Figures of a group as shipped and with the wait at fused all-reduces fitted to it; its rows;
    what was left out."""
    rows, left = read_group(systems / "silicon_sample.csv", group)
    found = predict(rows, systems, kept)
    shipped, wait_s = float(constants()["graph"]["fused_sync_s"]), fitted_wait(found)
    result = _figures([(row, seconds) for row, _, seconds in found if not row.calibrates])
    less = [
        (row, seconds + terms.waits * (wait_s - shipped) * row.fuses)
        for row, terms, seconds in found
        if not row.calibrates
    ]
    goal = GOALS.get(group)
    return {
        "goal": goal,
        "reached": None if goal is None else result["median_absolute_error"] <= goal,
        "figures": result,
        "fitted_wait_s": wait_s,
        "figures_with_that_wait": _figures(less),
        "left_out": dict(left),
        "calibration_rows": [row.id for row, _, _ in found if row.calibrates],
        "rows": [
            {
                "id": row.id,
                "tpot_s": row.tpot_s,
                "predicted_s": seconds,
                "decode_s": terms.decode_s,
                "prefill_s": terms.prefill_s,
                "waits": terms.waits,
                "fuses": row.fuses,
            }
            for row, terms, seconds in found
        ],
    }


def _figures(pairs: Sequence[tuple[MoeRow, float]]) -> dict[str, Any]:
    """Errors of predictions, of all rows and by what they were served with."""
    errors = [(row, seconds / row.tpot_s - 1) for row, seconds in pairs]
    sizes = [abs(error) for _, error in errors]
    by: dict[str, dict[str, list[float]]] = {"server": {}, "ranks": {}, "concurrency": {}}
    for row, error in errors:
        by["server"].setdefault(f"{row.entry} {row.system} {row.backend}", []).append(error)
        by["ranks"].setdefault(str(row.ranks), []).append(error)
        by["concurrency"].setdefault(str(row.concurrency), []).append(error)
    return {
        "rows": len(errors),
        "median_absolute_error": statistics.median(sizes),
        "bias": statistics.fmean(error for _, error in errors),
        "within_10_percent": statistics.fmean(size <= 0.10 for size in sizes),
        **{
            f"by_{name}": {
                key: [
                    round(statistics.fmean(found), 4),
                    round(statistics.median(map(abs, found)), 4),
                    len(found),
                ]
                for key, found in sorted(groups.items())
            }
            for name, groups in by.items()
        },
    }


# -- verification
# --------------------------------------------------------------------------------------------------

# tau / speed-up of EAGLE-3 at batch 8, the median over its data sets; gamma 3, 5, 7
SPECBUNDLE: Final = {
    "qwen3-30b-a3b": (1, (1.64, 1.84, 2.00)),
    "qwen3-235b-a22b": (8, (1.59, 1.78, 1.80)),
    "llama-3.1-8b": (1, (1.35, 1.49, 1.63)),
    "llama-3.1-70b": (4, (1.25, 1.32, 1.41)),
}
DFLASH_TARGET: Final = "qwen3-30b-a3b"  # Qwen3-Coder-30B-A3B has its dimensions
DENSE: Final = ("llama-3.1-8b", "llama-3.1-70b")


@dataclass(frozen=True)
class Cost:
    """A round over a plain step, published and predicted; `verify`: the verification alone over a
    plain step, predicted."""

    source: str
    target: str
    gpu: str
    batch: int
    gamma: int
    published: float
    predicted: float
    verify: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def cost(
    target: str, gpu: str, family: str, batch: int, gamma: int, ranks: int
) -> tuple[float, float]:
    """(round, verification) of a family's usual drafter over a plain step, SGLang on the profile
    that ships."""
    from archsearch.models.targets import resolve_drafter, resolve_target
    from archsearch.pipeline.latency import choose_latency
    from archsearch.workload import WorkloadRequest

    ref = resolve_target(target)
    drafter = resolve_drafter(family, ref).drafter
    asked = WorkloadRequest(
        gpu=gpu,
        batch_size=batch,
        context_len=1024,
        tensor_parallel=ranks,
        engine="sglang",
        mode="graph",
    )
    source, workload = choose_latency(asked, ref.architecture, drafter.rounds)
    model = source.latency
    plain = model.decode_s(ref.architecture, workload).value
    round_ = model.round(ref.architecture, drafter, workload, gamma)
    return (
        round_.round_s.value / plain,
        model.verify_s(ref.architecture, workload, gamma).value / plain,
    )


def verification(data: Path) -> dict[str, Any]:
    """Costs of rounds against the published ones."""
    found = []
    for target, (ranks, published) in SPECBUNDLE.items():
        for gamma, ratio in zip((3, 5, 7), published, strict=True):
            found.append(
                Cost(
                    "SpecBundle",
                    target,
                    "h200",
                    8,
                    gamma,
                    ratio,
                    *cost(target, "h200", "eagle3", 8, gamma, ranks),
                )
            )
    times: dict[int, list[float]] = {}
    with data.open(encoding="utf-8") as handle:
        for line in csv.DictReader(handle):
            if line["target"] == "Qwen3-Coder-30B-A3B" and line["method"] == "dflash":
                ratio = float(line["tau"]) * float(line["tok_s_without"]) / float(line["tok_s"])
                times.setdefault(int(line["batch"]), []).append(ratio)
    for batch, ratios in sorted(times.items()):
        costs = cost(DFLASH_TARGET, "b200", "dflash", batch, 15, 1)
        found.append(
            Cost("DFlash", DFLASH_TARGET, "b200", batch, 15, statistics.median(ratios), *costs)
        )
    moe = [abs(row.error) for row in found if row.target not in DENSE]
    return {
        "goal": GOALS["verification"],
        "reached": statistics.median(moe) <= GOALS["verification"],
        "median_absolute_error": statistics.median(moe),
        "bias": statistics.fmean(row.error for row in found if row.target not in DENSE),
        "rows": [{**vars(row), "error": row.error} for row in found],
    }


def text(result: dict[str, Any]) -> str:
    """What was found, a line a group."""
    lines = []
    for group, found in result.items():
        if group == "verification":
            lines.append(
                f"verification: median error {found['median_absolute_error']:.1%}, bias"
                f" {found['bias']:+.1%}"
            )
            for row in found["rows"]:
                where = (
                    f"{row['source']:10s} {row['target']:16s} {row['gpu']} batch {row['batch']:2d}"
                    f" gamma {row['gamma']:2d}"
                )
                told = (
                    f"published {row['published']:.2f}  predicted {row['predicted']:.2f}"
                    f" ({row['error']:+.0%}"
                )
                lines.append(f"  {where}  {told}; verification {row['verify']:.2f})")
            continue
        figures = found["figures"]
        errors = f"median error {figures['median_absolute_error']:.1%}, bias {figures['bias']:+.1%}"
        lines.append(
            f"{group}: {figures['rows']} rows, TPOT {errors}, within 10 %"
            f" {figures['within_10_percent']:.0%}"
        )
        less = found["figures_with_that_wait"]
        lines.append(
            f"  with {1e6 * found['fitted_wait_s']:.1f} us a wait where norms are fused, as"
            f" calibration rows say: median error {less['median_absolute_error']:.1%}, bias"
            f" {less['bias']:+.1%}"
        )
        for by in ("by_server", "by_ranks", "by_concurrency"):
            lines += [
                f"  {by} {key:44s} {b:+6.1%} {m:5.1%} {n}" for key, (b, m, n) in figures[by].items()
            ]
        lines += [f"  left out: {count:4d} {reason}" for reason, count in found["left_out"].items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", type=Path, help="the package's folder systems")
    parser.add_argument("--profiles", type=Path, help="keep imported tables there")
    parser.add_argument(
        "--only", nargs="+", choices=[*GROUPS, "verification"], default=[*GROUPS, "verification"]
    )
    parser.add_argument("--output", type=Path, help="folder for a JSON file a group")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {}
    for group in options.only:
        if group == "verification":
            result[group] = verification(Path(__file__).parent / "data" / "engine_rounds.csv")
        else:
            result[group] = end_to_end(
                group, options.systems or steps.package_systems(), options.profiles
            )
        print(text({group: result[group]}), flush=True)
        if options.output:
            options.output.mkdir(parents=True, exist_ok=True)
            (options.output / f"{group}.json").write_text(
                json.dumps(result[group], indent=1) + "\n", encoding="utf-8"
            )
    return result


if __name__ == "__main__":
    main()
