"""Hold predictions against published runs that nothing here was made for.

    python benchmarks/strangers.py                                                # the table
    python benchmarks/strangers.py --json --output benchmarks/results/2026-11-27-strangers

Each row is one published number of an engine of one version on one GPU: a plain step, the target's
pass over gamma + 1 tokens, a whole round, the speed-up at the published acceptance (where tau is
published, alpha is the one that gives it), `gain`: the speed-up when nothing is given, as a user
asks before a drafter was measured, or `served`: tokens a second with prompts inside, over those
without a draft, at the published tau where there is one. `used` names what of archsearch rests on
the row (then it is no test of it); rows without were fitted to by nothing. `trend` rows count for
the order only: their levels are not comparable (what was asked is not known well enough).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from archsearch.acceptance.estimator import GivenAcceptance
from archsearch.drafters.heads import ChainHead
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.models.targets import resolve_drafter, resolve_target
from archsearch.pipeline.estimate import EstimateRequest, estimate_drafts, tree_of
from archsearch.pipeline.latency import choose_latency
from archsearch.pipeline.serving import with_engine
from archsearch.search.objective import Scorer
from archsearch.speedup import alpha_from_tau, tau
from archsearch.traffic.mix import mix_of
from archsearch.workload import WorkloadRequest

Metric = Literal["step", "verify", "round", "speedup", "gain", "served"]
A100: Final = "github adfusco/spec-dec-roofline, CUDA events of every step"
COLAB: Final = "github Resh19S/sgt-qat-draft (Colab; version not verified by its author)"
FP8: Final = "Llama-3.1-8B-FP8 + EAGLE-3 on H200, median steps (strangers' round, 2.2k context)"
SPECFORGE: Final = "github sgl-project/SpecForge issues/339"
PULL_V2: Final = "github sgl-project/sglang pull/20547 (prefill inside)"
REQUESTS: Final = "REQUEST_STD of traffic/steady.py was chosen with them in sight"
TWO_MODELS: Final = "engine_rounds.yaml: the class of heads of 2025 was chosen with it in sight"
PARD: Final = "github AMD-AGI/PARD README (vLLM 0.16.0; draft lengths: the best, not said)"
AUDIT: Final = (
    "github pramodjella/speculative-decoding-draft-length-audit results (vLLM 0.23, Modal)"
)
OWN_HEAD: Final = "github dcstang/eagle3-spec-dec results/20260701 (a head of 3,000 texts)"
A800: Final = "github sgl-project/sglang issues/29244 (one A800, logs)"
TENGYUNW: Final = "github SafeAILab/EAGLE issues/251 (one H200, SGLang of 2025-07)"
AMD: Final = "github ROCm/rocm-blogs mtp/README.md (DeepSeek-V3 on MI300X, whole requests)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One set-up. `gpu`: its name, or a profile's folder; `tau`: published tokens a round; `host`:
    as `--host`."""

    source: str
    target: str
    draft: str
    gpu: str
    engine: str
    version: str
    gamma: int
    batch: int
    context: int
    tau: float | None = None
    ranks: int = 1
    dtype: str = "bfloat16"
    host: str | None = None
    domain: str = "chat"
    tree: str | None = None  # as `--tree`; gamma is its steps then
    answer: int = 0  # of `served`: tokens out; the prompt has `context` then
    refill: bool = True  # as a workload's
    temperature: float = 0.0
    options: tuple[str, ...] = ()  # as `--engine-option`
    skew: float | None = None  # of routing


@dataclass(frozen=True, slots=True)
class Row:
    """A published number (ms, or a ratio) of a case. `used`: what rests on it."""

    case: Case
    metric: Metric
    published: float
    used: str = ""
    trend: bool = False
    group: str = "decode"
    note: str = ""  # what the set-up leaves open


def _a100(batch: int) -> Case:
    return Case(
        source=A100,
        target="llama-3.1-8b",
        draft="eagle3",
        gpu="a100-40gb",
        engine="vllm",
        version="0.23.0",
        gamma=3,
        batch=batch,
        context=1095,
        tau=tau(0.667, 3),
    )


def _fp8(batch: int, gamma: int = 5) -> Case:
    return Case(
        source=FP8,
        target="llama-3.1-8b",
        draft="eagle3",
        gpu="h200",
        engine="vllm",
        version="0.23.0",
        gamma=gamma,
        batch=batch,
        context=2200,
        dtype="float8_e4m3fn",
    )


def _qwen(gpu: str, batch: int, version: str, dtype: str = "bfloat16") -> Case:
    return Case(
        source="target alone (course, blogs)",
        target="qwen3-8b",
        draft="eagle3",
        gpu=gpu,
        engine="vllm",
        version=version,
        gamma=3,
        batch=batch,
        context=400,
        dtype=dtype,
    )


GPUSTACK: Final = "github gpustack, docs/performance-lab/qwen3-8b/h100-latency.md (ShareGPT)"
# (tree, batch): median gap between chunks in ms, tokens a round (mean gap over mean time per token)
GPUSTACK_TREES: Final = {
    ("1,2,3", 4): (7.62, 2.01),
    ("4,2,16", 4): (8.86, 2.47),
    ("4,4,16", 4): (9.86, 2.95),
    ("4,8,16", 4): (12.20, 3.26),
    ("8,4,16", 4): (10.14, 3.10),
    ("4,4,32", 4): (10.67, 3.36),
    ("4,4,8", 4): (9.78, 2.89),
    ("4,4,16", 1): (8.95, 3.27),
    ("4,4,16", 2): (9.57, 3.19),
    ("4,4,16", 8): (10.94, 2.71),
}


def _gpustack() -> Iterator[Row]:
    """Qwen3-8B on one H100: plain steps of three engines, rounds of SGLang in fp8."""
    plain = replace(_qwen("h100", 1, "0.11.0"), source=GPUSTACK, context=350)
    for batch, gap in ((1, 7.23), (2, 7.28), (4, 7.37), (8, 7.63)):
        yield Row(replace(plain, batch=batch), "step", gap)
    case = replace(plain, engine="sglang", version="0.5.3", batch=4)
    yield Row(case, "step", 7.04)
    yield Row(replace(case, engine="tensorrt-llm", version="1.2.0"), "step", 7.41)
    case = replace(case, dtype="float8_e4m3fn")
    yield Row(case, "step", 5.39)
    for (tree, batch), (gap, tokens) in GPUSTACK_TREES.items():
        steps = int(tree.split(",")[1])
        asked = replace(case, batch=batch, gamma=steps, tau=tokens, tree=tree)
        yield Row(asked, "round", gap, "sglang-sync, tree_step", group="SGLang")
        if batch == 4:
            gain = tokens * 5.39 / gap
            yield Row(asked, "speedup", gain, "sglang-sync, tree_step", group="SGLang")
    asked = replace(case, gamma=4, tree="4,4,16")
    yield Row(asked, "gain", 5.65 / 3.75, group="nothing given")  # of Tengyunw's head
    yield Row(asked, "gain", 5.65 / 4.45, group="nothing given")  # of AngelSlim's


TT: Final = (
    "github tenstorrent/tt-inference-server pull/3699 (A100; vLLM of 2026-05; gamma inferred)"
)
TT_CASE: Final = Case(
    source=TT,
    target="llama-3.1-8b",
    draft="llama-3.2-1b",
    gpu="a100-40gb",
    engine="vllm",
    version="0.21.0",
    gamma=5,
    batch=1,
    context=330,
    tau=4.22,
    domain="mixed",
)


def _tree_docs() -> Iterator[Row]:
    """EAGLE-3 heads of Llama in SGLang of 2025, as its documentation and pull requests print."""
    case = replace(LLAMA_SGLANG, gamma=8, tree="8,8,64")
    known = "sglang-sync, tree_step"
    for steps, rate, tokens in ((8, 378.57, 5.39), (5, 361.70, 4.68)):
        asked = replace(case, gamma=steps, tree=f"8,{steps},64", version="0.4.4", tau=tokens)
        yield Row(asked, "round", 1e3 * tokens / rate, known, group="SGLang")
        yield Row(asked, "speedup", rate / 158, known, group="SGLang")
    yield Row(case, "gain", 373 / 158, HEADS, group="nothing given")
    large = replace(case, target="llama-3.3-70b", ranks=8)
    yield Row(large, "gain", 234.5 / 88.6, HEADS, group="nothing given")


def _specforge(batch: int) -> Case:
    return Case(
        source=SPECFORGE,
        target="qwen3-30b-a3b",
        draft="eagle3",
        gpu="h100",
        engine="sglang",
        version="0.5.5",
        gamma=3,
        batch=batch,
        context=500,
        tau=1.86,
        ranks=2,
    )


# (batch, tree): tokens/s, tokens a round; of whole benchmarks, so with one request in flight only
SPECFORGE_TREES: Final = {
    "3,3,4": (207.62, 1.99),
    "3,3,8": (172.99, 2.20),
    "4,6,12": (171.54, 2.42),
    "4,7,16": (191.90, 2.52),
    "8,8,60": (177.50, 3.20),
}
ANGELSLIM_163: Final = "github Tencent/AngelSlim issues/163 (SGLang of 2025-12, four H100)"
TP4_TREES: Final = {
    "3,3,4": (170.35, 2.017),
    "2,3,8": (185.28, 2.216),
    "4,4,16": (185.64, 2.542),
    "10,7,64": (193.31, 3.034),
}


def _mixture_trees() -> Iterator[Row]:
    """Qwen3-30B-A3B + EAGLE-3 in SGLang of 2025-12, on two and on four H100."""
    four = replace(_specforge(1), source=ANGELSLIM_163, ranks=4)
    yield Row(four, "step", 1e3 / 218.89, group="SGLang")
    for case, alone, trees in (
        (_specforge(1), 222.47, SPECFORGE_TREES),
        (four, 218.89, TP4_TREES),
    ):
        for tree, (rate, tokens) in trees.items():
            steps = int(tree.split(",")[1])
            asked = replace(case, gamma=steps, tau=tokens, tree=tree)
            yield Row(asked, "round", 1e3 * tokens / rate, group="SGLang")
            yield Row(asked, "speedup", rate / alone, group="SGLang")


COLAB_CASE: Final = Case(
    source=COLAB,
    target="qwen3-8b",
    draft="qwen3-1.7b",
    gpu="a100-40gb",
    engine="vllm",
    version="0.25.1",
    gamma=3,
    batch=1,
    context=400,
    tau=2.44,
)
GPT_OSS: Final = Case(
    source="llm-d and others: gpt-oss-120b alone on B200",
    target="gpt-oss-120b",
    draft="eagle3",
    gpu="b200",
    engine="vllm",
    version="0.24.0",
    gamma=3,
    batch=1,
    context=500,
)
# On AMD's GPUs SGLang verifies greedily, whatever acceptance threshold was set
# (speculative/eagle_info.py, TREE_SPEC_KERNEL_AVAILABLE), so acceptance is not given.
DEEPSEEK: Final = Case(
    source=AMD,
    target="deepseek-v3",
    draft="mtp",
    gpu="mi300x",
    engine="sglang",
    version="0.5.0",
    gamma=2,
    batch=1,
    context=3200,
    answer=800,
    ranks=8,
    dtype="float8_e4m3fn",
)
NEXTN: Final = replace(
    DEEPSEEK,
    source="SGLang's documentation of DeepSeek-V3 (decoding speed; gamma and lengths assumed)",
    gpu="h200",
    version="0.4.5",
    gamma=3,
    answer=0,
)
GPT_OSS_H200: Final = Case(
    # three kinds of text; a server samples at temperature 1 where a client does not ask
    source="developers.redhat.com 2026-04-16 (+10 to 21 % up to 200 in flight; lengths assumed)",
    target="gpt-oss-120b",
    draft="eagle3",
    gpu="h200",
    engine="vllm",
    version="0.13.0",
    gamma=3,
    batch=200,
    context=220,
    answer=200,
    ranks=2,
    domain="mixed",
    temperature=1.0,
)
LLAMA_SGLANG: Final = Case(
    source="sglang docs and pull 4716 (plain steps beside trees)",
    target="llama-3.1-8b",
    draft="eagle3",
    gpu="h100",
    engine="sglang",
    version="0.4.5",
    gamma=3,
    batch=1,
    context=400,
)

ANGELSLIM: Final = "github Tencent/AngelSlim README_en.md (one H20, vLLM 0.11.2, 1,024 tokens out)"
# Target: tokens/s alone on MT-bench; (speed-up, tau) of its EAGLE-3 head on GSM8K, HumanEval,
# MT-bench.
ANGELSLIM_RUNS: Final = {
    "qwen3-1.7b": (
        390.53,
        ((616.9 / 376.42, 2.13), (680.1 / 378.38, 2.20), (621.44 / 390.53, 2.17)),
    ),
    "qwen3-4b": (
        234.04,
        ((389.35 / 229.05, 2.07), (377.84 / 234.66, 2.08), (384.6 / 234.04, 2.07)),
    ),
    "qwen3-8b": (
        153.81,
        ((257.32 / 149.63, 2.00), (244.89 / 153.85, 1.97), (258.2 / 153.81, 1.97)),
    ),
    "qwen3-14b": (94.46, ((153.72 / 92.97, 1.87), (144.68 / 92.94, 1.76), (142.45 / 94.46, 1.74))),
    "qwen3-32b": (43.3, ((80.43 / 43.39, 2.01), (71.57 / 43.19, 1.86), (74.1 / 43.3, 1.86))),
    "qwen3-30b-a3b": (
        325.42,
        ((453.97 / 311.84, 2.10), (428.81 / 325.77, 2.02), (437.06 / 325.42, 2.01)),
    ),
}


OPEN: Final = (
    "precision and cards of this row are not printed; 64 us a layer, where Qwen3-1.7B's take 66"
    " without experts"
)


def _angelslim() -> Iterator[Row]:
    for target, (alone, runs) in ANGELSLIM_RUNS.items():
        case = Case(
            source=ANGELSLIM,
            target=target,
            draft="eagle3",
            gpu="h20",
            engine="vllm",
            version="0.11.2",
            gamma=2,
            batch=1,
            context=600,
        )
        yield Row(case, "step", 1e3 / alone, note=OPEN if "a3b" in target else "")
        for domain, (gain, tokens) in zip(("math", "code", "chat"), runs, strict=True):
            asked = replace(case, domain=domain, tau=tokens)
            yield Row(asked, "speedup", gain, "vllm-head-piecewise-sync")
            yield Row(asked, "gain", gain, group="nothing given")


def _eagle_on_h100(draft: str, gamma: int) -> Case:
    return Case(
        source="github vllm-project/vllm pull/16937 (MT-bench, prompts inside)",
        target="llama-3.1-8b",
        draft=draft,
        gpu="h100",
        engine="vllm",
        version="0.8.5",
        gamma=gamma,
        batch=1,
        context=400,
    )


EAGLE_A100: Final = Case(
    source="github vllm-project/vllm pull/24343 (MT-bench)",
    target="llama-3.1-8b",
    draft="eagle1",
    gpu="a100-40gb",
    engine="vllm",
    version="0.10.2",
    gamma=1,
    batch=1,
    context=400,
    tau=1.63,
)
HEADS: Final = "published.csv holds other runs of the same heads"
KERNEL: Final = "the FlashAttention 2 model was checked on it"
GRAPH: Final = "ungraphed_layer of engine_rounds.yaml"


def _pard() -> Iterator[Row]:
    """EAGLE-3 and PARD beside each other; three targets, three kinds of text, one request."""
    runs = {
        ("llama-3.1-8b", "a100", 1): (78.41, (3.13, 2.60, 2.42), (4.76, 4.00, 2.72)),
        ("qwen3-8b", "a100", 1): (76.49, (2.10, 1.91, 1.66), (5.05, 4.40, 2.52)),
        ("llama-3.3-70b", "h20", 4): (70.66, (3.59, 2.94, 2.64), (5.38, 4.52, 2.70)),
    }
    for (target, gpu, ranks), (alone, heads, drafts) in runs.items():
        case = Case(
            source=PARD,
            target=target,
            draft="eagle3",
            gpu=gpu,
            engine="vllm",
            version="0.16.0",
            gamma=5,
            batch=1,
            context=400,
            ranks=ranks,
        )
        note = (
            "ranks not said: inferred from the plain step" if ranks > 1 else "which A100: not said"
        )
        yield Row(case, "step", 1e3 / alone, trend=ranks > 1, note=note)
        for domain, head, draft in zip(("code", "math", "chat"), heads, drafts, strict=True):
            asked = replace(case, domain=domain)
            yield Row(asked, "gain", head, group="nothing given")
            yield Row(replace(asked, draft="pard", gamma=8), "gain", draft, group="nothing given")


def _audit() -> Iterator[Row]:
    """Batches that start together and are served to the last one, long contexts, n-grams."""
    case = Case(
        source=AUDIT,
        target="llama-3.1-8b",
        draft="eagle3",
        gpu="h100",
        engine="vllm",
        version="0.23.0",
        gamma=3,
        batch=8,
        context=150,
        answer=128,
        domain="code",
    )
    for batch, gamma, gain, tokens in (
        (8, 3, 1.123, 1.7036),
        (8, 5, 1.023, 1.75),
        (32, 1, 1.111, 1.4422),
        (32, 3, 1.012, 1.7242),
        (32, 4, 0.944, 1.7411),
        (64, 1, 1.077, 1.4235),
        (64, 2, 1.02, 1.6112),
        (64, 3, 0.961, 1.6771),
        (64, 4, 0.878, 1.7088),
    ):
        answer = 96 if batch == 64 else 128
        asked = replace(case, batch=batch, gamma=gamma, tau=tokens, answer=answer)
        yield Row(replace(asked, refill=False), "served", gain, REQUESTS, note="static groups")
    yield Row(replace(case, answer=0, context=210), "step", 8e3 / 1153.65)
    yield Row(replace(case, answer=0, context=210, batch=32), "step", 32e3 / 4085.32)
    long = replace(case, answer=0, context=8192, domain="qa")
    qwen = replace(long, target="qwen3-14b", batch=1)
    yield Row(qwen, "step", 1e3 / 84.54)
    for gamma, gain, tokens in (
        (1, 1.32, 1.417),
        (2, 1.359, 1.5586),
        (3, 1.387, 1.6222),
        (4, 1.33, 1.6259),
    ):
        asked = replace(qwen, gamma=gamma, tau=tokens)
        yield Row(asked, "speedup", gain)
        yield Row(asked, "gain", gain, group="nothing given")
    for gamma, gain, tokens in ((1, 1.003, 1.0967), (3, 0.913, 1.0964), (4, 0.851, 1.1018)):
        asked = replace(long, batch=32, gamma=gamma, tau=tokens)
        yield Row(asked, "speedup", gain)
        named = replace(asked, draft="yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")
        yield Row(named, "gain", gain, group="nothing given", note="a head of 2k positions")
    lookup = replace(
        case, target="qwen2.5-7b", draft="ngram", gpu="a100-40gb", batch=1, context=200, answer=0
    )
    yield Row(lookup, "step", 1e3 / 82.45)
    for domain, gamma, gain in (
        ("code", 4, 1.438),
        ("math", 4, 1.232),
        ("chat", 4, 0.995),
        ("code", 1, 1.184),
        ("chat", 1, 0.942),
    ):
        yield Row(replace(lookup, domain=domain, gamma=gamma), "gain", gain, group="nothing given")


def _others() -> Iterator[Row]:
    case = replace(_qwen("h100", 8, "0.24.0"), source=OWN_HEAD, context=200, temperature=1.0)
    for dtype, gamma, tokens, gap, gain in (
        ("bfloat16", 2, 1.51, 8.25, 6.86 / 5.50),
        ("float8_e4m3fn", 1, 1.39, 5.51, 4.62 / 3.99),
    ):
        asked = replace(case, dtype=dtype, gamma=gamma, tau=tokens)
        yield Row(asked, "round", gap, note="median gap between chunks")
        yield Row(asked, "speedup", gain, note="mean times per token")
    block = Case(
        source=A800,
        target="qwen3-8b",
        draft="dflash",
        gpu="a800",
        engine="sglang",
        version="0.5.13",
        gamma=15,
        batch=1,
        context=300,
        tau=2.8,
    )
    yield Row(block, "step", 1e3 / 88, group="SGLang")
    yield Row(
        block, "round", 2.8e3 / 162, group="SGLang", note="block of 16, as the head's name says"
    )
    yield Row(
        block, "speedup", 162 / 88, group="SGLang", note="block of 16, as the head's name says"
    )
    mixture = replace(block, target="qwen3-30b-a3b", tau=2.0)
    yield Row(mixture, "step", 1e3 / 146, group="SGLang")
    yield Row(mixture, "round", 2e3 / 93, group="SGLang", trend=True, note="block not said")
    yield Row(mixture, "speedup", 93 / 146, group="SGLang", trend=True, note="block not said")
    for target, alone, rate in (("qwen3-8b", 186, 365), ("qwen3-30b-a3b", 147, 231)):
        tree = replace(
            block,
            source=TENGYUNW,
            target=target,
            draft="eagle3",
            gpu="h200",
            version="0.4.8",
            gamma=6,
            context=400,
            tau=None,
            tree="10,6,32",
        )
        yield Row(tree, "step", 1e3 / alone, group="SGLang")
        yield Row(tree, "gain", rate / alone, group="nothing given")
    eagle = replace(
        block,
        source="github SafeAILab/EAGLE pull/173 (H100, SGLang of 2025-01)",
        target="llama-2-7b",
        draft="eagle",
        gpu="h100",
        version="0.4.1",
        gamma=5,
        tau=None,
        tree="8,5,64",
        domain="code",
    )
    yield Row(eagle, "step", 1e3 / 156, group="SGLang")
    yield Row(eagle, "gain", 297 / 156, group="nothing given")
    two = replace(
        block,
        source="github sgl-project/sglang issues/11948 (two A800)",
        draft="eagle3",
        version="0.5.3",
        gamma=3,
        tau=1.9,
        ranks=2,
    )
    yield Row(two, "round", 10.87, group="SGLang")
    nextn = replace(
        NEXTN,
        source="github sgl-project/sglang pull/3582 (cards assumed)",
        version="0.4.3",
        gamma=2,
        context=512,
        tree="4,2,4",
    )
    yield Row(nextn, "gain", 1.76, group="nothing given")
    tensorrt = Case(
        source="github NVIDIA/TensorRT-LLM pull/5146 (a user's tokens/s)",
        target="llama-3.3-70b",
        draft="eagle3",
        gpu="h200",
        engine="tensorrt-llm",
        version="0.21.0",
        gamma=3,
        batch=4,
        context=1000,
        tau=1.83,
        ranks=8,
    )
    yield Row(tensorrt, "speedup", 1.26, TWO_MODELS)
    yield Row(tensorrt, "gain", 1.26, TWO_MODELS, group="nothing given")
    r1 = replace(
        tensorrt,
        source="TensorRT-LLM tech_blog02 (8 B200)",
        target="deepseek-r1",
        draft="mtp",
        gpu="b200",
        version="0.20.0",
        batch=1,
        context=2000,
        tau=None,
        dtype="nvfp4",
        domain="math",
    )
    yield Row(r1, "gain", 2.16, group="nothing given")
    gpt = replace(
        GPT_OSS,
        source="github vllm-project/vllm pull/32887 (B200, MT-bench)",
        version="0.16.0",
        context=1000,
    )
    for draft, gamma, batch, gain in (
        ("p-eagle", 7, 1, 1.52),
        ("p-eagle", 3, 8, 1.34),
        ("eagle3", 3, 1, 1.52 / 1.12),
        ("eagle3", 2, 8, 1.34 / 1.07),
    ):
        note = "" if draft == "p-eagle" else "gamma: the best, not said"
        yield Row(
            replace(gpt, draft=draft, gamma=gamma, batch=batch),
            "gain",
            gain,
            group="nothing given",
            note=note,
        )
    large = replace(gpt, target="llama-3.3-70b", dtype="nvfp4")
    yield Row(large, "step", 3.1e3 / 254)
    yield Row(replace(large, draft="pard", gamma=11), "gain", 3.10, group="nothing given")
    spark = replace(
        gpt,
        source="github flash7777/vllm-marlin-sm12x RESULTS_NVFP4.md",
        target="qwen3-coder-30b-a3b",
        gpu="gb10",
        gamma=1,
        context=500,
        dtype="nvfp4",
        domain="code",
    )
    yield Row(spark, "step", 1e3 / 68.0, group="roofline")
    yield Row(spark, "gain", 73.9 / 68.0, group="roofline", note="long answers")
    yield Row(spark, "gain", 56.8 / 67.5, group="roofline", note="answers of middle length")
    gguf = Case(
        source="github zackedds/spec-dec-swarm-eval (A6000; Q4_K_M asked as int4, draft 16 bits)",
        target="llama-3.3-70b",
        draft="llama-3.2-1b",
        gpu="rtx-a6000",
        engine="llama.cpp",
        version="2026.10",
        gamma=8,
        batch=1,
        context=256,
        dtype="int4",
        domain="mixed",
    )
    yield Row(gguf, "step", 1e3 / 15.5, group="roofline")
    yield Row(gguf, "gain", 2.67, group="roofline")


ROWS: Final = (
    *_pard(),
    *_audit(),
    *_others(),
    Row(_a100(2), "step", 13.05),
    Row(_a100(3), "step", 13.2),
    Row(_a100(7), "step", 13.65),
    Row(_a100(32), "step", 17.5),
    Row(_a100(128), "step", 30.0),
    Row(_a100(32), "verify", 24.4, KERNEL),
    Row(_a100(128), "verify", 84.4, KERNEL),
    Row(_a100(32), "speedup", 1.56, KERNEL),
    Row(_a100(128), "speedup", 0.80, KERNEL),
    Row(_qwen("a100-40gb", 1, "0.20.0"), "step", 13.05),
    Row(_qwen("a100", 1, "0.20.0"), "step", 11.4),
    Row(_qwen("h100", 8, "0.20.0"), "step", 6.99),
    Row(_qwen("h100", 8, "0.24.0"), "step", 6.85),
    Row(_qwen("h100", 8, "0.24.0", "float8_e4m3fn"), "step", 4.62),
    Row(_qwen("h100", 8, "0.20.0", "float8_e4m3fn"), "step", 4.86),
    Row(_fp8(83), "step", 10.75),
    Row(_fp8(83), "round", 18.3),
    Row(_fp8(85), "round", 18.4),
    Row(_fp8(86), "round", 30.6, GRAPH),
    Row(_fp8(118), "round", 27.3, GRAPH),
    Row(COLAB_CASE, "round", 74.0, "MACHINE_STD", group="drafts without graphs"),
    Row(COLAB_CASE, "speedup", 0.43, "MACHINE_STD", group="drafts without graphs"),
    Row(replace(COLAB_CASE, host="slow"), "round", 74.0, "HOSTS", group="drafts without graphs"),
    Row(_specforge(1), "step", 4.5, group="SGLang"),
    Row(_specforge(4), "step", 7.1, group="SGLang"),
    Row(_specforge(1), "round", 11.6, "sglang-sync", group="SGLang"),
    Row(_specforge(4), "round", 16.6, "sglang-sync", group="SGLang"),
    Row(_specforge(1), "speedup", 0.72, "sglang-sync", group="SGLang"),
    Row(_specforge(4), "speedup", 0.79, "sglang-sync", group="SGLang"),
    Row(LLAMA_SGLANG, "step", 1e3 / 158, group="SGLang"),
    Row(replace(LLAMA_SGLANG, target="llama-3.3-70b", ranks=8), "step", 1e3 / 88.6, group="SGLang"),
    *_gpustack(),
    *_mixture_trees(),
    *_tree_docs(),
    Row(TT_CASE, "round", 32.6, group="drafts without graphs"),
    Row(TT_CASE, "gain", 16.5 / 7.75, group="nothing given"),
    *(
        Row(replace(NEXTN, batch=batch), "gain", gain, group="nothing given")
        for batch, gain in ((1, 1.8), (32, 1.5))
    ),
    Row(GPT_OSS, "step", 2.71),
    Row(replace(GPT_OSS, batch=8), "step", 4.49),
    # of 17.35 s a request, less a prompt's 0.2
    Row(DEEPSEEK, "step", 21.4, "AMD_KERNEL_S", group="roofline"),
    *_angelslim(),
    *(
        Row(_eagle_on_h100(draft, gamma), "gain", gain, HEADS, group="nothing given")
        for draft, gamma, gain in (
            ("eagle1", 2, 1.51),
            ("eagle1", 4, 1.48),
            ("eagle1", 7, 1.27),
            ("eagle3", 2, 1.65),
        )
    ),
    Row(replace(EAGLE_A100, tau=None), "gain", 1.3211 / 1.0179, HEADS, group="nothing given"),
    Row(_a100(32), "gain", 1.56, HEADS, group="nothing given"),
    Row(_a100(128), "gain", 0.80, HEADS, group="nothing given"),
    Row(_specforge(1), "gain", 0.72, group="nothing given"),
    Row(_specforge(4), "gain", 0.79, group="nothing given"),
    Row(COLAB_CASE, "gain", 0.43, HEADS, group="nothing given"),
    *(
        Row(
            replace(GPT_OSS_H200, batch=batch),
            "served",
            gain,
            group="nothing given",
            trend=batch < 200,
        )
        for batch, gain in ((1, 1.2), (100, 1.2), (200, 1.15))
    ),
    *(
        Row(replace(DEEPSEEK, batch=batch), "served", gain, group="roofline")
        for batch, gain in (
            (1, 2.11),
            (2, 2.04),
            (4, 1.84),
            (8, 1.70),
            (16, 1.53),
            (32, 1.44),
            (64, 1.25),
        )
    ),
    *(  # ShareGPT; lengths assumed
        Row(
            replace(DEEPSEEK, batch=batch, context=220, answer=200),
            "served",
            gain,
            group="roofline",
        )
        for batch, gain in ((4, 1.80), (8, 1.75), (16, 1.58), (32, 1.51), (64, 1.36))
    ),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A row beside what is predicted for it."""

    row: Row
    predicted: float
    std: float
    low: float
    high: float
    refused: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.row.published - 1.0

    @property
    def inside(self) -> bool:
        return self.low <= self.row.published <= self.high


def predicted(row: Row) -> Answer:
    """The prediction of a row, as `archsearch estimate` makes it."""
    case = row.case
    if row.metric in ("gain", "served"):
        return _answer(row, asked_by_a_user(case), 1.0)
    ref = resolve_target(case.target)
    drafter = resolve_drafter(case.draft, ref, case.context).drafter
    if case.tree is not None:
        assert isinstance(drafter, ChainHead)
        drafter = replace(drafter, tree=tree_of(case.tree))
    own = Path(case.gpu)
    asked = WorkloadRequest(
        gpu=None if own.is_dir() else case.gpu,
        profile=own if own.is_dir() else None,
        batch_size=case.batch,
        context_len=case.context,
        tensor_parallel=case.ranks,
        dtype=case.dtype,
        engine=case.engine,
        engine_version=case.version,
        engine_options=case.options,
        host=case.host,
    )
    source, work = choose_latency(
        with_engine(asked, drafter.rounds), ref.architecture, drafter.rounds
    )
    latency, target = source.latency, ref.routed(case.skew).architecture
    if row.metric == "step":
        return _answer(row, latency.decode_s(target, work), 1e3)
    if row.metric == "verify":
        return _answer(row, latency.verify_s(target, work, case.gamma), 1e3)
    if row.metric == "round":
        return _answer(row, latency.round(target, drafter, work, case.gamma).round_s, 1e3)
    assert case.tau is not None
    scorer = Scorer(
        target, work, latency, GivenAcceptance(0.5), gammas=[case.gamma], domain="mixed"
    )
    known = Estimate(case.tau, 0.0, "published").between((case.tau, case.tau))
    alpha = Estimate(alpha_from_tau(case.tau, case.gamma), 0.0, "published")
    return _answer(row, scorer.measured(drafter, alpha, {case.gamma: known}).speedup, 1.0)


def asked_by_a_user(case: Case) -> Estimate:
    """The speed-up that `archsearch estimate` says when no acceptance is given."""
    work = WorkloadRequest(
        gpu=case.gpu,
        batch_size=case.batch,
        context_len=case.context,
        tensor_parallel=case.ranks,
        dtype=case.dtype,
        engine=case.engine,
        engine_version=case.version,
        engine_options=case.options,
        host=case.host,
        temperature=case.temperature,
    )
    request = EstimateRequest(
        case.target,
        (case.draft,),
        work,
        gamma=case.gamma if case.tree is None else None,
        domain=case.domain,
        tree=case.tree,
    )
    if case.answer:  # with prompts inside
        load = {"concurrency": case.batch, "prompt_tokens": case.context, "refill": case.refill}
        part = {**load, "output_tokens": case.answer}
        mix = mix_of({"parts": [part], "objective": "throughput"}, "prompts")
        work = replace(work, batch_size=1)
        request = replace(request, asked=work, mix=mix, tau=case.tau)
    (found,) = estimate_drafts(request).drafts
    if found.no_room:
        raise ArchsearchError(found.no_room)
    return found.score.speedup


def _answer(row: Row, said: Estimate, scale: float) -> Answer:
    spread = 1.645 * said.std
    low = said.low if said.low is not None else said.value - spread
    high = said.high if said.high is not None else said.value + spread
    return Answer(row, *(scale * value for value in (said.value, said.std, low, high)))


def answers(rows: Iterable[Row] = ROWS) -> Iterator[Answer]:
    """The rows that are answered; one that is refused says why."""
    for row in rows:
        try:
            yield predicted(row)
        except ArchsearchError as error:
            yield Answer(row, float("nan"), 0.0, 0.0, 0.0, str(error))


def figures(found: list[Answer]) -> str:
    """Median error, bias, share within 20 % and inside the band, by group and by what was used."""
    lines = [f"{'':44} {'n':>3} {'median':>7} {'bias':>7} {'in 20 %':>8} {'in band':>8}"]
    kept = [each for each in found if not each.refused and not each.row.trend]
    groups: list[tuple[str, list[Answer]]] = [
        (group, [each for each in kept if each.row.group == group])
        for group in dict.fromkeys(each.row.group for each in kept)
    ]
    groups += [
        (f"{group}, nothing rests on it", [each for each in members if not each.row.used])
        for group, members in groups
    ]
    for metric in ("step", "verify", "round", "speedup", "gain", "served"):
        groups.append((f"all: {metric}", [each for each in kept if each.row.metric == metric]))
    for name, members in [*groups, ("all", kept)]:
        if members:
            errors = [each.error for each in members]
            size = [abs(error) for error in errors]
            inside = sum(each.inside for each in members) / len(members)
            within = sum(error <= 0.2 for error in size) / len(size)
            lines.append(
                f"{name:44} {len(members):3} {statistics.median(size):7.1%} "
                f"{statistics.median(errors):+7.1%} {within:8.0%} {inside:8.0%}"
            )
    return "\n".join(lines)


def text(found: list[Answer]) -> str:
    lines = []
    for source in dict.fromkeys(each.row.case.source for each in found):
        lines.append(source)
        for each in (other for other in found if other.row.case.source == source):
            case = each.row.case
            name = (
                f"  {case.target} {case.gpu} {case.engine} {case.version} b{case.batch} "
                f"{each.row.metric}{' (host ' + case.host + ')' if case.host else ''}"
            )
            if each.refused:
                lines.append(f"{name:62} refused: {each.refused[:80]}")
                continue
            band = f"[{each.low:.2f}, {each.high:.2f}]"
            said = f"{each.row.published:7.2f} {each.predicted:7.2f} {band:>16} {each.error:+7.1%}"
            about = f"{each.row.used}{' trend' if each.row.trend else ''}{each.row.note}"
            lines.append(f"{name:62} {said}  {about}")
    return "\n".join([*lines, "", figures(found)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for strangers.json and strangers.txt")
    parser.add_argument("--only", default="", help="rows whose source or target holds this text")
    asked = parser.parse_args()
    rows = [
        row for row in ROWS if asked.only.lower() in f"{row.case.source} {row.case.target}".lower()
    ]
    found = list(answers(rows))
    data: list[dict[str, Any]] = [asdict(each) | {"error": each.error} for each in found]
    words = text(found)
    print(json.dumps(data) if asked.json else words)
    if asked.output:
        asked.output.mkdir(parents=True, exist_ok=True)
        (asked.output / "strangers.json").write_text(
            json.dumps(data, indent=1) + "\n", encoding="utf-8"
        )
        (asked.output / "strangers.txt").write_text(words + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
