"""Draft weights out of a tiny random target. The known answers: same shape, same function; what is
cut or padded exactly."""

from __future__ import annotations

import pytest
import torch

from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.models.drafts import TrimmedHead, build_draft
from archsearch.training.initialise import (
    choose_heads,
    choose_layers,
    initialise_draft,
    rotary_pairs,
)

TARGET = Architecture(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
    rope_theta=500.0,
)
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(5))


def random_target(arch: Architecture = TARGET) -> torch.nn.Module:
    """Weights large enough that every part matters, norms that are not one."""
    model = build_draft(arch, seed=1, rms_norm_eps=1e-6, eos_token_id=7)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def close(left: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert (left - right).abs().max() < tolerance * right.abs().max()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
        {"attention_bias": True, "model_type": "qwen2"},
        {"window_pattern": "S", "sliding_window": 6},
    ],
)
def test_same_shape_is_the_same_function(changes: dict) -> None:
    arch = TARGET.replace(**changes)
    target = random_target(arch)
    close(logits(initialise_draft(target, arch)), logits(target), 1e-6)


def test_rotation_without_cut_is_exact() -> None:
    """One channel of the stream is never used: cutting it by PCA loses nothing, but rotates
    everything and folds all norms."""
    target = random_target()
    with torch.no_grad():
        target.model.embed_tokens.weight[:, 3] = 0.0
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight[3] = 0.0
            layer.mlp.down_proj.weight[3] = 0.0
    draft = initialise_draft(
        target, TARGET.replace(hidden_size=31, model_type="mistral"), calibration_ids=IDS
    )
    close(logits(draft), logits(target))


def test_narrower_is_nearer_with_more_channels() -> None:
    target = random_target()

    def narrower(hidden_size: int) -> torch.nn.Module:
        return initialise_draft(
            target, TARGET.replace(hidden_size=hidden_size), calibration_ids=IDS
        )

    errors = [float((logits(narrower(h)) - logits(target)).abs().mean()) for h in (8, 28)]
    assert errors[1] < errors[0]


def test_a_text_is_read_once_for_drafts_of_the_same_layers() -> None:
    target, observed, reads = random_target(), {}, []
    target.model.register_forward_hook(lambda *_: reads.append(1))
    for hidden_size, layers, passes in ((8, 2, 1), (28, 2, 0), (28, 1, 1), (8, 2, 0)):
        shape = {"hidden_size": hidden_size, "num_hidden_layers": layers, "intermediate_size": 32}
        arch = TARGET.replace(**shape)
        draft = initialise_draft(target, arch, calibration_ids=IDS, observed=observed)
        assert len(reads) == passes
        close(logits(draft), logits(initialise_draft(target, arch, calibration_ids=IDS)), 1e-6)
        reads.clear()


@pytest.mark.parametrize(
    "changes",
    [
        {"intermediate_size": 80},
        {"num_attention_heads": 8},  # two new silent heads per group
        {"num_key_value_heads": 4},  # MHA: keys and values copied
        {"num_attention_heads": 8, "num_key_value_heads": 4},
        {"num_key_value_heads": 4, "num_attention_heads": 12},
        {"num_hidden_layers": 6},  # layers that pass their input on
    ],
)
def test_larger_shapes_keep_the_function(changes: dict) -> None:
    target = random_target()
    close(logits(initialise_draft(target, TARGET.replace(**changes))), logits(target))


def test_wider_stream_almost_keeps_the_function() -> None:
    target = random_target()
    draft = initialise_draft(target, TARGET.replace(hidden_size=40))
    assert (logits(draft) - logits(target)).abs().max() < 0.05 * logits(target).abs().max()
    assert draft.model.embed_tokens.weight[:, 32:].abs().min() > 0  # new channels can learn


def test_larger_head_dim_keeps_the_function() -> None:
    """Twice the head_dim: old pairs land on equal frequencies, the query makes up for the other
    scale."""
    target = random_target()
    close(logits(initialise_draft(target, TARGET.replace(head_dim=16))), logits(target))


def test_smaller_head_dim_keeps_what_fits() -> None:
    """Queries and keys live in every second rotary pair and values in four dimensions: half the
    head_dim is exact."""
    target = random_target()
    with torch.no_grad():
        for layer in target.model.layers:
            attention = layer.self_attn
            for projection in (attention.q_proj, attention.k_proj):
                rows = projection.weight.view(-1, 8, 32)
                rows[:, [1, 3, 5, 7]] = 0.0  # pairs 1 and 3 of (i, i + 4)
            value = attention.v_proj.weight.view(-1, 8, 32)
            value[:, 4:] = value[:, :4]
    close(logits(initialise_draft(target, TARGET.replace(head_dim=4))), logits(target))


def test_ffn_channels_are_chosen_by_what_they_write_on_text() -> None:
    """Channels with large weights whose activation is zero on the text (gate and up the wrong way
    round) are dropped first."""
    target = random_target()
    with torch.no_grad():
        for layer in target.model.layers:
            layer.mlp.up_proj.weight[10:26] = 0.0
            layer.mlp.gate_proj.weight[10:26] = 50.0
            layer.mlp.down_proj.weight[:, 10:26] = 50.0
            layer.mlp.up_proj.weight[26] = 1e-6  # so that the product of norms is not zero either
    close(
        logits(initialise_draft(target, TARGET.replace(intermediate_size=32), calibration_ids=IDS)),
        logits(target),
    )


def test_unused_channels_and_heads_are_the_ones_dropped() -> None:
    target = random_target()
    with torch.no_grad():
        for layer in target.model.layers:
            layer.mlp.down_proj.weight[:, 10:26] = 0.0
            layer.self_attn.o_proj.weight[:, 8:16] = 0.0  # head 1 of group 0
            layer.self_attn.o_proj.weight[:, 24:32] = 0.0  # head 3 of group 1
    close(
        logits(
            initialise_draft(target, TARGET.replace(intermediate_size=32, num_attention_heads=2))
        ),
        logits(target),
    )
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight[:, 0:16] = 0.0  # all of group 0
    close(
        logits(
            initialise_draft(target, TARGET.replace(num_attention_heads=2, num_key_value_heads=1))
        ),
        logits(target),
    )


def test_mqa_of_equal_groups_is_exact() -> None:
    target = random_target()
    with torch.no_grad():
        for layer in target.model.layers:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.weight[8:] = projection.weight[:8]
    close(logits(initialise_draft(target, TARGET.replace(num_key_value_heads=1))), logits(target))


def test_trimmed_head_keeps_the_targets_rows() -> None:
    target = random_target()
    kept = [3, 9, 60]
    draft = initialise_draft(target, TARGET.replace(draft_vocab_size=3), draft_token_ids=kept)
    assert isinstance(draft.lm_head, TrimmedHead)
    out = logits(draft)
    close(out[..., kept], logits(target)[..., kept], 1e-6)
    assert torch.isinf(out[..., [0, 4, 63]]).all()


def test_what_a_draft_inherits() -> None:
    draft = initialise_draft(
        random_target(), TARGET.replace(num_hidden_layers=2, rope_theta=10000.0)
    )
    assert draft.config.rope_parameters["rope_theta"] == 500.0
    assert draft.config.rms_norm_eps == 1e-6
    assert draft.generation_config.eos_token_id == 7


def test_the_same_seed_gives_the_same_draft() -> None:
    target, arch = random_target(), TARGET.replace(hidden_size=40)
    assert torch.equal(
        logits(initialise_draft(target, arch, seed=3)),
        logits(initialise_draft(target, arch, seed=3)),
    )
    assert not torch.equal(
        logits(initialise_draft(target, arch, seed=3)),
        logits(initialise_draft(target, arch, seed=4)),
    )


def test_refusals() -> None:
    with pytest.raises(ArchsearchError, match="vocabulary has 65"):
        initialise_draft(random_target(), TARGET.replace(vocab_size=65))
    with pytest.raises(ArchsearchError, match="no QK norm"):
        initialise_draft(random_target(), TARGET.replace(qk_norm=True, model_type="qwen3"))
    with pytest.raises(ArchsearchError, match="qwen3"):
        initialise_draft(build_draft(TARGET.replace(qk_norm=True, model_type="qwen3")), TARGET)


def test_layers_chosen() -> None:
    assert [choose_layers(n, 30) for n in (1, 2, 3, 4)] == [
        [0],
        [0, 29],
        [0, 1, 29],
        [0, 1, 28, 29],
    ]
    assert choose_layers(30, 30) == list(range(30))
    assert choose_layers(4, 2) == [0, None, None, 1]
    assert choose_layers(26, 30) == [*range(13), *range(17, 30)]


def test_heads_chosen() -> None:
    importance = torch.tensor([1.0, 2.0, 5.0, 4.0, 3.0, 0.5])  # three groups of two
    assert choose_heads(importance, 3, 1, 2) == [([1], [2, 3])]
    assert choose_heads(importance, 3, 2, 1) == [([1], [2]), ([2], [4])]
    assert choose_heads(importance, 3, 1, 6) == [([0, 1, 2], [0, 1, 2, 3, 4, 5])]
    assert choose_heads(importance, 3, 3, 3) == [
        ([0], [0, 1, None]),
        ([1], [2, 3, None]),
        ([2], [4, 5, None]),
    ]
    assert choose_heads(importance, 3, 6, 1) == [
        ([0], [0]),
        ([0], [1]),
        ([1], [2]),
        ([1], [3]),
        ([2], [4]),
        ([2], [5]),
    ]


def test_rotary_pairs_match_frequencies() -> None:
    for old, new in ((8, 4), (64, 32), (32, 64), (64, 16)):
        channels, places = rotary_pairs(old, new)
        for channel, place in zip(channels, places, strict=True):
            assert (channel % (old // 2)) / old == (
                place % (new // 2)
            ) / new  # theta^(-2i/dim) is a function of i/dim
