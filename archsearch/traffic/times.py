"""What plain steps and rounds take over many conditions at once: priced at a ladder of them, read
off in between.

Kernels of one batch are priced in milliseconds, so a curve of hundreds of points is priced at some
tens (`ladder`) and read off in between, straight in the logarithms of both axes; std likewise.
Everything is [conditions] or [conditions, gammas], seconds.

The services of a server come from these times and from what its prompts add (`plain_service`,
`drafting_service`, `prefill_s`); `held_by` says how many requests memory holds at once.
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
from archsearch.capacity import held_requests
from archsearch.drafters.drafter import Draft, Drafter
from archsearch.drafters.registry import as_drafter
from archsearch.engine_facts import EngineFacts
from archsearch.hardware.device import Device
from archsearch.latency.drafted import rows_of
from archsearch.latency.grid import GridLatency
from archsearch.latency.rounds import verified_rows
from archsearch.traffic.steady import MOST_RUNNING, RoundTokens, Service
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
            # straight in log-log; a context of 0 tokens counts as half of one
            places = np.log(np.maximum(self.at, 0.5))
            x = np.clip(np.log(np.maximum(wanted, 0.5)), places[0], places[-1])
            rows = np.clip(np.searchsorted(places, x, side="right") - 1, 0, len(places) - 2)
            high = rows + 1
            share = (x - places[rows]) / (places[high] - places[rows])

        def mixed(values: Array) -> Array:
            logs = np.log(np.maximum(values, LEAST))
            weight = share if values.ndim == 1 else share[:, None]
            # [points] or [points, gammas]
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
    """The times under each of `workloads`, the axis being `at`. A drafter that cannot draft some of
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
    """Price all kernels that will be asked for together."""
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


# prompt tokens of one step; longer prompts are read in several (vLLM's max_num_batched_tokens)
CHUNK: Final = 8192
LARGEST: Final = 512  # batch sizes are priced up to this one


def prefill_s(
    latency: Any, target: Architecture, draft: Draft | None, workload: Workload, prompt_tokens: int
) -> Any:
    """Seconds that a prompt adds: the target's pass over it, and the draft's, which keeps a cache
    of its own.

    Where passes are composed of kernels, or an engine's own were measured, and prompts share a step
    with the requests that decode (`workload.batch_size` of them), only what the step takes longer
    is charged: its weights are read once. An engine that expands the batch reads prompts by
    themselves.
    """
    if prompt_tokens < 1:
        return 0.0
    total, read = 0.0, 0
    while read < prompt_tokens:
        tokens = min(CHUNK, prompt_tokens - read)
        total += _chunk_s(latency, target, workload, tokens, read)
        read += tokens
    if draft is None:
        return total
    return total + _draft_prefill_s(latency, as_drafter(draft), workload, prompt_tokens)


def _chunk_s(
    latency: Any, target: Architecture, workload: Workload, tokens: int, cached: int
) -> Any:
    composed, own = (getattr(latency, name, None) for name in ("composed_", "engine_"))
    alone = latency.rounds is not None and latency.rounds.costs.expands
    if own is not None and not alone:  # a step of so many rows more
        rows = (workload.batch_size + tokens, workload.batch_size)
        more, less = (
            own.forward_s(target, Part(1, count, cached), cold=True, is_target=True).value
            for count in rows
        )
        return max(0.0, more - less)
    if composed is None or alone:
        return _pass_s(latency, target, tokens, cached, workload.tensor_parallel)
    # weights are read once for the requests that decode and the prompt together
    parts = [Part(workload.batch_size, 1, workload.context_len), Part(1, tokens, cached, 1)]
    together, decoding = (
        composed.step_s(target, some, workload.tensor_parallel).value for some in (parts, parts[:1])
    )
    return max(0.0, together - decoding)


def _pass_s(latency: Any, arch: Architecture, tokens: int, cached: int, ranks: int) -> Any:
    if not hasattr(latency, "model_pass_s"):  # a latency that knows rounds only
        return latency.verify_s(arch, Workload(1, cached, ranks), tokens - 1).value
    asked = Part(1, tokens, cached), getattr(latency, "engine_", None) is not None
    if isinstance(arch, ShapeGrid):
        return latency.grid_s(arch, [asked], ranks)[0]
    return latency.model_pass_s(arch, asked, ranks).value


def _draft_prefill_s(latency: Any, drafter: Drafter, workload: Workload, tokens: int) -> Any:
    ranks = latency.facts.ranks_of_draft(workload)
    if drafter.model is not None:
        return _pass_s(latency, latency.facts.served_draft(drafter.model), tokens, 0, ranks)
    if not (drafter.architecture.num_hidden_layers and drafter.has_layers):
        return 0.0
    rows = rows_of(latency, replace(workload, batch_size=1, context_len=0), 1)
    first = drafter.plan(replace(rows, gamma=max(1, tokens - 1))).first
    return latency.ops_s(first).value if first is not None else 0.0


def batch_ladder(largest: int = LARGEST) -> tuple[int, ...]:
    """Batch sizes at which rounds are priced."""
    return ladder(1, max(1, largest))


def times_over_batches(
    latency: Any,
    target: Architecture,
    draft: Draft,
    workload: Workload,
    gammas: Sequence[int],
    largest: int = LARGEST,
    *,
    sizes: Sequence[int] | None = None,
) -> RoundTimes:
    """Seconds of rounds at each of `gammas`, in `workload`'s context, at batch sizes up to
    `largest` or at `sizes`."""
    at = tuple(sizes) if sizes is not None else batch_ladder(largest)
    return round_times(
        latency, target, draft, [replace(workload, batch_size=size) for size in at], at, gammas
    )


def plain_service(
    times: RoundTimes, prefill: float, output_tokens: float, held: Any = None
) -> Service:
    """The server without a draft."""
    most = held if held is not None else MOST_RUNNING
    return Service(times.at, times.decode, RoundTokens(), prefill, output_tokens, most)


def drafting_service(
    times: RoundTimes,
    gamma: int,
    tokens: RoundTokens,
    prefill: Any,
    output_tokens: float,
    held: Any = None,
) -> Service:
    """The server that drafts `gamma` tokens a round; 0: with the draft loaded and idle."""
    if gamma == 0:
        rounds = (times.decode + times.idle.T).T
    else:
        rounds = times.round[:, times.gammas.index(gamma)]
    most = held if held is not None else MOST_RUNNING
    return Service(times.at, np.asarray(rounds), tokens, prefill, output_tokens, most)


def held_by(
    facts: EngineFacts,
    target: Architecture,
    device: Device,
    workload: Workload,
    draft: Draft | None,
) -> Any:
    """How many requests of the workload's context memory holds at once; None on a CPU, whose memory
    is not the engine's alone."""
    if device.kind == "cpu":
        return None
    served = replace(workload, draft_tensor_parallel=facts.ranks_of_draft(workload))
    return held_requests(target, draft, served, device)
