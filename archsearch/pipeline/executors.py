"""Where the workers of a search run: processes of this machine, or tasks of a Ray cluster.

A worker is `archsearch worker --run NAME` wherever it runs, the storage's URL in its environment.
It needs the storage, and for trainings the run folder, at the same path on every machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final, Literal, Protocol

from archsearch.errors import ArchsearchError
from archsearch.progress import say

ExecutorName = Literal["local", "ray"]
EXECUTORS: Final[tuple[ExecutorName, ...]] = ("local", "ray")


class Executor(Protocol):
    """Starts workers and ends them."""

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """One more worker; `environment`: what it has besides its own."""
        ...

    def stop(self) -> list[str]:
        """End all workers; what those said last that had given up before."""
        ...


class LocalProcesses:
    """Workers as processes of this machine."""

    def __init__(self) -> None:
        self._started: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        said = tempfile.TemporaryFile()
        process = subprocess.Popen(
            _worker(command),
            stdout=subprocess.DEVNULL,
            stderr=said,
            env={**os.environ, **environment},
        )
        self._started.append((process, said))

    def stop(self) -> list[str]:
        words = []
        for process, _ in self._started:
            process.terminate()
        for process, said in self._started:
            with said:
                if process.wait() > 0:  # not by this terminate: it had given up before
                    said.seek(0)
                    words.append(_last_line(said.read(), process.returncode))
        self._started = []
        return words


class RayTasks:
    """Workers as tasks of a Ray cluster that runs already (`RAY_ADDRESS`, else the one of this
    machine), each on one CPU and, where the search is for one, one GPU. Ray places them; nodes need
    archsearch and must reach storage and run folder."""

    def __init__(self, gpus: int = 0) -> None:
        try:
            import ray
        except ImportError as error:
            raise ArchsearchError(
                "--executor ray needs the Python package ray; install it (pip install"
                " 'archsearch[ray]')"
            ) from error
        self._ray, self._gpus = ray, gpus
        if not ray.is_initialized():
            try:
                ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False)
            except (ConnectionError, RuntimeError) as error:
                said = " ".join(str(error).split())[:160]
                raise ArchsearchError(
                    f"no Ray cluster answers ({said}); start one (ray start --head) or set"
                    " RAY_ADDRESS"
                ) from error
        if gpus and not ray.cluster_resources().get("GPU"):
            say(
                "the Ray cluster has no GPU: workers of a search that trains for one wait until"
                " it has"
            )
        self._tasks: list[Any] = []

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        own = {
            name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"
        }  # Ray's to say
        remote = self._ray.remote(_run_worker).options(
            num_cpus=1, num_gpus=self._gpus, max_retries=-1
        )
        self._tasks.append(remote.remote(list(command), own))

    def stop(self) -> list[str]:
        if not self._tasks:
            return []
        ready, waiting = self._ray.wait(self._tasks, num_returns=len(self._tasks), timeout=0)
        for task in waiting:
            self._ray.cancel(task, force=True)
        self._tasks = []
        return [words for words in self._ray.get(ready) if words]


def _run_worker(command: list[str], environment: dict[str, str]) -> str:
    """On a node of the cluster: one worker to its end; what it said last where it gave up."""
    done = subprocess.run(
        _worker(command),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )
    return _last_line(done.stderr, done.returncode) if done.returncode else ""


def _worker(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "archsearch.cli", *command]


def _last_line(said: bytes, status: int) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit status {status}"


def make_executor(name: ExecutorName, gpu: bool) -> Executor:
    """The executor of a name; `gpu`: whether each worker wants one."""
    return RayTasks(gpus=1 if gpu else 0) if name == "ray" else LocalProcesses()
