import numpy as np
import pytest

from archsearch import speedup
from archsearch.acceptance.measured import Trace
from archsearch.acceptance.replay import accepted_runs, best_gamma, replay_tau
from archsearch.errors import ArchsearchError


def trace(*rows):
    return Trace(tuple(np.array(r, dtype=bool) for r in rows), tuple("" for _ in rows), tuple(str(i) for i in range(len(rows))))


def test_a_trace_worked_by_hand():
    # gamma 2: [1 1](bonus 0) | [1 0] | [0] | [1 1](bonus 1) | [0]; the zero under a bonus token costs nothing.
    row = np.array([1, 1, 0, 1, 0, 0, 1, 1, 1, 0], dtype=bool)
    assert accepted_runs(row, 2) == [2, 1, 0, 2, 0]
    result = replay_tau(trace(row), 2)
    assert result.tau == pytest.approx(5 / 5 + 1)
    assert result.accepted_by_position == pytest.approx((3 / 5, 2 / 5))
    assert result.rounds == 5
    # gamma 1: [1]1 | [0] | [1]0 | [0] | [1]1 | [1]0: one accepted token more or less per round.
    assert accepted_runs(row, 1) == [1, 0, 1, 0, 1, 1]
    # gamma 4: [1 1 0] | [1 0] | [0] | [1 1 1 0]
    assert accepted_runs(row, 4) == [2, 1, 0, 3]


def test_the_end_of_a_text_is_not_a_rejection():
    assert accepted_runs(np.array([1, 1, 1], dtype=bool), 2) == [2]
    assert accepted_runs(np.array([1, 1, 1, 1], dtype=bool), 2) == [2]
    assert accepted_runs(np.array([1, 1], dtype=bool), 2) == [2]
    assert accepted_runs(np.array([0, 1], dtype=bool), 4) == [0]
    assert accepted_runs(np.array([1, 1], dtype=bool), 4) == []
    with pytest.raises(ArchsearchError, match="no whole round of gamma 4"):
        replay_tau(trace([1, 1]), 4)


def test_edges_all_ones_all_zeros_and_gamma_zero():
    assert replay_tau(trace(np.ones(50)), 4).tau == 5.0
    assert replay_tau(trace(np.zeros(50)), 4).tau == 1.0
    nothing = replay_tau(trace([1, 0, 1]), 0)
    assert nothing.tau == 1.0 and nothing.accepted_by_position == () and nothing.rounds == 3


def walk(agreement, gamma):
    """Speculative decoding acted out token by token: what the engine appends per round."""
    written, rounds = 0, []
    while written < len(agreement):
        appended = 0
        decided = False
        for i in range(gamma):
            if written + i >= len(agreement):
                break
            appended += 1
            if not agreement[written + i]:
                decided = True
                break
        else:
            appended, decided = appended + 1, True
        if not decided:
            break
        rounds.append(appended)
        written += appended
    return rounds


@pytest.mark.parametrize("gamma", [1, 2, 3, 5, 8])
def test_replay_equals_speculative_decoding_acted_out(gamma):
    rng = np.random.default_rng(gamma)
    rows = [rng.random(rng.integers(5, 90)) < 0.7 for _ in range(30)]
    rounds = [tokens for row in rows for tokens in walk(row.tolist(), gamma)]
    result = replay_tau(trace(*rows), gamma)
    assert result.tau == pytest.approx(np.mean(rounds)) and result.rounds == len(rounds)


@pytest.mark.parametrize(("alpha", "gamma"), [(0.3, 2), (0.6, 4), (0.8, 4), (0.9, 8)])
def test_independent_acceptances_give_the_closed_form(alpha, gamma):
    rows = [np.random.default_rng([gamma, i]).random(4000) < alpha for i in range(20)]
    result = replay_tau(trace(*rows), gamma)
    expected = speedup.tau(alpha, gamma)
    assert abs(result.tau - expected) < 4 * result.tau_std < 0.02 * expected
    assert result.accepted_by_position == pytest.approx([alpha ** (i + 1) for i in range(gamma)], abs=0.02)
    assert result.tau == pytest.approx(1 + sum(result.accepted_by_position))


def test_bursty_acceptance_is_below_the_closed_form_of_its_mean():
    # Half of the texts easy, half hard: the closed form of the mean alpha is 10 % too high, replay is not.
    rng = np.random.default_rng(1)
    rows = [rng.random(2000) < p for p in (0.9, 0.3) for _ in range(10)]
    result = replay_tau(trace(*rows), 4)
    alpha = np.concatenate(rows).mean()
    total = sum(map(len, rows))
    mixture = total / sum(len(r) / speedup.tau(float(r.mean()), 4) for r in rows)
    assert result.tau == pytest.approx(mixture, rel=0.02)
    assert speedup.tau(float(alpha), 4) > 1.05 * result.tau


def test_best_gamma_weighs_tokens_against_seconds():
    rows = [np.random.default_rng(i).random(3000) < 0.8 for i in range(4)]
    gammas = [1, 2, 4, 8]
    assert best_gamma(trace(*rows), gammas, [1.0, 1.0, 1.0, 1.0]) == 8
    assert best_gamma(trace(*rows), gammas, [1.0 + 1.0 * g for g in gammas]) == 1
    expected = max(gammas, key=lambda g: speedup.tau(0.8, g) / (1.1 + 0.15 * g))
    assert best_gamma(trace(*rows), gammas, [1.1 + 0.15 * g for g in gammas]) == expected
