"""Heads trained here and prompt lookup, in OpenVINO GenAI (slow, in its own environment); what it
does not run is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from archsearch.acceptance.lookup import Ngram
from archsearch.engines.engine import EnginePrompt, EngineSettings, Sampling
from archsearch.engines.openvino.engine import OpenVinoEngine
from archsearch.errors import ArchsearchError
from tests.doubles.tiny_heads import write_texts
from tests.engines.child.test_families import folder_of
from tests.engines.vllm.test_vllm_heads import (
    GAMMA,
    TOKENS,
    engine_here,
    foretold,
    make_target,
    trained,
)

IDS = {"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}


def test_heads_that_it_cannot_run_are_refused(tmp_path: Path) -> None:
    llama = folder_of(tmp_path / "target", architectures=["LlamaForCausalLM"], vocab_size=10)
    common = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 10}
    deep = folder_of(tmp_path / "deep", **common, num_hidden_layers=2, eagle_config=IDS)
    two = {"eagle_aux_hidden_state_layer_ids": [2, 15]}
    few = folder_of(tmp_path / "few", **common, num_hidden_layers=1, eagle_config=two)
    medusa = folder_of(
        tmp_path / "medusa",
        architectures=["MedusaModel"],
        model_type="medusa",
        num_heads=2,
        vocab_size=10,
    )
    engine = OpenVinoEngine(EngineSettings())
    with pytest.raises(ArchsearchError, match="runs EAGLE-3 heads of 1 layer, this one has 2"):
        engine.start(llama, deep, 2)
    with pytest.raises(
        ArchsearchError, match="hands 3 states to an EAGLE-3 head, this one reads 2"
    ):
        engine.start(llama, few, 2)
    with pytest.raises(ArchsearchError, match="not started with medusa drafters here"):
        engine.start(llama, medusa, 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["eagle3"])
def test_heads_write_the_targets_text_and_accept_what_was_foretold(
    tmp_path: Path, family: str
) -> None:
    engine_here("openvino")
    target = make_target(tmp_path / "target")
    cache = write_texts(tmp_path / "text", target, 48)
    head = trained(family, target, cache, tmp_path / family) if family == "eagle3" else None
    prompts = [
        EnginePrompt(str(i), tuple(s.token_ids[: s.prompt_tokens].tolist()))
        for i, s in enumerate(cache.sequences[:6])
    ]
    answers = []
    for source in (None, Ngram() if family == "ngram" else tmp_path / family):
        engine = OpenVinoEngine(EngineSettings(dtype="float32", max_len=96))
        engine.start(tmp_path / "target", source, GAMMA if source is not None else 0)
        try:
            answers.append(
                [
                    result
                    for prompt in prompts
                    for result in engine.generate([prompt], Sampling(TOKENS))
                ]
            )
        finally:
            engine.stop()
    assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]
    rounds = sum(result.rounds for result in answers[1])
    assert rounds
    if head is not None:
        counted = [
            sum(result.accepted_by_position[k] for result in answers[1]) / rounds
            for k in range(GAMMA)
        ]
        expected = foretold(head.eval(), target, answers[1], prompts, tmp_path / "foretold", True)
        assert counted == pytest.approx(expected, abs=0.08) and counted[0] > 0.1
