"""Hold predicted rounds against rounds that others published: vLLM, SGLang, TensorRT-LLM on GPUs,
each row with its source.

    python benchmarks/engine_rounds.py  # and each source left out once
    python benchmarks/engine_rounds.py --json --output benchmarks/results/2026-11-22-engine-rounds
    python benchmarks/engine_rounds.py --fit  # constants of engine_rounds.yaml

`data/engine_rounds.csv` holds the rows. A row is priced as a user would price it: shape, device,
version class, batch, gamma; what its source says of tau is taken only for the speed-up. What a
round adds is fitted to the other sources (`left one source out`): wide beliefs first (BELIEFS, from
reading the engines' code), then least squares of ln(predicted / measured). `before` is what
archsearch 0.2.0 said (kernels and one host term for each step), on the kernels of today. Rows that
are no rounds of a dense model on a GPU whose kernels are known are left out by name.

Median gaps between chunks are those of a median step. Under load that step reads prompts too
(PROMPTS): in a closed loop of `batch` requests, batch x tau / answer prompts arrive while a round
runs, at random, and the median of that many is put into it.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import Part
from archsearch.architecture.published_drafters import published_for
from archsearch.drafters.drafter import RoundRows
from archsearch.drafters.heads import FeatureDrafter
from archsearch.drafters.registry import family
from archsearch.engine_rounds import MACHINE_STD, RoundCosts, plain_costs, round_costs
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.latency.rounds import Passes, round_time
from archsearch.models.targets import resolve_target
from archsearch.pipeline.latency import choose_latency
from archsearch.workload import WorkloadRequest

DATA: Final = Path(__file__).parent / "data" / "engine_rounds.csv"
# share of the requests sent that must have been in a step (Little's law), or the batch was another
LEAST_RUNNING: Final = 0.8
CONTEXT: Final = {
    "random 1024/1024": 1536,
    "random 1000": 1050,
}  # tokens in the cache in mid-answer, where the data set says so
USUAL_CONTEXT: Final = 400  # assumed of chat and code prompts: some hundreds in, some hundreds out
# std of ln(predicted / measured) of a row beyond what is fitted: kernels, another machine
SHARE: Final = 0.05
# the same where a round was got from tokens/s, which may have prefill inside (assumed)
LOOSE_SHARE: Final = 0.12

MODELS: Final = {
    "Qwen3-32B": "qwen3-32b",
    "Qwen3-32B-FP8": "qwen3-32b",
    "Qwen3-1.7B": "qwen3-1.7b",
    "Qwen3-4B": "qwen3-4b",
    "Qwen3-8B": "qwen3-8b",
    "Llama-3.3-70B-Instruct": "llama-3.3-70b",
    "Llama-3.1-70B-Instruct": "llama-3.1-70b",
    "Llama-3.2-1B": "llama-3.2-1b",
    "Llama-3.2-1B-Instruct": "llama-3.2-1b",
    "Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "Llama-3-8B-Instruct": "llama-3-8b",
    "Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b",
}
# as plain decoders: their extra norms and windows are left out (config.json of google/gemma-3-*)
GEMMA: Final = {
    "gemma-3-1b-it": Architecture(1152, 6912, 26, 4, 1, 256, 262144, tie_word_embeddings=True),
    "gemma-3-270m-it": Architecture(640, 2048, 18, 4, 1, 256, 262144, tie_word_embeddings=True),
}
# benchmarks/vllm_rounds.py
WIDE: Final = {"wide 3x2048": Architecture(2048, 5632, 3, 16, 16, 128, 128256)}
DEVICES: Final = {
    "H100-SXM-80GB": "h100-sxm5-80gb",
    "H100": "h100-sxm5-80gb",
    "H100 (form not said)": "h100-sxm5-80gb",
    "H100 (probably)": "h100-sxm5-80gb",
    "H200": "h200-sxm-141gb",
    "B200": "b200-sxm",
    "4x H100 or H200 (not said)": "h100-sxm5-80gb",
    "H100-94GB (LRZ; about 2 TB/s reached)": "h100-sxm5-94gb",
    "2x H100-80GB without NVLink by its all-reduce cost": "h100-pcie-80gb",
}
CLASSES: Final = {  # (engine, kind of drafter, its graphs, scheduling) as the source says -> class
    ("vLLM", "draft_model", "piecewise", "sync"): "vllm-piecewise-sync",
    ("vLLM", "draft_model", "compiled, no graph", "sync"): "vllm-none-sync",
    ("vLLM", "eagle3", "piecewise", "async"): "vllm-head-piecewise-async",
    ("vLLM", "eagle3", "piecewise", "sync, padded"): "vllm-head-piecewise-sync",
    ("vLLM", "eagle3", "piecewise", "async, padded"): "vllm-head-piecewise-async",
    ("vLLM", "eagle3", "full graph, draft loop fused", "async"): "vllm-head-full",
    (
        "vLLM",
        "eagle",
        "piecewise",
        "sync, unpadded (waits for the tokens before drafting)",
    ): "vllm-head-serial",
    (
        "vLLM",
        "eagle3",
        "piecewise",
        "sync, unpadded (waits for the tokens before drafting)",
    ): "vllm-head-serial",
    ("vLLM", "eagle", "none", "sync, unpadded"): "vllm-head-serial",
    ("SGLang", "standalone", "full graph", "sync (spec v1)"): "sglang-sync",
    ("SGLang", "dflash", "full graph", "overlap"): "sglang-overlap",
}
# of vLLM, for how ranks wait at all-reduces: none of the rows fuses them with norms
SERVED: Final = "0.15.0"
BENCH: Final = "github tomasruizt/vllm-scripts results/full-bench-data.parquet"
# mean tokens of a prompt and of an answer, from the logs of that source (InstructCoder, 256 tokens
# at most)
PROMPTS: Final = {
    (BENCH, "Qwen3-32B"): (148, 200),
    (BENCH, "Llama-3.3-70B-Instruct"): (174, 146),
}
VERSIONS: Final = {
    "vllm-head-serial": ("vllm", "0.10.0"),
    "vllm": ("vllm", "0.15.0"),
    "sglang": ("sglang", "0.5.9"),
}


@dataclass(frozen=True)
class Row:
    """One published round. Seconds; `tau` and `plain_s` (the target's own step) None where the
    source does not tell."""

    id: str
    source: str
    klass: str
    device: str
    ranks: int
    target: str
    draft: str
    kind: str
    batch: int
    gamma: int
    context: int
    round_s: float
    tau: float | None
    plain_s: float | None
    loose: bool = False  # got from tokens/s


def read_rows(path: Path = DATA) -> tuple[list[Row], Counter[str]]:
    """Rows that can be priced, and how many are left out, by reason."""
    rows, left = [], Counter[str]()
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            reason = left_out(line)
            if reason:
                left[reason] += 1
                continue
            rows.append(
                Row(
                    line["id"],
                    line["source"].partition(" @")[0],
                    CLASSES[line["engine"], line["method"], line["draft_mode"], line["scheduling"]],
                    DEVICES[line["gpu"]],
                    int(line["tp"]),
                    line["target"],
                    line["draft"],
                    line["method"],
                    int(line["batch"]),
                    int(line["gamma"]),
                    CONTEXT.get(line["dataset"], USUAL_CONTEXT),
                    float(line["round_ms"]) / 1e3,
                    float(line["tau"]) if line["tau"] else None,
                    plain_step(line),
                    "tok_s" in line["round_from"],
                )
            )
    return rows, left


def plain_step(line: Mapping[str, str]) -> float | None:
    """The target's own step: its time per token alone; with several requests in flight only where
    that was read off one step."""
    if line["tpot_ms_without"]:
        return float(line["tpot_ms_without"]) / 1e3
    if line["tok_s_without"]:
        return int(line["batch"]) / float(line["tok_s_without"])
    return None


def left_out(line: Mapping[str, str]) -> str:
    """Why a row is no round that can be priced; "" where it is one."""
    if line["method"] in ("none", ""):
        return "a plain step, no round"
    if not line["round_ms"] or not line["gamma"]:
        return "tau or gamma not told, so no round"
    if any(word in line["target"] for word in ("A3B", "A4B", "oss", "GLM")):
        return "mixture of experts"
    if "Qwen3.5" in line["target"]:
        return "hybrid attention (gated delta net)"
    if "tree" in line["notes"]:
        return "tree drafting"
    if line["gpu"] not in DEVICES:
        return f"no kernels known of {line['gpu']}"
    if "FP8" in line["target"]:
        return "fp8 weights on a GPU whose shipped table has none"
    if (line["engine"], line["method"], line["draft_mode"], line["scheduling"]) not in CLASSES:
        return "how the engine ran is not told"
    if "* batch / tok_s" in line["round_from"] and int(line["batch"]) > 1:
        return "tokens/s of several requests at once: prefill is inside, and tau was told for one"
    if (
        line["tok_s"]
        and line["tau"]
        and "request rate" not in line["notes"]
        and "ITL" in line["round_from"]
    ):
        running = float(line["tok_s"]) * float(line["round_ms"]) / 1e3 / float(line["tau"])
        if running < LEAST_RUNNING * int(line["batch"]):
            return "fewer requests in a step than were sent (memory, or prefill in between)"
    return ""


# --- pricing
# --------------------------------------------------------------------------------------------------


@cache
def latency(device: str) -> Any:
    """The latency model that a user of the device gets: its own kernels, or a relative's carried
    over."""
    asked = WorkloadRequest(
        gpu=device, dtype="bfloat16", tensor_parallel=1, engine="vllm", engine_version=SERVED
    )
    return choose_latency(asked, resolve_target("llama-3.2-1b").architecture)[0].latency


def architecture(name: str) -> Architecture:
    known = GEMMA | WIDE
    return known[name] if name in known else resolve_target(MODELS[name]).architecture


def prompts_of(row: Row, tau: float | None) -> list[Part]:
    """The prompts that the median step reads beside its requests: the median of a Poisson number
    (see PROMPTS)."""
    if (row.source, row.target) not in PROMPTS or not tau:
        return []
    tokens, answer = PROMPTS[row.source, row.target]
    mean, count = row.batch * tau / answer, 0
    chance = below = math.exp(-mean)
    while below < 0.5:
        count += 1
        chance *= mean / count
        below += chance
    return [Part(count, tokens, 0, 1)] if count else []


def step_s(row: Row, arch: Architecture, part: Part, prompts: Sequence[Part]) -> Estimate:
    """A pass of `arch` over the row's requests, and over `prompts` in the same step."""
    model = latency(row.device)
    if prompts:
        found: Estimate = model.composed_.step_s(arch, [part, *prompts], row.ranks)
    else:
        found = model.pass_s(arch, (part, False), row.ranks)
    return found


def published_head(target: str, kind: str) -> FeatureDrafter:
    """The published head of a target of the catalogue, or the usual one where none is known."""
    entry = catalogue.load(target)
    rows = (row for row in published_for(entry.name, entry.architecture) if row.family == kind)
    row = next(rows, None)
    shape, made = entry.architecture, family(kind)
    assert issubclass(made, FeatureDrafter)
    return made.published(row, shape) if row is not None else made.usual(shape)


def passes_of(row: Row, first_tokens: int, prompts: bool = True) -> Passes:
    """The GPU's passes of a row's round, with nothing that an engine adds; a head's own reading of
    prompts is left out."""
    model, target = latency(row.device), architecture(row.target)
    read = prompts_of(row, row.tau) if prompts else []
    verify = step_s(row, target, Part(row.batch, row.gamma + 1, row.context), read)
    if row.kind in ("draft_model", "standalone"):
        draft = architecture(row.draft)
        first = step_s(row, draft, Part(row.batch, first_tokens, row.context, 1), read)
        later = step_s(row, draft, Part(row.batch, 1, row.context, 1), [])
        layers = draft.num_hidden_layers
        reduces = 2 * layers + 1 if row.ranks > 1 else 0
        return Passes(
            verify, first, later, row.gamma, row.batch, layers, target.num_hidden_layers, reduces
        )
    head = published_head(MODELS[row.target], row.kind)
    if "full head" in row.draft:
        head = replace(head, architecture=head.architecture.replace(draft_vocab_size=None))
    rows = RoundRows(row.batch, row.context, row.gamma, row.ranks)
    opening = head.first_pass(rows)
    first = model.ops_s(opening)
    layers = head.architecture.num_hidden_layers
    if row.kind == "dflash":  # one pass writes the block
        return Passes(
            verify,
            first,
            first,
            1,
            row.batch,
            layers,
            target.num_hidden_layers,
            opening.all_reduces(),
        )
    step = head.plan(replace(rows, gamma=2)).step
    assert step is not None
    later = model.ops_s(step)
    sizes = (row.gamma, row.batch, layers, target.num_hidden_layers, opening.all_reduces())
    return Passes(
        verify,
        first,
        later,
        *sizes,
        scattered=row.klass.startswith("vllm") and head.architecture.trimmed,
    )


def plain_s(row: Row) -> float:
    """The target's own step, as predicted."""
    step = step_s(
        row, architecture(row.target), Part(row.batch, 1, row.context), prompts_of(row, 1.0)
    ).value
    return step + plain_costs(*version_of(row.klass)).at(row.batch).value


def version_of(klass: str) -> tuple[str, str]:
    return VERSIONS.get(klass) or VERSIONS[klass.partition("-")[0]]


def before_s(row: Row) -> tuple[float, float]:
    """(round, plain step) as 0.2.0 priced them: kernels, the draft's first pass of one token, the
    host's time once a step."""
    passes = passes_of(row, 1, prompts=False)
    engine = row.klass.partition("-")[0]
    host = (1.0e-4 + 3.4e-5 * row.batch) if engine == "vllm" else (1.0e-4 + 1.7e-5 * row.batch)
    part = Part(row.batch, 1, row.context)
    step = latency(row.device).pass_s(architecture(row.target), (part, False), row.ranks).value
    return passes.verify_s.value + passes.draft_s.value + host, step + host


# --- fitting
# --------------------------------------------------------------------------------------------------

# The torch profile that the host's times were read off makes it slower: a layer without graphs took
# 16.5 ms / 28 there, 0.27 to 0.40 ms by the rounds of runs that were not profiled.
INFLATED: Final = 1.6
BELIEFS: Final[dict[str, tuple[float, float]]] = {
    # ms, before any row: wide, from what the engines' code does in a round (docs/engine-rounds.md)
    "sync": (0.8, 0.6),
    "async": (0.5, 0.4),
    "token": (0.05, 0.05),
    "gap": (0.0045, 0.002),
    "sequence": (0.005, 0.010),
    "host_round": (2.0 / INFLATED, 0.6),
    # the profile's 0.40 / INFLATED; wider since deep and shallow drafts were seen to disagree
    "host_token": (0.40 / INFLATED, 0.5),
    "host_layer": (0.35, 0.15),
    "bare_round": (0.8, 0.6),
    "bare_sequence": (0.005, 0.020),
    "serial_round": (1.0, 0.6),
    "serial_token": (0.60, 0.30),
    "serial_layer": (0.30, 0.15),
    "sglang_sync": (2.0, 1.2),
    "sglang_overlap": (0.75, 0.4),
    "full_round": (0.4, 0.3),
}
HOST: Final = ("serial_token", "serial_layer")  # the host's too
PIECEWISE: Final = 4.1
"""Launches of a draft pass without graphs / with piecewise ones, by the torch profile of Qwen3-1.7B
(16.5 and 4.0 ms of host)."""


def constants_for(klass: str, ms: Mapping[str, float]) -> RoundCosts:
    """The class with fitted constants in place of shipped ones."""

    def s(name: str, factor: float = 1.0) -> Estimate:
        return Estimate(ms[name] * factor * 1e-3, 0.0, "published")

    shipped = round_costs(klass)
    if klass.startswith("vllm-head-serial"):
        return replace(
            shipped,
            round_s=s("serial_round"),
            host_token_s=s("serial_token"),
            host_layer_s=s("serial_layer"),
        )
    if klass == "vllm-head-full":
        return replace(shipped, round_s=s("full_round"))
    if klass.startswith("sglang"):
        return replace(
            shipped, round_s=s("sglang_overlap" if klass.endswith("overlap") else "sglang_sync")
        )
    asynchronous = klass.endswith("-async")
    if "none" in klass:
        return replace(
            shipped,
            round_s=s("bare_round"),
            token_s=s("token"),
            gap_s=s("gap"),
            sequence_s=s("bare_sequence"),
            host_round_s=s("host_round"),
            host_token_s=s("host_token"),
            host_layer_s=s("host_layer"),
        )
    return replace(
        shipped,
        round_s=s("async" if asynchronous else "sync"),
        token_s=s("token", 0.5 if asynchronous else 1.0),
        gap_s=s("gap"),
        sequence_s=s("sequence"),
        host_layer_s=s("host_layer", 1.0 / PIECEWISE),
    )


def fit(rows: Sequence[tuple[Row, Passes]]) -> dict[str, tuple[float, float]]:
    """Constants (ms, std) that explain the rows best, with BELIEFS as prior; rows of one source
    count together no more than 12.

    Kernels are taken at the pace of the machine's own plain step where that is known: what a
    machine's memory does is no constant of an engine. Each source has a host of its own speed,
    MACHINE_STD about the constants'.
    """
    from scipy.optimize import least_squares

    rows = [
        (row, scaled(passes, row.plain_s / plain_s(row)) if row.plain_s else passes)
        for row, passes in rows
    ]
    names, sources = list(BELIEFS), sorted({row.source for row, _ in rows})
    mean = np.array([BELIEFS[name][0] for name in names] + [0.0] * len(sources))
    std = np.array([BELIEFS[name][1] for name in names] + [MACHINE_STD] * len(sources))
    counts = Counter((row.source, row.klass) for row, _ in rows)
    shares = np.array([LOOSE_SHARE if row.loose else SHARE for row, _ in rows])
    weights = (
        np.array([math.sqrt(min(1.0, 12.0 / counts[row.source, row.klass])) for row, _ in rows])
        / shares
    )
    measured = np.array([math.log(row.round_s) for row, _ in rows])

    def residuals(values: np.ndarray) -> np.ndarray:
        ms = dict(zip(names, values.tolist(), strict=False))
        paces = dict(zip(sources, np.exp(values[len(names) :]).tolist(), strict=True))
        costs = {
            (row.source, row.klass): constants_for(row.klass, at_pace(ms, paces[row.source]))
            for row, _ in rows
        }
        told = np.array(
            [
                math.log(round_time(costs[row.source, row.klass], passes).round_s.value)
                for row, passes in rows
            ]
        )
        off = (told - measured) * weights if len(rows) else np.zeros(0)
        return np.concatenate([off, (values - mean) / std])

    bounds = [0.0] * len(names) + [-2.0] * len(sources), np.inf
    found = least_squares(residuals, mean, bounds=bounds, loss="soft_l1", x_scale=std)
    errors = np.sqrt(np.diag(np.linalg.pinv(found.jac.T @ found.jac)))
    return {
        name: (float(value), float(error))
        for name, value, error in zip(names, found.x, errors, strict=False)
    }


def at_pace(ms: Mapping[str, float], pace: float) -> dict[str, float]:
    """The constants on a host that takes `pace` times as long."""
    return {
        name: value * pace if name.startswith("host") or name in HOST else value
        for name, value in ms.items()
    }


# --- figures
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """A row beside what was said of it. `scaled_s`: with the kernels at the pace of the machine's
    own plain step."""

    row: Row
    round_s: float
    scaled_s: float | None
    before_s: float
    bound: str
    speedup: float | None
    speedup_before: float | None

    @property
    def measured_speedup(self) -> float | None:
        return (
            self.row.tau * self.row.plain_s / self.row.round_s
            if self.row.tau and self.row.plain_s
            else None
        )


def scaled(passes: Passes, factor: float) -> Passes:
    def times(estimate: Estimate) -> Estimate:
        return Estimate(estimate.value * factor, estimate.std * factor, estimate.source)

    return replace(
        passes,
        verify_s=times(passes.verify_s),
        first_s=times(passes.first_s),
        later_s=times(passes.later_s),
    )


def predict(row: Row, passes: Passes, costs: RoundCosts) -> Predicted:
    time = round_time(costs, passes)
    step = plain_s(row)
    at_pace = (
        round_time(costs, scaled(passes, row.plain_s / step)).round_s.value if row.plain_s else None
    )
    before, before_step = before_s(row)
    gain = row.tau * step / time.round_s.value if row.tau and row.plain_s else None
    gain_before = row.tau * before_step / before if row.tau and row.plain_s else None
    return Predicted(row, time.round_s.value, at_pace, before, str(time.bound), gain, gain_before)


def errors(pairs: Iterable[tuple[float | None, float | None]]) -> dict[str, float] | None:
    """Figures of |predicted / measured - 1|, and the bias."""
    off = [told / seen - 1.0 for told, seen in pairs if told is not None and seen is not None]
    if not off:
        return None
    sizes = sorted(abs(value) for value in off)
    return {
        "rows": len(off),
        "median": statistics.median(sizes),
        "p85": sizes[min(len(sizes) - 1, math.ceil(0.85 * len(sizes)) - 1)],
        "within_20_percent": sum(size <= 0.20 for size in sizes) / len(sizes),
        "bias": statistics.median(off),
    }


def median_of_sources(found: Sequence[Predicted]) -> float:
    """The median over sources of each one's median error: one source brings most rows."""
    sources: dict[str, list[float]] = defaultdict(list)
    for item in found:
        sources[item.row.source].append(abs(item.round_s / item.row.round_s - 1.0))
    return statistics.median(statistics.median(sizes) for sizes in sources.values())


def figures(found: Sequence[Predicted]) -> dict[str, Any]:
    return {
        "round": errors((item.round_s, item.row.round_s) for item in found),
        "round_at_its_pace": errors((item.scaled_s, item.row.round_s) for item in found),
        "round_before": errors((item.before_s, item.row.round_s) for item in found),
        "speedup": errors((item.speedup, item.measured_speedup) for item in found),
        "speedup_before": errors((item.speedup_before, item.measured_speedup) for item in found),
    }


def grouped(found: Sequence[Predicted]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Predicted]] = defaultdict(list)
    for item in found:
        groups[f"source {item.row.source}"].append(item)
        groups[f"class {item.row.klass}"].append(item)
        batch = item.row.batch
        groups[
            "batch 1" if batch == 1 else "batch 2 to 16" if batch <= 16 else "batch 32 and more"
        ].append(item)
        groups[f"bound by the {item.bound}"].append(item)
    return {name: figures(items) for name, items in sorted(groups.items())}


def run(path: Path = DATA) -> dict[str, Any]:
    rows, left = read_rows(path)
    priced = []
    for row in rows:
        try:
            priced.append(
                (row, passes_of(row, round_costs(row.klass).first_pass_tokens(row.gamma)))
            )
        except ArchsearchError as error:
            left[str(error)] += 1
    held_out = []
    for source in sorted({row.source for row, _ in priced}):
        ms = {
            name: value
            for name, (value, _) in fit(
                [(row, p) for row, p in priced if row.source != source]
            ).items()
        }
        held_out += [
            predict(row, p, constants_for(row.klass, ms))
            for row, p in priced
            if row.source == source
        ]
    shipped = [predict(row, p, round_costs(row.klass)) for row, p in priced]
    return {
        "rows": len(priced),
        "left_out": dict(left),
        "left_one_source_out": figures(held_out),
        "median_of_sources": median_of_sources(held_out),
        "by_group": grouped(held_out),
        "shipped": figures(shipped),
        "fitted_to_all": {name: [round(v, 4), round(e, 4)] for name, (v, e) in fit(priced).items()},
        "predictions": [
            {
                **asdict(item.row),
                "predicted_s": item.round_s,
                "at_its_pace_s": item.scaled_s,
                "before_s": item.before_s,
                "bound": item.bound,
                "speedup": item.speedup,
                "measured_speedup": item.measured_speedup,
                "speedup_before": item.speedup_before,
            }
            for item in held_out
        ],
    }


def text(result: Mapping[str, Any]) -> str:
    def line(name: str, found: Mapping[str, Any] | None) -> str:
        if not found:
            return f"{name:58s} -"
        return (
            f"{name:58s} {found['rows']:4d} {found['median']:7.1%} {found['p85']:7.1%}"
            f" {found['within_20_percent']:7.0%} {found['bias']:+7.1%}"
        )

    head = f"{'':58s} rows  median     85 % in 20 %    bias"
    lines = [f"{result['rows']} rows; left out:"]
    lines += [f"  {count:4d}  {reason}" for reason, count in result["left_out"].items()]
    for title in ("left_one_source_out", "shipped"):
        lines += ["", title.replace("_", " "), head]
        lines += [
            line(f"  {name.replace('_', ' ')}", found) for name, found in result[title].items()
        ]
    sources = sum(name.startswith("source") for name in result["by_group"])
    lines += [
        "",
        f"the median over {sources} sources of their medians: {result['median_of_sources']:.1%}",
    ]
    lines += ["", "left one source out, by group: round (0.2.0's beside it)", head]
    for name, group in result["by_group"].items():
        lines += [
            line(name[:58], group["round"]),
            line("      at its machine's pace", group["round_at_its_pace"]),
            line("      before", group["round_before"]),
            line("      speed-up", group["speedup"]),
        ]
    lines += ["", "fitted to all rows, ms ± std:"]
    lines += [
        f"  {name:16s} {value:7.3f} ± {error:.3f}"
        for name, (value, error) in result["fitted_to_all"].items()
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument(
        "--fit", action="store_true", help="print the constants fitted to all rows only"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for engine_rounds.json")
    options = parser.parse_args(arguments)
    result = run(options.data)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "engine_rounds.json").write_text(
            json.dumps(result, indent=1), encoding="utf-8"
        )
    if options.fit:
        print(json.dumps(result["fitted_to_all"], indent=1))
    elif options.json:
        print(json.dumps({name: value for name, value in result.items() if name != "predictions"}))
    else:
        print(text(result))


if __name__ == "__main__":
    main()
