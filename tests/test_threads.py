"""Idle threads: the policy is set before torch loads, the user's choice stands, and profiles know under which they were made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from archsearch import profiles, threads

CLEAN = {name: value for name, value in os.environ.items() if name not in (*threads.POLICY_VARIABLES, threads._OURS)}
SCRIPT = """
import os, sys
from archsearch.cli import main
try:
    main(["list", "--help"])
except SystemExit:
    pass
assert "torch" not in sys.modules
print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="libgomp is Linux's")
@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "1000 None"), ({"OMP_WAIT_POLICY": "active"}, "None active"), ({"GOMP_SPINCOUNT": "7"}, "7 None")],
)
def test_the_command_line_sets_it_before_torch_loads_unless_the_user_did(given: dict[str, str], found: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], env={**CLEAN, **given}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == found


def test_engines_run_without_what_was_chosen_for_ourselves() -> None:
    assert threads.engine_environment({"GOMP_SPINCOUNT": "1000", threads._OURS: "1", "A": "b"}) == {"A": "b"}
    assert threads.engine_environment({"GOMP_SPINCOUNT": "7"}) == {"GOMP_SPINCOUNT": "7"}


def test_a_cpu_profile_is_found_by_its_policy_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in threads.POLICY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    old = profiles.cpu_stack()
    assert old["waiting"] == "default" and profiles.stack_key(old) == profiles.stack_key(profiles.current_stack())
    folder = Path("profiles") / "cpu-x" / profiles.stack_key(profiles.current_stack())
    folder.mkdir(parents=True)
    profiles.Profile.open(folder, {"key": "cpu-x"}, profiles.current_stack())
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    new = profiles.cpu_stack()
    assert profiles.find_profile("cpu-x", new).name == folder.name  # an old one serves until there is a better
    own = folder.with_name(profiles.stack_key(new))
    assert own != folder
    own.mkdir()
    profiles.Profile.open(own, {"key": "cpu-x"}, new)
    assert profiles.find_profile("cpu-x", new).name == own.name
    assert profiles.find_profile("cpu-x", old).name == folder.name
