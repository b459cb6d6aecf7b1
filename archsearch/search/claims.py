"""Work that several processes share, handed out by Optuna's storage. A task is a waiting trial; the
storage lets one process make it run, which then does it.

Who runs a task raises its counter. Where it does not move for `GRACE_S`, by the clock of who
watches (so clocks need not agree), the process is taken for dead, its trial fails, and the task is
posted anew. So a task is done once, whoever is killed when. Any storage of Optuna's will do.
(Optuna's own heartbeats are for databases only.)
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

BEAT_S: Final = 2.0
GRACE_S: Final = 20.0
KEY, WORKER, ALIVE, CLOSED = "key", "worker", "alive", "closed"
"""User attributes of a trial: which task it is, who does it, the counter, and why it was closed
without a result."""

Details = Mapping[str, object]
"""What a task says of itself: user attributes of its trial."""


class Claims:
    """The tasks of a study. One process posts them (`finish`), any may `work` at them. `done`: how
    many this one did; `name`: of this process, and of no other."""

    def __init__(self, study: Study, *, grace_s: float = GRACE_S, beat_s: float = BEAT_S) -> None:
        import optuna

        self.study, self.grace_s, self.beat_s = study, grace_s, beat_s
        self.name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:4]}"
        self.done = 0
        self._storage = optuna.storages.get_storage(study._storage)
        self._states = optuna.trial.TrialState
        self._over = optuna.exceptions.UpdateFinishedTrialError
        self._seen: dict[int, tuple[int, float]] = {}
        self._random = random.Random(self.name)

    def finish(self, tasks: Mapping[str, Details], do: Callable[[Details], float]) -> None:
        """Have all tasks (by key) done, by this process and whoever else works; what is done by
        then is not done again. What still waits when this ends with an error is taken back."""
        try:
            while self.post(tasks):
                if not self.work(do):  # others are at the rest
                    self._close_dead(self._trials("RUNNING"))
                    time.sleep(min(self.beat_s, 0.2))
        finally:
            self.withdraw()

    def post(self, tasks: Mapping[str, Details]) -> bool:
        """Post those tasks that nobody does, has done or waits for; whether any is not done."""
        # In this order: what is done between the two is in both.
        live = {trial.user_attrs.get(KEY) for trial in self._trials("WAITING", "RUNNING")}
        done = {trial.user_attrs.get(KEY) for trial in self._trials("COMPLETE")}
        for key in tasks.keys() - live - done:
            self._add("WAITING", key, tasks[key])
        return not tasks.keys() <= done

    def withdraw(self) -> None:
        for trial in self._trials("WAITING"):
            self._close(trial._trial_id, "taken back")

    def work(
        self, do: Callable[[Details], float], can: Callable[[Details], bool] = lambda details: True
    ) -> bool:
        """Do one of the tasks that wait, of those that `can` be done here; False where there is
        none."""
        waiting = [trial for trial in self._trials("WAITING") if can(trial.user_attrs)]
        self._random.shuffle(waiting)  # others that look at the same list seldom take the same
        for trial in waiting:
            with suppress(self._over):  # done by another, or taken back
                if self._storage.set_trial_state_values(trial._trial_id, self._states.RUNNING):
                    self._do(trial, do)
                    return True
        return False

    def _do(self, trial: FrozenTrial, do: Callable[[Details], float]) -> None:
        try:
            with self._alive(trial._trial_id):
                value = float(do(trial.user_attrs))
        except BaseException as error:  # given back at once, Ctrl-C and a full disk included
            with suppress(Exception):  # the work's own error is the one that is raised
                self._close(trial._trial_id, f"{type(error).__name__} in {self.name}")
            raise
        with suppress(self._over):  # taken for dead: it is somebody else's now
            self._storage.set_trial_state_values(trial._trial_id, self._states.COMPLETE, [value])
            self.done += 1

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """A running trial that is no task: says that this process is at `key` until the block
        ends. Earlier ones are closed."""
        earlier = self._holders(key)
        mine = self._add("RUNNING", key, {})
        for trial in earlier:
            self._close(trial._trial_id, f"{self.name} goes on")
        try:
            with self._alive(mine):
                yield
        finally:
            with suppress(Exception):
                self._close(mine, "ended")

    def is_held(self, key: str) -> bool:
        """Whether a process holds `key`, and its counter has moved within `grace_s`."""
        self._close_dead(self._holders(key))
        return bool(self._holders(key))

    def _holders(self, key: str) -> list[FrozenTrial]:
        return [trial for trial in self._trials("RUNNING") if trial.user_attrs.get(KEY) == key]

    def _trials(self, *states: str) -> list[FrozenTrial]:
        wanted = tuple(self._states[name] for name in states)
        return self.study.get_trials(deepcopy=False, states=wanted)

    def _add(self, state: str, key: str, details: Details) -> int:
        from optuna.trial import create_trial

        attrs = {**details, KEY: key, ALIVE: 0}
        trial = create_trial(state=self._states[state], user_attrs=attrs)
        return self._storage.create_new_trial(self.study._study_id, trial)

    def _close(self, number: int, why: str) -> None:
        with suppress(self._over):
            self._storage.set_trial_user_attr(number, CLOSED, why)
            self._storage.set_trial_state_values(number, self._states.FAIL)

    def _close_dead(self, running: list[FrozenTrial]) -> None:
        now = time.monotonic()
        for trial in running:
            number, counter = trial._trial_id, int(trial.user_attrs.get(ALIVE, 0))
            before, since = self._seen.get(number, (-1, now))
            if counter != before:
                self._seen[number] = (counter, now)
            elif now - since > self.grace_s:
                self._close(number, f"{trial.user_attrs.get(WORKER, 'its worker')} is gone")

    @contextmanager
    def _alive(self, trial_id: int) -> Iterator[None]:
        """Raises a trial's counter until the block ends; a storage that fails is noticed by the
        work's own writing."""
        stop = threading.Event()

        def beat() -> None:
            count = 0
            while not stop.wait(self.beat_s):
                count += 1
                try:
                    self._storage.set_trial_user_attr(trial_id, ALIVE, count)
                except self._over:  # this process was taken for dead
                    return
                except Exception:  # one that does not answer now may at the next beat
                    continue

        self._storage.set_trial_user_attr(trial_id, WORKER, self.name)
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
