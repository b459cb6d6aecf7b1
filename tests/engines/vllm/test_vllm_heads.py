"""Heads trained here, in vLLM (slow, in its own environment): same text, and acceptance as foretold from cached states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from archsearch.acceptance.lookup import Ngram
from archsearch.acceptance.replay import replay_chains
from archsearch.architecture.hf_config import from_hf_config
from archsearch.engines.engine import EnginePrompt, EngineSettings, Sampling
from archsearch.engines.environments.environment import find_python
from archsearch.engines.vllm.engine import VllmEngine
from archsearch.errors import ArchsearchError
from archsearch.text.auxiliary import auxiliary_states
from archsearch.training.heads.chains import chain_matches
from archsearch.training.heads.eagle3 import initialise_eagle3
from archsearch.training.heads.folder import TargetFacts, eagle3_config, save_eagle3, save_medusa
from archsearch.training.heads.medusa import initialise_medusa
from archsearch.training.heads.train import head_config, train_head
from tests.doubles.tiny_heads import write_texts

VOCAB, LAYERS, GAMMA, TOKENS = 48, 6, 3, 40
AUX = (1, 3, 4)


def make_target(folder: Path):
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, bos_token_id=None, eos_token_id=None, initializer_range=0.15,
        max_position_embeddings=256,
    )).eval()  # fmt: skip
    target.save_pretrained(folder)
    return target


def foretold(head, target, results, prompts, auxiliary_dir: Path, aux) -> tuple[float, ...]:  # noqa: ANN001
    """Acceptance by position of rounds walked offline, over the very texts that the engine wrote."""
    from archsearch.text.encode import with_states
    from archsearch.text.prompts import EncodedPrompt

    asked = [EncodedPrompt(prompt.token_ids, "", prompt.prompt_id) for prompt in prompts]
    sequences = with_states(target, asked, [result.token_ids for result in results])
    states = None
    if aux:
        from archsearch.text.cache import TextCache, open_folder, save_shard, target_fingerprint

        fingerprint = {"target": target_fingerprint(target), "prompts": "p", "settings": {"kind": "written"}}
        open_folder(auxiliary_dir, fingerprint, target.lm_head.weight)
        save_shard(auxiliary_dir / "shard-00000.safetensors", sequences, True)
        states = auxiliary_states(target, TextCache.load(auxiliary_dir), AUX)
    return replay_chains(chain_matches(head, sequences, GAMMA, states), GAMMA).accepted_by_position


@pytest.mark.slow
@pytest.mark.parametrize("family", ["eagle3", "medusa", "ngram"])
def test_heads_write_the_targets_text_and_accept_what_was_foretold(tmp_path: Path, family: str) -> None:
    try:
        find_python("vllm")
    except ArchsearchError as error:
        pytest.skip(str(error))
    target = make_target(tmp_path / "target")
    every = tuple(range(VOCAB))
    facts = TargetFacts.of(from_hf_config(target.config.to_dict()), "tiny")
    draft, head = tmp_path / family, None
    cache = write_texts(tmp_path / "text", target, 48)
    config = head_config(max_steps=80, batch_tokens=128, warmup_tokens=64, lr=5e-3, autocast=False, evaluations=2)
    if family == "eagle3":
        decoder = from_hf_config(target.config.to_dict()).replace(num_hidden_layers=1, draft_vocab_size=VOCAB)
        head = initialise_eagle3(target, eagle3_config(decoder, target), AUX, every)
        train_head(head, [cache], GAMMA, config, auxiliary=auxiliary_states(target, cache, AUX))
        save_eagle3(head, draft, facts)
    elif family == "medusa":
        head = initialise_medusa(target, GAMMA, every)
        train_head(head, [cache], GAMMA, config)
        save_medusa(head, draft, facts)
    prompts = [EnginePrompt(str(i), tuple(s.token_ids[: s.prompt_tokens].tolist())) for i, s in enumerate(cache.sequences[:6])]
    sampling, answers = Sampling(TOKENS), []
    for source in (None, Ngram() if family == "ngram" else draft):
        engine = VllmEngine(EngineSettings(dtype="float32", max_len=96))
        engine.start(tmp_path / "target", source, GAMMA if source is not None else 0)
        try:
            answers.append([result for prompt in prompts for result in engine.generate([prompt], sampling)])
            told = all(step.target_s is not None for step in engine.steps())
        finally:
            engine.stop()
    assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]
    assert told, "passes are timed for every family"
    rounds = sum(result.rounds for result in answers[1])
    assert rounds
    if head is not None:
        counted = [sum(result.accepted_by_position[k] for result in answers[1]) / rounds for k in range(GAMMA)]
        expected = foretold(head.eval(), target, answers[1], prompts, tmp_path / "foretold", family == "eagle3")
        assert counted == pytest.approx(expected, abs=0.05) and counted[0] > 0.1
