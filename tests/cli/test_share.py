"""A run folder's copy in an object store: what changed goes over once, workers without the folder train along through it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from archsearch import pipeline
from archsearch.errors import ArchsearchError
from archsearch.pipeline.mirror import Mirror
from archsearch.pipeline.search import score_spaces
from archsearch.pipeline.session import SearchSession
from archsearch.pipeline.shared_work import Job, SharedWork, train_job
from archsearch.pipeline.workers import _mirror_of, announce, join
from archsearch.workload import WorkloadRequest
from tests.cli.commands import refused


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_what_changed_goes_over_once(tmp_path: Path, scheme: str) -> None:
    url = f"{scheme}://{tmp_path}/store/run"
    one, two = tmp_path / "one", tmp_path / "two"
    (one / "text").mkdir(parents=True)
    (one / "text" / "a.json").write_text("1")
    (one / "journal.log").write_text("the storage's")
    (one / ".lock").write_text("this process")
    here, there = Mirror(url, one), Mirror(url, two)
    assert here.push() == ["text/a.json"] and here.push() == [] and here.pull() == []
    assert there.pull() == ["text/a.json"] and there.pull() == [] and there.push() == []
    (two / "finalists").mkdir()
    (two / "finalists" / "curve.json").write_text("22")
    (one / "mine.json").write_text("not put up yet")
    assert there.push() == ["finalists/curve.json"]
    again = Mirror(url, one)  # the search was killed and goes on: it knows what it had seen
    assert again.pull() == ["finalists/curve.json"] and again.push() == ["mine.json"]
    (one / "mine.json").write_text("written again")
    (two / "mine.json").parent.mkdir(exist_ok=True)
    assert there.pull() == ["mine.json"]
    (two / "mine.json").write_text("of the other")
    assert there.push() == ["mine.json"] and again.pull() == []  # what is newer here stays
    assert (one / "mine.json").read_text() == "written again"


def test_a_file_from_outside_goes_along(tmp_path: Path) -> None:
    (tmp_path / "my.jsonl").write_text("{}")
    mirror = Mirror(f"memory://{tmp_path}/inputs", tmp_path / "run")
    assert mirror.take_in(None, "text") is None and mirror.take_in(tmp_path / "my.jsonl", "prompts") == "inputs/prompts.jsonl"
    assert Mirror(mirror.url, tmp_path / "copy").pull() == ["inputs/prompts.jsonl"]
    assert (tmp_path / "copy" / "inputs" / "prompts.jsonl").read_text() == "{}"


def test_a_store_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for url in ("nosuchscheme://me:secret@x/y", f"file://{tmp_path}/file/run"):
        with pytest.raises(ArchsearchError, match="^--share .* cannot be used: ") as caught:
            Mirror(url, tmp_path / "run")
        assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
    command = ("search", "--target", "llama-3.2-1b", "--gpu", "l4", "--engine", "vllm", "--alpha", "0.7", "--trials", "4")
    assert "add --workers N" in refused(*command, "--share", "memory://x", "--run", str(tmp_path / "run"))


def test_a_worker_that_does_not_see_the_folder_trains_along(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = WorkloadRequest("cpu", context_len=64)
    files = {"prompts": Path("prompts.jsonl"), "run": Path("runs/a"), "share": f"file://{world}/store"}
    known = pipeline.SearchRequest("target", asked, "tiny.yaml", trials=8, answer_tokens=16, confirm=1, workers=1, **files)
    session = SearchSession.start(known)
    trainer = session.trainer()
    trainer.texts.write_training_once(2.0)
    session.scorer = session.scorer.with_coverage(trainer.texts.coverage())
    storage = str((world / "shared.log").resolve())
    mirror = _mirror_of(session)
    assert mirror is not None
    name = announce(session, storage, mirror)
    shapes = [score.architecture for score in score_spaces(session).best[:2]]
    work = SharedWork(storage, name, session.run.info["created"], mirror=mirror)
    monkeypatch.setattr("archsearch.pipeline.workers._shared_folder", lambda told, folder: None)
    Path("prompts.jsonl").rename("elsewhere.jsonl")  # another machine has no such file either
    joined: list[dict[str, object]] = []
    with work.held():
        thread = threading.Thread(target=lambda: joined.append(join(storage, name, score_spaces)))
        thread.start()

        def waits(job: Job) -> float:  # the search's own hands are full until the other is through
            while thread.is_alive() and sum(trial.state.name == "COMPLETE" for trial in work.study.trials) < 1:
                time.sleep(0.05)
            return train_job(job, trainer)

        work.finish([Job("short", shape, 200) for shape in shapes], waits)
    thread.join()
    assert joined[0]["trained_here"] == 1 and str(joined[0]["folder"]).startswith("file://")
    for shape in shapes:  # its curve has come back: it is read, not trained
        assert (trainer.draft_folder(shape) / "curve.json").is_file()
