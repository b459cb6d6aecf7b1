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
from archsearch.pipeline import workers
from archsearch.pipeline.climb.trainings import train_alike
from archsearch.pipeline.shared_work import SEARCH, Job, SharedWork
from archsearch.records import as_data, from_data
from archsearch.runs.run import create_run
from tests.doubles.world import TINY

SHAPES = [TINY.replace(num_hidden_layers=layers) for layers in range(1, 7)]


def work(folder: Path, grace_s: float = 5.0) -> SharedWork:
    found = SharedWork(str(folder / "journal.log"), "a", "today", grace_s=grace_s)
    found.claims.beat_s = 0.1
    return found


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
    search, helper = work(tmp_path), work(tmp_path)
    with search.held():
        thread = threading.Thread(target=helper.help_along, args=({"short": slowly(others)},))
        thread.start()
        for tokens in (10, 20):
            search.finish(jobs(tokens), slowly(mine))
        assert thread.is_alive()
    thread.join(timeout=120)
    assert not thread.is_alive()
    assert len(mine) + len(others) == len({*mine, *others}) == 2 * len(SHAPES)
    assert mine and others
    again = work(tmp_path)  # the same search, begun again: nothing is left to do
    with again.held():
        again.finish(jobs(20), slowly(mine))
    assert len(mine) + len(others) == 2 * len(SHAPES)
    assert not [trial for trial in again.study.trials if not trial.state.is_finished()]


def test_kinds_that_a_helper_cannot_do_are_left_to_others(tmp_path: Path) -> None:
    search, helper = work(tmp_path), work(tmp_path)
    done: list[tuple[Architecture, int]] = []
    with search.held():
        job = Job("confirm", SHAPES[0], rank=1, prompts=4)
        search.claims.post({job.key: {"job": as_data(job)}})
        thread = threading.Thread(target=helper.help_along, args=({"short": slowly(done)},))
        thread.start()
        time.sleep(0.3)
    thread.join(timeout=120)
    assert not done and not thread.is_alive()


def test_a_job_that_fails_is_given_back_at_once(tmp_path: Path) -> None:
    def fail(job: Job) -> float:
        raise OSError(28, "No space left on device")

    search = work(tmp_path, grace_s=600.0)
    with search.held(), pytest.raises(OSError, match="No space left"):
        search.finish(jobs(10)[:1], fail)
    (claim,) = [trial for trial in search.study.trials if trial.user_attrs.get("job")]
    assert claim.state.name == "FAIL" and claim.user_attrs["closed"].startswith("OSError in ")
    done: list[tuple[Architecture, int]] = []
    start = time.monotonic()
    search.finish(jobs(10)[:1], slowly(done))
    assert done == [(SHAPES[0], 10)] and time.monotonic() - start < 300


HOLD = textwrap.dedent(
    """
    import sys
    from archsearch.architecture.architecture import Architecture
    from archsearch.pipeline.shared_work import Job, SharedWork
    work = SharedWork(sys.argv[1], "a", "today", grace_s=2.0)
    work.claims.beat_s = 0.1
    with work.held():
        print("held", flush=True)
        sys.stdin.read()
    """
)


def test_a_search_that_was_killed_is_noticed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "journal.log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    helper = work(tmp_path, grace_s=1.0)
    assert helper.claims.is_held(SEARCH)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert helper.help_along({}) == 0  # returns once the counter has stood still for the grace
    assert not helper.claims.is_held(SEARCH)


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

    search = work(tmp_path)
    with search.held():
        drafts = train_alike(Trainer(), SHAPES[:2], 100, lambda: 30.0, 0, search)
    assert sorted(trained) == ["1 for 31 s", "2 for 31 s"], (
        "each has all the time that is left, not a part of it"
    )
    assert [draft.architecture for draft in drafts] == SHAPES[:2]


def test_a_worker_trains_in_the_folder_of_that_run_only(tmp_path: Path) -> None:
    run = create_run(tmp_path, {"target": "t"}, space={}, path=tmp_path / "a")
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
