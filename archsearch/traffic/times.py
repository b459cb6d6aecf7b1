"""What plain steps and rounds take at many batch sizes at once: priced at a ladder of them, which a
`Service` reads off in between. Everything is [sizes] or [sizes, gammas], seconds.

The services of a server come from these times and from what its prompts add (`service_of`,
`prefill_s`); `held_by` says how many requests memory holds at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import ShapeGrid
from archsearch.architecture.ops import Part
from archsearch.capacity import STEP_TOKENS, held_requests
from archsearch.drafters.drafter import Draft, Drafter
from archsearch.drafters.registry import as_drafter
from archsearch.engine_facts import EngineFacts
from archsearch.estimate import Array, Numbers
from archsearch.hardware.device import Device
from archsearch.latency.draft_passes import DraftPasses
from archsearch.latency.drafted import rows_of
from archsearch.latency.grid import GridLatency
from archsearch.latency.model import LatencyModel
from archsearch.latency.rounds import verified_rows
from archsearch.traffic.steady import MOST_RUNNING, RoundTokens, Service
from archsearch.workload import Workload

EXACT: Final = 8  # every batch size up to this one is priced
STEP: Final = 2.0**0.25  # from one rung of a ladder to the next


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of `target` and `drafter` at the batch sizes `at` (ascending). `idle`: what the
    loaded draft costs a step that drafts nothing. `draft`: its passes, of a grid. `graph`: rows of
    the largest CUDA graph."""

    at: Array
    gammas: tuple[int, ...]
    decode: Array
    idle: Array
    round: Array
    draft: Array
    graph: float = np.inf


def ladder(largest: int) -> tuple[int, ...]:
    """Whole numbers from 1 to `largest`: each up to EXACT, then about four an octave, and the
    last."""
    found, at = {*range(1, min(EXACT, largest) + 1), largest}, float(EXACT)
    while at < largest:
        found.add(round(at))
        at *= STEP
    return tuple(sorted(found))


def times_over_batches(
    latency: DraftPasses,
    target: Architecture,
    draft: Draft,
    workload: Workload,
    gammas: Sequence[int],
    sizes: Sequence[int],
) -> RoundTimes:
    """The times in `workload`'s context at batches of `sizes`. A drafter that cannot draft some of
    `gammas` is asked for the rest. Of a grid of drafts `idle` is [sizes, *shapes], `draft` and
    `round` [sizes, gammas, *shapes]."""
    workloads = [replace(workload, batch_size=size) for size in sizes]
    drafter = as_drafter(draft)
    latency = latency.beside(drafter)
    asked = drafter.model or drafter
    drafts = np.empty(0)
    if isinstance(asked, ShapeGrid):
        able, shape = tuple(gammas), asked.shape
        priced = [GridLatency(latency, target, asked, work, able) for work in workloads]
        idle = np.array([np.broadcast_to(each.idle(), shape) for each in priced])
        times = [[(time.round_s, time.draft_s) for time in each.rounds()] for each in priced]
        both = [[[np.broadcast_to(x.value, shape) for x in pair] for pair in row] for row in times]
        # [sizes, gammas, 2, *shapes] -> each [sizes, gammas, *shapes]
        rounds, drafts = np.moveaxis(np.array(both), 2, 0)
    else:
        able = latency.facts.gammas(drafter, gammas)
        if isinstance(latency, LatencyModel):
            cases = itertools.product(sizes, (0, *able))
            rows = (verified_rows(latency.rounds, *case) for case in cases)
            parts = (Part(*each, workload.context_len) for each in rows)
            latency.prepare((target, part, workload.tensor_parallel) for part in parts)
        idle = np.array([latency.idle_s(target, asked, work).value for work in workloads])
        rounds = np.array([_rounds_s(latency, target, asked, work, able) for work in workloads])
    decode = np.array([latency.decode_s(target, work).value for work in workloads])
    graph = latency.rounds.costs.largest_graph if latency.rounds is not None else None
    at = np.asarray(sizes, float)
    return RoundTimes(at, able, decode, idle, rounds, drafts, graph or np.inf)


def _rounds_s(
    latency: DraftPasses, target: Architecture, draft: Draft, workload: Workload, gammas: Any
) -> Any:
    verify_s = {gamma: latency.verify_s(target, workload, gamma) for gamma in gammas}
    found = latency.means_s(target, draft, workload, verify_s)
    if found is not None:
        return found
    each = (latency.round(target, draft, workload, *known) for known in verify_s.items())
    return [time.round_s.value for time in each]


def prefill_s(
    latency: DraftPasses,
    target: Architecture,
    draft: Draft | None,
    workload: Workload,
    prompt_tokens: int,
) -> Numbers:
    """Seconds that a prompt adds: the target's pass over it, and the draft's, which keeps a cache
    of its own.

    Where passes are composed of kernels, or an engine's own were measured, and prompts share a step
    with the requests that decode (`workload.batch_size` of them), only what the step takes longer
    is charged: its weights are read once. An engine that expands the batch reads prompts by
    themselves.
    """
    if prompt_tokens < 1:
        return 0.0
    total: Numbers = 0.0
    read = 0
    while read < prompt_tokens:
        tokens = min(STEP_TOKENS, prompt_tokens - read)  # longer prompts take several steps
        total += _chunk_s(latency, target, workload, tokens, read)
        read += tokens
    if draft is None:
        return total
    return total + _draft_prefill_s(latency, as_drafter(draft), workload, prompt_tokens)


def _chunk_s(
    latency: DraftPasses, target: Architecture, workload: Workload, tokens: int, cached: int
) -> Numbers:
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


def _pass_s(
    latency: DraftPasses, arch: Architecture, tokens: int, cached: int, ranks: int
) -> Numbers:
    if not hasattr(latency, "model_pass_s"):  # a latency that knows rounds only
        return latency.verify_s(arch, Workload(1, cached, ranks), tokens - 1).value
    asked = Part(1, tokens, cached), getattr(latency, "engine_", None) is not None
    if isinstance(arch, ShapeGrid):
        return latency.grid_s(arch, [asked], ranks)[0]
    return latency.model_pass_s(arch, asked, ranks).value


def _draft_prefill_s(
    latency: DraftPasses, drafter: Drafter, workload: Workload, tokens: int
) -> Numbers:
    latency = latency.beside(drafter).drafts
    ranks = latency.facts.ranks_of_draft(workload)
    if drafter.model is not None:
        return _pass_s(latency, latency.facts.served_draft(drafter.model), tokens, 0, ranks)
    if not (drafter.architecture.num_hidden_layers and drafter.has_layers):
        return 0.0
    rows = rows_of(latency, replace(workload, batch_size=1, context_len=0), 1)
    first = drafter.plan(replace(rows, gamma=max(1, tokens - 1))).first
    return latency.ops_s(first).value if first is not None else 0.0


def service_of(
    times: RoundTimes,
    gamma: int | None,
    tokens: RoundTokens,
    prefill: Numbers,
    output_tokens: float,
    held: Numbers | None,
    **more: Any,
) -> Service:
    """The server that drafts `gamma` tokens a round; 0: with the draft loaded and idle; None:
    without one. `more`: other fields of `Service`."""
    rounds = times.decode if gamma is None else (times.decode + times.idle.T).T
    if gamma:
        rounds = np.ascontiguousarray(times.round[:, times.gammas.index(gamma)])
    most = held if held is not None else MOST_RUNNING
    at, rounds = _beside(times.at, rounds, times.graph // ((gamma or 0) + 1))
    return Service(at, rounds, tokens, prefill, output_tokens, most, **more)


def _beside(at: Array, rounds: Array, edge: float) -> tuple[Array, Array]:
    """With the last batch size in a graph and the first beyond it, by the slopes on either side."""
    rung = int(np.searchsorted(at, edge, side="right"))
    if not 0 < rung < len(at):
        return at, rounds
    slopes = np.diff(rounds, axis=0, append=rounds[-1:]).T / np.diff(at, append=np.inf)
    near, sizes = [rung - 1, rung], np.array([edge, edge + 1.0])
    seconds = rounds[near] + (slopes[..., [rung - 2, rung]] * (sizes - at[near])).T
    # where there is another step too, no slope leads out of what is known
    seconds = np.clip(np.maximum.accumulate(seconds), rounds[near].min(0), rounds[near].max(0))
    new = ~np.isin(sizes, at)  # what is priced stays
    return np.insert(at, rung, sizes[new]), np.insert(rounds, rung, seconds[new], 0)


def held_by(
    facts: EngineFacts,
    target: Architecture,
    device: Device,
    workload: Workload,
    draft: Draft | None,
) -> Any:
    """How many requests of the workload's context memory holds at once; None on a CPU, whose memory
    is not the engine's alone."""
    if device.is_cpu:
        return None
    served = replace(workload, draft_tensor_parallel=facts.ranks_of_draft(workload))
    return held_requests(target, draft, served, device)
