"""Broken weights are refused with a tensor's name, before anything is trained on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from archsearch.architecture.architecture import Architecture
from archsearch.errors import MissingDataError
from archsearch.models.drafts import build_draft, load_draft, save_draft
from archsearch.models.load import load_target
from archsearch.models.targets import resolve_target

ARCH = Architecture(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=40,
)
DOWN = "model.layers.1.mlp.down_proj.weight"
State = dict[str, torch.Tensor]


def without(*parts: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        for name in [name for name in state if any(part in name for part in parts)]:
            del state[name]

    return change


def holding(value: float) -> Callable[[State], None]:
    def change(state: State) -> None:
        state[DOWN][3, 5] = value

    return change


def reshaped(state: State) -> None:
    state[DOWN] = state[DOWN][:, :-1].contiguous()


def with_a_third_layer(state: State) -> None:
    for name in [name for name in state if "layers.1." in name]:
        state[name.replace("layers.1.", "layers.2.")] = state[name].clone()


def with_a_bias(state: State) -> None:
    state["model.layers.0.self_attn.q_proj.bias"] = torch.ones(16)


BROKEN = {
    "more layers": (
        with_a_third_layer,
        "9 of its tensors are of no part that its config names, model.layers.2.",
    ),
    "a bias": (with_a_bias, "its config names, model.layers.0.self_attn.q_proj.bias"),
    "a tensor": (without(DOWN), "1 of its tensors are missing, " + DOWN),
    "a layer": (without("layers.1."), "are missing, model.layers.1"),
    "the embedding": (without("embed_tokens"), "missing, model.embed_tokens.weight"),
    "the norm": (without("model.norm"), "missing, model.norm.weight"),
    "nan": (holding(float("nan")), "hold NaN or infinity, " + DOWN),
    "inf": (holding(float("-inf")), "hold NaN or infinity, " + DOWN),
    "shape": (reshaped, "another shape than its config says, " + DOWN),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_weights_are_refused_by_name(how: str, tmp_path: Path) -> None:
    change, words = BROKEN[how]
    save_draft(build_draft(ARCH), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for load in (
        lambda: load_target(resolve_target(str(tmp_path)), "fp32"),
        lambda: load_draft(tmp_path),
    ):
        with pytest.raises(MissingDataError) as told:
            load()
        assert words in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_heads_and_tensors_of_no_loss_are_fine(tied: bool, tmp_path: Path) -> None:
    save_draft(build_draft(ARCH.replace(tie_word_embeddings=tied)), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in state) is not tied
    extra = (
        "mtp.0.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.1.self_attn.k_scale",
    )
    state |= {name: torch.ones(3) for name in extra}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_draft(tmp_path).lm_head.weight.shape == (40, 16)


def test_an_index_without_a_map_is_one_line(tmp_path: Path) -> None:
    save_draft(build_draft(ARCH), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}}))
    with pytest.raises(MissingDataError):
        load_draft(tmp_path)


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    save_draft(build_draft(ARCH), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(
        b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."
    )
    with pytest.raises(MissingDataError) as told:
        load_draft(tmp_path)
    assert "\n" not in str(told.value) and not (tmp_path / "ran").exists()
