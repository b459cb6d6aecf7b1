"""On a CPU: which points to measure, in which order, within a budget; and the check of the model on
whole drafts it has not seen.

Points come from what the search space and the target can need (`architecture.ops`), spread over log
sizes so that the first minute already covers the range. Rows that the profile holds are skipped: an
interrupted sweep continues where it stopped.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import weight_bytes_per_pass
from archsearch.architecture.ops import Attention, Elementwise, Gemm, Op, forward_ops, layer_ops
from archsearch.profiles import ForwardShape, Measurement, Profile
from archsearch.profiling import layers
from archsearch.profiling.points import (
    Bench,
    Point,
    attempt,
    draft_features,
    interleaved,
    measure_or_skip,
    spread,
    stack_point,
    together,
    unmeasured,
)
from archsearch.profiling.timer import Probe, Timer
from archsearch.progress import Progress
from archsearch.workload import DTYPE_BYTES

CONTEXTS = (64, 256, 512, 1024)
VERIFY_TOKENS = tuple(range(1, 10))
FORWARD_MODEL_LIMIT_BYTES = 4 << 30
CHECKED = {
    False: ((96, 192, 384, 640), FORWARD_MODEL_LIMIT_BYTES),
    True: ((192, 768, 1536), 32 << 30),
}
"""Contexts of a check and the bytes of a target that is run whole, on a CPU and on a GPU."""


def _gemm_features(op: Gemm) -> list[float]:
    return [math.log(op.m) * 0.7, math.log(op.n), math.log(op.k)]


def _attention_features(op: Attention) -> list[float]:
    return [
        math.log(op.tokens),
        math.log(op.keys()),
        math.log(op.q_heads),
        math.log(op.kv_heads),
        math.log(op.head_dim),
    ]


def _ops(
    architectures: Iterable[Architecture],
    tokens: Iterable[int],
    contexts: Iterable[int],
    batch: int,
    kind: type,
) -> list[Any]:
    found: dict[Op, None] = {}
    for arch in architectures:
        for count in tokens:
            for context in contexts:
                for op in forward_ops(arch, batch=batch, tokens=count, context=context):
                    if isinstance(op, kind):
                        found[op] = None
    return list(found)


def plan(
    drafts: Sequence[Architecture],
    target: Architecture | None,
    dtype: str,
    *,
    batch: int = 1,
    seed: int = 0,
    memory_bytes: float = math.inf,
) -> list[Point]:
    """All points for one dtype, most needed first.

    drafts: a sample of the search space; they run 1 or 2 tokens a pass. target: runs 1 to 9 (decode
    and verification).
    """
    rng = random.Random(seed)
    nine = list(VERIFY_TOKENS)
    gemms: list[Point] = []
    draft_gemms = _ops(drafts, (1,), CONTEXTS[:1], batch, Gemm)
    chosen = spread(draft_gemms, _gemm_features, 56)
    for op in chosen:
        gemms += [Point("gemm", "cold", op), Point("gemm", "warm", op)]
    gemms += [
        Point("gemm", "cold", replace(op, m=2 * batch)) for op in spread(chosen, _gemm_features, 12)
    ]
    if target is not None:
        gemms += [
            Point("gemm", "cold", op) for op in _ops([target], nine, CONTEXTS[:1], batch, Gemm)
        ]
    attentions = [
        Point("attention", cache, op)
        for op in spread(_ops(drafts, (1,), CONTEXTS, batch, Attention), _attention_features, 24)
        for cache in ("warm", "cold")
    ]
    if target is not None:
        attentions += [
            Point("attention", "cold", op)
            for op in _ops([target], (1, 2, 3, 5, 7, 9), CONTEXTS, batch, Attention)
        ]
    elements: dict[str, set[int]] = {}
    for arch in [*drafts, *([target] if target else [])]:
        for tokens in (1, 5, 9) if arch is target else (1,):
            for op in [
                *layer_ops(arch, batch=batch, tokens=tokens, context=64, window=None),
                Elementwise("embed", arch.hidden_size),
            ]:
                if isinstance(op, Elementwise):
                    elements.setdefault(op.name, set()).add(op.elements)
    small = []
    for name, sizes in sorted(elements.items()):
        ordered = sorted(sizes)
        picks = {ordered[round(i * (len(ordered) - 1) / 5)] for i in range(6)}
        small += [Point("elementwise", "warm", Elementwise(name, size)) for size in sorted(picks)]

    forwards = []
    for arch in spread(drafts, draft_features, 36):
        context = rng.choice(CONTEXTS)
        forwards += [
            Point("forward", "warm", arch=arch, batch=batch, context=context),
            Point("forward", "cold", arch=arch, batch=batch, context=context),
        ]
        if rng.random() < 0.25:
            forwards.append(
                Point("forward", "warm", arch=arch, batch=batch, context=context, tokens=2)
            )
    stacks = [
        stack_point(arch, dtype, (160 << 20, 2), batch, 1, rng.choice(CONTEXTS))
        for arch in spread(drafts, draft_features, 14)[2:]
    ]
    whole = []
    if target is not None and weight_bytes_per_pass(target, DTYPE_BYTES[dtype]) * 2 < min(
        FORWARD_MODEL_LIMIT_BYTES, memory_bytes / 2
    ):
        whole = [
            Point("forward", "warm", arch=target, batch=batch, tokens=tokens, context=context)
            for tokens, context in (
                (1, 256),
                (5, 256),
                (1, 64),
                (3, 64),
                (9, 512),
                (1, 1024),
                (7, 128),
                (2, 512),
                (5, 1024),
            )
        ]
    groups = (gemms, attentions, small, whole, forwards, stacks)
    # A draft and the target may share a GEMM: planned once.
    return list(dict.fromkeys(interleaved(*groups)))


class CpuBench(Bench):
    """Turns points into measurements on this CPU."""

    def __init__(self, profile: Profile, last_level_cache_bytes: int) -> None:
        super().__init__(profile, "eager", max(96 << 20, 4 * last_level_cache_bytes))

    def new_timer(self, dtype: str) -> Timer:
        probe = Probe(self.pool(dtype))

        def reference_s() -> float:
            for _ in range(100):
                probe()
            return probe.reference_s()

        return Timer(probe, self.reference_s(dtype, reference_s))


def sweep(
    bench: Bench,
    points: dict[str, list[Point]],
    *,
    budget_s: float,
    progress: Progress | None = None,
) -> int:
    """Measure the points of each dtype in turn until done or the budget is spent; returns how many
    rows are new.

    The dtypes share the budget in proportion to their rank: the first gets most. Points that do not
    fit the device's memory are listed in `bench.skipped`.
    """
    start = time.perf_counter()
    new = 0
    shares = {dtype: 1.0 / (rank + 1) for rank, dtype in enumerate(points)}
    total = sum(shares.values())
    spent = 0.0
    with torch.inference_mode():
        for dtype, todo in points.items():
            spent += budget_s * shares[dtype] / total
            model_cache: dict[Architecture, Any] = {}
            pending = list(chain(*together(unmeasured(bench, todo, dtype))))
            for number, point in enumerate(pending):
                elapsed = time.perf_counter() - start
                if elapsed > spent:
                    break
                if progress is not None:
                    progress(f"{dtype} {point.kind} {number + 1}/{len(pending)}", elapsed, budget_s)
                new += measure_or_skip(bench, point, dtype, model_cache) is not None
    return new


def check_points(
    drafts: Sequence[Architecture],
    target: Architecture | None,
    profile: Profile,
    dtype: str,
    count: int,
    *,
    seed: int = 0,
    memory_bytes: float = math.inf,
    mode: str = "eager",
) -> list[Point]:
    """`count` whole drafts of shapes without a forward row, warm and cold, and as many verification
    passes of the target at (tokens, context) pairs without a row. A target is run whole where two
    copies of its weights stay below the limit of CHECKED and half of `memory_bytes`."""
    contexts, limit = CHECKED[profile.device.get("kind") == "gpu"]
    rng = random.Random(f"check {seed}")
    seen = {ForwardShape.of(row).architecture for row in profile.select("forward", dtype, mode)}
    unseen = [arch for arch in drafts if arch not in seen]
    points: list[Point] = []
    for arch in rng.sample(unseen, min(count, len(unseen))):
        context = rng.choice(contexts)
        points += [
            Point("forward", cache, arch=arch, context=context) for cache in ("warm", "cold")
        ]
    if target is None or not (mode == "eager" or layers.lean_supported(target)):
        return points
    if 2 * weight_bytes_per_pass(target, DTYPE_BYTES[dtype]) < min(limit, memory_bytes / 2):
        pairs = [(tokens, context) for tokens in range(2, 10) for context in contexts]
        points += [
            Point("forward", "warm", arch=target, tokens=tokens, context=context)
            for tokens, context in rng.sample(pairs, min(max(4, count // 2), len(pairs)))
        ]
    return points


def measure_points(
    bench: Bench,
    points: Sequence[Point],
    dtype: str,
    rounds: int = 2,
    progress: Progress | None = None,
) -> Iterator[tuple[Point, Measurement]]:
    """Measure points without recording them; `rounds` passes over all, minutes apart, so that one
    bad moment does not decide.

    Yields each point with the pooled times of all rounds; points that do not fit the memory are
    listed in `bench.skipped`.
    """
    times: dict[Point, list[Measurement]] = {}
    skip: set[Point] = set()
    start = time.perf_counter()
    with torch.inference_mode():
        for number in range(rounds):
            cache: dict[Architecture, Any] = {}
            for index, point in enumerate(points):
                if point in skip:
                    continue
                if progress is not None:
                    done = (number * len(points) + index) / (rounds * len(points))
                    elapsed = time.perf_counter() - start
                    progress(
                        f"check round {number + 1}/{rounds}",
                        elapsed,
                        elapsed / done if done else elapsed,
                    )
                row = attempt(bench, point, dtype, cache)
                if row is not None:
                    times.setdefault(point, []).append(row)
                else:
                    skip.add(point)
                    times.pop(point, None)
    for point, rows in times.items():
        pooled = tuple(t for row in rows for t in row.times_s)
        yield (
            point,
            replace(
                rows[0], times_s=pooled, slowdown=statistics.median(row.slowdown for row in rows)
            ),
        )
