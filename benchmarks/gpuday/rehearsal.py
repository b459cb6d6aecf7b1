"""A day on the CPU at tiny sizes: the same steps and code, a runner that times a call on the CPU
where a GPU would be.

Its numbers mean nothing. It is there so that the first day on a GPU does not end at a mistyped
name.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from archsearch.architecture.architecture import Architecture
from archsearch.hardware.device import Device, load_device
from archsearch.hardware.identify import GpuState, VisibleGpu
from archsearch.profiles import Profile
from archsearch.profiling import cuda, gpu_sweep
from archsearch.profiling.cuda import CudaBench
from archsearch.profiling.kernels import Run
from archsearch.search.space import SearchSpace
from gpuday import steps
from gpuday.day import Sizes

STAND_IN = "h200"
TINY = Architecture(64, 128, 2, 4, 2, 16, 256)
SPACE = {
    "description": "tiny drafts",
    "dimensions": {
        "num_hidden_layers": [1, 2],
        "hidden_size": [32, 64],
        "ffn_ratio": [1, 2],
        "num_key_value_heads": [1, 2],
        "kv_group_size": [1, 2],
        "head_dim": [16],
    },
    "ffn_multiple": 32,
}
FEW = {
    "batches": (1,),
    "contexts": (16, 32, 64, 96),
    "verify_tokens": (3, 5),
    "steps": 8,
    "models": 10,
}


class CpuRunner:
    """Runs a captured call once on the CPU and takes its time for every call of the capture."""

    device = torch.device("cpu")

    def capture(self, calls: Sequence[Run]) -> Run:
        def replay() -> None:
            calls[0]()

        replay.calls = len(calls)  # type: ignore[attr-defined]
        return replay

    def seconds(self, run: Run, count: int, before: Run | None) -> float:
        start = time.perf_counter()
        run()
        return count * getattr(run, "calls", 1) * max(time.perf_counter() - start, 1e-6)

    def release(self) -> None:
        pass


class CpuStandIn(CudaBench):
    """The bench on that runner, with a probe of no weight."""

    def _probe_run(self, dtype: str) -> Run:
        one = torch.ones(64)
        return lambda: one.mul(1.0001)


def tiny_sizes() -> Sizes:
    """Every step in seconds."""
    deep = TINY.replace(num_hidden_layers=4)
    return Sizes(
        {"tiny": TINY},
        ("tiny target", TINY.replace(num_hidden_layers=3, num_key_value_heads=4), 2),
        {"deep": deep, "wide": TINY},
        attention_heads=((4, 2, 16),),
        attention_tokens=(1, 3),
        contexts=(16,),
        context=16,
        gammas=(1, 2),
        host_shapes=((1, 64), (2, 64), (1, 128)),
        answer_tokens=8,
        patience=0.02,
        space=SearchSpace.from_dict(SPACE, "tiny"),
    )


def stand_in() -> tuple[VisibleGpu, Device]:
    """The GPU that the rehearsal plays."""
    device = load_device(STAND_IN)
    return VisibleGpu(0, device.name, device.memory_bytes, "rehearsal", "GPU-rehearsal"), device


def _state(gpu: VisibleGpu) -> GpuState:
    values: dict[str, Any] = dict.fromkeys(GpuState.__dataclass_fields__)
    return GpuState(**(values | {"gpu": gpu, "throttle_reasons": (), "processes": ()}))


def _open_bench(device: Device, profile: Profile, *, mode: str = "graph", **_: Any) -> CudaBench:
    profile.probe_reference_s = {
        name + end: 1e-6 for name in ("bfloat16", "float16") for end in ("", " eager")
    }
    steady: Any = lambda: 1000.0  # noqa: E731 - the probe of a shared CPU would call every row throttled
    return CpuStandIn(
        profile,
        device,
        mode=mode,
        runner=CpuRunner(),
        clock_mhz=steady,
        last_level_cache_bytes=1 << 20,
    )


@contextmanager
def rehearsing() -> Iterator[None]:
    """Inside, a CPU stands where the GPU is asked for."""
    real = gpu_sweep.needs

    def fewer(drafts: Any, target: Any, dtype: str, mode: str, asked: Any, room: Any) -> Any:
        return real(drafts, target, dtype, mode, replace(asked, **FEW), room)

    with (
        mock.patch.object(cuda, "open_bench", _open_bench),
        mock.patch.object(cuda, "cuda_problem", lambda: None),
        mock.patch.object(gpu_sweep, "needs", fewer),
        mock.patch.object(steps, "visible_device", stand_in),
        mock.patch.object(steps, "gpu_state", _state),
    ):
        yield
