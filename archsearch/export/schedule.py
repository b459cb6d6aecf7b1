"""Gamma by batch size, as engines take it."""

from __future__ import annotations

from archsearch.schedule import Ranges, largest_gamma


def last_drafting(ranges: Ranges) -> int | None:
    """The largest batch size at which a schedule drafts, where it drafts nothing above it; None where it never stops, or never
    drafts."""
    if not ranges or ranges[-1][2] != 0:
        return None
    return max((last for _, last, gamma in ranges if gamma), default=None)


def tensorrt_schedule(ranges: Ranges) -> dict[int, int] | None:
    """TensorRT-LLM's draft_len_schedule {batch size: draft length}, None where it cannot say the schedule.

    Its rule turned round between releases: a key once meant "from this batch size on" and now means "up to this batch size, and
    no drafts above the last key" (get_draft_len_for_batch_size). Both ends of every range are written, so that both readings
    give the same gamma at every batch size of the schedule. Batch 1 must have max_draft_len, the largest: else None.
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
        if not (gamma == 0 and last == joined[-1][1]):  # off from here on: one key says it, in both readings
            schedule[last] = gamma
    return schedule
