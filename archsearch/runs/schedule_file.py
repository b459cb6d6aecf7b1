"""schedule.json: gamma by batch size, written by `archsearch schedule`, or by hand with `ranges`
alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from archsearch import records
from archsearch.errors import ArchsearchError
from archsearch.schedule import GammaSchedule, check_schedule

SCHEDULE_FILE: Final = "schedule.json"


def read_schedule(path: Path) -> GammaSchedule:
    """What a schedule.json holds; an empty schedule where there is no such file. Raises
    ArchsearchError when malformed."""
    return records.load(path, "gamma schedule", _schedule) or GammaSchedule()


def planned_schedule(data: Any) -> GammaSchedule:
    """The content of a schedule that was worked out, batch size by batch size. Raises one of
    WRONG_SHAPE."""
    schedule = _schedule(data)
    sizes = [point.batch_size for point in schedule.points]
    if not sizes or not schedule.engine or min(sizes) < 1:
        raise ValueError("no engine, no points, or a batch size below 1")
    if any(point.tau is None or point.speedup is None for point in schedule.points):
        raise ValueError("a point without tau or speedup")
    return schedule


def write_schedule(path: Path, schedule: GammaSchedule) -> None:
    """Write schedule.json; times in seconds."""
    records.save(path, schedule)


def _schedule(data: Any) -> GammaSchedule:
    lists = isinstance(data, Mapping) and (data.get("ranges"), data.get("points", []))
    if not lists or not all(isinstance(each, list) for each in lists):
        raise ArchsearchError(
            "it must hold a list `ranges` (and may hold a list `points`); plan it again: archsearch"
            " schedule"
        )
    check_schedule(data["ranges"])
    return records.from_data(GammaSchedule, data)
