"""What is dear to make is made once for all workers of a test run."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest

from tests.cli.commands import single_threaded


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` as `make` leaves it, which is called in it with one torch thread: profiles
    are found by the number of threads. The first worker that asks makes it, the others wait."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, made = root / f"made-{name}", root / f"made-{name}.whole"
    with (root / f"made-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker in which `make` failed
            folder.mkdir()
            with chdir(folder), single_threaded():
                make(folder)
            made.touch()
    return folder
