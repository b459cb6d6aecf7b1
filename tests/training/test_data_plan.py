"""Distinct tokens and epochs: what a repeated text is worth, and which minutes write and which
train."""

import math

import pytest

from archsearch.errors import ArchsearchError
from archsearch.training.curves import (
    MEASURED,
    REPEATS,
    AlphaPoint,
    Supply,
    best_split,
    effective_tokens,
    extrapolate,
    promise,
    split_at,
    text_after,
)


def test_tokens_that_come_again_are_worth_less_and_less():
    assert effective_tokens(5_000, 10_000) == effective_tokens(5_000, 0) == 5_000
    values = [effective_tokens(epochs * 10_000, 10_000) for epochs in range(1, 80)]
    steps = [b - a for a, b in zip(values, values[1:], strict=False)]
    assert (
        values[0] == 10_000
        and all(b <= a for a, b in zip(steps, steps[1:], strict=False))
        and steps[0] < 10_000
    )
    assert values[-1] == pytest.approx((1 + REPEATS) * 10_000, rel=1e-5)
    # arXiv 2305.16264, equation 5, with R of 15: four epochs are nearly as good as new data.
    assert effective_tokens(40_000, 10_000, 15.0) == pytest.approx(
        10_000 * (1 + 15 * (1 - math.exp(-3 / 15)))
    )


def test_a_small_text_promises_less_than_a_large_one():
    points = [AlphaPoint(8_000, 0.3, False, 20_000), AlphaPoint(16_000, 0.38, False, 20_000)]
    small, large, endless = (
        extrapolate(points, 2_000_000, epoch_tokens=n).value for n in (20_000, 200_000, 0)
    )
    assert 0.38 < small < large < endless
    assert extrapolate(points, 4_000_000, epoch_tokens=20_000).value == pytest.approx(
        small, abs=0.002
    ), "epochs bring no more"
    assert MEASURED.curves


def test_sources_of_text_are_used_in_their_order():
    sources = [Supply("answers", 1000, 10), Supply("more", 500, 5, worth=0.5)]
    assert text_after(50, sources) == 500 and text_after(100, sources) == 1000
    assert (
        text_after(150, sources) == pytest.approx(1000 + 50 * 5 * 0.5)
        and text_after(1e9, sources) == 1250
    )
    assert text_after(10, [Supply("none", 0, 10), Supply("stuck", 10, 0)]) == 0


@pytest.mark.parametrize(("write", "train"), [(50, 4000), (400, 4000), (4000, 4000), (400, 500)])
def test_the_best_split_is_the_best_of_all(write, train):
    supplies = [Supply("answers", 60_000, write)]
    best = best_split(2000, supplies, train)
    others = [
        split_at(share * 2000, 2000, supplies, train) for share in (0.1, 0.25, 0.4, 0.55, 0.7, 0.85)
    ]
    assert best.effective >= max(other.effective for other in others)
    assert 0 < best.text_s < 2000 and best.text_s + best.train_s == pytest.approx(2000)


def test_where_there_is_text_enough_nothing_is_written():
    assert best_split(100, [Supply("answers", 1e6, 400)], 1000, epoch_tokens=1e6).text_s == 0
    nothing = best_split(100, [], 1000)
    assert nothing.effective == 0 and nothing.text_s == 0


def test_more_prompts_promise_more_acceptance_and_as_many_promise_what_was_seen():
    points = [
        AlphaPoint(t, a, False, 40_000)
        for t, a in ((48_000, 0.265), (88_000, 0.29), (160_000, 0.309), (293_000, 0.337))
    ]
    same = promise(points, 40_000, prompts=200, distinct_tokens=23_000, more_prompts=200)
    more = promise(points, 40_000, prompts=200, distinct_tokens=23_000, more_prompts=2000)
    assert same.distinct_tokens == 23_000 and more.distinct_tokens == 230_000
    assert 0.30 < same.alpha.value < 0.36 and more.alpha.value > same.alpha.value + 0.03
    assert more.alpha.std > same.alpha.std > 0
    with pytest.raises(ArchsearchError, match="needs text"):
        promise(points, 0, prompts=0, distinct_tokens=0, more_prompts=10)
