"""Heads trained here, in vLLM (slow, in its own environment): same text, and acceptance as foretold
from cached states."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from archsearch.acceptance.lookup import Ngram
from archsearch.acceptance.replay import replay_chains
from archsearch.architecture.hf_config import from_hf_config
from archsearch.drafters.forms import drafter_config
from archsearch.drafters.heads import DFlash, PEagle
from archsearch.drafters.models import Pard
from archsearch.drafts.heads import HeadAcceptance, HeadPlan, HeadRecord
from archsearch.engines.engine import EnginePrompt, EngineSettings, Sampling
from archsearch.engines.environments.environment import find_python
from archsearch.engines.vllm.engine import VllmEngine
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.export.card import DraftRecord, ExportSource, ExportTarget
from archsearch.export.folder import SPECULATORS_FILE, export
from archsearch.files import write_json
from archsearch.text.auxiliary import auxiliary_states
from archsearch.training.heads.chains import chain_matches
from archsearch.training.heads.eagle3 import initialise_eagle3
from archsearch.training.heads.folder import eagle3_config, save_eagle3, save_medusa, target_facts
from archsearch.training.heads.medusa import initialise_medusa
from archsearch.training.heads.train import head_config, train_head
from tests.doubles.tiny_heads import write_texts

VOCAB, LAYERS, GAMMA, TOKENS = 48, 12, 3, 40
AUX = (2, 6, 9)  # what OpenVINO GenAI hands over


def make_target(folder: Path):
    torch.manual_seed(0)
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            bos_token_id=None,
            eos_token_id=None,
            initializer_range=0.15,
            max_position_embeddings=256,
        )
    ).eval()
    target.save_pretrained(folder)
    return target


def foretold(head, target, results, prompts, auxiliary_dir: Path, aux) -> tuple[float, ...]:  # noqa: ANN001
    """Acceptance by position of rounds walked offline, over the very texts that the engine
    wrote."""
    from archsearch.text.prompts import EncodedPrompt
    from replay_vs_engine import with_states

    asked = [EncodedPrompt(prompt.token_ids, "", prompt.prompt_id) for prompt in prompts]
    sequences = with_states(target, asked, [result.token_ids for result in results])
    if aux:
        from archsearch.text.cache import (
            Fingerprint,
            TextCache,
            open_folder,
            save_shard,
            target_fingerprint,
        )

        fingerprint = Fingerprint(target_fingerprint(target), "p", {"kind": "written"})
        open_folder(auxiliary_dir, fingerprint, target.lm_head.weight)
        save_shard(auxiliary_dir / "shard-00000.safetensors", sequences, True)
        sequences = auxiliary_states(target, TextCache.load(auxiliary_dir), AUX).sequences
    return replay_chains(chain_matches(head, sequences, GAMMA), GAMMA).accepted_by_position


def trained(family: str, target, cache, folder: Path):  # noqa: ANN001, ANN201
    """A head of the family, trained a little on the texts of `cache`, and saved."""
    facts = target_facts(from_hf_config(target.config.to_dict()), "tiny")
    config = head_config(
        max_steps=80, batch_tokens=128, warmup_tokens=64, lr=5e-3, autocast=False, evaluations=2
    )
    if family == "medusa":
        heads = initialise_medusa(target, GAMMA, tuple(range(VOCAB)))
        train_head(heads, [cache], GAMMA, config)
        save_medusa(heads, folder, facts)
        return heads
    decoder = from_hf_config(target.config.to_dict()).replace(
        num_hidden_layers=1, draft_vocab_size=VOCAB
    )
    mask = 0 if family == "peagle" else None
    head = initialise_eagle3(
        target, eagle3_config(decoder, target), AUX, tuple(range(VOCAB)), mask_token_id=mask
    )
    train_head(head, [auxiliary_states(target, cache, AUX)], GAMMA, config)
    save_eagle3(head, folder, facts)
    return head


def engine_here(name: str) -> None:
    """Skip where the engine is not installed."""
    try:
        find_python(name)
    except ArchsearchError as error:
        pytest.skip(str(error))


def written(target: Path, source, gamma: int = GAMMA, **settings):  # noqa: ANN001, ANN201
    """The tokens of six texts in vLLM with a drafter (None: alone), and its rounds."""
    prompts = [EnginePrompt(str(i), tuple(range(1 + i, 9 + i))) for i in range(6)]
    engine = VllmEngine(EngineSettings(dtype="float32", max_len=96, **settings))
    engine.start(target, source, gamma if source is not None else 0)
    try:
        found = [
            result
            for prompt in prompts
            for result in engine.generate([prompt], Sampling(TOKENS, ignore_end=True))
        ]
    finally:
        engine.stop()
    return [result.token_ids for result in found], sum(result.rounds for result in found)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["peagle", "pard", "dflash"])
def test_drafters_that_fill_a_block_at_once_write_the_targets_text(
    tmp_path: Path, family: str
) -> None:
    """From the config.json that a search leaves for such a shape, with made-up weights."""
    engine_here("vllm")
    target = from_hf_config(make_target(tmp_path / "target").config.to_dict())
    drafter = {"peagle": PEagle, "dflash": DFlash, "pard": Pard}[family].usual(target)
    write_json(tmp_path / "draft/config.json", drafter_config(drafter, target))
    alone, _ = written(tmp_path / "target", None, dummy_weights=True)
    found, rounds = written(tmp_path / "target", tmp_path / "draft", dummy_weights=True)
    assert found == alone and rounds


@pytest.mark.slow
def test_an_export_loads_in_both_of_its_forms(tmp_path: Path) -> None:
    """The folder as it is, and with the speculators config in the place of config.json: same texts,
    same rounds."""
    engine_here("vllm")
    target = make_target(tmp_path / "target")
    trained("eagle3", target, write_texts(tmp_path / "text", target, 48), tmp_path / "head")
    tau = {GAMMA: Estimate(2.0, 0.1, "measured")}
    held = HeadAcceptance((0.5,) * GAMMA, tau=tau, accepted_by_position={GAMMA: (0.5, 0.3, 0.2)})
    record = HeadRecord(HeadPlan("eagle3", GAMMA), 0.0, 0, held, rows=VOCAB, text_tokens=100)
    target = ExportTarget(str(tmp_path / "target"))
    source = ExportSource(
        tmp_path / "head",
        GAMMA,
        target=target,
        record=DraftRecord(training=record),
        family="eagle3",
    )
    export(source, tmp_path / "export")
    common = written(tmp_path / "target", tmp_path / "export")
    spoken = tmp_path / "spoken"
    shutil.copytree(tmp_path / "export", spoken)
    (spoken / SPECULATORS_FILE).rename(spoken / "config.json")
    assert written(tmp_path / "target", spoken) == common
    assert common[0] == written(tmp_path / "target", None)[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["eagle3", "medusa", "ngram", "peagle"])
def test_heads_write_the_targets_text_and_accept_what_was_foretold(
    tmp_path: Path, family: str
) -> None:
    engine_here("vllm")
    target = make_target(tmp_path / "target")
    draft, head = tmp_path / family, None
    cache = write_texts(tmp_path / "text", target, 48)
    if family != "ngram":
        head = trained(family, target, cache, draft)
    prompts = [
        EnginePrompt(str(i), tuple(s.token_ids[: s.prompt_tokens].tolist()))
        for i, s in enumerate(cache.sequences[:6])
    ]
    sampling, answers = Sampling(TOKENS), []
    for source in (None, Ngram() if family == "ngram" else draft):
        engine = VllmEngine(EngineSettings(dtype="float32", max_len=96))
        engine.start(tmp_path / "target", source, GAMMA if source is not None else 0)
        try:
            answers.append(
                [result for prompt in prompts for result in engine.generate([prompt], sampling)]
            )
            told = all(step.target_s is not None for step in engine.steps())
        finally:
            engine.stop()
    assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]
    assert told, "passes are timed for every family"
    rounds = sum(result.rounds for result in answers[1])
    assert rounds
    if head is not None:
        counted = [
            sum(result.accepted_by_position[k] for result in answers[1]) / rounds
            for k in range(GAMMA)
        ]
        expected = foretold(
            head.eval(), target, answers[1], prompts, tmp_path / "foretold", family != "medusa"
        )
        assert counted == pytest.approx(expected, abs=0.05) and counted[0] > 0.1
