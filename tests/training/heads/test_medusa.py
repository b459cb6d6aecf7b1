"""Medusa heads: their beginning, their folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from archsearch.training.heads.folder import save_medusa
from archsearch.training.heads.medusa import initialise_medusa
from tests.doubles.head_files import load_medusa
from tests.doubles.tiny_heads import HIDDEN, KEPT, LAYERS, VOCAB, make_deep_target

FACTS = {
    "name": "tiny",
    "hidden_size": HIDDEN,
    "layers": LAYERS,
    "vocab_size": VOCAB,
    "fingerprint": "abc",
}


def test_heads_begin_as_the_targets_and_come_back_from_their_folder(tmp_path: Path) -> None:
    target = make_deep_target()
    heads = initialise_medusa(target, 3, KEPT)
    hidden = torch.randn(5, HIDDEN)
    assert torch.equal(heads(hidden)[2], hidden) and torch.equal(
        heads.lm_head.weight, target.lm_head.weight[list(KEPT)]
    )
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    save_medusa(heads, tmp_path, FACTS)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (
        config["model_type"] == "medusa"
        and config["num_heads"] == 3
        and config["original_lm_head"] is True
    )
    assert config["vocab_size"] == config["truncated_vocab_size"] == VOCAB, (
        "vLLM 0.32 cannot load fewer rows"
    )
    again = load_medusa(tmp_path)
    for head in range(3):
        assert torch.equal(again(hidden)[head], heads(hidden)[head])
    assert torch.equal(again.lm_head.weight, heads.lm_head.weight)


def test_the_rows_of_dropped_tokens_never_win_near_the_mean(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    heads = initialise_medusa(make_deep_target(), 2, KEPT)
    mean = torch.randn(HIDDEN)
    save_medusa(heads, tmp_path, FACTS, mean)
    rows = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    assert rows.shape == (VOCAB, HIDDEN) and torch.equal(rows[list(KEPT)], heads.lm_head.weight)
    assert int((rows @ mean).argmax()) in KEPT
