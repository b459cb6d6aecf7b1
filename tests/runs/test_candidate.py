"""A ranked candidate: weights and training record are asked of it, not of the file system."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate, number
from archsearch.records import from_data, load, load_or_note
from archsearch.runs.candidate import TrainingRecord, read_training
from archsearch.runs.run import open_run

OLD = Path(__file__).parents[1] / "fixtures" / "run-0.1.0" / "run"


def test_a_trained_candidate_and_one_that_is_not() -> None:
    run = open_run(OLD)
    trained, searched = run.candidate(1), run.candidate(2)
    assert (
        trained.has_weights
        and trained.rank == 1
        and trained.architecture == run.score(1).architecture
    )
    record = trained.training()
    assert record is not None and record.architecture == trained.architecture and record.tokens > 0
    assert not searched.has_weights and searched.training() is None
    with pytest.raises(ArchsearchError, match="no rank 9; ranks: 1, 2, 3"):
        run.candidate(9)


def test_a_training_record_is_written_as_it_was_read() -> None:
    data = json.loads((OLD / "best" / "1" / "training.json").read_text())
    record = TrainingRecord.from_dict(data)
    assert record.to_dict() == data
    assert len(record.looks) == len(data["alpha_curve"])


def test_a_broken_record_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "training.json"
    for text, words in (
        ("{", "is not JSON"),
        ("[]", "is not what archsearch writes"),
        ('{"tokens": 1}', "KeyError"),
    ):
        path.write_text(text)
        with pytest.raises(ArchsearchError, match=words) as caught:
            read_training(tmp_path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    problems: list[str] = []
    assert (
        load_or_note(path, "training record", TrainingRecord.from_dict, problems) is None
        and len(problems) == 1
    )
    assert (
        load_or_note(tmp_path / "none.json", "x", TrainingRecord.from_dict, problems) is None
        and len(problems) == 1
    )
    assert load(tmp_path / "none.json", "x", TrainingRecord.from_dict) is None


def test_numbers_are_finite() -> None:
    assert number(1.5) == 1.5 and from_data(Estimate, 2).value == 2.0
    for bad in (float("nan"), "inf", None, "1.5", True, 10**400):
        with pytest.raises((ValueError, TypeError)):
            number(bad)


def test_a_rank_that_is_no_more_is_set_aside_where_it_holds_weights(tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "run")
    run = open_run(tmp_path / "run")
    run.drop_rank(3)
    run.drop_rank(1)
    assert run.ranks() == [2] and not (tmp_path / "run" / "best" / "3").exists()
    assert (tmp_path / "run" / "best" / "replaced-1" / "model.safetensors").is_file()
