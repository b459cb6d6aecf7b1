"""How idle threads wait is the user's choice, and profiles know under which they were made."""

from __future__ import annotations

from pathlib import Path

import pytest

from archsearch import profiles, threads


def test_the_policy_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in threads.POLICY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert threads.waiting_policy() == "default"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert threads.waiting_policy() == "GOMP_SPINCOUNT=7"


def test_a_cpu_profile_is_found_by_its_policy_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in threads.POLICY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    old = profiles.cpu_stack()
    assert old["waiting"] == "default" and profiles.stack_key(old) == profiles.stack_key(
        profiles.current_stack()
    )
    folder = Path("profiles") / "cpu-x" / profiles.stack_key(profiles.current_stack())
    folder.mkdir(parents=True)
    profiles.Profile.open(folder, {"key": "cpu-x"}, profiles.current_stack())
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    new = profiles.cpu_stack()
    assert (
        profiles.find_profile("cpu-x", new).name == folder.name
    )  # an old one serves until there is a better
    own = folder.with_name(profiles.stack_key(new))
    assert own != folder
    own.mkdir()
    profiles.Profile.open(own, {"key": "cpu-x"}, new)
    assert profiles.find_profile("cpu-x", new).name == own.name
    assert profiles.find_profile("cpu-x", old).name == folder.name
