"""`acceptance` of drafters that nobody trains: n-gram, suffix, early exit."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from archsearch.acceptance.early_exit import exit_traces
from archsearch.acceptance.lookup import Ngram, replay, texts_of
from archsearch.acceptance.measured import agreement_trace
from archsearch.cli import main
from archsearch.models.load import load_target
from archsearch.models.targets import resolve_target
from archsearch.pipeline.untrained import Untrained, untrained
from archsearch.text.cache import TextCache
from tests.doubles.world import TINY, make_model_folder, make_prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("untrained")
    make_model_folder(base / "target", TINY.replace(num_hidden_layers=4))
    make_prompts(base / "prompts.jsonl")
    return base


def run(folder, draft, *more):
    arguments = (
        "acceptance",
        "--target",
        folder / "target",
        "--draft",
        draft,
        "--prompts",
        folder / "prompts.jsonl",
        "--max-prompts",
        10,
        "--answer-tokens",
        40,
        "--cache",
        folder / "texts",
        *more,
    )
    return CliRunner().invoke(main, [str(a) for a in arguments])


def answer(folder, draft, *more):
    result = run(folder, draft, "--json", *more)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.strip().splitlines()[-1])


def cached(folder):
    (only,) = (path for path in (folder / "texts").iterdir() if path.is_dir())
    return TextCache.load(only), json.loads((only / "end_ids.json").read_text())


def test_the_command_replays_lookups_on_the_targets_text(folder, tmp_path):
    data = answer(folder, "ngram:1-3", "--output", tmp_path / "ngram.json")
    assert json.loads((tmp_path / "ngram.json").read_text()) == data
    texts, ends = cached(folder)
    for gamma, found in replay(Ngram(1, 3), texts_of(texts.sequences, ends), (1, 4, 16)).items():
        assert data["tau"][str(gamma)]["value"] == found.tau.value
        assert data["drafts_share"][str(gamma)]["value"] == found.drafts_share.value
    assert (
        data["family"] == "ngram"
        and data["prompts"] == 10
        and set(data["by_category"]) == {"travel", "orders"}
    )
    assert sum(part["tokens"] for part in data["by_category"].values()) == data["tokens"]
    text = run(folder, "suffix").stdout
    assert "rounds that draft" in text and "travel" in text and "Replayed on" in text
    longest = answer(folder, "ngram:5")
    assert longest["drafts_share"]["4"]["value"] <= data["drafts_share"]["4"]["value"]


def test_lookups_and_exits_are_priced(folder):
    for draft in ("ngram", "suffix"):
        data = answer(folder, draft, "--gpu", "l40s")
        gains = {int(gamma): gain["value"] for gamma, gain in data["speedup"].items()}
        best = max(gains, key=lambda gamma: gains[gamma])
        assert (
            data["best_gamma"] == (best if gains[best] > 1 else 0)
            and "speed-up" in run(folder, draft, "--gpu", "l40s").stdout
        )
    data = answer(folder, "early_exit:2", "--gpu", "l40s")
    assert data["exits"]["2"]["speedup"]["value"] > 0


def test_an_exit_is_the_target_cut_after_that_layer(folder):
    data = answer(folder, "early_exit")
    assert (
        list(data["exits"]) == ["1", "2", "3"]
        and "exit after layer" in run(folder, "early_exit").stdout
    )
    texts, ends = cached(folder)
    model = load_target(resolve_target(str(folder / "target")), "float32")[0]
    found = exit_traces(model, texts.sequences, (1, 3), end_ids=ends)
    for layer in (1, 3):
        cut = copy.deepcopy(model)
        cut.model.layers = torch.nn.ModuleList(cut.model.layers[:layer])
        cut.config.num_hidden_layers = layer
        wanted = agreement_trace(cut, texts, end_ids=ends)
        assert all(
            np.array_equal(a, b)
            for a, b in zip(found[layer].agreements, wanted.agreements, strict=True)
        )
        assert data["exits"][str(layer)]["tokens"] == wanted.tokens


def test_what_is_asked_wrongly_is_refused_before_the_target_is_loaded(folder, monkeypatch):
    monkeypatch.setattr("archsearch.models.load.load_tokenizer", None)
    line = run(folder, "early_exit:2,4").stderr
    assert "a target of 4 layers has no exit after layer 4; use 1 to 3" in line
    (folder / "null.jsonl").write_text('{"prompt": null}\n')
    for draft in ("ngram", folder / "target"):
        result = run(folder, draft, "--prompts", folder / "null.jsonl")
        assert result.exit_code == 2 and "null.jsonl, line 1: " in result.stderr


def test_copies_of_a_prompt_are_one_prompt(folder):
    """Twenty copies gave tau +- 0.00 where nothing is known of other prompts."""
    lines = (folder / "prompts.jsonl").read_text().splitlines()[:2]
    (folder / "copies.jsonl").write_text("\n".join([*lines[:1] * 20, *lines[1:]]))
    for draft in ("ngram", "early_exit:2"):
        data = answer(folder, draft, "--prompts", folder / "copies.jsonl")
        assert "copies.jsonl, 19 repeated prompts left out" in data["notes"][0]
        assert data.get("exits", {}).get("2", data)["prompts"] == 2
    (folder / "copies.jsonl").write_text("\n".join(lines[:1] * 20))
    data = answer(folder, "ngram", "--prompts", folder / "copies.jsonl")
    assert data["prompts"] == 1 and data["intervals"]["tau"]["4"]["95"] is None


def test_names_of_drafters_that_are_no_models():
    assert untrained("smollm2-135m") is None and untrained("ngrams") is None
    assert untrained("ngram").lookup == Ngram() and untrained("ngram:3").lookup == Ngram(3, 3)
    assert untrained("n-gram:2-4") == Untrained("ngram", (2, 4)) and untrained(
        "early_exit:8,16"
    ).layers(30) == (8, 16)
    assert untrained("early_exit").layers(30) == (8, 15, 22)


@pytest.mark.parametrize(
    ("draft", "more", "words"),
    [
        ("ngram:4-2", (), "shortest <= longest, got 4 and 2"),
        ("ngram:x", (), "write one of ngram, ngram:2-5"),
        ("suffix:3", (), "write one of"),
        ("early_exit:9", (), "no exit after layer 9"),
        ("early_exit:2", ("--temperature", 0.5), "greedy text"),
        ("ngram", ("--explain",), "leave --explain and --trace out"),
    ],
)
def test_bad_input_is_one_line(folder, draft, more, words):
    result = run(folder, draft, *more)
    assert result.exit_code == 2 and words in result.output.strip().splitlines()[-1]
