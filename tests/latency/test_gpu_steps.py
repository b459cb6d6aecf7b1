"""Whole passes composed of kernel rows, against sums done by hand and the times that the paper
published."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest

from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import AllReduce, Attention, Elementwise, Gemm, Op, Part
from archsearch.engine_rounds import engine_rounds
from archsearch.hardware.device import load_device
from archsearch.latency import composed
from archsearch.latency.constants import constants
from archsearch.latency.model import LatencyModel
from archsearch.latency.roofline import RooflineLatency
from archsearch.profiles import Measurement, Profile, find_profile, freeze_shape
from archsearch.workload import Workload
from tests.doubles.passes import forward_s

TINY = Architecture(512, 1408, 6, 8, 4, 64, 32000)
BANDWIDTH = load_device("a100").bandwidth_bytes_per_s


class TableOps:
    """Stands in for OpModel: a bandwidth law with a constant per kernel, and a relative std of 5
    %."""

    asked: list[tuple[str, str]] = []

    def __init__(self, profile: Profile, dtype: str, mode: str) -> None:
        self.asked.append((dtype, mode))
        self.bytes = 1 if dtype == "float8_e4m3fn" else 2

    def op_s(self, op: Op, cold: bool) -> tuple[float, float]:
        assert cold
        if isinstance(op, Elementwise):
            return 2e-6 + 1e-12 * op.elements, 0.30
        if isinstance(op, Gemm):
            return 3e-6 + self.bytes * op.weight_elements() / (0.8 * BANDWIDTH), 0.05
        if isinstance(op, Attention):
            return 5e-6 + 2 * op.kv_elements() / (0.8 * BANDWIDTH), 0.05
        return 6e-6, 0.05

    def prepare(self, ops: Iterable[Op], cold: bool) -> None:
        pass


def table(
    device: str = "a100",
    rows: list[Measurement] | None = None,
    dtypes: tuple[str, ...] = ("bfloat16",),
) -> Profile:
    """A profile that holds one GEMM row a dtype, which is enough to be composed from."""
    profile = Profile(load_device(device).to_dict(), {"vllm": "0"})
    for dtype in dtypes:
        profile.add(
            [
                Measurement(
                    "gemm",
                    freeze_shape({"m": 1, "n": 64, "k": 64}),
                    dtype,
                    "graph",
                    "cold",
                    (3e-6,),
                )
            ]
        )
    profile.add(rows or [])
    return profile


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LatencyModel]:
    monkeypatch.setattr(composed, "OpModel", TableOps)
    monkeypatch.setattr(
        composed, "_FITTED", {}
    )  # tables fitted by another test, and these here for another
    TableOps.asked = []

    def make(
        mode: str = "graph", dtype: str = "bfloat16", engine: str | None = None, **kwargs
    ) -> LatencyModel:
        return LatencyModel(table(**kwargs), dtype, mode, engine)

    return make


def test_a_graph_step_is_the_sum_of_its_kernels(build: Callable[..., LatencyModel]) -> None:
    step = forward_s(build(), TINY, context=99)
    ops = TableOps(table(), "bfloat16", "graph")
    layer = [
        Gemm(1, 1024, 512), Attention(1, 1, 99, 8, 4, 64), Gemm(1, 512, 512), Gemm(1, 2816, 512), Gemm(1, 512, 1408),
        Elementwise("norm", 512), Elementwise("rope", 768), Elementwise("norm", 512), Elementwise("act", 1408),
    ]  # fmt: skip  # residuals are added in the norms
    head = [
        Gemm(1, 32000, 512),
        Elementwise("embed", 512),
        Elementwise("norm", 512),
        Elementwise("sample", 32000),
    ]
    layer_s, head_s = (sum(ops.op_s(op, True)[0] for op in part) for part in (layer, head))
    assert step.value == pytest.approx(
        6 * layer_s + head_s + constants()["graph"]["pass_s"], rel=1e-9
    )
    assert step.source == "modelled" and 0.04 < step.relative_std < 0.25


def test_the_error_of_a_table_does_not_average_out_over_layers(
    build: Callable[..., LatencyModel],
) -> None:
    """Twice the layers run the same kernels twice: the relative std stays, it does not shrink with
    a root."""
    passes = build().composed_
    for name in ("gemm", "attention"):
        few = passes.ops_terms(passes.pass_ops(TINY, [Part(1, 1, 99)]))[name]
        many = passes.ops_terms(
            passes.pass_ops(TINY.replace(num_hidden_layers=24), [Part(1, 1, 99)])
        )[name]
        assert many[0] == pytest.approx(4 * few[0]) and many[1] == pytest.approx(4 * few[1])
    gemm = passes.ops_terms(passes.pass_ops(TINY, [Part(1, 1, 99)]))["gemm"]
    assert (
        0.05 * math.sqrt(composed.SHARED) < gemm[1] / gemm[0] < 0.05
    )  # four shapes: partly apart, partly together


def test_tensor_parallel_pays_for_all_reduces_and_waiting(
    build: Callable[..., LatencyModel],
) -> None:
    passes, parts = build().composed_, [Part(2, 1, 99)]
    one, four = (
        passes.ops_terms(passes.pass_ops(TINY, parts, 1)),
        passes.ops_terms(passes.pass_ops(TINY, parts, 4)),
    )
    assert "all_reduce" in one and one["all_reduce"][0] == 0
    assert four["all_reduce"][0] == pytest.approx(2 * 6 * 6e-6)
    # two a layer, the embedding and the logits
    waiting = constants()["graph"]["sync_s"] * (2 * 6 + 2) * 3 / 4
    assert four["step"][0] - one["step"][0] == pytest.approx(waiting)
    assert four["gemm"][0] > one["gemm"][0] / 4  # kernels have a floor
    newer = build(
        device="h100", engine="vllm"
    )  # its all-reduces do the norms too; then the same with another version
    older = newer.with_rounds(engine_rounds("vllm", "0.16.0"))
    less = (
        (constants()["graph"]["sync_s"] - constants()["graph"]["fused_sync_s"])
        * (2 * 6 + 2)
        * 3
        / 4
    )
    apart = [forward_s(model, TINY, ranks=4).value for model in (newer, older, newer)]
    assert apart[1] - apart[0] == pytest.approx(less) and apart[0] == apart[2]
    counts = passes.pass_ops(TINY, parts, 4).outside
    assert counts[AllReduce(2 * 512, 4)] == 1 and counts[AllReduce(2 * 32000 // 2, 4)] == 1


def test_a_step_with_a_prefill_in_it_runs_its_gemms_once(
    build: Callable[..., LatencyModel],
) -> None:
    passes = build().composed_
    counts = passes.pass_ops(TINY, [Part(1, 1000, 0, 1), Part(7, 1, 99)]).in_layers
    assert counts[Gemm(1007, 1024, 512)] == 6
    assert (
        counts[Attention(1, 1000, 0, 8, 4, 64)] == 6 and counts[Attention(7, 1, 99, 8, 4, 64)] == 6
    )
    assert (
        passes.pass_ops(TINY, [Part(1, 1000, 0, 1), Part(7, 1, 99)]).outside[Gemm(8, 32000, 512)]
        == 1
    )
    both = passes.step_s(TINY, [Part(1, 1000, 0, 1), Part(7, 1, 99)]).value
    apart = (
        passes.step_s(TINY, [Part(1, 1000, 0, 1)]).value
        + passes.step_s(TINY, [Part(7, 1, 99)]).value
    )
    assert both < apart


@pytest.mark.parametrize(
    ("name", "published_ms"), [("sheared-llama-1.3b", 13.13), ("wide-1.3b", 6.69)]
)
def test_eager_drafts_of_the_paper(
    build: Callable[..., LatencyModel], name: str, published_ms: float
) -> None:
    """arXiv 2402.01528 prints these two; the constant is their line, and the device must not add to
    it."""
    step = forward_s(build("eager"), catalogue.load(name).architecture, context=512)
    assert 1e3 * step.value == pytest.approx(published_ms, rel=0.002)
    assert 0.25 < step.relative_std < 0.35 and step.source == "modelled"


def test_eager_mode_is_flat_in_width_until_the_device_is_the_slower(
    build: Callable[..., LatencyModel],
) -> None:
    model = build("eager")
    narrow, wide = (
        forward_s(model, TINY.replace(hidden_size=h), context=99).value for h in (512, 2048)
    )
    assert narrow == pytest.approx(wide)
    huge = Architecture(16384, 53248, 6, 128, 8, 128, 32000)
    device = forward_s(build("graph"), huge, context=99).value
    assert forward_s(model, huge, context=99).value == pytest.approx(
        device, rel=0.02
    )  # 3.2e9 weights a layer: 4 ms


def test_eager_all_reduces_are_measured_where_the_table_has_them(
    build: Callable[..., LatencyModel],
) -> None:
    rows = [
        Measurement(
            "all_reduce",
            freeze_shape({"elements": e, "ranks": 4}),
            "bfloat16",
            "eager",
            "cold",
            (45e-6,),
        )
        for e in (128, 65536)
    ]
    without, with_rows = build("eager"), build("eager", rows=rows)
    added = 2 * 6 * (45e-6 - constants()["eager"]["all_reduce_s"])
    times = [forward_s(model, TINY, context=99, ranks=4).value for model in (without, with_rows)]
    assert times[1] - times[0] == pytest.approx(added)


def test_float16_runs_on_bfloat16_rows_and_float8_everywhere_but_in_the_head(
    build: Callable[..., LatencyModel],
) -> None:
    assert (
        forward_s(build(dtype="float16"), TINY).value
        == forward_s(build(dtype="bfloat16"), TINY).value
    )
    assert TableOps.asked == [("float16", "graph"), ("bfloat16", "graph")]
    TableOps.asked = []
    half = build(dtype="bfloat16").composed_.ops_terms(
        build(dtype="bfloat16").composed_.pass_ops(TINY, [Part(1, 1, 99)])
    )
    eighth = build(dtype="float8_e4m3fn", dtypes=("bfloat16", "float8_e4m3fn")).composed_.ops_terms(
        build(dtype="float8_e4m3fn", dtypes=("bfloat16", "float8_e4m3fn")).composed_.pass_ops(
            TINY, [Part(1, 1, 99)]
        )
    )
    assert eighth["gemm"][0] < half["gemm"][0] and eighth["attention"][0] <= half["attention"][0]
    assert eighth["head"] == half["head"] and eighth["elementwise"] == half["elementwise"]


@pytest.mark.parametrize("engine", [None, "sglang"])
def test_what_an_engine_adds_to_a_step(
    build: Callable[..., LatencyModel], engine: str | None
) -> None:
    model, plain = build(engine=engine), build()
    workload = Workload(32, 99, 2, mode="graph")
    extra = engine_rounds(engine).plain.at(32).value if engine else 0.0
    assert (extra > 0) == (engine == "sglang")
    assert model.decode_s(TINY, workload).value == pytest.approx(
        plain.decode_s(TINY, workload).value + extra
    )
    assert model.verify_s(TINY, workload, 4) == plain.verify_s(TINY, workload, 4)
    round_ = model.round(TINY, TINY, workload, 4)
    assert round_.verify_s == model.verify_s(TINY, workload, 4) and round_.draft_s == model.draft_s(
        TINY, workload, 4
    )
    costs = engine_rounds(engine).costs if engine else None
    added = (
        costs.round_s.value + 4 * costs.token_s.value + 32 * costs.sequence_s.value
        if costs
        else 0.0
    )
    assert round_.overhead_s.value == pytest.approx(
        added, rel=0.01
    )  # the mean of the larger of two uncertain times
    assert round_.bound == ("gpu" if engine else None)


def test_the_summary_says_that_it_is_composed(build: Callable[..., LatencyModel]) -> None:
    assert build().summary()["pass"] == "composed"
    eager = build("eager").summary()
    assert "not measured" in eager["constants"]["source"] and eager["engines"] == {}
    assert build(engine="vllm").summary()["engine"]


def test_every_constant_names_its_source() -> None:
    known = constants()
    assert len(known["eager"]["source"]) > 40
    assert all(
        len(known["graph"][f"{name}_source"]) > 40
        for name in ("pass", "layer", "sync", "relative_std")
    )


def test_a_cpu_is_never_composed() -> None:
    profile = table()
    profile.device["kind"] = "cpu"
    assert not composed.composable(profile, "bfloat16") and composed.composable(table(), "float16")
    assert not composed.composable(table(), "float32")


@pytest.mark.parametrize("name", ["llama-7b", "llama-3.1-8b", "sheared-llama-1.3b"])
def test_roofline_and_tables_of_an_ideal_gpu_agree(
    build: Callable[..., LatencyModel], name: str
) -> None:
    """On kernels that follow the roofline's own law (0.8 of the bandwidth, 3 us) the two may differ
    in small kernels only."""
    arch = catalogue.load(name).architecture
    model = forward_s(build(), arch, context=512).value
    roofline = forward_s(
        RooflineLatency(load_device("a100"), "bfloat16", "graph"), arch, context=512
    ).value
    assert roofline / model == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize(("device", "low_ms", "high_ms"), [("a100", 20, 32), ("h200", 10, 18)])
def test_shipped_profiles_price_llama_65b_on_four_gpus(
    device: str, low_ms: float, high_ms: float
) -> None:
    """65 B weights in 16 bits over 4 GPUs take 16 ms on A100 and 6.8 ms on H200 at the datasheet's
    bandwidth; none gets there."""
    model = LatencyModel(Profile.load(find_profile(load_device(device).key)), "float16", "graph")
    target, workload = (
        catalogue.load("llama-65b").architecture,
        Workload(1, 512, 4, "float16", "graph"),
    )
    decode, verify = model.decode_s(target, workload), model.verify_s(target, workload, 8)
    assert low_ms < 1e3 * decode.value < high_ms and 0.03 < decode.relative_std < 0.2
    assert 1.0 < verify.value / decode.value < 1.2  # the weights are read once either way
    deep, wide = (
        model.draft_s(catalogue.load(n).architecture, workload, 8).value
        for n in ("sheared-llama-1.3b", "wide-796m")
    )
    assert 1.3 < deep / wide < 3.0  # about the same bytes, a fifth of the layers


def test_a_step_in_fp8_pays_for_quantising_where_the_engine_launches_it() -> None:
    profile = Profile.load(find_profile("h100-sxm5-80gb"))
    target, part = catalogue.load("qwen3-8b").architecture, Part(4, 1, 350)
    passes = composed.ComposedPass(profile, "float8_e4m3fn", "graph")
    wait = composed.all_reduce_wait(None, None)
    plain, more = (
        passes.serving(engine_rounds(name), "float8_e4m3fn", wait, "bfloat16")
        .step_s(target, [part])
        .value
        for name in ("vllm", "sglang")
    )
    gemms = 4 * target.num_hidden_layers  # the head runs in 16 bits
    assert more - plain == pytest.approx(gemms * 5.1e-6)
    in_16_bits = passes.serving(engine_rounds("sglang"), "bfloat16", wait, "bfloat16")
    assert in_16_bits._quantise == (0.0, 0.0)
