"""Trials that several processes share: each is done once, whoever is killed when: on a journal and
on a real PostgreSQL."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optuna
import pytest

from archsearch.search.claims import Claims
from archsearch.search.objective import Scorer
from archsearch.search.space import SearchSpace
from archsearch.search.storage import open_storage
from archsearch.search.study import How, SearchResult, search
from tests.doubles.postgres import postgres_server

WORKER = textwrap.dedent("""
    import os, sys, time, optuna
    from archsearch.search.claims import Claims
    from archsearch.search.storage import open_storage
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage, count, pace, grace = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    study = optuna.create_study(storage=open_storage(storage), study_name="s", load_if_exists=True, direction="maximize")
    def do(told):
        time.sleep(pace)
        return told["number"]
    claims = Claims(study, grace_s=grace, beat_s=0.2)
    open(os.path.join(sys.argv[5], str(os.getpid())), "w").close()
    if sys.argv[6] == "posts":
        with claims.hold("search"):
            claims.finish({str(n): {"number": n} for n in range(count)}, do)
            claims._add("WAITING", "end", {})
    else:
        while not [t for t in claims._trials("WAITING") if t.user_attrs["key"] == "end"]:
            if not claims.work(do, lambda told: told["key"] != "end"):
                time.sleep(0.1)
    print(claims.done)
    """)


def start(
    storage: str, count: int, pace: float, ready: Path, role: str = "helps"
) -> subprocess.Popen[str]:
    numbers = (str(count), str(pace), "4.0")
    command = [sys.executable, "-c", WORKER, storage, *numbers, str(ready), role]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


MOST_KILLS = 12  # on a busy machine each costs more than it takes until the next


def storm(
    storage: str,
    count: int,
    workers: int,
    pace: float,
    every_s: float,
    ready: Path,
    most: int = MOST_KILLS,
) -> tuple[int, int]:
    """`workers` processes at `count` tasks, one of which posts them; one of those at work killed as
    soon as one is, and every `every_s` seconds from then on, and started again; (kills, kills that
    met a worker with a task)."""
    running = {start(storage, count, pace, ready): "helps" for _ in range(workers - 1)}
    running[start(storage, count, pace, ready, "posts")] = "posts"
    rng, kills, last = random.Random(0), 0, -math.inf
    while any(process.poll() is None for process in running):
        time.sleep(0.05)
        alive = [
            process
            for process in running
            if process.poll() is None and (ready / str(process.pid)).exists()
        ]
        if time.monotonic() - last > every_s and alive and kills < most:
            victim = rng.choice(alive)
            os.kill(victim.pid, signal.SIGKILL)
            victim.communicate()
            role = running.pop(victim)
            running[start(storage, count, pace, ready, role)] = role
            kills, last = kills + 1, time.monotonic()
    for process in running:
        out, errors = process.communicate()
        assert process.returncode == 0, errors
    study = optuna.load_study(storage=open_storage(storage), study_name="s")
    trials = study.get_trials(deepcopy=False)
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    assert sorted(float(trial.value or 0.0) for trial in complete) == [
        float(n) for n in range(count)
    ], "lost or counted twice"
    done = {trial.user_attrs["key"] for trial in complete} | {"search", "end"}
    assert not [trial for trial in trials if trial.user_attrs["key"] not in done], "not taken over"
    if "://" in storage:
        study._storage.remove_session()
        study._storage._backend.engine.dispose()  # type: ignore[attr-defined]
    dead = [trial for trial in trials if "is gone" in str(trial.user_attrs.get("closed", ""))]
    return kills, len(dead)


def test_one_process_does_all_and_a_second_finds_nothing_to_do(tmp_path: Path) -> None:
    study = optuna.create_study(storage=open_storage(tmp_path / "j.log"), study_name="s")
    tasks = {str(n): {"number": n} for n in range(5)}
    first, second = Claims(study), Claims(study)
    for claims in (first, second):
        claims.finish(tasks, lambda told: told["number"])
    assert (first.done, second.done) == (5, 0)
    assert sorted(trial.value for trial in study.trials) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_task_is_given_to_one_process_only(tmp_path: Path) -> None:
    """Two that saw the same task wait: the storage lets the first have it."""
    done: list[str] = []
    studies = [
        optuna.create_study(
            storage=open_storage(tmp_path / "j.log"), study_name="s", load_if_exists=True
        )
        for _ in range(2)
    ]
    one, other = (Claims(study) for study in studies)
    one.post({"a": {}})
    seen = other._trials("WAITING")
    assert one.work(lambda told: len(done.append("one") or done))
    other._trials = lambda *states: seen  # type: ignore[method-assign]
    assert not other.work(lambda told: len(done.append("other") or done)) and done == ["one"]


def test_a_dead_claim_is_taken_over_and_what_waits_is_taken_back(tmp_path: Path) -> None:
    study = optuna.create_study(storage=open_storage(tmp_path / "j.log"), study_name="s")
    running = optuna.trial.create_trial(
        state=optuna.trial.TrialState.RUNNING, user_attrs={"key": "a", "worker": "dead", "alive": 3}
    )
    study.add_trial(running)
    claims = Claims(study, grace_s=0.5, beat_s=0.1)
    claims.finish({"a": {}}, lambda told: 1.0)
    assert study.trials[0].user_attrs["closed"] == "dead is gone"
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]
    claims.post({"b": {}, "a": {}})
    claims.withdraw()
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE", "FAIL"]
    assert study.trials[2].user_attrs["closed"] == "taken back"


def test_processes_that_ask_one_study_score_no_shape_twice(
    make_scorer: Callable[..., Scorer], small_space: SearchSpace, tmp_path: Path
) -> None:
    def both() -> SearchResult:
        how = How("random", shared=True)
        return search(
            small_space, make_scorer(), trials=40, seed=3, storage=tmp_path / "j.log", how=how
        )

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: both(), range(2))
    scored = one.scored_here + other.scored_here
    assert 40 <= scored <= 42, "what both are at when the last one is done"
    assert all(40 <= result.finished <= scored for result in (one, other))
    again = both()
    assert again.scored_here == 0 and again.finished == scored
    assert again.best[0].worth == max(one.best[0].worth, other.best[0].worth), (
        "nothing that the study holds is passed over"
    )


@pytest.mark.campaign
def test_workers_on_a_journal_that_are_killed_lose_nothing(tmp_path: Path) -> None:
    kills, _ = storm(str(tmp_path / "j.log"), 60, 3, 0.1, 3.0, tmp_path)
    assert kills >= 1


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.mark.campaign
def test_four_workers_on_postgresql_one_killed_every_few_seconds(
    postgres: str, tmp_path: Path
) -> None:
    kills, taken_over = storm(postgres, 400, 4, 0.2, 3.0, tmp_path, most=20)
    assert kills >= 10 and taken_over >= 1, (kills, taken_over)
