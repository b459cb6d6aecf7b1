"""The GPU bench on a made-up runner: what it captures, flushes, flags, repeats and skips; and its
words where no GPU is."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from archsearch.architecture.ops import AllReduce, Attention, Elementwise, Gemm
from archsearch.errors import ArchsearchError
from archsearch.hardware.device import load_device
from archsearch.hardware.identify import GpuProcess, GpuState, VisibleGpu
from archsearch.profiles import Profile
from archsearch.profiling import collectives, cuda, kernels
from archsearch.profiling.cpu_sweep import measure_points, sweep
from archsearch.profiling.cuda import CudaBench, open_bench, supported_dtypes, torch_index
from archsearch.profiling.points import Point, row_key
from tests.doubles.world import TINY

CALL_S = 1e-5


class FakeRunner:
    """A device where every captured call takes CALL_S times `speed`, whatever it computes; it runs
    each capture once."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.flushes = 0
        self.speed = 1.0
        self.jitter: list[float] = []
        self.too_large = 10**9
        self.released = 0

    def capture(self, calls: Sequence[Any]) -> Any:
        if len(calls) > self.too_large:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 EiB.")
        self.captured.append(len(calls))
        calls[0]()

        def replay() -> None:
            pass

        replay.calls = len(calls)  # type: ignore[attr-defined]
        return replay

    def seconds(self, run: Any, count: int, before: Any) -> float:
        self.flushes += before is not None
        factor = self.jitter.pop(0) if self.jitter else 1.0
        return count * getattr(run, "calls", 1) * CALL_S * self.speed * factor

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


def bench_on(runner: FakeRunner, mode: str = "graph", **kwargs: Any) -> CudaBench:
    profile = Profile(
        {"key": "h200-sxm-141gb"}, {"torch": "x"}, {"float32": 32 * CALL_S, "float32 eager": CALL_S}
    )
    return CudaBench(
        profile,
        load_device("h200"),
        mode=mode,
        runner=runner,
        last_level_cache_bytes=1 << 20,
        **kwargs,
    )


ARCH = TINY.replace(num_hidden_layers=2)
POINTS = [
    Point("gemm", "cold", Gemm(2, 64, 64)),
    Point("gemm", "warm", Gemm(2, 64, 64)),
    Point("attention", "cold", Attention(1, 3, 40, 4, 2, 16)),
    Point("elementwise", "warm", Elementwise("norm", 64)),
    Point("layer", "cold", arch=ARCH.replace(num_hidden_layers=4), context=16),
    Point("forward", "warm", arch=ARCH, context=16),
    Point("forward", "cold", arch=ARCH, context=16, tokens=5),
]


# -- measuring
# --------------------------------------------------------------------------------------------------


def test_graph_rows(runner: FakeRunner) -> None:
    bench = bench_on(runner)
    assert sweep(bench, {"float32": POINTS}, budget_s=1e9) == len(POINTS)
    rows = [bench.profile.rows[row_key(point, "float32", "graph")] for point in POINTS]
    # A call takes CALL_S whether one graph holds many or one; a stack's time is per layer.
    expected = [CALL_S] * 4 + [CALL_S / 4] + [CALL_S] * 2
    assert [row.median_s for row in rows] == pytest.approx(expected)
    assert all(
        row.mode == "graph" and not row.throttled and row.slowdown == pytest.approx(1.0)
        for row in rows
    )
    probe, cold, warm, *_, forward = (
        runner.captured[1:2] + runner.captured[:1] + runner.captured[2:]
    )
    assert probe == warm == kernels.GRAPH_CALLS and forward == 1
    assert cold == (4 << 20) // (64 * 64 * 4)  # copies worth four times the L2
    assert runner.flushes >= 5  # the cold pass, every repeat of it
    assert sweep(bench, {"float32": POINTS}, budget_s=1e9) == 0


def test_eager_rows(runner: FakeRunner) -> None:
    bench = bench_on(runner, "eager")
    assert sweep(bench, {"float32": POINTS}, budget_s=1e9) == len(POINTS)
    assert {row.mode for row in bench.profile.rows.values()} == {"eager"} and not runner.captured
    layer = bench.profile.rows[row_key(POINTS[4], "float32", "eager")]
    assert layer.median_s == pytest.approx(CALL_S / 4)


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_attention_rows_say_which_kernel_ran(
    runner: FakeRunner, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch is asked as it will be called, with one sequence: in a graph without FlashAttention
    queries are packed by KV head; in eager mode KV heads are repeated under a mask and grouped
    without one, as transformers does."""
    asked: list[tuple[Any, ...]] = []

    def choose(query: Any, key: Any, value: Any, attn_mask: Any, enable_gqa: bool) -> int:
        asked.append((tuple(query.shape), tuple(key.shape), attn_mask is not None, enable_gqa))
        return 2 if attn_mask is not None else 1

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    bench = bench_on(runner, mode)
    several, one = Attention(5, 3, 40, 4, 2, 16), Attention(5, 1, 40, 4, 2, 16)
    assert (
        bench.measure(Point("attention", "cold", several), "float32").kernel
        == "memory-efficient attention"
    )
    assert bench.measure(Point("attention", "cold", one), "float32").kernel == "FlashAttention 2"
    packed = [
        ((1, 2, 6, 16), (1, 2, 43, 16), True, False),
        ((1, 2, 2, 16), (1, 2, 41, 16), False, False),
    ]
    repeated = [
        ((1, 4, 3, 16), (1, 4, 43, 16), True, False),
        ((1, 4, 1, 16), (1, 2, 41, 16), False, True),
    ]
    assert asked == (packed if mode == "graph" else repeated)
    assert bench.measure(POINTS[0], "float32").kernel == ""


def test_the_modes_do_not_share_rows(runner: FakeRunner) -> None:
    bench = bench_on(runner)
    sweep(bench, {"float32": POINTS[:1]}, budget_s=1e9)
    bench.mode = "eager"
    assert sweep(bench, {"float32": POINTS[:1]}, budget_s=1e9) == 1 and len(bench.profile.rows) == 2


def test_the_probe_s_speed_is_kept_in_the_profile(
    runner: FakeRunner, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cuda.time, "perf_counter", iter(range(1000)).__next__
    )  # the second of warming up passes at once
    bench = bench_on(runner)
    bench.profile.folder, bench.profile.probe_reference_s = tmp_path, {}
    bench.timer("float32")
    assert Profile.load(tmp_path).probe_reference_s == {"float32": pytest.approx(32 * CALL_S)}
    runner.speed = 1.5
    again = bench_on(runner)
    assert again.measure(POINTS[0], "float32").slowdown == pytest.approx(1.5)


# -- what disturbs
# ------------------------------------------------------------------------------------------------


def test_out_of_memory_skips_the_point_and_goes_on(runner: FakeRunner) -> None:
    runner.too_large = 200
    bench = bench_on(runner)
    points = [POINTS[1], POINTS[0], POINTS[5]]  # the second captures 256 copies
    assert sweep(bench, {"float32": points}, budget_s=1e9) == 2
    (words,) = bench.skipped
    assert "gemm (m 2, n 64, k 64)" in words and "out of memory" in words and "graph" in words
    assert runner.released == 1
    assert row_key(POINTS[0], "float32", "graph") not in bench.profile.rows


@pytest.mark.parametrize(
    "words",
    [
        "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate",
        "CUDA error: out of memory",
        "capture",
    ],
)
def test_a_shortage_of_memory_by_other_names(
    runner: FakeRunner, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS and the driver say it in their words, and a capture that ran out of memory ends in
    another error."""

    def capture(calls: Sequence[Any]) -> Any:
        try:
            raise (
                torch.OutOfMemoryError("CUDA out of memory")
                if words == "capture"
                else RuntimeError(words)
            )
        finally:
            if words == "capture":
                raise RuntimeError(
                    "CUDA error: operation failed due to a previous error during capture"
                )

    bench = bench_on(runner)
    bench.timer("float32")
    monkeypatch.setattr(runner, "capture", capture)
    assert sweep(bench, {"float32": [POINTS[1]]}, budget_s=1e9) == 0 and len(bench.skipped) == 1
    monkeypatch.setattr(
        runner,
        "capture",
        lambda calls: (_ for _ in ()).throw(RuntimeError("an illegal memory access")),
    )
    with pytest.raises(RuntimeError, match="illegal"):
        sweep(bench, {"float32": [POINTS[1]]}, budget_s=1e9)


def test_out_of_memory_in_a_check(runner: FakeRunner) -> None:
    runner.too_large = 200
    bench = bench_on(runner)
    found = list(measure_points(bench, [POINTS[0], POINTS[5]], "float32", rounds=2))
    assert [point for point, _ in found] == [POINTS[5]] and len(bench.skipped) == 1


def test_a_clock_that_drops_marks_rows_and_they_are_measured_again(runner: FakeRunner) -> None:
    clocks = iter([1980.0] * 20 + [1700.0] * 3 + [1900.0] * 100)
    bench = bench_on(runner, clock_mhz=lambda: next(clocks))
    assert not any(bench.measure(POINTS[1], "float32").throttled for _ in range(20))
    assert bench.measure_again_if_noisy(POINTS[1], "float32").throttled  # 1700 three times
    assert not bench.measure(POINTS[1], "float32").throttled
    row = bench.measure(POINTS[1], "float32")
    bench.profile.record(cuda.replace(row, throttled=True))
    assert sweep(bench, {"float32": [POINTS[1]]}, budget_s=1e9) == 1
    assert not bench.profile.rows[row.key].throttled


def test_without_a_clock_the_probe_tells(runner: FakeRunner) -> None:
    bench = bench_on(runner)
    assert not bench.measure(POINTS[1], "float32").throttled
    runner.speed = 1.2
    row = bench.measure(POINTS[1], "float32")
    assert row.throttled and row.median_s == pytest.approx(1.2 * CALL_S)  # as it was: not corrected
    assert bench.slowdowns == pytest.approx([1.0, 1.2])


def test_noise_is_measured_again_and_the_steadiest_kept(runner: FakeRunner) -> None:
    bench = bench_on(runner)
    bench.timer("float32")
    runner.jitter = [1.0] * 3 + [1.0, 3.0] * 12
    assert not bench.measure_again_if_noisy(POINTS[1], "float32").grossly_noisy


# -- opening
# --------------------------------------------------------------------------------------------------


def state(**changes: Any) -> GpuState:
    gpu = VisibleGpu(0, "NVIDIA H200", 150754820096, "570.1", "GPU-abc")
    values = dict.fromkeys(GpuState.__dataclass_fields__, None) | {
        "gpu": gpu,
        "throttle_reasons": (),
        "processes": (),
    }
    return GpuState(**(values | changes))


def test_torch_without_cuda_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ArchsearchError, match="built without CUDA") as raised:
        open_bench(load_device("h200"), Profile({}, {}))
    assert "\n" not in str(raised.value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "driver is too old" in (cuda.cuda_problem() or "")


@pytest.fixture
def cuda_here(monkeypatch: pytest.MonkeyPatch, runner: FakeRunner):
    """A torch that says it sees two GPUs, the second of which is GPU-abc."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = [
        SimpleNamespace(uuid="123", L2_cache_size=1 << 20),
        SimpleNamespace(uuid="abc", L2_cache_size=2 << 20),
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    opened = []
    monkeypatch.setattr(
        cuda, "CudaRunner", lambda index, mode: opened.append((index, mode)) or runner
    )
    monkeypatch.setattr(cuda, "sm_clock_reader", lambda gpu: lambda: 1980.0)
    monkeypatch.setattr(cuda, "idle_gpu", lambda device, allow_busy: state())
    monkeypatch.setattr(cuda, "_OPENED", {})
    return opened


def test_a_second_bench_takes_the_same_card(
    cuda_here: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although this process, now on it, may look like another one."""
    open_bench(load_device("h200"), Profile({}, {}), mode="graph")
    monkeypatch.setattr(cuda, "idle_gpu", lambda device, allow_busy: pytest.fail("asked again"))
    monkeypatch.setattr(
        cuda, "gpu_state", lambda gpu: state(gpu=gpu, processes=(GpuProcess(1, "python", 0),))
    )
    assert open_bench(load_device("h200"), Profile({}, {}), mode="eager").mode == "eager"
    assert cuda_here == [(1, "graph"), (1, "eager")]


def test_the_bench_finds_its_card_by_uuid(cuda_here: list[Any]) -> None:
    bench = open_bench(load_device("h200"), Profile({}, {}), mode="graph")
    assert cuda_here == [(1, "graph")] and bench.cold_bytes == 8 << 20
    data = bench.provenance()
    assert data["gpu"]["driver"] == "570.1" and data["cuda"] == "13.0" and data["mode"] == "graph"
    with pytest.raises(ArchsearchError, match="does not see the GPU GPU-zzz"):
        torch_index("GPU-zzz")


def test_a_dtype_the_device_lacks(cuda_here: list[Any]) -> None:
    with pytest.raises(ArchsearchError, match="bfloat16, float16"):
        open_bench(load_device("a100"), Profile({}, {}), dtype="fp8")
    with pytest.raises(ArchsearchError, match="unknown mode"):
        open_bench(load_device("a100"), Profile({}, {}), mode="fast")


def test_dtypes_by_device() -> None:
    assert supported_dtypes(load_device("a100"), "graph") == ["bfloat16", "float16"]
    assert supported_dtypes(load_device("h200"), "graph") == [
        "bfloat16",
        "float16",
        "float8_e4m3fn",
    ]
    assert supported_dtypes(load_device("h200"), "eager") == ["bfloat16", "float16"]
    assert supported_dtypes(load_device("t4"), "graph") == ["float16"]


def test_a_busy_gpu_stops_before_anything_runs(
    cuda_here: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(device: Any, allow_busy: bool) -> GpuState:
        if allow_busy:
            return state(processes=(GpuProcess(7, "python", 0),))
        raise ArchsearchError("busy: python")

    monkeypatch.setattr(cuda, "idle_gpu", busy)
    with pytest.raises(ArchsearchError, match="busy: python"):
        open_bench(load_device("h200"), Profile({}, {}))
    assert not cuda_here
    assert open_bench(load_device("h200"), Profile({}, {}), allow_busy=True).state.busy  # type: ignore[union-attr]


# -- all-reduce
# --------------------------------------------------------------------------------------------------


def test_all_reduce_needs_as_many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ops = [AllReduce(8, 2), AllReduce(8, 4), AllReduce(8, 1)]
    assert collectives.measurable(ops) == [AllReduce(8, 2)]


@pytest.mark.slow
def test_all_reduce_between_processes() -> None:
    """Two processes on CPUs."""
    ops = [AllReduce(1024, 2), AllReduce(65536, 2)]
    rows = collectives.measure_all_reduces(ops, "float32", "eager", backend="gloo")
    assert [row.sizes() for row in rows] == [
        {"elements": 1024, "ranks": 2},
        {"elements": 65536, "ranks": 2},
    ]
    assert all(
        row.kind == "all_reduce" and row.cache == "cold" and 0 < row.median_s < 1 for row in rows
    )
    assert {row.kernel for row in rows} == {"Gloo"}
