"""Short trainings: a trained shape is answered by what it showed, an untrained one by the prior
fitted to the others."""

from __future__ import annotations

import math

import pytest

from archsearch.acceptance.estimator import AcceptanceContext, AcceptanceObservation
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.acceptance.short_training import ExtrapolatedAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.estimate import Estimate
from archsearch.speedup import logit, sigmoid

TARGET = Architecture(576, 1536, 30, 9, 3, 64, 49152, tie_word_embeddings=True)
CONTEXT = AcceptanceContext(target=TARGET, trained_tokens=256_000.0)
SHAPES = [TARGET.replace(num_hidden_layers=n, draft_vocab_size=2048) for n in (1, 2, 3, 4, 6)]
LEVELS = {SHAPES[0]: (0.0, 0.05), SHAPES[1]: (0.6, 0.05), SHAPES[3]: (0.4, 0.05)}
GROWN = Estimate(0.5, 0.2, "modelled")


def rung(levels=LEVELS, **settings) -> ExtrapolatedAcceptance:
    return ExtrapolatedAcceptance(levels, GROWN, CONTEXT, **settings)


def test_a_trained_shape_is_answered_by_what_it_showed() -> None:
    found = rung().predict(SHAPES[1], CONTEXT).alpha
    own, fitted = 0.6 + GROWN.value, logit(rung().prior_.predict(SHAPES[1], CONTEXT).alpha.value)
    assert found.source == "modelled" and min(own, fitted) < logit(found.value) < max(own, fitted)
    exact = rung({**LEVELS, SHAPES[1]: (0.6, 1e-6)}).predict(SHAPES[1], CONTEXT).alpha
    assert logit(exact.value) == pytest.approx(
        own, abs=1e-3
    )  # a measurement without error is believed wholly
    nothing = rung({**LEVELS, SHAPES[1]: (0.6, 100.0)})
    assert nothing.predict(SHAPES[1], CONTEXT).alpha.value == pytest.approx(
        nothing.prior_.predict(SHAPES[1], CONTEXT).alpha.value, abs=1e-4
    )


def test_an_untrained_shape_is_the_prior_sharpened_by_the_others() -> None:
    for shape in (SHAPES[2], SHAPES[4]):
        found, before = (
            rung().predict(shape, CONTEXT).alpha,
            PriorAcceptance().predict(shape, CONTEXT).alpha,
        )
        assert found.std < before.std
        assert found.value == pytest.approx(rung().prior_.predict(shape, CONTEXT).alpha.value)
    assert rung({}).predict(SHAPES[2], CONTEXT) == PriorAcceptance().predict(SHAPES[2], CONTEXT)


def test_growth_and_the_sample_of_texts_are_no_part_of_a_difference() -> None:
    first, second = SHAPES[0], SHAPES[1]
    alone, shared = rung(), rung(sampling_std=0.03)
    assert shared.predict(first, CONTEXT).alpha.std == pytest.approx(
        math.hypot(alone.predict(first, CONTEXT).alpha.std, 0.03)
    )
    surer = ExtrapolatedAcceptance(LEVELS, Estimate(0.5, 0.0, "modelled"), CONTEXT)
    gaps = [
        estimator.difference_std(first, second, CONTEXT) for estimator in (alone, shared, surer)
    ]
    assert gaps[0] == gaps[1] == gaps[2] < rung({}).difference_std(first, second, CONTEXT)


def test_what_was_measured_at_the_end_stands_for_the_short_training() -> None:
    end = AcceptanceObservation(SHAPES[1], Estimate(sigmoid(2.0), 0.01, "measured"), CONTEXT)
    estimator = rung()
    before = estimator.prior_.predict(SHAPES[2], CONTEXT)
    assert estimator.fit([end]) is estimator
    others = {shape: level for shape, level in LEVELS.items() if shape != SHAPES[1]}
    assert (
        estimator.prior_.predict(SHAPES[2], CONTEXT)
        == rung(others).fit([end]).prior_.predict(SHAPES[2], CONTEXT)
        != before
    )
    assert estimator.fit([]).prior_.predict(SHAPES[2], CONTEXT) == before
