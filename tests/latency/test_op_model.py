"""OpModel on GPU tables whose law is known: what it predicts between rows, and what it says where
there are none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from archsearch.architecture.ops import AllReduce, Attention, Elementwise, Gemm
from archsearch.errors import MissingDataError
from archsearch.latency.ops import ELEMENTWISE_S, OpModel, gpu_gemm_sizes, op_of, seen_pairs
from archsearch.profiles import Measurement, Profile, freeze_shape

BANDWIDTH, PEAK, PROCESSORS = 2e12, 3e14, 108
DEVICE = {
    "key": "toy",
    "kind": "gpu",
    "bandwidth_bytes_per_s": BANDWIDTH,
    "flops_per_s": {"bfloat16": PEAK, "float16": PEAK},
    "multiprocessors": PROCESSORS,
    "link_bytes_per_s": 100e9,
}
SIZES = (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288)


def gemm_s(op: Gemm) -> float:
    """3 us and the weights, read in waves of 128 wide tiles at 85 % of the bandwidth when the waves
    are full."""
    tiles = math.ceil(op.n / 128)
    full = math.ceil(tiles / PROCESSORS) * PROCESSORS / tiles
    return 3e-6 + 2 * op.n * op.k / (0.85 * BANDWIDTH) * min(full, 1.4) ** 0.5


def attention_s(op: Attention) -> float:
    """The cache once, the arithmetic of the pairs under the mask, 8 us."""
    work = 4 * op.batch * op.q_heads * seen_pairs(op) * op.head_dim
    return 8e-6 + max(2 * op.kv_elements() / (0.7 * BANDWIDTH), work / (0.6 * PEAK))


def row(
    op, seconds: float, *, mode: str = "graph", cache: str = "cold", dtype: str = "bfloat16"
) -> Measurement:
    shape = {name: getattr(op, name) for name in op.__dataclass_fields__}
    return Measurement(op.kind, freeze_shape(shape), dtype, mode, cache, (seconds,))


def gemms() -> list[Gemm]:
    return [Gemm(m, n, k) for m in (1, 4, 16) for n in SIZES for k in SIZES]


def decodes() -> list[Attention]:
    return [
        Attention(batch, 1, length - 1, heads * group, heads, 128)
        for batch in (1, 4, 16)
        for length in (128, 512, 2048, 8192)
        for heads in (1, 4, 8)
        for group in (1, 4, 16)
    ]


def prompts() -> list[Attention]:
    return [
        Attention(batch, length, 0, heads * 4, heads, 128, window)
        for batch in (1, 8)
        for length in (64, 512, 2048, 8192)
        for heads in (2, 8)
        for window in (None, 256)
    ]


def profile_of(rows: list[Measurement], **device: object) -> Profile:
    profile = Profile(DEVICE | device, {"torch": "0"})
    profile.add(rows)
    return profile


def noisy(seed: int = 0) -> list[Measurement]:
    """Rows of the law with 1 % noise; small GEMMs warm, as importers mark them."""
    generator = np.random.default_rng(seed)
    rows = []
    for op in [*gemms(), *decodes(), *prompts()]:
        seconds = (gemm_s if isinstance(op, Gemm) else attention_s)(op) * math.exp(
            0.01 * generator.standard_normal()
        )
        warm = isinstance(op, Gemm) and op.n * op.k * 2 < 4e6
        rows.append(row(op, seconds, cache="warm" if warm else "cold"))
    for ranks in (2, 4):
        rows += [
            row(AllReduce(2**power, ranks), 4e-6 + 2**power * ranks / 1e12)
            for power in range(7, 28)
        ]
    return rows


def with_rows(model: OpModel, rows: list[Measurement]) -> OpModel:
    grown = Profile(model.profile.device, model.profile.stack, model.profile.probe_reference_s)
    grown.add([*model.profile.rows.values(), *rows])
    return OpModel(grown, model.dtype, model.mode, like=model)


def stds_of(model: OpModel, ops: list) -> np.ndarray:
    return np.array([model.op_s(op, True)[1] for op in ops])


@pytest.fixture(scope="module")
def model() -> OpModel:
    return OpModel(profile_of(noisy()), "bfloat16", "graph")


def test_gemms_between_the_rows_within_a_few_percent_and_an_honest_std(model: OpModel) -> None:
    asked = [
        Gemm(m, n, k)
        for m in (1, 3, 9)
        for n in (640, 1280, 2560, 5120, 7168, 11008)
        for k in (768, 2560, 5120)
    ]
    errors = np.array([math.log(model.op_s(op, True)[0] / gemm_s(op)) for op in asked])
    stds = stds_of(model, asked)
    assert np.median(np.abs(errors)) < 0.03 and np.abs(errors).max() < 0.2
    assert np.mean(np.abs(errors) <= 2 * stds) >= 0.9 and np.median(stds) < 0.10


def test_decode_attention_between_the_rows(model: OpModel) -> None:
    asked = [
        Attention(b, 1, length, heads * 4, heads, 128)
        for b in (1, 2, 8)
        for length in (300, 1500, 6000)
        for heads in (2, 8)
    ]
    errors = [abs(model.op_s(op, True)[0] / attention_s(op) - 1) for op in asked]
    assert np.median(errors) < 0.05 and max(errors) < 0.3


def test_a_window_cuts_what_is_read(model: OpModel) -> None:
    assert model.op_s(Attention(4, 1, 8000, 32, 8, 128, 1024), True) == model.op_s(
        Attention(4, 1, 1023, 32, 8, 128), True
    )


def test_what_was_measured_is_looked_up_in_either_state(model: OpModel) -> None:
    for measured in list(model.profile.rows.values())[::17]:
        if measured.kind in ("gemm", "attention"):
            op = op_of(measured)
            for cold in (False, True):
                seconds, std = model.op_s(op, cold)
                assert seconds == measured.median_s and 0.01 <= std <= 0.05


def test_many_at_once_is_one_by_one(model: OpModel) -> None:
    asked = [Gemm(2, 700 + 64 * i, 900) for i in range(40)] + [
        Attention(1, 5, 400 + i, 32, 8, 128) for i in range(10)
    ]
    fresh = OpModel(model.profile, "bfloat16", "graph", like=model)
    single = [fresh.op_s(op, True) for op in asked]
    again = OpModel(model.profile, "bfloat16", "graph", like=model)
    again.prepare(asked, True)
    together = [again.op_s(op, True) for op in asked]
    assert [s for s, _ in single] == pytest.approx([s for s, _ in together], rel=1e-9)
    assert stds_of(again, asked) == pytest.approx([std for _, std in single], rel=1e-6)


def test_verification_reads_the_cache_once_and_is_marked_unsure(model: OpModel) -> None:
    for batch in (1, 8):
        for tokens in (2, 5, 9):
            op = Attention(batch, tokens, 8000, 32, 8, 128)
            one, _ = model.op_s(Attention(batch, 1, 8000, 32, 8, 128), True)
            seconds, std = model.op_s(op, True)
            assert seconds == pytest.approx(attention_s(op), rel=0.25) and std >= 0.25
            assert 0.8 * one < seconds < 1.6 * one
    assert model.source(Attention(1, 5, 8000, 32, 8, 128)) == "modelled"


def test_many_tokens_against_a_cache_are_bound_by_arithmetic(model: OpModel) -> None:
    op = Attention(8, 2048, 6144, 32, 8, 128)
    assert (
        attention_s(op) > 20 * 2 * op.kv_elements() / BANDWIDTH
    )  # the law's case is one of arithmetic
    assert model.op_s(op, True)[0] == pytest.approx(attention_s(op), rel=0.3)


def test_without_prompt_rows_the_datasheet_bounds_them(model: OpModel) -> None:
    bare = OpModel(
        profile_of([r for r in noisy() if r.kind == "gemm" or r.sizes().get("tokens") == 1]),
        "bfloat16",
        "graph",
    )
    op = Attention(8, 4096, 0, 32, 8, 128)
    assert bare.op_s(op, True)[0] == pytest.approx(
        4 * 8 * 4096 * 4097 / 2 * 32 * 128 / (0.5 * PEAK)
    )
    first = Attention(1, 1, 0, 32, 8, 128)  # the first token of all: nothing cached
    assert bare.op_s(first, True)[0] == pytest.approx(8e-6, rel=0.2)


def test_verification_rows_of_its_own_are_used(model: OpModel) -> None:
    """A profile that measured verification (here: twice the law) is believed over the model of
    it."""
    asked = Attention(3, 5, 3000, 32, 8, 128)
    own = [
        row(op, 2 * attention_s(op))
        for batch in (1, 4)
        for tokens in (3, 5, 9)
        for op in (
            Attention(batch, tokens, 1000, 32, 8, 128),
            Attention(batch, tokens, 5000, 32, 8, 128),
        )
    ]
    seconds, std = with_rows(model, own).op_s(asked, True)
    assert seconds == pytest.approx(2 * attention_s(asked), rel=0.2) and std < 0.25


def test_rows_added_make_it_surer(model: OpModel) -> None:
    far = Gemm(1, 400_000, 100_000)
    before = stds_of(model, [far])[0]
    near = [Gemm(1, n, k) for n in (380_000, 420_000) for k in (90_000, 110_000)]
    assert stds_of(with_rows(model, [row(op, gemm_s(op)) for op in near]), [far])[0] < 0.9 * before
    assert stds_of(model, [Gemm(1, 2100, 2048)])[0] < 0.9 * before


def test_small_kernels_without_rows_cost_a_constant_and_their_bytes(model: OpModel) -> None:
    for name, (in_graph, _, moved) in ELEMENTWISE_S.items():
        seconds, std = model.op_s(Elementwise(name, 10**6), True)
        assert seconds == pytest.approx(in_graph + moved * 2e6 / (0.8 * BANDWIDTH)) and std == 0.30
        assert model.source(Elementwise(name, 10**6)) == "modelled"
    rows = [row(Elementwise("norm", size), 1e-6 + 1e-11 * size) for size in (1000, 10_000, 100_000)]
    measured = with_rows(model, rows)
    assert measured.op_s(Elementwise("norm", 50_000), True)[0] == pytest.approx(1.5e-6, rel=1e-3)
    assert measured.source(Elementwise("norm", 50_000)) == "measured"


def test_all_reduce(model: OpModel) -> None:
    """Rows; between rows; beyond the last in proportion; other rank counts by 2 (r - 1) / r; none:
    link and latency."""
    law = 4e-6 + 2**20 * 4 / 1e12
    assert model.op_s(AllReduce(2**20, 4), False)[0] == pytest.approx(law)
    assert model.op_s(AllReduce(3 * 2**19, 4), False)[0] == pytest.approx(
        4e-6 + 3 * 2**19 * 4 / 1e12, rel=0.05
    )
    last = model.op_s(AllReduce(2**27, 4), False)[0]
    assert model.op_s(AllReduce(2**29, 4), False)[0] == pytest.approx(4 * last)
    eight, std = model.op_s(AllReduce(2**20, 8), False)
    assert eight == pytest.approx(law * (7 / 8) / (3 / 4)) and std > 0.2
    bare = OpModel(profile_of([r for r in noisy() if r.kind != "all_reduce"]), "bfloat16", "graph")
    assert bare.op_s(AllReduce(10**6, 2), False) == (
        pytest.approx(2 * 0.5 * 2e6 / 100e9 + 5e-6),
        0.40,
    )


def test_float16_is_answered_from_bfloat16_rows_and_fp8_is_not(model: OpModel) -> None:
    stand_in = OpModel(model.profile, "float16", "graph")
    op = Gemm(4, 4096, 4096)
    assert (
        stand_in.op_s(op, True)[0] == model.op_s(op, True)[0]
        and stand_in.op_s(op, True)[1] > model.op_s(op, True)[1]
    )
    with pytest.raises(MissingDataError, match="gemm.*float8_e4m3fn"):
        OpModel(model.profile, "float8_e4m3fn", "graph")


def test_warm_and_cold_where_both_were_measured() -> None:
    rows = noisy()
    rows += [
        row(op, 0.5 * gemm_s(op), cache="warm")
        for op in gemms()
        if op.n * op.k * 2 >= 4e6 and op.k <= 4096
    ]
    model = OpModel(profile_of(rows), "bfloat16", "graph")
    op = Gemm(4, 5120, 2560)
    assert model.op_s(op, True)[0] == pytest.approx(gemm_s(op), rel=0.15)
    assert model.op_s(op, False)[0] == pytest.approx(0.5 * gemm_s(op), rel=0.25)


@pytest.mark.parametrize(("kind", "word"), [("gemm", "gemm"), ("attention", "attention")])
def test_too_few_rows_say_which(kind: str, word: str) -> None:
    with pytest.raises(
        MissingDataError, match=f"too few {word} rows for bfloat16 in graph"
    ) as caught:
        OpModel(profile_of([r for r in noisy() if r.kind != kind]), "bfloat16", "graph")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("op", "pairs"),
    [
        (Attention(1, 1, 9, 1, 1, 64), 10),
        (Attention(1, 3, 0, 1, 1, 64), 1 + 2 + 3),
        (Attention(1, 3, 5, 1, 1, 64), 6 + 7 + 8),
        (Attention(1, 4, 0, 1, 1, 64, 2), 1 + 2 + 2 + 2),
        (Attention(1, 4, 3, 1, 1, 64, 5), 4 + 5 + 5 + 5),
        (Attention(1, 2, 90, 1, 1, 64, 5), 5 + 5),
    ],
)
def test_seen_pairs(op: Attention, pairs: int) -> None:
    assert seen_pairs(op) == pairs


def test_a_full_wave_leaves_nothing_idle() -> None:
    """108 tiles of 64 fill 108 multiprocessors; one more tile needs a second wave that is nearly
    empty, which counts as half."""
    place = gpu_gemm_sizes([Gemm(1, 64 * 108, 4096), Gemm(1, 64 * 109, 4096)], 108)[1]
    assert place[0, 3] == pytest.approx(0.0) and place[1, 3] == pytest.approx(
        math.log(2 * 108 / 109), rel=1e-6
    )
