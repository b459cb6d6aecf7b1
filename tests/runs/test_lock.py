"""Two processes on one run folder are told about each other; a killed one leaves nothing to
clear."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from archsearch.errors import ArchsearchError
from archsearch.runs.lock import LOCK_FILE, run_lock

HOLD = (
    "import sys, time\nfrom pathlib import Path\nfrom archsearch.runs.lock import run_lock\n"
    + "with run_lock(Path(sys.argv[1]), 'archsearch search'):\n    print('held', flush=True)\n   "
    " time.sleep(60)\n"
)


def test_a_second_process_is_told_and_a_killed_one_is_taken_over(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    with pytest.raises(
        ArchsearchError,
        match=rf"in use by archsearch search \(process {other.pid} on .*choose another --run",
    ):
        with run_lock(tmp_path):
            pass
    os.kill(other.pid, signal.SIGKILL)
    other.communicate()
    with run_lock(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert (tmp_path / LOCK_FILE).read_text() == ""


def test_another_machine_that_is_alive_counts_and_a_silent_one_does_not(tmp_path: Path) -> None:
    lock = tmp_path / LOCK_FILE
    lock.write_text(
        json.dumps(
            {"pid": 7, "host": "elsewhere", "command": "archsearch search", "since": "today"}
        )
    )
    with pytest.raises(ArchsearchError, match="process 7 on elsewhere"):
        with run_lock(tmp_path):
            pass
    assert "elsewhere" in lock.read_text(), "who is refused changes nothing"
    os.utime(lock, (time.time() - 300, time.time() - 300))
    with run_lock(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_is_left_to_its_writer(tmp_path: Path) -> None:
    with run_lock(tmp_path / "missing"):
        pass
