"""Lengths, traces and mixes: what loads, what it comes to, what is refused in one line."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from archsearch.acceptance.estimator import GivenAcceptance
from archsearch.errors import ArchsearchError
from archsearch.search.objective import Scorer
from archsearch.traffic.mix import Mix, mix_of, read_mix
from archsearch.traffic.served import objective_of, overs, serve_part
from archsearch.traffic.traces import Lengths, mean_context, read_trace
from archsearch.workload import Workload
from tests.doubles.serving import DRAFT, TARGET, FormulaLatency

PART = {"weight": 1, "concurrency": 4, "prompt_tokens": 300, "output_tokens": 100}


def test_lengths() -> None:
    normal = Lengths.read({"mean": 500, "std": 400}, "x")
    assert normal.mean == pytest.approx(500, abs=1) and normal.mean_square > 500**2
    assert Lengths.read({"low": 10, "high": 20}, "x").mean == pytest.approx(15, abs=0.5)
    uneven = Lengths.read({"values": [3, 1], "weights": [1, 3]}, "x")
    assert uneven.mean == 1.5
    shares = np.array([[0.1, 0.7], [0.8, 1.0]])  # of several candidates at once
    assert (uneven.quantiles(shares) * uneven.mean).tolist() == [[1, 1], [3, 3]]
    # half of a long answer's tokens are written late: 100 or 300 tokens, (100^2 + 300^2) / 2 / (2 *
    # 200) = 125
    assert mean_context(Lengths.read(50, "x"), Lengths.read({"values": [100, 300]}, "x")) == 175


@pytest.mark.parametrize(
    "data",
    [
        -1,
        "many",
        {"mean": -1, "std": 1},
        {"low": 3, "high": 1},
        {"values": []},
        {"values": [1], "weights": [0]},
        {"values": [1, 2], "weights": [1]},
        {"values": ["a"]},
        {"mean": 1},
        None,
        True,
        {"mean": 10, "std": float("inf")},
        {"mean": float("nan"), "std": 1},
        {"values": [1, 2], "weights": [float("inf"), 1]},
        {"values": [1, 2], "weights": [float("nan"), 1]},
    ],
)
def test_lengths_that_are_none(data: Any) -> None:
    with pytest.raises(ArchsearchError, match="prompt"):
        Lengths.read(data, "prompt")


def test_traces_of_three_makers(tmp_path: Path) -> None:
    moon, burst, vllm = tmp_path / "m.jsonl", tmp_path / "b.csv", tmp_path / "v.json"
    rows = [(0.0, 100, 20), (0.5, 200, 40), (2.0, 300, 60)]
    moon.write_text(
        "\n".join(
            json.dumps({"timestamp": int(1e3 * t), "input_length": p, "output_length": o})
            for t, p, o in rows
        )
    )
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    lines = [f"{t},ChatGPT,{p},{o},{p + o},Conversation log" for t, p, o in rows]
    burst.write_text(head + "\n".join([*lines[:2], "1.0,GPT-4,50,0,50,Conversation log", lines[2]]))
    vllm.write_text(
        json.dumps(
            {
                "input_lens": [100, 200, 300],
                "output_lens": [20, 40, 60],
                "start_times": [5.0, 5.5, 7.0],
            }
        )
    )
    for path in (moon, burst, vllm):
        trace = read_trace(path)
        assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in trace.requests] == rows
        assert trace.requests_per_s == 1.0 and trace.prompt.mean == 200 and trace.output.mean == 40
    assert "1 requests without an answer" in read_trace(burst).note
    vllm.write_text(
        json.dumps({"input_lens": [9, 1, 2], "output_lens": [0, 3, 4], "start_times": [0, 1, 2]})
    )
    assert (
        "1 requests without an answer" in read_trace(vllm).note
        and read_trace(vllm).requests[0].arrival_s == 0.0
    )
    vllm.write_text(json.dumps({"input_lens": [1, 2], "output_lens": [1, 2], "duration": 4.0}))
    assert "spread evenly over its 4 s" in read_trace(vllm).note


def test_a_trace_that_a_spreadsheet_wrote(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    rows = "".join(f"{second},ChatGPT,100,20\r\n" for second in range(3))
    path.write_bytes(("\ufeffTimestamp,Model,Request tokens,Response tokens\r\n" + rows).encode())
    assert read_trace(path).requests_per_s == 1.0


def line(timestamp: int, prompt: int, output: int = 1) -> str:
    return json.dumps({"timestamp": timestamp, "input_length": prompt, "output_length": output})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (line(5000, 1) + "\n" + line(0, 1), "order"),
        (line(0, -4) + "\n" + line(1, 1), "-4"),
        (line(0, 1), "at least 2"),
        ('{"timestamp": 0}\n{}', "line 1"),
        ("", "none that is known"),
        ("Time,Tokens\n1,2\n", "columns time, tokens"),
        ("Timestamp,Request tokens,Response tokens\n1,x,3\n", "line 2"),
        ('{"input_lens": [1], "output_lens": [1, 2], "duration": 1}', "2 answers"),
        (line(0, 1) + "\n" + line(0, 1), "at once"),
        (
            '{"timestamp": NaN, "input_length": 1, "output_length": 1}\n' + line(1, 1),
            "arrived at nan s",
        ),
        (
            '{"input_lens": [1, 2], "output_lens": [1, 2], "duration": "long"}',
            "duration must be numbers",
        ),
        (
            '{"input_lens": [1, 2], "output_lens": [1, 2], "duration": -5}',
            "neither start_times nor a duration",
        ),
        ('{"input_lens": [1, 2], "output_lens": [1, 2]}', "neither start_times nor a duration"),
        (
            '{"input_lens": ["a", 2], "output_lens": [3, 4], "start_times": [0, 1]}',
            "input_lens must be numbers",
        ),
        ('{"input_lens": 5, "output_lens": [3, 4]}', "input_lens must be numbers"),
        (
            '{"input_lens": [1, 2], "output_lens": [3, 4], "start_times": [0, null]}',
            "start_times must be numbers",
        ),
        (line(0, 10**400) + "\n" + line(1, 1), "line 1"),
        (
            f'{{"input_lens": [1{"0" * 400}, 2], "output_lens": [3, 4], "duration": 1}}',
            "input_lens must be numbers",
        ),
        ("{" * 100_000, "line 1"),
        ("Timestamp," + "x" * 200_000 + "\n1,2\n", "no CSV"),
    ],
)
def test_traces_that_are_none(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ArchsearchError, match=words):
        read_trace(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "list of parts"),
        ({"parts": [{**PART, "weight": 0}]}, "add up to 0"),
        ({"parts": [{**PART, "weight": -1}]}, "weight: must be at least 0"),
        (
            {"parts": [{**PART, "weight": 1e308}, {**PART, "weight": 1e308}]},
            "must be at most 1e\\+100",
        ),
        ({"parts": [{**PART, "requests_per_second": 1}]}, "either concurrency or"),
        ({"parts": [{**PART, "concurrency": 0}]}, "at least 1"),
        ({"parts": [{**PART, "concurrency": 10**400}]}, "at most 1e\\+09"),
        ({"parts": [{**PART, "weight": 10**400}]}, "weight: must be a finite number"),
        ({"parts": [{**PART, "prompt_tokens": 10**400}]}, "between 0 and"),
        ({"parts": [{**PART, "prompt_tokens": {"low": 1, "high": 10**400}}]}, "no number"),
        ({"parts": [{**PART, "prompt_tokens": -5}]}, "between 0 and"),
        ({"parts": [{**PART, "output_tokens": 0}]}, "at least 1 token"),
        ({"parts": [{**PART, "speed": 3}]}, "speed: is not known"),
        ({"parts": [{**PART, "domain": "poems"}]}, "'poems' is none of"),
        ({"parts": [{**PART, "prefix_cache_hit": 2}]}, "prefix_cache_hit"),
        (
            {"parts": [PART], "objective": "fun"},
            "one of speedup, tpot, throughput, tokens_per_device, got 'fun'",
        ),
        ({"parts": [PART], "limits": {"tpot_ms": -1}}, "tpot_ms: must be above 0, got -1"),
        ({"parts": [PART], "limits": {"tpot_ms": None}}, "limits: tpot_ms is empty; give its"),
        ({"parts": [{**PART, "prefix_cache_hit": None}]}, "part 1: prefix_cache_hit is empty"),
        ({"parts": [PART], "memory_fraction": 1.5}, "memory_fraction: must be at most 1"),
    ],
)
def test_mixes_that_are_none(data: dict, words: str) -> None:
    with pytest.raises(ArchsearchError, match=words):
        mix_of(data, "workload w")


def test_a_mix_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mix.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "objective": "tpot",
                "parts": [{**PART, "name": "chat", "weight": 70}, {**PART, "weight": 30}],
            }
        )
    )
    mix = read_mix(path)
    assert (
        [part.weight for part in mix.parts] == [0.7, 0.3]
        and mix.objective == "tpot"
        and mix.parts[0].context == 350
    )
    with pytest.raises(ArchsearchError, match="cannot read"):
        read_mix(tmp_path / "none.yaml")
    for text in (
        "a: [",
        "a: 2026-13-45",
        "a: " + "[" * 5000,
        "a: !!python/object/apply:os.getcwd []",
    ):
        path.write_text(text)
        with pytest.raises(ArchsearchError, match="not YAML"):
            read_mix(path)
    path.write_text(
        "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(
            f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
            for before, name in pairwise("abcdefgh")
        )
    )
    with pytest.raises(ArchsearchError, match="once its aliases are written out"):
        read_mix(path)


def test_limits_of_parts_of_one_name_are_all_kept() -> None:
    mix = mix_of(
        {
            "parts": [
                {**PART, "name": "chat"},
                {**PART, "name": "chat"},
                {**PART, "name": "chat (2)"},
            ]
        },
        "w",
    )
    assert [part.name for part in mix.parts] == ["chat", "chat (2)", "chat (2) (3)"]
    assert mix_of(mix.to_dict(), "w") == mix


def served(mix: Mix, **costs: float) -> list:
    scorer = Scorer(TARGET, Workload(), FormulaLatency(**costs), GivenAcceptance(0.8))
    from archsearch.drafters.registry import as_drafter

    return [serve_part(scorer, as_drafter(DRAFT), part) for part in mix.parts]


def test_objectives_over_a_mix_by_hand() -> None:
    mix = mix_of({"parts": [{**PART, "weight": 3}, {**PART, "concurrency": 64}]}, "w")
    parts = served(mix)
    tpot = 0.75 * parts[0].best.tpot_s + 0.25 * parts[1].best.tpot_s
    assert objective_of(parts, "tpot", 1) == pytest.approx(tpot)
    alone = 0.75 * parts[0].plain.tpot_s + 0.25 * parts[1].plain.tpot_s
    assert objective_of(parts, "speedup", 1) == pytest.approx(alone / tpot)
    whole = 1 / (0.75 / parts[0].best.tokens_per_s + 0.25 / parts[1].best.tokens_per_s)
    assert objective_of(parts, "throughput", 4) == pytest.approx(whole)
    assert objective_of(parts, "tokens_per_device", 4) == pytest.approx(whole / 4)
    assert parts[0].gamma > parts[1].gamma, "at 64 in flight fewer tokens are worth drafting"


def test_off_pays_what_the_loaded_draft_costs() -> None:
    mix = mix_of({"parts": [{**PART, "concurrency": 512}]}, "w")
    (part,) = served(mix, row=1e-3, off=5e-3)
    assert part.gamma == 0 and part.best == part.off and part.speedup < 1.0


def test_limits_are_named() -> None:
    data = {
        "parts": [{**PART, "name": "chat"}],
        "limits": {"tpot_ms": 0.1, "parameters": 10, "training_exaflop": 1e-9},
    }
    mix = mix_of(data, "w")
    from archsearch.drafters.registry import as_drafter

    found = overs(served(mix), mix, as_drafter(DRAFT), Workload(), 1e9)
    words = " ".join(each.words for each in found if each.over > 0)
    assert (
        "chat: " in words
        and "at most 0.1" in words
        and "parameters" in words
        and "exaFLOP" in words
    )


def test_a_load_that_fits_no_batch() -> None:
    mix = mix_of({"parts": [PART]}, "w")
    scorer = Scorer(TARGET, Workload(), FormulaLatency(), GivenAcceptance(0.8))
    from archsearch.drafters.registry import as_drafter

    with pytest.raises(ArchsearchError, match="fits no batch"):
        serve_part(scorer, as_drafter(DRAFT), mix.parts[0], (0, 4))
