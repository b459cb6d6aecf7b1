"""`estimate --sweep`: table, CSV, picture, JSON; and what it refuses."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.cli.commands import ESTIMATE, call, last_json, refused

CONTEXTS = ("--alpha", "0.7", "--sweep", "context", "--range", "256:2048:4")
TWO = (*ESTIMATE, "--draft", "sheared-llama-1.3b", "--alpha", "0.7", "--context", "1024")


def test_a_sweep_over_batch_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = (
        *TWO,
        "--sweep",
        "batch",
        "--range",
        "1:64:6",
        "--csv",
        "c.csv",
        "--plot",
        "c.svg",
    )
    text = call(*arguments).stdout
    assert "speed-up" in text and "Memory: weights" in text and "holds" in text
    result = last_json(call(*arguments, "--json"))
    assert result["sweep"] == "batch" and len(result["curves"]) == 2
    rows = list(csv.DictReader(Path("c.csv").read_text(encoding="utf-8").splitlines()))
    assert len(rows) == sum(len(curve["points"]) for curve in result["curves"]) > 8
    assert {row["draft"] for row in rows} == {
        "wide-796m",
        "sheared-llama-1.3b",
    }
    point = result["curves"][0]["points"][0]
    alone = last_json(call(*TWO, "--json"))["drafts"][0]
    assert (
        point["speedup"]["value"] == pytest.approx(alone["speedup"]["value"], rel=1e-6)
        and point["gamma"] == alone["gamma"]
    )
    picture = Path("c.svg").read_text(encoding="utf-8")
    assert "wide-796m" in picture and "sheared-llama-1.3b" in picture and "speed-up, x" in picture
    assert text.startswith("wide-796m: ")


def test_each_headline_of_several_engines_names_its_own() -> None:
    asked = ("--sweep", "batch", "--range", "1:8:2", "--engine", "vllm", "--engine", "sglang")
    first, second, *_ = call(*ESTIMATE, *asked, "--alpha", "0.7").stdout.splitlines()
    assert first.startswith("wide-796m, vllm 0.") and second.startswith("wide-796m, sglang 0.")


def test_memory_is_told(tmp_path: Path) -> None:
    (item,) = last_json(call(*ESTIMATE, *CONTEXTS, "--json"))["curves"]
    with_draft, alone = item["memory"]["with_draft"], item["memory"]["alone"]
    assert with_draft["requests"] < alone["requests"] and with_draft["draft_weight_bytes"] > 0
    assert item["memory"]["context"] == item["points"][-1]["x"], (
        "of the longest, where contexts are swept"
    )
    less = last_json(call(*ESTIMATE, *CONTEXTS, "--memory-fraction", "0.5", "--json"))["curves"][0]
    assert less["memory"]["with_draft"]["requests"] < with_draft["requests"]


def test_a_sweep_beyond_the_positions_says_up_to_which_context(tmp_path: Path) -> None:
    asked = ("estimate", "--target", "llama-3.1-8b", "--draft", "eagle3", "--gpu", "h100")
    for end, said in (("2048", False), ("4096", True)):
        swept = (*asked, "--sweep", "context", "--range", f"256:{end}:3")
        (item,) = last_json(call(*swept, "--json"))["curves"]
        assert item["memory"]["with_draft"]["longest"] == 2048
        headline = " ".join(call(*swept).stdout.split()).partition(" Target ")[0]
        assert headline.endswith(" It serves contexts up to 2,048.") == said


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (("--sweep", "depth"), "'depth' is not one of"),
        (("--range", "1:4"), "belong to --sweep"),
        (("--plot", "a.svg"), "belong to --sweep"),
        (("--sweep", "batch", "--range", "9:1"), "LOW must lie below HIGH"),
        (("--sweep", "batch", "--plot", "a.docx"), "must end with .svg"),
        (("--sweep", "batch", "--engine", "transformers"), "one request at a time"),
        (("--memory-fraction", "0"), "--memory-fraction"),
        (("--tensor-parallel", "4", "--draft-tensor-parallel", "2"), "on 1 device or on all 4"),
    ],
)
def test_what_it_refuses(extra: tuple[str, ...], words: str) -> None:
    assert words in refused(*ESTIMATE, *extra)
