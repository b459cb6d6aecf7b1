"""Prompts to train on and prompts kept apart; what is wrong with prompts and answers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from archsearch.errors import ArchsearchError
from archsearch.text.cache import CachedSequence
from archsearch.text.prompt_set import (
    FEW_PROMPTS,
    LEAST_HALF,
    PromptSet,
    answer_faults,
    load_prompt_set,
    loops,
    prompt_faults,
    spread,
)
from archsearch.text.prompts import Prompt


def made(categories: list[str]) -> PromptSet:
    prompts = [
        Prompt((("user", f"prompt number {i}"),), name, str(i), i)
        for i, name in enumerate(categories)
    ]
    return PromptSet([], prompts, "made up")


def test_halves_share_no_prompt_and_hold_the_same_kinds() -> None:
    found = load_prompt_set(None, None)
    choosing, confirming = found.choosing, found.confirming
    assert found.split and len(choosing) + len(confirming) == len(found.heldout)
    assert not {p.text for p in choosing} & {p.text for p in confirming}
    assert (
        Counter(p.category for p in choosing)
        == Counter(p.category for p in confirming)
        == {"seen-template": 20, "new-template": 10}
    )
    assert (found.choosing, found.confirming) == (choosing, confirming)  # the same every time


def test_halves_stay_balanced_with_sorted_files_and_categories_of_one() -> None:
    by_kind = made(["a"] * 11 + ["b"] * 9 + ["c"] * 3)
    for half in (by_kind.choosing, by_kind.confirming):
        counts = Counter(p.category for p in half)
        assert (
            abs(counts["a"] - 5.5) < 1 and abs(counts["b"] - 4.5) < 1 and abs(counts["c"] - 1.5) < 1
        )
    singles = made([f"kind {i}" for i in range(20)])
    assert abs(len(singles.choosing) - len(singles.confirming)) <= 1


def test_long_prompts_do_not_gather_in_one_half() -> None:
    """Lengths of a heavy tail in an order that puts every long one at an even place."""
    lengths = [2**i if place == 0 else 10 + i for i in range(17) for place in range(2)]
    prompts = [Prompt((("user", "x" * length),), "", "", 0) for length in lengths]
    found = PromptSet([], prompts, "made up")
    first, second = (
        sorted(len(p.text) for p in half) for half in (found.choosing, found.confirming)
    )
    assert len(first) == len(second) == 17 and sorted(first + second) == sorted(lengths)
    ratios = np.log(first) - np.log(second)
    assert abs(ratios).max() < np.log(2.1) and abs(ratios.mean()) < 0.1


def test_a_file_too_small_to_split_serves_both_ends() -> None:
    small = made(["a"] * (2 * LEAST_HALF - 1))
    assert not small.split and small.choosing == small.confirming == small.heldout
    assert made(["a"] * 2 * LEAST_HALF).split


def test_a_prompt_on_both_sides_is_refused() -> None:
    heldout = made(["a"] * 3).heldout
    with pytest.raises(ArchsearchError, match="1 prompts are in both"):
        PromptSet([heldout[1]], heldout, "").check_apart()


def test_prompts_that_trained_or_chose_are_counted() -> None:
    known = made(["a"] * 4 * LEAST_HALF)
    first, *rest = known.heldout
    trained = PromptSet([first], rest, "")
    assert trained.seen_words(trained.confirming) is None
    asked = [first, *trained.choosing[:2], *trained.confirming[:3]]
    assert "trained or chosen on 3 of these 6 prompts" in str(trained.seen_words(asked))


def test_conversations_that_end_in_the_same_turn_are_other_prompts(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    rows = [
        [{"role": "user", "content": f"About {n}."}, {"role": "assistant", "content": "Well."}]
        for n in range(60)
    ]
    again = {"role": "user", "content": "Go on, please."}
    path.write_text("".join(json.dumps({"messages": [*row, again]}) + "\n" for row in rows))
    found = load_prompt_set(path, None)
    found.check_apart()
    assert len(found.train) + len(found.heldout) == 60
    assert prompt_faults([*found.train, *found.heldout]) == []
    with pytest.raises(ArchsearchError, match="1 prompts are in both.*Go on"):
        PromptSet(found.heldout[:1], found.heldout, "").check_apart()


def test_spread_reach_both_ends() -> None:
    assert spread(list(range(10)), 4) == [0, 3, 6, 9]
    assert spread([1, 2], 5) == [1, 2] and spread([1, 2], 1) == [1]


@pytest.mark.parametrize(
    ("count", "least", "held"),
    [
        (24, 32, 6),
        (100, 32, 25),
        (300, 32, 34),
        (640, 32, 32),
        (1300, 32, 65),
        (300, 0, 15),
        (24, 0, 6),
    ],
)
def test_small_files_keep_more_apart_and_never_more_than_a_quarter(
    tmp_path: Path, count: int, least: int, held: int
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(count)))
    found = load_prompt_set(path, None, least)
    assert len(found.heldout) == held and len(found.train) == count - held


def test_a_prompt_that_stands_twice_in_a_file_is_taken_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"prompt number {n % 30}"}) + "\n" for n in range(90))
    )
    found = load_prompt_set(path, None)
    found.check_apart()
    assert (
        len(found.train) + len(found.heldout) == 30
        and "60 repeated prompts left out" in found.source
    )
    path.write_text(json.dumps({"prompt": "all the same"}) + "\n")
    with pytest.raises(
        ArchsearchError,
        match="has 1 prompts: a draft would learn their answers by heart.*at least 8",
    ):
        load_prompt_set(path, None)
    path.write_text((json.dumps({"prompt": "all the same"}) + "\n") * 50)
    with pytest.raises(ArchsearchError, match="has 50 prompts, 1 of them distinct: "):
        load_prompt_set(path, None)


def answer(*written: int) -> CachedSequence:
    ids = torch.tensor([1, 2, 3, *written])
    return CachedSequence(ids, 3, torch.zeros(len(written), 4), ids[3:], "", "")


def asked(*texts: str) -> list[Prompt]:
    return [Prompt((("user", text),)) for text in texts]


VARIED = answer(*(17 * n % 101 for n in range(40)))
CIRCLE = answer(*([5, 6, 7, 8, 9] * 12))


def test_good_prompts_and_answers_have_no_faults() -> None:
    assert prompt_faults(asked(*(f"prompt {n}" for n in range(FEW_PROMPTS)))) == []
    assert answer_faults([VARIED] * 9 + [CIRCLE, answer(4)]) == []


def test_few_prompts_and_prompts_that_are_all_alike() -> None:
    (fault,) = prompt_faults(asked("only one"))
    assert fault.startswith("only 1 prompts: ") and "by heart" in fault
    (fault,) = prompt_faults(asked("the same") * 500)
    assert fault.startswith("500 prompts, 1 of them distinct: ")
    (fault,) = prompt_faults(asked(*(f"prompt {n % 40}" for n in range(500))))
    assert "40 of them distinct" in fault and "flatter" in fault


def test_answers_that_are_empty_or_one_token_long() -> None:
    (fault,) = answer_faults([answer(), answer(4), VARIED])
    assert fault.startswith("2 of 3 answers are one token long or empty")
    assert answer_faults([]) == ["the target wrote no answer: there is nothing to learn"]


def test_a_target_that_goes_in_circles() -> None:
    assert loops(CIRCLE.written.tolist()) and not loops(VARIED.written.tolist())
    assert not loops([7] * 10)  # too short to tell
    (fault,) = answer_faults([CIRCLE, CIRCLE, VARIED])
    assert fault.startswith("the target repeats itself in 2 of 3 answers")
