"""Trainings that several processes share: each is done once, by whoever is free; helpers leave when
the search does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.pipeline import shared_work, workers
from archsearch.pipeline.climb.trainings import train_alike
from archsearch.pipeline.shared_work import Job, SharedWork
from archsearch.records import as_data, from_data, save
from archsearch.runs.lock import LOCK_FILE, in_use, run_lock
from archsearch.runs.run import create_run
from tests.doubles.world import TINY

SHAPES = [TINY.replace(num_hidden_layers=layers) for layers in range(1, 7)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_work, "POLL_S", 0.05)


def jobs(tokens: int) -> list[Job]:
    return [Job("short", shape, tokens, 3) for shape in SHAPES]


def slowly(done: list[tuple[Architecture, int]]) -> Callable[[Job], float]:
    def do(job: Job) -> float:
        time.sleep(0.1)
        done.append((job.shape, job.tokens))
        return 0.5

    return do


def test_a_job_is_read_back_as_it_was_written() -> None:
    job = Job("full", SHAPES[0], 4000, 1, 12.5)
    assert from_data(Job, as_data(job)) == job and from_data(Job, as_data(job)).key == job.key
    assert len({job.key for job in [*jobs(10), *jobs(20), job]}) == 2 * len(SHAPES) + 1
    assert Job("full", SHAPES[0], 4000, 1, 99.0).key == job.key, (
        "the seconds it may take are not what it is"
    )


def test_two_rounds_are_shared_and_the_helper_leaves_with_the_search(tmp_path: Path) -> None:
    mine: list[tuple[Architecture, int]] = []
    others: list[tuple[Architecture, int]] = []
    search, helper = SharedWork(tmp_path), SharedWork(tmp_path)
    with run_lock(tmp_path):
        thread = threading.Thread(target=helper.help_along, args=({"short": slowly(others)},))
        thread.start()
        for tokens in (10, 20):
            search.finish(jobs(tokens), slowly(mine))
        assert thread.is_alive()
    thread.join(timeout=120)
    assert not thread.is_alive()
    assert len(mine) + len(others) == len({*mine, *others}) == 2 * len(SHAPES)
    assert mine and others
    again = SharedWork(tmp_path)  # the same search, begun again: nothing is left to do
    with run_lock(tmp_path):
        again.finish(jobs(20), slowly(mine))
    assert len(mine) + len(others) == 2 * len(SHAPES)
    assert not list(tmp_path.glob("jobs/*/job.json"))


def test_kinds_that_a_helper_cannot_do_are_left_to_others(tmp_path: Path) -> None:
    helper = SharedWork(tmp_path)
    done: list[tuple[Architecture, int]] = []
    with run_lock(tmp_path):
        job = Job("confirm", SHAPES[0], rank=1, prompts=4)
        save(tmp_path / "jobs" / job.key / "job.json", job)
        thread = threading.Thread(target=helper.help_along, args=({"short": slowly(done)},))
        thread.start()
        time.sleep(0.3)
    thread.join(timeout=120)
    assert not done and not thread.is_alive()


def test_a_job_that_fails_is_given_back_at_once(tmp_path: Path) -> None:
    def fail(job: Job) -> float:
        raise OSError(28, "No space left on device")

    search = SharedWork(tmp_path)
    with run_lock(tmp_path), pytest.raises(OSError, match="No space left"):
        search.finish(jobs(10)[:1], fail)
    done: list[tuple[Architecture, int]] = []
    search.finish(jobs(10)[:1], slowly(done))
    assert done == [(SHAPES[0], 10)]


WORKER = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from archsearch.pipeline import shared_work
    from archsearch.runs.lock import run_lock
    from tests.pipeline.test_shared_work import SHAPES, jobs
    shared_work.POLL_S, folder = 0.05, Path(sys.argv[1])
    work = shared_work.SharedWork(folder)

    def do(job):
        time.sleep(0.3)
        with open(folder / "did.txt", "a") as file:
            file.write(job.key + chr(10))

    print("ready", flush=True)
    if sys.argv[2] == "posts":
        with run_lock(folder):
            for tokens in (10, 20, 30):
                work.finish(jobs(tokens), do)
    else:
        print(work.help_along({"short": do}))
    """
)


def start(folder: Path, role: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder), role],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_a_helper_that_is_killed_loses_its_job_to_another(tmp_path: Path) -> None:
    search = start(tmp_path, "posts")
    killed = start(tmp_path, "helps")
    locks = [tmp_path / "jobs" / job.key / LOCK_FILE for job in jobs(10)]
    while search.poll() is None:
        if any(f'"pid": {killed.pid},' in lock.read_text() for lock in locks if lock.exists()):
            break
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    _, errors = search.communicate()
    assert search.returncode == 0, errors
    did = (tmp_path / "did.txt").read_text().split()
    assert sorted(did) == sorted(job.key for tokens in (10, 20, 30) for job in jobs(tokens))


def test_a_search_that_was_killed_is_noticed(tmp_path: Path) -> None:
    search = start(tmp_path, "posts")
    while not in_use(tmp_path):
        time.sleep(0.01)
    os.kill(search.pid, signal.SIGKILL)
    search.communicate()
    assert in_use(tmp_path), "for a minute: on another machine nobody knows better"
    os.utime(tmp_path / LOCK_FILE, (time.time() - 300, time.time() - 300))
    assert SharedWork(tmp_path).help_along({}) == 0
    SharedWork(tmp_path).take_back()  # who begins again
    assert not list(tmp_path.glob("jobs/*/job.json"))


def test_finalists_are_trained_together_and_measured_once_more(tmp_path: Path) -> None:
    trained: list[str] = []

    class Trainer:
        tokens: dict[Architecture, int] = {}

        def spent(self, arch: Architecture) -> tuple[int, float]:
            return self.tokens.get(arch, 0), 1.0

        def train_short(
            self,
            arch: Architecture,
            tokens: int,
            seed: int = 0,
            label: str = "",
            *,
            limit_s: float | None = None,
        ):
            raise AssertionError

        def train(
            self,
            arch: Architecture,
            budget_s: float,
            seed: int = 0,
            label: str = "",
            *,
            tokens: int | None = None,
        ):
            if self.tokens.get(arch, 0) < (tokens or 0):
                trained.append(f"{arch.num_hidden_layers} for {budget_s:.0f} s")
            self.tokens[arch] = tokens or 0
            return SimpleNamespace(
                alpha=SimpleNamespace(value=0.5), architecture=arch, tokens=tokens, stopped=""
            )

    search = SharedWork(tmp_path)
    with run_lock(tmp_path):
        drafts = train_alike(Trainer(), SHAPES[:2], 100, lambda: 30.0, 0, search)
    assert sorted(trained) == ["1 for 31 s", "2 for 31 s"], (
        "each has all the time that is left, not a part of it"
    )
    assert [draft.architecture for draft in drafts] == SHAPES[:2]


def test_a_worker_trains_in_the_folder_of_that_run_only(tmp_path: Path) -> None:
    run = create_run(tmp_path, {"target": "t"}, space={}, seed=0, path=tmp_path / "a")
    told = workers.Announced(
        {}, None, None, None, (), run.info["created"], "", folder=tmp_path / "a"
    )
    assert workers._shared_folder(told, None) == tmp_path / "a"
    elsewhere = replace(told, folder=Path("/nowhere/a"))
    assert workers._shared_folder(elsewhere, None) is None
    assert workers._shared_folder(elsewhere, tmp_path / "a") == tmp_path / "a"
    assert workers._shared_folder(replace(told, folder=None), tmp_path / "a") is None
    with pytest.raises(ArchsearchError, match="another run than the one that was announced"):
        workers._shared_folder(replace(told, created="another day"), None)
    with pytest.raises(ArchsearchError, match="does not exist"):
        workers._shared_folder(told, tmp_path / "b")
