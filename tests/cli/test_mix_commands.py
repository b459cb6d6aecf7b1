"""`search` and `estimate` over a mix of work from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from archsearch.traffic.mix import read_mix
from tests.cli.commands import ESTIMATE, call, last_json, refused

MIX = {
    "objective": "throughput",
    "tensor_parallel": 1,
    "parts": [
        {
            "name": "chat",
            "weight": 70,
            "concurrency": 4,
            "prompt_tokens": {"mean": 300, "std": 200},
            "output_tokens": 100,
        },
        {
            "name": "code",
            "weight": 30,
            "concurrency": 16,
            "prompt_tokens": 900,
            "output_tokens": {"low": 100, "high": 300},
            "temperature": 0.5,
            "domain": "code",
            "prefix_cache_hit": 0.5,
        },
    ],
}
SPACE = {
    "dimensions": {
        "num_hidden_layers": [1, 2],
        "hidden_size": [1024, 2048],
        "ffn_ratio": [2],
        "num_key_value_heads": [8],
        "kv_group_size": [2],
        "head_dim": [64],
        "tie_word_embeddings": [False],
        "draft_vocab_size": ["target"],
        "window_pattern": ["L"],
        "sliding_window": [256],
    }
}
SEARCH = (
    "search",
    "--target",
    "llama-13b",
    "--gpu",
    "a100",
    "--space",
    "space.yaml",
    "--workload",
    "mix.yaml",
    "--run",
    "runs/m",
)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump(MIX))
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(SPACE))
    return tmp_path


def test_a_search_over_a_mix_and_what_comes_after(files: Path) -> None:
    found = last_json(call(*SEARCH, "--trials", "4", "--json"))
    other = yaml.safe_dump(MIX | {"objective": "tpot"})
    (files / "mix.yaml").write_text(other)
    assert "workload was" in refused(*SEARCH, "--trials", "4"), "another mix is another question"
    (files / "mix.yaml").write_text(yaml.safe_dump(MIX))
    assert found["mix"]["objective"] == "throughput" and [
        part["weight"] for part in found["mix"]["parts"]
    ] == [0.7, 0.3]
    gains = [score["mix"]["value"] / score["mix"]["plain"] for score in found["best"]]
    assert gains == sorted(gains, reverse=True) and len(gains) >= 4
    again = [
        step["command"] for step in found["next"] if step["command"].startswith("archsearch search")
    ]
    assert all(
        "--workload runs/m/workload.json" in line and "--batch-size" not in line for line in again
    )
    assert read_mix(Path("runs/m/workload.json")) == read_mix(Path("mix.yaml")), (
        "what is to be asked again is kept beside the run"
    )
    text = call(*SEARCH, "--trials", "4", "--explain").stdout  # goes on with what it holds
    assert (
        "2 kinds of requests, each by itself on the device, best" in text
        and "Rank 1: throughput over the mix" in text
    )
    assert "16 in flight" in text and "over the mix of work" in text
    assert text.startswith(f"Speculation brings {gains[0]:.2f}x the throughput (")
    (files / "mix.yaml").unlink()  # the run keeps the mix itself
    call("report", "runs/m")
    page = (files / "runs/m/report.html").read_text()
    assert "Over the mix of work" in page and "chat" in page
    assert call("schedule", "runs/m", "--batch-size", "4").stdout
    header = (files / "runs/m/trials.csv").read_text().splitlines()[0].split(",")
    assert "throughput" in header and "mix" not in header


def test_a_family_over_a_limit_is_left_out_alone(files: Path) -> None:
    asked = (*SEARCH, "--trials", "4", "--family", "independent", "--family", "ngram")
    found = last_json(call(*asked, "--max-memory", "0.01", "--json"))
    assert [row["family"] for row in found["families"]] == ["ngram"]
    (why,) = found["left_out"]
    assert why.startswith("independent is left out: no shape of space space (")
    assert why.endswith(" keeps within memory_gib=0.01"), "no limit that nobody asked for"
    again = (*asked, "--run", "runs/n", "--max-ttft", "0.001")
    assert "ngram (1) keeps within ttft_ms=0.001; raise the limit" in refused(*again)


def test_an_estimate_over_a_mix_says_what_traffic_does(files: Path) -> None:
    asked = (
        *ESTIMATE,
        "--draft",
        "sheared-llama-1.3b",
        "--alpha",
        "0.7",
        "--workload",
        "mix.yaml",
        "--max-ttft",
        "1",
        "--json",
    )
    found = last_json(call(*asked))
    told = last_json(call("traffic", *asked[1:]))
    by_name = {entry["draft"]: entry for entry in told["drafts"]}
    for entry in found["drafts"]:
        same = by_name[entry["draft"]]
        assert entry["mix"]["value"] == pytest.approx(same["objective"], rel=1e-9)
        assert entry["speedup"]["value"] == pytest.approx(same["speedup"], rel=1e-9)
        assert [part["gamma"] for part in entry["mix"]["parts"]] == [
            part["gamma"] for part in same["parts"]
        ]
        assert entry["mix"]["broken_limits"] == same["broken_limits"] and same["broken_limits"]
        assert not entry["pays"]


def test_what_waits_for_memory_is_said_and_each_kind_has_its_gamma(files: Path) -> None:
    chat, code = MIX["parts"]
    long = {"name": "rag", "concurrency": 200, "prompt_tokens": 30_000, "domain": "qa"}
    (files / "mix.yaml").write_text(yaml.safe_dump(MIX | {"parts": [chat, code | long]}))
    asked = ("estimate", "--target", "llama-3.1-8b", "--gpu", "h100", "--draft", "eagle3")
    asked += ("--workload", "mix.yaml")
    parts = last_json(call(*asked, "--json"))["drafts"][0]["mix"]["parts"]
    first, second = (part["gamma"] for part in parts)
    said = " ".join(call(*asked).stdout.split())
    assert first != second and f"best eagle3, gamma {first}/{second}, " in said
    assert f"rag: {parts[1]['running']:.0f} of 200 in flight run at once, the others wait." in said


@pytest.mark.parametrize(
    ("load", "fixed"), [({"concurrency": 4}, False), ({"requests_per_second": 0.5}, True)]
)
def test_the_headline_of_throughput_is_throughput(
    files: Path, load: dict[str, float], fixed: bool
) -> None:
    part = {"name": "a", "prompt_tokens": 300, "output_tokens": 100, **load}
    (files / "mix.yaml").write_text(yaml.safe_dump(MIX | {"parts": [part]}))
    asked = (*ESTIMATE, "--alpha", "0.7", "--workload", "mix.yaml")
    best = last_json(call(*asked, "--json"))["drafts"][0]
    value, plain = best["mix"]["value"], best["mix"]["plain"]
    said = " ".join(call(*asked).stdout.split())
    rates = f"({value:,.0f} tokens/s, {plain:,.0f} without)"
    assert said.startswith(f"Speculation brings {value / plain:.2f}x the throughput {rates}")
    assert (value == plain) == ("which the rate fixes" in said) == fixed
    gain = f"{best['speedup']['value']:.2f}x ("
    assert gain in said and ") a token." in said
    other = " ".join(call(*asked, "--objective", "speedup").stdout.split())
    assert "throughput" not in other.partition(". ")[0] and gain in other


def test_a_draft_over_a_limit_is_never_the_best(files: Path) -> None:
    asked = (*ESTIMATE, "--alpha", "0.7", "--draft", "sheared-llama-1.3b", "--max-parameters")
    first, second = last_json(call(*asked, "1e12", "--json"))["drafts"]
    most = (first["parameters"] + second["parameters"]) / 2
    smaller, larger = sorted((first, second), key=lambda entry: entry["parameters"])
    one, other = last_json(call(*asked, f"{most:.0f}", "--json"))["drafts"]
    assert (one["draft"], other["draft"]) == (smaller["draft"], larger["draft"])
    text = call(*asked, f"{most:.0f}").stdout
    (limit,) = other["mix"]["broken_limits"]
    assert f"best {one['draft']}," in text.splitlines()[0] + text.splitlines()[1]
    assert f"{other['draft']} breaks a limit: {limit}." in text and "over limit" in text
    text = call(*asked, "1000").stdout
    assert text.startswith("Breaks a limit: ") and "Without that:" in text


def test_an_objective_without_a_file_is_about_one_kind_of_request() -> None:
    explained = (*ESTIMATE, "--batch-size", "8", "--explain", "--objective")
    (entry,) = last_json(
        call(*ESTIMATE, "--batch-size", "8", "--context", "512", "--objective", "tpot", "--json")
    )["drafts"]
    (part,) = entry["mix"]["parts"]
    assert (
        part["context"] == 512
        and part["running"] == 8
        and entry["mix"]["value"] == entry["tpot_s"]["value"]
    )
    assert "requests: 8 in flight" in call(*explained, "tpot").stdout


@pytest.mark.parametrize(
    ("change", "extra", "words"),
    [
        ({"parts": []}, (), "list of parts"),
        ({"parts": [{**MIX["parts"][0], "weight": 0}]}, (), "add up to 0"),
        ({"parts": [{**MIX["parts"][0], "weight": -1}]}, (), "weight: must be at least 0"),
        ({"parts": [{**MIX["parts"][0], "prompt_tokens": -5}]}, (), "between 0 and"),
        ({"parts": [{**MIX["parts"][0], "output_tokens": 0}]}, (), "at least 1 token"),
        ({"parts": [{**MIX["parts"][0], "prompt_tokens": 9_000_000}]}, (), "fits no batch"),
        ({"objective": "speed"}, (), "got 'speed'"),
        ({"tensor_parallel": 0}, (), "at least 1"),
        ({}, ("--tensor-parallel", "2"), "but the workload says tensor_parallel: 1"),
        ({"parts": [{**MIX["parts"][0], "output_tokens": 1}]}, (), "nothing to draft"),
        ({}, ("--max-tpot", "0"), "--max-tpot"),
        ({}, ("--max-tpot", "nan"), "--max-tpot': nan is not a number"),
        ({}, ("--memory-fraction", "0.01"), "fits no batch"),
        ({}, ("--engine", "transformers"), "one request at a time"),
        ({}, ("--max-parameters", "1000"), "parameters=1000"),
        ({"tensor_parallel": 3}, (), "3"),
    ],
)
def test_what_is_refused(files: Path, change: dict, extra: tuple[str, ...], words: str) -> None:
    (files / "mix.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(MIX)) | change))
    assert words in refused(*SEARCH, "--trials", "2", *extra)
    if (
        "--max-parameters" not in extra
    ):  # which no shape keeps: the search that found that out is a run
        assert not (files / "runs").exists(), (
            "nothing half-written: the same --run works once the mix is mended"
        )


def test_a_sweep_has_one_condition(files: Path) -> None:
    assert "--sweep prices one condition" in refused(
        *ESTIMATE, "--sweep", "batch", "--workload", "mix.yaml"
    )
    assert "cannot read the workload nowhere.yaml" in refused(
        *ESTIMATE, "--workload", "nowhere.yaml"
    )


def test_what_the_file_says_is_not_said_again(files: Path) -> None:
    """Such options were taken, and made no difference."""
    mixed = ("--workload", "mix.yaml")
    assert "--batch-size is of one kind of request" in refused(
        *ESTIMATE, *mixed, "--batch-size", "8"
    )
    assert "--context is of one kind of request, and mix.yaml" in refused(
        *SEARCH, "--context", "64"
    )
    assert "--output-tokens" in refused("traffic", *ESTIMATE[1:], *mixed, "--output-tokens", "9")
    rate = ("--requests-per-second", "1", "--batch-size", "8")
    assert "No such option '--batch-size'" in refused("traffic", *ESTIMATE[1:], *rate)
    assert "--prompt-tokens" in refused(
        "traffic", *ESTIMATE[1:], "--trace", "t.jsonl", "--prompt-tokens", "512"
    )


def test_routing_skew_is_of_experts() -> None:
    assert "--routing-skew is of a mixture of experts" in refused(
        *ESTIMATE, "--routing-skew", "0.5"
    )
    asked = (
        "estimate",
        "--target",
        "qwen3-30b-a3b",
        "--draft",
        "ngram",
        "--gpu",
        "h100",
        "--alpha",
        "0.7",
        "--gamma",
        "4",
    )
    priced = (*asked, "--json")
    even, skewed = (
        last_json(call(*priced, "--routing-skew", skew))["drafts"][0] for skew in ("0", "1.5")
    )
    assert even["verify_s"]["value"] > 1.05 * skewed["verify_s"]["value"], (
        "fewer experts are touched where few are popular"
    )
