"""A machine that is not alone: training that waits for its cores from the start, or falls far below
the speed it began with, is noticed, and fewer threads are tried.

Threads meet at a barrier after every operation, so one that another process keeps from its core
holds up all. Fewer threads than free cores can then be faster than all of them; whether they are is
measured, not assumed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

WINDOW_S: Final = 10.0  # speed is judged over at least this long
WINDOW_STEPS: Final = 8
FIRST_WINDOWS: Final = 3  # their median is the speed that the training began with
SLOW: Final = 0.6  # of that speed: far below
CPU_FELL: Final = 0.85  # of the CPU share it began with: others hold the cores
RETRY_S: Final = 120.0  # until another number of threads is tried again
BETTER: Final = 1.05
# of the time that its threads could run, they wait for a core: others hold it (assumed; alone it is
# near 0)
WAITING: Final = 0.2


def waited_s(tasks: Path = Path("/proc/self/task")) -> float:
    """Seconds that the threads of this process were ready to run and had no core, summed (Linux,
    /proc/PID/task/TID/schedstat); 0 where the system does not say."""
    total = 0
    for path in tasks.glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread that ended meanwhile
            total += int(path.read_text(encoding="ascii").split()[1])
    return total / 1e9


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A training that fell behind: when (seconds of this call), tokens/s at first and then, CPU
    seconds per second at first and then, and how many threads were tried instead.

    `waiting`: where it was behind from its start, the share of the time its threads could run in
    which they had no core; else 0.
    """

    after_s: float
    tokens_per_s: float
    now_tokens_per_s: float
    cpu_share: float
    now_cpu_share: float
    threads: int
    waiting: float = 0.0

    @property
    def words(self) -> str:
        tried = f"; trying {self.threads} of its threads" if self.threads else ""
        if self.waiting:
            return (
                "the machine has been busy since this training began: its threads wait for a core"
                f" {self.waiting:.0%} of the time that they could run, {self.now_tokens_per_s:.0f}"
                f" tokens/s{tried}"
            )
        others = self.now_cpu_share < CPU_FELL * self.cpu_share
        why = (
            f"other processes hold the cores: {self.now_cpu_share:.1f} CPU seconds a second,"
            f" {self.cpu_share:.1f} at first"
            if others
            else "the process has its cores, so these are slower, or threads wait for one another"
        )
        return (
            f"training fell to {self.now_tokens_per_s:.0f} tokens/s from {self.tokens_per_s:.0f}:"
            f" {why}{tried}"
        )


class _Window(NamedTuple):
    tokens_per_s: float
    cpu_share: float
    waiting: float


class Pace:
    """Call it after every training step; it changes the number of threads where that helps. `close`
    gives them back.

    `threads`: of the process; `set_threads`: how to change them; `say`: gets one line, once. The
    clocks are arguments for tests.
    """

    def __init__(
        self,
        threads: int,
        set_threads: Callable[[int], object],
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
        wait_clock: Callable[[], float] = waited_s,
    ) -> None:
        self.threads, self.current = threads, threads
        self._set, self._say, self._clock, self._cpu = set_threads, say, clock, cpu_clock
        self._waited = wait_clock
        self.slowdowns: list[Slowdown] = []
        self._start = self._begin = clock()
        self._cpu_begin, self._wait_begin = cpu_clock(), wait_clock()
        self._steps = self._tokens = 0
        self._first: list[_Window] = []
        # Tokens/s with the other number of threads, while one is on trial.
        self._before: float | None = None
        self._wait_s, self._next_trial = RETRY_S, 0.0

    def step(self, tokens: int) -> None:
        """One training step of `tokens` tokens is done."""
        self._steps += 1
        self._tokens += tokens
        wall = self._clock() - self._begin
        if wall < WINDOW_S or self._steps < WINDOW_STEPS:
            return
        ran, waited = self._cpu() - self._cpu_begin, max(0.0, self._waited() - self._wait_begin)
        window = _Window(
            self._tokens / wall, ran / wall, waited / (ran + waited) if ran + waited > 0 else 0.0
        )
        self._judge(window)
        self.restart()

    def restart(self) -> None:
        """Begin a new window: what happened since the last step was no training."""
        self._begin, self._cpu_begin, self._wait_begin = self._clock(), self._cpu(), self._waited()
        self._steps = self._tokens = 0

    def close(self) -> None:
        self._use(self.threads)

    def _use(self, threads: int) -> None:
        if threads != self.current:
            self.current = threads
            self._set(threads)

    def _judge(self, window: _Window) -> None:
        now = self._clock() - self._start
        if len(self._first) < FIRST_WINDOWS:
            self._first.append(window)
            if len(self._first) == FIRST_WINDOWS and self._at_first().waiting > WAITING:
                self._slow(window, now, self._at_first().waiting)
            return
        if self._before is not None:
            self._end_trial(window, now)
        elif self.current < self.threads:
            if now >= self._next_trial:  # alone again?
                self._try(self.threads, window)
        elif window.tokens_per_s < SLOW * self._at_first().tokens_per_s and now >= self._next_trial:
            self._slow(window, now)

    def _at_first(self) -> _Window:
        return _Window(*map(statistics.median, zip(*self._first, strict=True)))

    def _slow(self, window: _Window, now: float, waiting: float = 0.0) -> None:
        first, fewer = self._at_first(), self.threads // 2
        seen = Slowdown(
            now,
            first.tokens_per_s,
            window.tokens_per_s,
            first.cpu_share,
            window.cpu_share,
            fewer,
            waiting,
        )
        if not self.slowdowns:
            self._say(seen.words)
        self.slowdowns.append(seen)
        self._next_trial = now + self._wait_s
        if fewer:
            self._try(fewer, window)

    def _try(self, threads: int, window: _Window) -> None:
        self._before = window.tokens_per_s
        self._use(threads)

    def _end_trial(self, window: _Window, now: float) -> None:
        """Keep the number of threads on trial where it is faster; else go back, and wait longer
        until the next trial."""
        assert self._before is not None
        won = window.tokens_per_s > BETTER * self._before
        self._before = None
        if won:
            self._wait_s = RETRY_S
        else:
            self._use(self.threads if self.current < self.threads else self.threads // 2)
            self._wait_s *= 2.0
        self._next_trial = now + self._wait_s
