"""Tiny worlds as working directories: bare, with a ranked run, with a confirmed one; and a run for a
GPU over all families. Made once for all workers, copied for each test."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from archsearch.engines import registry
from tests.cli.commands import CONFIRM, GPU_SEARCH, SEARCH, call, last_json, single_threaded
from tests.doubles.made_up_engine import MadeUpEngine
from tests.doubles.once import made_once
from tests.doubles.world import give_weights, make_world


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "world", make_world)


@pytest.fixture
def world(built: Path, tmp_path: Path) -> Path:
    """A copy of the tiny world as the working directory."""
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture(scope="session")
def confirmed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world with a run that was searched, trained and confirmed; read by several tests, copied by
    those that write."""

    def make(folder: Path) -> None:
        shutil.copytree(built, folder, dirs_exist_ok=True)
        result = call(*CONFIRM, "--run", "runs/a", "--json")
        (folder / "result.json").write_text(json.dumps(last_json(result)))

    return made_once(tmp_path_factory, "confirmed", make)


@pytest.fixture
def with_run(confirmed: Path, tmp_path: Path) -> Path:
    """A copy of the confirmed world as the working directory."""
    shutil.copytree(confirmed, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture(scope="session")
def ranked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world with a run that was searched; rank 2 has weights and a trace."""

    def make(folder: Path) -> None:
        shutil.copytree(built, folder, dirs_exist_ok=True)
        call(*SEARCH, "--prompts", "prompts.jsonl", "--alpha", "0.8", "--run", "runs/a")
        give_weights(Path("runs/a"), 2)

    return made_once(tmp_path_factory, "ranked", make)


@pytest.fixture(scope="session")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `runs/gpu`, a search for an H100 over all families, and its answer,
    `result.json`."""

    def make(folder: Path) -> None:
        answer = last_json(call(*GPU_SEARCH, "--run", "runs/gpu", "--json"))
        (folder / "result.json").write_text(json.dumps(answer))

    return made_once(tmp_path_factory, "searched", make)


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
