"""A new acceptance estimator is one file and one row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from archsearch.acceptance import registry
from archsearch.cli import main

ESTIMATOR = '''
from archsearch.acceptance.estimator import Acceptance
from archsearch.estimate import Estimate


class ByDepth:
    """Half for one layer, more for each further one."""

    def fit(self, observations):
        return self

    def predict(self, architecture, context):
        return Acceptance(Estimate(1 - 0.5 ** (1 + architecture.num_hidden_layers / 8), 0.1, "modelled"))

    def difference_std(self, first, second, context):
        return 0.0 if first == second else 0.1
'''


SPACE = """
dimensions:
  num_hidden_layers: [1, 2, 4]
  hidden_size: [1024, 2048]
  ffn_ratio: [2]
  num_key_value_heads: [4]
  kv_group_size: [2]
  head_dim: [64]
  draft_vocab_size: [target]
"""


def test_a_new_estimator_is_one_file_and_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "by_depth.py").write_text(ESTIMATOR)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(
        registry.CHOICES, "by-depth", registry.AlphaChoice("by_depth:ByDepth", "deeper is better")
    )
    asked = [
        "--target",
        "llama-65b",
        "--gpu",
        "a100",
        "--tensor-parallel",
        "4",
        "--alpha",
        "by-depth",
        "--json",
    ]
    found = CliRunner().invoke(
        main, ["estimate", *asked, "--draft", "sheared-llama-1.3b"], catch_exceptions=False
    )
    assert found.exit_code == 0, found.output
    (draft,) = json.loads(found.stdout)["drafts"]
    assert draft["alpha"]["source"] == "modelled" and draft["alpha"]["value"] == pytest.approx(
        1 - 0.5 ** (1 + 24 / 8)
    )
    run = str(tmp_path / "runs" / "a")
    (tmp_path / "space.yaml").write_text(SPACE)
    # heads and lookups keep the prior's alpha
    asked += ["--family", "independent", "--space", "space.yaml"]
    searched = CliRunner().invoke(
        main, ["search", *asked, "--trials", "20", "--run", run], catch_exceptions=False
    )
    assert searched.exit_code == 0, searched.output
    assert {entry["alpha"]["source"] for entry in json.loads(searched.stdout)["best"]} == {
        "modelled"
    }


def test_every_row_can_be_made() -> None:
    for name, choice in registry.CHOICES.items():
        assert choice.make().fit([]) is not None and choice.words, name
    assert (
        registry.trains("distilled") and not registry.trains("prior") and not registry.trains("0.7")
    )
