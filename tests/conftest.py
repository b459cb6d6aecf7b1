"""Every test works in its own folder and its own cache; nothing is read from or written to the
user's."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from archsearch import profiles
from archsearch.hardware import identify
from archsearch.latency.regression import Residual
from archsearch.paths import data_dir

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # one of several: each with a core of its own
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    threadpool_limits(1)  # numpy is loaded already: two threads on one core wait for each other
    if hasattr(
        os, "sched_setaffinity"
    ):  # commands set torch's threads: they would wait for others'
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def pytest_collectstart() -> None:
    """No garbage is looked for while half a million objects are imported: a third of that time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What was imported stays: it is not looked through with every test again."""
    gc.freeze()
    gc.enable()


ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shipped_profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profiles that git knows: a checkout also holds those that `make demo` and users
    measured."""
    listed = subprocess.run(
        ["git", "ls-files", "profiles/*/profile.json"], cwd=ROOT, capture_output=True, text=True
    )
    headers = [ROOT / line for line in listed.stdout.splitlines()]
    if not headers:  # no checkout: what was shipped is all there is
        return data_dir("profiles")
    root = tmp_path_factory.mktemp("shipped") / "profiles"
    for header in headers:
        link = root / header.parent.relative_to(ROOT / "profiles")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(header.parent, target_is_directory=True)
    return root


@pytest.fixture(scope="session", autouse=True)
def shipped_alone(shipped_profiles: Path) -> Iterator[None]:
    """From before the first fixture of a session: what those make is searched with them too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiles, "data_dir", lambda _name: shipped_profiles)
        yield


@pytest.fixture(scope="session", autouse=True)
def small_cache() -> Iterator[None]:
    """This machine's last-level cache is one of 32 MiB at most: `profile` takes four times as much
    memory twice, and virtual machines say that they have 480 MiB."""
    known = identify._last_level_cache_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            identify,
            "_last_level_cache_bytes",
            lambda root: min(known(root), 32 << 20) if root == Path("/") else known(root),
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def fitted_once() -> Iterator[None]:
    """A worker fits the same numbers once, and not with every command over the same profile."""
    known: dict[tuple[object, ...], Residual] = {}
    fit = Residual.fit

    def remembered(inputs: np.ndarray, log_ratio: np.ndarray, **bounds: object) -> Residual:
        key = (inputs.shape, inputs.tobytes(), log_ratio.tobytes(), *sorted(bounds.items()))
        if key not in known:
            known[key] = fit(inputs, log_ratio, **bounds)  # type: ignore[arg-type]
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Residual, "fit", staticmethod(remembered))
        yield


@pytest.fixture(autouse=True)
def own_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    slow = request.node.get_closest_marker("slow")
    if slow is None or slow.kwargs.get("own"):  # others keep the real target's conversion
        monkeypatch.setenv("ARCHSEARCH_CACHE", str(tmp_path / "cache"))
