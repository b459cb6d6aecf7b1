"""Gamma by batch size, as engines take it."""

from __future__ import annotations

import json
from typing import Any, Final

from archsearch.engine_facts import engine_title
from archsearch.schedule import Ranges, largest_gamma

ADAPTIVE: Final = frozenset({"eagle", "eagle3", "mtp"})
"""Families whose number of draft tokens SGLang can change as it runs (--speculative-adaptive; EAGLE
and NEXTN, topk 1)."""


def last_drafting(ranges: Ranges) -> int | None:
    """The largest batch size at which a schedule drafts, where it drafts nothing above it; None
    where it never stops, or never drafts."""
    if not ranges or ranges[-1][2] != 0:
        return None
    return max((last for _, last, gamma in ranges if gamma), default=None)


def tensorrt_schedule(ranges: Ranges) -> dict[int, int] | None:
    """TensorRT-LLM's draft_len_schedule {batch size: draft length}, None where it cannot say the
    schedule.

    Its rule turned round between releases: a key once meant "from this batch size on" and now means
    "up to this batch size, and no drafts above the last key" (get_draft_len_for_batch_size). Both
    ends of every range are written, so that both readings give the same gamma at every batch size
    of the schedule. Batch 1 must have max_draft_len, the largest: else None.
    """
    if not ranges or ranges[0][2] < 1 or ranges[0][2] != largest_gamma(ranges, 0):
        return None
    joined: list[tuple[int, int, int]] = []
    for first, last, gamma in ranges:
        if joined and joined[-1][2] == gamma:
            first = joined.pop()[0]
        joined.append((first, last, gamma))
    schedule: dict[int, int] = {}
    for first, last, gamma in joined:
        schedule[first] = gamma
        if not (
            gamma == 0 and last == joined[-1][1]
        ):  # off from here on: one key says it, in both readings
            schedule[last] = gamma
    return schedule


def sglang_schedule(ranges: Ranges) -> dict[str, dict[str, Any]]:
    """SGLang's --speculative-adaptive-config: one candidate from each batch size on leaves it
    nothing to adapt to but the batch.

    SGLang takes the last key that is not above the batch size, which it first rounds up to a size
    that has a CUDA graph (speculative/adaptive_step_router.py): a range may so begin a few batch
    sizes early.
    """
    found: dict[str, dict[str, Any]] = {}
    before = None
    for first, _, gamma in ranges:
        if gamma != before:
            found[str(first)] = {"candidate_steps": [gamma]}
        before = gamma
    return found


def schedule_words(engine: str, family: str, ranges: Ranges, gamma: int) -> str:
    """A schedule as the engine takes it, or what to do where it takes none. `gamma`: to serve with
    where there is one for all."""
    title, most = engine_title(engine), last_drafting(ranges)
    drafts = any(entry[2] for entry in ranges)
    if not drafts:
        return (
            f"{title}: serve it without a draft, which is faster at every batch size that was"
            " looked at"
        )
    if engine == "vllm":
        return (
            f'{title}: "num_speculative_tokens_per_batch_size":'
            f" {json.dumps([list(entry) for entry in ranges])}"
        )
    if engine == "tensorrt-llm":
        lengths = tensorrt_schedule(ranges)
        if lengths is not None:
            return (
                f"{title}: draft_len_schedule:"
                f" {json.dumps({str(key): value for key, value in lengths.items()})}"
            )
        return f"{title}: max_draft_len: {gamma}" + (
            f", max_concurrency: {most}" if most is not None else ""
        )
    if engine == "sglang" and family in ADAPTIVE:
        return (
            f"{title}: --speculative-adaptive --speculative-adaptive-config FILE with"
            f" {json.dumps(sglang_schedule(ranges))}"
        )
    above = "" if most is None else f"; above batch size {most} start it without a draft"
    return f"{title} takes one gamma for all batch sizes: {gamma}{above}"
