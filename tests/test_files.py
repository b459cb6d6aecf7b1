"""Files are written whole or not at all; what a killed process left is cleared; other libraries'
errors are the system's."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from archsearch.errors import ArchsearchError
from archsearch.files import atomic_path, plain_os_errors, scratch_dir, write_text

DIE = "import os, sys\nfrom pathlib import Path\nfrom archsearch.files import {what}\n" + (
    "with {what}(Path(sys.argv[1])) as place:\n"
    "    (place if place.is_file() else place / 'x').write_text('half')\n"
    "    os.kill(os.getpid(), 9)\n"
)


@pytest.mark.parametrize("what", ["atomic_path", "scratch_dir"])
def test_what_a_killed_process_left_goes_with_the_next_write(what: str, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "score[1].json"
    (tmp_path / "runs").mkdir()
    path.write_text("before")
    done = subprocess.run([sys.executable, "-c", DIE.format(what=what), str(path)])
    assert done.returncode == -signal.SIGKILL
    (left,) = [entry for entry in path.parent.iterdir() if entry != path]
    assert left.name.startswith(".") and path.read_text() == "before"
    # of another machine: nobody here can tell whether it lives
    foreign = path.parent / f".{path.name}.elsewhere-1-x.json"
    alive = path.parent / left.name.replace(f"-{left.name.split('-')[-2]}-", f"-{os.getpid()}-")
    foreign.touch()
    alive.touch()
    write_text(path, "after")
    assert set(path.parent.iterdir()) == {path, foreign, alive} and path.read_text() == "after"


def test_a_scratch_folder_goes(tmp_path: Path) -> None:
    with scratch_dir(tmp_path / "new" / "tokenizer") as folder:
        (folder / "a").touch()
        assert folder.parent == tmp_path / "new"
    assert not list((tmp_path / "new").iterdir())


def test_errors_of_other_libraries(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as error, plain_os_errors():
        raise RuntimeError("Error while serializing: IoError(Os { code: 28, kind: StorageFull })")
    assert error.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="Permission denied"), plain_os_errors():
        raise Exception("Permission denied (os error 13)")
    with pytest.raises(ValueError, match="a bug"), plain_os_errors():
        raise ValueError("a bug")
    with (
        pytest.raises(ArchsearchError, match="No space left on device; free space"),
        atomic_path(tmp_path / "a"),
        plain_os_errors(),
    ):
        raise RuntimeError("No space left on device (os error 28)")
    assert not list(tmp_path.iterdir())
