"""Further text of a run, source by source, on tiny targets: what it holds, that it ends, resumes
and leaks nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from archsearch.drafts.growth import SPEED_FILE, Growth, Speed
from archsearch.drafts.texts import RunTexts
from archsearch.models.load import LoadedTarget
from archsearch.models.targets import resolve_target
from archsearch.records import save
from archsearch.text.cache import TextCache
from archsearch.text.prompt_set import PromptSet, load_prompt_set
from archsearch.text.settings import Writing
from archsearch.training.batches import split_heldout
from archsearch.training.distill import DistillConfig, distill
from archsearch.training.settings import HELDOUT_SEQUENCES
from tests.doubles.world import make_model_folder, make_prompts

TOKENS = 16


def make_texts(folder: Path, prompts: PromptSet | None = None, run: str = "run") -> RunTexts:
    if not (folder / "target").exists():
        make_model_folder(folder / "target")
    found = prompts or load_prompt_set(make_prompts(folder / "prompts.jsonl", 32), None)
    return RunTexts(
        LoadedTarget(resolve_target(str(folder / "target")), "float32"), found, folder / run, TOKENS
    )


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> RunTexts:
    found = make_texts(tmp_path_factory.mktemp("growth"))
    found.write_training_once(60.0)
    return found


def asked(cache: TextCache) -> set[tuple[int, ...]]:
    return {tuple(s.token_ids[: s.prompt_tokens].tolist()) for s in cache.sequences}


def distinct_tokens(texts: RunTexts) -> dict[str, int]:
    """Written tokens that drafts are trained on, by folder; a text that was written twice counts
    once."""
    seen: set[tuple[int, ...]] = set()
    found = {}
    for cache in texts.all_training():
        new = {tuple(s.token_ids.tolist()): len(s.written) for s in cache.sequences}
        found[cache.folder.name] = sum(n for ids, n in new.items() if ids not in seen)
        seen |= new.keys()
    return found


@pytest.mark.slow(own=True)
def test_every_source_is_used_once_it_is_the_turn_of_it_and_ends(texts: RunTexts) -> None:
    before = distinct_tokens(texts)
    supplies = {supply.name: supply for supply in texts.growth.supplies()}
    assert "invented" in supplies and all(
        s.tokens > 0 and s.tokens_per_s > 0 and s.worth > 0 for s in supplies.values()
    )
    began = time.monotonic()
    gained = texts.growth.grow(8.0)
    assert time.monotonic() - began < 600
    assert gained and sum(gained.values()) > 0
    after = distinct_tokens(texts)
    assert set(before) == {"text"} and after["text"] == before["text"] and len(after) > 1
    kept_out = split_heldout(texts.training().sequences, HELDOUT_SEQUENCES)[1]
    unseen = {tuple(s.token_ids[: s.prompt_tokens].tolist()) for s in kept_out}
    heldout = {prompt.token_ids for prompt in texts.encode(texts.prompts.heldout)}
    for cache in texts.all_training()[1:]:
        starts = asked(cache)
        assert not starts & unseen and not starts & heldout
        assert not any(
            ids[: len(secret)] == secret for ids in starts for secret in unseen | heldout
        )
    # Another process finds the same.
    again = RunTexts(texts.target, texts.prompts, texts.folder, TOKENS)
    assert [c.fingerprint for c in again.all_training()] == [
        c.fingerprint for c in texts.all_training()
    ]
    assert distinct_tokens(again) == after


def test_sampled_answers_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    texts = make_texts(tmp_path)
    texts.write_training_once(60.0)
    prompts = [encoded for _, encoded in texts.growth._prompts()]
    for name in ("more", "more-2"):
        texts.answers(name, prompts, Writing(TOKENS, 0.7, seed=len(name)), 60.0)
    assert texts.growth.folders() == ["more", "more-2"]
    assert [cache.folder.name for cache in texts.all_training()] == ["text", "more", "more-2"]


def test_prompts_that_time_did_not_reach_come_first_and_a_cut_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = make_texts(tmp_path)
    texts.write_training(60.0)
    whole = texts.training()
    # A first text that was cut: a part of its answers, some of them half.
    text, run = texts.folder / "text", tmp_path / "cut"
    cut = make_texts(tmp_path, texts.prompts, "cut")
    (run / "text").mkdir(parents=True)
    from archsearch.text.cache import save_shard

    for name in ("cache.json", "head.safetensors"):
        (run / "text" / name).write_bytes((text / name).read_bytes())
    save_shard(run / "text" / "shard-00000.safetensors", whole.sequences[:20], False)
    (run / "text" / "done.json").write_text("{}")
    save(run / SPEED_FILE, Speed(300, 300, 1.0))
    assert cut.growth.supplies()[0].name == "answers" and cut.growth.supplies()[
        0
    ].worth == pytest.approx(1.0, abs=0.3)
    assert cut.growth._write_answers(60.0) > 0
    answers = {tuple(s.token_ids.tolist()) for s in TextCache.load(run / "answers").sequences}
    assert answers == {tuple(s.token_ids.tolist()) for s in whole.sequences[20:]}
    assert cut.growth._write_answers(60.0) == 0, "all were written"


@pytest.mark.slow(own=True)
def test_a_target_that_invents_nothing_usable_is_asked_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = make_texts(tmp_path)
    texts.write_training_once(60.0)
    monkeypatch.setattr(
        "archsearch.text.supply.turns_of",
        lambda sequences, *_: [("again " * 40, "", True)] * len(sequences),
    )
    monkeypatch.setattr("archsearch.drafts.growth.ASKED", 4)
    assert texts.growth._write_invented(60.0) == 0
    assert len(list(texts.folder.glob("asked-*/prompts.json"))) == 2
    assert "invented" not in {supply.name for supply in texts.growth.supplies()}
    assert texts.growth._write_invented(60.0) == 0 and len(list(texts.folder.glob("asked-*"))) == 2


def test_a_round_of_invented_prompts_is_kept_and_answered_greedily(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = make_texts(tmp_path)
    texts.write_training_once(60.0)
    monkeypatch.setattr("archsearch.drafts.growth.ASKED", 6)
    heldout = texts.prompts.heldout[0].text
    made = [(f"w{n} w{n + 20} w{n + 40} w{n + 60}", "", True) for n in range(5)] + [
        (heldout, "", True)
    ]
    monkeypatch.setattr("archsearch.text.supply.turns_of", lambda sequences, *_: made)
    assert texts.growth._write_invented(60.0) > 0
    cache = TextCache.load(texts.folder / "invented-000")
    assert len(cache.sequences) == 5 and all(
        torch.equal(s.written, s.greedy_ids) for s in cache.sequences
    )
    assert heldout not in (texts.folder / "asked-000" / "prompts.json").read_text()
    assert Growth(texts).folders() == ["invented-000"]


# ---- bad input


def biased(texts: RunTexts, token: int) -> None:
    """The target writes `token` whatever it reads."""
    for model in {texts.target.model(), texts.writer()}:
        with torch.no_grad():
            model.model.norm.weight.zero_()
            model.model.norm.weight[0] = 1.0
            model.lm_head.weight.zero_()
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            model.model.embed_tokens.weight[:, 0] = 5.0
            model.lm_head.weight[token, 0] = 1.0


def trains(texts: RunTexts) -> None:
    """A draft takes a few steps on all there is, and is measured."""
    from archsearch.training.initialise import initialise_draft
    from tests.doubles.world import TINY

    draft = initialise_draft(
        texts.target.model(), TINY.replace(num_hidden_layers=1, tie_word_embeddings=False), seed=0
    )
    result = distill(
        draft, texts.all_training(), DistillConfig(max_steps=3), heldout=texts.choosing().sequences
    )
    assert result.tokens > 0 and 0.0 <= result.kept.value <= 1.0


def untied(folder: Path) -> None:
    from tests.doubles.world import TINY

    make_model_folder(folder / "target", TINY.replace(tie_word_embeddings=False))


@pytest.mark.slow(own=True)
@pytest.mark.parametrize("kind", ["empty", "loop"])
def test_answers_that_are_empty_or_repeat_for_ever_end_with_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    untied(tmp_path)
    texts = make_texts(tmp_path)
    texts.answer_tokens = 64
    end = texts.target.tokenizer.eos_token_id
    biased(texts, end if kind == "empty" else 17)
    texts.write_training_once(60.0)
    said = [line for line in capfd.readouterr().err.splitlines() if "answers" in line]
    words = "are one token long or empty" if kind == "empty" else "the target repeats itself in"
    assert sum(words in line for line in said) == 1
    began = time.monotonic()
    texts.growth.grow(3.0)
    assert time.monotonic() - began < 600
    trains(texts)


@pytest.mark.parametrize("count", [1, 12])
def test_one_prompt_and_prompts_that_are_all_alike_end_with_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], count: int
) -> None:
    heldout = load_prompt_set(make_prompts(tmp_path / "h.jsonl", 9, seed=5), None)
    one = load_prompt_set(make_prompts(tmp_path / "p.jsonl"), None).train[0]
    texts = make_texts(tmp_path, PromptSet([one] * count, heldout.train, "made up"))
    texts.write_training_once(60.0)
    said = capfd.readouterr().err
    words = "only 1 prompts" if count == 1 else f"{count} prompts, 1 of them distinct"
    assert said.count(f"{words}: the draft learns their answers by heart") == 1
    texts.growth.grow(2.0)
    trains(texts)
    assert sum(distinct_tokens(texts).values()) > 0
