"""Training heads on a tiny target: chains counted rightly, both families learn, runs go on, and the
best is kept."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from archsearch.errors import ArchsearchError
from archsearch.training.distill import split_heldout
from archsearch.training.heads.chains import chain_matches, count_chains
from archsearch.training.heads.eagle3 import Rows
from archsearch.training.heads.medusa import initialise_medusa
from archsearch.training.heads.train import HeadRun, head_config, train_head
from archsearch.training.looks import NO_RISE, Looks, Place
from tests.doubles.tiny_heads import (
    VOCAB,
    make_auxiliary,
    make_deep_target,
    make_eagle3,
    write_texts,
)

EVERY = tuple(range(VOCAB))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory):
    target = make_deep_target()
    cache = write_texts(tmp_path_factory.mktemp("texts"), target)
    return target, cache, make_auxiliary(target, cache)  # the texts, without and with states


def short(**changes):
    settings = {
        "max_steps": 24,
        "batch_tokens": 96,
        "warmup_tokens": 64,
        "lr": 5e-3,
        "autocast": False,
        "evaluations": 3,
    }
    return head_config(**{**settings, **changes})


def test_chains_are_judged_only_inside_the_text_and_after_right_tokens() -> None:
    #     start 0: right, wrong, (right)   start 1: right right, then the text ends   start 2: wrong
    rows = np.array([[1, 0, 1], [1, 1, 0], [0, 0, 0]], dtype=bool)
    counts = count_chains([rows])
    assert counts.judged == (3, 2, 0) and counts.right == (2, 1, 0)
    assert counts.conditional == pytest.approx((2 / 3, 1 / 2, 0.0))
    assert counts.tokens_a_round == pytest.approx(1 + 2 / 3 + 1 / 3)


@pytest.mark.slow(own=True)
def test_matches_are_those_of_each_start_alone(world) -> None:
    target, _, cache = world
    head = make_eagle3(target, kept=EVERY).eval()
    sequences = cache.sequences[:5]
    matches = chain_matches(head, sequences, 3)
    for sequence, rows in zip(sequences, matches, strict=True):
        written, prompt = len(sequence.written), sequence.prompt_tokens
        assert rows.shape == (written - 1, 3)
        for start in range(written - 1):
            alone = Rows(
                sequence.states[None].float(),
                sequence.token_ids[None, 1:],
                torch.tensor([[prompt - 1 + start]]),
            )
            with torch.no_grad():
                steps = [
                    int(head.lm_head(normed)[0, 0].argmax()) for normed in head.unroll(alone, 3)
                ]
            expected = [
                start + 1 + k < written and steps[k] == int(sequence.greedy_ids[start + 1 + k])
                for k in range(3)
            ]
            assert rows[start].tolist() == expected
    medusa = initialise_medusa(target, 2, EVERY)
    rows = chain_matches(medusa, sequences, 2)[0]
    first = sequences[0]
    repeats = [
        int(first.greedy_ids[q]) == int(first.greedy_ids[q + 1])
        for q in range(len(first.written) - 1)
    ]
    assert rows[:, 0].tolist() == repeats, (
        "untrained, a head repeats the token that the target just wrote"
    )


def make_head(target, family: str, kept=EVERY):
    if family == "medusa":
        return initialise_medusa(target, 3, kept)
    return make_eagle3(target, kept=kept, mask=0 if family == "peagle" else None)


@pytest.mark.parametrize("family", ["eagle3", "medusa", "peagle"])
def test_heads_learn_and_keep_the_best(world, tmp_path: Path, family: str) -> None:
    target, cache, with_states = world
    cache = cache if family == "medusa" else with_states
    head = make_head(target, family)
    seen = []
    result = train_head(head, [cache], 3, short(max_steps=60), progress=lambda *p: seen.append(p))
    losses = [point.value for point in result.run.loss_curve]
    tail = losses[20:]  # an EAGLE-3 run changes its loss after a quarter: from there on
    assert np.mean(tail[-8:]) < 0.9 * np.mean(tail[:8])
    assert result.best.counts.tokens_a_round == max(
        point.counts.tokens_a_round for point in result.curve
    )
    assert result.best.counts.tokens_a_round > result.curve[0].counts.tokens_a_round
    assert re.fullmatch(
        r"step 60: loss \d+\.\d+ accepted \d\.\d+ \d+ tokens/s", seen[-1][0]
    ) and seen[-1][1:] == (1.0, 1.0)
    kept_out = split_heldout(cache.sequences, short().heldout_sequences)[1]
    assert count_chains(chain_matches(head, kept_out, 3)) == result.best.counts


@pytest.mark.parametrize("family", ["eagle3", "medusa", "peagle"])
def test_a_stopped_run_ends_where_an_unbroken_one_ends(world, tmp_path: Path, family: str) -> None:
    target, cache, with_states = world
    cache = cache if family == "medusa" else with_states

    def fresh():
        return make_head(target, family)

    whole = fresh()
    expected = train_head(whole, [cache], 3, short(evaluations=1))

    def stop(what, done, total):
        if what.startswith("step 15:"):
            raise KeyboardInterrupt

    broken = fresh()
    with pytest.raises(KeyboardInterrupt):
        train_head(
            broken,
            [cache],
            3,
            short(evaluations=1),
            checkpoint_dir=tmp_path,
            progress=stop,
        )
    again = fresh()
    result = train_head(again, [cache], 3, short(evaluations=1), checkpoint_dir=tmp_path)
    assert [p.counts for p in result.curve] == [p.counts for p in expected.curve]
    for ours, theirs in zip(again.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_single_tokens_come_first_and_chains_follow(world, monkeypatch) -> None:
    from archsearch.training.heads import train as module

    target, _, cache = world
    steps = []
    real = module.step_logits
    monkeypatch.setattr(
        module,
        "step_logits",
        lambda head, batch, count: steps.append(count) or real(head, batch, count),
    )
    train_head(make_eagle3(target), [cache], 3, short(evaluations=0))
    assert steps == [1] * 12 + [3] * 12, "half of the run"
    steps.clear()
    train_head(
        make_eagle3(target, mask=0),
        [cache],
        3,
        short(evaluations=0, max_steps=4),
    )
    assert steps == [3] * 4, (
        "a head that reads nothing of its own learns whole rounds from the start"
    )


def test_where_looks_no_longer_rise_a_head_with_patience_ends(world, monkeypatch) -> None:
    from archsearch.training.heads import train as module

    target, cache, _ = world
    left = iter((0.1, 0.3, 0.5, 0.6, 0.5))

    def matches(head, sequences, gamma):
        share = next(left, 0.4)
        return [np.tile(np.arange(50)[:, None] < round(50 * share), gamma) for _ in sequences]

    monkeypatch.setattr(module, "chain_matches", matches)
    monkeypatch.setattr("archsearch.training.looks._FIRST_LOOK", 100)
    how = short(max_steps=4000, look_ratio=1.2, patience=1.5)
    result = train_head(make_head(target, "medusa"), [cache], 3, how)
    assert result.run.stopped == NO_RISE and result.run.steps < 100
    assert result.run.kept.value == pytest.approx(0.6)
    assert result.curve[-1].tokens >= 1.5 * result.best.tokens, "patience"


def test_looks_leave_a_slow_machine_time_to_train() -> None:
    """Where seconds are given, a look waits while those so far, and what they keep on disk, took
    more than their part."""
    run = HeadRun.__new__(HeadRun)
    run.config, run.annealing = short(max_steps=None, budget_s=100.0), False
    run.place, run.looks = Place(step=20, seconds=60.0, step_seconds=50.0), Looks(run.config)
    assert run._due()
    run.place.step_seconds = 20.0
    assert not run._due()
    run.config = short()  # by steps alone: nothing depends on the clock
    run.looks = Looks(run.config)
    assert run._due()


def test_what_cannot_be_trained_is_said_in_one_line(world, tmp_path: Path) -> None:
    target, plain, cache = world
    with pytest.raises(ArchsearchError, match="come with none"):
        train_head(make_eagle3(target), [plain], 3, short())
    with pytest.raises(ArchsearchError, match="no auxiliary states"):
        chain_matches(make_eagle3(target), plain.sequences[:2], 3)
    with pytest.raises(
        ArchsearchError,
        match=r"layers \[0, 1, 2\], the texts come with those of layers \[1, 3, 4\]",
    ):
        train_head(make_eagle3(target, aux=(0, 1, 2)), [cache], 3, short())
    train_head(
        make_eagle3(target),
        [cache],
        3,
        short(max_steps=2),
        checkpoint_dir=tmp_path,
    )
    with pytest.raises(ArchsearchError, match="delete it or name another folder"):
        train_head(
            make_eagle3(target, layers=2),
            [cache],
            3,
            short(),
            checkpoint_dir=tmp_path,
        )
    with pytest.raises(ArchsearchError, match="delete it or name another folder"):
        train_head(
            make_eagle3(target, mask=0),
            [cache],
            3,
            short(),
            checkpoint_dir=tmp_path,
        )
