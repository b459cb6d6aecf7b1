"""A whole space of independent drafts scored over a mix of work at once: the numbers of
`MixScorer`, without their std."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from archsearch.architecture.counts import kv_cache_bytes, parameters
from archsearch.architecture.grid import Array, ShapeGrid
from archsearch.latency.grid import GridLatency
from archsearch.search.grid import GridScores, feasible
from archsearch.traffic.held import held_by
from archsearch.traffic.mix import LoadPart
from archsearch.traffic.mix_scorer import MixScorer
from archsearch.traffic.served import (
    Load,
    busy_workload,
    context_of,
    new_tokens,
    shares_steps,
    steady,
    training_exaflop,
    training_tokens,
)
from archsearch.traffic.services import prefill_s
from archsearch.traffic.steady import MOST_RUNNING, RoundTokens, Service, Steady

CHUNK: Final = 1 << 17  # numbers of seconds that are held together, [sizes, shapes]


@dataclass(frozen=True)
class _Chosen:
    """A part's best server of each shape, flat: drafting at `gamma`, or (0) not. The other arrays
    are of the best that drafts."""

    best: Steady
    gamma: NDArray[np.int8]
    drafting_gamma: NDArray[np.int8]
    tau: Array
    draft_s: Array
    round_s: Array
    alpha: Array


class _PartGrid:
    """One part of the mix over a grid."""

    def __init__(self, scorer: MixScorer, grid: ShapeGrid, part: LoadPart) -> None:
        self.scorer, self.grid, self.part = scorer, grid, part
        latency, target = scorer.latency, scorer.target
        workload = replace(scorer.workload, context_len=part.context)
        alone = scorer.held_alone(part)
        self.held = held_by(latency.facts, target, scorer.device, workload, grid)  # type: ignore[attr-defined]
        fewest = MOST_RUNNING if self.held is None else int(self.held.min())
        self.load = Load.of(part, (fewest, alone), latency.largest_batch)
        self.at = np.array(self.load.sizes, dtype=float)
        works = [replace(workload, batch_size=size) for size in self.load.sizes]
        self.rounds = [GridLatency(latency, target, grid, work, scorer.gammas) for work in works]
        self.decode = np.array([latency.decode_s(target, work).value for work in works])
        new = new_tokens(part)
        self.alone_s = prefill_s(
            latency, target, None, busy_workload(workload, part, self.load), new
        )
        self.new = new
        plain = Service(
            self.at,
            self.decode,
            RoundTokens(),
            self.alone_s,
            part.output.mean,
            self.load.held[1],
            shares_steps(latency),
            part.output.cv2,
        )
        self.plain = steady(plain, part)

    def choose(self, bodies: slice) -> _Chosen:
        """The best of all gammas and of drafting nothing, of some bodies."""
        scorer, some = self.scorer, self.grid.part(bodies)
        size = math.prod(some.shape)

        def flat(values: Any) -> Array:
            return np.broadcast_to(np.asarray(values, dtype=float), some.shape).reshape(size)

        alpha, drift = scorer.acceptance.alphas(some, context_of(scorer, self.part))  # type: ignore[attr-defined]
        prefill = self.alone_s + flat(self.rounds[0].prompt_s(bodies, self.new))
        held: Any = (
            MOST_RUNNING if self.held is None else np.maximum(self.held[bodies].reshape(size), 1)
        )
        idle = np.stack(
            [
                flat(decode + rounds.idle(bodies))
                for decode, rounds in zip(self.decode, self.rounds, strict=True)
            ]
        )
        service = Service(
            self.at,
            idle,
            RoundTokens(),
            prefill,
            self.part.output.mean,
            held,
            shares_steps(scorer.latency),
            self.part.output.cv2,
        )
        off = steady(service, self.part)
        most = RoundTokens.of(flat(alpha), drift, max(scorer.gammas))
        best: Steady | None = None
        main = int(np.argmin(np.abs(self.at - scorer.workload.batch_size)))
        gamma = np.zeros(size, dtype=np.int8)
        kept = {name: np.zeros(size) for name in ("tau", "draft_s", "round_s")}
        for times in zip(*(rounds.rounds(bodies) for rounds in self.rounds), strict=True):
            each = times[0].gamma
            seconds = np.stack([flat(time.round_s) for time in times])
            tokens = RoundTokens(most.reach[:each])
            found = steady(replace(service, round_s=seconds, tokens=tokens), self.part)
            better = np.ones(size, dtype=bool) if best is None else _less(found, best)
            best = found if best is None else found.where(better, best)
            gamma[better] = each
            for name, values in (
                ("tau", tokens.tau),
                ("draft_s", flat(times[main].draft_s)),
                ("round_s", seconds[main]),
            ):
                np.copyto(kept[name], values, where=better)
        assert best is not None
        drafts = _less(best, off) | (len(scorer.gammas) == 1)  # one that was asked for is priced
        return _Chosen(
            best.where(drafts, off),
            np.where(drafts, gamma, 0).astype(np.int8),
            gamma,
            **kept,
            alpha=flat(alpha),
        )


class MixGridScorer:
    """Scores all shapes of a grid as `scorer` does one by one."""

    def __init__(self, scorer: MixScorer, grid: ShapeGrid) -> None:
        self.scorer, self.grid = scorer, grid
        self.parts = [_PartGrid(scorer, grid, part) for part in scorer.mix.parts]

    def chunks(self) -> Iterator[GridScores]:
        """Scores of all shapes, some bodies at a time."""
        bodies = self.grid.shape[0]
        most = max(len(part.at) for part in self.parts)
        size = max(1, CHUNK // (most * math.prod(self.grid.shape[1:])))
        for start in range(0, bodies, size):
            yield self.scores(slice(start, min(start + size, bodies)))

    def scores(self, bodies: slice) -> GridScores:
        """Scores of the shapes of some bodies."""
        some = self.grid.part(bodies)
        found = [part.choose(bodies) for part in self.parts]
        main = found[self.scorer.mix.parts.index(self.scorer.main)]
        weights = [part.part.weight for part in self.parts]
        tpot = _sum(
            [weight * each.best.tpot_s for weight, each in zip(weights, found, strict=True)]
        )
        plain = math.fsum(
            weight * part.plain.tpot_s for weight, part in zip(weights, self.parts, strict=True)
        )
        speedup, worth = plain / tpot, plain / tpot
        if self.scorer.mix.objective in ("throughput", "tokens_per_device"):
            alone = 1.0 / math.fsum(
                w / part.plain.tokens_per_s for w, part in zip(weights, self.parts, strict=True)
            )
            worth = (
                1.0
                / _sum([w / each.best.tokens_per_s for w, each in zip(weights, found, strict=True)])
                / alone
            )

        def whole(values: Any) -> Any:
            return values.reshape(some.shape)

        return GridScores(
            bodies.start,
            whole(speedup),
            whole(main.drafting_gamma),
            whole(main.alpha),
            whole(main.tau),
            whole(main.draft_s),
            whole(main.round_s),
            feasible=self._feasible(some, found) & self._holds(bodies, some),
            worth=whole(worth),
        )

    def _holds(self, bodies: slice, some: ShapeGrid) -> NDArray[np.bool_]:
        """At least one request of every part."""
        fits = np.ones(some.shape, dtype=bool)
        for part in self.parts:
            if part.held is not None:
                fits &= part.held[bodies] >= 1
        return fits

    def _feasible(self, some: ShapeGrid, found: list[_Chosen]) -> NDArray[np.bool_]:
        """Within the limits of the space and of the mix."""
        scorer, limits = self.scorer, self.scorer.mix.limits
        fits, size = feasible(scorer, some), scorer.workload.dtype_bytes
        count: Any = parameters(some)
        for part, each in zip(self.parts, found, strict=True):
            point = each.best
            if limits.tpot_ms is not None:
                fits &= (1e3 * point.tpot_s / limits.tpot_ms - 1.0 <= 0.0).reshape(some.shape)
            if limits.ttft_ms is not None:
                fits &= (1e3 * point.ttft_s / limits.ttft_ms - 1.0 <= 0.0).reshape(some.shape)
            if limits.ttft_p99_ms is not None:
                fits &= (1e3 * point.ttft_p99_s / limits.ttft_p99_ms - 1.0 <= 0.0).reshape(
                    some.shape
                )
            if limits.memory_gib is not None:
                running = np.maximum(1, np.rint(point.running)).reshape(some.shape)
                used = (
                    count * size + kv_cache_bytes(some, part.part.context, size) * running
                ) / 2**30
                fits &= used / limits.memory_gib - 1.0 <= 0.0
        if limits.parameters is not None:
            fits &= count / limits.parameters - 1.0 <= 0.0
        if limits.training_exaflop is not None:
            tokens = training_tokens(scorer.context, count)
            fits &= training_exaflop(count, tokens) / limits.training_exaflop - 1.0 <= 0.0
        return fits


def _less(first: Steady, second: Steady) -> NDArray[np.bool_]:
    """Which of `first` is the better server: `served._cost` over arrays."""
    cost, other = (np.where(each.full, -each.tokens_per_s, each.tpot_s) for each in (first, second))
    return np.asarray(np.where(first.full == second.full, cost < other, np.logical_not(first.full)))


def _sum(arrays: list[Array]) -> Array:
    return np.asarray(sum(arrays[1:], start=arrays[0]))
