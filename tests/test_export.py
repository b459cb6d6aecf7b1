from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import archsearch.export as export_module
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.export import export, model_card, padded_head_cost
from archsearch.models import build_draft, load_draft, save_draft

ARCH = Architecture(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=40,
    draft_vocab_size=10,
)
KEPT = [0, 3, 5, 7, 11, 20, 21, 30, 38, 39]


@pytest.fixture
def draft_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "draft"
    save_draft(build_draft(ARCH, torch.bfloat16, KEPT), folder, gamma=2, mean_hidden=torch.ones(16))
    return folder


def test_export_loads_everywhere(draft_folder: Path, tmp_path: Path) -> None:
    output = export(draft_folder, tmp_path / "out", gamma=5, score={"alpha": {"value": 0.5, "std": 0.1, "source": "measured"}})
    padded = AutoModelForCausalLM.from_pretrained(output, dtype=torch.bfloat16)
    trimmed = load_draft(output, torch.bfloat16)
    assert torch.equal(padded.lm_head.weight[KEPT], trimmed.lm_head.weight)
    assert AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(output)).lm_head.weight.shape == (40, 16)
    assert padded.generation_config.num_assistant_tokens == 5
    assert padded.generation_config.num_assistant_tokens_schedule == "constant"
    assert padded.generation_config.assistant_confidence_threshold == 0.0
    speculative = json.loads((output / "speculative_config.json").read_text())
    assert speculative == {"method": "draft_model", "model": str(tmp_path / "out"), "num_speculative_tokens": 5}
    assert "| alpha | 0.5 | 0.1 | measured |" in (output / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()].count("out") == 1 and not list(tmp_path.glob(".out*"))


def test_an_earlier_export_is_replaced_and_nothing_else(draft_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    export(draft_folder, output, gamma=2)
    (output / "stale").touch()
    export(draft_folder, output, gamma=3)
    assert not (output / "stale").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(ArchsearchError, match="not empty"):
        export(draft_folder, other, gamma=2)
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]
    with pytest.raises(ArchsearchError, match="own folder"):
        export(draft_folder, draft_folder, gamma=2)


def test_a_failed_export_leaves_the_old_one(draft_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = export(draft_folder, tmp_path / "out", gamma=2)

    def full_disk(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module.shutil, "copyfile", full_disk)
    with pytest.raises(ArchsearchError, match="No space left"):
        export(draft_folder, output, gamma=4)
    assert json.loads((output / "speculative_config.json").read_text())["num_speculative_tokens"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "out"]


def test_refusals(draft_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArchsearchError, match="gamma"):
        export(draft_folder, tmp_path / "out", gamma=0)
    (draft_folder / "model.safetensors").unlink()
    with pytest.raises(MissingDataError, match="model.safetensors"):
        export(draft_folder, tmp_path / "out", gamma=2)
    (draft_folder / "plain").touch()
    with pytest.raises(ArchsearchError, match="no config.json"):
        export(tmp_path, tmp_path / "out", gamma=2)
    assert not (tmp_path / "out").exists()


def test_what_the_padded_head_costs() -> None:
    big = Architecture(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49152,
        draft_vocab_size=8192,
    )
    cost = padded_head_cost(big, "bfloat16")
    assert cost["padded_bytes"] - cost["trimmed_bytes"] == (49152 - 8192) * 576 * 2
    assert "8192 of 49152" in model_card(big, Path("/x"), gamma=2)
    assert "The head" not in model_card(big.replace(draft_vocab_size=None), Path("/x"), gamma=2)
