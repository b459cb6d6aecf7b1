"""Who climbs: decisions on numbers whose answers are known."""

import math
from itertools import pairwise

import numpy as np
import pytest

from archsearch.search import rungs

# -- the budget
# --------------------------------------------------------------------------------------------------


def test_two_minutes_stay_at_rung_zero_and_say_what_would_do():
    plan = rungs.divide(120.0, 5.0, prompt_s=7.0, fixed_s=20.0, prompts=24)
    assert plan.stay and plan.text_s == plan.finalist_s == 0
    assert "give at least 5m" in plan.stay  # (8 * 7 + 20) / 0.3 = 253 s
    assert not rungs.divide(300.0, 5.0, prompt_s=7.0, fixed_s=20.0, prompts=24).stay


@pytest.mark.parametrize("budget_s", [300.0, 900.0, 2700.0])
def test_a_plan_uses_the_budget_and_no_more(budget_s):
    plan = rungs.divide(budget_s, 10.0, prompt_s=7.0, fixed_s=20.0, prompts=24)
    planned = plan.text_s + plan.rung_s + plan.finalist_s + plan.confirm_s
    assert planned == pytest.approx((1 - rungs.MARGIN_SHARE) * budget_s)
    assert plan.text_s == 0.25 * budget_s and plan.rung_s / plan.finalist_s == pytest.approx(
        25 / 40
    )
    assert 8 <= plan.confirm_prompts <= 24
    assert plan.confirm_prompts == 24 or plan.confirm_s <= max(0.20 * budget_s, 8 * 7 + 20)


def test_few_prompts_are_all_confirmed_and_a_start_that_took_too_long_is_said():
    assert rungs.divide(600.0, 1.0, 1.0, 0.0, prompts=3).confirm_prompts == 3
    few = rungs.divide(200.0, 5.0, prompt_s=7.0, fixed_s=20.0, prompts=24)
    assert (
        few.stay.endswith("or --confirm-prompts 5") and "slower" not in few.stay
    )  # 5 * 7 + 20 = 55 s of 60
    assert not rungs.divide(200.0, 5.0, prompt_s=7.0, fixed_s=20.0, prompts=5).stay
    busy = rungs.divide(300.0, 5.0, prompt_s=21.0, fixed_s=60.0, prompts=24, slowdown=3.0)
    assert (
        "3.0 times slower now than when it was profiled" in busy.stay
        and "goes on when they are done" in busy.stay
    )
    assert "--confirm-prompts 1" in busy.stay  # 21 + 60 s of 90
    assert "half of the 60 s was gone" in rungs.divide(60.0, 40.0, 0.1, 0.0, prompts=8).stay


# -- who could still win
# --------------------------------------------------------------------------------------------------


def test_contenders_by_differences():
    values = [0.50, 0.45, 0.30]
    assert rungs.contenders(values, lambda i, j: 0.05) == [
        True,
        True,
        False,
    ]  # 0.05 and 0.20 against 1.5 * 0.05
    assert rungs.contenders(values, lambda i, j: 0.14) == [True, True, True]
    assert rungs.contenders(values, lambda i, j: 0.02) == [True, False, False]
    # Sure of the difference to one leader is enough, however unsure of the other.
    assert rungs.contenders([0.5, 0.49, 0.4], lambda i, j: 0.01 if {i, j} == {1, 2} else 1.0) == [
        True,
        True,
        False,
    ]


def test_who_is_beaten():
    good, near, bad, unsure = (
        (math.log(x), std) for x, std in ((1.6, 0.02), (1.5, 0.04), (1.3, 0.02), (1.3, 0.20))
    )
    # ln(1.6 / 1.5) = 0.065 < 1.5 hypot(.02, .04) = 0.067; ln(1.6 / 1.3) = 0.208 > 1.5 hypot(.02,
    # .02) = 0.042 but < 1.5 hypot(.02, .2)
    everyone = [good, near, bad, unsure]
    beaten = [
        rungs.beaten(*one, [other for other in everyone if other is not one]) for one in everyone
    ]
    assert beaten == [False, False, True, False]
    assert not rungs.beaten(*bad, [])
    assert rungs.beaten(math.log(1.5), 0.03, [good])  # 0.065 > 0.054


# -- who is trained
# --------------------------------------------------------------------------------------------------


def gaps_of(covariance):
    variances = np.diag(covariance)
    return np.sqrt(variances[:, None] + variances[None, :] - 2 * covariance)


def test_belief_gives_back_the_covariance_up_to_what_all_share():
    covariance = np.array([[0.04, 0.03, 0.0], [0.03, 0.05, 0.01], [0.0, 0.01, 0.09]])
    found = rungs.belief(gaps_of(covariance), np.ones(3), 0.0)
    assert gaps_of(found) == pytest.approx(gaps_of(covariance))
    shared = rungs.belief(gaps_of(covariance), np.ones(3), 0.7)
    assert gaps_of(shared) == pytest.approx(gaps_of(covariance)) and shared[0, 0] == pytest.approx(
        0.49
    )
    steep = rungs.belief(gaps_of(covariance), np.array([1.0, 2.0, 1.0]), 0.7)
    assert steep[1, 1] == pytest.approx(4 * shared[1, 1])


def test_a_set_holds_the_leader_and_those_that_are_unlike_it():
    """0 and 1 are twins, 2 is a little worse and independent: beside the leader, the stranger is
    worth more than the twin."""
    covariance = np.array([[0.01, 0.00999, 0.0], [0.00999, 0.01, 0.0], [0.0, 0.0, 0.01]])
    draws = rungs.draws_of(np.array([0.50, 0.499, 0.48]), covariance)
    picks = rungs.best_set(draws, [1.0, 1.0, 1.0], 10.0, most=3)
    assert list(picks)[:2] == [0, 2]
    assert picks[2] > 10 * picks[1] if len(picks) > 2 else True
    # E max of two equal normals with std 0.1 and 0 correlation: mean + 0.1 / sqrt(pi)
    equal = rungs.draws_of(np.zeros(2), np.eye(2) * 0.01)
    assert rungs.expected_gain(equal) == pytest.approx(0.1 / math.sqrt(math.pi), abs=0.005)


def test_a_set_keeps_within_its_seconds_and_ends_when_more_brings_nothing():
    draws = rungs.draws_of(np.array([0.5, 0.49, 0.48, -5.0]), np.eye(4) * 0.01)
    found = rungs.best_set(draws, [4.0, 4.0, 1.0, 1.0], 5.5, most=4, least_gain=1e-6)
    assert list(found) == [0, 2]
    assert (
        len(rungs.best_set(draws, [1.0] * 4, 10.0, most=4, least_gain=1e-6)) == 3
    )  # the hopeless one never
    assert len(rungs.best_set(draws, [9.0] * 4, 1.0, most=4, least=2)) == 2  # what must be, must be
    started = rungs.best_set(draws, [1.0] * 4, 3.0, most=4, start=[2, 3])
    assert list(started) == [2, 3, 0]  # asked for first, then the best
    assert rungs.expected_gain(draws[:, :1]) == 0.0


# -- how long
# --------------------------------------------------------------------------------------------------


def seconds_of(schedule, tokens_per_s, overhead_s):
    total, before = 0.0, 0
    for step in schedule:
        total += step.places * ((step.tokens - before) / tokens_per_s + overhead_s)
        before = step.tokens
    return total


@pytest.mark.parametrize(
    ("seconds", "speed", "overhead"),
    [(675.0, 2500.0, 3.0), (225.0, 1500.0, 3.0), (60.0, 800.0, 2.0)],
)
def test_halving_fills_its_time(seconds, speed, overhead):
    schedule = rungs.halving(seconds, speed, overhead)
    assert seconds_of(schedule, speed, overhead) == pytest.approx(seconds, rel=0.01)
    places = [step.places for step in schedule]
    assert places == sorted(places, reverse=True) and places[-1] == 2
    assert all(b.tokens == 2 * a.tokens for a, b in pairwise(schedule))


def test_more_time_trains_more_shapes_and_too_little_none():
    counts = [
        rungs.halving(seconds, 2000.0, 3.0)[0].places for seconds in (60.0, 200.0, 700.0, 3000.0)
    ]
    assert counts == sorted(counts) and counts[0] < counts[-1] == rungs.MOST_PLACES
    assert rungs.halving(3000.0, 2000.0, 3.0)[0].tokens > rungs.FIRST_TOKENS
    assert rungs.halving(4.0, 2000.0, 3.0) == []


def test_finalists_share_the_time_only_where_they_may_change_the_choice():
    sure = rungs.draws_of(np.array([0.5, 0.3, 0.2]), np.eye(3) * 1e-4)
    unsure = rungs.draws_of(np.array([0.5, 0.5, 0.2]), np.diag([0.02, 0.02, 1e-4]))
    assert rungs.finalist_count(sure, 0.1) == 1
    assert rungs.finalist_count(unsure, 0.1) == 2
    assert rungs.finalist_count(unsure, 10.0) == 1  # sharing costs too much
    assert rungs.finalist_count(unsure, 0.0, most=1) == 1
