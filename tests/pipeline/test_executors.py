"""Where workers run: processes, or a stand-in for Ray's interface."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from archsearch import pipeline
from archsearch.cli import main
from archsearch.cli.search import worker as worker_command
from archsearch.errors import ArchsearchError
from archsearch.paths import STORAGE_VARIABLE
from archsearch.pipeline import workers
from archsearch.pipeline.session import SearchSession
from archsearch.pipeline.shared_work import LocalProcesses, RayTasks, make_executor
from archsearch.workload import WorkloadRequest
from tests.cli.commands import refused


class MadeUpRay(ModuleType):
    """The part of Ray that is used; a task runs when it is asked for."""

    def __init__(self, cluster: bool = True) -> None:
        super().__init__("ray")
        self.cluster, self.asked, self.cancelled = cluster, [], []  # type: ignore[var-annotated]

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        if not self.cluster:
            raise ConnectionError("Could not find any running Ray instance")
        assert options["address"] == "auto"

    def remote(self, function: Any) -> Any:
        ray = self

        class Task:
            def options(self, **options: Any) -> Any:
                self.wanted = options
                return self

            def remote(self, *arguments: Any) -> int:
                ray.asked.append((function, arguments, self.wanted))
                return len(ray.asked) - 1

        return Task()

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def wait(self, tasks: list[int], **_: Any) -> tuple[list[int], list[int]]:
        return tasks[:1], tasks[1:]

    def cancel(self, task: int, force: bool) -> None:
        self.cancelled.append(task)

    def get(self, tasks: list[int]) -> list[str]:
        return [self.asked[task][0](*self.asked[task][1]) for task in tasks]


def test_ray_places_workers_and_ends_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = MadeUpRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    executor = make_executor("ray", gpu=True)
    assert (
        isinstance(executor, RayTasks) and "the Ray cluster has no GPU" in capsys.readouterr().err
    )
    for _ in range(2):
        executor.start(
            ["no-such-command"], {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "GPU-1"}
        )
    _, (command, environment), wanted = ray.asked[0]
    assert command == ["no-such-command"] and environment == {
        "OMP_NUM_THREADS": "1"
    }  # which GPU is Ray's to say
    assert wanted["num_gpus"] == 1 and wanted["num_cpus"] == 1
    (words,) = executor.stop()  # the first had given up
    assert "no-such-command" in words and ray.cancelled == [1]
    assert executor.stop() == []


@pytest.mark.parametrize(("confirm", "wanted"), [(0, False), (1, True)])
def test_only_trainings_want_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, confirm: int, wanted: bool
) -> None:
    """A cluster without one would never place workers that only score."""
    asked: list[bool] = []
    monkeypatch.setattr(
        workers, "make_executor", lambda name, gpu: asked.append(gpu) or LocalProcesses()
    )
    work = WorkloadRequest("l4", engine="vllm", mode="graph")
    session = SearchSession.start(
        pipeline.SearchRequest(
            "llama-3.2-1b",
            work,
            alpha="0.7",
            families=("independent",),
            run=tmp_path / "a",
            workers=1,
        )
    )
    session = replace(session, request=replace(session.request, confirm=confirm))
    with workers.workers_beside(session):
        assert asked == [wanted]


def test_a_workers_command_line_holds_no_url_of_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody on a machine sees the command lines of its processes."""
    started: list[tuple[list[str], dict[str, str]]] = []

    class Listener(LocalProcesses):
        def start(self, command: Any, environment: Any) -> None:
            started.append((list(command), dict(environment)))

    monkeypatch.setattr(workers, "make_executor", lambda name, gpu: Listener())
    storage = f"sqlite:///{tmp_path}/topsecret.db"
    work = WorkloadRequest("l4", engine="vllm", mode="graph")
    session = SearchSession.start(
        pipeline.SearchRequest(
            "llama-3.2-1b",
            work,
            alpha="0.7",
            families=("independent",),
            run=tmp_path / "a",
            workers=2,
            storage=storage,
        )
    )
    with workers.workers_beside(session):
        ((command, environment),) = started
    assert "topsecret" not in " ".join(command)
    monkeypatch.setenv(STORAGE_VARIABLE, environment[STORAGE_VARIABLE])
    above = click.Context(main, **main.context_settings)  # -h and --help, as typed
    asked = worker_command.make_context("worker", command[1:], parent=above)
    assert asked.params["storage"] == storage


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", MadeUpRay(cluster=False))
    with pytest.raises(ArchsearchError, match="no Ray cluster answers .*ray start --head"):
        make_executor("ray", gpu=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ArchsearchError, match=r"pip install 'archsearch\[ray\]'"):
        make_executor("ray", gpu=False)
    command = (
        "search",
        "--target",
        "llama-3.2-1b",
        "--gpu",
        "l4",
        "--engine",
        "vllm",
        "--alpha",
        "0.7",
        "--trials",
        "4",
    )
    assert "pip install" in refused(
        *command, "--workers", "2", "--executor", "ray", "--run", "runs/a"
    )


def test_processes_that_gave_up_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = LocalProcesses()
    executor.start(["no-such-command"], {})
    executor._started[0][0].wait()
    (words,) = executor.stop()
    assert "no-such-command" in words
