"""On a real CUDA device: graphs, rotation, FlashAttention, compiled kernels, the lean decoder,
whole profiles. Marker `gpu`."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import Attention, Elementwise, Gemm
from archsearch.hardware.device import Device, devices
from archsearch.hardware.identify import matches, visible_gpus
from archsearch.models.drafts import build_draft
from archsearch.profiles import Measurement, Profile
from archsearch.profiling import kernels, layers
from archsearch.profiling.cpu_sweep import sweep
from archsearch.profiling.cuda import CudaBench, CudaRunner, GpuTimer, open_bench, supported_dtypes
from archsearch.profiling.fused import (
    Fused,
    agree,
    attend,
    flash_usable,
    fused_for,
    lower_right_mask,
)
from archsearch.profiling.gpu_sweep import Asked, Stop, adaptive_sweep, needs
from archsearch.profiling.layers import LeanDecoder, LeanRun
from archsearch.profiling.points import Point
from gpuday.cycles import Cycle, LaunchRunner, RoundStyle
from tests.doubles.lean_model import lean_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
TARGET = Architecture(2048, 8192, 4, 32, 8, 64, 32000)


@pytest.fixture(scope="module")
def device() -> Device:
    found = [
        device for device in devices().values() for gpu in visible_gpus() if matches(device, gpu)
    ]
    if not found:
        pytest.skip("this GPU is not in the device table")
    return found[0]


@pytest.fixture(scope="module")
def benches(device: Device) -> dict[str, CudaBench]:
    return {
        mode: open_bench(device, Profile(device.to_dict(), {}), mode=mode, allow_busy=True)
        for mode in ("graph", "eager")
    }


def row(bench: CudaBench, point: Point, dtype: str = "float16") -> Measurement:
    with torch.inference_mode():
        return bench.measure_again_if_noisy(point, dtype)


def test_a_gemm_in_a_graph_takes_its_bytes_and_eager_no_less(
    benches: dict[str, CudaBench], device: Device
) -> None:
    """A decode GEMM of 117 MB from memory: between its roofline and three times that; eager adds a
    launch, it saves none."""
    point = Point("gemm", "cold", Gemm(1, 14336, 4096))
    graph, eager = (row(benches[mode], point) for mode in ("graph", "eager"))
    floor = 2 * 14336 * 4096 / device.bandwidth_bytes_per_s
    assert floor < graph.median_s < 3 * floor
    assert eager.median_s > 0.9 * graph.median_s and not graph.grossly_noisy


def test_small_kernels_are_bound_by_launches_in_eager_mode_only(
    benches: dict[str, CudaBench],
) -> None:
    point = Point("elementwise", "warm", Elementwise("norm", 4096))
    assert row(benches["eager"], point).median_s > 2 * row(benches["graph"], point).median_s


def test_the_rotation_leaves_the_cache(benches: dict[str, CudaBench]) -> None:
    """The same small weight, 8 MB: from the L2 it is clearly faster than from memory, and memory is
    no faster than it can be."""
    op = Gemm(1, 1024, 4096)
    warm, cold = (
        row(benches["graph"], Point("gemm", cache, op)).median_s for cache in ("warm", "cold")
    )
    assert cold > 1.1 * warm
    calls = kernels.graph_calls(
        op, benches["graph"].pool("float16"), benches["graph"].cold_bytes, Fused()
    )
    l2 = torch.cuda.get_device_properties(benches["graph"].runner.device).L2_cache_size
    weights = {call.args[1].data_ptr() for call in calls}  # type: ignore[attr-defined]
    assert len(weights) * 2 * 1024 * 4096 >= 4 * l2


@pytest.mark.parametrize("n, k", [(8192, 8192), (8192, 7168), (10240, 8192)])
def test_large_weights_leave_the_cache_too(benches: dict[str, CudaBench], n: int, k: int) -> None:
    bench = benches["graph"]
    calls = kernels.graph_calls(Gemm(1, n, k), bench.pool("float16"), bench.cold_bytes, Fused())
    weights = {call.args[1].data_ptr() for call in calls}  # type: ignore[attr-defined]
    assert (
        len(weights) * 2 * n * k
        >= 4 * torch.cuda.get_device_properties(bench.runner.device).L2_cache_size
    )


@pytest.mark.parametrize("tokens", [1, 2, 9, 17])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_flash_attention_of_tokens_to_verify(
    tokens: int, window: int | None, kv_heads: int
) -> None:
    query = torch.randn(3, tokens, 8, 64, device="cuda", dtype=torch.float16)
    cache = torch.randn(3, 777, 2, kv_heads, 64, device="cuda", dtype=torch.float16)
    key, value = cache[:, :, 0], cache[:, :, 1]
    if not flash_usable(query):
        pytest.skip("no FlashAttention on this device")
    mask = lower_right_mask(tokens, 777, window, query.device)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2).double(),
        key.transpose(1, 2).double().repeat_interleave(8 // kv_heads, 1),
        value.transpose(1, 2).double().repeat_interleave(8 // kv_heads, 1),
        attn_mask=mask,
    ).transpose(1, 2)
    assert torch.allclose(attend(query, key, value, window).double(), expected, atol=3e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_compiled_kernels_agree(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("no bfloat16")
    assert agree(fused_for(torch.device("cuda", 0), dtype), Fused(), torch.device("cuda", 0), dtype)


@pytest.mark.parametrize(
    "change", [{}, {"window_pattern": "SL", "sliding_window": 16}, {"qk_norm": True}], ids=str
)
def test_the_lean_decoder_is_the_module_and_its_graph_replays_it(change: dict) -> None:
    arch = Architecture(256, 512, 3, 4, 2, 64, 512).replace(**change)
    with torch.device("cuda"):
        model = build_draft(arch, torch.float16)
    ids = torch.randint(0, 512, (2, 40), device="cuda")
    with torch.inference_mode():
        expected = model(ids).logits.float()
        run = layers.LeanRun(
            lean_of(model, arch, fused_for(ids.device, torch.float16)),
            batch=2,
            capacity=40,
        )
        run.forward(ids[:, :31], 0)
        new = ids[:, 31:].clone()
        out: list[torch.Tensor] = []
        replay = CudaRunner(0, "graph").capture([lambda: out.append(run.forward(new, 31))])
        replay()
        torch.cuda.synchronize()
    scale = float(expected.std())
    assert float((out[-1].float() - expected[:, 31:]).abs().max()) < 0.05 * scale + 0.01


@pytest.mark.parametrize("style", ["one graph", "graph per pass", "draft eager"])
def test_rounds_in_graphs_are_the_eager_round(
    benches: dict[str, CudaBench], style: RoundStyle
) -> None:
    """Replayed on new tokens, a captured round writes what the round launched kernel by kernel
    writes."""
    pool, fused = (
        benches["graph"].pool("float16"),
        fused_for(torch.device("cuda", 0), torch.float16),
    )
    target, draft = TARGET.replace(num_hidden_layers=2), TARGET.replace(num_hidden_layers=1)
    with torch.inference_mode():
        models = [LeanDecoder.random(arch, pool, fused) for arch in (target, draft)]
        cycles = [
            Cycle(*(LeanRun(model, batch=2, capacity=80) for model in models), gamma=3, context=64)
            for _ in range(2)
        ]
        run = cycles[0].run(style, benches["graph"].runner)
        for seed in (1, 2):
            tokens = torch.randint(
                0, TARGET.vocab_size, (2, 4), generator=torch.Generator().manual_seed(seed)
            ).cuda()
            for cycle in cycles:
                cycle.target.cache.zero_()
                cycle.draft.cache.zero_()
                cycle.block.copy_(tokens)
            run()
            cycles[1].whole()
            torch.cuda.synchronize()
            assert (
                cycles[0].block == cycles[1].block
            ).float().mean() > 0.7  # ties of half precision may fall otherwise


def test_launching_is_no_longer_than_waiting_for_it_too(benches: dict[str, CudaBench]) -> None:
    bench = benches["eager"]
    timer = bench.timer("float16")
    launch = GpuTimer(LaunchRunner(bench.runner), timer.probe, timer.reference_s)
    with torch.inference_mode():
        weight = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
        times = [clock.time(lambda: weight @ weight, calls=1) for clock in (launch, timer)]
    assert statistics.median(times[0].times_s) < 0.5 * statistics.median(times[1].times_s)


def test_float8_is_faster_where_it_exists(benches: dict[str, CudaBench], device: Device) -> None:
    if "float8_e4m3fn" not in supported_dtypes(device, "graph"):
        pytest.skip("no float8")
    point = Point("gemm", "cold", Gemm(16, 14336, 4096))
    assert (
        row(benches["graph"], point, "float8_e4m3fn").median_s
        < row(benches["graph"], point).median_s
    )


def test_a_point_that_does_not_fit_is_skipped(benches: dict[str, CudaBench]) -> None:
    bench = benches["graph"]
    before = len(bench.skipped)
    points = [
        Point("gemm", "cold", Gemm(1, 1 << 21, 1 << 20)),
        Point("gemm", "warm", Gemm(1, 512, 512)),
    ]  # 4 TiB of weights
    assert (
        sweep(bench, {"float16": points}, budget_s=60.0) == 1 and len(bench.skipped) == before + 1
    )


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_profile_in_a_minute(device: Device, mode: str, tmp_path) -> None:
    """Whole models, layers and ops of a small target and drafts; cold passes are no faster than
    warm ones."""
    profile = Profile(device.to_dict(), {}, folder=tmp_path)
    profile.save_header()
    bench = open_bench(device, profile, mode=mode, allow_busy=True)
    drafts = [
        TARGET.replace(hidden_size=64 * i, num_hidden_layers=1 + i % 3, intermediate_size=256 * i)
        for i in range(4, 20)
    ]
    start = time.perf_counter()
    result = adaptive_sweep(
        bench,
        needs(drafts, TARGET, "float16", mode, Asked(models=4)),
        "float16",
        Stop(budget_s=60.0),
    )
    assert time.perf_counter() - start < 90
    assert result.new_rows > 100 and not bench.skipped
    assert {row.kind for row in profile.rows.values()} == {
        "gemm",
        "attention",
        "elementwise",
        "layer",
        "forward",
    }
    attention = [row for row in profile.rows.values() if row.kind == "attention"]
    assert any(Attention(**row.sizes()).tokens > 1 for row in attention)
    assert profile.noisy_share < 0.3
    forwards: dict[tuple, dict[str, float]] = {}
    for found in profile.select("forward", "float16", mode):
        forwards.setdefault(found.shape, {})[found.cache] = found.median_s
    pairs = [times for times in forwards.values() if len(times) == 2]
    assert pairs and all(times["cold"] > 0.85 * times["warm"] for times in pairs)
