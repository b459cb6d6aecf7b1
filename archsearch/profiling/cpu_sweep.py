"""On a CPU: which points to measure, in which order, within a budget (docs/profiles.md); and the
check of the model on whole drafts it has not seen."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import Any

import torch

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import weight_bytes_per_pass
from archsearch.architecture.ops import Attention, Elementwise, Gemm, forward_ops, layer_ops
from archsearch.profiles import ForwardShape, Measurement, Profile
from archsearch.profiling import layers
from archsearch.profiling.points import (
    Bench,
    Models,
    Point,
    attempt,
    draft_features,
    interleaved,
    measure_or_skip,
    op_features,
    spread,
    stack_point,
    together,
    unmeasured,
)
from archsearch.profiling.timer import Probe, Timer
from archsearch.progress import Progress, silent
from archsearch.workload import DTYPE_BYTES

CONTEXTS = (64, 256, 512, 1024)
VERIFY_TOKENS = tuple(range(1, 10))
WHOLE_PASSES = (
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
"""(tokens, context) of the target's passes that are run whole."""
FORWARD_MODEL_LIMIT_BYTES = 4 << 30
CHECKED = {
    False: ((96, 192, 384, 640), FORWARD_MODEL_LIMIT_BYTES),
    True: ((192, 768, 1536), 32 << 30),
}
"""Contexts of a check and the bytes of a target that is run whole, on a CPU and on a GPU."""


def _ops(
    architectures: Iterable[Architecture],
    tokens: Iterable[int],
    contexts: Iterable[int],
    batch: int,
    kind: type,
) -> list[Any]:
    """The ops of a kind that passes of the architectures run, each once."""
    passes = product(architectures, tokens, contexts)
    found = chain.from_iterable(
        forward_ops(arch, batch=batch, tokens=count, context=context)
        for arch, count, context in passes
    )
    return list(dict.fromkeys(op for op in found if isinstance(op, kind)))


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
    targets = [target] if target is not None else []
    steps = spread(_ops(drafts, (1,), CONTEXTS[:1], batch, Gemm), op_features, 56)
    gemms = [Point("gemm", cache, op) for op in steps for cache in ("cold", "warm")]
    pairs = [replace(op, m=2 * batch) for op in spread(steps, op_features, 12)]
    gemms += [
        Point("gemm", "cold", op)
        for op in [*pairs, *_ops(targets, VERIFY_TOKENS, CONTEXTS[:1], batch, Gemm)]
    ]
    attentions = [
        Point("attention", cache, op)
        for op in spread(_ops(drafts, (1,), CONTEXTS, batch, Attention), op_features, 24)
        for cache in ("warm", "cold")
    ]
    attentions += [
        Point("attention", "cold", op)
        for op in _ops(targets, (1, 2, 3, 5, 7, 9), CONTEXTS, batch, Attention)
    ]
    forwards = []
    for arch in spread(drafts, draft_features, 36):
        step = Point("forward", "warm", arch=arch, batch=batch, context=rng.choice(CONTEXTS))
        forwards += [step, replace(step, cache="cold")]
        if rng.random() < 0.25:
            forwards.append(replace(step, tokens=2))
    stacks = [
        stack_point(arch, dtype, (160 << 20, 2), batch, 1, rng.choice(CONTEXTS))
        for arch in spread(drafts, draft_features, 14)[2:]
    ]
    limit = min(FORWARD_MODEL_LIMIT_BYTES, memory_bytes / 2)
    whole = [
        Point("forward", "warm", None, arch, batch, *case)
        for arch in targets
        if 2 * weight_bytes_per_pass(arch, DTYPE_BYTES[dtype]) < limit
        for case in WHOLE_PASSES
    ]
    small = _elementwise(drafts, targets, batch)
    # A draft and the target may share a GEMM: planned once.
    return list(dict.fromkeys(interleaved(gemms, attentions, small, whole, forwards, stacks)))


def _elementwise(
    drafts: Sequence[Architecture], targets: Sequence[Architecture], batch: int
) -> list[Point]:
    """Up to six sizes of each elementwise op, from the smallest that runs to the largest."""
    elements: dict[str, set[int]] = {}
    passes = [*product(drafts, (1,)), *product(targets, (1, 5, 9))]
    for arch, tokens in passes:
        ops = layer_ops(arch, batch=batch, tokens=tokens, context=64, window=None)
        for op in [*ops, Elementwise("embed", arch.hidden_size)]:
            if isinstance(op, Elementwise):
                elements.setdefault(op.name, set()).add(op.elements)
    small = []
    for name, sizes in sorted(elements.items()):
        ordered = sorted(sizes)
        picks = {ordered[round(i * (len(ordered) - 1) / 5)] for i in range(6)}
        small += [Point("elementwise", "warm", Elementwise(name, size)) for size in sorted(picks)]
    return small


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
    bench: Bench, points: dict[str, list[Point]], *, budget_s: float, progress: Progress = silent
) -> int:
    """Measure the points of each dtype in turn until done or the budget is spent; returns how many
    rows are new.

    The dtypes share the budget in proportion to their rank: the first gets most. Points that do not
    fit the device's memory are listed in `bench.skipped`.
    """
    start, new, spent = time.perf_counter(), 0, 0.0
    total = sum(1.0 / (rank + 1) for rank in range(len(points)))
    with torch.inference_mode():
        for rank, (dtype, todo) in enumerate(points.items()):
            spent += budget_s * (1.0 / (rank + 1)) / total
            model_cache: Models = {}
            pending = list(chain(*together(unmeasured(bench, todo, dtype))))
            for number, point in enumerate(pending):
                elapsed = time.perf_counter() - start
                if elapsed > spent:
                    break
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
        step = Point("forward", "warm", arch=arch, context=context)
        points += [step, replace(step, cache="cold")]
    if target is None or not (mode == "eager" or layers.lean_supported(target)):
        return points
    if 2 * weight_bytes_per_pass(target, DTYPE_BYTES[dtype]) < min(limit, memory_bytes / 2):
        pairs = [(tokens, context) for tokens in range(2, 10) for context in contexts]
        points += [
            Point("forward", "warm", None, target, 1, *case)
            for case in rng.sample(pairs, min(max(4, count // 2), len(pairs)))
        ]
    return points


def measure_points(
    bench: Bench, points: Sequence[Point], dtype: str, rounds: int = 2, progress: Progress = silent
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
            cache: Models = {}
            for index, point in enumerate(points):
                if point in skip:
                    continue
                done = (number * len(points) + index) / (rounds * len(points))
                elapsed = time.perf_counter() - start
                whole = elapsed / done if done else elapsed
                progress(f"check round {number + 1}/{rounds}", elapsed, whole)
                row = attempt(bench, point, dtype, cache)
                if row is not None:
                    times.setdefault(point, []).append(row)
                else:
                    skip.add(point)
                    times.pop(point, None)
    for point, rows in times.items():
        pooled = tuple(t for row in rows for t in row.times_s)
        slowdown = statistics.median(row.slowdown for row in rows)
        yield point, replace(rows[0], times_s=pooled, slowdown=slowdown)
