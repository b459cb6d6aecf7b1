"""Likeness of prompt sets: same source near 1, other kinds near 0, whatever the order, size or
language."""

from __future__ import annotations

import itertools
import random

import pytest

from archsearch.errors import ArchsearchError
from archsearch.files import read_json, write_json
from archsearch.records import save
from archsearch.text.likeness import (
    SKETCH_FILE,
    TextSketch,
    likeness,
    load_sketch,
    sketch_of,
    words_of,
)
from archsearch.text.prompts import Prompt


def sketch(texts: list[str]) -> TextSketch:
    return sketch_of([Prompt((("user", text),)) for text in texts])


def letters(seed: int, count: int = 60) -> list[str]:
    chance = random.Random(seed)
    what = [
        "a lamp",
        "two chairs",
        "the wrong book",
        "a torn shirt",
        "three mugs",
        "a broken clock",
    ]
    wish = [
        "wants a refund",
        "asks for a new one",
        "wants to know when it will come",
        "would like to send it back",
    ]
    return [
        f"A customer got {chance.choice(what)} and {chance.choice(wish)}. Write a short reply."
        for _ in range(count)
    ]


def sums(seed: int, count: int = 60) -> list[str]:
    chance = random.Random(seed)
    who, thing = ["Ann", "Bob", "Mei", "Omar"], ["apples", "coins", "pencils", "miles"]
    return [
        f"{chance.choice(who)} has {chance.randint(2, 99)} {chance.choice(thing)} and loses half."
        " How many are left?"
        for _ in range(count)
    ]


def test_one_source_is_one_and_two_kinds_are_near_zero() -> None:
    assert likeness(sketch(letters(1)), sketch(letters(2))) > 0.9
    assert likeness(sketch(letters(1)), sketch(sums(1))) < 0.15
    mixed = sketch([*letters(3, 30), *sums(3, 30)])
    assert 0.4 < likeness(mixed, sketch(letters(1))) < 0.95


def test_the_same_prompts_in_another_order_are_the_same() -> None:
    texts = letters(1)
    assert sketch(texts).digest == sketch(texts[::-1]).digest
    assert likeness(sketch(texts), sketch(texts[::-1])) == 1.0
    assert sketch(texts).digest != sketch(texts[1:]).digest


def test_a_few_prompts_of_a_kind_are_known_for_it() -> None:
    few = sketch(letters(5, 8))
    assert likeness(few, sketch(letters(1))) > 0.7 and likeness(few, sketch(sums(1))) < 0.2


@pytest.mark.parametrize(
    "texts", [["Why is the sky blue?"], ["Sing.", "Go home now."], ["same words"] * 9]
)
def test_sets_too_small_or_all_alike_have_a_likeness(texts: list[str]) -> None:
    for one, other in itertools.product((texts, letters(1)), repeat=2):
        assert 0.0 <= likeness(sketch(one), sketch(other)) <= 1.0
    assert likeness(sketch(texts), sketch(letters(1))) < 0.3


def test_languages_without_spaces_have_words() -> None:
    assert words_of("Hello, 世界 12!") == ["hello", ",", "世", "界", "0", "!"]
    assert words_of("สวัสดี")[0] == "ส"
    weather = [
        f"请告诉我{city}明天的天气怎么样"
        for city in ("北京", "上海", "广州", "成都", "杭州", "西安")
    ]
    poems = [f"写一首关于{thing}的短诗" for thing in ("月亮", "大海", "秋天", "故乡", "雪", "茶")]
    assert likeness(sketch(weather[::2]), sketch(weather[1::2])) > 0.8
    assert likeness(sketch(weather), sketch(poems)) < 0.3


def test_a_sketch_is_small_holds_no_text_and_comes_back(tmp_path) -> None:
    made = sketch([*letters(1), "the word zyzzyva is here"])
    save(tmp_path / SKETCH_FILE, made)
    assert load_sketch(tmp_path) == made
    path = tmp_path / SKETCH_FILE
    assert (
        path.stat().st_size < 7000
        and "zyzzyva" not in path.read_text()
        and "customer" not in path.read_text()
    )
    write_json(path, {**read_json(path, "sketch"), "format": 9})
    assert load_sketch(tmp_path) is None
    path.write_text("{}")
    assert load_sketch(tmp_path) is None and load_sketch(tmp_path / "nowhere") is None
    with pytest.raises(ArchsearchError, match="no prompts"):
        sketch_of([])
