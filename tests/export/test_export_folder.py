from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import archsearch.export.folder as folder_module
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.estimate import Estimate
from archsearch.export.card import DraftRecord, ExportSource, ExportTarget, padded_head_cost
from archsearch.export.engines import DEFAULT_ENGINES
from archsearch.export.folder import export, plan
from archsearch.models.drafts import build_draft, load_draft, save_draft
from archsearch.schedule import GammaSchedule
from archsearch.search.objective import Score

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
RANGES = ((1, 2, 4), (3, 16, 1), (17, 256, 0))


@pytest.fixture
def draft_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "draft"
    save_draft(build_draft(ARCH, torch.bfloat16, KEPT), folder, gamma=2, mean_hidden=torch.ones(16))
    return folder


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    letters = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())[:39]]
    inner = Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")


def test_export_loads_everywhere(draft_folder: Path, tmp_path: Path) -> None:
    one, half = Estimate(1.5, 0.1, "modelled"), Estimate(0.5, 0.1, "measured")
    score = Score(1, ARCH, 100, 3, half, one, one, one, one, one, one, 768, None)
    output = export(
        ExportSource(draft_folder, 5, record=DraftRecord(score=score)), tmp_path / "out"
    )
    padded = AutoModelForCausalLM.from_pretrained(output, dtype=torch.bfloat16)
    trimmed = load_draft(output, torch.bfloat16)
    assert torch.equal(padded.lm_head.weight[KEPT], trimmed.lm_head.weight)
    assert AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(output)
    ).lm_head.weight.shape == (40, 16)
    assert padded.generation_config.num_assistant_tokens == 5
    assert padded.generation_config.num_assistant_tokens_schedule == "constant"
    assert padded.generation_config.assistant_confidence_threshold == 0.0
    speculative = json.loads((output / "speculative_config.json").read_text())
    assert speculative == {
        "method": "draft_model",
        "model": str(tmp_path / "out"),
        "num_speculative_tokens": 5,
        "draft_tensor_parallel_size": 1,
    }
    assert "0.500 ± 0.100 | measured" in (output / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()].count("out") == 1 and not list(
        tmp_path.glob(".out*")
    )
    marker = json.loads((output / "export.json").read_text())
    assert marker["engines"] == list(DEFAULT_ENGINES) and marker["trained"]
    assert set(marker["commands"]) == set(DEFAULT_ENGINES) - {"transformers"}
    assert (output / "tensorrt-llm.yaml").is_file() and not (output / "draft.gguf").exists()


def test_the_exported_draft_assists_in_transformers_with_its_gamma(
    draft_folder: Path, tmp_path: Path
) -> None:
    output = export(ExportSource(draft_folder, 3), tmp_path / "out")
    torch.manual_seed(0)
    full = ARCH.replace(draft_vocab_size=None, num_hidden_layers=2)
    target = build_draft(full, torch.float32).eval()
    draft = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    drafted: list[int] = []
    draft.register_forward_hook(
        lambda module, arguments, result: drafted.append(result.logits.shape[1])
    )
    prompt = torch.tensor([[3, 5, 7]])
    settings = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    alone = target.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    rounds: list[int] = []
    target.register_forward_hook(
        lambda module, arguments, result: rounds.append(result.logits.shape[1])
    )
    assisted = target.generate(
        prompt, attention_mask=torch.ones_like(prompt), assistant_model=draft, **settings
    )
    assert torch.equal(alone, assisted)
    # gamma + 1 tokens in each pass of the target, until the length limit leaves room for fewer.
    assert (
        drafted
        and rounds[0] in (4, 3 + 3)
        and all(width <= 4 for width in rounds[1:])
        and 4 in rounds[:-1]
    )


def test_only_what_was_asked_for(draft_folder: Path, tmp_path: Path) -> None:
    output = export(
        ExportSource(draft_folder, 2, schedule=GammaSchedule(RANGES)), tmp_path / "out", ["sglang"]
    )
    names = {path.name for path in output.iterdir()}
    assert "speculative_config.json" not in names and "tensorrt-llm.yaml" not in names
    card = (output / "README.md").read_text()
    assert "### SGLang" in card and "### vLLM" not in card and "### transformers" not in card
    both = export(ExportSource(draft_folder, 2, schedule=GammaSchedule(RANGES)), tmp_path / "both")
    assert json.loads((both / "speculative_config.json").read_text())[
        "num_speculative_tokens_per_batch_size"
    ] == [
        [1, 2, 4],
        [3, 16, 1],
        [17, 256, 0],
    ]
    assert json.loads((both / "export.json").read_text())["schedule"] == [
        [1, 2, 4],
        [3, 16, 1],
        [17, 256, 0],
    ]


def test_a_shape_without_weights(draft_folder: Path, tmp_path: Path) -> None:
    (draft_folder / "model.safetensors").unlink()
    with pytest.raises(MissingDataError, match=r"model\.safetensors"):
        export(ExportSource(draft_folder, 2), tmp_path / "out")
    with pytest.raises(MissingDataError, match="llama.cpp needs weights"):
        export(ExportSource(draft_folder, 2), tmp_path / "out", ["llama.cpp"], allow_untrained=True)
    assert not (tmp_path / "out").exists()
    output = export(ExportSource(draft_folder, 2), tmp_path / "out", allow_untrained=True)
    assert "a shape, not a trained draft" in (output / "README.md").read_text()
    assert not json.loads((output / "export.json").read_text())["trained"]
    assert (
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(output)).config.vocab_size == 40
    )


@pytest.mark.parametrize("pattern", ["SL", "S"])
def test_vllm_is_told_of_windows_in_some_layers(tmp_path: Path, pattern: str) -> None:
    shape = ARCH.replace(num_hidden_layers=2, window_pattern=pattern, sliding_window=16)
    save_draft(build_draft(shape, torch.bfloat16, KEPT), tmp_path / "draft")
    made = plan(ExportSource(tmp_path / "draft", 2), tmp_path / "out", ["vllm"])
    option = "--disable-hybrid-kv-cache-manager"
    assert (option in made.served[0].command) == (pattern == "SL")


def test_the_targets_tokenizer_fills_in(
    draft_folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    output = export(
        ExportSource(draft_folder, 2, target=ExportTarget(tokenizer=tokenizer)), tmp_path / "out"
    )
    assert AutoTokenizer.from_pretrained(output).get_vocab() == tokenizer.get_vocab()
    tokenizer.add_tokens(["other"])
    again = export(
        ExportSource(output, 2, target=ExportTarget(tokenizer=tokenizer)), tmp_path / "again"
    )
    assert "other" not in AutoTokenizer.from_pretrained(again).get_vocab(), (
        "the draft's own tokenizer stays"
    )


def test_gguf_with_the_folder(
    draft_folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    output = export(
        ExportSource(draft_folder, 2, target=ExportTarget(tokenizer=tokenizer), dtype="float32"),
        tmp_path / "out",
        ["llama.cpp"],
    )
    ours = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        output, gguf_file="draft.gguf", dtype=torch.float32
    )
    ids = torch.tensor([KEPT])
    assert torch.allclose(
        ours(ids).logits, theirs(ids).logits, atol=5e-3
    )  # float16, also of a float32 run
    command = json.loads((output / "export.json").read_text())["commands"]["llama.cpp"]
    assert str(output / "draft.gguf") in command
    with pytest.raises(MissingDataError, match=r"no tokenizer\.json"):
        export(ExportSource(draft_folder, 2), tmp_path / "bare", ["llama.cpp"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "out"], (
        "a refused export leaves nothing"
    )


def test_an_earlier_export_is_replaced_and_nothing_else(draft_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    export(ExportSource(draft_folder, 2), output)
    (output / "draft_vocab.json").write_text("{}")  # one of ours, which this draft has not
    marker = json.loads((output / "export.json").read_text())
    (output / "export.json").write_text(
        json.dumps({**marker, "files": [*marker["files"], "draft_vocab.json"]})
    )
    before = set(marker["files"])
    export(ExportSource(draft_folder, 3), output)
    assert {path.name for path in output.iterdir()} == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(ArchsearchError, match="not empty"):
        export(ExportSource(draft_folder, 2), other)
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]
    with pytest.raises(ArchsearchError, match="own folder"):
        export(ExportSource(draft_folder, 2), draft_folder)


def test_a_failed_export_leaves_the_old_one(
    draft_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = export(ExportSource(draft_folder, 2), tmp_path / "out")

    def full_disk(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module.shutil, "copyfile", full_disk)
    with pytest.raises(ArchsearchError, match="No space left"):
        export(ExportSource(draft_folder, 4), output)
    assert (
        json.loads((output / "speculative_config.json").read_text())["num_speculative_tokens"] == 2
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "out"]


def test_refusals(draft_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArchsearchError, match="gamma"):
        export(ExportSource(draft_folder, 0), tmp_path / "out")
    with pytest.raises(ArchsearchError, match="unknown engine 'ollama'"):
        export(ExportSource(draft_folder, 2), tmp_path / "out", ["ollama"])
    with pytest.raises(ArchsearchError, match="start at batch size 1"):
        export(
            ExportSource(draft_folder, 2, schedule=GammaSchedule(((2, 8, 3),))), tmp_path / "out"
        )
    with pytest.raises(ArchsearchError, match=r"no config\.json"):
        export(ExportSource(tmp_path, 2), tmp_path / "out")
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
    assert cost.padded_bytes - cost.trimmed_bytes == (49152 - 8192) * 576 * 2
    assert padded_head_cost(big.replace(draft_vocab_size=None), "bfloat16").ratio == 1.0
