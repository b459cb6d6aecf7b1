import math

import pytest

from archsearch.acceptance.distilled import DistilledAcceptance
from archsearch.acceptance.estimator import AcceptanceContext, AcceptanceObservation
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.estimate import Estimate
from archsearch.training.curves import AlphaPoint, extrapolate

TARGET = Architecture(576, 1536, 30, 9, 3, 64, 49152, tie_word_embeddings=True)
CONTEXT = AcceptanceContext(target=TARGET)
SHAPES = [TARGET.replace(num_hidden_layers=n, draft_vocab_size=2048) for n in (1, 2, 3, 4, 6)]
BUDGET = 256_000


def curve(last, points=4):
    return [
        AlphaPoint(tokens, last - 0.06 * (points - 1 - i)) for i, tokens in enumerate((16_000, 26_000, 40_000, 64_000)[:points])
    ]


CURVES = {SHAPES[0]: curve(0.50), SHAPES[1]: curve(0.56), SHAPES[3]: curve(0.60)}


def test_a_trained_shape_is_answered_by_its_own_curve():
    rung = DistilledAcceptance(CURVES, BUDGET, CONTEXT)
    found = rung.predict(SHAPES[1], CONTEXT).alpha
    assert found == rung.trained_[SHAPES[1]] and found.source == "modelled"
    assert found.value > 0.56 and found.std < PriorAcceptance().predict(SHAPES[1], CONTEXT).alpha.std
    # A shape says nothing about the slope it is itself carried on with: its answer is from the other curves' prior.
    one = {SHAPES[1]: CURVES[SHAPES[1]]}
    assert DistilledAcceptance(one, BUDGET, CONTEXT).trained_[SHAPES[1]] == extrapolate(one[SHAPES[1]], BUDGET)


def test_an_untrained_shape_is_the_prior_sharpened_by_the_curves():
    rung, plain = DistilledAcceptance(CURVES, BUDGET, CONTEXT), PriorAcceptance()
    for shape in (SHAPES[2], SHAPES[4]):
        found, before = rung.predict(shape, CONTEXT).alpha, plain.predict(shape, CONTEXT).alpha
        assert found.std < before.std
        assert found == rung.prior_.predict(shape, CONTEXT).alpha
    nothing = DistilledAcceptance({}, BUDGET, CONTEXT)
    assert nothing.predict(SHAPES[2], CONTEXT) == plain.predict(SHAPES[2], CONTEXT)


def test_what_is_measured_at_the_end_replaces_the_curve():
    rung = DistilledAcceptance(CURVES, BUDGET, CONTEXT)
    measured = AcceptanceObservation(SHAPES[1], Estimate(0.71, 0.01, "measured"), CONTEXT)
    assert rung.fit([measured]) is rung
    assert rung.predict(SHAPES[1], CONTEXT).alpha == measured.alpha
    rung.fit([])
    assert rung.predict(SHAPES[1], CONTEXT).alpha == rung.trained_[SHAPES[1]]


def test_another_temperature_moves_the_curves_alpha_by_the_priors_term_with_doubt():
    rung = DistilledAcceptance(CURVES, BUDGET, CONTEXT)
    hot = AcceptanceContext(target=TARGET, temperature=1.0)
    cold, warm = rung.predict(SHAPES[1], CONTEXT).alpha, rung.predict(SHAPES[1], hot).alpha
    assert warm.value < cold.value and warm.std > cold.std


def test_differences_between_trained_shapes_do_not_know_the_sample_of_texts():
    alone, shared = DistilledAcceptance(CURVES, BUDGET, CONTEXT), DistilledAcceptance(CURVES, BUDGET, CONTEXT, sampling_std=0.03)
    first, second = SHAPES[0], SHAPES[1]
    assert shared.predict(first, CONTEXT).alpha.std == pytest.approx(math.hypot(alone.predict(first, CONTEXT).alpha.std, 0.03))
    assert shared.difference_std(first, second, CONTEXT) == alone.difference_std(first, second, CONTEXT) > 0
    assert alone.difference_std(first, first, CONTEXT) == 0
    assert alone.difference_std(first, SHAPES[4], CONTEXT) == pytest.approx(alone.difference_std(SHAPES[4], first, CONTEXT))


def test_the_given_prior_is_left_alone():
    prior = PriorAcceptance()
    before = prior.predict(SHAPES[2], CONTEXT)
    DistilledAcceptance(CURVES, BUDGET, CONTEXT, prior=prior)
    assert prior.predict(SHAPES[2], CONTEXT) == before
