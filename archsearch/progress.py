"""Progress on long work: one line on stderr that rewrites itself in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self


def human_time(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 5 min`."""
    seconds = max(0.0, seconds)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


class ProgressLine:
    """Call it with (what, done, planned): planned and done in seconds, or in any unit of work, which then gives the estimate.

    Quiet when `quiet`; writes to stderr only, so that stdout stays for results.
    """

    def __init__(self, title: str, *, quiet: bool = False, every_s: float = 10.0) -> None:
        self.title, self.quiet, self.every_s = title, quiet, every_s
        self._start = time.monotonic()
        self._last = -1e9
        self._terminal = sys.stderr.isatty()

    def __call__(self, what: str, done: float, planned: float) -> None:
        now = time.monotonic()
        if self.quiet or now - self._last < (0.2 if self._terminal else self.every_s):
            return
        self._last = now
        elapsed = now - self._start
        share = min(max(done / planned, 0.0), 1.0) if planned > 0 else 0.0
        left = f", about {human_time(elapsed * (1 - share) / share)} left" if share > 0.02 else ""
        filled = round(20 * share)
        text = f"{self.title} [{'#' * filled}{'.' * (20 - filled)}] {100 * share:3.0f}% {human_time(elapsed)}{left}  {what}"
        sys.stderr.write(f"\r\x1b[2K{text[:150]}" if self._terminal else f"{text}\n")
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.quiet and self._last > -1e8:
            if self._terminal:
                sys.stderr.write("\r\x1b[2K")
            if kind is None:
                sys.stderr.write(f"{self.title}: done in {human_time(time.monotonic() - self._start)}\n")
            sys.stderr.flush()
