"""Rounds of heads in an engine: a law learnt from some shapes and gammas, asked at others."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from archsearch.drafters.drafter import Drafter, RoundRows
from archsearch.drafters.heads import Eagle3, Medusa, PEagle
from archsearch.drafters.lookup import NGram
from archsearch.latency.model import LatencyModel
from archsearch.profiles import DraftedShape, Measurement, Profile, freeze_shape
from archsearch.workload import Workload
from tests.latency.test_engine_passes import TARGET, profile_of, rest_s


def head(kind: type[Eagle3] | type[PEagle], layers: int, rows: int) -> Drafter:
    usual = kind.usual(TARGET)
    return replace(
        usual,
        architecture=usual.architecture.replace(num_hidden_layers=layers, draft_vocab_size=rows),
    )


def beside_s(model: LatencyModel, drafter: Drafter, batch: int, gamma: int) -> float:
    """1.2 times the kernels, 3 ms, 0.4 ms a launched pass, 0.1 ms a request, 0.2 ms a token
    scattered into the vocabulary."""
    plan = drafter.plan(RoundRows(batch, 192, gamma, fused=False, scattered=True))
    lacking = 1.0 - drafter.architecture.head_rows / TARGET.vocab_size
    own = 3e-3 + 4e-4 * plan.launched + 1e-4 * batch + 2e-4 * batch * gamma * lacking
    return 1.2 * model.engine_.plan_s(plan) + own


def with_rounds(profile: Profile) -> Profile:
    model, rng = LatencyModel(profile, "float32", engine="vllm"), random.Random(0)
    measured: list[tuple[Drafter, tuple[int, ...]]] = [
        (head(Eagle3, 1, 8192), (2, 4, 1, 3)),
        (head(Eagle3, 3, 32768), (5, 2, 4, 1)),
        (head(PEagle, 2, 8192), (2, 2, 2, 2)),
        (head(PEagle, 5, 32768), (4, 4, 4, 4)),
        (Medusa(TARGET, 4, 1, True), (2, 2, 2, 2)),
        (Medusa(TARGET, 4, 1, True), (4, 4, 4, 4)),
        (NGram(TARGET), (2, 4, 1, 3)),
    ]
    for drafter, gammas in measured:
        for batch, gamma in zip((1, 2, 4, 8), gammas, strict=True):
            seconds = beside_s(model, drafter, batch, gamma)
            times = tuple(seconds * math.exp(rng.gauss(0.0, 0.01)) for _ in range(20))
            shape = freeze_shape(DraftedShape("vllm", drafter, gamma, batch, 192).to_dict())
            profile.add([Measurement("drafted", shape, "float32", "eager", "cold", times)])
    return profile


@pytest.fixture(scope="module")
def model() -> LatencyModel:
    return LatencyModel(with_rounds(profile_of()), "float32", engine="vllm")


@pytest.mark.parametrize(
    ("drafter", "gamma", "batch"),
    [
        (head(Eagle3, 2, 16384), 4, 1),
        (head(Eagle3, 1, 4096), 3, 4),
        (head(Eagle3, 1, 49152), 2, 6),
        (head(PEagle, 4, 4096), 3, 1),
        (Medusa(TARGET, 5, 1, True), 5, 3),
    ],
)
def test_unseen_heads_gammas_and_batches(
    model: LatencyModel, drafter: Drafter, gamma: int, batch: int
) -> None:
    workload = Workload(batch, 192, dtype="float32")
    verify = model.verify_s(TARGET, workload, gamma)
    time = model.round(TARGET, drafter, workload, gamma, verify)
    assert time.round_s.value - verify.value == pytest.approx(
        beside_s(model, drafter, batch, gamma), rel=0.06
    )
    assert time.round_s.std > 0 and time.draft_s.value > 0


def test_a_family_that_was_not_measured_is_the_sum_of_its_parts(model: LatencyModel) -> None:
    plain = LatencyModel(profile_of(), "float32", engine="vllm")
    drafter, workload = head(Eagle3, 2, 16384), Workload(1, 192, dtype="float32")
    assert (
        plain.drafted_s(drafter, RoundRows(1, 192, 3), drafter.plan(RoundRows(1, 192, 3))) is None
    )
    time = plain.round(TARGET, drafter, workload, 3)
    assert time.overhead_s.value == pytest.approx(rest_s(3, 1), rel=0.05)
    assert model.round(TARGET, drafter, workload, 3).overhead_s.value != pytest.approx(
        rest_s(3, 1), rel=0.05
    )


def test_lookup_that_drafts_in_some_rounds_lies_between(model: LatencyModel) -> None:
    workload = Workload(1, 192, dtype="float32")
    never, half, always = (
        model.round(TARGET, NGram(TARGET).with_share(share), workload, 3)
        for share in (0.0, 0.5, 1.0)
    )
    assert never.round_s.value < half.round_s.value < always.round_s.value
    assert never.round_s.value == pytest.approx(model.decode_s(TARGET, workload).value, rel=0.15)


def test_the_laws_are_told(model: LatencyModel) -> None:
    told = model.summary()["engine_passes"]["drafted"]
    assert set(told) == {"eagle3", "peagle", "medusa", "ngram"} and told["eagle3"][
        "kernels"
    ] == pytest.approx(1.2, rel=0.1)


def test_a_row_comes_back_from_disk() -> None:
    for drafter in (head(PEagle, 2, 8192), Medusa(TARGET, 4, 1, True), NGram(TARGET)):
        shape = DraftedShape("vllm", drafter, 3, 4, 192)
        row = Measurement(
            "drafted", freeze_shape(shape.to_dict()), "float32", "eager", "cold", (1e-3,)
        )
        assert DraftedShape.of(Measurement.from_dict(row.to_dict())) == shape
