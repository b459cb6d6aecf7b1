"""The trainer on a tiny target: short trainings that go on, further text, and drafts compared in
pairs."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from archsearch.acceptance.measured import Trace
from archsearch.drafts.heads import HeadPlan, HeadTrainer, load_head
from archsearch.drafts.records import ShortTraining, load_trained, paired_logit_std
from archsearch.drafts.texts import RunTexts
from archsearch.drafts.trainer import DraftTrainer, choose_finalists
from archsearch.errors import ArchsearchError
from archsearch.files import read_json
from archsearch.models.load import LoadedTarget
from archsearch.models.targets import resolve_target
from archsearch.pipeline.confirm import seen_words
from archsearch.text import auxiliary
from archsearch.text.cache import TextCache
from archsearch.text.prompt_set import load_prompt_set
from archsearch.training.heads.train import head_config
from tests.doubles.world import TINY, make_model_folder, make_prompts

SHAPE = TINY.replace(num_hidden_layers=1, tie_word_embeddings=False, draft_vocab_size=128)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> DraftTrainer:
    folder = tmp_path_factory.mktemp("trainer")
    make_model_folder(folder / "target")
    prompts = load_prompt_set(make_prompts(folder / "prompts.jsonl"), None)
    found = DraftTrainer(
        LoadedTarget(resolve_target(str(folder / "target")), "float32"),
        prompts,
        folder / "run",
        answer_tokens=16,
        threads=1,
    )
    found.texts.write_training(60.0)
    return found


def test_further_text_leaves_out_the_prompts_that_drafts_are_compared_on(
    trainer: DraftTrainer,
) -> None:
    from archsearch.training.distill import DistillConfig, split_heldout

    assert trainer.texts.growth.grow(0.0) == {} and len(trainer.texts.all_training()) == 1
    # Of all sources the one over the same prompts; the others: test_growth.
    growth = trainer.texts.growth
    assert growth._write("answers", [encoded for _, encoded in growth._prompts()], 60.0) > 0
    assert len(trainer.texts.all_training()) == 2
    more = trainer.texts.all_training()[1]
    kept_out = split_heldout(
        trainer.texts.training().sequences, DistillConfig(max_steps=1).heldout_sequences
    )[1]
    unseen = {tuple(s.token_ids[: s.prompt_tokens].tolist()) for s in kept_out}
    answered = {tuple(s.token_ids[: s.prompt_tokens].tolist()) for s in more.sequences}
    written = {
        tuple(s.token_ids[: s.prompt_tokens].tolist()) for s in trainer.texts.training().sequences
    }
    assert unseen and answered == written - unseen
    again = DraftTrainer(
        LoadedTarget(trainer.target, "float32"), trainer.prompts, trainer.folder, answer_tokens=16
    )  # another process finds it
    assert [cache.fingerprint for cache in again.texts.all_training()] == [
        cache.fingerprint for cache in trainer.texts.all_training()
    ]


def test_a_short_training_goes_on_and_is_not_done_twice(trainer: DraftTrainer) -> None:
    first = trainer.train_short(SHAPE, 2000)
    assert 2000 <= first.tokens < 3000 and first.points[-1][0] == first.tokens
    assert len(first.hits) == len(first.heldout_tokens) and sum(first.hits) == pytest.approx(
        first.points[-1][1] * sum(first.heldout_tokens)
    )
    curve = trainer.draft_folder(SHAPE) / "curve.json"
    before = curve.stat().st_mtime_ns
    assert trainer.train_short(SHAPE, 1500) == first and curve.stat().st_mtime_ns == before
    second = trainer.train_short(SHAPE, 4000)
    assert second.tokens >= 4000 and second.seconds > first.seconds
    assert set(first.points) <= set(second.points)  # the same curve, longer
    limited = trainer.train_short(SHAPE, 10**9, limit_s=second.seconds + 0.3)
    assert limited.tokens < 10**8 and limited.seconds < second.seconds + 60
    draft = trainer.train(SHAPE, limited.seconds + 0.5)  # the full training goes on from there
    assert draft.alpha.source == "measured" and (draft.folder / "model.safetensors").exists()


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_training_on_never_leaves_worse_weights_than_there_were(
    trainer: DraftTrainer,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A trunk that goes on from before its anneal may end below it (sceptic: .988 -> .972)."""

    def traced(share: float) -> None:
        def trace(draft: object, cache: TextCache) -> Trace:
            own = cache.sequences
            rows = tuple(np.arange(len(s.greedy_ids)) < share * len(s.greedy_ids) for s in own)
            return Trace(rows, ("",) * len(own), tuple(s.id for s in own))

        monkeypatch.setattr("archsearch.drafts.trainer.agreement_trace", trace)

    shape = SHAPE.replace(intermediate_size=round(160 * (1 + share)))
    traced(0.6)
    first = trainer.train(shape, 60.0, tokens=2000)
    weights = (first.folder / "model.safetensors").read_bytes()
    record = read_json(first.folder / "training.json", "training record")
    traced(share)
    second = trainer.train(shape, 120.0, tokens=6000)
    again = read_json(first.folder / "training.json", "training record")
    stays = share < 0.6
    assert ((first.folder / "model.safetensors").read_bytes() == weights) == stays
    assert (again["kept"] == record["kept"]) == (again["divergence"] == record["divergence"])
    assert (again["kept"] == record["kept"]) == stays and again["tokens"] > record["tokens"]
    assert (second.alpha == first.alpha) == stays and second.tokens == again["tokens"]
    assert load_trained(shape, first.folder).alpha == second.alpha
    assert ("stay as they were: alpha 0.6" in capsys.readouterr().err) == stays


def test_a_head_that_is_known_beforehand_needs_no_second_reading(
    trainer: DraftTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it reads is kept while its texts are written, those that come later too."""
    fresh = DraftTrainer(trainer.loaded, trainer.prompts, tmp_path, answer_tokens=8)
    heads, plan = HeadTrainer(fresh), HeadPlan("eagle3", gamma=2, rows=128)
    heads.keep_states(HeadPlan.usual("medusa", 2))
    assert not fresh.texts.layers, "Medusa heads read none"
    heads.keep_states(plan)
    fresh.texts.write_training(60.0)
    growth = fresh.texts.growth
    assert growth._write("answers", [encoded for _, encoded in growth._prompts()], 60.0) > 0
    monkeypatch.setattr(auxiliary, "_layer_inputs", None)  # nothing is read
    record = heads.train(plan, 0.2).record
    assert record.aux_layers == fresh.texts.layers == (0, 1) and record.steps > 0
    assert {path.parent.name for path in tmp_path.glob("*/auxiliary-*")} == {
        "text",
        "answers",
        "heldout",
    }


def test_a_head_that_went_on_never_replaces_a_better_one(
    trainer: DraftTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = DraftTrainer(trainer.loaded, trainer.prompts, tmp_path, answer_tokens=8)
    fresh.texts.write_training(60.0)
    # So slow a learner that no machine brings it to its best, where it would stop, in this time.
    slow = partial(head_config, lr=1e-6)
    monkeypatch.setattr("archsearch.training.heads.train.head_config", slow)
    monkeypatch.setattr("archsearch.drafts.heads.PATIENCE", 1e9)
    plan, found = HeadPlan("medusa", gamma=2, rows=128), []
    for share, seconds in ((0.5, 0.2), (0.0, 0.4), (1.0, 0.6)):
        rows = [np.arange(14).reshape(7, 2) < 14 * share] * 20
        monkeypatch.setattr("archsearch.drafts.heads._matches", lambda *_, rows=rows: rows)
        head = HeadTrainer(fresh).train(plan, seconds)
        weights = (head.folder / "model.safetensors").read_bytes()
        found.append((weights, head.taus, head.record.best, load_head(head.folder).taus))
        assert head.record.seconds >= seconds
    first, worse, better = found
    assert worse == first and worse[1] == worse[3]
    assert better[0] != first[0] and better[1][2].value == 3.0 == better[3][2].value


def test_pairing_removes_what_texts_share() -> None:
    def short(hits: tuple[int, ...]) -> ShortTraining:
        return ShortTraining(SHAPE, 100, 1.0, 100.0, ((100, 0.5),), hits, (20,) * len(hits))

    easy_and_hard = tuple(10 + round(8 * math.sin(i)) for i in range(40))
    ahead = tuple(value + 1 for value in easy_and_hard)
    other = tuple(10 + round(8 * math.cos(3 * i)) for i in range(40))
    assert paired_logit_std(short(easy_and_hard), short(easy_and_hard)) == pytest.approx(
        0.0, abs=1e-9
    )
    assert paired_logit_std(short(easy_and_hard), short(ahead)) < 0.2 * paired_logit_std(
        short(easy_and_hard), short(other)
    )
    with pytest.raises(ArchsearchError, match="different texts"):
        paired_logit_std(short((1, 2, 3)), short((1, 2)))


def test_finalists_differ_in_depth_first() -> None:
    class Item:
        def __init__(self, layers: int, name: str) -> None:
            self.architecture, self.name = TINY.replace(num_hidden_layers=layers), name

    ranked = [Item(2, "a"), Item(2, "b"), Item(1, "c"), Item(4, "d")]
    assert [item.name for item in choose_finalists(ranked, 3)] == ["a", "c", "d"]
    assert [item.name for item in choose_finalists(ranked, 4)] == ["a", "c", "d", "b"]


def test_drafts_are_chosen_on_one_half_of_the_held_out_text(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "target")
    prompts = make_prompts(tmp_path / "prompts.jsonl")
    heldout = make_prompts(tmp_path / "heldout.jsonl", 18, seed=5)
    loaded = LoadedTarget(resolve_target(str(tmp_path / "target")), "float32")
    texts = RunTexts(loaded, load_prompt_set(prompts, heldout), tmp_path / "run", 8)
    choosing = {prompt.token_ids for prompt in texts.encode(texts.prompts.choosing)}
    confirming = {prompt.token_ids for prompt in texts.encode(texts.prompts.confirming)}
    used = {tuple(s.token_ids[: s.prompt_tokens].tolist()) for s in texts.choosing().sequences}
    assert used == choosing and not used & confirming
    assert (
        len(texts.heldout().sequences) == 18
    )  # the whole is written: a run folder of before holds the same

    def traced(cache: TextCache) -> Trace:
        own = cache.sequences
        rows = tuple(np.ones(len(s.greedy_ids), bool) for s in own)
        return Trace(rows, ("",) * len(own), tuple(s.id for s in own))

    def seen(cache: TextCache, run: RunTexts = texts) -> str | None:
        traced(cache).save(tmp_path / "trace.npz")
        return seen_words(SimpleNamespace(prompts=run.prompts, texts=run), tmp_path)

    whole = texts.heldout()
    other = whole.part([s for s in whole.sequences if s.prompt_ids in confirming][1:])
    assert seen(texts.choosing()) is None
    assert all("may have been chosen on" in (seen(each) or "") for each in (whole, other))
    elsewhere = RunTexts(loaded, texts.prompts, tmp_path / "copied", 8)
    assert seen(whole, elsewhere) and not (tmp_path / "copied").exists(), "nothing is written"
    # What stopped at its budget stays as it is, whoever asks again.
    again = RunTexts(loaded, texts.prompts, tmp_path / "run", 8)
    assert (tmp_path / "run" / "heldout" / "done.json").exists()
    assert again.heldout(0.0).written_tokens == texts.heldout().written_tokens
