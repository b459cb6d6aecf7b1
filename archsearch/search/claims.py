"""Work on the trials of a study that several processes share: each claims a trial, does it, and
says that it is alive.

A claim is a running trial with the key of what it is about. Two processes may claim the same at
once: the claim with the lower number stands, which all see alike, for a storage numbers trials one
after the other. A claim carries a counter that its process raises while it works; where it stands
still for `GRACE_S` by the clock of who watches (so clocks need not agree), the process is taken for
dead, its claim is closed, and somebody else does the work. So a trial is done once, whoever is
killed when. Any storage of Optuna's will do: a journal file, a database, its gRPC proxy.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

BEAT_S: Final = 2.0
GRACE_S: Final = 20.0
KEY, WORKER, ALIVE, CLOSED = "key", "worker", "alive", "closed"
"""User attributes of a trial: what it is about, who does it, the counter, and why a claim was
closed without a result."""


@dataclass(frozen=True)
class Task:
    """One trial to do. `key`: tells it from all others of its study; `do`: the finished trial,
    without number; `attrs`: what the claim says of it from the start."""

    key: str
    do: Callable[[], FrozenTrial]
    attrs: Mapping[str, Any]


def worker_name() -> str:
    """`host-pid-xxxx`: of this process, and of no other."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:4]}"


class Claims:
    """The trials of a study as tasks that one of several processes does. `done` counts what this
    one did."""

    def __init__(
        self,
        study: Study,
        *,
        grace_s: float = GRACE_S,
        beat_s: float = BEAT_S,
        name: str | None = None,
    ) -> None:
        import optuna

        self.study, self.grace_s, self.beat_s, self.name = (
            study,
            grace_s,
            beat_s,
            name or worker_name(),
        )
        self.done = 0
        self._storage = optuna.storages.get_storage(study._storage)
        self._seen: dict[int, tuple[int, float]] = {}
        self._random = random.Random(self.name)

    def finish(self, tasks: Iterable[Task]) -> dict[str, FrozenTrial]:
        """Do all tasks together with whoever else does; the finished trial of each key. Returns
        when all are done."""
        wanted = {task.key: task for task in tasks}
        while True:
            finished, claimed = self._read(wanted)
            free = [
                task for key, task in wanted.items() if key not in finished and key not in claimed
            ]
            if len(finished) == len(wanted):
                return finished
            if free:  # any of them: others that look at the same list seldom take the same
                self._try(self._random.choice(free))
            else:  # others are at the rest
                self._close_dead(claimed)
                time.sleep(min(self.beat_s, 0.2))

    def _read(
        self, wanted: Mapping[str, Any]
    ) -> tuple[dict[str, FrozenTrial], dict[str, FrozenTrial]]:
        """Finished trials and standing claims by key; of several finished ones the first."""
        from optuna.trial import TrialState

        finished: dict[str, FrozenTrial] = {}
        claimed: dict[str, FrozenTrial] = {}
        for trial in sorted(self.study.get_trials(deepcopy=False), key=lambda trial: trial.number):
            key = str(trial.user_attrs.get(KEY))
            if key not in wanted:
                continue
            if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
                finished.setdefault(key, trial)
            elif trial.state == TrialState.RUNNING:
                claimed.setdefault(key, trial)
        return finished, claimed

    def _try(self, task: Task) -> None:
        """Claim the task and do it, unless somebody was quicker."""
        from optuna.trial import TrialState, create_trial

        attrs = {**task.attrs, KEY: task.key, WORKER: self.name, ALIVE: 0}
        template = create_trial(state=TrialState.RUNNING, user_attrs=attrs)
        mine = self._storage.create_new_trial(self.study._study_id, template)
        finished, claimed = self._read({task.key: None})
        standing = claimed.get(task.key)
        if finished or standing is None or standing._trial_id != mine:
            self._close(mine, "somebody else was quicker")
            return
        try:
            with _Beat(self._storage, mine, self.beat_s):
                result = task.do()
        except BaseException as error:  # given back at once, Ctrl-C and a full disk included
            with suppress(Exception):  # the work's own error is the one that is told
                self._close(mine, f"{type(error).__name__} in {self.name}")
            raise
        self._tell(mine, result)

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """A claim that is no task: says that this process is at `key` until the block ends. Earlier
        ones are closed."""
        from optuna.trial import TrialState, create_trial

        earlier = self._holders(key)
        attrs = {KEY: key, WORKER: self.name, ALIVE: 0}
        mine = self._storage.create_new_trial(
            self.study._study_id, create_trial(state=TrialState.RUNNING, user_attrs=attrs)
        )
        for trial in earlier:
            self._close(trial._trial_id, f"{self.name} goes on")
        try:
            with _Beat(self._storage, mine, self.beat_s):
                yield
        finally:
            with suppress(Exception):
                self._close(mine, "ended")

    def is_held(self, key: str) -> bool:
        """Whether a process holds `key`, and its counter has moved within `grace_s`."""
        holders = self._holders(key)
        self._close_dead({str(trial.number): trial for trial in holders})
        return bool(holders) and bool(self._holders(key))

    def _holders(self, key: str) -> list[FrozenTrial]:
        from optuna.trial import TrialState

        trials = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [trial for trial in trials if trial.user_attrs.get(KEY) == key]

    def _tell(self, trial_id: int, result: FrozenTrial) -> None:
        from optuna.exceptions import UpdateFinishedTrialError

        try:
            for name, value in result.user_attrs.items():
                self._storage.set_trial_user_attr(trial_id, name, value)
            for name, value in result.system_attrs.items():
                self._storage.set_trial_system_attr(trial_id, name, value)
            self._storage.set_trial_state_values(trial_id, result.state, result.values)
            self.done += 1
        except (
            UpdateFinishedTrialError
        ):  # this process was taken for dead, and the work is somebody else's now
            pass

    def _close(self, trial_id: int, why: str) -> None:
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        try:
            self._storage.set_trial_user_attr(trial_id, CLOSED, why)
            self._storage.set_trial_state_values(trial_id, TrialState.FAIL)
        except UpdateFinishedTrialError:
            pass

    def _close_dead(self, claimed: Mapping[str, FrozenTrial]) -> None:
        """Close the claims whose counters have stood still for too long."""
        now = time.monotonic()
        for trial in claimed.values():
            counter = int(trial.user_attrs.get(ALIVE, 0))
            before, since = self._seen.get(trial._trial_id, (-1, now))
            if counter != before:
                self._seen[trial._trial_id] = (counter, now)
            elif now - since > self.grace_s:
                self._close(
                    trial._trial_id, f"{trial.user_attrs.get(WORKER, 'its worker')} is gone"
                )


class _Beat:
    """Raises a claim's counter while its work is done; a storage that fails is noticed by the
    work's own writing."""

    def __init__(self, storage: Any, trial_id: int, every_s: float) -> None:
        self._storage, self._trial_id, self._every_s = storage, trial_id, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        from optuna.exceptions import UpdateFinishedTrialError

        count = 0
        while not self._stop.wait(self._every_s):
            count += 1
            try:
                self._storage.set_trial_user_attr(self._trial_id, ALIVE, count)
            except UpdateFinishedTrialError:  # this process was taken for dead
                return
            except Exception:  # noqa: BLE001 - a storage that does not answer now may answer at the next beat
                continue

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
