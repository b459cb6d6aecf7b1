"""The GGUF is read back by transformers, which undoes llama.cpp's row order itself: equal logits
prove shape, names and order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.models import gguf_file
from archsearch.models.drafts import build_draft, save_draft
from archsearch.models.gguf_file import (
    _LLAMA3_SPLIT,
    pre_tokenizer_name,
    read_gguf,
    write_gguf,
)
from archsearch.models.load import LoadedTarget, load_target
from archsearch.models.targets import resolve_drafter, resolve_target
from archsearch.pipeline.acceptance import find_draft

ARCH = Architecture(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=300,
    rope_theta=50000.0,
    max_position_embeddings=128,
)
TEXT = "Send back 12 packs, the 3rd was damaged; don't wait.\n\n  Thanks!"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT, "the packs that were sent back were damaged"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|end|>")


def draft(
    folder: Path,
    arch: Architecture,
    tokenizer: PreTrainedTokenizerFast | None,
    kept: list[int] | None = None,
) -> Path:
    torch.manual_seed(0)
    mean = torch.ones(arch.hidden_size) if kept else None
    save_draft(
        build_draft(arch, torch.float32, kept), folder, tokenizer=tokenizer, mean_hidden=mean
    )
    return folder


def logits(folder: Path, **options: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        return model(torch.arange(0, 300, 7)[None]).logits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"head_dim": 8},  # heads that do not fill the hidden size
        {"attention_bias": True, "model_type": "qwen2"},
        {
            "qk_norm": True,
            "model_type": "qwen3",
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 128,
        },
    ],
    ids=["tied", "untied", "narrow heads", "qwen2", "qwen3"],
)
def test_float32_gives_identical_logits(
    changes: dict[str, Any], tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = draft(tmp_path, ARCH.replace(**{"tie_word_embeddings": True, **changes}), tokenizer)
    write_gguf(folder, folder / "draft.gguf", dtype="float32")
    before, after = logits(folder), logits(folder, gguf_file="draft.gguf")
    assert before.std() > 1e-3 and torch.equal(before, after)


@pytest.mark.parametrize(("dtype", "tied"), [("q4_0", True), ("q8_0", False)])
def test_text_is_written_by_the_weights_that_are_served(
    dtype: str, tied: bool, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = draft(tmp_path, ARCH.replace(tie_word_embeddings=tied), tokenizer)
    write_gguf(folder, folder / "served.gguf", dtype=dtype)
    with torch.no_grad():
        found = LoadedTarget(resolve_target(str(folder)), dtype).model()(
            torch.arange(0, 300, 7)[None]
        )
    assert torch.equal(found.logits, logits(folder, gguf_file="served.gguf"))
    assert not torch.equal(found.logits, logits(folder))


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        ("q4_0", {"tie_word_embeddings": True}),
        ("float16", {"num_attention_heads": 6, "num_key_value_heads": 3}),
        ("q8_0", {"attention_bias": True, "model_type": "qwen2"}),
    ],
)
def test_a_file_says_its_shape_and_its_precision(
    dtype: str,
    changes: dict[str, Any],
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    arch, file = ARCH.replace(**changes), tmp_path / "mine.gguf"
    write_gguf(draft(tmp_path / "folder", arch, tokenizer), file, dtype=dtype)
    assert read_gguf(file).dtype == dtype
    ref = resolve_target(str(file))
    # the reader cannot tell a Mistral from a Llama, which GGUF calls by one name
    assert ref.architecture.replace(model_type=arch.model_type) == arch
    assert ref.name == "mine" and ref.file_dtype == dtype and ref.folder is None
    assert ref.place == resolve_drafter(str(file), ref).hub_id == str(file)
    found = find_draft(str(file))  # measured by `acceptance` too
    assert found.at_hand and found.ref == ref and found.architecture == ref.architecture
    assert ref.dtype_in(True) == dtype and not caplog.text
    assert ref.dtype_in(False) is None
    assert (f"mine holds {dtype}" in caplog.text) == (dtype != "float16")
    if "num_attention_heads" in changes:  # transformers has no Llama of that shape
        return
    monkeypatch.setenv("ARCHSEARCH_CACHE", str(tmp_path / "cache"))
    model, read = load_target(ref, "float32")
    assert read("packs").input_ids == tokenizer("packs").input_ids
    with torch.no_grad():
        ours = model(torch.arange(0, 300, 7)[None]).logits
    assert torch.allclose(ours, logits(tmp_path, gguf_file=file.name), atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "none"])
def test_stretched_positions_are_priced_but_no_text_is_written(
    kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of Llama 3.1: transformers reads the base of the rotation only, so it would be another
    model."""
    shape = gguf_file._add_shape

    def stretched(writer: gguf.GGUFWriter, *known: object) -> None:
        shape(writer, *known)  # type: ignore[arg-type]
        writer.add_string("llama.rope.scaling.type", kind)

    monkeypatch.setattr(gguf_file, "_add_shape", stretched)
    monkeypatch.setenv("ARCHSEARCH_CACHE", str(tmp_path / "cache"))
    write_gguf(draft(tmp_path / "folder", ARCH, tokenizer), tmp_path / "mine.gguf")
    ref = resolve_target(str(tmp_path / "mine.gguf"))
    assert ref.architecture == ARCH
    if kind == "none":
        load_target(ref, "float32")
        return
    with pytest.raises(ArchsearchError, match="has stretched positions, which transformers does"):
        load_target(ref, "float32")


def test_a_file_that_is_not_known_is_refused_in_one_line(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "junk.gguf").write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "empty.gguf").write_bytes(b"")
    for name in ("junk", "empty"):
        with pytest.raises(ArchsearchError, match=f"{name}.gguf is no GGUF of a language model"):
            resolve_target(str(tmp_path / f"{name}.gguf"))
    folder = draft(tmp_path / "folder", ARCH, tokenizer)
    write_gguf(folder, tmp_path / "mine.gguf", dtype="q4_0")
    whole = (tmp_path / "mine.gguf").read_bytes()
    for key, old, new, words in (
        ("general.file_type", 2, 19, "of the type MOSTLY_IQ2_XXS, which is not known here"),
        ("general.file_type", 2, 999, "of the type 999, which is not known here"),
    ):
        at = whole.index(key.encode()) + len(key) + 4  # behind the type of the value
        assert whole[at : at + 4] == old.to_bytes(4, "little")
        file = tmp_path / f"{new}.gguf"
        file.write_bytes(whole[:at] + new.to_bytes(4, "little") + whole[at + 4 :])
        with pytest.raises(ArchsearchError, match=words):
            resolve_target(str(file))
    other = tmp_path / "other.gguf"
    other.write_bytes(
        whole.replace(
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama",
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0bloom",
        )
    )
    with pytest.raises(
        ArchsearchError, match="holds a model of the kind bloom; known here: llama, qwen2, qwen3"
    ):
        resolve_target(str(other))


@pytest.mark.parametrize(
    ("heads", "key", "value", "words"),
    [
        (0, "llama.rope.dimension_count", 16, "num_attention_heads must be"),
        (3, "llama.rope.dimension_count", 16, "num_attention_heads .* must be a multiple of"),
        (4, "llama.expert_count", 8, "it holds a mixture of experts"),
        (4, "split.count", 3, "one part of several"),
    ],
)
def test_a_header_without_the_whole_shape_names_its_file(
    tmp_path: Path, heads: int, key: str, value: int, words: str
) -> None:
    file = tmp_path / "mine.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(heads)
    writer.add_head_count_kv(2)
    writer.add_uint32(key, value)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_token_list(["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ArchsearchError, match=f"mine.gguf is no GGUF of .*: {words}"):
        read_gguf(file)


def test_heads_that_do_not_divide_the_hidden_size(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """transformers has no Llama of that shape (the draft is a Mistral): the tensors are compared, Q
    and K put back in order."""
    arch = ARCH.replace(num_attention_heads=6, num_key_value_heads=3)
    folder = draft(tmp_path, arch, tokenizer)
    write_gguf(folder, folder / "draft.gguf", dtype="float32")
    reader = gguf.GGUFReader(folder / "draft.gguf")
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["llama.attention.key_length"].contents() == 16
    written = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    state = load_file(folder / "model.safetensors")
    for heads, theirs, ours in ((6, "attn_q", "q_proj"), (3, "attn_k", "k_proj")):
        rows = (
            written[f"blk.0.{theirs}.weight"]
            .reshape(heads, 8, 2, 64)
            .swapaxes(1, 2)
            .reshape(heads * 16, 64)
        )
        assert torch.equal(rows, state[f"model.layers.0.self_attn.{ours}.weight"])
    assert torch.equal(
        written["blk.0.attn_output.weight"], state["model.layers.0.self_attn.o_proj.weight"]
    )


def test_a_trimmed_head_is_written_padded(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = draft(tmp_path, ARCH.replace(draft_vocab_size=20), tokenizer, list(range(0, 300, 15)))
    write_gguf(folder, folder / "draft.gguf", dtype="float32")
    assert torch.equal(logits(folder), logits(folder, gguf_file="draft.gguf"))


def test_float16_rounds_matrices_and_keeps_norms(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = draft(tmp_path, ARCH, tokenizer)
    write_gguf(folder, folder / "draft.gguf", dtype="float16")
    kinds = {
        tensor.name: tensor.tensor_type.name
        for tensor in gguf.GGUFReader(folder / "draft.gguf").tensors
    }
    assert kinds["blk.1.attn_q.weight"] == kinds["token_embd.weight"] == "F16"
    assert kinds["blk.0.attn_norm.weight"] == kinds["output_norm.weight"] == "F32"
    before, after = logits(folder), logits(folder, gguf_file="draft.gguf")
    assert not torch.equal(before, after) and torch.allclose(
        before, after, atol=2e-3 * before.abs().max().item()
    )


def test_weights_too_large_for_float16_stay_finite(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = tmp_path
    model = build_draft(ARCH, torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    save_draft(model, folder, tokenizer=tokenizer)
    write_gguf(folder, folder / "draft.gguf", dtype="float16")
    kinds = {
        tensor.name: tensor.tensor_type.name
        for tensor in gguf.GGUFReader(folder / "draft.gguf").tensors
    }
    assert kinds["blk.0.ffn_up.weight"] == "BF16" and kinds["blk.1.ffn_up.weight"] == "F16"
    assert torch.isfinite(logits(folder, gguf_file="draft.gguf")).all()


def fields(path: Path) -> dict[str, Any]:
    return {
        key: entry.contents()
        for key, entry in gguf.GGUFReader(path).fields.items()
        if key.startswith("tokenizer.")
    }


def test_the_tokenizer_comes_along(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    folder = draft(tmp_path / "a", ARCH, tokenizer)
    write_gguf(folder, folder / "draft.gguf")
    found = fields(folder / "draft.gguf")
    assert found["tokenizer.ggml.model"] == "gpt2" and found["tokenizer.ggml.pre"] == "smollm"
    assert len(found["tokenizer.ggml.tokens"]) == 300
    vocabulary = tokenizer.get_vocab()
    assert all(
        found["tokenizer.ggml.tokens"][number] == token for token, number in vocabulary.items()
    )
    kinds = found["tokenizer.ggml.token_type"]
    assert (
        kinds[vocabulary["<|end|>"]] == gguf.TokenType.CONTROL
        and kinds[299] == gguf.TokenType.UNUSED
    )
    assert (
        found["tokenizer.ggml.eos_token_id"] == vocabulary["<|end|>"]
        and not found["tokenizer.ggml.add_bos_token"]
    )
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    assert found["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges] and merges
    back = AutoTokenizer.from_pretrained(folder, gguf_file="draft.gguf")
    assert (
        back(TEXT.replace("12", "").replace("3", ""))["input_ids"]
        == tokenizer(TEXT.replace("12", "").replace("3", ""))["input_ids"]
    )

    bare = draft(tmp_path / "b", ARCH, None)
    write_gguf(bare, bare / "draft.gguf", tokenizer_gguf=folder / "draft.gguf")
    assert fields(bare / "draft.gguf") == found, "the target's GGUF is copied as it is"
    small = draft(tmp_path / "c", ARCH.replace(vocab_size=200), None)
    with pytest.raises(ArchsearchError, match="300 tokens, the draft needs 200"):
        write_gguf(small, small / "draft.gguf", tokenizer_gguf=folder / "draft.gguf")
    save_draft(build_draft(ARCH.replace(vocab_size=200), torch.float32), small, tokenizer=tokenizer)
    with pytest.raises(ArchsearchError, match="token ids up to"):
        write_gguf(small, small / "draft.gguf")


def described(pre: Any, normalizer: Any = None, **model: Any) -> dict[str, Any]:
    inner = Tokenizer(models.BPE(vocab={"a": 0}, merges=[], **model))
    inner.pre_tokenizer = pre
    if normalizer is not None:
        inner.normalizer = normalizer
    return json.loads(inner.to_str())


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def test_names_of_pre_tokenizers() -> None:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    qwen = _LLAMA3_SPLIT.replace("{1,3}", "")
    assert pre_tokenizer_name(described(level)) == "gpt-2"
    assert (
        pre_tokenizer_name(described(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), level])))
        == "smollm"
    )
    assert pre_tokenizer_name(described(split(_LLAMA3_SPLIT), ignore_merges=True)) == "llama-bpe"
    assert pre_tokenizer_name(described(split(qwen), normalizers.NFC())) == "qwen2"
    unknown = (
        described(split(_LLAMA3_SPLIT)),  # llama.cpp ignores merges for llama-bpe
        described(split(r"\s+")),
        described(level, normalizers.NFC()),
        described(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        described(pre_tokenizers.Sequence([pre_tokenizers.Digits(False), level])),
        described(pre_tokenizers.Metaspace()),
        described(level, byte_fallback=True),
        {"model": {"type": "WordPiece"}},
    )
    assert [pre_tokenizer_name(each) for each in unknown] == [None] * len(unknown)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window_pattern": "SL", "sliding_window": 32}, "window pattern SL"),
        ({"attention_bias": True, "attention_output_bias": True}, "attention biases"),
        ({"mlp_bias": True}, "MLP biases"),
    ],
)
def test_shapes_it_does_not_write(
    changes: dict[str, Any], words: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = draft(tmp_path, ARCH.replace(**changes), tokenizer)
    with pytest.raises(ArchsearchError, match=f"{words}.*convert_hf_to_gguf") as error:
        write_gguf(folder, folder / "draft.gguf")
    assert "\n" not in str(error.value)


def test_refusals(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    folder = draft(tmp_path, ARCH, None)
    with pytest.raises(MissingDataError, match=r"no tokenizer\.json"):
        write_gguf(folder, folder / "draft.gguf")
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram"}}))
    with pytest.raises(ArchsearchError, match="byte-level BPE.*convert_hf_to_gguf"):
        write_gguf(folder, folder / "draft.gguf")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArchsearchError, match="rope type llama3"):
        write_gguf(folder, folder / "draft.gguf")
    (folder / "model.safetensors").unlink()
    with pytest.raises(MissingDataError, match="train the draft first"):
        write_gguf(folder, folder / "draft.gguf")
