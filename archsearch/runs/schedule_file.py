"""schedule.json: gamma by batch size, written by `archsearch schedule`, or by hand with `ranges`
alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from archsearch import files
from archsearch.errors import ArchsearchError
from archsearch.runs.fields import as_estimate, read_or_raise
from archsearch.schedule import GammaSchedule, SchedulePoint, check_schedule

SCHEDULE_FILE: Final = "schedule.json"


def read_schedule(path: Path) -> GammaSchedule:
    """What a schedule.json holds; an empty schedule where there is no such file. Raises
    ArchsearchError when malformed."""
    return read_or_raise(path, "gamma schedule", schedule_from_dict) or GammaSchedule()


def planned_schedule(data: Any) -> GammaSchedule:
    """The content of a schedule that was worked out, batch size by batch size. Raises one of
    WRONG_SHAPE."""
    schedule = schedule_from_dict(data)
    if (
        not schedule.points
        or not schedule.engine
        or min(point.batch_size for point in schedule.points) < 1
    ):
        raise ValueError("no engine, no points, or a batch size below 1")
    if any(point.tau is None or point.speedup is None for point in schedule.points):
        raise ValueError("a point without tau or speedup")
    return schedule


def write_schedule(path: Path, schedule: GammaSchedule) -> None:
    """Write schedule.json."""
    files.write_json(path, schedule_to_dict(schedule))


def schedule_from_dict(data: Any) -> GammaSchedule:
    """Read schedule.json. Raises one of WRONG_SHAPE (ArchsearchError among them)."""
    if (
        not isinstance(data, Mapping)
        or not isinstance(data.get("ranges"), list)
        or not isinstance(data.get("points", []), list)
    ):
        raise ArchsearchError(
            "it must hold a list `ranges` (and may hold a list `points`); plan it again: archsearch"
            " schedule"
        )
    points = tuple(_point(point) for point in data.get("points", []))
    return GammaSchedule(
        check_schedule(data["ranges"]),
        points,
        str(data.get("engine", "")),
        str(data.get("latency", "")),
    )


def schedule_to_dict(schedule: GammaSchedule) -> dict[str, Any]:
    """schedule.json; times in seconds."""
    return {
        "engine": schedule.engine,
        "latency": schedule.latency,
        "ranges": [list(entry) for entry in schedule.ranges],
        "points": [
            {
                "batch_size": point.batch_size,
                "gamma": point.gamma,
                "tau": point.tau and point.tau.to_dict(),
                "speedup": point.speedup and point.speedup.to_dict(),
                "by_gamma": {
                    str(gamma): value.to_dict() for gamma, value in point.by_gamma.items()
                },
            }
            for point in schedule.points
        ],
    }


def _point(data: Mapping[str, Any]) -> SchedulePoint:
    return SchedulePoint(
        int(data["batch_size"]),
        int(data["gamma"]),
        as_estimate(data["tau"]) if data.get("tau") else None,
        as_estimate(data["speedup"]) if data.get("speedup") else None,
        {int(gamma): as_estimate(value) for gamma, value in (data.get("by_gamma") or {}).items()},
    )
