"""Progress on long work: one line on stderr that rewrites itself in a terminal, a line every few
seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Self

Progress = Callable[[str, float, float], None]
"""How long work reports: `progress(what, done, total)`. `what` is read by a person; `done` and
`total` share one unit (seconds of a budget, prompts, tokens), whichever shows best how much is
left."""


def silent(what: str, done: float, total: float) -> None:
    """The Progress of a caller that wants none."""


def human_time(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 5 min`."""
    seconds = max(0.0, seconds)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def say(text: str) -> None:
    """A line on stderr: stdout is for the result."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class ProgressLine:
    """A Progress that writes one line with a bar, the time spent and the time left.

    Quiet when `quiet`; writes to stderr only, so that stdout stays for results.
    """

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self.title, self.quiet = title, quiet
        self._start = time.monotonic()
        self._last = -1e9
        self._terminal = sys.stderr.isatty()

    def __call__(self, what: str, done: float, total: float) -> None:
        now = time.monotonic()
        if self.quiet or now - self._last < (0.2 if self._terminal else 10.0):
            return
        self._last = now
        elapsed = now - self._start
        share = min(max(done / total, 0.0), 1.0) if total > 0 else 0.0
        left = f", about {human_time(elapsed * (1 - share) / share)} left" if share > 0.02 else ""
        filled = round(20 * share)
        text = (
            f"{self.title} [{'#' * filled}{'.' * (20 - filled)}] {100 * share:3.0f}%"
            f" {human_time(elapsed)}{left}  {what}"
        )
        sys.stderr.write(f"\r\x1b[2K{text[:150]}" if self._terminal else f"{text}\n")
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if not self.quiet and self._last > -1e8:
            if self._terminal:
                sys.stderr.write("\r\x1b[2K")
            if kind is None:
                sys.stderr.write(
                    f"{self.title}: done in {human_time(time.monotonic() - self._start)}\n"
                )
            sys.stderr.flush()
