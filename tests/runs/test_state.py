"""rungs.json: written and read back as it is on disk; files of version 0.1.0 load; another budget
keeps what was trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from archsearch.architecture.architecture import Architecture
from archsearch.drafters.models import Independent
from archsearch.errors import ArchsearchError
from archsearch.records import as_data
from archsearch.runs.state import ClimbState, Longer, StateFile

OLD = Path(__file__).parents[1] / "fixtures" / "run-0.1.0" / "climb" / "rungs.json"


@pytest.fixture
def old() -> dict:
    return json.loads(OLD.read_text(encoding="utf-8"))


def test_a_file_of_version_0_1_0_is_read_and_keeps_its_format(old: dict) -> None:
    state = ClimbState.from_dict(old)
    assert state.plan is not None and state.finalists is not None and state.finalists.longer is None
    assert [row.shape.label() for row in state.rungs] == [row["label"] for row in old["rungs"]]
    now = json.loads(json.dumps(as_data(state)))
    for name in ("seconds", "longer_s"):  # shares of time, which nothing reads any more
        old["finalists"].pop(name)
    later = dict.fromkeys("round_s host_s bound engine engine_version mix".split())
    predicted = [  # what drafts was an independent draft, for there was nothing else
        score
        | later
        | {"family": "independent", "drafter": Independent(shape).to_dict(), "assumed": ""}
        for score in old["finalists"]["predicted"]
        for shape in [Architecture.from_dict(score["architecture"])]
    ]
    assert now == old | {"finalists": old["finalists"] | {"longer": None, "predicted": predicted}}
    assert ClimbState.from_dict(now) == state


def test_everything_a_state_can_hold_comes_back(old: dict) -> None:
    state = ClimbState.from_dict(old)
    assert state.finalists is not None
    state.finalists.tokens, state.finalists.longer = 4000, Longer(0, 12.5)
    assert ClimbState.from_dict(json.loads(json.dumps(as_data(state)))) == state


def test_another_budget_plans_anew_over_what_was_trained(tmp_path: Path, old: dict) -> None:
    path = tmp_path / "rungs.json"
    path.write_text(json.dumps(old), encoding="utf-8")
    same = StateFile(path, old["budget_s"], 0.0, clock=lambda: 5.0)
    assert same.state.plan is not None and same.elapsed_s() == pytest.approx(old["elapsed_s"] + 5.0)
    state = StateFile(path, 2 * old["budget_s"], 0.0, clock=lambda: 0.0).state
    assert (
        state.plan is None
        and state.finalists is None
        and not state.notes
        and not state.schedule
        and not state.confirmed
    )
    assert state.rung_end_s is None and state.full_tokens is None
    assert (
        state.rounds == same.state.rounds
        and state.rungs == same.state.rungs
        and state.elapsed_s == old["elapsed_s"]
    )


def test_a_plan_that_trained_nothing_is_made_again(tmp_path: Path, old: dict) -> None:
    """The machine was busy then: what was trained before stays, and without any the time spent
    counts no more."""
    path = tmp_path / "rungs.json"
    stayed = old | {"plan": old["plan"] | {"stay": "busy"}}
    path.write_text(json.dumps(stayed), encoding="utf-8")
    state = StateFile(path, old["budget_s"], 0.0, clock=lambda: 0.0).state
    assert (
        state.plan is None
        and len(state.rounds) == len(old["rounds"]) > 0
        and state.elapsed_s == old["elapsed_s"]
    )
    path.write_text(
        json.dumps(stayed | {"rounds": [], "steps": {}, "finalists": None}), encoding="utf-8"
    )
    assert StateFile(path, old["budget_s"], 0.0, clock=lambda: 0.0).elapsed_s() == 0.0


@pytest.mark.parametrize("change", [{"format": 99}, {"rounds": [{"round": 1}]}, {"rungs": 3}])
def test_a_file_that_is_none_is_refused_in_one_line(
    tmp_path: Path, old: dict, change: dict
) -> None:
    path = tmp_path / "rungs.json"
    path.write_text(json.dumps(old | change), encoding="utf-8")
    with pytest.raises(ArchsearchError, match="rungs.json") as error:
        StateFile(path, 60.0, 0.0)
    assert "\n" not in str(error.value)


def test_a_row_takes_the_place_of_the_one_before(old: dict) -> None:
    state = ClimbState.from_dict(old)
    count = len(state.rungs)
    state.record(state.rungs[0])
    assert len(state.rungs) == count
