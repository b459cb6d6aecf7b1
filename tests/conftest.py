"""Every test works in its own folder and its own cache; nothing is read from or written to the
user's."""

from __future__ import annotations

import gc
import os
import pickle
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jinja2
import numpy as np
import pytest
import yaml
from threadpoolctl import threadpool_limits

from archsearch import profiles
from archsearch.hardware import identify
from archsearch.latency.fitted_passes import FittedPasses
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
    """A worker fits the same numbers once, and not with every command over the same profile; and
    learns the whole passes of a profile once."""
    known: dict[tuple[object, ...], Residual] = {}
    fit = Residual.fit

    def remembered(inputs: np.ndarray, log_ratio: np.ndarray, **bounds: object) -> Residual:
        key = (inputs.shape, inputs.tobytes(), log_ratio.tobytes(), *sorted(bounds.items()))
        if key not in known:
            known[key] = fit(inputs, log_ratio, **bounds)  # type: ignore[arg-type]
        return known[key]

    learnt: dict[tuple[object, ...], dict[str, object]] = {}
    fit_passes = FittedPasses._fit

    def remembered_passes(self: FittedPasses) -> None:
        rows, device = self.profile.rows.values(), repr(self.profile.device)
        key = (tuple(rows), device, self.dtype, self.mode)
        if key not in learnt:
            before = set(vars(self))
            fit_passes(self)
            learnt[key] = {name: each for name, each in vars(self).items() if name not in before}
        vars(self).update(learnt[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Residual, "fit", staticmethod(remembered))
        patch.setattr(FittedPasses, "_fit", remembered_passes)
        yield


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """A worker compiles the same template once: of 400 of reports and cards 9 were distinct."""
    known: dict[tuple[object, ...], object] = {}
    compile_ = jinja2.Environment.compile

    def remembered(self: jinja2.Environment, source: str, *names: object, **options: object):
        settings = (self.undefined, self.autoescape, self.trim_blocks, self.lstrip_blocks)
        key = (source, *names, *sorted(options.items()), *settings, *sorted(self.filters))
        if key not in known:
            known[key] = compile_(self, source, *names, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2.Environment, "compile", remembered)
        yield


@pytest.fixture(scope="session", autouse=True)
def parsed_once() -> Iterator[None]:
    """A worker parses the same YAML once: every command over a run reads its run.yaml."""
    known: dict[object, bytes] = {}
    load = yaml.safe_load

    def remembered(text: object) -> object:
        if text not in known:
            known[text] = pickle.dumps(load(text))
        return pickle.loads(known[text])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "safe_load", remembered)
        yield


@pytest.fixture(scope="session", autouse=True)
def few_points() -> Iterator[dict[str, object]]:
    """Reports of tests draw curves of few points, but under `whole_curves`; what users' are drawn
    by."""
    if not {"archsearch.cli", "archsearch.pipeline"} & sys.modules.keys():
        yield {}  # no test of this session searches
        return
    from archsearch.pipeline import curves

    usual = {name: getattr(curves, name) for name in ("CONTEXTS", "ALPHAS", "usual_batches")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "CONTEXTS", curves.CONTEXTS[1::3])
        patch.setattr(curves, "ALPHAS", curves.ALPHAS[::6])
        patch.setattr(curves, "usual_batches", lambda *asked: usual["usual_batches"](*asked)[::4])
        yield usual


@pytest.fixture
def whole_curves(few_points: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves as users get them."""
    for name, each in few_points.items():
        monkeypatch.setattr(f"archsearch.pipeline.curves.{name}", each)


@pytest.fixture(scope="session", autouse=True)
def probed_once() -> Iterator[None]:
    """A worker feels once how fast its core is now: commands ask with every measurement, a tenth of
    a second each."""
    if "torch" not in sys.modules:  # no test of this session has imported it, so none measures
        yield
        return
    from archsearch.profiling import timer

    known: dict[object, float] = {}
    probe = timer.Probe

    class Felt:
        def __init__(self, pool: timer.WeightPool) -> None:
            self.dtype = pool.flat.dtype
            if self.dtype not in known:
                real = probe(pool)
                known[self.dtype] = statistics.median(real() for _ in range(60))

        def __call__(self) -> float:
            return known[self.dtype]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timer, "Probe", Felt)  # for who imports it when it is needed
        yield


@pytest.fixture(autouse=True)
def own_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    slow = request.node.get_closest_marker("slow")
    if slow is None or slow.kwargs.get("own"):  # others keep the real target's conversion
        monkeypatch.setenv("ARCHSEARCH_CACHE", str(tmp_path / "cache"))
