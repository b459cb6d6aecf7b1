from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any

import pytest

from archsearch.errors import ArchsearchError
from archsearch.export.engines import (
    Setup,
    last_drafting,
    schedule_words,
    serving,
    sglang_schedule,
    tensorrt_schedule,
)
from archsearch.schedule import Ranges, check_schedule, gamma_at, largest_gamma

RANGES: Ranges = ((1, 2, 4), (3, 16, 1), (17, 256, 0))


def up_to(schedule: dict[int, int], batch: int) -> int:
    """TensorRT-LLM since pull request 10860 (March 2026): the first key >= the batch size; no
    drafts above the last key."""
    keys = sorted(schedule)
    index = bisect_left(keys, batch)
    return schedule[keys[index]] if index < len(keys) else 0


def from_on(schedule: dict[int, int], batch: int) -> int:
    """TensorRT-LLM before it: the last key <= the batch size."""
    keys = sorted(schedule)
    return schedule[keys[bisect_right(keys, batch) - 1]]


def test_a_good_schedule_passes_and_lists_become_tuples() -> None:
    assert (
        check_schedule([[1, 2, 4], [3, 16, 1], [17, 256, 0]]) == RANGES and check_schedule([]) == ()
    )
    assert (
        largest_gamma(RANGES, 7) == 4
        and largest_gamma((), 7) == 7
        and largest_gamma(((1, 8, 0),), 3) == 3
    )


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ([[2, 4, 3]], "start at batch size 1, got 2"),
        ([[0, 4, 3]], "start at batch size 1"),
        ([[1, 4, 3], [6, 8, 1]], "go on at batch size 5, got 6"),
        ([[1, 4, 3], [4, 8, 1]], "go on at batch size 5, got 4"),
        ([[1, 4]], "whole numbers"),
        ([[1, 4, 2.5]], "whole numbers"),
        ([[1, True, 2]], "whole numbers"),
        (["1-4"], "whole numbers"),
        ([[1, 0, 2]], "last batch"),
        ([[1, 4, -1]], "gamma >= 0"),
    ],
)
def test_a_bad_schedule_is_refused(ranges: list[Any], words: str) -> None:
    with pytest.raises(ArchsearchError, match=words):
        check_schedule(ranges)


def test_tensorrt_schedule_says_the_same_in_both_readings() -> None:
    assert tensorrt_schedule(RANGES) == {1: 4, 2: 4, 3: 1, 16: 1, 17: 0}
    dice = random.Random(0)
    for _ in range(200):
        gammas = [dice.randint(1, 8)]
        while dice.random() < 0.7:
            gammas.append(dice.randint(0, gammas[0]))
        ranges, first = [], 1
        for gamma in gammas:
            last = first + dice.randint(0, 9)
            ranges.append((first, last, gamma))
            first = last + 1
        schedule = tensorrt_schedule(tuple(ranges))
        assert (
            schedule is not None
            and min(schedule) == 1
            and schedule[1] == gammas[0] == max(schedule.values())
        )
        for batch in range(1, first):
            expected = gamma_at(tuple(ranges), batch)
            assert up_to(schedule, batch) == from_on(schedule, batch) == expected, (
                ranges,
                batch,
                schedule,
            )


def test_what_tensorrt_cannot_say() -> None:
    assert tensorrt_schedule(()) is None
    assert tensorrt_schedule(((1, 4, 2), (5, 8, 3))) is None, (
        "batch 1 must have the largest draft length"
    )
    assert tensorrt_schedule(((1, 4, 0), (5, 8, 0))) is None


def test_a_schedule_that_cannot_be_said_still_stops_drafting() -> None:
    assert last_drafting(((1, 4, 3), (5, 32, 5), (33, 256, 0))) == 32
    assert last_drafting(((1, 4, 3),)) is None and last_drafting(((1, 256, 0),)) is None
    yaml_text = serving(
        "tensorrt-llm", Setup(Path("d"), "T", 5, "bfloat16", ((1, 4, 3), (5, 32, 5), (33, 256, 0)))
    ).files
    assert "max_concurrency: 32" in next(
        iter(yaml_text.values())
    ) and "draft_len_schedule" not in next(iter(yaml_text.values()))


def from_on_padded(schedule: dict[str, Any], batch: int) -> int:
    """SGLang 0.5.23 (adaptive_step_router.py) without CUDA graphs: the last key <= the batch
    size."""
    keys = sorted(int(key) for key in schedule)
    (gamma,) = schedule[str(keys[max(0, bisect_right(keys, batch) - 1)])]["candidate_steps"]
    return int(gamma)


def test_sglang_has_one_candidate_from_each_batch_size_on() -> None:
    told = sglang_schedule(((1, 2, 4), (3, 8, 4), (9, 16, 1), (17, 256, 0)))
    assert told == {
        "1": {"candidate_steps": [4]},
        "9": {"candidate_steps": [1]},
        "17": {"candidate_steps": [0]},
    }
    assert [from_on_padded(told, batch) for batch in (1, 8, 9, 16, 17, 300)] == [4, 4, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("engine", "family", "ranges", "words"),
    [
        (
            "vllm",
            "independent",
            RANGES,
            '"num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 16, 1], [17, 256, 0]]',
        ),
        (
            "tensorrt-llm",
            "eagle3",
            RANGES,
            'draft_len_schedule: {"1": 4, "2": 4, "3": 1, "16": 1, "17": 0}',
        ),
        (
            "tensorrt-llm",
            "eagle3",
            ((1, 4, 2), (5, 8, 3), (9, 64, 0)),
            "max_draft_len: 3, max_concurrency: 8",
        ),
        ("sglang", "eagle3", RANGES, "--speculative-adaptive-config FILE"),
        (
            "sglang",
            "independent",
            RANGES,
            "takes one gamma for all batch sizes: 3; above batch size 16 start it without a draft",
        ),
        ("llama.cpp", "independent", ((1, 4, 2),), "takes one gamma for all batch sizes: 3"),
        ("sglang", "ngram", ((1, 256, 0),), "serve it without a draft"),
    ],
)
def test_what_an_engine_is_to_be_told(engine: str, family: str, ranges: Ranges, words: str) -> None:
    assert words in schedule_words(engine, family, ranges, 3)
