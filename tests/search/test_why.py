"""Why rank 1 won: its rivals, and the terms that decide."""

from __future__ import annotations

import math

import pytest

from archsearch.acceptance.estimator import GivenAcceptance
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.search.objective import Scorer
from archsearch.search.ranking import LEAST_TOLD, rivals
from archsearch.workload import Workload

SHAPES = [
    Architecture(width, 2 * width, layers, width // 64, width // 64, 64, 49152)
    for width in (256, 384, 576)
    for layers in (1, 2, 4)
]


def test_rivals_differ_in_their_dimension_and_their_parts_add_up(smollm2, roofline) -> None:
    scorer = Scorer(smollm2, Workload(), roofline(), PriorAcceptance())
    scores = sorted(map(scorer, SHAPES), key=lambda score: -score.speedup.value)
    lead, found = scores[0], rivals(scorer, scores)
    assert [rival.dimension for rival in found] == ["hidden_size", "num_hidden_layers"]
    for rival in found:
        other = next(score for score in scores if score.architecture.label() == rival.label)
        assert getattr(other.architecture, rival.dimension) != getattr(
            lead.architecture, rival.dimension
        )
        better = [score for score in scores[1:] if score.speedup.value > other.speedup.value]
        assert all(
            getattr(s.architecture, rival.dimension) == getattr(lead.architecture, rival.dimension)
            for s in better
        )
        assert rival.tokens + rival.time == pytest.approx(
            math.log(lead.speedup.value / other.speedup.value)
        )
        assert rival.std > 0 and all(abs(term.difference) >= LEAST_TOLD for term in rival.terms)
        assert all(
            term.rows > 0 for term in rival.terms if term.term in ("size", "depth", "narrow")
        )


def test_where_nothing_is_believed_of_shapes_there_are_no_terms(smollm2, roofline) -> None:
    scorer = Scorer(smollm2, Workload(), roofline(), GivenAcceptance(0.7))
    scores = sorted(map(scorer, SHAPES), key=lambda score: -score.speedup.value)
    assert all(rival.terms == () for rival in rivals(scorer, scores))
    assert rivals(scorer, []) == [] and rivals(scorer, scores[:1]) == []
