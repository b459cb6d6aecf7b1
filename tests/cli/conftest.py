"""Tiny worlds as working directories: bare, with a ranked run, with a confirmed one; made once,
copied for each test."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from archsearch.engines import registry
from tests.cli.commands import CONFIRM, SEARCH, call, last_json, single_threaded
from tests.doubles.made_up_engine import MadeUpEngine
from tests.doubles.world import give_weights, make_world


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(built: Path, tmp_path: Path) -> Path:
    """A copy of the tiny world as the working directory."""
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture(scope="session")
def confirmed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world with a run that was searched, trained and confirmed; read by several tests, copied by
    those that write."""
    folder = tmp_path_factory.mktemp("confirmed")
    shutil.copytree(built, folder, dirs_exist_ok=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        with single_threaded():
            result = call(*CONFIRM, "--run", "runs/a", "--json")
    finally:
        os.chdir(before)
    (folder / "result.json").write_text(json.dumps(last_json(result)))
    return folder


@pytest.fixture
def with_run(confirmed: Path, tmp_path: Path) -> Path:
    """A copy of the confirmed world as the working directory."""
    shutil.copytree(confirmed, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture(scope="session")
def ranked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world with a run that was searched; rank 2 has weights and a trace."""
    folder, before = tmp_path_factory.mktemp("ranked"), Path.cwd()
    shutil.copytree(built, folder, dirs_exist_ok=True)
    os.chdir(folder)
    try:
        call(*SEARCH, "--prompts", "prompts.jsonl", "--alpha", "0.8", "--run", "runs/a")
        give_weights(Path("runs/a"), 2)
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def with_ranks(ranked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it as the working directory, on a machine without engines."""
    shutil.copytree(ranked, tmp_path, dirs_exist_ok=True)
    for name in ("ARCHSEARCH_VLLM_PYTHON", "ARCHSEARCH_OPENVINO_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine with made-up times in the place of all others."""
    monkeypatch.setattr(
        registry, "make_engine", lambda name, settings, tokenizer=None: MadeUpEngine(name=name)
    )


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every rename onto its final place fails with "no space left"; what was tried."""
    tried: list[str] = []

    def replace(source, destination, **kwargs):
        tried.append(str(destination))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(destination))

    monkeypatch.setattr(os, "replace", replace)
    yield tried
