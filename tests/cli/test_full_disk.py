"""A full disk and a folder that cannot be written: one line, exit status 2, nothing that was
finished is lost, and it goes on.

The disk of the quick tests is made up (`tests.doubles.disk`); the slow ones fill a real one, where
a small file system may be mounted.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults import files_of, half_written, is_temporary, records
from tests.cli.commands import CONFIRM, SEARCH, call, invoke
from tests.doubles.disk import Disk

PROFILE = (
    *"profile --gpu cpu --space tiny.yaml --dtype float32 --budget 1s --no-engine --output p".split(),
)
RANK = (*SEARCH, "--sampler", "random", "--alpha", "0.8", "--run", "runs/a")
TRAIN = (*CONFIRM, "--run", "runs/a")
SHARES = (0.0, 0.5, 0.97)  # of all that a command writes


def whole(folder: Path) -> bool:
    """Whether every file of the folder can be read as what its name says, and no temporary one is
    left."""
    found = [path for path in files_of(folder) if path.name != ".lock"]
    return not any(is_temporary(path) or half_written(path) for path in found)


def out_of_space(*command: str) -> None:
    """Run a command that must end in one line about a full disk, whatever it said before."""
    result = invoke(*command)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    last = result.stderr.strip().splitlines()[-1]
    assert (
        last.startswith("Error: ") and "No space left" in last and "Traceback" not in result.output
    ), last


def fill(
    built: Path,
    folder: Path,
    command: tuple[str, ...],
    limit: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A command on a disk that takes `limit` bytes, then the same one where there is room."""
    shutil.copytree(built, folder)
    monkeypatch.chdir(folder)
    with monkeypatch.context() as patch:
        Disk(folder, limit).install(patch)
        out_of_space(*command)
    kept = records(folder)
    assert whole(folder)
    call(*command)
    assert kept <= records(folder) and whole(folder)


def test_a_disk_that_fills_while_shapes_are_scored(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(built, tmp_path / "whole")
    monkeypatch.chdir(tmp_path / "whole")
    with monkeypatch.context() as patch:
        disk = Disk(tmp_path / "whole").install(patch)
        call(*RANK)
    for share in SHARES[1:]:
        fill(built, tmp_path / str(share), RANK, share * disk.written, monkeypatch)


@pytest.mark.slow
def test_a_disk_that_fills_while_a_device_is_measured(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(built, tmp_path / "whole")
    monkeypatch.chdir(tmp_path / "whole")
    call(*PROFILE)
    header = (tmp_path / "whole" / "p" / "profile.json").stat().st_size
    for limit in (0, header // 2, header + 300):  # nothing, half of the header, about one row
        fill(built, tmp_path / str(limit), PROFILE, limit, monkeypatch)


def test_an_export_that_does_not_fit(with_ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("export", "runs/a", "--rank", "2", "--output", "out")
    with monkeypatch.context() as patch:
        disk = Disk(with_ranks).install(patch)
        call(*command)
    for share in (0.2, 0.9):
        shutil.rmtree(with_ranks / "out")
        with monkeypatch.context() as patch:
            Disk(with_ranks, share * disk.written).install(patch)
            out_of_space(*command)
        assert whole(with_ranks)
        call(*command)


# -- a real file system
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own; skipped where none may be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a file system may not be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


def used(folder: Path) -> int:
    return shutil.disk_usage(folder).used


@pytest.mark.campaign
def test_a_real_disk_that_fills_while_drafts_are_trained(
    built: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text, trials, checkpoints, weights, score.json, the confirmation, the report: all in the run
    folder."""
    shutil.copytree(built, tmp_path / "world")
    monkeypatch.chdir(tmp_path / "world")
    (tmp_path / "world" / "runs").symlink_to(small)
    before = used(small)
    call(*TRAIN)
    written = used(small) - before
    for share in (0.1, 0.5, 0.9):
        shutil.rmtree(small / "a")
        remount(small, f"size={before + int(share * written)}")
        out_of_space(*TRAIN)
        kept = records(tmp_path / "world")
        assert whole(tmp_path / "world")
        remount(small, "size=64m")
        call(*TRAIN)
        assert kept <= records(tmp_path / "world") and whole(tmp_path / "world")
    remount(small, f"size={used(small) + 8192}")
    out_of_space("export", "runs/a", "--output", "runs/out")
    remount(small, "size=64m")
    call("export", "runs/a", "--output", "runs/out")


@pytest.mark.slow
def test_a_real_folder_that_may_only_be_read(
    with_run: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(with_run)
    shutil.copytree(with_run / "runs", small, dirs_exist_ok=True)
    kept = {path: path.read_bytes() for path in small.rglob("*") if path.is_file()}
    remount(small, "ro")
    for command in (
        (*SEARCH, "--run", str(small / "new")),
        ("train", str(small / "a"), "--budget", "1s"),
        ("confirm", str(small / "a")),
        ("report", str(small / "a")),
        ("export", str(small / "a"), "--output", str(small / "out")),
        ("profile", "--gpu", "cpu", "--budget", "1s", "--output", str(small / "p")),
    ):
        result = invoke(*command)
        last = result.stderr.strip().splitlines()[-1]
        assert (
            result.exit_code == 2 and last.startswith("Error: ") and "Read-only file system" in last
        ), (command, result.output)
    assert kept == {path: path.read_bytes() for path in small.rglob("*") if path.is_file()}
    call("export", str(small / "a"), "--output", "out")  # what is only read can still be used
