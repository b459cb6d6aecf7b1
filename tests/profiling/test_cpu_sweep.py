"""Which points a sweep plans, in which order; and a real sweep of tiny things."""

from __future__ import annotations

import dataclasses
import math
from itertools import chain

import pytest
import torch

from archsearch import profiles
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import Attention, Elementwise, Gemm, forward_ops
from archsearch.engines.measure import overhead
from archsearch.engines.measure.overhead import DRAFT_LAYERS, measure_overhead
from archsearch.profiles import Measurement, Profile, freeze_shape
from archsearch.profiling import cpu_sweep as sweeps
from archsearch.profiling.cpu_sweep import check_points, measure_points, plan, sweep
from archsearch.profiling.points import Point, interleaved, spread, together
from archsearch.search.space import load_space
from tests.doubles.world import TINY, tiny_drafts, write_profile

TARGET = Architecture(576, 1536, 30, 9, 3, 64, 49152, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def drafts() -> list[Architecture]:
    return load_space("demo").sample(TARGET, 200)


@pytest.fixture(scope="module")
def points(drafts: list[Architecture]) -> list[Point]:
    return plan(drafts, TARGET, "bfloat16")


# -- the plan
# --------------------------------------------------------------------------------------------------


def test_target_gemms_at_every_m(points: list[Point]) -> None:
    planned = {point.op for point in points if point.kind == "gemm" and point.cache == "cold"}
    for tokens in range(1, 10):
        needed = {
            op
            for op in forward_ops(TARGET, batch=1, tokens=tokens, context=64)
            if isinstance(op, Gemm)
        }
        assert needed and all(op.m == tokens for op in needed)
        assert needed <= planned


def test_target_attention_and_whole_passes(points: list[Point]) -> None:
    attention = {point.op for point in points if isinstance(point.op, Attention)}
    for tokens in (1, 2, 9):
        for context in sweeps.CONTEXTS:
            assert Attention(1, tokens, context, 9, 3, 64) in attention
    whole = [point for point in points if point.kind == "forward" and point.arch == TARGET]
    assert {point.tokens for point in whole} >= {1, 2, 3, 5, 7, 9}


def test_no_point_twice(points: list[Point]) -> None:
    keys = [(point.kind, freeze_shape(point.shape()), point.cache) for point in points]
    assert len(keys) == len(set(keys))


def test_every_kind_and_every_elementwise_name(points: list[Point]) -> None:
    assert {point.kind for point in points} == {
        "gemm",
        "attention",
        "elementwise",
        "layer",
        "forward",
    }
    assert {point.op.name for point in points if isinstance(point.op, Elementwise)} == {
        "norm",
        "rope",
        "act",
        "add",
        "embed",
    }


def test_a_target_that_does_not_fit_is_not_run_whole(drafts: list[Architecture]) -> None:
    small_memory = plan(drafts, TARGET, "bfloat16", memory_bytes=100e6)
    assert not any(point.kind == "forward" and point.arch == TARGET for point in small_memory)
    assert any(isinstance(point.op, Gemm) and point.op.m == 9 for point in small_memory)


def test_without_a_target_only_drafts(drafts: list[Architecture]) -> None:
    assert all(
        point.op.m <= 2 for point in plan(drafts, None, "bfloat16") if isinstance(point.op, Gemm)
    )


def test_every_prefix_holds_the_same_share_of_each_kind(points: list[Point]) -> None:
    total = {
        kind: sum(point.kind == kind for point in points)
        for kind in ("gemm", "attention", "elementwise", "layer")
    }
    for cut in (len(points) // 4, len(points) // 2):
        for kind, count in total.items():
            share = sum(point.kind == kind for point in points[:cut])
            assert abs(share - count * cut / len(points)) <= 1.5, (kind, cut)


def test_interleave_keeps_order_within_a_group() -> None:
    def group(kind: str, count: int) -> list[Point]:
        return [Point(kind, "warm", context=i) for i in range(count)]

    merged = interleaved(group("a", 8), group("b", 4), [], group("c", 2))
    assert len(merged) == 14
    for kind in "abc":
        order = [point.context for point in merged if point.kind == kind]
        assert order == sorted(order)
    assert [sum(point.kind == kind for point in merged[:7]) for kind in "abc"] == [4, 2, 1]


def test_models_stand_together_at_the_place_of_their_first_point(points: list[Point]) -> None:
    kept = list(chain(*together(points)))
    assert len(kept) == len(points) and set(kept) == set(points)
    seen: list[Architecture] = []
    for point in kept:
        if point.kind == "forward" and (not seen or seen[-1] != point.arch):
            assert point.arch not in seen
            seen.append(point.arch)


def test_spread_takes_the_extremes() -> None:
    chosen = spread(list(range(100)), lambda x: [float(x)], 3)
    assert len(chosen) == 3 and {0, 99} <= set(chosen)
    assert spread([1, 1, 2], lambda x: [x], 5) == [1, 2]


# -- the check's points
# --------------------------------------------------------------------------------------------------


def test_check_points_are_unseen(drafts: list[Architecture]) -> None:
    profile = write_profile(None, drafts, TARGET)
    measured = {row.shape for row in profile.select("forward", "float32", "eager")}
    shapes = {
        tuple(sorted((k, v) for k, v in shape if k not in ("batch", "tokens", "context")))
        for shape in measured
    }
    points = check_points(drafts, TARGET, profile, "float32", 12)
    steps = [point for point in points if point.arch != TARGET]
    verify = [point for point in points if point.arch == TARGET]
    assert len(steps) == 24 and len({point.arch for point in steps}) == 12
    assert {point.cache for point in steps} == {"warm", "cold"}
    for point in steps:
        assert tuple(sorted(point.arch.to_dict().items())) not in shapes
    assert len(verify) == 6
    assert all(
        2 <= point.tokens <= 9 and freeze_shape(point.shape()) not in measured for point in verify
    )
    assert check_points(drafts, TARGET, profile, "float32", 12) == points
    assert check_points(drafts, TARGET, profile, "float32", 12, seed=1) != points


def test_check_points_when_everything_is_seen() -> None:
    drafts = tiny_drafts()[:5]
    profile = write_profile(None, drafts, None)
    assert check_points(drafts, None, profile, "float32", 12) == []


# -- measuring
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench() -> sweeps.CpuBench:
    """A bench with a small cache to be larger than, so that it is quick."""
    torch.set_num_threads(1)
    return sweeps.CpuBench(Profile({"key": "cpu-test"}, {"torch": "x"}), 1 << 20)


def few_points() -> list[Point]:
    arch = TINY.replace(num_hidden_layers=1)
    return [
        Point("gemm", "cold", Gemm(2, 64, 64)),
        Point("gemm", "warm", Gemm(1, 64, 64)),
        Point("attention", "cold", Attention(1, 3, 40, 4, 2, 16)),
        Point("elementwise", "warm", Elementwise("norm", 64)),
        Point("layer", "cold", arch=arch.replace(num_hidden_layers=3), context=16),
        Point("forward", "warm", arch=arch, context=16),
        Point("forward", "cold", arch=arch, context=16),
    ]


def fresh(bench: sweeps.CpuBench, tmp_path) -> sweeps.CpuBench:
    """The bench on an empty profile with a folder."""
    bench.profile = Profile(
        {"key": "cpu-test"}, {"torch": "x"}, bench.profile.probe_reference_s, folder=tmp_path
    )
    bench.profile.save_header()
    return bench


def test_a_sweep_records_every_point_and_skips_them_the_next_time(
    bench: sweeps.CpuBench, tmp_path
) -> None:
    fresh(bench, tmp_path)
    points = few_points()
    assert sweep(bench, {"float32": points}, budget_s=60.0) == len(points)
    loaded = Profile.load(tmp_path)
    assert {(row.kind, row.cache) for row in loaded.rows.values()} == {
        (p.kind, p.cache) for p in points
    }
    assert all(0 < row.median_s < 1.0 and row.slowdown > 0 for row in loaded.rows.values())
    # Whatever this machine did to the first sweep, rows that were steady are not measured again.
    steady = [
        dataclasses.replace(row, times_s=(row.median_s,) * 5) for row in bench.profile.rows.values()
    ]
    bench.profile.add(steady)
    assert sweep(bench, {"float32": points}, budget_s=60.0) == 0
    assert (
        sweep(bench, {"bfloat16": points[:1]}, budget_s=60.0) == 1
    )  # another dtype is another row


def test_grossly_noisy_rows_are_measured_again(bench: sweeps.CpuBench, tmp_path) -> None:
    fresh(bench, tmp_path)
    points = few_points()[:3]
    wild, calm = (1.0, 2.0, 3.0, 4.0, 5.0), (3.0, 3.0, 3.0)
    for point, times in zip(points, (wild, calm, calm), strict=True):
        row = Measurement(
            point.kind, freeze_shape(point.shape()), "float32", "eager", point.cache, times
        )
        assert row.grossly_noisy == (times is wild)
        bench.profile.record(row)
    assert sweep(bench, {"float32": points}, budget_s=60.0) == 1
    assert bench.profile.select("gemm", "float32", "eager", "cold")[0].median_s < 1.0
    assert bench.profile.select("gemm", "float32", "eager", "warm")[0].median_s == 3.0


def test_no_budget_no_rows(bench: sweeps.CpuBench, tmp_path) -> None:
    fresh(bench, tmp_path)
    assert sweep(bench, {"float32": few_points()}, budget_s=0.0) == 0 and not bench.profile.rows


def test_noise_is_measured_again_and_the_steadiest_kept(
    bench: sweeps.CpuBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    wild = Measurement("gemm", (), "float32", "eager", "cold", (1.0, 2.0, 3.0, 4.0, 5.0))
    better = Measurement("gemm", (), "float32", "eager", "cold", (1.0, 1.5, 2.0, 2.5, 3.0))
    calm = Measurement("gemm", (), "float32", "eager", "cold", (1.0, 1.0, 1.0))
    for answers, expected, calls in (
        ([wild, calm], calm, 2),
        ([calm], calm, 1),
        ([wild, better, wild], better, 3),
    ):
        left = list(answers)
        monkeypatch.setattr(bench, "measure", lambda *args, left=left: left.pop(0))
        assert bench.measure_again_if_noisy(few_points()[0], "float32") is expected
        assert len(answers) - len(left) == calls


def test_measure_points_pools_rounds_and_records_nothing(bench: sweeps.CpuBench, tmp_path) -> None:
    fresh(bench, tmp_path)
    points = few_points()[-2:]
    single = bench.measure(points[0], "float32")
    found = list(measure_points(bench, points, "float32", rounds=2))
    assert [point for point, _ in found] == points
    assert all(len(row.times_s) >= 2 * 5 for _, row in found) and len(single.times_s) >= 5
    assert not bench.profile.rows


@pytest.mark.parametrize("vocab", [320, pytest.param(2000, marks=pytest.mark.slow(own=True))])
def test_engine_overhead_gives_a_row_per_gamma_and_depth(
    bench: sweeps.CpuBench, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a vocabulary smaller than the prompts' usual range of ids. A tiny model's passes are
    quicker in the engine, whose caches they never leave, than alone: its differences are below zero
    by more than noise explains, which refuses rows elsewhere (test_measure_overhead.py), not
    here."""
    expected = [(0, 0), (1, DRAFT_LAYERS[0]), (4, DRAFT_LAYERS[0]), (1, DRAFT_LAYERS[1])]
    monkeypatch.setattr(overhead, "CASES", expected)
    monkeypatch.setattr(profiles, "REFUSED_STDS", math.inf)
    rows = measure_overhead(bench, TINY.replace(vocab_size=vocab), "float32", rounds=1)
    assert [(row.sizes()["gamma"], row.sizes()["draft_layers"]) for row in rows] == expected
    for row in rows:
        assert (
            row.kind == "engine"
            and row.sizes()["engine"] == "transformers"
            and row.sizes()["vocab_size"] == vocab
        )
        assert all(math.isfinite(t) for t in row.times_s) and row.std_s > 0
