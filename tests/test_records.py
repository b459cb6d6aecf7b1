"""Records and the JSON-ready dicts of their fields: there and back, and what is none in one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.records import (
    Maybe,
    Share,
    Stored,
    as_data,
    from_data,
    load,
    load_or_note,
    save,
)

SHAPE = Architecture(64, 128, 2, 4, 2, 16, 1000)


@dataclass(frozen=True)
class Where:
    device: str
    ranks: Annotated[int, Stored(low=1)] = 1


@dataclass(frozen=True)
class Row:
    where: Annotated[Where, Stored(inline=True)]
    kind: Literal["kept", "pruned"]
    shape: Architecture
    speedup: Estimate
    points: tuple[tuple[int, float], ...] = ()
    tau: Mapping[int, Estimate] = field(default_factory=dict)
    low_high: tuple[float, float] | None = None
    seconds: Maybe[float] = None
    accepted: Share = 0.0
    stopped: Annotated[str, Stored(name="why")] = ""
    parts: list[Where] = field(default_factory=list)
    path: Path | None = None
    rest: Mapping[str, Any] = field(default_factory=dict)


ROW = Row(
    Where("h100", 2),
    "kept",
    SHAPE,
    Estimate(1.5, 0.1, "modelled", 1.3, 1.7),
    ((100, 0.5), (200, 0.75)),
    {3: Estimate(2.5, 0.1, "measured")},
    (1.0, 2.0),
    parts=[Where("a"), Where("b", 4)],
    path=Path("runs/x"),
    rest={"a": [1, None]},
)
PLAIN = {"device": "h100", "kind": "kept", "shape": SHAPE.to_dict(), "speedup": 1.5}


def test_what_is_written_is_read() -> None:
    data = as_data(ROW)
    assert from_data(Row, json.loads(json.dumps(data))) == ROW
    assert (data["device"], data["ranks"], data["why"]) == ("h100", 2, "")
    assert list(data["tau"]) == ["3"] and data["points"] == [[100, 0.5], [200, 0.75]]
    assert data["speedup"] == {
        "value": 1.5, "std": 0.1, "source": "modelled", "low": 1.3, "high": 1.7,
    }  # fmt: skip
    assert "seconds" not in data and data["low_high"] == [1.0, 2.0]


def test_older_files_are_read() -> None:
    """Fields that are missing, null or not known, and a bare number for an estimate."""
    row = from_data(Row, {**PLAIN, "why": "early", "points": None, "new field": 1})
    assert row == Row(Where("h100"), "kept", SHAPE, Estimate(1.5, 0.0, "measured"), stopped="early")
    assert from_data(tuple[float, ...], [1, 2.5]) == (1.0, 2.5)
    assert from_data(Row, {**PLAIN, "shape": SHAPE}).shape == SHAPE, "made already"
    with pytest.raises(ArchsearchError, match="new field: is not known"):
        from_data(Where, {"device": "a", "new field": 1}, known_only=True)
    assert from_data(Estimate, 2) == Estimate(2.0, 0.0, "measured")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": None}, "kind: is missing"),
        ({"kind": "lost"}, "kind: must be one of kept, pruned, got 'lost'"),
        ({"kind": ["kept"]}, "kind: must be one of"),
        ({"device": 3}, "device: must be text, got 3"),
        ({"ranks": 0}, "ranks: must be at least 1, got 0"),
        ({"ranks": True}, "ranks: must be a whole number, got True"),
        ({"ranks": 2.5}, "ranks: must be a whole number"),
        ({"accepted": 1.5}, "accepted: must be at most 1, got 1.5"),
        ({"speedup": "fast"}, "speedup: 'fast' where a finite number belongs"),
        ({"speedup": {"value": 1.0, "std": 0.1}}, "speedup: 'source' is missing"),
        ({"points": [[1, 2], [1, "x"]]}, r"points\[1\]\[1\]: must be a finite number, got 'x'"),
        ({"points": [[1]]}, r"points\[0\]: must be a list of 2"),
        ({"points": "abc"}, "points: must be a list, got 'abc'"),
        ({"tau": {"x": 1.0}}, "tau: invalid literal"),
        ({"tau": {"3": None}}, r"^tau.3: 'None' where"),
        ({"tau": [1]}, "tau: must be an object"),
        ({"low_high": [1, float("nan")]}, r"low_high\[1\]: must be a finite number"),
        ({"seconds": 10**400}, "seconds: must be a finite number"),
        ({"parts": [{"device": "a"}, {"ranks": 1}]}, r"parts\[1\].device: is missing"),
        ({"shape": {"hidden_size": 64}}, "shape: "),
        ({"shape": 7}, "shape: must be an object, got 7"),
        ({"path": 1}, "path: must be a path"),
    ],
)
def test_what_is_none_names_its_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ArchsearchError, match=words) as caught:
        from_data(Row, PLAIN | change)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_file_is_read_or_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert load(path, "rows", tuple[Row, ...]) is None
    save(path, [ROW, ROW])
    assert load(path, "rows", tuple[Row, ...]) == (ROW, ROW)
    assert load(path, "rows", lambda data: len(data)) == 2
    path.write_text(json.dumps([PLAIN, PLAIN | {"kind": 1}]))
    words = (
        f"rows {path} is not what archsearch writes: [1].kind: must be one of kept, pruned, got 1"
    )
    with pytest.raises(ArchsearchError) as caught:
        load(path, "rows", tuple[Row, ...])
    assert str(caught.value) == words
    problems: list[str] = []
    assert load_or_note(path, "rows", tuple[Row, ...], problems) is None and problems == [words]
    path.write_text("{")
    with pytest.raises(ArchsearchError, match=r"rows .*rows.json is not JSON"):
        load(path, "rows", tuple[Row, ...])
