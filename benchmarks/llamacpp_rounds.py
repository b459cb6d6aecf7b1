"""Rounds of llama.cpp predicted from its profile beside rounds measured, for drafts that the
profile has not seen.

Synthetic acceptance. The profile's passes for comparison run before and after each answer, so that
times are divided by how slow the machine is at that moment. Of a profile made by
`archsearch profile --gpu cpu --target T --engine llama.cpp`:

    python benchmarks/llamacpp_rounds.py PROFILE OUTPUT.jsonl [DTYPE..]

`--requests 4`: as many at once, in slots; `--gammas 3`: these only, 0 for the target alone.
`--passes`: then the passes of those drafts too, timed as the profile's are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TextIO

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import Part
from archsearch.engines.engine import EnginePrompt, EngineSettings, Sampling
from archsearch.engines.measure.passes import (
    MIN_STEPS,
    Case,
    PassRequest,
    compared,
    measure_passes,
)
from archsearch.engines.measure.turns import full_steps
from archsearch.engines.registry import make_engine
from archsearch.latency.engine_passes import EnginePasses
from archsearch.latency.model import LatencyModel
from archsearch.models.targets import resolve_target
from archsearch.pipeline.in_engine import engine_target, random_draft
from archsearch.pipeline.profile.engine import CONTEXTS
from archsearch.profiles import Measurement, PassShape, Profile
from archsearch.workload import Workload

TARGET, RATE, PROMPT, ROUNDS = "smollm2-135m", 0.7, 100, 16
SHAPES = ((1, 576, 1536, 9), (3, 384, 1024, 6), (5, 192, 512, 3))  # layers, hidden size, FFN, heads
GAMMAS = (1, 2, 3, 4, 5)


def main() -> None:
    """Measure every case and print the errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("profile", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("dtypes", nargs="*", default=["float16", "q8_0"])
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument(
        "--repeats", type=int, default=2, help="answers of a case, a sweep over all cases apart"
    )
    parser.add_argument("--gammas", type=int, nargs="+", default=GAMMAS)
    parser.add_argument("--passes", action="store_true", help="the drafts' passes too, each sweep")
    asked = parser.parse_args()
    profile, requests = Profile.load(asked.profile), asked.requests
    ref, threads = resolve_target(TARGET), profile.device.get("threads")
    errors: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as temporary,
        asked.output.open("a", encoding="utf-8") as rows,
    ):
        for dtype in asked.dtypes:
            latency = LatencyModel(profile, dtype, engine="llama.cpp")
            settings = EngineSettings(dtype=dtype, max_len=256, threads=threads)
            settings = replace(settings, time_passes=True)
            engine = make_engine("llama.cpp", replace(settings, concurrency=requests))
            drafts = [draft_of(ref.architecture, *shape) for shape in SHAPES]
            cases = [(draft, gamma) for draft in drafts for gamma in asked.gammas if gamma]
            cases = [(None, 0)] * (0 in asked.gammas) + cases
            seen: dict[tuple[Architecture | None, int], list[tuple[float, float, float]]] = {}
            for repeat, (draft, gamma) in product(range(asked.repeats), cases):
                folder = random_draft(draft, dtype, Path(temporary)) if draft else None
                rates = tuple(RATE ** (place + 1) for place in range(gamma))
                engine.start(engine_target(ref, "llama.cpp", dtype), folder, gamma, synthetic=rates)
                prompts = [
                    EnginePrompt(
                        str(number),
                        tuple((17 * at + repeat + 7 * number) % 900 + 10 for at in range(PROMPT)),
                    )
                    for number in range(requests)
                ]
                tokens = 1 + round(ROUNDS * sum((1.0, *rates))) + gamma
                slow = []
                for _ in range(2):  # passes are run behind an answer, so those before it too
                    engine.generate(prompts, Sampling(tokens, ignore_end=True))
                    key = f"llama.cpp {dtype}"
                    slower = compared(engine.steps(), key, profile.probe_reference_s)
                    slow.append(slower(gamma + 1))
                steps = [s for s in full_steps(engine.steps(), requests) if s.gamma == gamma]
                seen.setdefault((draft, gamma), []).extend(
                    (step.seconds / statistics.mean(slow), step.seconds, step.context)
                    for step in steps
                )
            for (draft, gamma), visited in seen.items():
                times, wall, contexts = zip(*visited, strict=True)
                work = Workload(requests, round(statistics.mean(contexts)), dtype=dtype)
                found = (
                    latency.decode_s(ref.architecture, work)
                    if draft is None
                    else latency.round(ref.architecture, draft, work, gamma).round_s
                )
                measured = statistics.median(times)
                error = found.value / measured - 1.0
                errors.setdefault(dtype, []).append(error)
                row = {
                    "dtype": dtype,
                    "draft": draft.label() if draft else "",
                    "gamma": gamma,
                    "requests": requests,
                    "context": work.context_len,
                    "rounds": len(times),
                    "measured_s": measured,
                    "wall_s": statistics.median(wall),
                    "predicted_s": found.value,
                    "predicted_std_s": found.std,
                    "error": error,
                }
                rows.write(json.dumps(row) + "\n")
                rows.flush()
                what = f"{dtype} {draft.label() if draft else 'target alone'} gamma {gamma}"
                print(
                    f"{what}: {1e3 * measured:.1f} ms, predicted {1e3 * found.value:.1f},"
                    f" {error:+.1%}",
                    flush=True,
                )
            engine.stop()
            if asked.passes:
                request = PassRequest(
                    target=engine_target(ref, "llama.cpp", dtype),
                    architecture=ref.architecture,
                    dtype=dtype,
                    mode="eager",
                    references=profile.probe_reference_s,
                    contexts=CONTEXTS,
                    repeats=1,
                    rounds=2 * MIN_STEPS,
                )
                passes = EnginePasses(profile, dtype, "eager", "llama.cpp")
                seconds: dict[Measurement, list[float]] = {}
                for _, (place, draft) in product(range(asked.repeats), enumerate(drafts)):
                    folder = random_draft(draft, dtype, Path(temporary))
                    timed: list[Measurement] = []
                    measure_passes(
                        lambda case, settings=settings: make_engine("llama.cpp", settings),
                        request,
                        [Case([(1, gamma) for gamma in GAMMAS], draft, folder, place=place)],
                        record=timed.append,
                    )
                    for row in {row.key: row for row in timed}.values():
                        if row.kind == "pass" and PassShape.of(row).role == "draft":
                            blank = replace(row, times_s=(), slowdown=1.0)
                            seconds.setdefault(blank, []).append(row.median_s)
                for blank, medians in seconds.items():
                    row = replace(blank, times_s=(statistics.median(medians),))
                    errors.setdefault(f"{dtype} passes", []).append(_pass_error(passes, row, rows))
    for dtype, found_errors in errors.items():
        sizes = sorted(map(abs, found_errors))
        print(
            f"{dtype}: {len(sizes)} cases, median {statistics.median(sizes):.1%}, worst"
            f" {sizes[-1]:.1%}"
        )


def draft_of(target: Architecture, layers: int, hidden: int, ffn: int, heads: int) -> Architecture:
    return target.replace(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )


def _pass_error(passes: EnginePasses, row: Measurement, rows: TextIO) -> float:
    """Relative error of a pass of an unseen draft, written down and printed."""
    shape = PassShape.of(row)
    found = passes.forward_s(
        shape.architecture,
        Part(shape.batch, shape.tokens, shape.context),
        cold=row.cache == "cold",
    )
    error = found.value / row.median_s - 1.0
    facts = {
        "dtype": row.dtype,
        "draft": shape.architecture.label(),
        "pass_tokens": shape.tokens,
        "context": shape.context,
        "cache": row.cache,
        "measured_s": row.median_s,
        "predicted_s": found.value,
        "predicted_std_s": found.std,
        "error": error,
    }
    rows.write(json.dumps(facts) + "\n")
    print(
        f"{row.dtype} {shape.architecture.label()}, pass of {shape.tokens}, context"
        f" {shape.context}, {row.cache}: {1e3 * row.median_s:.2f} ms, predicted"
        f" {1e3 * found.value:.2f}, {error:+.1%}",
        flush=True,
    )
    return error


if __name__ == "__main__":
    main()
