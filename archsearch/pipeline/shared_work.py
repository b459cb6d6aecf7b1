"""Trainings and confirmations of a search that several processes share, as tasks in its storage
(`search.claims`), and where those processes run: on this machine, or as tasks of a Ray cluster.

Who searches posts what is to be done next; whoever has joined takes a job, does it in the run's
folder, which all must reach, and says so. What lies there finished is not done again. The search
holds a claim of its own, so that its helpers know when it ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Final, Literal

from archsearch.architecture.architecture import Architecture
from archsearch.drafts.trainer import DraftTrainer
from archsearch.errors import ArchsearchError
from archsearch.files import digest
from archsearch.progress import say
from archsearch.records import as_data, from_data
from archsearch.search.claims import Claims, Details
from archsearch.search.storage import open_storage, storage_errors

JobKind = Literal["short", "full", "confirm"]
SEARCH: Final = "search"  # the claim of the process that posts
TRAINING_GRACE_S: Final = 60.0  # a training holds its process more than scoring does
POLL_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Job:
    """One thing to do. `short` and `full`: train `shape` to `tokens` in all, a full one for
    `seconds` at most; `confirm`: run `rank` in the engine."""

    kind: JobKind
    shape: Architecture
    tokens: int = 0
    seed: int = 0
    seconds: float = 0.0
    rank: int = 0
    prompts: int = 0

    @property
    def key(self) -> str:
        """Tells it from all others of its search: how long it may take is not what it is."""
        shape = digest(self.shape.to_dict())[:12]
        return f"{self.kind}-{shape}-{self.tokens}-{self.seed}-{self.rank}-{self.prompts}"


def train_job(job: Job, trainer: DraftTrainer) -> float:
    """Do a training; the last alpha of its curve, or the draft's."""
    if job.kind == "short":
        points = trainer.train_short(job.shape, job.tokens, job.seed, job.shape.label()).points
        return points[-1][1] if points else 0.0
    return trainer.train(
        job.shape, job.seconds, job.seed, job.shape.label(), tokens=job.tokens
    ).alpha.value


def _job(details: Details) -> Job:
    return from_data(Job, details["job"])


class SharedWork:
    """The jobs of one search. `created`: of its run: another of that name has jobs of its own."""

    def __init__(
        self, storage: str, name: str, created: str, *, grace_s: float = TRAINING_GRACE_S
    ) -> None:
        import optuna

        with storage_errors(storage):
            self.study = optuna.create_study(
                storage=open_storage(storage),
                study_name=f"archsearch-jobs-{name}-{digest(created)[:8]}",
                load_if_exists=True,
            )
        self.claims = Claims(self.study, grace_s=grace_s)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Say that the search lives, until the block ends. What was posted and nobody does is taken
        back."""
        self.claims.withdraw()
        try:
            with self.claims.hold(SEARCH):
                yield
        finally:
            self.claims.withdraw()

    def finish(self, jobs: Sequence[Job], do: Callable[[Job], float]) -> None:
        """Do the jobs together with whoever has joined; returns when all are done."""
        tasks = {job.key: {"job": as_data(job)} for job in jobs}
        self.claims.finish(tasks, lambda details: do(_job(details)))

    def help_along(self, do: Mapping[JobKind, Callable[[Job], float]]) -> int:
        """Do posted jobs of the kinds in `do` for as long as the search lives; how many were done
        here."""
        while True:
            while self.claims.work(
                lambda details: do[_job(details).kind](_job(details)),
                lambda details: _job(details).kind in do,
            ):
                pass
            if not self.claims.is_held(SEARCH):
                return self.claims.done
            time.sleep(POLL_S)


ExecutorName = Literal["local", "ray"]


class LocalProcesses:
    """Workers as processes of this machine."""

    def __init__(self) -> None:
        self._started: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """One more worker; `environment`: what it has besides its own."""
        said = tempfile.TemporaryFile()
        process = subprocess.Popen(
            _worker(command),
            stdout=subprocess.DEVNULL,
            stderr=said,
            env={**os.environ, **environment},
        )
        self._started.append((process, said))

    def stop(self) -> list[str]:
        """End all workers; what those said last that had given up before."""
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
    """Workers as tasks of a Ray cluster that runs already (`RAY_ADDRESS`, else this machine's),
    each on one CPU and, where the search is for one, one GPU. Nodes need archsearch and must reach
    storage and run folder."""

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
        self._tasks: list[object] = []

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # CUDA_VISIBLE_DEVICES is Ray's to say
        own = {name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"}
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
    """On a node of the cluster; what a worker said last where it gave up."""
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


def make_executor(name: ExecutorName, gpu: bool) -> LocalProcesses | RayTasks:
    """The executor of a name; `gpu`: whether each worker wants one."""
    return RayTasks(gpus=1 if gpu else 0) if name == "ray" else LocalProcesses()
