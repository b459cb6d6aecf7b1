"""Held-out prompts in two halves: one chooses, the other confirms."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from archsearch.errors import ArchsearchError
from archsearch.text.prompt_set import LEAST_HALF, PromptSet, load_prompt_set, spread_prompts
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


def test_a_file_too_small_to_split_serves_both_ends() -> None:
    small = made(["a"] * (2 * LEAST_HALF - 1))
    assert not small.split and small.choosing == small.confirming == small.heldout
    assert made(["a"] * 2 * LEAST_HALF).split


def test_a_prompt_on_both_sides_is_refused() -> None:
    heldout = made(["a"] * 3).heldout
    with pytest.raises(ArchsearchError, match="1 prompts are in both"):
        PromptSet([heldout[1]], heldout, "").check_apart()


def test_spread_prompts_reach_both_ends() -> None:
    assert spread_prompts(list(range(10)), 4) == [0, 3, 6, 9]
    assert spread_prompts([1, 2], 5) == [1, 2] and spread_prompts([1, 2], 1) == [1]


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
