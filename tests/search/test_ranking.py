"""Inside a group that cannot be told apart what exists leads, then what needs nothing, then the
cheapest."""

from __future__ import annotations

from dataclasses import replace

from archsearch.architecture.architecture import Architecture
from archsearch.needs import NOTHING, Needs
from archsearch.search.objective import Score
from archsearch.search.ranking import effort, led_by_need

DRAFT = Architecture(576, 1536, 2, 9, 3, 64, 49152)
DEAR = Needs("training", tokens=1e9, text_hours=24.0)
CHEAP = Needs("training", tokens=1e7, text_hours=1.0)
FOUND = Needs("exists", "org/draft")


def faster(score: Score, times: float, needs: Needs | None) -> Score:
    speedup = replace(score.speedup, value=times * score.speedup.value)
    return replace(score, speedup=speedup, needs=needs)


def test_what_exists_leads_its_group_and_no_other(make_scorer):
    score = make_scorer()(DRAFT)
    dear, found, cheap = (
        faster(score, 1.3, DEAR),
        faster(score, 1.0, FOUND),
        faster(score, 1.2, CHEAP),
    )
    behind = faster(score, 0.5, NOTHING)
    assert led_by_need([[dear, cheap, found], [behind]]) == [found, dear, cheap, behind]
    assert led_by_need([[dear, cheap], [found, behind]]) == [cheap, dear, found, behind]


def test_what_exists_does_not_lead_where_a_better_one_exists_behind_its_group(make_scorer):
    """A wide error alone ties it with the best."""
    score = make_scorer()(DRAFT)
    best, wide, sure = (
        faster(score, 1.6, DEAR),
        faster(score, 0.8, FOUND),
        faster(score, 1.4, FOUND),
    )
    assert led_by_need([[best, wide], [sure]]) == [best, wide, sure]
    worse = faster(score, 0.7, FOUND)
    assert led_by_need([[best, wide], [worse]]) == [wide, best, worse]


def test_what_is_assumed_leads_only_its_like(make_scorer):
    score = make_scorer()(DRAFT)
    trained, looked_up = faster(score, 1.3, DEAR), faster(score, 1.2, NOTHING)
    guessed = replace(looked_up, assumed="published for other drafts")
    assert led_by_need([[trained, looked_up]]) == [looked_up, trained]
    assert led_by_need([[trained, guessed]]) == [trained, guessed]
    assert led_by_need([[replace(trained, assumed="as above"), guessed]])[0] == guessed


def test_equals_stay_in_the_order_of_their_speed(make_scorer):
    score = make_scorer()(DRAFT)
    first, second = faster(score, 1.1, DEAR), faster(score, 1.0, DEAR)
    assert led_by_need([[second, first]]) == [first, second]


def test_what_nobody_priced_comes_last():
    assert sorted([None, DEAR, FOUND, CHEAP, NOTHING], key=effort) == [
        FOUND,
        NOTHING,
        CHEAP,
        DEAR,
        None,
    ]


def test_drafts_made_in_different_ways_are_less_surely_apart(make_scorer):
    """The terms of how a draft was made do not cancel between one that exists and one that is to be
    trained."""
    from archsearch.search.objective import difference_std, grouped

    scorer = make_scorer()
    one, other = scorer(DRAFT), scorer(DRAFT.replace(num_hidden_layers=4))
    shared = replace(scorer.context, training="shared")
    alike = difference_std(one, other, scorer.acceptance, lambda score: scorer.context)
    gap = 0.5 * alike + 0.5 * alike * 3  # apart by twice the std of drafts made alike
    far = replace(one, speedup=replace(one.speedup, value=other.speedup.value * 2.718281828**gap))
    assert len(grouped([far, other], scorer.acceptance, lambda score: scorer.context)) == 2
    mixed = grouped(
        [far, other], scorer.acceptance, lambda score: shared if score is other else scorer.context
    )
    assert len(mixed) == 1


def test_what_may_pay_leads_what_is_known_not_to(make_scorer):
    """A lookup of 1.23x (0.76 to 2.22), assumed, stood sixth below drafts of 0.99x to be trained."""
    score = make_scorer()(DRAFT)
    unit = 1.0 / score.speedup.value
    lookup = faster(score, 1.23 * unit, NOTHING)
    lookup = replace(
        lookup, speedup=replace(lookup.speedup, low=0.76, high=2.22), assumed="published for others"
    )
    poor, good = faster(score, 0.99 * unit, DEAR), faster(score, 1.02 * unit, DEAR)
    hopeless = replace(lookup, speedup=replace(lookup.speedup, value=0.9))
    keys = [item.ranked_by for item in (good, lookup, poor, hopeless)]
    assert keys == sorted(keys, reverse=True)
    assert led_by_need([[lookup, poor]]) == [lookup, poor]
    assert led_by_need([[lookup, good]])[0] == good
