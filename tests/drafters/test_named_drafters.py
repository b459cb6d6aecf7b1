"""Drafters by name: families, published heads, folders with a head's config.json; heads of another
target are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archsearch.acceptance.learnt import training_of
from archsearch.drafters.heads import DFlash, Eagle, Eagle3, Medusa
from archsearch.drafters.models import Independent, Pard
from archsearch.errors import ArchsearchError
from archsearch.models.targets import TargetRef, resolve_drafter, resolve_target

TARGET = resolve_target("llama-3.1-8b")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
COMMON = LLAMA | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 32000,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29], "use_aux_hidden_state": True},
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 8192,
    "eagle_aux_hidden_state_layer_ids": [2, 16],
    "transformer_layer_config": LLAMA | {"num_hidden_layers": 2},
}
MEDUSA = {
    "model_type": "medusa",
    "architectures": ["MedusaModel"],
    "hidden_size": 4096,
    "vocab_size": 128256,
    "num_heads": 3,
    "num_hidden_layers": 1,
    "original_lm_head": True,
}
DFLASH = LLAMA | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 5,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 8, 15, 22, 29]},
}


def folder(base: Path, config: dict[str, Any]) -> str:
    base.mkdir(exist_ok=True)
    (base / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(base)


def test_a_family_is_the_published_head_of_a_target_or_the_usual_one() -> None:
    published, usual = resolve_drafter("eagle3", TARGET), resolve_drafter("peagle", TARGET)
    assert published.notes == ["the shape of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"] and isinstance(
        published.drafter, Eagle3
    )
    assert (
        "the usual shape for this target" in usual.notes[0]
        and "none published is known" in usual.notes[0]
    )
    assert resolve_drafter("ngram", TARGET).notes == []


def test_a_layer_that_the_checkpoint_lacks_is_refused() -> None:
    for name in ("gemma-3-27b", "mixtral-8x7b"):
        with pytest.raises(ArchsearchError, match="holds no MTP layer; leave out --draft mtp"):
            resolve_drafter("mtp", resolve_target(name))
    deepseek = resolve_target("deepseek-v3")
    assert resolve_drafter("mtp", deepseek).drafter.family == "mtp"
    kimi = deepseek.architecture.replace(mtp_layers=0)  # of the same type, without one
    with pytest.raises(ArchsearchError, match="holds no MTP layer"):
        resolve_drafter("mtp", replace(deepseek, architecture=kimi))


def test_models_are_drafts_of_their_own_or_parallel_ones() -> None:
    draft = resolve_drafter("llama-3.2-1b", TARGET)
    assert isinstance(draft.drafter, Independent) and draft.model is not None and draft.notes == []
    parallel = resolve_drafter("pard:llama-3.2-1b", TARGET)
    assert (
        isinstance(parallel.drafter, Pard)
        and parallel.drafter.architecture == draft.drafter.architecture
    )


@pytest.mark.parametrize("name", ["pard", "amd/PARD-Qwen3-0.6B", "pard:amd/PARD-Qwen3-0.6B"])
def test_a_published_draft_accepts_as_what_it_was_made_of_in_estimate_and_search(name: str) -> None:
    """`estimate` took it for one made from scratch for its target: alpha .45 beside .68."""
    model = resolve_drafter(name, resolve_target("qwen3-32b")).model
    assert model is not None and model.hub_id == "amd/PARD-Qwen3-0.6B"
    assert training_of(model, resolve_target("qwen3-32b"))[0] == "shared"


def test_a_quantised_target_keeps_its_family() -> None:
    """A folder of weights in int4 had none: every draft was taken as made for it (.91 for .84)."""
    shape = TARGET.architecture.in_format("int4")
    draft = resolve_target("llama-3.2-1b")
    assert training_of(draft, TargetRef("l8-w4a16", shape)) == ("shared", "")


def test_heads_in_folders_of_four_formats(tmp_path: Path) -> None:
    one = resolve_drafter(folder(tmp_path / "a", COMMON), TARGET)
    assert one.drafter == Eagle3.usual(TARGET.architecture) and one.notes == []
    two = resolve_drafter(f"eagle3:{folder(tmp_path / 'b', SPECULATORS)}", TARGET).drafter
    assert (
        two.states_read == 2
        and two.architecture.num_hidden_layers == 2
        and two.architecture.head_rows == 8192
    )
    heads = resolve_drafter(folder(tmp_path / "c", MEDUSA), TARGET).drafter
    assert heads == Medusa(TARGET.architecture, 3, 1, True)
    block = resolve_drafter(folder(tmp_path / "d", DFLASH), TARGET).drafter
    assert isinstance(block, DFlash) and block.states_read == 5 and block.architecture.qk_norm
    plain = resolve_drafter(f"eagle:{folder(tmp_path / 'e', LLAMA)}", TARGET).drafter
    assert plain == Eagle.usual(TARGET.architecture)


def test_a_head_that_does_not_name_its_layers_is_told_of(tmp_path: Path) -> None:
    unnamed = {name: value for name, value in COMMON.items() if name != "eagle_config"}
    assert (
        "names no eagle_aux_hidden_state_layer_ids"
        in resolve_drafter(folder(tmp_path, unnamed), TARGET).notes[0]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"hidden_size": 2048, "num_attention_heads": 16},
            "reads hidden states of width 2048, the target's have 4096",
        ),
        ({"target_hidden_size": 8192}, "reads hidden states of width 8192"),
        ({"vocab_size": 32000}, "vocabulary of 32000, the target one of 128256"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 40, 77]}},
            "layers 2, 40, 77, the target has layers 0 to 31",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": 7}},
            "must be a list of numbers of the target's layers, got 7",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["low"]}},
            "must be a list of numbers of the target's layers",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 29]}},
            "name each layer once",
        ),
        ({"draft_vocab_size": 200_000}, "between 1 and vocab_size=128256, got 200000"),
        ({"architectures": ["MedusaModel"]}, "needs num_heads"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
    ],
)
def test_a_head_of_another_target_is_one_line(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    name = folder(tmp_path, COMMON | change)
    with pytest.raises(ArchsearchError, match=words) as refused:
        resolve_drafter(name, TARGET)
    assert str(refused.value).startswith(name) and "\n" not in str(refused.value)


def test_what_is_no_such_drafter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchsearchError, match="is of the family eagle3, not medusa"):
        resolve_drafter(f"medusa:{folder(tmp_path, COMMON)}", TARGET)
    with pytest.raises(ArchsearchError, match="did you mean eagle3"):
        resolve_drafter("eagel3", TARGET)
    with pytest.raises(ArchsearchError, match="after the colon comes a folder or a hub id"):
        resolve_drafter("eagle3:", TARGET)
    with pytest.raises(ArchsearchError, match="is no folder and no hub id"):
        resolve_drafter("eagle3:nowhere", TARGET)
    with pytest.raises(ArchsearchError, match="--draft independent says no shape"):
        resolve_drafter("independent", TARGET)
