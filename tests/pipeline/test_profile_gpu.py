"""`archsearch profile` on a GPU, end to end on a stand-in: the real plan, selection, rows, model
and check; a CPU where a GPU would be."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from archsearch.errors import ArchsearchError, RunFailed
from archsearch.hardware.device import load_device
from archsearch.models.targets import TargetRef
from archsearch.pipeline import ProfileRequest, choose_latency, profile_device
from archsearch.pipeline import profile as pipeline_profile
from archsearch.pipeline.profile import gpu
from archsearch.profiles import Profile, RoundShape
from archsearch.profiling import collectives, cuda
from archsearch.profiling import gpu_sweep as selection
from archsearch.profiling.cuda import CudaBench
from archsearch.report.terminal.profile import NoModel, profile_text
from archsearch.search.space import SearchSpace
from archsearch.workload import Workload, WorkloadRequest
from tests.doubles.lawful_engine import Clock, LawfulEngine
from tests.doubles.world import SPACE as TINY_SPACE
from tests.doubles.world import TINY


class Bytes(TorchDispatchMode):
    """Adds up the bytes that every op of its block reads and writes."""

    def __enter__(self) -> Bytes:
        self.ops, self.bytes = 0, 0
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ops += 1
        for tensor in tree_leaves((args, result)):
            if isinstance(tensor, torch.Tensor):
                self.bytes += tensor.numel() * tensor.element_size()
        return result


class CpuRunner:
    """Runs a captured call once on the CPU, however often it is timed; its bytes at 10 GB/s and 2
    us an op are its time, the same on a busy machine."""

    device = torch.device("cpu")

    def __init__(self, too_large: int = 10**9) -> None:
        self.too_large = too_large
        self.known: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

    def capture(self, calls: Sequence[Any]) -> Any:
        if len(calls) >= self.too_large:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 EiB.")

        def replay() -> None:
            calls[0]()

        replay.calls = len(calls)  # type: ignore[attr-defined]
        return replay

    def seconds(self, run: Any, count: int, before: Any) -> float:
        if run not in self.known:
            with Bytes() as counted:
                run()
            each = 2e-6 * counted.ops + 1e-10 * counted.bytes
            self.known[run] = getattr(run, "calls", 1) * each
        return count * self.known[run]

    def release(self) -> None:
        pass


SPACE = SearchSpace.from_dict(yaml.safe_load(TINY_SPACE), "tiny")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An H200 that is here, as far as everything above the runner can tell."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline_profile, "check_claim", lambda name, threads: load_device("h200"))
    monkeypatch.setattr(cuda, "cuda_problem", lambda: None)

    def opened(
        device: Any, profile: Profile, *, mode: str, dtype: str, allow_busy: bool
    ) -> CudaBench:
        return CudaBench(
            profile, device, mode=mode, runner=CpuRunner(), last_level_cache_bytes=1 << 20
        )

    monkeypatch.setattr(cuda, "open_bench", opened)
    real = selection.needs
    few = {"batches": (1,), "contexts": (16, 64), "verify_tokens": (3,), "steps": 12, "models": 14}

    def fewer(drafts: Any, target: Any, dtype: str, mode: str, asked: Any, room: Any) -> Any:
        return real(drafts, target, dtype, mode, replace(asked, **few), room)

    monkeypatch.setattr(selection, "needs", fewer)
    return tmp_path


def request(**changes: Any) -> ProfileRequest:
    values = {"dtypes": ("bfloat16",), "budget_s": 90.0, "check": 2, "engine": False, **changes}
    return ProfileRequest("h200", TINY, SPACE, **values)


@pytest.mark.slow
def test_both_modes_are_measured_checked_and_searched_from(stand_in: Path) -> None:
    result = profile_device(request())
    assert set(result.measured.sweeps) == {"bfloat16 graph", "bfloat16 eager"}
    assert result.rows == result.new_rows > 60 and not result.measured.skipped
    profile = Profile.load(Path(result.folder))
    assert {row.mode for row in profile.rows.values()} == {"graph", "eager"}
    assert not profile.imported and set(profile.provenance) == {"graph", "eager"}
    for mode in ("graph", "eager"):
        kinds = {row.kind for row in profile.rows.values() if row.mode == mode}
        assert {"gemm", "attention", "elementwise", "forward"} <= kinds
        check = json.loads((Path(result.folder) / f"check-bfloat16-{mode}.json").read_text())
        assert check["draft step"]["cases"] >= 2 and check["mode"] == mode
    source, _ = choose_latency(WorkloadRequest("h200"), TINY)  # vLLM's kernels, at this pace
    assert source.mode == "graph" and "GEMMs took" in source.words
    assert source.latency.profile.rows == profile.rows and source.latency.tables.imported
    step = source.latency.decode_s(TINY, Workload(1, 32, mode="graph"))
    measured = next(row for row in profile.select("forward", "bfloat16", "graph"))
    assert 0 < step.value < 50 * measured.median_s
    source, _ = choose_latency(WorkloadRequest("h200", engine="transformers"), TINY)
    assert source.latency.tables is source.latency.profile
    assert source.mode == "eager" and "known error of a draft step" in source.words


@pytest.mark.slow(own=True)
def test_the_same_command_continues_and_imported_tables_stay(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()  # a budget that a loaded machine does not use up
    sweep = partial(selection.adaptive_sweep, clock=lambda: 0.01 * next(ticks))
    monkeypatch.setattr(selection, "adaptive_sweep", sweep)
    first = profile_device(request(modes=("graph",), budget_s=1.0, check=0))
    second = profile_device(request(modes=("graph",), budget_s=1.0, check=0))
    assert 0 < first.rows < second.rows and second.new_rows == second.rows - first.rows
    with pytest.raises(
        ArchsearchError, match="not measured in float32 in graph mode; use one of bfloat16"
    ):
        profile_device(request(dtypes=("float32",)))
    folder = stand_in / "theirs"
    folder.mkdir()
    Profile(
        load_device("h200").to_dict(), {}, provenance={"package": "tables"}, folder=folder
    ).save_header()
    with pytest.raises(ArchsearchError, match="holds imported tables; pass another --output"):
        profile_device(request(output=folder))


@pytest.mark.slow(own=True)
def test_rounds_of_an_engine_are_measured_in_it(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`profile --engine vllm`: rounds under both runners go into the profile; the same command does
    not measure them again."""
    clock, folders, seen = Clock(), {}, []

    def seconds(draft: Any, gamma: int) -> float:
        return 5e-3 if draft is None else 6e-3 + gamma * (4e-4 + 2e-4 * draft.num_hidden_layers)

    def make(name: str, settings: Any) -> LawfulEngine:
        seen.append((name, dict(settings.environment), settings.dummy_weights, settings.mode))
        return LawfulEngine(seconds, clock, folders)

    def write(arch: Any, folder: Path) -> Path:
        folders[folder] = arch
        return folder

    monkeypatch.setattr(gpu, "make_engine", make)
    monkeypatch.setattr(gpu, "write_shape", write)
    monkeypatch.setattr(pipeline_profile, "check_engine_request", lambda request: None)
    target = TargetRef("tiny", TINY)
    asked = {
        "modes": ("graph",),
        "budget_s": 1.0,
        "check": 0,
        "engine": True,
        "engine_name": "vllm",
        "target_ref": target,
    }
    result = profile_device(request(**asked))
    told = result.measured.rounds["bfloat16 graph"]
    assert told.new_rows + len(told.left) == 14 and not told.failed
    assert {environment.get("VLLM_USE_V2_MODEL_RUNNER") for _, environment, *_ in seen} == {
        None,
        "0",
        "1",
    }
    assert all(dummy and mode == "graph" for *_, dummy, mode in seen)
    rows = Profile.load(Path(result.folder)).select("round", "bfloat16", "graph")
    assert len(rows) == told.new_rows and {
        dict(RoundShape.of(row).options)["async_scheduling"] for row in rows
    } == {"0"}
    assert f"{len(rows)} rounds measured in the engine" in profile_text(result, "T", 1.0)
    again = profile_device(request(**asked)).measured.rounds["bfloat16 graph"]
    assert again.new_rows == 14 - len(rows)


@pytest.mark.slow(own=True)
def test_a_failed_all_reduce_costs_nothing_else_and_known_kernels_stay(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where NCCL fails everything else is kept; a continued run that measures nothing new forgets
    no kernel."""

    def fail(ops: Any, dtype: str, mode: str) -> Any:
        raise RunFailed("measuring all-reduce over 2 devices failed: no NCCL")

    monkeypatch.setattr(collectives, "measure_all_reduces", fail)
    first = profile_device(request(modes=("graph",), budget_s=1.0, check=0))
    assert any("no NCCL" in words for words in first.measured.skipped) and first.rows > 0
    again = profile_device(request(modes=("graph",), budget_s=0.0, check=0))
    assert (
        again.measured.provenance["graph"]["fused_kernels"]
        == first.measured.provenance["graph"]["fused_kernels"]
        == {"bfloat16": "torch"}
    )


def test_points_that_do_not_fit_are_listed(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(device: Any, profile: Profile, **_: Any) -> CudaBench:
        return CudaBench(
            profile,
            device,
            mode="graph",
            runner=CpuRunner(too_large=2),
            last_level_cache_bytes=1 << 20,
        )

    monkeypatch.setattr(cuda, "open_bench", opened)
    result = profile_device(request(modes=("graph",), budget_s=1.0, check=0))
    assert result.measured.skipped and result.rows == 0
    assert isinstance(result.models["bfloat16 graph"], NoModel)
    text = profile_text(replace(result, folder="p/my gpu"), "T", 400.0)
    assert "Too little was measured to price anything" in text
    after = f"profile --gpu {result.device} --target T --budget 14m --output 'p/my gpu'"
    assert text.endswith(f"\n\nNext: archsearch {after}"), "a search would find nothing there"
