"""Steps that end up as one file each: run in turn, skipped where their file is there, never ended
by one that fails.

A step's file is `STEP.json`: step, status, seconds, budget_s, written (UTC), and `data` or `error`.
`running.json` names the step in flight, for the process that watches: a step that outlasts its
limit or takes its process down is recorded as failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from archsearch.errors import ArchsearchError, RunFailed
from archsearch.files import read_json, write_json
from archsearch.progress import say
from archsearch.records import save

Status = Literal["done", "failed", "out of memory"]
RUNNING: Final = "running.json"
BROKEN: Final = 75  # exit status of a process whose device answers no more: the next one goes on
OVER_S: Final = 30.0  # beyond one and a half budgets: what a step may take before it is killed


class Deadline:
    """A budget that runs: `over` once it is spent. Steps ask between measurements."""

    def __init__(self, budget_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget_s, self._clock = budget_s, clock
        self._start = clock()

    @property
    def left_s(self) -> float:
        return self.budget_s - (self._clock() - self._start)

    @property
    def over(self) -> bool:
        return self.left_s <= 0


@dataclass(frozen=True)
class Step:
    """One thing to measure. `run` keeps to the deadline by itself and returns plain data; `after`:
    steps it cannot do without."""

    name: str
    budget_s: float
    run: Callable[[Deadline], dict[str, Any]]
    after: tuple[str, ...] = ()


def step_file(folder: Path, name: str) -> Path:
    """Where a step's result lies."""
    return folder / f"{name}.json"


def open_steps(names: Iterable[str], folder: Path) -> list[str]:
    """Those without a file."""
    return [name for name in names if not step_file(folder, name).exists()]


def forget_failed(names: Iterable[str], folder: Path) -> list[str]:
    """Remove the files of steps that did not succeed, so that they run again; returns their
    names."""
    failed = [
        name
        for name in names
        if (found := result_of(folder, name)) is not None and found["status"] != "done"
    ]
    for name in failed:
        step_file(folder, name).unlink()
    return failed


def result_of(folder: Path, name: str) -> dict[str, Any] | None:
    """What a step's file says; None where there is none."""
    file = step_file(folder, name)
    return dict(read_json(file, f"step {name}")) if file.exists() else None


def data_of(folder: Path, name: str) -> dict[str, Any]:
    """The data of a step that is done; {} of any other."""
    found = result_of(folder, name)
    return found["data"] if found is not None and found["status"] == "done" else {}


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def run_steps(
    steps: Sequence[Step],
    folder: Path,
    deadline: Deadline,
    *,
    memory_errors: tuple[type[BaseException], ...] = (MemoryError,),
    recover: Callable[[], bool] = lambda: True,
    wanted: Callable[[], bool] = lambda: True,
) -> list[str]:
    """Run the steps that have no file yet; returns the names of those left for want of time.

    A step begins only while half of its budget is left. `recover`: called after a failure; False
    where the device is unusable (raises SystemExit(BROKEN)). `wanted`: asked before each step;
    False ends the run.
    """
    for step in steps:
        if step_file(folder, step.name).exists():
            continue
        if not wanted() or deadline.left_s < 0.5 * step.budget_s:
            break
        missing = [name for name in step.after if not data_of(folder, name)]
        if missing:
            _write(
                folder,
                step,
                "failed",
                0.0,
                {"error": f"needs what step {', '.join(missing)} did not bring"},
            )
            continue
        limit_s = 1.5 * step.budget_s + OVER_S
        write_json(
            folder / RUNNING,
            {
                "step": step.name,
                "started": time.time(),
                "limit_s": limit_s,
                "budget_s": step.budget_s,
            },
        )
        say(f"{step.name}: up to {step.budget_s:.0f} s")
        begun = time.monotonic()
        status: Status = "done"
        try:
            outcome: dict[str, Any] = {
                "data": step.run(Deadline(min(step.budget_s, deadline.left_s)))
            }
        except memory_errors as error:
            status, outcome = "out of memory", {"error": _line(error)}
        except Exception as error:  # whatever it is, it is recorded and the day goes on
            status, outcome = "failed", {"error": _line(error)}
        _write(folder, step, status, time.monotonic() - begun, outcome)
        (folder / RUNNING).unlink(missing_ok=True)
        if status != "done":
            say(f"{step.name}: {status}: {outcome['error']}")
            if not recover():
                raise SystemExit(BROKEN)
    return open_steps([step.name for step in steps], folder)


def _line(error: BaseException) -> str:
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0] if words else 'no words'}"[:500]


def _write(
    folder: Path, step: Step, status: Status, seconds: float, outcome: dict[str, Any]
) -> None:
    entry = {
        "step": step.name,
        "status": status,
        "seconds": round(seconds, 3),
        "budget_s": step.budget_s,
        "written": now(),
    }
    save(step_file(folder, step.name), entry | outcome)


# -- watching
# --------------------------------------------------------------------------------------------------


def supervise(
    command: Callable[[float], Sequence[str]],
    names: Sequence[str],
    folder: Path,
    deadline: Deadline,
    *,
    poll_s: float = 0.3,
    spawn: Callable[[Sequence[str]], subprocess.Popen[Any]] = subprocess.Popen,
) -> list[str]:
    """Have `command(seconds left)` run the steps in a process that may die; started again while
    steps are left and time is.

    Returns the names of the steps left. Raises ArchsearchError where the process ends with status 2
    (it has said why), RunFailed where it dies twice between steps.
    """
    (folder / RUNNING).unlink(missing_ok=True)  # of a run that was killed: that step begins anew
    fruitless = 0
    while (left := open_steps(names, folder)) and not deadline.over:
        child = spawn(command(deadline.left_s))
        try:
            killed = _watch(child, folder, deadline, poll_s)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
        if deadline.over and killed is None:
            break
        if child.returncode == 2:
            raise ArchsearchError("")  # the process has said why
        _record_death(folder, killed or f"its process ended with status {child.returncode}")
        if child.returncode == 0 and killed is None:
            break
        fruitless = fruitless + 1 if open_steps(names, folder) == left else 0
        if fruitless == 2:
            raise RunFailed(
                f"the measuring process died twice between steps (status {child.returncode}); see"
                " what it printed"
            )
    (folder / RUNNING).unlink(missing_ok=True)
    return open_steps(names, folder)


def _watch(
    child: subprocess.Popen[Any], folder: Path, deadline: Deadline, poll_s: float
) -> str | None:
    """Until the child ends, its step outlasts its limit (then why, in words) or the deadline is
    over."""
    while child.poll() is None and not deadline.over:
        running = _running(folder)
        if running is not None and time.time() - running["started"] > running["limit_s"]:
            child.kill()
            return f"killed after {running['limit_s']:.0f} s"
        time.sleep(poll_s)
    return None


def _running(folder: Path) -> dict[str, Any] | None:
    try:
        return dict(read_json(folder / RUNNING, "step in flight"))
    except ArchsearchError:  # none, or removed while it was read
        return None


def _record_death(folder: Path, words: str) -> None:
    """The step in flight, if any, is recorded as failed."""
    running = _running(folder)
    if running is None or step_file(folder, running["step"]).exists():
        return
    step = Step(running["step"], running["budget_s"], lambda deadline: {})
    _write(folder, step, "failed", time.time() - running["started"], {"error": words})
    (folder / RUNNING).unlink(missing_ok=True)


def same_parent() -> Callable[[], bool]:
    """Whether the process that started this one is still there: a child nobody watches any more
    stops after its step."""
    parent = os.getppid()
    return lambda: os.getppid() == parent


def end_on_sigterm() -> None:
    """SIGTERM ends this process as Ctrl-C does, so that the child is taken along."""

    def stop(*_: Any) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
