"""--help and `list`: what there is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from archsearch.hardware.identify import identify_cpu
from tests.cli.commands import SEARCH, call, last_json


def test_help_is_instant_and_exits_with_0() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "archsearch.cli", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "search" in done.stdout and not done.stderr
    # What makes it instant (0.2 s on a quiet machine): nothing heavy is imported. Seconds
    # themselves are the machine's.
    imported = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "archsearch.cli", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert not any(
        name in imported
        for name in ("torch", "transformers", "optuna", "sklearn", "pandas", "matplotlib", "numpy")
    )


@pytest.mark.parametrize(
    "command",
    [
        "profile",
        "engine",
        "search",
        "estimate",
        "confirm",
        "schedule",
        "train",
        "export",
        "report",
        "list",
        "demo",
    ],
)
def test_every_command_has_help(command: str) -> None:
    assert "Usage" in call(command, "--help").stdout


@pytest.mark.parametrize("what", ["targets", "devices", "profiles", "spaces", "runs"])
def test_list(world: Path, what: str) -> None:
    if what == "runs":
        call(*SEARCH, "--run", "runs/a")
    expected = {
        "targets": "llama-65b",
        "devices": "a100-sxm4-80gb",
        "profiles": identify_cpu().key,
        "spaces": "demo",
        "runs": "runs/a",
    }[what]
    assert expected in call("list", what).stdout
    rows = last_json(call("list", what, "--json"))[what]
    assert any(expected in row.values() for row in rows)


def test_nothing_there_yet_and_broken_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("list", "runs").stdout == "no runs yet\n"
    (tmp_path / "search_spaces").mkdir()
    (tmp_path / "search_spaces" / "mine.yaml").write_text("dimensions: [")
    (tmp_path / "profiles" / "cpu-x" / "stack").mkdir(parents=True)
    (tmp_path / "profiles" / "cpu-x" / "stack" / "profile.json").write_text(
        '{"schema_version": 99}'
    )
    assert "demo" in call("list", "spaces").stdout  # one broken file does not hide the others
    assert "broken" in call("list", "spaces").stdout
    assert "schema version 99" in call("list", "profiles").stdout
