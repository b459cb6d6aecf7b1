"""benchmarks/faults.py: it sees what is broken, lost or done twice; a short form of it is clean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.faults import EVENTS, done_twice, faults, half_written, records


def test_what_is_half_written_is_seen(tmp_path: Path) -> None:
    texts = {
        "a.json": '{"a": 1',
        "b.csv": "a,b\n1,2\n3",
        "c.html": "<html>",
        "d.safetensors": "{",
        "e.pt": "PK",
        "f.npz": "PK",
        "g.yaml": "- 1",
        "h.svg": "<svg>",
        "i.txt": "",
        "j.jsonl": '{"a": \n{}\n',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        assert half_written(tmp_path / name), name
    whole = {
        "a.json": "{}",
        "b.csv": "a,b\n1,2\n",
        "c.html": "<html></html>\n",
        "g.yaml": "a: 1\n",
        "i.txt": "x",
        "j.jsonl": '{}\n{"a',
    }
    for name, text in whole.items():
        (tmp_path / name).write_text(text)
        assert not half_written(tmp_path / name), name


def test_what_is_done_twice_is_seen(tmp_path: Path) -> None:
    def event(
        tokens: int | None, seconds: float | None, reached: int, steps: int, spent: float = 9.0
    ) -> str:
        row = {
            "draft": "d",
            "tokens": tokens,
            "seconds": seconds,
            "reached": reached,
            "steps": steps,
            "stopped": "",
            "spent": spent,
        }
        return json.dumps(row) + "\n"

    once = (
        event(100, None, 100, 5)
        + event(100, None, 100, 0)
        + '{"cut\n'
        + event(None, 10.0, 150, 3, 8.0)
        + event(None, 10.0, 200, 3, 10.0)
    )
    (tmp_path / EVENTS).write_text(once)
    assert not done_twice(tmp_path)
    (tmp_path / EVENTS).write_text(once + event(100, None, 100, 5))
    assert done_twice(tmp_path) == ["d to 100: 5 steps more"]
    row = {
        "kind": "gemm",
        "shape": {"m": 1, "n": 64, "k": 64},
        "dtype": "float32",
        "mode": "eager",
        "cache": "cold",
        "times_s": [1.0],
    }
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "rows.jsonl").write_text(2 * (json.dumps(row) + "\n") + '{"cut')
    assert len(done_twice(tmp_path)) == 2 and len(records(tmp_path)) == 1
    noisy = json.dumps({**row, "times_s": [1.0, 1.0, 2.0, 2.0]}) + "\n"
    (tmp_path / "p" / "rows.jsonl").write_text(noisy + json.dumps(row) + "\n")
    assert len(done_twice(tmp_path)) == 1  # measured again, as a disturbed row is


@pytest.mark.slow
def test_a_search_that_is_killed_resumes(tmp_path: Path) -> None:
    """The other commands: `python benchmarks/faults.py`, minutes each."""
    outcomes = faults(4, 1, tmp_path, only=("search",))
    assert [outcome.stage for outcome in outcomes] == ["search"]
    assert all(outcome.clean and outcome.resumed == outcome.lives for outcome in outcomes), outcomes
    assert sum(outcome.kills for outcome in outcomes) == 4
