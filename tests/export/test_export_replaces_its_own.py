"""An export replaces an earlier export and nothing else; a killed one loses nothing and leaves
nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from archsearch import files
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.export.folder import MARKER, building, check_output

FIXTURE = Path(__file__).parents[1] / "fixtures" / "run-0.1.0" / "export"
SHAPE = Architecture(32, 64, 1, 2, 1, 16, 320)


def made(output: Path, text: str = "new") -> None:
    with building(output) as folder:
        (folder / "README.md").write_text(text)
        files.write_json(folder / MARKER, {"archsearch": "0.3.0", "commands": {}})


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_a_folder_of_somebody_else_is_never_touched(tmp_path: Path) -> None:
    paper = tmp_path / "paper"
    (paper / ".git").mkdir(parents=True)
    (paper / MARKER).write_text('{"plugin": "some other tool"}')
    (paper / "thesis.tex").write_text("years of work")
    with pytest.raises(ArchsearchError, match="is not empty and not an earlier export"):
        check_output(tmp_path / "draft", paper)
    assert (paper / "thesis.tex").read_text() == "years of work"


def test_a_note_in_an_export_stops_the_next_one(tmp_path: Path) -> None:
    made(tmp_path / "out")
    assert json.loads((tmp_path / "out" / MARKER).read_text())["files"] == ["README.md", MARKER]
    check_output(tmp_path / "draft", tmp_path / "out")
    (tmp_path / "out" / "note.txt").write_text("mine")
    with pytest.raises(ArchsearchError, match=r"files that archsearch did not write \(note.txt\)"):
        check_output(tmp_path / "draft", tmp_path / "out")


def test_exports_of_earlier_versions_are_known_by_their_files() -> None:
    check_output(Path("draft"), FIXTURE)


def _killed_between_the_two_renames(output: Path) -> None:
    """As `take_place` does, up to where the old export is away and the new one not in its place."""
    scratch = files.scratch_dir(output)
    folder = scratch.__enter__()
    (folder / "new").mkdir()
    os.replace(output, folder / "old")
    os._exit(9)


def test_a_killed_export_gives_the_old_one_back_and_leaves_nothing(tmp_path: Path) -> None:
    made(tmp_path / "out", "old")
    process = multiprocessing.get_context("fork").Process(
        target=_killed_between_the_two_renames, args=(tmp_path / "out",)
    )
    process.start()
    process.join()
    assert not (tmp_path / "out").exists() and len(hidden(tmp_path)) == 1
    with pytest.raises(RuntimeError), building(tmp_path / "out"):
        assert (tmp_path / "out" / "README.md").read_text() == "old"
        raise RuntimeError("the next export fails as well")
    assert (tmp_path / "out" / "README.md").read_text() == "old" and hidden(tmp_path) == []
    made(tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text() == "new" and hidden(tmp_path) == []


def test_files_and_folders_keep_to_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        made(tmp_path / "out")
        files.write_json(tmp_path / "run.json", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "run.json").stat().st_mode) == 0o640
