"""Measurements on an NVIDIA GPU, in two modes that differ in kind (docs/profiles.md).

`graph`: by CUDA events, so no host time is in it. `eager`: a loop of calls between two
synchronisations, by the host's clock; CUDA events around it would show the same, gaps included.

Times are as they were: a GPU of one's own needs no correction. A fixed GEMM before and after every
point and the SM clock say whether the device had slowed down.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch

from archsearch.architecture.ops import Attention
from archsearch.errors import ArchsearchError
from archsearch.hardware.device import Device
from archsearch.hardware.identify import GpuState, VisibleGpu, gpu_state, idle_gpu, sm_clock_reader
from archsearch.profiles import THROTTLED_DROP, Measurement, Profile
from archsearch.profiling import kernels, layers
from archsearch.profiling.fused import Fused, attention_kernel, fused_for, graph_backends
from archsearch.profiling.points import Bench, Models, Point, Prepared
from archsearch.profiling.timer import Run, Timer, Timing, plan
from archsearch.records import as_data
from archsearch.workload import Workload, dtype_name

COLD_L2_MULTIPLE: Final = 4
# How long a flush lasts at least: the host has then queued the graph behind it, and its launch is
# not in the time.
FLUSH_S: Final = 0.5e-3
# Readings of the SM clock (about the first seconds) whose median later ones are compared with.
REFERENCE_CLOCKS: Final = 16
# Cards this process has found idle and opened, by device key: a second bench (another mode) takes
# the same one.
_OPENED: dict[str, VisibleGpu] = {}
FP8: Final = "float8_e4m3fn"
ATTENTION: Final = {
    "graph": (
        "torch's FlashAttention on a static KV cache (each row says which kernel); serving engines"
        " choose others by GPU"
    ),
    "eager": "scaled_dot_product_attention as transformers calls it (each row says which kernel)",
}


class CudaRunner:
    """What captures and times on the device; tests put another in its place."""

    def __init__(self, index: int, mode: str) -> None:
        self.device = torch.device("cuda", index)
        self.mode = mode
        torch.cuda.set_device(self.device)
        self._stream = torch.cuda.Stream(self.device)
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def capture(self, calls: Sequence[Run]) -> Run:
        """A callable that runs all `calls` once, as one CUDA graph where the mode is `graph`."""

        def row() -> None:
            for call in calls:
                call()

        if self.mode == "eager":
            return row
        with graph_backends():
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                # kernels are loaded, workspaces allocated, before the capture forbids it
                for call in calls[:2]:
                    call()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, stream=self._stream):
                    row()
            except RuntimeError:  # where ending the capture failed too, torch stays on its stream
                torch.cuda.set_stream(torch.cuda.default_stream(self.device))
                raise

        # The graph holds addresses, not tensors: whatever `calls` read must live as long as the
        # graph does.
        def replay(kept: Sequence[Run] = calls) -> None:
            graph.replay()

        return replay

    def seconds(self, run: Run, count: int, before: Run | None) -> float:
        """Seconds of `count` runs in a row, `before` (in graph mode without one: one more run)
        untimed ahead of them."""
        if self.mode == "eager":
            if before is not None:
                before()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                run()
            torch.cuda.synchronize()
            return time.perf_counter() - start
        torch.cuda.synchronize()
        # Keeps the GPU busy while the host queues the rest: no launch is in the time.
        (run if before is None else before)()
        self._start.record()
        for _ in range(count):
            run()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1e3

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


class GpuTimer(Timer):
    """Times callables on a GPU, which needs no correction.

    The probe (a fixed GEMM) runs before and after each timing; `slowdown` is its time over
    `reference_s` and is not divided out.
    """

    def __init__(self, runner: CudaRunner, probe: Callable[[], float], reference_s: float) -> None:
        super().__init__(probe, reference_s)
        self.runner = runner

    def time(
        self,
        run: Run,
        *,
        before: Run | None = None,
        budget_s: float = 0.06,
        calls: int | None = None,
    ) -> Timing:
        """Time `run` within about `budget_s`; arguments as for `Timer.time`."""
        self.runner.seconds(run, 1, None)
        estimate = max(self.runner.seconds(run, 1, before), 1e-7)
        calls, repeats = plan(estimate, before is not None, calls, budget_s)
        ahead = self.probe()
        times = tuple(self.runner.seconds(run, calls, before) / calls for _ in range(repeats))
        slowdown = 0.5 * (ahead + self.probe()) / self.reference_s
        self.slowdowns.append(slowdown)
        return Timing(times, slowdown)


class CudaBench(Bench):
    """Turns points into measurements on one GPU in one mode; see the module's words.

    `fused` by dtype says (`compiled`) whether the small kernels are one launch each, as in engines.
    """

    def __init__(
        self,
        profile: Profile,
        device: Device,
        *,
        mode: str = "graph",
        runner: CudaRunner | None = None,
        clock_mhz: Callable[[], float | None] = lambda: None,
        last_level_cache_bytes: int | None = None,
        state: GpuState | None = None,
    ) -> None:
        Workload(mode=mode)  # raises ArchsearchError for an unknown one
        self.runner = CudaRunner(0, mode) if runner is None else runner
        cache = last_level_cache_bytes or device.last_level_cache_bytes or (64 << 20)
        super().__init__(profile, mode, COLD_L2_MULTIPLE * cache, self.runner.device)
        self.device, self.state = device, state
        self._clock_mhz = clock_mhz
        self._clocks: list[float] = []
        self.fused: dict[str, Fused] = {}
        one = self.flush
        rounds = max(1, round(FLUSH_S * device.bandwidth_bytes_per_s / self.cold_bytes))
        self.flush = lambda: [one() for _ in range(rounds)]

    def new_timer(self, dtype: str) -> GpuTimer:
        run = self._probe_run(dtype)

        def probe() -> float:
            return self.runner.seconds(run, 4, None) / 4

        def reference_s() -> float:
            end = time.perf_counter() + 1.0
            while time.perf_counter() < end:  # clocks rise within the first second
                probe()
            return statistics.quantiles([probe() for _ in range(100)], n=4)[0]

        key = dtype if self.mode == "graph" else f"{dtype} eager"
        return GpuTimer(self.runner, probe, self.reference_s(key, reference_s))

    def _probe_run(self, dtype: str) -> Run:
        """A fixed GEMM on weights from memory, and in eager mode small kernels beside it that feel
        the host."""
        op = kernels.Gemm(16, 4096, 4096)
        if self.mode == "graph":
            calls = kernels.graph_calls(op, self.pool(dtype), self.cold_bytes, Fused())
            return self.runner.capture(calls[: kernels.GRAPH_CALLS])
        gemm = kernels.gemm(op, self.pool(dtype), self.cold_bytes)
        small = torch.ones(4096, device=self.runner.device)

        def run() -> None:
            for _ in range(4):
                gemm()
                for _ in range(8):
                    small.mul(1.0001)

        return run

    def release(self) -> None:
        self.runner.release()

    def prepare(self, point: Point, dtype: str, model_cache: Models) -> Prepared:
        """In graph mode as serving engines run it, captured as a CUDA graph.

        A warm op runs on one set of operands, a cold one on copies that together hold `cold_bytes`.
        A warm pass is replayed in a row, a cold one after `flush` has emptied the L2. Raises
        ValueError for a model that graph mode has no layers for.
        """
        if self.mode == "eager":
            return super().prepare(point, dtype, model_cache)
        capture, pool, fused = self.runner.capture, self.pool(dtype), self.fused_of(dtype)
        if point.op is not None:
            size = self.cold_bytes if point.cache == "cold" else 1
            calls = kernels.graph_calls(point.op, pool, size, fused)
            return Prepared(capture(calls), per=len(calls))
        assert point.arch is not None
        if not layers.lean_supported(point.arch):
            raise ValueError(f"no graph-mode model for {point.arch.label()}")
        room = {"batch": point.batch, "capacity": point.context + point.tokens}
        if point.kind == "layer":
            stack = layers.LeanDecoder.random(layers.bare(point.arch), pool, fused)
            step = layers.LeanRun(stack, pool=pool, **room).layer_step
            run = capture([step(point.tokens, point.context)])
            return Prepared(run, None, 0.1, None, point.arch.num_hidden_layers)
        if point.arch not in model_cache:
            model_cache.clear()
            model_cache[point.arch] = layers.LeanDecoder.random(point.arch, pool, fused)
        whole = layers.LeanRun(model_cache[point.arch], pool=pool, **room)
        run = capture([whole.step(point.tokens, point.context)])
        return Prepared(run, self.flush if point.cache == "cold" else None, 0.1)

    def finished(self, row: Measurement, point: Point, dtype: str) -> Measurement:
        named = ""
        if isinstance(point.op, Attention):
            named = attention_kernel(point.op, self.mode, self.pool(dtype).flat)
        return replace(row, throttled=self._throttled(row.slowdown), kernel=named)

    def fused_of(self, dtype: str) -> Fused:
        if dtype not in self.fused:
            half = torch.bfloat16 if dtype == FP8 else getattr(torch, dtype)
            self.fused[dtype] = fused_for(self.runner.device, half)
        return self.fused[dtype]

    def _throttled(self, slowdown: float) -> bool:
        """Whether the SM clock, or without one the probe, is more than THROTTLED_DROP below what it
        was at first."""
        clock = self._clock_mhz()
        if clock is None or clock <= 0:
            return self.mode == "graph" and slowdown > 1 / (1 - THROTTLED_DROP)
        if len(self._clocks) < REFERENCE_CLOCKS:
            self._clocks.append(clock)
        return clock < (1 - THROTTLED_DROP) * statistics.median(self._clocks)

    def provenance(self) -> dict[str, object]:
        """How the rows were made, for the profile's header: driver, clocks, limits, kernels."""
        small = {name: "triton" if own.compiled else "torch" for name, own in self.fused.items()}
        data: dict[str, object] = {"cuda": torch.version.cuda, "mode": self.mode}
        data |= {"attention": ATTENTION[self.mode], "fused_kernels": small}
        return data | ({} if self.state is None else {"gpu": as_data(self.state)})


def torch_index(uuid: str) -> int:
    """torch's number of the GPU with this NVML UUID: torch sorts by speed and counts only what
    CUDA_VISIBLE_DEVICES leaves.

    Raises ArchsearchError where torch does not see it.
    """
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-").lower()
    seen = [
        str(getattr(torch.cuda.get_device_properties(i), "uuid", "")).lower().removeprefix("gpu-")
        for i in range(torch.cuda.device_count())
    ]
    if bare and bare in seen:
        return seen.index(bare)
    if len(seen) == 1:  # a MIG slice has the UUID of its card in torch; an old torch has none
        return 0
    raise ArchsearchError(
        f"torch does not see the GPU {uuid} that NVML shows (it sees {len(seen)}); check"
        " CUDA_VISIBLE_DEVICES"
    )


def cuda_problem() -> str | None:
    """Why torch cannot use a GPU here, in one line with what to do; None where it can."""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA; install a CUDA build, for example: "
            "pip install torch --index-url https://download.pytorch.org/whl/cu128"
        )
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the GPU: the driver"
            " is too old for it, or the container hides the GPU; update the driver or install a"
            " torch built for an older CUDA"
        )
    return None


def supported_dtypes(device: Device, mode: str) -> list[str]:
    """The dtypes that can be measured on `device`, best first; float8_e4m3fn means GEMMs in graph
    mode only."""
    capability = tuple(map(int, (device.compute_capability or "0.0").split(".")))
    eights = (FP8,) if mode == "graph" and capability >= (8, 9) else ()
    return [dtype for dtype in ("bfloat16", "float16", *eights) if dtype in device.flops_per_s]


def check_cuda(device: Device) -> None:
    """Raise ArchsearchError where torch cannot run on `device`."""
    if (problem := cuda_problem()) is not None:
        raise ArchsearchError(f"cannot measure on {device.name}: {problem}")


def open_bench(
    device: Device,
    profile: Profile,
    *,
    mode: str = "graph",
    dtype: str | None = None,
    allow_busy: bool = False,
) -> CudaBench:
    """The bench of `device` on this machine, once NVML and torch agree that it is here and idle.

    `device`: as `check_claim` confirmed it. Raises ArchsearchError: torch without CUDA, a dtype the
    device does not compute in, a busy device (unless `allow_busy`).
    """
    check_cuda(device)
    if dtype is not None and dtype_name(dtype) not in (offered := supported_dtypes(device, mode)):
        raise ArchsearchError(
            f"{device.name} is not measured in {dtype} in {mode} mode; use one of"
            f" {', '.join(offered)}"
        )
    # Once this process is on the card, it may look like another one to NVML in a container.
    known = _OPENED.get(device.key)
    state = gpu_state(known) if known is not None else idle_gpu(device, allow_busy=allow_busy)
    _OPENED[device.key] = state.gpu
    index = torch_index(state.gpu.uuid)
    found = torch.cuda.get_device_properties(index)
    return CudaBench(
        profile,
        device,
        mode=mode,
        runner=CudaRunner(index, mode),
        clock_mhz=sm_clock_reader(state.gpu),
        last_level_cache_bytes=int(getattr(found, "L2_cache_size", 0)) or None,
        state=state,
    )
