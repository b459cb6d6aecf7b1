"""The joint replay of lookup and draft, beside each alone and a walk written anew."""

import random

import numpy as np
import pytest

from archsearch.acceptance.chain import ChainRule, replay_chain
from archsearch.acceptance.lookup import LookupText, Ngram, Suffix, finds, replay
from archsearch.acceptance.measured import Trace
from archsearch.acceptance.replay import replay_tau
from archsearch.errors import ArchsearchError


def texts_and_trace(seed, confident=True):
    """Texts of a few phrases, and a draft that agrees where a die says so, surer where it does."""
    rng = random.Random(seed)
    phrases = [[rng.randrange(30) for _ in range(rng.randrange(2, 9))] for _ in range(4)]
    texts, agreements, sure = [], [], []
    for _ in range(8):
        tokens = []
        while len(tokens) < 70:
            tokens += rng.choice(phrases) if rng.random() < 0.5 else [rng.randrange(30)]
        texts.append(LookupText(tuple(tokens[:10]), tuple(tokens[10:]), rng.random() < 0.5))
        right = np.array([rng.random() < 0.6 for _ in texts[-1].answer])
        agreements.append(right)
        sure.append(
            np.array([rng.uniform(0.3 if ok else 0.0, 1.0) for ok in right], dtype=np.float32)
        )
    names, ended = tuple("abcdefgh"), tuple(text.ended for text in texts)
    confidences = tuple(sure) if confident else ()
    return texts, Trace(tuple(agreements), ("",) * 8, names, ended, confidences=confidences)


def naive(texts, trace, lookup, rule, first):
    """[(drafter, drafted, accepted)] of the whole rounds: token by token, with a reader of its
    own."""
    rounds = []
    for index, text in enumerate(texts):
        answer, at = text.answer, first
        while at < len(answer):
            reader = lookup.starts()([*text.prompt, *answer[:at]])
            tokens = reader.propose([rule.found])[rule.found] if rule.found else []
            if tokens:
                who, right = "lookup", [a == b for a, b in zip(tokens, answer[at:], strict=False)]
                drafted = len(tokens)
            else:
                who, right, drafted = "draft", [], 0
                for place in range(at, at + rule.gamma):
                    inside = place < len(answer)
                    unsure = inside and trace.confidences[index][place] < rule.least
                    if unsure and not rule.with_last:
                        break
                    right.append(inside and bool(trace.agreements[index][place]))
                    drafted += 1
                    if unsure:
                        break
            accepted = next((n for n, ok in enumerate(right) if not ok), len(right))
            end = at + accepted + 1
            if (end < len(answer)) if text.ended else (at + rule.longest + 1 <= len(answer)):
                rounds.append((who, drafted, accepted))
            at = end
    return rounds


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "rule", [ChainRule(3, 2), ChainRule(6, 4, 0.5), ChainRule(2, 5, 0.7, with_last=False)]
)
def test_a_chain_is_replayed_as_its_rounds_go(seed, rule):
    texts, trace = texts_and_trace(seed)
    lookup, first = Ngram(2, 3), seed % 2
    found = finds(lookup, texts, [rule.found])[rule.found]
    ours = replay_chain(trace, rule, found, first=first)
    rounds = naive(texts, trace, lookup, rule, first)
    assert {who for who, _, _ in rounds} == {"lookup", "draft"}, "a case in which both draft"
    assert ours.rounds == pytest.approx(len(rounds))
    for who, counts in (("lookup", ours.found), ("draft", ours.drafted)):
        for size, count in enumerate(counts):
            assert count == pytest.approx(sum(row[:2] == (who, size) for row in rounds))
    for position, share in enumerate(ours.accepted_by_position, 1):
        assert share == pytest.approx(np.mean([row[2] >= position for row in rounds]))
    assert ours.tau.value == pytest.approx(np.mean([row[2] + 1 for row in rounds]))
    looked_up = sum(accepted + 1 for who, _, accepted in rounds if who == "lookup")
    assert ours.unseen == pytest.approx(looked_up / sum(who == "draft" for who, _, _ in rounds))


def test_its_halves_are_what_they_are_alone():
    texts, trace = texts_and_trace(7)
    for gamma in (1, 3, 5):
        alone = replay_chain(trace, ChainRule(0, gamma), first=0)
        plain = replay_tau(trace, gamma)
        assert alone.tau.value == pytest.approx(plain.tau)
        assert alone.accepted_by_position == pytest.approx(plain.accepted_by_position)
    # A draft that is never right makes of a chain its lookup: rounds without a find are plain
    # steps.
    blank = Trace(
        tuple(np.zeros_like(row) for row in trace.agreements),
        trace.categories,
        trace.ids,
        trace.ended,
    )
    for lookup in (Ngram(1, 4), Suffix()):
        chain = replay_chain(blank, ChainRule(4, 1), finds(lookup, texts, [4])[4])
        only = replay(lookup, texts, [4])[4]
        assert chain.rounds == pytest.approx(only.rounds)
        assert chain.tau.value == pytest.approx(only.tau.value)
        assert sum(chain.found) / chain.rounds == pytest.approx(only.drafts_share.value)


def test_sampled_text_is_walked_by_chances():
    texts, trace = texts_and_trace(3)
    chances = tuple(np.where(row, 0.9, 0.2) for row in trace.agreements)
    sampled = Trace(
        trace.agreements,
        trace.categories,
        trace.ids,
        trace.ended,
        chances,
        chances,
        temperature=1.0,
    )
    rule = ChainRule(3, 3)
    found = finds(Ngram(2, 3), texts, [3])[3]
    ours = replay_chain(sampled, rule, found)
    rng, written, rounds = np.random.default_rng(0), 0, 0
    for _ in range(300):
        for index, text in enumerate(texts):
            at = 1
            while at < len(text.answer):
                if found[index].drafted[at]:
                    accepted = int(found[index].accepted[at])
                else:
                    draws = rng.random(3) < np.append(chances[index], np.zeros(3))[at : at + 3]
                    accepted = 3 if draws.all() else int(draws.argmin())
                end = at + accepted + 1
                if end < len(text.answer) if text.ended else at + 4 <= len(text.answer):
                    written, rounds = written + accepted + 1, rounds + 1
                at = end
    assert ours.tau.value == pytest.approx(written / rounds, rel=0.01)


def test_what_cannot_be_replayed_ends_in_one_line():
    texts, trace = texts_and_trace(1, confident=False)
    with pytest.raises(ArchsearchError, match="between 0 and 1, got 1.5"):
        ChainRule(2, 2, 1.5)
    with pytest.raises(ArchsearchError, match="at least one token"):
        ChainRule(2, 0)
    with pytest.raises(ArchsearchError, match="measure the draft again"):
        replay_chain(trace, ChainRule(0, 2, 0.5))
    with pytest.raises(ArchsearchError, match="different texts"):
        replay_chain(trace, ChainRule(2, 2), finds(Ngram(), [LookupText((1,), (2, 3))] * 8, [2])[2])
    with pytest.raises(ArchsearchError, match="long enough"):
        cut = Trace(trace.agreements, trace.categories, trace.ids)
        replay_chain(cut, ChainRule(2, 500), finds(Ngram(), texts, [2])[2])
