"""Passes as an engine runs them: learnt from rows of a known law, asked at shapes and batches that
were not measured."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import body_parameters, kv_cache_bytes, mlp_params
from archsearch.architecture.ops import Part
from archsearch.errors import MissingDataError
from archsearch.latency.engine_passes import EnginePasses, known_engines
from archsearch.latency.model import LatencyModel
from archsearch.profiles import Measurement, PassShape, Profile, freeze_shape
from archsearch.workload import Workload
from tests.doubles.world import write_profile

TARGET = Architecture(576, 1536, 30, 9, 3, 64, 49152, tie_word_embeddings=True)
DRAFTS = [
    Architecture(256, 512, 1, 4, 2, 64, 49152),
    Architecture(256, 1024, 4, 4, 4, 64, 49152),
    Architecture(576, 1152, 2, 6, 2, 64, 49152),
    Architecture(768, 2048, 1, 8, 2, 64, 49152),
    Architecture(384, 1536, 8, 6, 3, 64, 49152),
    Architecture(1024, 2048, 2, 8, 2, 64, 49152),
]
UNSEEN = Architecture(512, 1536, 3, 8, 2, 64, 49152)


def law_s(arch: Architecture, batch: int, tokens: int, context: int, is_target: bool) -> float:
    """1 ms a pass, 0.1 ms a layer, 10 GB/s of weights and cache, 200 GFLOP/s, 20 us a token."""
    head = arch.head_rows * arch.hidden_size
    rows = batch * tokens
    moved = 4 * (body_parameters(arch) + head) + kv_cache_bytes(arch, context + tokens, 4, batch)
    flops = 2 * body_parameters(arch) * rows + 2 * head * (rows if is_target else batch)
    return 1e-3 + 1e-4 * arch.num_hidden_layers + moved / 10e9 + flops / 200e9 + 2e-5 * rows


def rest_s(gamma: int, batch: int) -> float:
    return (
        4e-3 + 1e-3 * gamma + 5e-4 * batch + 1e-4 * gamma * batch if gamma else 2e-3 + 3e-4 * batch
    )


def profile_of(engine: str = "vllm", dtype: str = "float32", first: int = 2) -> Profile:
    """Rows of that law; the first pass of a draft in a round reads gamma + `first` tokens."""
    rng = random.Random(0)
    profile = write_profile(None, DRAFTS, None)
    rows = []

    def add(kind: str, shape: dict, cache: str, seconds: float) -> None:
        times = tuple(seconds * math.exp(rng.gauss(0.0, 0.01)) for _ in range(9))
        rows.append(
            Measurement(
                kind, freeze_shape({"engine": engine, **shape}), dtype, "eager", cache, times
            )
        )

    def add_pass(arch: Architecture, role: str, batch: int, tokens: int, cache: str) -> None:
        shape = {
            "role": role,
            "architecture": arch.to_dict(),
            "batch": batch,
            "tokens": tokens,
            "context": 192,
        }
        add("pass", shape, cache, law_s(arch, batch, tokens, 192, role == "target"))

    for batch in (1, 2, 4, 8):
        add_pass(TARGET, "target", batch, 1, "cold")
        add("rest", {"gamma": 0, "batch": batch, "first_tokens": 0}, "warm", rest_s(0, batch))
    for number, draft in enumerate(DRAFTS):
        for batch, gamma in zip(
            (1, 2, 4, 8), ((1, 3, 5, 2), (4, 2, 1, 3), (6, 5, 3, 1))[number % 3], strict=True
        ):
            add_pass(TARGET, "target", batch, gamma + 1, "cold")
            add_pass(draft, "draft", batch, gamma + first, "cold")
            add_pass(draft, "draft", batch, 1, "warm")
            add(
                "rest",
                {"gamma": gamma, "batch": batch, "first_tokens": gamma + first},
                "warm",
                rest_s(gamma, batch),
            )
    profile.add(rows)
    return profile


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_of()


def test_unseen_shapes_batches_and_gammas(profile: Profile) -> None:
    passes = EnginePasses(profile, "float32", "eager", "vllm")
    for batch in (1, 3, 6):
        for tokens in (1, 4, 7):
            part = Part(batch, tokens, 192)
            found = passes.forward_s(TARGET, part, cold=True, is_target=True)
            assert found.value == pytest.approx(law_s(TARGET, batch, tokens, 192, True), rel=0.06)
        found = passes.forward_s(UNSEEN, Part(batch, 1, 192))
        assert found.value == pytest.approx(law_s(UNSEEN, batch, 1, 192, False), rel=0.06)
        assert found.source == "modelled" and found.std > 0
        assert passes.rest_.round_s(4, batch).value == pytest.approx(rest_s(4, batch), rel=0.03)
        assert passes.rest_.plain_s(batch).value == pytest.approx(rest_s(0, batch), rel=0.03)


def test_a_jump_of_the_kernels_is_believed_where_it_was_measured() -> None:
    profile = profile_of()
    for key, row in list(profile.rows.items()):
        sizes = row.sizes()
        if row.kind == "pass" and sizes["role"] == "target" and sizes["tokens"] == 2:
            slow = tuple(1.3 * seconds for seconds in row.times_s)
            profile.rows[key] = Measurement(
                row.kind, row.shape, row.dtype, row.mode, row.cache, slow
            )
    passes = EnginePasses(profile, "float32", "eager", "vllm")
    found = passes.forward_s(TARGET, Part(1, 2, 200), cold=True, is_target=True)
    assert found.value == pytest.approx(1.3 * law_s(TARGET, 1, 2, 200, True), rel=0.06)
    between = passes.forward_s(TARGET, Part(1, 3, 200), cold=True, is_target=True)
    assert between.value < found.value and found.std > 0


def test_what_was_learnt_is_told(profile: Profile) -> None:
    summary = EnginePasses(profile, "float32", "eager", "vllm").to_dict()
    assert summary["rows"] == len([row for row in profile.rows.values() if row.kind == "pass"])
    assert summary["leave_one_out_median"] < 0.03
    # vLLM's draft reads the whole verified block first: gamma + 2 tokens here.
    assert summary["first_pass"]["constant"] == pytest.approx(2.0) and summary["first_pass"][
        "slope"
    ] == pytest.approx(1.0)


def test_the_latency_model_answers_for_the_engine(profile: Profile) -> None:
    assert known_engines(profile, "float32", "eager") == ("vllm",)
    model = LatencyModel(profile, "float32", engine="vllm")
    workload = Workload(batch_size=3, context_len=192, dtype="float32")
    assert model.decode_s(TARGET, workload).value == pytest.approx(
        law_s(TARGET, 3, 1, 192, True) + rest_s(0, 3), rel=0.06
    )
    assert model.verify_s(TARGET, workload, 4).value == pytest.approx(
        law_s(TARGET, 3, 5, 192, True), rel=0.06
    )
    expected = law_s(UNSEEN, 3, 6, 192, False) + 3 * law_s(UNSEEN, 3, 1, 192, False)
    assert model.draft_s(UNSEEN, workload, 4).value == pytest.approx(expected, rel=0.06)
    assert model.round(TARGET, UNSEEN, workload, 4).overhead_s.value == pytest.approx(
        rest_s(4, 3), rel=0.03
    )
    assert model.summary()["engine_passes"]["engine"] == "vllm"


def test_a_trimmed_head_costs_such_an_engine_the_full_one(profile: Profile) -> None:
    model = LatencyModel(profile, "float32", engine="vllm")
    workload = Workload(context_len=192, dtype="float32")
    trimmed = UNSEEN.replace(draft_vocab_size=2048)
    assert model.draft_s(trimmed, workload, 3) == model.draft_s(UNSEEN, workload, 3)
    ours = LatencyModel(profile, "float32", engine="transformers")
    assert ours.draft_s(trimmed, workload, 3).value < ours.draft_s(UNSEEN, workload, 3).value


def test_another_engine_does_not_hear_of_it(profile: Profile) -> None:
    assert LatencyModel(profile, "float32", engine="openvino").engine_ is None
    assert LatencyModel(profile, "float32", engine="transformers").engine_ is None


def test_a_round_in_llama_cpp_is_priced_as_it_is_run_in_a_precision_that_torch_has_not() -> None:
    profile = profile_of("llama.cpp", "q8_0", first=1)
    model = LatencyModel(profile, "q8_0", engine="llama.cpp")
    workload = Workload(context_len=192, dtype="q8_0")
    for gamma in (1, 4):
        # gamma passes that draft, and one over the gamma + 1 tokens that were verified
        drafting = law_s(UNSEEN, 1, gamma + 1, 192, False) + gamma * law_s(UNSEEN, 1, 1, 192, False)
        time = model.round(TARGET, UNSEEN, workload, gamma)
        assert time.draft_s.value == pytest.approx(drafting, rel=0.06)
        whole = drafting + law_s(TARGET, 1, gamma + 1, 192, True) + rest_s(gamma, 1)
        assert time.round_s.value == pytest.approx(whole, rel=0.05)
    assert model.summary()["pass"] == "engine" and model.summary()["engine_passes"]["rows"]
    with pytest.raises(MissingDataError):
        LatencyModel(profile, "q8_0", engine="openvino")


@pytest.mark.parametrize("layers", [1, 3])
def test_the_last_ffn_of_llama_cpp_runs_for_rows_whose_logits_are_asked(layers: int) -> None:
    def seconds(arch: Architecture, batch: int, tokens: int, is_target: bool) -> float:
        """1 ms, 10 GB/s of weights, 20 GFLOP/s: several tokens are dear."""
        body, head = body_parameters(arch), arch.head_rows * arch.hidden_size
        rows, asked = batch * tokens, batch * tokens if is_target else batch
        flops = 2 * ((body - mlp_params(arch)) * rows + (mlp_params(arch) + head) * asked)
        return 1e-3 + (body + head) / 10e9 + flops / 20e9

    profile = profile_of("llama.cpp", "q8_0", first=1)
    for key, row in profile.rows.items():
        if row.kind == "pass":
            shape = PassShape.of(row)
            one = seconds(shape.architecture, shape.batch, shape.tokens, shape.role == "target")
            profile.rows[key] = replace(row, times_s=(one,) * 9)
    passes = EnginePasses(profile, "q8_0", "eager", "llama.cpp")
    unseen = Architecture(640, 2560, layers, 10, 2, 64, 49152)
    for tokens in (2, 5, 8):
        found = passes.forward_s(unseen, Part(1, tokens, 192), cold=True)
        assert found.value == pytest.approx(seconds(unseen, 1, tokens, False), rel=0.04)


def test_drafts_of_another_precision_are_priced_by_their_own_passes() -> None:
    profile, workload = profile_of("llama.cpp", "q8_0", first=1), Workload(dtype="q8_0")
    for row in list(profile.rows.values()):
        if row.kind == "pass":
            thrice = tuple(3.0 * seconds for seconds in row.times_s)
            own = Measurement(row.kind, row.shape, "float16", row.mode, row.cache, thrice)
            profile.add([own])
    same = LatencyModel(profile, "q8_0", engine="llama.cpp")
    other = same.with_drafts("float16")
    assert other.verify_s(TARGET, workload, 3) == same.verify_s(TARGET, workload, 3)
    factor = other.draft_s(UNSEEN, workload, 3).value / same.draft_s(UNSEEN, workload, 3).value
    assert factor == pytest.approx(3.0, rel=0.05)
    with pytest.raises(MissingDataError, match="holds no passes of llama.cpp in q4_0"):
        same.with_drafts("q4_0")
    same.engine_ = None  # as where the target's own passes were not measured
    with pytest.raises(MissingDataError, match="holds no passes of llama.cpp in q8_0"):
        same.with_drafts("float16")


def test_an_engine_that_was_not_profiled_catches_up_too(profile: Profile) -> None:
    workload = Workload(context_len=192, dtype="float32")
    other, theirs = (
        LatencyModel(profile, "float32", engine=name) for name in ("openvino", "llama.cpp")
    )
    assert theirs.engine_ is None
    _, later = theirs.draft_passes(UNSEEN, workload, 3)
    assert (
        theirs.draft_s(UNSEEN, workload, 3).value
        >= other.draft_s(UNSEEN, workload, 3).value + 0.9 * later.value
    )


def test_passes_over_several_tokens_in_llama_cpp_are_a_prior_until_they_were_measured(
    profile: Profile,
) -> None:
    workload = Workload(context_len=192, dtype="float32")
    model = LatencyModel(profile, "float32", engine="llama.cpp")
    one, five = (model.verify_s(TARGET, workload, gamma) for gamma in (0, 4))
    assert one == LatencyModel(profile, "float32", engine="openvino").verify_s(TARGET, workload, 0)
    assert five.value == pytest.approx(5**0.6 * one.value) and five.source == "prior"
    # 2.1 to 4.6 passes over one token were measured for five (a Xeon in F16, a Zen 3 in Q4_1)
    low, high = five.value - 2.0 * five.std, five.value + 3.0 * five.std
    assert low < 2.1 * one.value and 4.6 * one.value < high
    first, later = model.draft_passes(UNSEEN, workload, 4)  # its head computes one row
    assert later.value < first.value < 5**0.6 * later.value
