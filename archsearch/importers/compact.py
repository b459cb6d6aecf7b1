"""Choosing the few rows of a large kernel table from which the rest can be predicted.

A Gaussian process with fixed length scales over log(time / physical base) represents any smooth
interpolation. Rows of a regular grid come first; then, one at a time, the row that improves the
prediction of the others most. (The worst predicted row each time, the noisy ones, predicted an
H100's rest worse than random rows did.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from archsearch.architecture.op_kinds import OP_KINDS
from archsearch.architecture.ops import Attention, Gemm
from archsearch.estimate import Array
from archsearch.latency.regression import nonnegative_fit

Op = Gemm | Attention
Key = tuple[Op, str]  # an op and its mode

AMPLITUDE: Final = 0.04  # variance of log(time / base) that the process explains: 20 %
NOISE: Final = 0.0009  # variance of one row: 3 %
POOL: Final = 8  # rows tried at each step, twice: the worst predicted and random ones
SAMPLE: Final = 1500  # rows on which a step is judged

# Drafts and verification live below 64 tokens a pass; the larger m are for prefill.
COMPACT_M: Final = (*range(1, 18), 32, 33, 48, 64, 128, 256, 512, 2048, 8192)
COMPACT_ROWS: Final = {"gemm": 1300, "decode": 550, "context": 250}
_GRID_M: Final = (1, 4, 16, 64, 512, 8192)
_GRID_NK: Final = (64, 512, 2048, 4096, 8192, 16384, 65536)


@dataclass(frozen=True)
class Candidates:
    """Rows to choose from. `inputs` [rows, d]: coordinates in units of the length scale at which
    rows stop telling of each other; `features` [rows, f]: what the base time is linear in;
    `times_s` [rows]."""

    inputs: Array
    features: Array
    times_s: Array

    @classmethod
    def of(cls, times: Mapping[Key, float]) -> Candidates:
        return cls(
            np.array([_inputs(op) for op, _ in times]),
            np.array([_features(op) for op, _ in times]),
            np.array(list(times.values()), dtype=float),
        )


def _inputs(op: Op) -> list[float]:
    """Coordinates of the interpolation: logs of sizes over length scales.

    The grid of an attention kernel is batch x KV heads, so their product matters most; but splits
    along the keys are chosen by the batch too: on A100 shapes of equal product differ by 9 % in the
    median and 48 % at the 90th percentile.
    """
    if isinstance(op, Gemm):
        return [math.log(op.m) / 8, math.log(op.n) / 8, math.log(op.k) / 8]
    return [
        math.log(op.batch) / 8,
        math.log(op.batch * op.kv_heads) / 2,
        math.log(op.q_heads / op.kv_heads) / 4,
        math.log(_reach(op)) / 2,
        math.log(op.tokens) / 4,
        math.log(op.head_dim) / 2,
        0.5 if op.window else 0.0,
    ]


def _features(op: Op) -> list[float]:
    """What the base time is linear in: a constant, weights or keys and values read, activations,
    arithmetic."""
    if isinstance(op, Gemm):
        return [*OP_KINDS[op.kind].base(op), float(op.flops())]
    queries = float(op.batch * op.tokens * op.q_heads * op.head_dim)
    return [1.0, float(op.kv_elements()), queries, queries * _reach(op)]


def _reach(op: Attention) -> int:
    """Keys that the last query sees: with a window over a long prompt far fewer than are read in
    all."""
    total = op.context + op.tokens
    return min(total, op.window) if op.window else total


def in_range(op: Op) -> bool:
    """Shapes that a compact profile is asked about: the m above; up to 256 sequences decoding, up
    to 16 being read in."""
    if isinstance(op, Gemm):
        return op.m in COMPACT_M
    return op.batch <= (256 if op.tokens == 1 else 16)


def compress(
    times: Mapping[Key, float], count: int, *, tick: Callable[[int], None] | None = None
) -> dict[Key, float]:
    """`count` rows of those in range."""
    keys = [key for key in times if in_range(key[0])] or list(times)
    rows = Candidates.of({key: times[key] for key in keys})
    first = np.array(
        [
            isinstance(op, Gemm) and op.m in _GRID_M and op.n in _GRID_NK and op.k in _GRID_NK
            for op, _ in keys
        ]
    )
    kept = choose(rows, first, count, tick=tick)
    return {keys[index]: times[keys[index]] for index in kept}


def kernel(a: Array, b: Array) -> Array:
    """Exponential of the Manhattan distance: continuous, kinks allowed, as kernel switches make
    them. [len(a), len(b)]."""
    return AMPLITUDE * np.exp(-np.abs(a[:, None, :] - b[None, :, :]).sum(-1))


def choose(
    rows: Candidates,
    first: NDArray[np.bool_],
    count: int,
    tick: Callable[[int], None] | None = None,
) -> NDArray[np.intp]:
    """Indices of `count` rows: those marked in `first` (cut to `count`), then greedily.

    At each step a pool of rows (half of them the worst predicted, weighed by how little is known
    there; half random) is tried, and the row stays that lowers the summed absolute log error of a
    fixed sample of all rows most. The posterior is kept for all rows and updated by one row at a
    time (pivoted Cholesky), so no matrix is inverted: O(POOL x SAMPLE x count^2). `tick` hears
    how many rows are chosen.
    """
    total = len(rows.times_s)
    count = min(count, total)
    random = np.random.default_rng(0)
    sample = (
        np.arange(total)
        if total <= SAMPLE
        else np.sort(random.choice(total, SAMPLE, replace=False))
    )
    start = np.flatnonzero(first)[:count]
    target = np.log(rows.times_s / (rows.features @ nonnegative_fit(rows.features, rows.times_s)))
    # Half the memory traffic, which is what this loop costs.
    factor = np.zeros((count, total), dtype=np.float32)
    error = target - float(np.mean(target))
    variance = np.full(total, AMPLITUDE)
    free = np.ones(total, dtype=bool)
    for step in range(count):
        if tick is not None and step % 20 == 0:
            tick(step)
        if step < len(start):
            pick = int(start[step])
        else:
            score = np.where(free, np.abs(error) * np.sqrt(np.maximum(variance, 0.0)), -1.0)
            worst = np.argpartition(score, -POOL)[-POOL:] if total > POOL else np.flatnonzero(free)
            open_rows = np.flatnonzero(free)
            pool = np.union1d(
                worst, random.choice(open_rows, min(POOL, len(open_rows)), replace=False)
            )
            pool = pool[free[pool]]
            moved = (
                kernel(rows.inputs[pool], rows.inputs[sample])
                - factor[:step, pool].T @ factor[:step, sample]
            )
            gain = error[pool] / (np.maximum(variance[pool], 0.0) + NOISE)
            after = np.abs(error[sample][None, :] - moved * gain[:, None])
            # Its own error goes: it will be in the table.
            pick = int(pool[np.argmin(after.sum(1) - np.abs(error[pool]))])
        covariance = (
            kernel(rows.inputs[pick : pick + 1], rows.inputs)[0]
            - factor[:step, pick] @ factor[:step]
        )
        pivot = max(float(covariance[pick]), 0.0) + NOISE
        factor[step] = covariance / np.sqrt(pivot)
        error = error - covariance / pivot * error[pick]
        variance = variance - factor[step] ** 2
        free[pick] = False
    return np.flatnonzero(~free)
