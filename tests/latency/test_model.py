"""LatencyModel on a profile whose cost law is known: what it predicts for shapes it has not
seen."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import weight_bytes_per_pass
from archsearch.architecture.ops import AllReduce, Attention, Elementwise, Gemm, Part, model_pass
from archsearch.drafters.heads import Eagle3
from archsearch.errors import MissingDataError
from archsearch.latency.model import LatencyModel
from archsearch.pipeline.latency import choose_latency
from archsearch.profiles import ForwardShape, Measurement, Profile, freeze_shape
from archsearch.report.phrases import latency_warning
from archsearch.search.space import load_space
from archsearch.workload import Workload, WorkloadRequest
from tests.doubles.passes import forward_s
from tests.doubles.published_heads import first_pass
from tests.doubles.world import CostLaw, write_profile

LAW = CostLaw()
TARGET = Architecture(576, 1536, 30, 9, 3, 64, 49152, tie_word_embeddings=True)
OUTLIERS, WILD = 3, 4


@pytest.fixture(scope="module")
def drafts() -> list[Architecture]:
    return load_space("demo").sample(TARGET, 400)


@pytest.fixture(scope="module")
def profile(drafts: list[Architecture], tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Written through a folder and read back."""
    folder = tmp_path_factory.mktemp("profile") / "cpu" / "stack"
    write_profile(folder, drafts, TARGET, LAW, outliers=OUTLIERS, noisy_rows=WILD)
    return Profile.load(folder)


@pytest.fixture(scope="module")
def model(profile: Profile) -> LatencyModel:
    return LatencyModel(profile, LAW.dtype, engine="transformers")


@pytest.fixture(scope="module")
def unseen(profile: Profile) -> list[Architecture]:
    seen = {
        ForwardShape.of(row).architecture for row in profile.select("forward", LAW.dtype, "eager")
    }
    shapes = load_space("demo").sample(TARGET, 80, seed=99)
    return [shape for shape in shapes if shape not in seen]


def only(profile: Profile, keep) -> Profile:
    """A copy with the rows for which `keep(row)`."""
    copy = Profile(profile.device, profile.stack, profile.probe_reference_s)
    copy.add(row for row in profile.rows.values() if keep(row))
    return copy


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("context", [96, 700])
def test_unseen_drafts_within_a_few_percent_and_an_honest_std(
    model: LatencyModel, unseen: list[Architecture], cold: bool, context: int
) -> None:
    assert len(unseen) > 40
    errors, within = [], []
    for arch in unseen:
        predicted, true = (
            forward_s(model, arch, context=context, cold=cold),
            LAW.forward_s(arch, context=context, cold=cold),
        )
        errors.append(abs(predicted.value / true - 1))
        within.append(abs(predicted.value - true) <= 2 * predicted.std)
        assert 0.003 < predicted.relative_std < 0.10 and predicted.source == "modelled"
    assert statistics.median(errors) < 0.02 and max(errors) < 0.08
    assert statistics.fmean(within) >= 0.85


@pytest.mark.parametrize("gamma", range(1, 9))
def test_verification_of_the_target(model: LatencyModel, gamma: int) -> None:
    predicted = model.verify_s(TARGET, Workload(context_len=384, dtype=LAW.dtype), gamma)
    true = LAW.forward_s(TARGET, tokens=gamma + 1, context=384)
    assert (
        predicted.value == pytest.approx(true, rel=0.05)
        and abs(predicted.value - true) < 3 * predicted.std
    )


def test_outliers_are_recognised_and_wild_rows_left_out(
    profile: Profile, model: LatencyModel
) -> None:
    rows = profile.select("forward", LAW.dtype, "eager")
    assert sum(row.grossly_noisy for row in rows) == WILD
    off = 0
    for row in rows:
        sizes = row.sizes()
        tokens, context = sizes.pop("tokens"), sizes.pop("context")
        sizes.pop("batch")
        true = LAW.forward_s(
            Architecture(**sizes), tokens=tokens, context=context, cold=row.cache == "cold"
        )
        off += not row.grossly_noisy and row.median_s > 2.5 * true
    assert off == OUTLIERS
    assert len(model.loo_) == len(rows) - WILD - OUTLIERS


def test_outliers_and_wild_rows_do_not_move_the_rest(
    drafts: list[Architecture], model: LatencyModel, unseen
) -> None:
    clean = LatencyModel(write_profile(None, drafts, TARGET, LAW), LAW.dtype)
    ratios = [forward_s(model, arch).value / forward_s(clean, arch).value for arch in unseen]
    misses = [abs(ratio - 1) for ratio in ratios]
    # Which optimum the residual's fit ends in depends on the processor's arithmetic: a single shape
    # may be a little further off.
    assert statistics.median(misses) < 0.01
    assert statistics.quantiles(misses, n=20)[-1] < 0.03
    assert max(misses) < 0.04


def test_cold_is_never_faster_than_a_loop(model: LatencyModel, unseen: list[Architecture]) -> None:
    for arch in unseen:
        cold, loop = forward_s(model, arch, cold=True).value, forward_s(model, arch).value
        assert cold >= 0.98 * loop  # the correction that each gets apart may differ by the noise
        if weight_bytes_per_pass(arch, 4) < 16 * 2**20:
            assert cold > 1.3 * loop


def test_the_cache_is_found(model: LatencyModel) -> None:
    """The law's cache holds 32 MiB: what is learnt says the same for small and large passes."""
    assert model.cache_.cold_share(4 * 2**20) < 0.1 < 0.9 < model.cache_.cold_share(256 * 2**20)
    assert model.cache_.cold_share(32 * 2**20) == pytest.approx(0.5, abs=0.3)


def test_what_was_measured_is_looked_up(profile: Profile, model: LatencyModel) -> None:
    for kind, make in (("gemm", Gemm), ("attention", Attention)):
        for cache in ("warm", "cold"):
            rows = profile.select(kind, LAW.dtype, "eager", cache)
            assert rows
            for row in rows:
                assert model.ops.op_s(make(**row.sizes()), cache == "cold")[0] == row.median_s


def test_ops_between_measured_ones(model: LatencyModel) -> None:
    for op in (Gemm(1, 1000, 576), Gemm(1, 5000, 700), Attention(1, 1, 400, 9, 3, 64)):
        for cold in (False, True):
            seconds, std = model.ops.op_s(op, cold)
            assert seconds == pytest.approx(LAW.op_s(op, cold), rel=0.06) and 0 < std < 0.2
    norm = Elementwise("norm", 3 * 576)
    assert model.ops.op_s(norm, False)[0] == pytest.approx(LAW.op_s(norm, False), rel=0.05)


def test_draft_is_one_cold_step_and_then_a_loop(
    model: LatencyModel, unseen: list[Architecture]
) -> None:
    workload = Workload(context_len=256, dtype=LAW.dtype)
    for arch in unseen[:5]:
        first, later = forward_s(model, arch, cold=True), forward_s(model, arch)
        assert model.draft_s(arch, workload, 1) == first
        assert model.draft_s(arch, workload, 5).value == pytest.approx(
            first.value + 4 * later.value
        )


def test_what_a_layer_costs_in_the_engine_is_told_from_two_depths(
    drafts: list[Architecture], tmp_path: Path
) -> None:
    """Rows of drafts of 1 and 6 layers, made with 0.2 ms per layer and token: draft_s grows by it,
    added_s does not."""
    write_profile(tmp_path / "p", drafts, TARGET, LAW)
    profile = Profile.load(tmp_path / "p")
    plain = LatencyModel(profile, LAW.dtype, engine="transformers")
    profile.rows = {
        key: row
        for key, row in profile.rows.items()
        if row.kind != "engine" or row.sizes()["gamma"] == 0
    }
    for gamma in (1, 2, 4, 7):
        for layers in (1, 6):
            seconds = LAW.round_s + gamma * (LAW.token_s + 0.2e-3 * layers)
            shape = {
                "engine": "transformers",
                "gamma": gamma,
                "draft_layers": layers,
                "vocab_size": TARGET.vocab_size,
            }
            profile.add(
                [Measurement("engine", freeze_shape(shape), LAW.dtype, "eager", "warm", (seconds,))]
            )
    deep = LatencyModel(profile, LAW.dtype, engine="transformers")
    draft, workload = drafts[0], Workload(context_len=128, dtype=LAW.dtype)
    added = deep.draft_s(draft, workload, 5).value - plain.draft_s(draft, workload, 5).value
    assert added == pytest.approx(5 * draft.num_hidden_layers * 0.2e-3, rel=1e-6)
    assert deep.added_s(TARGET, workload, 5).value == pytest.approx(
        LAW.round_s + 5 * LAW.token_s, rel=1e-6
    )


def test_engine_rows_give_the_overhead(profile: Profile, model: LatencyModel) -> None:
    workload = Workload(context_len=256, dtype=LAW.dtype)
    assert {name for name, _ in model.added_} == {"transformers"}
    for gamma in (1, 3, 8):
        extra = model.added_s(TARGET, workload, gamma)
        assert (
            extra.value == pytest.approx(LAW.round_s + gamma * LAW.token_s)
            and extra.source == "measured"
        )
    alone = LatencyModel(profile, LAW.dtype)
    assert alone.added_s(TARGET, workload, 3).value == 0.0
    assert model.decode_s(TARGET, workload).value - alone.decode_s(
        TARGET, workload
    ).value == pytest.approx(LAW.plain_s)


@pytest.mark.parametrize("kind", ["gemm", "attention", "elementwise", "forward"])
def test_too_few_rows_say_which_and_what_to_do(profile: Profile, kind: str) -> None:
    words = {"forward": "0 whole-forward rows"}.get(kind, f"too few {kind} rows")
    with pytest.raises(MissingDataError, match=f"{words}.*float32.*archsearch profile") as caught:
        LatencyModel(only(profile, lambda row: row.kind != kind), LAW.dtype)
    assert "\n" not in str(caught.value)


def test_another_dtype_or_mode_is_missing(profile: Profile) -> None:
    with pytest.raises(MissingDataError, match="bfloat16"):
        LatencyModel(profile, "bfloat16")
    with pytest.raises(MissingDataError, match="graph"):
        LatencyModel(profile, LAW.dtype, "graph")


def test_tensor_parallel_needs_all_reduce_rows(model: LatencyModel) -> None:
    with pytest.raises(MissingDataError, match="all_reduce"):
        model.ops.op_s(AllReduce(576, 2), False)


def test_without_layer_rows_the_passes_alone_decide(
    profile: Profile, unseen: list[Architecture]
) -> None:
    model = LatencyModel(only(profile, lambda row: row.kind != "layer"), LAW.dtype)
    errors = [abs(forward_s(model, arch).value / LAW.forward_s(arch) - 1) for arch in unseen]
    assert statistics.median(errors) < 0.03


def test_a_gpu_of_which_whole_passes_were_measured_is_fitted(profile: Profile) -> None:
    """Kernel rows under CUDA graphs beside them change nothing."""
    copy = only(profile, lambda row: True)
    copy.device = profile.device | {"kind": "gpu"}
    shape = freeze_shape({"m": 1, "n": 64, "k": 64})
    copy.add([Measurement("gemm", shape, LAW.dtype, "graph", "cold", (3e-6,))])
    assert LatencyModel(copy, LAW.dtype, "eager").summary()["pass"] == "fitted"


def test_summary_and_a_row_that_came_later(
    profile: Profile, model: LatencyModel, tmp_path: Path
) -> None:
    """The summary is plain data; a row recorded again replaces the old one in the next fit."""
    summary = model.summary()
    assert summary["rows"] == len(profile.rows) and summary["leave_one_out_median"] < 0.02
    assert summary["pass"] == "fitted" and model.composed_ is None
    assert summary["engines"][f"transformers (vocabulary {TARGET.vocab_size})"][
        "round_s"
    ] == pytest.approx(LAW.round_s)
    copy = only(profile, lambda row: True)
    copy.folder = tmp_path
    row = profile.select("gemm", LAW.dtype, "eager", "cold")[0]
    copy.record(Measurement(row.kind, row.shape, row.dtype, row.mode, row.cache, (0.5, 0.5, 0.5)))
    assert LatencyModel(copy, LAW.dtype).ops.op_s(Gemm(**row.sizes()), True)[0] == 0.5


def test_a_list_of_ops_is_priced_by_the_coefficients_of_whole_models(model: LatencyModel) -> None:
    """On a CPU a head has no kernels in graphs to be composed of: it costs what as much of a model
    would.

    A whole model given by its ops comes out as the model does, up to what is learnt of whole
    shapes; an EAGLE-3 head between a draft of one layer and one of four.
    """
    whole = model.ops_s(model_pass(TARGET, [Part(1, 4, 96)]))
    assert whole.value == pytest.approx(
        forward_s(model, TARGET, tokens=4, context=96, cold=True).value, rel=0.05
    )
    head = first_pass(Eagle3.usual(TARGET), 1, 3, 96, fused=False)
    like = TARGET.replace(draft_vocab_size=32_000, tie_word_embeddings=False)
    layers = [
        forward_s(
            model, like.replace(num_hidden_layers=n), tokens=4, context=96, cold=True, logits=1
        ).value
        for n in (1, 4)
    ]
    assert layers[0] < model.ops_s(head).value < layers[1]
    assert model.ops_s(head, cold=False).value <= model.ops_s(head).value


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_what_a_busy_machine_measured_says_so(
    drafts: list[Architecture], tmp_path: Path, share: float
) -> None:
    folder = tmp_path / "cpu" / "stack"
    written = write_profile(folder, drafts, TARGET, LAW)
    rows = list(written.rows.values())
    noisy = [replace(row, times_s=(1.0, 2.0, 3.0)) for row in rows[: round(share * len(rows))]]
    for row in noisy:
        written.record(row)
    asked = WorkloadRequest(gpu="cpu", profile=folder, engine="transformers")
    words = choose_latency(asked, TARGET)[0].words
    said = latency_warning(words, "t").startswith("made on a busy machine, ")
    assert said == ("noisy: profile again" in words) == (share > 0.25)
