"""Held-out acceptance decides which weights stay, and when a training ends."""

import dataclasses

import numpy as np
import pytest
import torch

from archsearch.errors import ArchsearchError
from archsearch.training import distill as training
from archsearch.training.distill import DistillConfig, distill
from archsearch.training.looks import NO_RISE
from tests.doubles.tiny_text import make_cache
from tests.training.test_distill import make_draft, weights

CONFIG = DistillConfig(
    max_steps=200,
    warmup_tokens=64,
    batch_tokens=64,
    lr=3e-3,
    autocast=False,
    heldout_sequences=4,
    look_ratio=1.2,
    keep_best=True,
    patience=1.5,
    average_power=None,
    anneal=0.0,
)


@pytest.fixture(scope="module")
def cache():
    return make_cache()


@pytest.fixture
def script(monkeypatch):
    """What every look finds, instead of a pass over the held-out texts; the weights that were
    looked at are noted."""
    seen = []
    monkeypatch.setattr("archsearch.training.looks._FIRST_LOOK", 100)

    def play(values):
        left = iter(values)

        def matches(draft, sequences):
            seen.append(weights(draft).clone())
            share = next(left, values[-1])
            return [np.arange(100) < round(100 * share) for _ in sequences]

        monkeypatch.setattr(training, "greedy_matches", matches)
        return seen

    return play


RISES_AND_FALLS = (0.1, 0.3, 0.5, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35, 0.3)


def test_the_best_look_is_what_stays_and_training_ends_where_looks_fall(cache, script):
    seen = script(RISES_AND_FALLS)
    draft = make_draft()
    result = distill(draft, cache, CONFIG)
    assert result.stopped == NO_RISE and result.steps < CONFIG.max_steps
    assert result.kept.value == 0.6 == max(point.value for point in result.alpha_curve)
    assert torch.equal(weights(draft), seen[3])
    assert result.alpha_curve[-1].tokens >= 1.5 * result.kept.tokens, "patience"
    assert result.epoch_tokens == sum(
        len(s) - 1 for s in training.split_heldout(cache.sequences, 4)[0]
    )


def test_running_means_are_kept_as_they_were_looked_at(cache, script):
    seen = script(RISES_AND_FALLS)
    draft = make_draft()
    distill(draft, cache, dataclasses.replace(CONFIG, average_power=2.0))
    assert torch.equal(weights(draft), seen[3])


def test_while_looks_rise_nothing_is_stopped_and_the_last_weights_stay(cache, script):
    seen = script([number / 100 for number in range(5, 100)])
    draft = make_draft()
    result = distill(draft, cache, dataclasses.replace(CONFIG, max_steps=40))
    assert result.steps == 40 and not result.stopped
    assert result.kept == result.alpha_curve[-1] and torch.equal(weights(draft), seen[-1])


def test_an_anneal_that_makes_it_worse_is_not_kept(cache, script):
    seen = script((0.1, 0.5, 0.4, 0.39, 0.38))
    draft = make_draft()
    result = distill(
        draft,
        cache,
        dataclasses.replace(
            CONFIG, max_steps=30, anneal=0.5, look_ratio=None, evaluations=3, patience=None
        ),
    )
    assert result.steps == 30 and result.kept.value == 0.5
    assert torch.equal(weights(draft), seen[1])


def test_a_trunk_that_goes_on_has_its_own_best_weights_and_not_those_of_its_anneal(
    cache, script, tmp_path
):
    settings = dataclasses.replace(
        CONFIG, max_steps=20, anneal=0.4, look_ratio=None, evaluations=4, patience=None
    )
    seen = script((0.1, 0.5, 0.4, 0.45, 0.6))
    first = distill(make_draft(), cache, settings, checkpoint_dir=tmp_path)
    assert first.kept.value == 0.6 and first.alpha_curve[1].value == 0.5
    best = seen[1].clone()
    script((0.3,))
    draft = make_draft()
    longer = dataclasses.replace(settings, max_steps=80)
    second = distill(draft, cache, longer, checkpoint_dir=tmp_path)
    assert second.kept.value == 0.5 and second.kept in second.alpha_curve
    assert torch.equal(weights(draft), best)


@pytest.mark.slow(own=True)
def test_a_stopped_training_stays_stopped_on_the_same_text_and_goes_on_from_its_best_look_on_more(
    cache, script, tmp_path
):
    script(RISES_AND_FALLS)
    first = distill(make_draft(), cache, CONFIG, checkpoint_dir=tmp_path)
    script((0.9,))
    draft = make_draft()
    again = distill(
        draft, cache, dataclasses.replace(CONFIG, max_steps=400), checkpoint_dir=tmp_path
    )
    assert (again.steps, again.kept.value) == (first.steps, 0.6) and again.stopped, (
        "it has nothing to learn here"
    )
    script((0.61, 0.7, 0.72, 0.75, 0.8, 0.85))
    more = make_cache(count=60)
    other = dataclasses.replace(more.meta.fingerprint, settings={"kind": "sampled"})
    more.meta = dataclasses.replace(more.meta, fingerprint=other)
    grown = distill(
        make_draft(),
        [cache, more],
        dataclasses.replace(CONFIG, max_steps=first.steps + 4),
        checkpoint_dir=tmp_path,
    )
    assert not grown.stopped and grown.steps == first.steps + 4
    assert grown.kept.value > 0.6 and grown.alpha_curve[3].value == 0.6
    assert [point.value for point in grown.alpha_curve[:4]] == list(RISES_AND_FALLS[:4]), (
        "looks after the best one are gone"
    )


def test_a_killed_training_remembers_its_best_look(cache, script, tmp_path):
    seen = script(RISES_AND_FALLS)
    distill(
        make_draft(),
        cache,
        dataclasses.replace(CONFIG, patience=None, max_steps=30),
        checkpoint_dir=tmp_path,
    )
    best = seen[3].clone()
    script((0.2,))
    draft = make_draft()
    result = distill(
        draft,
        cache,
        dataclasses.replace(CONFIG, patience=None, max_steps=32),
        checkpoint_dir=tmp_path,
    )
    assert result.kept.value == 0.6 and torch.equal(weights(draft), best)


@pytest.mark.parametrize("changes", [{"patience": 1.0}, {"look_ratio": 0.5}])
def test_ratios_that_make_no_sense_are_refused(changes):
    with pytest.raises(ArchsearchError, match="ratios above 1"):
        DistillConfig(max_steps=1, **changes)
