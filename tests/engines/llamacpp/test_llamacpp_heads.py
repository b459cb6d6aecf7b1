"""EAGLE-3 heads of archsearch as GGUF, and n-grams, in llama.cpp (slow, in its own environment): same
text, and acceptance as predicted from cached states or replayed."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from archsearch.acceptance.chain import ChainRule
from archsearch.acceptance.lookup import LookupText, NewestNgram, replay
from archsearch.architecture.hf_config import from_hf_config
from archsearch.engines.engine import Chained, EnginePrompt, EngineSettings, Sampling
from archsearch.engines.llamacpp.engine import LlamaCppEngine
from archsearch.errors import ArchsearchError
from archsearch.models.drafts import build_draft, save_draft
from archsearch.models.gguf_file import write_gguf
from archsearch.text.auxiliary import auxiliary_states
from archsearch.training.heads.eagle3 import initialise_eagle3
from archsearch.training.heads.folder import eagle3_config, save_eagle3, target_facts
from archsearch.training.heads.train import head_config, train_head
from tests.doubles.tiny_heads import AUX as TINY_AUX
from tests.doubles.tiny_heads import HIDDEN, KEPT, make_deep_target, make_eagle3, write_texts
from tests.engines.vllm.test_vllm_heads import (
    AUX,
    GAMMA,
    TOKENS,
    VOCAB,
    engine_here,
    foretold,
    make_target,
)


def saved(folder: Path, layers: int = 1) -> Path:
    target = make_deep_target()
    facts = target_facts(from_hf_config(target.config.to_dict()), "tiny")
    save_eagle3(make_eagle3(target, layers), folder, facts)
    return folder


def test_a_head_is_written_as_llama_cpp_names_its_parts(tmp_path: Path) -> None:
    write_gguf(saved(tmp_path / "head"), tmp_path / "h.gguf", dtype="q8_0", tokens_needed=False)
    reader = gguf.GGUFReader(tmp_path / "h.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "eagle3"
    assert fields["eagle3.target_layers"] == list(TINY_AUX)
    assert fields["eagle3.target_hidden_size"] == HIDDEN
    assert fields["eagle3.norm_before_residual"] is False
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert set(tensors) == {
        *("fc.weight", "output_norm.weight", "output.weight", "d2t"),
        *(f"blk.0.{name}.weight" for name in ("attn_norm", "attn_norm_2", "ffn_norm")),
        *(f"blk.0.attn_{name}.weight" for name in ("q", "k", "v", "output")),
        *(f"blk.0.ffn_{name}.weight" for name in ("gate", "up", "down")),
    }
    assert np.array_equal(tensors["d2t"].data, KEPT)  # ids, not offsets
    assert tensors["fc.weight"].tensor_type.name == "Q8_0"


def test_a_head_of_several_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchsearchError, match="1 layer, not of 2"):
        write_gguf(saved(tmp_path / "deep", 2), tmp_path / "deep.gguf", tokens_needed=False)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [tuple(range(VOCAB)), tuple(range(0, VOCAB, 2))])
def test_a_head_writes_the_targets_text_and_accepts_what_was_predicted(
    tmp_path: Path, kept: tuple[int, ...]
) -> None:
    engine_here("llama.cpp")
    target = make_target(tmp_path / "target")
    arch = from_hf_config(target.config.to_dict())
    cache = write_texts(tmp_path / "text", target, 48)
    decoder = arch.replace(num_hidden_layers=1, draft_vocab_size=len(kept))
    head = initialise_eagle3(target, eagle3_config(decoder, target), AUX, kept)
    config = head_config(
        max_steps=80, batch_tokens=128, warmup_tokens=64, lr=5e-3, autocast=False, evaluations=2
    )
    train_head(head, [auxiliary_states(target, cache, AUX)], GAMMA, config)
    save_eagle3(head, tmp_path / "head", target_facts(arch, "tiny"))
    prompts = [
        EnginePrompt(str(i), tuple(s.token_ids[: s.prompt_tokens].tolist()))
        for i, s in enumerate(cache.sequences[:6])
    ]
    answers = []
    for source in (None, tmp_path / "head"):
        engine = LlamaCppEngine(EngineSettings(dtype="float32", max_len=96, threads=1))
        engine.start(tmp_path / "target", source, GAMMA if source is not None else 0)
        try:
            answers.append(engine.generate(prompts, Sampling(TOKENS, ignore_end=True)))
        finally:
            engine.stop()
    assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]
    rounds = sum(result.rounds for result in answers[1])
    counted = [
        sum(result.accepted_by_position[k] for result in answers[1]) / rounds for k in range(GAMMA)
    ]
    expected = foretold(head.eval(), target, answers[1], prompts, tmp_path / "foretold", True)
    assert counted == pytest.approx(expected, abs=0.08) and counted[0] > 0.1


@pytest.mark.slow
def test_n_grams_write_the_targets_text_and_draft_what_the_replay_says(tmp_path: Path) -> None:
    engine_here("llama.cpp")
    target = make_target(tmp_path / "target")
    cache = write_texts(tmp_path / "text", target, 48)
    prompts = [
        EnginePrompt(str(i), tuple(s.token_ids[:12].tolist()))
        for i, s in enumerate(cache.sequences[:8])
    ]
    lookup, answers = NewestNgram(2, 2), []
    for source in (None, lookup):
        engine = LlamaCppEngine(EngineSettings(dtype="float32", max_len=160, threads=1))
        engine.start(tmp_path / "target", source, GAMMA if source is not None else 0)
        try:
            answers.append(engine.generate(prompts, Sampling(120, ignore_end=True)))
        finally:
            engine.stop()
    assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]
    texts = [
        LookupText(prompt.token_ids, each.token_ids)
        for prompt, each in zip(prompts, answers[1], strict=True)
    ]
    found = replay(lookup, texts, [GAMMA])[GAMMA]
    rounds = sum(each.rounds for each in answers[1])
    drafting = found.rounds * found.drafts_share.value
    assert rounds > 20 and rounds == pytest.approx(drafting, abs=len(prompts))
    counted = [
        sum(each.accepted_by_position[k] for each in answers[1]) / rounds for k in range(GAMMA)
    ]
    assert counted == pytest.approx(found.accepted_by_position, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "lookup"),
    [
        (ChainRule(4, 2), NewestNgram(2, 2)),
        (ChainRule(0, 3, least=0.5, with_last=False), None),
    ],
)
def test_a_chain_writes_the_targets_text_in_rounds_of_both_sizes(
    tmp_path: Path, rule: ChainRule, lookup: NewestNgram | None
) -> None:
    engine_here("llama.cpp")
    target = make_target(tmp_path / "target")
    arch = from_hf_config(target.config.to_dict())
    save_draft(build_draft(arch.replace(num_hidden_layers=1)), tmp_path / "draft")
    prompts = [EnginePrompt(str(i), tuple(range(1 + i, 13 + i))) for i in range(6)]
    answers, drafted = [], set()
    for source in (None, Chained(tmp_path / "draft", rule, lookup)):
        engine = LlamaCppEngine(EngineSettings(dtype="float32", max_len=160, threads=1))
        engine.start(tmp_path / "target", source, rule.longest if source is not None else 0)
        try:
            answers.append(engine.generate(prompts, Sampling(100, ignore_end=True)))
            drafted = {step.gamma for step in engine.steps() if not step.prefill}
        finally:
            engine.stop()
    assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]
    assert max(drafted) <= rule.longest
    # the lookup's rounds are longer than the draft's; an unsure draft proposes nothing
    assert {2, 4} <= drafted if lookup is not None else 0 in drafted
