"""Every test works in its own folder and its own cache; nothing is read from or written to the user's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # one of several: each with a thread of its own
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.chdir(tmp_path)
    if "slow" not in request.keywords:  # slow tests use the real target and may keep its conversion
        monkeypatch.setenv("ARCHSEARCH_CACHE", str(tmp_path / "cache"))
