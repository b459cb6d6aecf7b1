"""What every acceptance estimator must do, whichever rung of the ladder it is."""

from __future__ import annotations

import math

import pytest

from archsearch.acceptance.estimator import (
    Acceptance,
    AcceptanceContext,
    AcceptanceObservation,
    GivenAcceptance,
)
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.acceptance.short_training import ExtrapolatedAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.estimate import Estimate
from archsearch.speedup import drifting_positions

TARGET = Architecture(576, 1536, 30, 9, 3, 64, 49152, tie_word_embeddings=True)
SHAPES = [
    TARGET.replace(num_hidden_layers=n, draft_vocab_size=v) for n in (1, 2, 6) for v in (None, 8192)
]
CONTEXTS = [
    AcceptanceContext(),
    AcceptanceContext(TARGET, 1.0, 2048, "mixed"),
    AcceptanceContext(TARGET, domain="narrow"),
    AcceptanceContext(TARGET, domain="code", trained_tokens=1e6),
]
OBSERVED = [AcceptanceObservation(SHAPES[0], Estimate(0.4, 0.02, "measured"), CONTEXTS[2])]

GROWN = Estimate(0.4, 0.1, "modelled")
LEVELS = {SHAPES[0]: (0.1, 0.1), SHAPES[2]: (0.6, 0.05)}  # what two short trainings showed


@pytest.fixture(
    params=[
        lambda: PriorAcceptance(),
        lambda: GivenAcceptance(0.7),
        lambda: ExtrapolatedAcceptance({}, GROWN, CONTEXTS[2]),
        lambda: ExtrapolatedAcceptance(LEVELS, GROWN, CONTEXTS[2], sampling_std=0.01),
    ],
    ids=["prior", "given", "untrained", "short trainings"],
)
def make(request: pytest.FixtureRequest):
    return request.param


@pytest.mark.parametrize("context", CONTEXTS)
def test_answers_without_fitting(make, context: AcceptanceContext) -> None:
    for shape in SHAPES:
        found = make().predict(shape, context)
        assert isinstance(found, Acceptance)
        assert 0.0 <= found.alpha.value <= 1.0 and found.alpha.std >= 0.0
        # What was not measured may not say so; only an estimator that was made with trainings has
        # more than a prior.
        assert found.alpha.source in (
            ("modelled",) if getattr(make(), "levels", None) else ("prior", "given")
        )


def test_fit_returns_itself_and_starts_afresh(make) -> None:
    estimator = make()
    assert estimator.fit(OBSERVED) is estimator
    first = [estimator.predict(shape, CONTEXTS[2]) for shape in SHAPES]
    estimator.fit(OBSERVED)
    assert [estimator.predict(shape, CONTEXTS[2]) for shape in SHAPES] == first
    estimator.fit([])
    assert [estimator.predict(shape, CONTEXTS[2]) for shape in SHAPES] == [
        make().predict(shape, CONTEXTS[2]) for shape in SHAPES
    ]


def test_positions_and_tau_agree(make) -> None:
    for shape in SHAPES:
        found = make().predict(shape, CONTEXTS[2])
        for gamma in (1, 4, 8):
            positions = drifting_positions(found.alpha.value, found.drift.value, gamma)
            assert len(positions) == gamma and all(0.0 <= p <= 1.0 for p in positions)
            # tau: the bonus token, and each position that all before it let through.
            expected = 1.0 + sum(math.prod(positions[: i + 1]) for i in range(gamma))
            assert found.tau(gamma).value == pytest.approx(
                expected, rel=0.05
            )  # an uncertain alpha moves the mean of tau
            assert 1.0 <= found.tau(gamma).value <= gamma + 1


def test_difference_std(make) -> None:
    estimator = make()
    for context in CONTEXTS:
        for first in SHAPES:
            assert estimator.difference_std(first, first, context) == pytest.approx(0.0, abs=1e-9)
            for second in SHAPES:
                forth, back = (
                    estimator.difference_std(first, second, context),
                    estimator.difference_std(second, first, context),
                )
                assert forth >= 0 and forth == pytest.approx(back)
