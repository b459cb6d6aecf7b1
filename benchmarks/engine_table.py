"""Which draft is best in which engine, and what does the best for one lose in another? GPUs with
measured kernels, batch 1.

    python benchmarks/engine_table.py [--devices h100,h200] [--output DIR]

Predictions, nothing is run: kernels of the shipped profiles, rounds by `engine_rounds`, alpha by
the prior (chat, greedy), the same in every engine. So compare columns, not levels.

1. best: of one grid of shapes for every engine, the fastest at its best gamma, and its loss in
every other engine.
2. depth: drafts of equal parameters and other depths, by engine; and what doubling the width or
   four times the layers (the same parameters) does to a round of gamma 4: where the paper's "width
   is free, layers cost" (arXiv 2402.01528) holds.
3. gamma: off-the-shelf drafts of many layers at alpha 0.8, speed-up against gamma, by engine.
"""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from archsearch.acceptance.estimator import GivenAcceptance
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.catalogue import load
from archsearch.architecture.counts import parameters
from archsearch.engine_facts import engine_facts
from archsearch.engine_rounds import engine_rounds, parse_options
from archsearch.errors import ArchsearchError
from archsearch.latency.draft_passes import LatencyOfRounds
from archsearch.pipeline.latency import LatencySource, choose_latency, fitting_ranks
from archsearch.pipeline.serving import with_engine
from archsearch.search.objective import Score, Scorer
from archsearch.workload import Workload, WorkloadRequest

TARGETS: Final = {"llama-65b": 4, "llama-3.1-70b": 4, "qwen3-32b": None, "llama-3.1-8b": None}
"""Ranks asked for beside the fewest that hold the target."""
DEVICES: Final = ("a100", "h100", "h200", "b200")
CONTEXT: Final = 1024
LAYERS: Final = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)
WIDTHS: Final = {
    1024: 64,
    1536: 64,
    2048: 64,
    2560: 64,
    3072: 128,
    4096: 128,
    5120: 128,
}  # hidden size: head size
FFN_RATIOS: Final = (1.0, 2.6875, 5.0)
KV_HEADS: Final = 8
GAMMAS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
DEPTHS: Final = (1, 2, 4, 8, 16, 24)
BODY_SHARE: Final = 0.012  # of the target's parameters: 100M for 8B, 840M for 70B
OFF_THE_SHELF: Final = (("qwen2.5-7b", "qwen2.5-0.5b"), ("llama-3.1-8b", "llama-3.2-1b"))
ALPHA: Final = 0.8


@dataclass(frozen=True)
class Engine:
    """One column. `version` None: the newest that is known."""

    title: str
    name: str
    version: str | None = None
    options: tuple[str, ...] = ()


ENGINES: Final = (
    Engine("vllm", "vllm"),
    Engine("vllm V1 runner", "vllm", None, ("VLLM_USE_V2_MODEL_RUNNER=0",)),
    Engine("vllm 0.30.0", "vllm", "0.30.0"),
    Engine("vllm 0.16.0", "vllm", "0.16.0"),
    Engine("sglang", "sglang"),
    Engine("tensorrt-llm", "tensorrt-llm"),
    Engine("transformers", "transformers"),
)


@cache
def latency_of(name: str, device: str) -> LatencySource:
    """What prices the passes of an engine's newest version: fitted once, whatever the target."""
    request = WorkloadRequest(tensor_parallel=1, gpu=device, dtype="bfloat16", engine=name)
    return choose_latency(with_engine(request), load("llama-3.1-8b").architecture)[0]


def source_of(
    engine: Engine, device: str, target: Architecture, ranks: int | None
) -> tuple[LatencyOfRounds, Workload]:
    """What prices passes and rounds of the engine, and the workload on `ranks` devices (None: as
    few as hold the target)."""
    source = latency_of(engine.name, device)
    rounds = engine_rounds(engine.name, engine.version, parse_options(engine.name, engine.options))
    assert rounds is not None
    ranks = ranks or fitting_ranks(source.device, target, Workload(1, CONTEXT, dtype=source.dtype))
    return source.latency.with_rounds(rounds), Workload(
        1, CONTEXT, ranks, source.dtype, source.mode
    )


def grid(target: Architecture, ranks: int) -> list[Architecture]:
    """The shapes of every search, below half of the target's parameters, that the ranks can
    share."""
    shapes = []
    for layers in LAYERS:
        for width, head_dim in WIDTHS.items():
            for ratio in FFN_RATIOS:
                intermediate = 64 * round(width * ratio / 64)
                shape = Architecture(
                    width,
                    intermediate,
                    layers,
                    width // head_dim,
                    KV_HEADS,
                    head_dim,
                    target.vocab_size,
                )
                if parameters(shape) < 0.5 * parameters(target) and shards("vllm", shape, ranks):
                    shapes.append(shape)
    return shapes


def shards(engine: str, shape: Architecture, ranks: int) -> bool:
    """Whether the engine can shard the draft so."""
    try:
        engine_facts(engine).check_draft(shape, ranks, "draft")
    except ArchsearchError:
        return False
    return True


def words(shape: Architecture) -> str:
    """`4 x 3072, FFN 8256`"""
    return f"{shape.num_hidden_layers} x {shape.hidden_size}, FFN {shape.intermediate_size}"


def row_of(scorer: Scorer, score: Score) -> dict[str, Any]:
    """What is told of a draft in an engine."""
    free = scorer.latency.free_layers(
        scorer.target, score.architecture, scorer.workload, score.gamma
    )
    return {
        "shape": words(score.architecture),
        "layers": score.architecture.num_hidden_layers,
        "width": score.architecture.hidden_size,
        "parameters": score.parameters,
        "gamma": score.gamma,
        "alpha": round(score.alpha.value, 3),
        "speedup": round(score.speedup.value, 3),
        "std": round(score.speedup.std, 3),
        "round_ms": round(1e3 * score.round_s.value, 2) if score.round_s else None,
        "bound": score.bound,
        "free_layers": None if free is None or math.isinf(free) else round(free, 1),
    }


def best_drafts(scorers: dict[str, Scorer], shapes: Sequence[Architecture]) -> dict[str, Any]:
    """The best shape by engine, and its loss in the others (1 - its speed-up there / the best
    there)."""
    scores = {title: [scorer(shape) for shape in shapes] for title, scorer in scorers.items()}
    best = {
        title: max(range(len(shapes)), key=[score.speedup.value for score in own].__getitem__)
        for title, own in scores.items()
    }
    return {
        title: (
            row_of(scorers[title], scores[title][best[title]])
            | {
                "loss_in": {
                    other: round(
                        1 - own[best[title]].speedup.value / own[best[other]].speedup.value, 4
                    )
                    for other, own in scores.items()
                },
                "gamma_in": {other: own[best[title]].gamma for other, own in scores.items()},
            }
        )
        for title in scores
    }


def of_depth(body: float, layers: int, vocab_size: int) -> Architecture:
    """A draft of `layers` whose layers hold `body` parameters: an ordinary width, the FFN takes the
    rest."""
    width = max(256, 256 * round(math.sqrt(body / layers / 12.06) / 256))
    intermediate = max(64, 64 * round((body / layers - 4 * width * width) / (3 * width) / 64))
    return Architecture(width, intermediate, layers, width // 64, width // 64, 64, vocab_size)


def depths(scorers: dict[str, Scorer]) -> dict[str, Any]:
    """Equal parameters at other depths, by engine."""
    target = next(iter(scorers.values())).target
    shapes = [
        of_depth(BODY_SHARE * parameters(target), layers, target.vocab_size) for layers in DEPTHS
    ]
    ranks = next(iter(scorers.values())).workload.tensor_parallel
    shapes = [shape for shape in shapes if shards("vllm", shape, ranks)]
    found = {
        title: [row_of(scorer, scorer(shape)) for shape in shapes]
        for title, scorer in scorers.items()
    }
    return {
        "by_depth": found,
        "growth": {title: growth(scorer) for title, scorer in scorers.items()},
    }


def growth(scorer: Scorer) -> dict[str, float]:
    """How much longer a round of gamma 4 gets when a 4 x 2048 draft's layers are widened twice, or
    there are four times as many: four times the parameters either way."""

    def round_s(layers: int, width: int) -> float:
        shape = Architecture(
            width,
            int(2.6875 * width),
            layers,
            width // 64,
            width // 64,
            64,
            scorer.target.vocab_size,
        )
        return scorer.latency.round(scorer.target, shape, scorer.workload, 4).round_s.value

    base = round_s(4, 2048)
    return {
        "wide": round(round_s(4, 4096) / base - 1, 4),
        "deep": round(round_s(16, 2048) / base - 1, 4),
    }


def against_gamma(device: str) -> dict[str, Any]:
    """Speed-up of off-the-shelf drafts at a given alpha, gamma 1 to 8."""
    found: dict[str, Any] = {}
    for target_name, draft_name in OFF_THE_SHELF:
        target, draft = (load(name).architecture for name in (target_name, draft_name))
        for engine in ENGINES:
            latency, workload = source_of(engine, device, target, 1)
            scorer = Scorer(target, workload, latency, GivenAcceptance(ALPHA), gammas=(1,))
            rows = []
            for gamma in range(1, 9):
                score = Scorer(target, workload, latency, GivenAcceptance(ALPHA), gammas=(gamma,))(
                    draft
                )
                rows.append(
                    {
                        "gamma": gamma,
                        "speedup": round(score.speedup.value, 3),
                        "tokens_per_s": round(1 / score.tpot_s.value, 1),
                        "round_ms": round(1e3 * score.round_s.value, 2) if score.round_s else None,
                        "bound": score.bound,
                    }
                )
            found.setdefault(f"{target_name} + {draft_name}", {})[engine.title] = {
                "plain_tokens_per_s": round(1 / scorer.decode_s.value, 1),
                "rows": rows,
            }
    return found


def case_name(target_name: str, device: str, ranks: int | None) -> str:
    """`llama-3.1-70b, h100, TP 4`"""
    return f"{target_name}, {device}, TP " + str(
        source_of(ENGINES[0], device, load(target_name).architecture, ranks)[1].tensor_parallel
    )


def case(device: str, target_name: str, ranks: int | None) -> dict[str, Any]:
    """All of one target on one device."""
    target = load(target_name).architecture
    scorers, taken = {}, ranks
    for engine in ENGINES:
        latency, workload = source_of(engine, device, target, taken)
        taken = workload.tensor_parallel
        scorers[engine.title] = Scorer(target, workload, latency, PriorAcceptance(), gammas=GAMMAS)
    assert taken is not None
    decode_ms = {title: round(1e3 * scorer.decode_s.value, 2) for title, scorer in scorers.items()}
    shapes = grid(target, taken)
    return {
        "decode_ms": decode_ms,
        "shapes": len(shapes),
        "best": best_drafts(scorers, shapes),
        **depths(scorers),
    }


def text(result: dict[str, Any]) -> str:
    """The result as markdown."""
    titles = [engine.title for engine in ENGINES]
    lines = [
        "## The best draft by engine",
        "",
        "layers x width, FFN; gamma; speed-up. Batch 1, context 1024.",
        "",
        "| target, device, TP | " + " | ".join(titles) + " |",
        "|---" * (len(titles) + 1) + "|",
    ]
    for name, part in result["cases"].items():
        cells = [
            f"{row['shape']}; {row['gamma']}; {row['speedup']:.2f}"
            for row in (part["best"][title] for title in titles)
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        (
            "## What the best for one engine (row) loses in another (column): median and worst of"
            " all cases, %"
        ),
        "",
        "| best for | " + " | ".join(titles) + " |",
        "|---" * (len(titles) + 1) + "|",
    ]
    for title in titles:
        cells = []
        for other in titles:
            losses = sorted(
                100 * part["best"][title]["loss_in"][other] for part in result["cases"].values()
            )
            cells.append(f"{losses[len(losses) // 2]:.1f}, {losses[-1]:.1f}" if losses else "-")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Speed-up against depth at equal parameters",
        "",
        "| target, device, TP | engine | "
        + "".join(f"{depth} layers | " for depth in DEPTHS)
        + "2 x width | 4 x layers |",
        "|---" * (len(DEPTHS) + 4) + "|",
    ]
    for name, part in result["cases"].items():
        for title in titles:
            known = {row["layers"]: row for row in part["by_depth"][title]}
            cells = [
                f"{known[depth]['speedup']:.2f}" if depth in known else "-" for depth in DEPTHS
            ]
            more = part["growth"][title]
            lines.append(
                f"| {name} | {title} | "
                + " | ".join(cells)
                + f" | {more['wide']:+.0%} | {more['deep']:+.0%} |"
            )
    for device, pairs in result["gamma"].items():
        lines += [
            "",
            f"## Speed-up against gamma on {device}, alpha {ALPHA}",
            "",
            "| pair | engine |" + "".join(f" gamma {gamma} |" for gamma in range(1, 9)),
            "|---" * 10 + "|",
        ]
        for pair, engines in pairs.items():
            for title, part in engines.items():
                cells = [
                    f"{row['speedup']:.2f}{'*' if row['bound'] == 'host' else ''}"
                    for row in part["rows"]
                ]
                lines.append(f"| {pair} | {title} | " + " | ".join(cells) + " |")
        lines.append("\n\\* the host decides the round")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default=",".join(DEVICES))
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for engine_table.json and engine_table.md; cases that it holds are kept",
    )
    options = parser.parse_args(arguments)
    file = options.output / "engine_table.json" if options.output else None
    result: dict[str, Any] = {
        "context": CONTEXT,
        "batch": 1,
        "alpha_of_gamma": ALPHA,
        "cases": {},
        "gamma": {},
    }
    if file is not None and file.exists():
        result = json.loads(file.read_text(encoding="utf-8"))
    for device in options.devices.split(","):
        for target in options.targets.split(","):
            for ranks in dict.fromkeys((None, TARGETS.get(target))):
                if f"{target}, {device}, {ranks or 'fewest'}" in result.setdefault("done", []):
                    continue
                fewest = case_name(target, device, None) if ranks else None
                if ranks is None or case_name(target, device, ranks) != fewest:
                    result["cases"][case_name(target, device, ranks)] = case(device, target, ranks)
                result["done"].append(f"{target}, {device}, {ranks or 'fewest'}")
                save(file, result)
        if device not in result["gamma"] and "llama-3.1-8b" in options.targets:
            result["gamma"][device] = against_gamma(device)
            save(file, result)
    print(text(result))
    return result


def save(file: Path | None, result: dict[str, Any]) -> None:
    """Write both files: a killed run goes on with the next case."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    file.with_suffix(".md").write_text(text(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
