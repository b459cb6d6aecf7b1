"""schedule.json: written and read as one type; one made by hand may hold its ranges alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.records import save
from archsearch.runs.tables import planned_schedule, read_schedule
from archsearch.schedule import GammaSchedule, Ranges, SchedulePoint

RANGES: Ranges = ((1, 2, 4), (3, 16, 1), (17, 256, 0))


def test_read_schedule(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    assert read_schedule(path) == GammaSchedule()
    point = {
        "batch_size": 1,
        "gamma": 4,
        "tau": 2.5,
        "speedup": {"value": 1.5, "std": 0.1, "source": "modelled"},
    }
    path.write_text(json.dumps({"ranges": RANGES, "points": [point]}))
    found = SchedulePoint(1, 4, Estimate(2.5, 0.0, "measured"), Estimate(1.5, 0.1, "modelled"))
    assert read_schedule(path) == GammaSchedule(RANGES, (found,))
    path.write_text(
        json.dumps({"ranges": RANGES, "engine": "vllm", "latency": "profile of this CPU"})
    )
    assert read_schedule(path) == GammaSchedule(RANGES, (), "vllm", "profile of this CPU")
    for bad in ("[]", '{"ranges": 3}', '{"ranges": [], "points": 1}'):
        path.write_text(bad)
        with pytest.raises(ArchsearchError, match="schedule.json: it must hold a list"):
            read_schedule(path)
    path.write_text("{")
    with pytest.raises(ArchsearchError, match="not JSON"):
        read_schedule(path)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    speedup = Estimate(1.5, 0.1, "modelled")
    point = SchedulePoint(
        1,
        4,
        Estimate(2.5, 0.2, "measured"),
        speedup,
        {2: speedup, 4: Estimate(1.6, 0.1, "modelled")},
    )
    schedule = GammaSchedule(RANGES, (point,), "vllm", "a profile")
    save(tmp_path / "schedule.json", schedule)
    assert read_schedule(tmp_path / "schedule.json") == schedule
    data = json.loads((tmp_path / "schedule.json").read_text())
    assert planned_schedule(data) == schedule and data["points"][0]["by_gamma"]["2"]["value"] == 1.5
    with pytest.raises(ValueError, match="no points"):
        planned_schedule({**data, "points": []})
