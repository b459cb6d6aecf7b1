"""What an engine adds to a plain token and to a round, measured: its cycle time less the forward passes it is made of.

Random weights of the real shapes are enough: time does not depend on what the numbers are. The rows go into the Profile (kind
`engine`), so that predictions are for the engine that will serve.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from archsearch.architecture.architecture import Architecture
from archsearch.engines.engine import EnginePrompt, Sampling
from archsearch.engines.transformers import TransformersEngine
from archsearch.profiles import Measurement, freeze_shape
from archsearch.profiling.cpu_sweep import CpuBench, Progress
from archsearch.profiling.layers import ForwardRun, build_model
from archsearch.profiling.timer import Timer

GAMMAS = (1, 2, 4, 7)
CONTEXT = 128
TOKENS = 20


DRAFT_LAYERS = (1, 6)


def reference_draft(target: Architecture, layers: int) -> Architecture:
    """A draft that overhead is measured with: small layers and an 8k head, so that little of the cycle is its own time.

    Two depths, because a layer costs more inside an engine than in a loop of its own: its cache is handed about and cropped, and
    the verification has pushed code and weights out of the processor's caches.
    """
    return Architecture(256, 512, layers, 4, 4, 64, target.vocab_size, draft_vocab_size=min(8192, target.vocab_size))


def measure_overhead(
    bench: CpuBench, target: Architecture, dtype: str, *, rounds: int = 3, progress: Progress | None = None
) -> list[Measurement]:
    """Rows of kind `engine` for transformers: seconds beyond the forward passes, per plain token (gamma 0) and per round, for
    each of GAMMAS with drafts of each of DRAFT_LAYERS.

    Plain and speculative generations alternate `rounds` times; each is divided by the probe run just before and after it.
    """
    prompt = EnginePrompt("overhead", tuple(torch.randint(0, min(1000, target.vocab_size), (CONTEXT - TOKENS // 2,)).tolist()))
    cases = [(0, 0), *((gamma, layers) for gamma in GAMMAS for layers in DRAFT_LAYERS)]
    cycles: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    timer = bench.timer(dtype)
    passes: dict[int, list[float]] = {gamma: [] for gamma, _ in cases}
    first: dict[int, list[float]] = {layers: [] for layers in DRAFT_LAYERS}
    later: dict[int, list[float]] = {layers: [] for layers in DRAFT_LAYERS}
    with torch.inference_mode():
        pool = bench.pool(dtype)
        target_model = build_model(target, pool.flat.dtype, pool)
        holders: tuple[Any, ...] = (target_model.config, target_model.generation_config)
        for holder in holders:
            holder.eos_token_id = None  # random weights must not end the text
        drafts = {layers: build_model(reference_draft(target, layers), pool.flat.dtype, pool) for layers in DRAFT_LAYERS}
        whole = ForwardRun(target_model, batch=1, context=CONTEXT)
        small = {layers: ForwardRun(model, batch=1, context=CONTEXT) for layers, model in drafts.items()}
    # The engine's cycles and the passes they are made of take turns, so that both feel the same machine.
    for number in range(rounds):
        for position, (gamma, layers) in enumerate(cases):
            if progress is not None:
                done = number * len(cases) + position
                progress(f"engine overhead {done + 1}/{rounds * len(cases)}", float(done), float(rounds * len(cases)))
            with torch.inference_mode():
                passes[gamma] += timer.time(whole.step(gamma + 1), calls=1, budget_s=0.3).times_s
                if layers:
                    first[layers] += timer.time(small[layers].step(1), before=bench.flush, budget_s=0.1).times_s
                    later[layers] += timer.time(small[layers].step(1), calls=4, budget_s=0.1).times_s
            cycles[gamma, layers] += _cycle_times(timer, target_model, drafts.get(layers), gamma, prompt)
    rows = []
    for (gamma, layers), times in cycles.items():
        drafting = statistics.median(first[layers]) + (gamma - 1) * statistics.median(later[layers]) if gamma else 0.0
        forward = statistics.median(passes[gamma]) + drafting
        # One difference of medians. An engine cannot add less than nothing: a negative one is noise of the two timings.
        extra = (max(statistics.median(times) - forward, 1e-6),)
        shape: dict[str, Any] = {
            "engine": "transformers",
            "gamma": gamma,
            "draft_layers": layers,
            "vocab_size": target.vocab_size,
        }
        rows.append(Measurement("engine", freeze_shape(shape), dtype, "eager", "warm", extra))
    return rows


def _cycle_times(timer: Timer, target: Any, draft: Any, gamma: int, prompt: EnginePrompt) -> list[float]:
    """Probe-corrected seconds of the rounds (or plain tokens) of one generation; those that the end cut short are left out."""
    engine = TransformersEngine()
    engine.start(target, draft, gamma)
    before = statistics.median(timer.probe() for _ in range(5))
    result = engine.generate([prompt], Sampling(max_new_tokens=TOKENS + gamma))[0]
    after = statistics.median(timer.probe() for _ in range(5))
    slowdown = 0.5 * (before + after) / timer.reference_s
    whole = result.gaps_s[: max(1, result.rounds - 1)] if gamma else result.gaps_s
    return [gap / slowdown for gap in whole]
