"""What CPU and GPU sweeps share: points, how far apart they lie, how one is made ready and
measured.

Nothing here knows which device a `Bench` is on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import weight_bytes_per_pass
from archsearch.architecture.op_kinds import OP_KINDS, row_sizes
from archsearch.architecture.ops import Attention, Op
from archsearch.profiles import ForwardShape, Measurement, Profile, freeze_shape
from archsearch.profiling import kernels, layers
from archsearch.profiling.timer import Timer, WeightPool
from archsearch.workload import DTYPE_BYTES

T = TypeVar("T")
Models = dict[Architecture, Any]
"""Modules by their shapes, the last one that was built alone."""
SHORTAGES: Final = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


@dataclass(frozen=True, slots=True)
class Point:
    """One thing to measure: an op, a stack of layers or a whole model."""

    kind: str
    cache: str
    op: Op | None = None
    arch: Architecture | None = None
    batch: int = 1
    tokens: int = 1
    context: int = 256

    def shape(self) -> dict[str, object]:
        if self.op is not None:
            return row_sizes(self.op)
        assert self.arch is not None
        return ForwardShape(self.arch, self.batch, self.tokens, self.context).to_dict()

    def describe(self) -> str:
        """A few words for a person."""
        if self.op is not None:
            said = ((name, value) for name, value in self.shape().items() if value is not None)
            return f"{self.kind} ({', '.join(f'{name} {value}' for name, value in said)})"
        assert self.arch is not None
        sizes = f"batch {self.batch}, tokens {self.tokens}, context {self.context}"
        return f"{self.kind} {self.arch.label()} ({sizes})"


def spread(items: Sequence[T], features: Callable[[T], Sequence[float]], count: int) -> list[T]:
    """`count` items by farthest-point sampling in feature space: each next one is the farthest from
    those taken."""
    items = list(dict.fromkeys(items))
    if len(items) <= count:
        return items
    vectors = torch.tensor([list(features(item)) for item in items], dtype=torch.float64)
    # from the item nearest the middle on, whatever the order of `items`
    taken = [int((vectors - vectors.mean(0)).square().sum(1).argmin())]
    distance = (vectors - vectors[taken[0]]).square().sum(1)
    while len(taken) < count:
        taken.append(int(distance.argmax()))
        distance = torch.minimum(distance, (vectors - vectors[taken[-1]]).square().sum(1))
    return [items[i] for i in taken]


def interleaved(*groups: Sequence[T]) -> list[T]:
    """Merged so that every prefix holds the same share of each group."""
    keyed = [
        ((i + 0.5) / len(group), number, item)
        for number, group in enumerate(groups)
        for i, item in enumerate(group)
    ]
    return [item for *_, item in sorted(keyed, key=lambda entry: entry[:2])]


def together(points: Iterable[Point], kinds: Sequence[str] = ("forward",)) -> list[list[Point]]:
    """Points of one whole model in one group, at the place of the first: building a model costs
    more than timing it."""
    groups: dict[tuple[str, Architecture | None] | int, list[Point]] = {}
    for number, point in enumerate(points):
        key = (point.kind, point.arch) if point.kind in kinds else number
        groups.setdefault(key, []).append(point)
    return list(groups.values())


def stack_point(
    arch: Architecture, dtype: str, least: tuple[int, int], batch: int, tokens: int, context: int
) -> Point:
    """A stack of so many layers of `arch` that they hold more than the last-level cache. `least`:
    bytes and layers."""
    layer = arch.replace(draft_vocab_size=1, num_hidden_layers=1)
    size = weight_bytes_per_pass(layer, DTYPE_BYTES[dtype])
    many = max(least[1], min(48, math.ceil(least[0] / size)))
    full = arch.replace(num_hidden_layers=many, window_pattern="L", sliding_window=None)
    return Point("layer", "cold", arch=full, batch=batch, tokens=tokens, context=context)


def draft_features(arch: Architecture) -> list[float]:
    """What distinguishes drafts, in log sizes."""
    return [
        math.log(arch.hidden_size),
        math.log(arch.intermediate_size),
        0.7 * math.log(arch.num_hidden_layers),
        0.5 * math.log(arch.head_rows),
        0.3 * math.log(arch.q_size),
        0.3 * math.log(arch.kv_size),
    ]


def op_features(op: Op) -> list[float]:
    """Log sizes in which nearby ops take related times. The number of tokens counts double: kernels
    change with it."""
    place = OP_KINDS[op.kind].place(op)
    if isinstance(op, Attention):
        place[0] *= 2.0
    return place


@dataclass(frozen=True)
class Prepared:
    """A point made ready to be timed. `before`: untimed ahead of every repeat; `calls`: per repeat,
    None for the timer's choice; `per`: what a time is divided by (layers of a stack)."""

    run: kernels.Run
    before: kernels.Run | None = None
    budget_s: float = 0.05
    calls: int | None = None
    per: int = 1


class Bench:
    """Turns points into measurements on one device in one mode: pools of weights, the probe, and
    the timer that uses it. `skipped`: what did not fit the memory.

    A subclass makes the timer, and says what else it does with a point and its row.
    """

    def __init__(
        self, profile: Profile, mode: str, cold_bytes: int, device: torch.device | str = "cpu"
    ) -> None:
        self.profile, self.mode, self.cold_bytes = profile, mode, cold_bytes
        self.skipped: list[str] = []
        self._on = device
        self._pools: dict[str, WeightPool] = {}
        self._timers: dict[str, Timer] = {}
        self.flush: kernels.Run = layers.cache_flusher(cold_bytes, device)

    def new_timer(self, dtype: str) -> Timer:
        raise NotImplementedError

    def prepare(self, point: Point, dtype: str, model_cache: Models) -> Prepared:
        """`point` ready to be timed, as transformers runs it."""
        pool, room = self.pool(dtype), {"batch": point.batch, "context": point.context}
        if point.op is not None:
            kind = OP_KINDS[point.op.kind]
            size = self.cold_bytes if point.cache == "cold" else kind.warm_bytes
            return Prepared(kernels.eager_call(point.op, pool, size), budget_s=kind.budget_s)
        assert point.arch is not None
        if point.kind == "layer":
            stack = layers.layer_stack(point.arch, pool, tokens=point.tokens, **room)
            return Prepared(stack, None, 0.4, 1, point.arch.num_hidden_layers)
        if point.arch not in model_cache:
            model_cache.clear()
            model_cache[point.arch] = layers.build_model(point.arch, pool)
        run = layers.ForwardRun(model_cache[point.arch], **room).step(point.tokens)
        if point.cache == "cold":
            return Prepared(run, self.flush, 0.4, 1)
        fits = weight_bytes_per_pass(point.arch, pool.itemsize) < self.cold_bytes
        return Prepared(run, None, 0.4, 4 if fits else 1)

    def finished(self, row: Measurement, point: Point, dtype: str) -> Measurement:
        """`row` with what else is known of it."""
        return row

    def release(self) -> None:
        """Give back memory that earlier points left reserved."""

    def timer(self, dtype: str) -> Timer:
        if dtype not in self._timers:
            self._timers[dtype] = self.new_timer(dtype)
        return self._timers[dtype]

    def reference_s(self, key: str, measure: Callable[[], float]) -> float:
        """The reference speed of a probe: measured once and kept in the profile, so that all rows
        share it."""
        known = self.profile.probe_reference_s
        if key not in known:
            known[key] = measure()
            if self.profile.folder is not None:
                self.profile.save_header()
        return known[key]

    @property
    def slowdowns(self) -> list[float]:
        return [slowdown for timer in self._timers.values() for slowdown in timer.slowdowns]

    def pool(self, dtype: str) -> WeightPool:
        """Random numbers on the device, a little more than `cold_bytes`."""
        if dtype not in self._pools:
            size = self.cold_bytes + (32 << 20)
            self._pools[dtype] = WeightPool(size, getattr(torch, dtype), str(self._on))
        return self._pools[dtype]

    def measure(self, point: Point, dtype: str, model_cache: Models | None = None) -> Measurement:
        """Time one point. `model_cache` keeps the last whole model so that its several points share
        it. Raises torch.OutOfMemoryError where the point does not fit."""
        ready = self.prepare(point, dtype, {} if model_cache is None else model_cache)
        timing = self.timer(dtype).time(
            ready.run, before=ready.before, budget_s=ready.budget_s, calls=ready.calls
        )
        times = tuple(t / ready.per for t in timing.times_s)
        shape = freeze_shape(point.shape())
        row = Measurement(point.kind, shape, dtype, self.mode, point.cache, times, timing.slowdown)
        return self.finished(row, point, dtype)

    def measure_again_if_noisy(
        self, point: Point, dtype: str, model_cache: Models | None = None
    ) -> Measurement:
        """`measure`, up to three times while something disturbs it; the steadiest counts, an
        unthrottled one before others."""
        best = self.measure(point, dtype, model_cache)
        for _ in range(2):
            if not best.grossly_noisy and not best.throttled:
                break
            again = self.measure(point, dtype, model_cache)
            best = min(best, again, key=lambda row: (row.throttled, row.iqr_s / row.median_s))
        return best


def row_key(point: Point, dtype: str, mode: str) -> tuple[object, ...]:
    """`Measurement.key` of the row that `point` becomes."""
    return (point.kind, freeze_shape(point.shape()), dtype, mode, point.cache)


def attempt(bench: Bench, point: Point, dtype: str, model_cache: Models) -> Measurement | None:
    """The measurement; None where the device's memory was too small: then the point is listed in
    `bench.skipped` and everything it took is given back."""
    try:
        return bench.measure_again_if_noisy(point, dtype, model_cache)
    except RuntimeError as error:
        shortage = out_of_memory(error)
        if shortage is None:
            raise
        words = f"{dtype} {bench.mode} {point.describe()}: {str(shortage).partition('. ')[0]}"
    model_cache.clear()
    bench.release()
    bench.skipped.append(words)
    return None


def measure_or_skip(
    bench: Bench, point: Point, dtype: str, model_cache: Models
) -> Measurement | None:
    """`attempt`, recorded in the bench's profile."""
    row = attempt(bench, point, dtype, model_cache)
    if row is not None:
        bench.profile.record(row)
    return row


def out_of_memory(error: BaseException) -> BaseException | None:
    """What says that memory was short: the error itself, or one behind it (ending the capture of a
    CUDA graph that failed raises another), also as cuBLAS and the driver word it; None where it is
    something else."""
    found: BaseException | None = error
    while found is not None:
        said = any(words in str(found) for words in SHORTAGES)
        if said or isinstance(found, torch.OutOfMemoryError):
            return found
        found = found.__cause__ or found.__context__
    return None


def unmeasured(bench: Bench, points: Iterable[Point], dtype: str) -> list[Point]:
    """The points without a row that can be used: none, one that something disturbed, or one of a
    device that throttled."""
    rows = bench.profile.rows.items()
    known = {key for key, row in rows if not row.grossly_noisy and not row.throttled}
    return [point for point in points if row_key(point, dtype, bench.mode) not in known]
