"""What plain steps and rounds take over many conditions at once: priced at a ladder of them, read
off in between.

Kernels of one batch are priced in milliseconds, so a curve of hundreds of points is priced at some
tens (`ladder`) and read off in between, straight in the logarithms of both axes; std likewise.
Everything is [conditions] or [conditions, gammas], seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import ShapeGrid
from archsearch.architecture.ops import Part, PassOps
from archsearch.drafters.drafter import Draft, Drafter
from archsearch.drafters.registry import as_drafter
from archsearch.latency.drafted import rows_of
from archsearch.latency.grid import GridLatency
from archsearch.latency.rounds import verified_rows
from archsearch.workload import Workload

Array = NDArray[np.float64]
EXACT: Final = 8  # every batch size up to this one is priced
STEP: Final = 2.0**0.25  # from one rung of a ladder to the next
LEAST: Final = 1e-9  # seconds; keeps logarithms of what takes nothing finite


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of `target` and `drafter` at `at` (ascending batch sizes, or contexts). `idle`: what
    the loaded draft costs a step that drafts nothing. `source`: the weakest of all."""

    at: Array
    gammas: tuple[int, ...]
    decode: Array
    decode_std: Array
    idle: Array
    draft: Array
    verify: Array
    verify_std: Array
    round: Array
    round_std: Array
    source: str
    host_bound: NDArray[np.bool_]

    def read(self, points: Sequence[float] | Array) -> RoundTimes:
        """The times at `points`, each between the first and the last of `at`."""
        wanted = np.asarray(points, dtype=float)
        rows = high = np.zeros(len(wanted), dtype=int)
        share = np.zeros(len(wanted))
        if len(self.at) > 1:
            places = np.log(np.maximum(self.at, 0.5))
            x = np.clip(np.log(np.maximum(wanted, 0.5)), places[0], places[-1])
            rows = np.clip(np.searchsorted(places, x, side="right") - 1, 0, len(places) - 2)
            high = rows + 1
            share = (x - places[rows]) / (places[high] - places[rows])

        def mixed(values: Array) -> Array:
            logs = np.log(np.maximum(values, LEAST))
            weight = share if values.ndim == 1 else share[:, None]
            found = np.exp((1.0 - weight) * logs[rows] + weight * logs[high])
            return np.where(found <= 2.0 * LEAST, 0.0, found)

        bound = np.where(share[:, None] < 0.5, self.host_bound[rows], self.host_bound[high])
        times: dict[str, Any] = {name: mixed(getattr(self, name)) for name in ARRAYS}
        return replace(self, at=wanted, host_bound=bound, **times)


ARRAYS: Final = "decode decode_std idle draft verify verify_std round round_std".split()


def ladder(low: int, high: int, *, exact: int = EXACT) -> tuple[int, ...]:
    """Whole numbers from `low` to `high`: each up to `exact`, then about four an octave, and both
    ends."""
    found, at = set(range(low, min(exact, high) + 1)) | {low, high}, float(max(low, exact, 1))
    while at < high:
        found.add(round(at))
        at *= STEP
    return tuple(sorted(found))


def round_times(
    latency: Any,
    target: Architecture,
    draft: Draft,
    workloads: Sequence[Workload],
    at: Sequence[int],
    gammas: Sequence[int],
) -> RoundTimes:
    """The times under each of `workloads`, which stand at `at`. A drafter that cannot draft some of
    `gammas` is asked for the rest; all kernels are priced together."""
    drafter = as_drafter(draft)
    if isinstance(drafter.model, ShapeGrid):
        return _grid_times(latency, target, drafter.model, workloads, at, gammas)
    able = drafter.gammas(tuple(gammas))
    _prepare(latency, target, drafter, workloads, able)
    asked = drafter.model or drafter
    plain = [latency.decode_s(target, workload) for workload in workloads]
    idle = [latency.idle_s(target, asked, workload).value for workload in workloads]
    rounds = [
        [
            latency.round(target, asked, workload, gamma, latency.verify_s(target, workload, gamma))
            for gamma in able
        ]
        for workload in workloads
    ]

    def each(name: str, part: str) -> Array:
        return np.array([[getattr(getattr(r, name), part) for r in row] for row in rounds], float)

    return RoundTimes(
        at=np.asarray(at, dtype=float),
        gammas=able,
        decode=np.array([step.value for step in plain], dtype=float),
        decode_std=np.array([step.std for step in plain], dtype=float),
        idle=np.array(idle, dtype=float),
        draft=each("draft_s", "value"),
        verify=each("verify_s", "value"),
        verify_std=each("verify_s", "std"),
        round=each("round_s", "value"),
        round_std=each("round_s", "std"),
        source=rounds[-1][0].round_s.source if rounds and rounds[-1] else "modelled",
        host_bound=np.array([[time.bound == "host" for time in row] for row in rounds], bool),
    )


def _grid_times(
    latency: Any,
    target: Architecture,
    grid: ShapeGrid,
    workloads: Sequence[Workload],
    at: Sequence[int],
    gammas: Sequence[int],
) -> RoundTimes:
    """Without std: `idle` is [conditions, *shapes], `draft` and `round` [conditions, gammas,
    *shapes]."""
    priced = [GridLatency(latency, target, grid, workload, gammas) for workload in workloads]
    rounds = [list(each.rounds()) for each in priced]

    def whole(values: Any) -> Array:
        return np.broadcast_to(np.asarray(values, dtype=float), grid.shape)

    nothing = np.zeros((len(at), len(gammas)))
    return RoundTimes(
        at=np.asarray(at, dtype=float),
        gammas=tuple(gammas),
        decode=np.array([latency.decode_s(target, workload).value for workload in workloads]),
        decode_std=nothing[:, 0],
        idle=np.stack([whole(each.idle()) for each in priced]),
        draft=np.stack([[whole(time.draft_s) for time in each] for each in rounds]),
        verify=nothing,
        verify_std=nothing,
        round=np.stack([[whole(time.round_s) for time in each] for each in rounds]),
        round_std=nothing,
        source="modelled",
        host_bound=nothing > 0.0,
    )


def _prepare(
    latency: Any,
    target: Architecture,
    drafter: Drafter,
    workloads: Sequence[Workload],
    gammas: Sequence[int],
) -> None:
    """Tell a model of kernels which passes will be asked for."""
    if not hasattr(latency, "prepare"):
        return
    wanted: list[tuple[Architecture, Part, int]] = []
    passes: list[PassOps] = []
    for workload in workloads:
        for gamma in (0, *gammas):
            batch, tokens = verified_rows(latency.rounds, workload.batch_size, gamma)
            part = Part(batch, tokens, workload.context_len)
            wanted.append((target, part, workload.tensor_parallel))
        if drafter.model is not None:
            served = latency.facts.served_draft(drafter.model)
            ranks = latency.facts.ranks_of_draft(workload)
            asked = (each for gamma in gammas for each in latency.asked_passes(workload, gamma))
            wanted += [(served, part, ranks) for part, _ in asked]
        else:
            plans = [drafter.plan(rows_of(latency, workload, gamma)) for gamma in gammas]
            passes += [ops for plan in plans for ops in (plan.first, plan.step) if ops is not None]
    latency.prepare(wanted, passes)
