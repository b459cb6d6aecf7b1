"""An EAGLE-3 head against a plain, token by token form of it; its beginning; its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from archsearch.architecture.hf_config import from_hf_config
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.models.targets import TargetRef, resolve_drafter
from archsearch.training.heads.eagle3 import Eagle3Head, Rows
from archsearch.training.heads.folder import read_eagle3, save_eagle3
from tests.doubles.tiny_heads import AUX, HIDDEN, KEPT, LAYERS, VOCAB, make_deep_target, make_eagle3

FACTS = {
    "name": "tiny",
    "hidden_size": HIDDEN,
    "layers": LAYERS,
    "vocab_size": VOCAB,
    "fingerprint": "abc",
}


@pytest.fixture(scope="module")
def target():
    return make_deep_target()


def randomised(head: Eagle3Head, seed: int = 3) -> Eagle3Head:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if not name.startswith("embedding"):
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * 0.3 + ("norm" in name)
                )
    return head.eval()


class OneByOne:
    """The head as an engine runs it: one row after the other, keys and values appended (vLLM's
    `llama_eagle3.py`)."""

    def __init__(self, head: Eagle3Head) -> None:
        self.head = head
        self.cache = [[] for _ in head.layers]

    def row(
        self, hidden: torch.Tensor, token: int, position: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed output, pre-norm output) [hidden] of a row; its keys and values stay in the
        cache."""
        head = self.head
        embedded = head.embedding.weight[token]
        cos, sin = head.rotary(hidden[None, None], torch.tensor([[position]]))
        for place, layer in enumerate(head.layers):
            attention = layer.self_attn
            if place == 0:
                normed = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)])
            else:
                normed = layer.input_layernorm(hidden)
            q, k, v = (
                p(normed).view(1, 1, -1, attention.head_dim).transpose(1, 2)
                for p in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            self.cache[place].append((k[0, :, 0], v[0, :, 0]))
            keys, values = (
                torch.stack([pair[i] for pair in self.cache[place]], 1) for i in (0, 1)
            )  # [kv heads, rows, dim]
            group = attention.heads // attention.kv_heads
            keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
            shares = torch.softmax(
                (keys @ q[0, :, 0, :, None])[..., 0] * attention.head_dim**-0.5, -1
            )
            hidden = hidden + attention.o_proj((shares[..., None] * values).sum(1).reshape(-1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return head.norm(hidden), hidden

    def forget(self, rows: int) -> None:
        self.cache = [kept[: len(kept) - rows] for kept in self.cache]


@pytest.mark.parametrize("layers", [1, 2])
def test_unrolled_steps_are_what_an_engine_computes_row_by_row(target, layers: int) -> None:
    head = randomised(make_eagle3(target, layers))
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 9, len(AUX) * HIDDEN, generator=generator)
    tokens = torch.randint(0, VOCAB, (2, 9), generator=generator)
    starts = torch.tensor([[3, 4, 5], [2, 3, 4]])
    with torch.no_grad():
        steps = list(head.unroll(Rows(states, tokens, starts), 3))
        for text in range(2):
            engine = OneByOne(head)
            for row in range(9):
                normed, fed = engine.row(head.fc(states[text, row]), int(tokens[text, row]), row)
                place = (starts[text] == row).nonzero()
                if not len(place):
                    continue
                torch.testing.assert_close(
                    steps[0][text, place[0, 0]], normed, rtol=1e-4, atol=1e-4
                )
                for step in (1, 2):
                    normed, fed = engine.row(fed, int(tokens[text, row + step]), row + step)
                    torch.testing.assert_close(
                        steps[step][text, place[0, 0]], normed, rtol=1e-4, atol=1e-4
                    )
                engine.forget(2)


def test_the_rows_of_a_p_eagle_head_are_what_an_engine_computes_in_one_pass(target) -> None:
    """Mask rows behind the known ones, each with the mask token and fc(mask_hidden), at the
    positions that follow."""
    head = randomised(make_eagle3(target, 2, mask=5))
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 7, len(AUX) * HIDDEN, generator=generator)
    tokens = torch.randint(0, VOCAB, (1, 7), generator=generator)
    with torch.no_grad():
        steps = list(head.unroll(Rows(states, tokens, torch.tensor([[2, 4]])), 3))
        masked = head.fc(head.mask_hidden[0, 0])
        engine = OneByOne(head)
        for row in range(7):
            normed, _ = engine.row(head.fc(states[0, row]), int(tokens[0, row]), row)
            if row in (2, 4):
                place = (2, 4).index(row)
                torch.testing.assert_close(steps[0][0, place], normed, rtol=1e-4, atol=1e-4)
                for step in (1, 2):
                    normed, _ = engine.row(masked, 5, row + step)
                    torch.testing.assert_close(steps[step][0, place], normed, rtol=1e-4, atol=1e-4)
                engine.forget(2)


def test_a_p_eagle_folder_says_its_mask_and_loads_to_the_same_logits(
    target, tmp_path: Path
) -> None:
    head = randomised(make_eagle3(target, 2, mask=5))
    save_eagle3(head, tmp_path, FACTS)
    assert json.loads((tmp_path / "config.json").read_text())["ptd_token_id"] == 5
    again = read_eagle3(tmp_path, target.get_input_embeddings().weight)
    rows = Rows(
        torch.randn(1, 5, 3 * HIDDEN), torch.randint(0, VOCAB, (1, 5)), torch.tensor([[1, 2]])
    )
    with torch.no_grad():
        for ours, theirs in zip(head.unroll(rows, 3), again.unroll(rows, 3), strict=True):
            assert torch.equal(head.lm_head(ours), again.lm_head(theirs))


def test_a_head_begins_as_the_targets_last_layer(target) -> None:
    head = make_eagle3(target)
    last = target.model.layers[-1]
    assert torch.equal(
        head.layers[0].self_attn.k_proj.weight[:, HIDDEN:], last.self_attn.k_proj.weight
    )
    assert not head.layers[0].self_attn.k_proj.weight[:, :HIDDEN].any()
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[list(KEPT)])
    assert torch.equal(
        head.fc(torch.arange(3.0 * HIDDEN)), torch.arange(2.0 * HIDDEN, 3.0 * HIDDEN)
    ), "the highest state passes"
    assert not head.embedding.weight.requires_grad


def test_the_folder_is_the_common_format_and_loads_to_the_same_logits(
    target, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    head = randomised(make_eagle3(target))
    save_eagle3(head, tmp_path, FACTS)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": list(AUX),
        "use_aux_hidden_state": True,
    }
    assert config["norm_before_residual"] is False and config["tie_word_embeddings"] is False
    assert (config["draft_vocab_size"], config["vocab_size"], config["target_hidden_size"]) == (
        len(KEPT),
        VOCAB,
        HIDDEN,
    )
    assert (
        config["rope_theta"]
        == config["rope_parameters"]["rope_theta"]
        == target.config.rope_parameters["rope_theta"]
    )
    tensors = load_file(tmp_path / "model.safetensors")
    layer = [
        f"layers.0.{name}.weight"
        for name in (
            "input_layernorm",
            "hidden_norm",
            "post_attention_layernorm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
        )
    ]
    assert set(tensors) == {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", *layer}
    assert (torch.arange(len(KEPT)) + tensors["d2t"]).tolist() == list(KEPT) and tensors[
        "d2t"
    ].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool and tensors[
        "t2d"
    ].nonzero().flatten().tolist() == list(KEPT)
    # SpecForge calls the one layer midlayer
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    save_file(named, tmp_path / "model.safetensors")
    again = read_eagle3(tmp_path, target.get_input_embeddings().weight)
    rows = Rows(
        torch.randn(1, 5, 3 * HIDDEN), torch.randint(0, VOCAB, (1, 5)), torch.tensor([[1, 2]])
    )
    with torch.no_grad():
        for ours, theirs in zip(head.unroll(rows, 2), again.unroll(rows, 2), strict=True):
            assert torch.equal(head.lm_head(ours), again.lm_head(theirs))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": VOCAB + 1}, "vocabulary of 48, the target one of 49"),
        ({"hidden_size": 2 * HIDDEN}, "width 32, the target's have 64"),
        ({"num_hidden_layers": 3}, "has layers 0 to 2"),
    ],
)
def test_a_head_of_another_target_is_refused(
    target, tmp_path: Path, change: dict[str, int], words: str
) -> None:
    save_eagle3(make_eagle3(target), tmp_path, FACTS)
    own = TargetRef("tiny", from_hf_config(target.config.to_dict()))
    assert resolve_drafter(str(tmp_path), own).drafter.family == "eagle3"
    other = TargetRef("other", own.architecture.replace(**change))
    with pytest.raises(ArchsearchError, match=words) as error:
        resolve_drafter(str(tmp_path), other)
    assert "\n" not in str(error.value)


def test_folders_that_do_not_say_enough_are_refused(target, tmp_path: Path) -> None:
    save_eagle3(make_eagle3(target), tmp_path, FACTS)
    embedding = target.get_input_embeddings().weight
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eagle_config": None}))
    with pytest.raises(ArchsearchError, match="does not name eagle_aux_hidden_state_layer_ids"):
        read_eagle3(tmp_path, embedding)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(MissingDataError, match="cannot read the weights"):
        read_eagle3(tmp_path, embedding)
