"""`--storage`: many searches share one, and a run stays with its own."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import pytest

from archsearch import pipeline
from archsearch.errors import ArchsearchError
from archsearch.files import read_json
from archsearch.pipeline.session import without_password
from archsearch.runs.run import open_run
from archsearch.search import storage
from archsearch.workload import WorkloadRequest
from tests.acceptance.test_registry import SPACE


def request(run: Path, **changes: object) -> pipeline.SearchRequest:
    asked = WorkloadRequest(
        "h100", engine="vllm", batch_size=int(str(changes.pop("batch_size", 1)))
    )
    (run.parent / "space.yaml").write_text(SPACE)
    changes |= {"trials": 20, "alpha": "0.7", "run": run, "space": "space.yaml"}
    return pipeline.SearchRequest("llama-3.1-8b", asked=asked, **changes)  # type: ignore[arg-type]


@pytest.mark.slow(own=True)
def test_two_workloads_in_one_storage_keep_their_own_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second search once answered with the first one's speed-up."""
    monkeypatch.chdir(tmp_path)
    shared = f"sqlite:///{tmp_path}/shared.db"
    first = pipeline.search(request(tmp_path / "one", storage=shared))
    second = pipeline.search(request(tmp_path / "two", storage=shared, batch_size=64))
    alone = pipeline.search(request(tmp_path / "three", batch_size=64))
    assert second.best == alone.best != first.best
    with pytest.raises(ArchsearchError, match="storage was 'sqlite:.*', now None"):
        pipeline.search(request(tmp_path / "one"))
    assert pipeline.search(request(tmp_path / "one", storage=shared)).best == first.best


def test_a_run_of_the_previous_version_that_names_no_storage_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "old"
    before = pipeline.search(request(run)).best
    text = (run / "run.yaml").read_text()
    assert "  storage: null\n" in text
    (run / "run.yaml").write_text(text.replace("  storage: null\n", ""))
    assert "storage" not in open_run(run).arguments
    assert pipeline.search(request(run)).best == before
    assert read_json(run / "best" / "1" / "score.json", "score") == before[0].to_dict()


def test_a_lock_that_cannot_be_taken_leaves_no_open_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles: list[IO[bytes]] = []

    def refuse(handle: IO[bytes], *, wait: bool) -> bool:
        handles.append(handle)
        raise OSError("no locks available")

    monkeypatch.setattr(storage, "locked", refuse)
    with pytest.raises(OSError, match="no locks"), storage.alone(str(tmp_path / "journal")):
        pass
    assert handles[0].closed


def test_passwords_are_not_written_down() -> None:
    assert without_password("mysql://me:se@cret@host/db") == "mysql://me:***@host/db"
    assert (
        without_password("sqlite:///runs/a.db") == "sqlite:///runs/a.db"
        and without_password(None) is None
    )
