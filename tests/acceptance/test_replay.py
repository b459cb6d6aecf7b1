import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from archsearch import speedup
from archsearch.acceptance.measured import Trace
from archsearch.acceptance.replay import expected_rounds, replay_tau
from archsearch.engines.child.answers import drafting_rounds
from archsearch.errors import ArchsearchError


def trace(*rows, ended=()):
    return Trace(
        tuple(np.array(r, dtype=bool) for r in rows),
        tuple("" for _ in rows),
        tuple(str(i) for i in range(len(rows))),
        tuple(ended),
    )


def sampled(*rows):
    chances = tuple(np.array(r, dtype=np.float32) for r in rows)
    names = tuple(str(i) for i in range(len(rows)))
    return Trace(tuple(c > 0.5 for c in chances), names, names, (), chances, chances, 1.0, 1.0)


# --------------------------------------------------------------------------------------------------
# greedy text


def test_a_trace_worked_by_hand():
    # gamma 2: [1 1](bonus 0) | [1 0] | [0] | [1 1](bonus 1) | no room for another; the zero under a
    # bonus token costs nothing.
    row = np.array([1, 1, 0, 1, 0, 0, 1, 1, 1, 0], dtype=bool)
    assert expected_rounds(row, 2).tolist() == [1, 1, 2]
    result = replay_tau(trace(row), 2)
    assert result.tau == pytest.approx(5 / 4 + 1)
    assert result.accepted_by_position == pytest.approx((3 / 4, 2 / 4))
    assert result.rounds == 4
    # gamma 1: [1]1 | [0] | [1]0 | [0] | [1]1 | [1]0: two or one token per round.
    assert expected_rounds(row, 1).tolist() == [2, 4]
    # gamma 4: [1 1 0] | [1 0] | [0] | start 6 has room for 4 tokens, not 5.
    assert expected_rounds(row, 4).tolist() == [1, 1, 1, 0, 0]


def test_the_cut_of_a_text_is_not_a_rejection_and_prefers_no_short_round():
    assert expected_rounds(np.ones(3), 2).tolist() == [0, 0, 1]
    assert expected_rounds(np.ones(2), 2).tolist() == [0, 0, 0]
    # Both rounds at position 0 and 1 are too late for gamma 4, though the first is decided:
    # counting it would prefer short ones.
    assert expected_rounds(np.array([0, 1]), 4).sum() == 0
    with pytest.raises(ArchsearchError, match="no whole round of gamma 4"):
        replay_tau(trace([1, 1]), 4)
    with pytest.raises(ArchsearchError, match="no whole round"):
        replay_tau(trace(), 1)


def test_a_text_that_ended_counts_all_but_the_round_with_its_end():
    row = [1, 1, 0, 0, 1]
    # gamma 2: [1 1 +0] | [0] | [1 = the end]: two rounds; as a cut text the second has no room.
    assert expected_rounds(np.array(row), 2, ended=True).tolist() == [1, 0, 1]
    assert expected_rounds(np.array(row), 2).tolist() == [0, 0, 1]
    assert replay_tau(trace(row, ended=[True]), 2).tau == pytest.approx(2.0)
    # The end token under a bonus or a rejection ends the text as well.
    assert expected_rounds(np.array([1, 1, 0]), 2, ended=True).sum() == 0
    assert expected_rounds(np.array([0, 0]), 2, ended=True).tolist() == [1, 0, 0]
    # It ended close to the engine's limit: the engine had no room for a whole round at position 3.
    assert expected_rounds(np.array(row), 2, ended=True, limit=5).tolist() == [0, 0, 1]
    assert expected_rounds(np.array(row), 2, ended=True, limit=6).tolist() == [1, 0, 1]


def test_edges_all_ones_all_zeros_and_gamma_zero():
    assert replay_tau(trace(np.ones(50)), 4).tau == 5.0
    assert replay_tau(trace(np.zeros(50)), 4).tau == 1.0
    nothing = replay_tau(trace([1, 0, 1]), 0)
    assert nothing.tau == 1.0 and nothing.accepted_by_position == () and nothing.rounds == 3
    with pytest.raises(ValueError, match="gamma"):
        replay_tau(trace([1, 0, 1]), -1)


def engine_walk(agreement, gamma, ended, limit):
    """Assisted generation acted out token by token: how many tokens each round hands over."""
    written, lengths = 0, []
    while written < len(agreement):
        asked = min(
            gamma, limit - written - 1
        )  # transformers leaves room for the target's own token
        length = 0
        while length < asked and written + length < len(agreement) and agreement[written + length]:
            length += 1
        if written + length < len(agreement):
            length += 1  # the target's own token: a correction or the bonus
        lengths.append(length)
        written += length
    return [n for _, n in drafting_rounds(lengths, [gamma] * len(lengths), limit, ended)]


@pytest.mark.parametrize("gamma", [1, 2, 3, 5, 8])
def test_replay_counts_the_rounds_that_the_engine_counts(gamma):
    rng = np.random.default_rng(gamma)
    rows, ended = [], []
    for _ in range(60):
        end = rng.random() < 0.5
        rows.append(rng.random(rng.integers(5, 60) if end else 60) < 0.7)
        ended.append(end)
    rounds = [
        n
        for row, end in zip(rows, ended, strict=True)
        for n in engine_walk(row.tolist(), gamma, end, 60)
    ]
    result = replay_tau(trace(*rows, ended=ended), gamma, limit=60)
    assert result.tau == pytest.approx(np.mean(rounds)) and result.rounds == len(rounds)
    assert result.accepted_by_position == pytest.approx(
        [np.mean([n > k for n in rounds]) for k in range(1, gamma + 1)]
    )


@pytest.mark.parametrize(("alpha", "gamma"), [(0.3, 2), (0.6, 4), (0.8, 4), (0.9, 8)])
def test_independent_acceptances_give_the_closed_form(alpha, gamma):
    rows = [np.random.default_rng([gamma, i]).random(4000) < alpha for i in range(20)]
    result = replay_tau(trace(*rows), gamma)
    expected = speedup.tau(alpha, gamma)
    assert abs(result.tau - expected) < 4 * result.resampled.std < 0.02 * expected
    assert result.accepted_by_position == pytest.approx(
        [alpha ** (i + 1) for i in range(gamma)], abs=0.02
    )
    assert result.tau == pytest.approx(1 + sum(result.accepted_by_position))


def test_short_texts_are_not_biased():
    # Texts of 20 tokens, cut: counting every round that is decided before the cut gives 5.06, the
    # closed form says 5.22.
    alpha, gamma = 0.9, 6
    rows = [np.random.default_rng([7, i]).random(20) < alpha for i in range(3000)]
    result = replay_tau(trace(*rows), gamma)
    assert result.tau == pytest.approx(speedup.tau(alpha, gamma), abs=4 * result.resampled.std)
    assert result.resampled.std < 0.03


def test_bursty_acceptance_is_below_the_closed_form_of_its_mean():
    # Half of the texts easy, half hard: the closed form of the mean alpha is 10 % too high, replay
    # is not.
    rng = np.random.default_rng(1)
    rows = [rng.random(2000) < p for p in (0.9, 0.3) for _ in range(10)]
    result = replay_tau(trace(*rows), 4)
    alpha = np.concatenate(rows).mean()
    total = sum(map(len, rows))
    mixture = total / sum(len(r) / speedup.tau(float(r.mean()), 4) for r in rows)
    assert result.tau == pytest.approx(mixture, rel=0.02)
    assert speedup.tau(float(alpha), 4) > 1.05 * result.tau


def test_intervals_are_over_texts():
    rows = [
        np.full(300, i % 2, dtype=bool) for i in range(40)
    ]  # texts that differ as much as they can
    result = replay_tau(trace(*rows), 3)
    # 20 texts with 300 rounds' worth of tau 4 and 20 with tau 1: rounds 20 * 75 (about) and 20 *
    # 300.
    low, high = result.resampled.interval(0.95)
    inner_low, inner_high = result.resampled.interval(0.90)
    assert low < inner_low < result.tau < inner_high < high
    assert result.estimate().std == result.resampled.std > 0.1
    single = replay_tau(trace(np.random.default_rng(0).random(400) < 0.5), 3)
    assert single.resampled.interval() is None and single.resampled.std == pytest.approx(
        1.0, abs=0.3
    )  # the spread of its rounds


# --------------------------------------------------------------------------------------------------
# sampled text


def test_a_sampled_round_worked_by_hand():
    # gamma 1, chances 1/2, 1/4, anything: the round at 0 writes 1 or 2 tokens; one starts at 1 with
    # chance 1/2, none at 2 (cut).
    counts = expected_rounds(np.array([0.5, 0.25, 0.9]), 1)
    assert counts == pytest.approx([0.5 + 0.5 * 0.75, 0.5 + 0.5 * 0.25])
    # As a text that ended: a round at 2 writes the end; the round at 1 counts only where it
    # rejects.
    ended = expected_rounds(np.array([0.5, 0.25, 0.9]), 1, ended=True)
    assert ended == pytest.approx([0.5 + 0.5 * 0.75, 0.5])


def test_constant_chances_give_the_closed_form_exactly():
    for chance, gamma in [(0.3, 1), (0.6, 4), (0.85, 8)]:
        result = replay_tau(sampled([chance] * 400, [chance] * 300), gamma)
        assert result.tau == pytest.approx(speedup.tau(chance, gamma), rel=1e-6)
        assert result.accepted_by_position == pytest.approx(
            [chance ** (i + 1) for i in range(gamma)], rel=1e-5
        )


def test_walking_at_random_through_the_same_chances_gives_the_same():
    rng = np.random.default_rng(3)
    chances, gamma, walks = rng.random(40), 3, 4000
    counts = np.zeros(gamma + 1)
    for _ in range(walks):
        start = 0
        while start + gamma + 1 <= 40:
            run = 0
            while run < gamma and rng.random() < chances[start + run]:
                run += 1
            counts[run] += 1
            start += run + 1
    assert expected_rounds(chances, gamma) == pytest.approx(counts / walks, abs=0.1)


# A toy language of three tokens, the next one depending on the last: everything about it can be
# enumerated.
TARGET = (
    (Fraction(5, 10), Fraction(3, 10), Fraction(2, 10)),
    (Fraction(1, 10), Fraction(1, 10), Fraction(8, 10)),
    (Fraction(4, 10), Fraction(6, 10), Fraction(0)),
)
DRAFT = (
    (Fraction(2, 10), Fraction(7, 10), Fraction(1, 10)),
    (Fraction(3, 10), Fraction(2, 10), Fraction(5, 10)),
    (Fraction(4, 10), Fraction(5, 10), Fraction(1, 10)),
)


def residual(target, draft):
    left = [max(p - q, Fraction(0)) for p, q in zip(target, draft, strict=True)]
    return [value / sum(left) for value in left] if sum(left) else None


def one_round(last, gamma):
    """(tokens, chance) of every outcome of one round of algorithm 1 of arXiv 2211.17192 after token
    `last`.

    Written from the algorithm, with the draft's tokens, the coin and the residual apart; knows
    nothing of min(1, q / p).
    """
    if gamma == 0:
        return [((x,), TARGET[last][x]) for x in range(3)]
    outcomes = []
    for x in range(3):
        drafted = DRAFT[last][x]
        if not drafted:
            continue
        kept = min(Fraction(1), TARGET[last][x] / drafted)
        outcomes += [
            ((x, *rest), drafted * kept * chance)
            for rest, chance in one_round(x, gamma - 1)
            if kept
        ]
        instead = residual(TARGET[last], DRAFT[last])
        if kept < 1:
            outcomes += [((y,), drafted * (1 - kept) * instead[y]) for y in range(3)]
    return outcomes


@pytest.mark.parametrize(("gamma", "length"), [(1, 5), (2, 5), (3, 5)])
def test_expected_rounds_given_the_text_are_exact_for_real_speculative_sampling(gamma, length):
    texts, rounds = (
        Counter(),
        Counter(),
    )  # P(text), and E[whole rounds that accept k | text] P(text)

    def walk(text, chance, lengths):
        if len(text) >= length:
            key = text[:length]
            texts[key] += chance
            start = 0
            for n in lengths:
                if start + gamma + 1 <= length:
                    rounds[key, n - 1] += chance
                start += n
            return
        for tokens, part in one_round(text[-1] if text else 0, gamma):
            if part:
                walk((*text, *tokens), chance * part, (*lengths, len(tokens)))

    walk((), Fraction(1), ())
    assert sum(texts.values()) == 1
    for text in itertools.product(range(3), repeat=length):
        before = (0, *text[:-1])
        target = [TARGET[last][x] for last, x in zip(before, text, strict=True)]
        draft = [DRAFT[last][x] for last, x in zip(before, text, strict=True)]
        likely = Fraction(1)
        for p in target:
            likely *= p
        # The text is distributed as the target's own text, exactly.
        assert texts[text] == likely
        if likely:
            chances = np.array(
                [float(min(Fraction(1), q / p)) for p, q in zip(target, draft, strict=True)]
            )
            expected = [float(rounds[text, k] / likely) for k in range(gamma + 1)]
            assert expected_rounds(chances, gamma) == pytest.approx(expected, abs=1e-12)


def test_the_mean_chance_is_the_overlap():
    # E over x ~ p of min(1, q(x)/p(x)) = sum of min(p, q): alpha by either, for every context of
    # the toy language.
    for target, draft in zip(TARGET, DRAFT, strict=True):
        mean = sum(p * min(Fraction(1), q / p) for p, q in zip(target, draft, strict=True) if p)
        assert mean == sum(min(p, q) for p, q in zip(target, draft, strict=True))
