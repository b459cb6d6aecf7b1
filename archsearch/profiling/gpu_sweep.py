"""Which points to measure: what the candidate passes need, and of that what the model knows least
about (docs/profiles.md).

Each op's std in seconds, times how often it runs, is what it adds to the uncertainty of the passes;
a row also constrains ops of like sizes, so once an op is chosen its neighbours count less. Of
elementwise ops, lines in their size, the spread first points are enough.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import weight_bytes_per_pass
from archsearch.architecture.ops import (
    AllReduce,
    Attention,
    Elementwise,
    Gemm,
    Op,
    forward_ops,
    sample_op,
)
from archsearch.capacity import shard
from archsearch.errors import MissingDataError
from archsearch.estimate import Array
from archsearch.latency.ops import OpModel
from archsearch.profiles import Profile
from archsearch.profiling.layers import lean_supported
from archsearch.profiling.points import (
    Bench,
    Models,
    Point,
    draft_features,
    interleaved,
    measure_or_skip,
    op_features,
    spread,
    stack_point,
    together,
    unmeasured,
)
from archsearch.progress import Progress, silent
from archsearch.workload import DTYPE_BYTES

Need = tuple[Op, bool]
"""An op, and whether its operands come from memory."""

GPU_MODEL_LIMIT_BYTES: Final = 16 << 30
# A stack of layers holds more than any L2, and three layers at least.
STACK: Final = (512 << 20, 3)
GPU_BUDGET_S: Final = 300.0
# Size of the first batch behind the spread points.
BATCH: Final = 16
# A refit costs more the more rows there are, so batches grow with them.
BATCH_GROWTH: Final = 0.25
# Hyper-parameters are learnt anew when the rows have grown by this factor; in between a refit keeps
# them and is quick.
REFIT_GROWTH: Final = 1.6
# How far a row constrains its neighbours: the length scale, in the features below (log sizes), of
# the correlation assumed.
REACH: Final = 0.7
# Spread points before the first fit, per kind and cache state (and elementwise name; decode and
# verification apart).
SEEDS: Final = {"gemm": 16, "attention": 8, "elementwise": 6}
OTHER_SEEDS: Final = 8


@dataclass(frozen=True)
class Needs:
    """What a search will ask. `passes`: ops with counts; `wholes`: layer and forward points, most
    needed first."""

    passes: tuple[Mapping[Need, float], ...]
    wholes: tuple[Point, ...] = ()

    def ops(self) -> list[Need]:
        """Every op of every pass that a bench can measure alone, once, in order."""
        every = (need for counts in self.passes for need in counts)
        return list(dict.fromkeys(need for need in every if not isinstance(need[0], AllReduce)))

    def all_reduces(self) -> list[AllReduce]:
        """Every all-reduce of every pass, once: `archsearch.profiling.collectives` measures them
        where several GPUs are."""
        every = (op for counts in self.passes for op, _ in counts)
        return list(dict.fromkeys(op for op in every if isinstance(op, AllReduce)))


@dataclass(frozen=True)
class SweepResult:
    """What an adaptive sweep did. `relative_std`: predicted, median over the needed passes, op
    errors alone; None before a fit.

    `stopped`: `target` (std reached), `budget`, or `exhausted` (nothing left to measure).
    """

    new_rows: int
    relative_std: float | None
    stopped: str


@dataclass(frozen=True)
class Asked:
    """The passes a search will price. `ranks`: devices the target is split over; `steps`: drafts
    whose steps are priced; `models`: drafts measured whole."""

    batches: Sequence[int] = (1, 8, 32)
    contexts: Sequence[int] = (128, 512, 2048, 8192)
    verify_tokens: Sequence[int] = range(2, 18)
    ranks: int = 1
    steps: int = 96
    models: int = 24
    seed: int = 0


@dataclass(frozen=True)
class Room:
    """What the device holds. `cache_bytes`: its L2, above which nothing is warm."""

    memory_bytes: float = math.inf
    cache_bytes: float = math.inf


@dataclass(frozen=True)
class Stop:
    """When an adaptive sweep ends: at a predicted relative std of the median pass, after seconds,
    or after so many new rows."""

    error_target: float = 0.05
    budget_s: float = GPU_BUDGET_S
    max_rows: int | None = None


def needs(
    drafts: Sequence[Architecture],
    target: Architecture | None,
    dtype: str,
    mode: str,
    asked: Asked = Asked(),
    room: Room = Room(),
) -> Needs:
    """What a search among `drafts` for `target` will price on a GPU in one dtype and mode.

    Passes: a step of each of `asked.steps` drafts (one or two tokens; warm and cold), and target
    passes of 1 and of each of `asked.verify_tokens` tokens, at each of the batches, contexts in
    turn; the target split over the ranks, drafts on one device. Wholes: `asked.models` drafts as
    whole models, layers of the target, and the whole target where it fits `room`, both as one rank
    runs them.
    """
    rng = random.Random(f"needs {asked.seed}")
    batches, contexts = asked.batches, asked.contexts
    fused = mode == "graph"
    passes: list[Mapping[Need, float]] = []

    def add(
        arch: Architecture, batch: int, tokens: int, context: int, split: int, cold: bool
    ) -> None:
        found = forward_ops(
            arch, batch=batch, tokens=tokens, context=context, ranks=split, fused=fused
        )
        if fused:  # engines choose the tokens on the GPU
            found[sample_op(arch, batch=batch, tokens=tokens)] += 1
        held = room.cache_bytes / DTYPE_BYTES[dtype]
        passes.append({(op, _from_memory(op, cold, held)): float(n) for op, n in found.items()})

    chosen = spread(list(drafts), draft_features, asked.steps)
    for number, arch in enumerate(chosen):
        batch, context = batches[number % len(batches)], rng.choice(list(contexts))
        add(arch, batch, 1, context, 1, cold=True)
        add(arch, batch, 2 if number % 4 == 0 else 1, rng.choice(list(contexts)), 1, cold=False)
    if target is not None:
        for batch in batches:
            for number, tokens in enumerate((1, *asked.verify_tokens)):
                every = tokens in (1, 5, max(asked.verify_tokens))
                for context in contexts if every else [contexts[number % len(contexts)]]:
                    add(target, batch, tokens, context, asked.ranks, cold=True)
    asked = replace(asked, models=min(asked.models, len(chosen)))
    wholes = _whole_points(chosen, target, (dtype, mode), asked, room, rng)
    return Needs(tuple(passes), tuple(wholes))


def _from_memory(op: Op, cold: bool, cache_elements: float) -> bool:
    """Whether an op's operands come from memory: in a cold pass, or as the cache cannot hold them;
    elementwise ones never."""
    if isinstance(op, Gemm):
        return cold or op.weight_elements() > cache_elements
    if isinstance(op, Attention):
        return cold or op.kv_elements() > cache_elements
    return cold and isinstance(op, AllReduce)


def _whole_points(
    drafts: Sequence[Architecture],
    target: Architecture | None,
    how: tuple[str, str],
    asked: Asked,
    room: Room,
    rng: random.Random,
) -> list[Point]:
    (dtype, mode), batches, contexts = how, asked.batches, asked.contexts
    usable = [arch for arch in drafts if mode == "eager" or lean_supported(arch)]
    # Points of one model together: building it costs more than timing it.
    groups: list[list[Point]] = []
    short = [context for context in contexts if context <= 2048] or [min(contexts)]
    for number, arch in enumerate(spread(usable, draft_features, asked.models)):
        batch, context = batches[number % len(batches)], rng.choice(short)
        step = Point("forward", "warm", arch=arch, batch=batch, context=context)
        groups.append([step, replace(step, cache="cold")])
        if number % 4 == 0:
            groups[-1].append(replace(step, tokens=2))
        if number % 3 == 1:
            groups.append([stack_point(arch, dtype, STACK, batch, 1, context)])
    extra: list[list[Point]] = []
    target = None if target is None else shard(target, asked.ranks)  # what one device runs of it
    if target is not None and (mode == "eager" or lean_supported(target)):
        size, limit = DTYPE_BYTES[dtype], min(GPU_MODEL_LIMIT_BYTES, 0.4 * room.memory_bytes)
        layer = target.replace(num_hidden_layers=1, draft_vocab_size=1)
        if 3 * weight_bytes_per_pass(layer, size) < limit:
            context = contexts[1 % len(contexts)]
            for tokens in (1, 5, 9, 17):
                extra.append([stack_point(target, dtype, STACK, batches[0], tokens, context)])
        if weight_bytes_per_pass(target, size) < limit:
            cases = zip([*batches] * 3, (1, 5, 9, 3, 1, 5, 17, 7, 2), short * 9, strict=False)
            passes = [Point("forward", "warm", None, target, *case) for case in cases]
            extra[:0] = [passes[start : start + 3] for start in range(0, len(passes), 3)]
    return [point for group in interleaved(groups, extra) for point in group]


def _groups(needs: Iterable[Need]) -> list[list[Need]]:
    """Ops that tell about each other: one kind (and elementwise name, and decode or verification)
    in one cache state."""
    groups: dict[tuple[str, str, bool], list[Need]] = {}
    for op, cold in needs:
        name = "decode" if isinstance(op, Attention) and op.tokens == 1 else ""
        name = op.name if isinstance(op, Elementwise) else name
        groups.setdefault((op.kind, name, cold), []).append((op, cold))
    return list(groups.values())


def _reach(needs: Sequence[Need]) -> Array:
    """Squared distances [needs, needs], in REACH, of ops in `op_features`."""
    inputs = np.array([op_features(op) for op, _ in needs])
    return np.asarray(((inputs[:, None] - inputs[None]) ** 2).sum(-1) / REACH**2)


def seed_points(ops: Sequence[Need], seeds: Mapping[str, int] = SEEDS) -> list[Point]:
    """Spread points of every kind, cache state and elementwise name: enough for a first fit,
    extremes included."""
    found: list[Need] = []
    for members in _groups(ops):
        count = seeds.get(members[0][0].kind, OTHER_SEEDS)
        found += spread(members, lambda need: op_features(need[0]), count)
    return [*map(point_of, found)]


def point_of(need: Need) -> Point:
    """The point that measures an op in its cache state."""
    op, cold = need
    return Point(op.kind, "cold" if cold else "warm", op)


def pass_stds(passes: Iterable[Mapping[Need, float]], model: OpModel) -> Array:
    """Predicted relative std of each pass [passes]. Errors of ops of one kind and cache state are
    correlated as exp(-(distance / REACH)^2 / 2): near sizes err together, so their errors do not
    cancel."""
    stds = []
    for counts in passes:
        parts, variance = _priced(counts, model), 0.0
        for members in _groups(parts):
            errors = np.array([parts[need][1] for need in members])
            variance += float(errors @ np.exp(-0.5 * _reach(members)) @ errors)
        total = sum(seconds for seconds, _ in parts.values())
        stds.append(math.sqrt(variance) / total if total > 0 else 0.0)
    return np.array(stds)


def shares(passes: Iterable[Mapping[Need, float]], model: OpModel) -> dict[Need, float]:
    """What each op adds to the squared relative std of the passes, summed over them."""
    found: dict[Need, float] = {}
    for counts in passes:
        parts = _priced(counts, model)
        total = sum(seconds for seconds, _ in parts.values())
        for need, (_, error) in parts.items():
            found[need] = found.get(need, 0.0) + (error / total) ** 2
    return found


def _priced(counts: Mapping[Need, float], model: OpModel) -> dict[Need, tuple[float, float]]:
    """Seconds and their std that each op adds to a pass, all-reduces left out."""
    found = {}
    for need, count in counts.items():
        if not isinstance(need[0], AllReduce):
            seconds, std = model.op_s(*need)
            found[need] = (count * seconds, count * seconds * std)
    return found


def choose(candidates: Sequence[Need], weight: Mapping[Need, float], count: int) -> list[Need]:
    """`count` of `candidates` that together take most of `weight` (variance shares of ops) away.

    Greedy. A row at one op lowers the variance of an op at distance d (in `op_features`, same kind
    and cache state) by the share exp(-(d / REACH)^2), the square of a Gaussian correlation.
    """
    chosen: list[tuple[float, Need]] = []
    wanted = set(candidates)
    for members in _groups(dict.fromkeys([*weight, *candidates])):
        taken_away = np.exp(-_reach(members))
        left = np.array([weight.get(need, 0.0) for need in members])
        free = np.array([need in wanted for need in members])
        for _ in range(min(count, int(free.sum()))):
            gains = np.where(free, taken_away @ left, -1.0)
            best = int(gains.argmax())
            if gains[best] <= 0:
                break
            chosen.append((float(gains[best]), members[best]))
            # what that row leaves unknown of its neighbours, itself (share 1) among them
            left = left * (1.0 - taken_away[best])
            free[best] = False
    chosen.sort(key=lambda item: -item[0])
    return [need for _, need in chosen[:count]]


def op_models() -> Callable[[Profile, str, str], OpModel]:
    """`OpModel`, refitted quickly while the rows have not grown by REFIT_GROWTH since its
    hyper-parameters were learnt."""
    last: dict[tuple[str, str], tuple[OpModel, int]] = {}

    def fit(profile: Profile, dtype: str, mode: str) -> OpModel:
        known = last.get((dtype, mode))
        if known is not None and len(profile.rows) < REFIT_GROWTH * known[1]:
            return OpModel(profile, dtype, mode, like=known[0])
        model = OpModel(profile, dtype, mode)
        last[dtype, mode] = (model, len(profile.rows))
        return model

    return fit


def adaptive_sweep(
    bench: Bench,
    wanted: Needs,
    dtype: str,
    stop: Stop = Stop(),
    *,
    progress: Progress = silent,
    fit: Callable[[Profile, str, str], OpModel] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> SweepResult:
    """Measure what `wanted` needs into the bench's profile until `stop`. Rows that the profile
    holds are not measured again.

    First spread points (seeds), with every third point a whole model or stack of layers; then
    batches chosen where the model is least sure, the remaining wholes among them. Wholes are
    measured to the end even when the ops' target is reached. Where the model cannot be fitted (too
    few rows of a kind, as for float8 with GEMMs alone) the spread order goes on.
    """
    start = clock()
    fit = fit or op_models()
    new = 0
    attempted: set[Point] = set()
    model_cache: Models = {}

    def spent() -> bool:
        return clock() - start >= stop.budget_s or (
            stop.max_rows is not None and new >= stop.max_rows
        )

    def measure(points: Sequence[Point], what: str) -> None:
        nonlocal new
        for number, point in enumerate(points):
            if spent():
                return
            attempted.add(point)
            words = f"{dtype} {bench.mode} {what} {number + 1}/{len(points)}"
            progress(words, clock() - start, stop.budget_s)
            new += measure_or_skip(bench, point, dtype, model_cache) is not None

    def open_points(points: Iterable[Point]) -> list[Point]:
        return [point for point in unmeasured(bench, points, dtype) if point not in attempted]

    ops = wanted.ops()
    wholes = open_points(wanted.wholes)
    std: float | None = None
    with torch.inference_mode():
        third = len(wholes) // 3
        measure(_mixed(open_points(seed_points(ops)), wholes[:third]), "first points")
        wholes = wholes[third:]
        while not spent():
            rough = (need for need in ops if not isinstance(need[0], Elementwise))
            left = open_points(map(point_of, rough))
            open_ops = [(point.op, point.cache == "cold") for point in left if point.op]
            size = max(BATCH, int(BATCH_GROWTH * len(bench.profile.rows)))
            try:
                model = fit(bench.profile, dtype, bench.mode)
            except MissingDataError:
                picked = spread(open_ops, lambda need: (op_features(need[0]) + [0.0] * 5)[:5], size)
            else:
                for cold in (True, False):
                    model.prepare([op for op, state in ops if state == cold], cold)
                std = float(np.median(pass_stds(wanted.passes, model)))
                reached = std < stop.error_target
                if reached and not wholes:
                    return SweepResult(new, std, "target")
                picked = []
                if not reached:
                    picked = choose(open_ops, shares(wanted.passes, model), size)
            chosen = [point_of(need) for need in picked]
            some = wholes[: max(4, size // 4)] if chosen else wholes
            wholes = wholes[len(some) :]
            if not chosen and not some:
                return SweepResult(new, std, "exhausted")
            measure(_mixed(chosen, some), "chosen points" if chosen else "whole models")
        try:
            std = float(np.median(pass_stds(wanted.passes, fit(bench.profile, dtype, bench.mode))))
        except MissingDataError:
            pass
    return SweepResult(new, std, "budget")


def _mixed(points: Sequence[Point], wholes: Sequence[Point]) -> list[Point]:
    """`wholes` spread evenly among `points`; those of one model stay together."""
    groups = interleaved([[point] for point in points], together(wholes, ("forward", "layer")))
    return [point for group in groups for point in group]


def fp8_needs(wanted: Needs) -> Needs:
    """The GEMMs of `wanted` that can run in float8 (n and k multiples of 16), cold, without
    wholes."""

    def can(op: Op, cold: bool) -> bool:
        return cold and isinstance(op, Gemm) and op.n % 16 == op.k % 16 == 0

    kept = ({need: n for need, n in counts.items() if can(*need)} for counts in wanted.passes)
    return replace(wanted, passes=tuple(filter(None, kept)), wholes=())
