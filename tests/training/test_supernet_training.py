import dataclasses

import numpy as np
import pytest
import torch

from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.training import distill as training
from archsearch.training.supernet import (
    SupernetConfig,
    build_supernet,
    covering_shape,
    slice_matches,
    train_supernet,
    turns,
)
from tests.doubles.tiny_text import HIDDEN, VOCAB, make_cache, make_target

FULL = Architecture(HIDDEN, 48, 2, 2, 1, 16, VOCAB)
SHAPES = [
    FULL,
    FULL.replace(num_hidden_layers=1),
    FULL.replace(hidden_size=24, intermediate_size=32),
    FULL.replace(intermediate_size=16, num_attention_heads=1),
]
IDS = torch.randint(0, VOCAB, (4, 16), generator=torch.Generator().manual_seed(0))
CONFIG = SupernetConfig(tokens=2000, batch_tokens=64, warmup_tokens=200, lr=3e-3, heldout_sequences=4, autocast=False)


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def cache():
    return make_cache()


def test_a_slice_computes_what_the_supernet_computes_for_it(target):
    net = build_supernet(target, SHAPES, calibration_ids=IDS)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        for arch in SHAPES:
            alone = net.slice(arch)
            expected = alone(IDS, use_cache=False).logits
            found = net.logits(arch, net.states(arch, IDS))
            assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))


def test_the_slice_of_the_targets_own_shape_is_the_target(target):
    net = build_supernet(target, [FULL, *SHAPES], calibration_ids=IDS)
    with torch.no_grad():
        expected, found = target(IDS).logits, net.slice(FULL)(IDS).logits
    assert float((found - expected).abs().max()) < 1e-3 * float(expected.abs().max())


def test_grouped_and_extra_heads_are_prefixes(target):
    shapes = [FULL.replace(num_attention_heads=4, num_key_value_heads=2), FULL, FULL.replace(num_attention_heads=3)]
    net = build_supernet(target, shapes, calibration_ids=IDS)
    assert net.shape.num_key_value_heads == 2 and net.shape.num_attention_heads == 6
    with torch.no_grad():
        for arch in shapes:
            expected = net.slice(arch)(IDS, use_cache=False).logits
            assert torch.allclose(net.logits(arch, net.states(arch, IDS)), expected, atol=1e-4 * float(expected.abs().max()))


def test_training_teaches_every_slice_and_resumes(target, cache, tmp_path):
    net = build_supernet(target, SHAPES, calibration_ids=IDS)
    texts = cache.sequences[:20]
    before = [np.concatenate(m).mean() for m in slice_matches(net, SHAPES[1:], texts)]
    embedding = net.embedding.clone()
    config = dataclasses.replace(CONFIG, tokens=12_000, batch_tokens=256, lr=8e-3)
    result = train_supernet(net, SHAPES, cache, config)
    after = [np.concatenate(m).mean() for m in slice_matches(net, SHAPES[1:], texts)]
    assert all(new > old + 0.1 for new, old in zip(after, before, strict=True)), (before, after)
    assert result.tokens >= 12_000 and torch.equal(net.embedding, embedding)

    straight = build_supernet(target, SHAPES, calibration_ids=IDS)
    train_supernet(straight, SHAPES, cache, CONFIG)

    class Killed(Exception):
        pass

    def kill(event):
        if event["step"] == 9:
            raise Killed

    cut = build_supernet(target, SHAPES, calibration_ids=IDS)
    often = dataclasses.replace(CONFIG, checkpoint_every_s=0.0)
    with pytest.raises(Killed):
        train_supernet(cut, SHAPES, cache, often, checkpoint_dir=tmp_path, progress=kill)
    resumed = build_supernet(target, SHAPES, calibration_ids=IDS)
    train_supernet(resumed, SHAPES, cache, often, checkpoint_dir=tmp_path)
    for one, other in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ArchsearchError, match="other candidates"):
        train_supernet(build_supernet(target, SHAPES), SHAPES[:2], cache, CONFIG, checkpoint_dir=tmp_path)


def test_everyone_takes_a_turn_and_pairs_cost_alike():
    shapes = [FULL.replace(num_hidden_layers=n) for n in (1, 2, 3, 4, 5, 6)]
    groups = turns(shapes, 2, seed=0, cycle=3)
    assert sorted(i for group in groups for i in group) == list(range(6))
    assert sorted(sum(shapes[i].num_hidden_layers for i in group) for group in groups) == [7, 7, 7]
    assert sorted(map(sorted, turns(shapes[:5], 2, seed=0, cycle=0)))  # an odd count leaves one alone
    assert turns(shapes, 2, 0, 3) != turns(shapes, 2, 0, 4) or turns(shapes, 2, 0, 4) != turns(shapes, 2, 0, 5)


def test_what_no_supernet_covers_is_refused_in_words(target):
    with pytest.raises(ArchsearchError, match="more than width, depth, FFN and heads"):
        covering_shape([FULL, FULL.replace(draft_vocab_size=20)])
    with pytest.raises(ArchsearchError, match="at least one candidate"):
        covering_shape([])
    with pytest.raises(ArchsearchError, match="cannot be a slice"):
        build_supernet(target, [FULL.replace(hidden_size=64)])
    net = build_supernet(target, SHAPES)
    with pytest.raises(ArchsearchError, match="no slice of the supernet"):
        net.slice(FULL.replace(intermediate_size=64))
    with pytest.raises(ArchsearchError, match="tokens=0"):
        SupernetConfig(tokens=0)


def test_a_loss_that_is_no_number_stops_in_one_line(target, cache, monkeypatch):
    monkeypatch.setattr(training, "distill_loss", lambda *a: a[0].sum() * float("nan"))
    with pytest.raises(ArchsearchError, match="supernet failed at step 0: the loss is nan"):
        train_supernet(build_supernet(target, SHAPES), SHAPES, cache, CONFIG)
