"""Gamma by batch size: the ranges archsearch writes and what engines make of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archsearch.errors import ArchsearchError
from archsearch.files import read_json
from archsearch.schedule import Ranges, check_schedule, largest_gamma


@dataclass(frozen=True)
class GammaSchedule:
    """schedule.json: the `ranges`, what was found at single batch sizes (`points`), and where that comes from in `words`."""

    ranges: Ranges = ()
    points: tuple[dict[str, Any], ...] = ()
    words: str = ""


def read_schedule(path: Path) -> GammaSchedule:
    """What a schedule.json holds; an empty schedule where there is no such file. Raises ArchsearchError when malformed."""
    if not path.is_file():
        return GammaSchedule()
    data = read_json(path, "gamma schedule")
    if not isinstance(data, Mapping) or not isinstance(data.get("ranges"), list) or not isinstance(data.get("points", []), list):
        raise ArchsearchError(f"{path} must hold a list `ranges` (and may hold a list `points`); confirm the candidate again")
    points = tuple(dict(point) for point in data.get("points", []) if isinstance(point, Mapping))
    words = "; ".join(str(data[name]) for name in ("engine", "latency") if data.get(name))
    return GammaSchedule(check_schedule(data["ranges"]), points, words)


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
