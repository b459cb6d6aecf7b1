"""The replay of drafters that look tokens up, beside naive ones that know nothing of indexes and
trees."""

import random
import time

import numpy as np
import pytest

from archsearch.acceptance import suffix_tree
from archsearch.acceptance.lookup import LookupText, NewestNgram, Ngram, Suffix, replay
from archsearch.acceptance.suffix_tree import SuffixReader, SuffixTree
from archsearch.errors import ArchsearchError

# ------------------------------------------------------------------------------------------- naive
# drafters, written anew


def naive_ngram(tokens, shortest, longest, gamma):
    """The definition: the longest n, the first place where the last n tokens stand with a token
    after them."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n):
            if n <= len(tokens) and tokens[start : start + n] == tokens[len(tokens) - n :]:
                return tokens[start + n : start + n + gamma]
    return []


class NaiveSuffix:
    """Suffix decoding with all suffixes in a dictionary: string -> [count, its next tokens in
    sibling order]."""

    def __init__(self, depth):
        self.depth, self.count, self.kids = depth, {}, {}
        self.text = []

    def open(self):
        self.text = []

    def append(self, token):
        self.text.append(token)
        end = len(self.text)
        for start in range(max(0, end - self.depth), end):
            whole = tuple(self.text[start:])
            parent = whole[:-1]
            order = self.kids.setdefault(parent, [])
            if token not in order:
                order.append(token)
                self.count[whole] = 1
                continue
            place, own = order.index(token), self.count[whole]
            counts = [self.count[(*parent, kid)] for kid in order]
            if place and counts[place - 1] <= own + 1:
                order.insert(counts.index(counts[place - 1]), order.pop(place))
            self.count[whole] = own + 1

    def speculate(self, context, gamma, factor, least):
        best = (0.0, [])
        for size in range(1, len(context)):
            here = tuple(context[len(context) - size :])
            if here not in self.count:
                break
            tokens, share, score = [], np.float32(1), np.float32(0)
            while len(tokens) < min(gamma, int(size * factor + 1e-6)) and self.kids.get(here):
                following = (*here, self.kids[here][0])
                share *= np.float32(self.count[following]) / np.float32(self.count[here])
                if share < np.float32(least):
                    break
                tokens.append(following[-1])
                score += share
                here = following
            if score >= best[0]:
                best = (score, tokens)
        return best


def naive_rounds(draft_at, answer, gamma, ended):
    """[(drafted, accepted)] of the whole rounds, one after the other."""
    rounds, at = [], 1
    while at < len(answer):
        drafted = draft_at(at)
        accepted = 0
        while accepted < len(drafted) and answer[at + accepted : at + accepted + 1] == [
            drafted[accepted]
        ]:
            accepted += 1
        if (at + accepted + 1 < len(answer)) if ended else (at + gamma + 1 <= len(answer)):
            rounds.append((len(drafted), accepted))
        at += accepted + 1
    return rounds


def random_texts(seed, count=12):
    """Texts that repeat themselves and each other: pieces of a few phrases, with noise."""
    rng = random.Random(seed)
    phrases = [[rng.randrange(9) for _ in range(rng.randrange(2, 9))] for _ in range(5)]
    texts = []
    for number in range(count):
        parts = [
            rng.choice(phrases) if rng.random() < 0.7 else [rng.randrange(9)]
            for _ in range(rng.randrange(6, 16))
        ]
        tokens = [token for part in parts for token in part]
        cut = rng.randrange(0, len(tokens) // 2)
        texts.append(
            LookupText(
                tuple(tokens[:cut]), tuple(tokens[cut:]), rng.random() < 0.5, "ab"[number % 2]
            )
        )
    return texts


def check(found, rounds, gamma):
    drafting = [pair for pair in rounds if pair[0]]
    assert found.rounds == len(rounds)
    assert found.drafts_share.value == pytest.approx(len(drafting) / len(rounds))
    assert found.tau.value == pytest.approx(np.mean([accepted + 1 for _, accepted in rounds]))
    for position in range(1, gamma + 1):
        share = np.mean([accepted >= position for _, accepted in drafting]) if drafting else 0.0
        assert found.accepted_by_position[position - 1] == pytest.approx(share)
        reached = np.mean([drafted >= position for drafted, _ in drafting]) if drafting else 0.0
        assert found.drafted_by_position[position - 1] == pytest.approx(reached)
    assert found.drafted == pytest.approx(
        np.mean([drafted for drafted, _ in drafting]) if drafting else 0.0
    )


@pytest.mark.parametrize("seed", range(8))
def test_ngrams_are_replayed_as_their_definition_says(seed):
    texts, (shortest, longest) = random_texts(seed), [(1, 1), (1, 3), (2, 5), (3, 3)][seed % 4]
    found = replay(Ngram(shortest, longest), texts, (1, 3, 6))
    for gamma in (1, 3, 6):
        rounds = []
        for text in texts:
            answer, whole = list(text.answer), [*text.prompt, *text.answer]
            rounds += naive_rounds(
                lambda at, w=whole, t=text, g=gamma: naive_ngram(
                    w[: len(t.prompt) + at], shortest, longest, g
                ),
                answer,
                gamma,
                text.ended,
            )
        check(found[gamma], rounds, gamma)


@pytest.fixture
def limit(monkeypatch):
    """Suffix decoding with another depth, factor and least probability."""

    def change(**limits):
        for name, value in limits.items():
            monkeypatch.setattr(suffix_tree, name, value)

    return change


@pytest.mark.parametrize("seed", range(20))
def test_suffix_decoding_is_replayed_as_its_definition_says(seed, limit):
    texts = random_texts(100 + seed)
    depth, factor, least = [(24, 1.0, 0.1), (4, 1.0, 0.1), (6, 2.0, 0.3), (8, 1.0, 0.0)][seed % 4]
    limit(DEPTH=depth, FACTOR=factor, LEAST_PROBABILITY=least)
    found = replay(Suffix(), texts, (2, 7))
    for gamma in (2, 7):
        everyone, rounds = NaiveSuffix(depth), []
        for text in texts:
            own, answer = NaiveSuffix(depth), list(text.answer)
            everyone.open()
            written = []
            for token in text.prompt:
                own.append(token)

            def draft_at(
                at,
                own=own,
                answer=answer,
                written=written,
                text=text,
                gamma=gamma,
                everyone=everyone,
            ):
                while len(written) < at:
                    own.append(answer[len(written)])
                    everyone.append(answer[len(written)])
                    written.append(answer[len(written)])
                context = [*text.prompt, *written][-depth:]
                mine = own.speculate(context, gamma, factor, least)
                theirs = everyone.speculate(context, gamma, factor, least)
                return mine[1] if mine[0] >= theirs[0] else theirs[1]

            rounds += naive_rounds(draft_at, answer, gamma, text.ended)
            draft_at(len(answer))
        check(found[gamma], rounds, gamma)


# --------------------------------------------------------------------------------------------------
# by hand


def test_vllms_own_example_and_the_first_of_several_places():
    # Its docstring: [1,2,3,4,2,3] with n of 2 to 3 and k 4 gives [4,2,3].
    reader = Ngram(2, 3).starts()([1, 2, 3, 4, 2, 3])
    assert reader.propose((4,)) == {4: [4, 2, 3]}
    # The first occurrence wins, not the latest, and a longer n-gram over an earlier shorter one.
    assert Ngram(1, 1).starts()([7, 1, 7, 2, 7]).propose((1, 2)) == {1: [1], 2: [1, 7]}
    assert Ngram(1, 2).starts()([7, 1, 5, 7, 2, 5, 7]).propose((1,)) == {1: [2]}
    # An n-gram may overlap its own repetition.
    assert Ngram(2, 2).starts()([4, 4, 4]).propose((3,)) == {3: [4]}
    assert Ngram(2, 5).starts()([1, 2, 3]).propose((3,)) == {3: []}


def test_a_suffix_seen_once_before_drafts_with_half_its_weight_and_no_further_than_it_matches(
    limit,
):
    def drafted(*prompt):
        return SuffixReader(SuffixTree(), prompt).propose((8,))

    # [2] and [1, 2] occurred once before; the context itself is the other half of their count.
    assert drafted(1, 2, 3, 4, 5, 9, 1, 2) == {8: [3, 4]}
    limit(FACTOR=2.0)
    assert drafted(1, 2, 3, 4, 5, 9, 1, 2) == {8: [3, 4, 5, 9]}
    limit(FACTOR=1.0, LEAST_PROBABILITY=0.6)
    assert drafted(1, 2, 3, 1, 2) == {8: []}


def test_answers_of_earlier_requests_are_looked_up():
    text = LookupText((1,), tuple(range(2, 30)), True)
    alone, together = (replay(Suffix(), [text] * times, (4,))[4] for times in (1, 2))
    assert alone.drafts_share.value == 0.0 and alone.tau.value == 1.0 and alone.alpha == 0.0
    assert together.tau.value > 1.5 and together.alpha == 1.0


def test_a_round_that_drafts_less_than_gamma_is_told():
    # After [5, 6] only one token follows the earlier pair before the text ends: [8, 5, 6].
    text = LookupText((5, 6, 8, 5), (6, 8, 5, 6, 8, 5, 6, 8, 5, 1, 2, 3, 4), False)
    found = replay(Ngram(2, 2), [text], (4,))[4]
    assert found.drafted_by_position[0] == 1.0 and found.drafted < 4
    assert found.tau.value == pytest.approx(
        1 + found.drafts_share.value * sum(found.accepted_by_position)
    )
    with pytest.raises(ArchsearchError, match="long enough"):
        replay(Ngram(), [LookupText((1, 2), (3, 4), False)], (4,))
    with pytest.raises(ArchsearchError, match="shortest"):
        Ngram(3, 2)


def test_stds_are_those_of_texts_drawn_again():
    def spread(values):
        return np.std(values, ddof=1)

    texts = random_texts(5, 16)
    found = replay(Ngram(1, 3), texts, (3,))[3]
    rng = np.random.default_rng(1)
    taus, shares = [], []
    for _ in range(150):
        again = replay(
            Ngram(1, 3), [texts[i] for i in rng.integers(len(texts), size=len(texts))], (3,)
        )[3]
        taus.append(again.tau.value)
        shares.append(again.drafts_share.value)
    assert found.tau.std == pytest.approx(spread(taus), rel=0.25)
    assert found.drafts_share.std == pytest.approx(spread(shares), rel=0.25)


def test_a_hundred_answers_take_a_second_or_two():
    rng = random.Random(3)
    words = [rng.choices(range(3000), k=rng.randrange(1, 6)) for _ in range(2000)]

    def written(count):
        out = []
        while len(out) < count:
            out += words[min(int(rng.expovariate(1 / 150)), 1999)]
        return tuple(out[:count])

    texts = [LookupText(written(100), written(200)) for _ in range(100)]
    start = time.process_time()
    replay(Ngram(), texts, range(1, 9))
    assert time.process_time() - start < 3
    start = time.process_time()
    replay(Suffix(), texts, (1, 2, 4, 8))
    assert time.process_time() - start < 10


def test_llama_cpp_takes_the_newest_n_gram_of_one_length() -> None:
    """As common/ngram-map.cpp: the last token is not yet in the history that is searched, position
    0 never matches, and what has too little behind it drafts nothing."""

    def drafted(tokens: list[int], gamma: int = 2, size: int = 2) -> list[int]:
        return NewestNgram(size, size).starts()(tokens).propose([gamma])[gamma]

    history = [99, 1, 2, 7, 8, 3, 4, 1]
    assert drafted([*history, 2]) == [7, 8] and drafted([*history, 9]) == []
    assert drafted([0, 1, 2, 7, 8, 1, 2, 5, 6, 3, 1, 2]) == [5, 6]  # the newest of two
    assert drafted([1, 2, 7, 8, 3, 4, 5, 6, 1, 2]) == []  # at position 0
    assert drafted([99, 5, 6, 3, 1, 2, 4, 1, 2]) == [4, 1] and drafted([9, 9, 9, 1, 2, 1, 2]) == []
    assert drafted([*history, 2], gamma=1) == []  # fewer than the n-gram is long
    assert drafted([*history, 2], gamma=5) == [] and drafted([*history, 2], gamma=4) == [7, 8, 3, 4]
