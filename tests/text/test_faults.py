"""Prompts and answers that a draft can learn little from: each fault said once, and none where
there is none."""

from __future__ import annotations

import torch

from archsearch.text.cache import CachedSequence
from archsearch.text.prompt_set import FEW_PROMPTS, answer_faults, loops, prompt_faults


def answer(*written: int) -> CachedSequence:
    ids = torch.tensor([1, 2, 3, *written])
    return CachedSequence(ids, 3, torch.zeros(len(written), 4), ids[3:], "", "")


VARIED = answer(*(17 * n % 101 for n in range(40)))
CIRCLE = answer(*([5, 6, 7, 8, 9] * 12))


def test_good_prompts_and_answers_have_no_faults() -> None:
    assert prompt_faults([f"prompt {n}" for n in range(FEW_PROMPTS)]) == []
    assert answer_faults([VARIED] * 9 + [CIRCLE, answer(4)]) == []


def test_few_prompts_and_prompts_that_are_all_alike() -> None:
    (fault,) = prompt_faults(["only one"])
    assert fault.startswith("only 1 prompts: ") and "by heart" in fault
    (fault,) = prompt_faults(["the same"] * 500)
    assert fault.startswith("500 prompts, 1 of them distinct: ")
    (fault,) = prompt_faults([f"prompt {n % 40}" for n in range(500)])
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
