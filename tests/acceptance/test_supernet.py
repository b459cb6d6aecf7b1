import numpy as np
import pytest

from archsearch.acceptance.estimator import AcceptanceContext, AcceptanceObservation
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.acceptance.supernet import SupernetAcceptance, check, earned, spearman
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.speedup import logit, sigmoid

TARGET = Architecture(576, 1536, 30, 9, 3, 64, 49152, tie_word_embeddings=True)
CONTEXT = AcceptanceContext(target=TARGET)
SHAPES = [TARGET.replace(num_hidden_layers=n, draft_vocab_size=2048) for n in (1, 2, 3, 4, 5, 6)]
SLICES = dict(zip(SHAPES, (0.30, 0.36, 0.40, 0.42, 0.45, 0.47), strict=True))


def test_spearman_against_known_answers():
    assert spearman([1, 2, 3, 4], [10, 20, 25, 99]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # 1 - 6 sum d^2 / (n (n^2 - 1)) with d = (1, -1, 0, 1, -1): 1 - 24 / 120
    assert spearman([1, 2, 3, 4, 5], [2, 1, 3, 5, 4]) == pytest.approx(0.8)
    # Ties share their rank: ranks (0.5, 0.5, 2) against (0, 1, 2) give cos = 1.5 / sqrt(1.5 * 2).
    assert spearman([7, 7, 9], [1, 2, 3]) == pytest.approx(1.5 / np.sqrt(3.0))
    assert spearman([1, 1, 1], [1, 2, 3]) == 0.0
    with pytest.raises(ArchsearchError, match="at least 2"):
        spearman([1], [1])


def test_the_rung_is_earned_only_by_ranking_better_than_the_prior_on_enough_anchors():
    assert earned(0.95, 0.80, anchors=8)
    assert not earned(0.70, 0.90, anchors=8), "what the sketch of eight minutes measured"
    assert not earned(0.90, 0.90, anchors=8), "a tie is free from the prior"
    assert not earned(1.00, 0.20, anchors=3)


def test_the_check_names_both_numbers_and_decides_by_them():
    alone = dict(zip(SHAPES, (0.50, 0.55, 0.60, 0.62, 0.66, 0.68), strict=True))
    backwards = dict(zip(SHAPES, (6.0, 5.0, 4.0, 3.0, 2.0, 1.0), strict=True))
    won = check(SLICES, backwards, alone)
    assert won.earned and won.supernet == pytest.approx(1.0) and won.prior == pytest.approx(-1.0) and won.anchors == 6
    assert "1.00 against -1.00" in won.reason and won.reason.startswith("supernet on")
    lost = check(backwards, SLICES, alone)
    assert not lost.earned and lost.reason.startswith("supernet off")
    few = check(SLICES, backwards, {shape: alone[shape] for shape in SHAPES[:3]})
    assert not few.earned and "3 anchors" in few.reason


def test_slices_are_carried_over_to_drafts_trained_alone():
    observed = [
        AcceptanceObservation(s, Estimate(sigmoid(0.9 * logit(SLICES[s]) + 0.8), 0.005, "measured"), CONTEXT) for s in SHAPES[:5]
    ]
    rung = SupernetAcceptance(SLICES)
    before = rung.predict(SHAPES[5], CONTEXT).alpha
    after = rung.fit(observed).predict(SHAPES[5], CONTEXT).alpha
    assert after.std < before.std and after.value == pytest.approx(sigmoid(0.9 * logit(0.47) + 0.8), abs=0.02)
    order = [rung.predict(s, CONTEXT).alpha.value for s in SHAPES]
    assert order == sorted(order)
    assert rung.difference_std(SHAPES[0], SHAPES[1], CONTEXT) < 0.25 and rung.difference_std(SHAPES[0], SHAPES[0], CONTEXT) == 0
    rung.fit([])
    assert rung.predict(SHAPES[5], CONTEXT).alpha == before


def test_shapes_without_a_slice_are_the_priors():
    wide = TARGET.replace(hidden_size=768, num_hidden_layers=2, draft_vocab_size=2048)
    rung, prior = SupernetAcceptance(SLICES), PriorAcceptance()
    assert rung.predict(wide, CONTEXT) == prior.predict(wide, CONTEXT)
    assert rung.difference_std(wide, SHAPES[0], CONTEXT) == prior.difference_std(wide, SHAPES[0], CONTEXT)
