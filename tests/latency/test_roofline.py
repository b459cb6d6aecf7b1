"""The datasheet roofline against hand arithmetic."""

from __future__ import annotations

import pytest

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import AllReduce, Attention, Elementwise, Gemm
from archsearch.errors import ArchsearchError
from archsearch.hardware.device import Device
from archsearch.latency.constants import constants
from archsearch.latency.roofline import RooflineLatency
from archsearch.workload import Workload
from tests.doubles.passes import forward_s

# 1 TB/s, of which 0.8 count; 100 TFLOP/s in bfloat16, of which 0.7 count; 3 us a kernel, 8 us a
# launch in eager mode.
DEVICE = Device(
    "toy",
    "Toy",
    "gpu",
    "toy",
    80 * 2**30,
    1e12,
    {"bfloat16": 100e12, "float32": 10e12},
    link_bytes_per_s=100e9,
)
ARCH = Architecture(1024, 4096, 2, 16, 4, 64, 32000)


@pytest.fixture
def graph() -> RooflineLatency:
    return RooflineLatency(DEVICE, "bfloat16", "graph")


def test_a_gemm_reads_its_weights(graph: RooflineLatency) -> None:
    # 4096 x 1024 weights and 5120 activations of 2 bytes at 0.8 TB/s: 10.49856 us, and 3 us for the
    # kernel.
    assert graph.op_s(Gemm(1, 4096, 1024)) == pytest.approx(13.49856e-6)


def test_a_large_gemm_is_bound_by_arithmetic(graph: RooflineLatency) -> None:
    # 2 x 8192^3 = 1.0995 TFLOP at 70 TFLOP/s: 15.707 ms, far above 3 x 8192^2 x 2 bytes.
    assert graph.op_s(Gemm(8192, 8192, 8192)) == pytest.approx(1.0995e12 / 70e12 + 3e-6, rel=1e-4)


def test_attention_reads_the_cache(graph: RooflineLatency) -> None:
    op = Attention(1, 1, 1023, 16, 4, 64)
    # Keys and values: 2 x 1024 x 4 x 64 = 524288; query and output: 2 x 16 x 64 = 2048 elements.
    assert graph.op_s(op) == pytest.approx(2 * (524288 + 2048) / 0.8e12 + 3e-6)


def test_all_reduce(graph: RooflineLatency) -> None:
    # 2 (4 - 1) / 4 x 8192 elements x 2 bytes over 100 GB/s, and 5 us.
    assert graph.op_s(AllReduce(8192, 4)) == pytest.approx(1.5 * 8192 * 2 / 100e9 + 5e-6)


def test_eager_mode_is_bound_by_the_host() -> None:
    """A quarter of a millisecond a pass and about half a one a layer, whatever the width, until the
    device is the slower."""
    eager = RooflineLatency(DEVICE, "bfloat16", "eager")
    known = constants()["eager"]
    host = known["pass_s"] + 2 * known["layer_s"]
    assert (
        forward_s(eager, ARCH).value
        == forward_s(eager, ARCH.replace(hidden_size=2048)).value
        == pytest.approx(host)
    )
    assert 1e-3 < host < 2e-3
    assert forward_s(eager, ARCH, ranks=2).value == pytest.approx(host + 6 * known["all_reduce_s"])
    huge = Architecture(16384, 53248, 2, 128, 8, 128, 32000)
    graph = forward_s(RooflineLatency(DEVICE, "bfloat16", "graph"), huge).value
    assert graph <= forward_s(eager, huge).value < 1.02 * graph  # unfused GEMMs and adds beside


def test_a_forward_pass_is_the_sum_of_its_kernels(graph: RooflineLatency) -> None:
    fused_layer = [
        Elementwise("norm", 1024),
        Gemm(1, 1024 + 512, 1024),
        Elementwise("rope", 1024 + 256),
        Attention(1, 1, 100, 16, 4, 64),
        Gemm(1, 1024, 1024),
        Elementwise("norm", 1024),
        Gemm(1, 8192, 1024),
        Elementwise("act", 4096),
        Gemm(1, 1024, 4096),
    ]
    head = [Elementwise("embed", 1024), Elementwise("norm", 1024), Gemm(1, 32000, 1024)]
    expected = 2 * sum(map(graph.op_s, fused_layer)) + sum(map(graph.op_s, head))
    found = forward_s(graph, ARCH, context=100)
    assert found.value == pytest.approx(expected)
    assert found.source == "roofline" and found.relative_std == pytest.approx(0.30)
    assert forward_s(graph, ARCH, context=100, cold=True) == found


def test_the_model_s_questions(graph: RooflineLatency) -> None:
    workload = Workload(context_len=100, mode="graph")
    step = forward_s(graph, ARCH, context=100)
    assert graph.decode_s(ARCH, workload) == step
    assert graph.draft_s(ARCH, workload, 5).value == pytest.approx(5 * step.value)
    assert graph.verify_s(ARCH, workload, 4) == forward_s(graph, ARCH, tokens=5, context=100)
    assert graph.round(ARCH, ARCH, workload, 4).overhead_s.value == 0.0


def test_tensor_parallel_splits_weights_and_adds_all_reduces(graph: RooflineLatency) -> None:
    wide = Architecture(8192, 28672, 2, 64, 8, 128, 32000)
    one, four = forward_s(graph, wide), forward_s(graph, wide, ranks=4)
    assert one.value / 4 < four.value < one.value / 2


def test_a_dtype_the_device_lacks() -> None:
    with pytest.raises(
        ArchsearchError, match="toy does not compute in float16; use one of bfloat16, float32"
    ):
        RooflineLatency(DEVICE, "float16", "graph")
