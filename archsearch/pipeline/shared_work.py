"""Trainings and confirmations of a search that several processes share, as tasks in its storage
(`search.claims`).

Who searches posts what is to be done next; whoever has joined takes a job, does it in the run's
folder, which all must reach, and says so. The folder is the truth: what lies there finished is not
done again, whatever a storage says. While the search lives it holds a claim of its own, so that its
helpers know when there is nothing more to wait for.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from archsearch.architecture.architecture import Architecture
from archsearch.drafts.records import ShortTraining, TrainedDraft
from archsearch.records import as_data, from_data
from archsearch.search.claims import Claims
from archsearch.search.storage import open_storage, storage_errors

JobKind = Literal["short", "full", "confirm"]
JOBS: Final = "archsearch-jobs-{name}-{digest}"  # the study
SEARCH: Final = "search"  # the claim of the process that posts
TRAINING_GRACE_S: Final = 60.0  # a training holds its process more than scoring does
POLL_S: Final = 0.5


class Trainer(Protocol):
    """What does trainings; `archsearch.drafts.trainer` has the real one."""

    def train_short(
        self,
        arch: Architecture,
        tokens: int,
        seed: int = 0,
        label: str = "",
        *,
        limit_s: float | None = None,
    ) -> ShortTraining: ...

    def train(
        self,
        arch: Architecture,
        budget_s: float,
        seed: int = 0,
        label: str = "",
        *,
        tokens: int | None = None,
    ) -> TrainedDraft: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One thing to do. `short` and `full`: train `shape` to `tokens` in all, a full one for
    `seconds` at most; `confirm`: run `rank` in the engine on `prompts` prompts."""

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
        shape = hashlib.sha256(
            json.dumps(self.shape.to_dict(), sort_keys=True).encode()
        ).hexdigest()[:12]
        return f"{self.kind}-{shape}-{self.tokens}-{self.seed}-{self.rank}-{self.prompts}"


def train_job(job: Job, trainer: Trainer) -> float:
    """Do a training; the last alpha of its curve, or the draft's."""
    if job.kind == "short":
        points = trainer.train_short(job.shape, job.tokens, job.seed, job.shape.label()).points
        return points[-1][1] if points else 0.0
    return trainer.train(
        job.shape, job.seconds, job.seed, job.shape.label(), tokens=job.tokens
    ).alpha.value


class SharedWork:
    """The jobs of one search, in its storage. `created`: of its run, so that another run of that
    name has jobs of its own."""

    def __init__(
        self, storage: str, name: str, created: str, *, grace_s: float = TRAINING_GRACE_S
    ) -> None:
        import optuna

        digest = hashlib.sha256(created.encode()).hexdigest()[:8]
        with storage_errors(storage):
            self.study = optuna.create_study(
                storage=open_storage(storage),
                study_name=JOBS.format(name=name, digest=digest),
                load_if_exists=True,
            )
        self.claims = Claims(self.study, grace_s=grace_s)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Say that the search lives, until the block ends. What it, or a killed one, posted and
        nobody does is taken back."""
        self.claims.withdraw()
        try:
            with self.claims.hold(SEARCH):
                yield
        finally:
            self.claims.withdraw()

    def finish(self, jobs: Sequence[Job], do: Callable[[Job], float]) -> None:
        """Do the jobs together with whoever has joined; returns when all are done."""
        tasks = {job.key: {"job": as_data(job)} for job in jobs}
        self.claims.finish(tasks, lambda details: do(from_data(Job, details["job"])))

    def help_along(self, do: Mapping[JobKind, Callable[[Job], float]]) -> int:
        """Do posted jobs of the kinds in `do` for as long as the search lives; how many were done
        here."""
        while True:
            while self.claims.work(
                lambda details: do[details["job"]["kind"]](from_data(Job, details["job"])),
                lambda details: details["job"]["kind"] in do,
            ):
                pass
            if not self.claims.is_held(SEARCH):
                return self.claims.done
            time.sleep(POLL_S)
