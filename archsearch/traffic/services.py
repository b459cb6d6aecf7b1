"""Services of one target and drafter: what its prompts add, and its rounds by batch size, with a
gamma and without a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import ShapeGrid
from archsearch.architecture.ops import Part
from archsearch.drafters.drafter import Draft, Drafter
from archsearch.drafters.registry import as_drafter
from archsearch.latency.drafted import rows_of
from archsearch.traffic.steady import MOST_RUNNING, RoundTokens, Service
from archsearch.traffic.times import RoundTimes, ladder, round_times
from archsearch.workload import Workload

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
