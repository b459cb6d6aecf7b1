import dataclasses
import json
import re

import numpy as np
import pytest
import torch

from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.models.drafts import build_draft
from archsearch.text.cache import TextCache
from archsearch.training import distill as training
from archsearch.training.batches import Teacher, heldout_divergence
from archsearch.training.distill import DistillConfig, distill
from tests.doubles.tiny_text import HIDDEN, VOCAB, make_cache, make_target


@pytest.fixture(scope="module")
def cache():
    return make_cache()


def make_draft(kept=None, hidden=HIDDEN, layers=1, seed=1):
    rows = None if kept is None else len(kept)
    arch = Architecture(hidden, 2 * hidden, layers, 2, 1, hidden // 2, VOCAB, rows)
    return build_draft(arch, torch.float32, kept, seed=seed)


CONFIG = DistillConfig(
    max_steps=12,
    warmup_tokens=64,
    batch_tokens=64,
    lr=3e-3,
    autocast=False,
    evaluations=2,
    heldout_sequences=4,
)


def weights(draft):
    return torch.cat([p.detach().reshape(-1) for p in draft.parameters()])


# ---- batches and losses


def test_every_sequence_is_in_one_batch_of_an_epoch_and_batches_keep_their_size():
    lengths = np.random.default_rng(0).integers(5, 60, 200).tolist()
    batches = training.plan_epoch(lengths, 256, seed=3, epoch=0)
    assert sorted(i for batch in batches for i in batch) == list(range(200))
    widths = [max(lengths[i] for i in batch) * len(batch) for batch in batches]
    assert max(widths) <= 256
    assert sum(lengths) / sum(widths) > 0.95, "padding is waste"
    assert (
        batches
        == training.plan_epoch(lengths, 256, seed=3, epoch=0)
        != training.plan_epoch(lengths, 256, seed=3, epoch=1)
    )
    assert batches != training.plan_epoch(lengths, 256, seed=4, epoch=0)


def test_a_batch_predicts_exactly_the_written_tokens(cache):
    batch = training.make_batch(cache.sequences[:3])
    flat = batch.input_ids.reshape(-1)
    expected_inputs = torch.cat(
        [s.token_ids[s.prompt_tokens - 1 : -1] for s in cache.sequences[:3]]
    )
    assert torch.equal(flat[batch.positions], expected_inputs)
    assert torch.equal(batch.token_ids, torch.cat([s.written for s in cache.sequences[:3]]))
    assert batch.tokens == sum(len(s) - 1 for s in cache.sequences[:3])


def test_loss_terms_against_their_definitions():
    draft = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]))
    teacher = torch.log(torch.tensor([[0.5, 0.5, 1e-30], [0.2, 0.2, 0.6]]))
    divergence = float(training.distill_loss(draft, teacher))
    assert divergence == pytest.approx(0.5 * np.log(2) / 2, rel=1e-5)
    hidden = torch.tensor([[3.0, 4.0]])
    with_features = float(training.distill_loss(draft, teacher, 2.0, hidden * 1.1, hidden))
    assert with_features == pytest.approx(divergence + 2.0 * 0.01, rel=1e-4)


def test_the_schedule_warms_up_holds_and_anneals_to_zero():
    config = DistillConfig(max_steps=1, lr=1e-3, warmup_tokens=1000, anneal=0.25)
    rates = [
        training.learning_rate(config, x, round(10_000 * x))
        for x in (0.0, 0.05, 0.1, 0.5, 0.75, 0.875, 1.0)
    ]
    assert rates == pytest.approx([5e-5, 5.25e-4, 1e-3, 1e-3, 1e-3, 5e-4, 0.0])


# ---- training


@pytest.mark.parametrize("rows", [None, pytest.param(30, marks=pytest.mark.slow(own=True))])
@pytest.mark.parametrize("hidden", [HIDDEN, pytest.param(24, marks=pytest.mark.slow(own=True))])
def test_training_lowers_the_loss_and_raises_agreement(cache, rows, hidden):
    counts = torch.bincount(torch.cat([s.written for s in cache.sequences]), minlength=VOCAB)
    kept = None if rows is None else sorted(counts.argsort(descending=True)[:rows].tolist())
    draft = make_draft(kept, hidden=hidden, layers=2)
    embedding = draft.get_input_embeddings().weight.detach().clone()
    train, _ = training.split_heldout(cache.sequences, 4)
    before = np.concatenate(training.greedy_matches(draft, train)).mean()
    result = distill(
        draft, cache, dataclasses.replace(CONFIG, max_steps=150, lr=5e-3, batch_tokens=256)
    )
    assert (
        result.steps == 150
        and result.alpha_curve[0].step == 0
        and result.alpha_curve[-1].step == 150
    )
    losses = [p.value for p in result.loss_curve]
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])
    assert np.concatenate(training.greedy_matches(draft, train)).mean() > before + 0.2
    assert torch.equal(draft.get_input_embeddings().weight, embedding), (
        "the embedding is frozen by default"
    )
    assert draft.get_input_embeddings().weight.requires_grad and not draft.training


def test_the_teacher_is_rebuilt_on_the_kept_tokens(cache):
    # A draft that is the target itself, head trimmed: no loss at all, whatever the kept tokens.
    target = make_target()
    kept = list(range(0, VOCAB, 3))
    arch = Architecture(HIDDEN, 48, 2, 2, 1, 16, VOCAB, len(kept))
    draft = build_draft(arch, torch.float32, kept)
    state = {k: v for k, v in target.state_dict().items() if k != "lm_head.weight"}
    draft.load_state_dict(state, strict=False)
    with torch.no_grad():
        draft.lm_head.weight.copy_(target.lm_head.weight[kept])
    result = distill(draft, cache, dataclasses.replace(CONFIG, max_steps=1, lr=1e-9, evaluations=0))
    assert result.loss_curve[0].value == pytest.approx(0.0, abs=1e-5)
    greedy = torch.cat([s.greedy_ids for s in training.split_heldout(cache.sequences, 4)[1]])
    covered = float(torch.isin(greedy, torch.tensor(kept)).float().mean())
    assert result.kept.value == pytest.approx(covered)
    heldout = training.split_heldout(cache.sequences, 4)[1]
    found = heldout_divergence(draft, cache.head, heldout)
    assert (
        found == pytest.approx((0.0, covered), abs=1e-5) and found[0] >= 0
    )  # rounding took it below
    assert heldout_divergence(make_draft(), cache.head, heldout)[0] > 0.1


@pytest.mark.slow(own=True)
def test_a_shortlisted_head_learns_too_and_leaves_no_token_out_of_the_batch(cache, monkeypatch):
    monkeypatch.setattr("archsearch.training.batches._FULL_HEAD_LIMIT", 16)
    monkeypatch.setattr("archsearch.training.batches._RANDOM_NEGATIVES", 4)
    draft = make_draft(layers=2)
    config = dataclasses.replace(CONFIG, max_steps=150, lr=5e-3, batch_tokens=256, shortlist=8)
    teacher = Teacher(draft, cache, cache.sequences, config.shortlist)
    batch = training.make_batch(cache.sequences[:6])
    rows = teacher.shortlist(batch, seed=3)
    assert (
        torch.isin(batch.greedy_ids, rows).all()
        and len(rows) < VOCAB
        and torch.equal(rows, rows.unique())
    )
    assert torch.equal(teacher.shortlist(batch, seed=3), rows)
    before = np.concatenate(training.greedy_matches(draft, cache.sequences)).mean()
    distill(draft, cache, config)
    assert np.concatenate(training.greedy_matches(draft, cache.sequences)).mean() > before + 0.2


def test_paired_drafts_see_the_same_batches(cache, monkeypatch):
    seen = []
    real = training.make_batch
    monkeypatch.setattr(
        training, "make_batch", lambda s: (seen[-1].append([x.id for x in s]), real(s))[1]
    )
    for layers in (1, 2):
        seen.append([])
        distill(make_draft(layers=layers, seed=layers), cache, CONFIG)
    assert seen[0] == seen[1] and len(seen[0]) == 12


def test_steps_tokens_or_seconds_end_a_run(cache):
    assert distill(make_draft(), cache, CONFIG).steps == 12
    by_tokens = distill(
        make_draft(), cache, DistillConfig(max_tokens=500, batch_tokens=64, autocast=False)
    )
    assert 500 <= by_tokens.tokens < 500 + 64
    by_time = distill(
        make_draft(),
        cache,
        DistillConfig(budget_s=0.4, batch_tokens=64, autocast=False, evaluations=1),
    )
    assert 0.4 <= by_time.seconds < 60 and by_time.steps >= 1
    with pytest.raises(ArchsearchError, match="budget_s, max_steps or max_tokens"):
        DistillConfig()
    with pytest.raises(ArchsearchError, match="lr=5"):
        DistillConfig(max_steps=1, lr=5)


# ---- checkpoints


def test_a_resumed_run_ends_exactly_where_an_uninterrupted_one_does(cache, tmp_path):
    straight = make_draft()
    whole = distill(straight, cache, CONFIG, checkpoint_dir=tmp_path / "whole")

    class Killed(Exception):
        pass

    def kill(what, done, total):
        if what.startswith("step 7:"):
            raise Killed

    config = dataclasses.replace(CONFIG, checkpoint_every_s=1e-9)
    with pytest.raises(Killed):
        distill(make_draft(), cache, config, checkpoint_dir=tmp_path / "cut", progress=kill)
    resumed = make_draft()
    result = distill(resumed, cache, config, checkpoint_dir=tmp_path / "cut")
    assert torch.equal(weights(resumed), weights(straight))
    assert [p.step for p in result.loss_curve] == list(
        range(1, 13)
    ) and result.tokens == whole.tokens
    assert [p.value for p in result.loss_curve] == [p.value for p in whole.loss_curve]
    # Finished is finished: the same call again changes nothing and takes no step.
    again = make_draft()
    assert distill(again, cache, config, checkpoint_dir=tmp_path / "cut").steps == 12
    assert torch.equal(weights(again), weights(straight))


def test_a_longer_budget_is_watched_to_its_end(cache, tmp_path):
    """Continued with three times the steps, the learning curve goes on at the new spacing instead
    of stopping."""
    draft = make_draft()
    distill(draft, cache, DistillConfig(max_steps=6, evaluations=2), checkpoint_dir=tmp_path)
    result = distill(
        draft, cache, DistillConfig(max_steps=18, evaluations=2), checkpoint_dir=tmp_path
    )
    assert [point.step for point in result.alpha_curve] == [0, 2, 4, 6, 12, 18]


def test_ctrl_c_saves_before_it_leaves(cache, tmp_path):
    def interrupt(what, done, total):
        if what.startswith("step 5:"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(make_draft(), cache, CONFIG, checkpoint_dir=tmp_path, progress=interrupt)
    state = torch.load(tmp_path / training.CHECKPOINT, weights_only=True)
    assert state["step"] == 5
    assert [p.name for p in tmp_path.iterdir()] == [training.CHECKPOINT]


def test_checkpoints_of_something_else_are_refused_with_words(cache, tmp_path):
    distill(make_draft(), cache, CONFIG, checkpoint_dir=tmp_path)
    with pytest.raises(ArchsearchError, match="a draft of another shape"):
        distill(make_draft(layers=2), cache, CONFIG, checkpoint_dir=tmp_path)
    with pytest.raises(ArchsearchError, match="other text or another target"):
        distill(make_draft(), make_cache(seed=5), CONFIG, checkpoint_dir=tmp_path)
    with pytest.raises(ArchsearchError, match="other training settings"):
        distill(make_draft(), cache, dataclasses.replace(CONFIG, lr=1e-4), checkpoint_dir=tmp_path)
    # A longer budget is no other run, and neither is text that has grown meanwhile.
    assert (
        distill(
            make_draft(), cache, dataclasses.replace(CONFIG, max_steps=14), checkpoint_dir=tmp_path
        ).steps
        == 14
    )
    grown = TextCache(None, cache.meta, cache.sequences + cache.sequences[:5], cache.head)
    assert (
        distill(
            make_draft(), grown, dataclasses.replace(CONFIG, max_steps=15), checkpoint_dir=tmp_path
        ).steps
        == 15
    )
    (tmp_path / training.CHECKPOINT).write_bytes(b"half a file")
    with pytest.raises(ArchsearchError, match="cannot read the checkpoint"):
        distill(make_draft(), cache, CONFIG, checkpoint_dir=tmp_path)


def test_a_loss_that_is_no_number_is_a_failed_run_and_keeps_the_last_good_checkpoint(
    cache, tmp_path, monkeypatch
):
    real = training.distill_loss
    calls = []

    def breaks(*args):
        calls.append(1)
        return real(*args) * (float("nan") if len(calls) == 6 else 1.0)

    monkeypatch.setattr(training, "distill_loss", breaks)
    config = dataclasses.replace(CONFIG, checkpoint_every_s=1e-9)
    with pytest.raises(
        RunFailed, match="step 5: the loss is nan.*lower learning rate than 0.003.*checkpoint"
    ) as caught:
        distill(make_draft(), cache, config, checkpoint_dir=tmp_path)
    assert caught.value.exit_code == 1
    assert torch.load(tmp_path / training.CHECKPOINT, weights_only=True)["step"] == 5


def test_gradients_that_are_no_number_stop_before_they_reach_the_weights(cache, monkeypatch):
    draft = make_draft()
    draft.lm_head.weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(RunFailed, match="step 0"):
        distill(draft, cache, CONFIG)
    assert torch.isfinite(weights(draft)).all()


def test_a_draft_of_another_vocabulary_is_refused(cache):
    arch = Architecture(32, 64, 1, 2, 1, 16, VOCAB + 8)
    with pytest.raises(ArchsearchError, match="does not fit the text's target"):
        distill(build_draft(arch), cache, CONFIG)
    with pytest.raises(ArchsearchError, match="different targets"):
        distill(make_draft(), [cache, make_cache(seed=7, count=11)], CONFIG)


def test_progress_and_result_can_be_written_as_json(cache):
    events = []
    result = distill(make_draft(), cache, CONFIG, progress=lambda *said: events.append(said))
    assert [int(re.match(r"step (\d+): loss ", what)[1]) for what, _, _ in events] == list(
        range(1, 13)
    )
    assert events[-1][1:] == (1.0, 1.0)
    json.dumps([events, dataclasses.asdict(result)])
    assert result.tokens_per_s > 0


def test_a_full_disk_is_one_line_and_leaves_no_half_checkpoint(cache, tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(ArchsearchError, match="No space left on device"):
        distill(make_draft(), cache, CONFIG, checkpoint_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---- trunk, running mean, rungs


def test_training_to_b_and_then_to_2b_is_training_to_2b(cache, tmp_path):
    """The anneal at B is a side branch: the trunk that goes on to 2B has not seen it."""
    short = dataclasses.replace(CONFIG, max_steps=None, max_tokens=1500)
    long = dataclasses.replace(short, max_tokens=3000)
    straight, continued = make_draft(), make_draft()
    whole = distill(straight, cache, long)
    first = distill(continued, cache, short, checkpoint_dir=tmp_path)
    assert (tmp_path / training.TRUNK).exists() and first.alpha_curve[-1].weights == "annealed"
    second = distill(make_draft(), cache, long, checkpoint_dir=tmp_path)
    assert second.tokens == whole.tokens and second.steps == whole.steps
    continued = make_draft()
    distill(continued, cache, long, checkpoint_dir=tmp_path)  # finished: nothing but loading
    assert torch.equal(weights(continued), weights(straight))
    assert second.seconds > first.seconds, "what the first anneal cost stays counted"


def test_rungs_without_an_anneal_and_a_final_with_one_are_one_run(cache, tmp_path):
    rung = dataclasses.replace(CONFIG, max_steps=None, max_tokens=1000, anneal=0.0)
    final = dataclasses.replace(rung, max_tokens=3000, anneal=0.3)
    straight, climbed = make_draft(), make_draft()
    distill(straight, cache, final)
    for config in (rung, dataclasses.replace(rung, max_tokens=2000), final):
        climbed = make_draft()
        distill(climbed, cache, config, checkpoint_dir=tmp_path)
    assert torch.equal(weights(climbed), weights(straight))


def test_without_an_anneal_the_draft_ends_as_the_running_mean_of_its_weights(cache, monkeypatch):
    monkeypatch.setattr(training, "_AVERAGE_EVERY", 2)
    draft, power = make_draft(), 3.0
    seen = []
    config = dataclasses.replace(CONFIG, anneal=0.0, average_power=power)
    result = distill(draft, cache, config, progress=lambda *p: seen.append(weights(draft).clone()))
    kept = seen[1::2]
    shares = [
        (i / len(kept)) ** (power + 1) - ((i - 1) / len(kept)) ** (power + 1)
        for i in range(1, len(kept) + 1)
    ]
    expected = sum(share * w for share, w in zip(shares, kept, strict=True))
    assert torch.allclose(weights(draft), expected, atol=1e-6) and not torch.allclose(
        weights(draft), kept[-1], atol=1e-4
    )
    assert result.alpha_curve[-1].weights == "average"
    assert result.kept.value == pytest.approx(
        np.concatenate(
            training.greedy_matches(draft, training.split_heldout(cache.sequences, 4)[1])
        ).mean()
    )
    raw = make_draft()
    distill(raw, cache, dataclasses.replace(config, average_power=None))
    assert torch.allclose(weights(raw), seen[-1])


@pytest.mark.slow(own=True)
def test_the_mean_of_the_weights_agrees_more_than_the_weights_at_a_high_learning_rate(cache):
    train, _ = training.split_heldout(cache.sequences, 4)
    config = dataclasses.replace(CONFIG, max_steps=80, lr=2e-2, anneal=0.0)
    mean, raw = make_draft(), make_draft()
    distill(mean, cache, config)
    distill(raw, cache, dataclasses.replace(config, average_power=None))
    rates = [np.concatenate(training.greedy_matches(draft, train)).mean() for draft in (mean, raw)]
    assert rates[0] > rates[1]


def test_alpha_is_looked_at_where_it_is_asked_for_on_the_texts_that_are_given(cache):
    texts = cache.sequences[:5]
    draft = make_draft()
    config = dataclasses.replace(
        CONFIG, max_steps=None, max_tokens=1200, evaluate_at=(300, 600, 10_000)
    )
    result = distill(draft, cache, config, heldout=texts)
    marks = [point.tokens for point in result.alpha_curve]
    assert (
        len(marks) == 3
        and 300 <= marks[0] < 364
        and 600 <= marks[1] < 664
        and marks[2] == result.tokens
    )
    assert result.heldout_tokens == tuple(len(s.greedy_ids) for s in texts)
    last = result.alpha_curve[-1]
    assert last.hits == tuple(int(m.sum()) for m in training.greedy_matches(draft, texts))
    assert last.value == pytest.approx(sum(last.hits) / sum(result.heldout_tokens))
    assert [point.weights for point in result.alpha_curve] == ["average", "average", "annealed"]


def test_checkpoints_of_earlier_versions_know_the_same_settings():
    """What 0.2.0 wrote into a checkpoint for these settings: its digest must stay."""
    known = {
        "lr": CONFIG.lr,
        "batch_tokens": CONFIG.batch_tokens,
        "warmup_tokens": CONFIG.warmup_tokens,
        "average_power": CONFIG.average_power,
        "clip": 1.0,
        "kl_weight": 1.0,
        "ce_weight": 0.0,
        "tv_weight": 0.0,
        "feature_weight": 0.3,
        "teacher_temperature": 1.0,
        "weight_decay": 0.0,
        "train_embedding": False,
        "shortlist": 8192,
        "heldout_sequences": CONFIG.heldout_sequences,
        "autocast": False,
        "seed": CONFIG.seed,
    }
    assert CONFIG.identity() == known
