"""What stands in the place of a draft, and engines that are not started with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from archsearch.acceptance.lookup import Ngram
from archsearch.engines.child.child_engine import check_vocabularies
from archsearch.engines.engine import EngineSettings, drafter_family
from archsearch.engines.openvino.engine import OpenVinoEngine
from archsearch.engines.vllm.engine import VllmEngine
from archsearch.errors import ArchsearchError


def folder_of(path: Path, **config) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_the_family_is_read_from_the_folder(tmp_path: Path) -> None:
    eagle = folder_of(tmp_path / "a", architectures=["LlamaForCausalLMEagle3"])
    medusa = folder_of(
        tmp_path / "b",
        architectures=["MedusaModel"],
        model_type="medusa",
        num_heads=2,
        vocab_size=10,
    )
    llama = folder_of(tmp_path / "c", architectures=["LlamaForCausalLM"], vocab_size=10)
    parallel = folder_of(tmp_path / "d", architectures=["LlamaForCausalLMEagle3"], ptd_token_id=3)
    spoken = folder_of(
        tmp_path / "e",
        architectures=["Eagle3Speculator"],
        transformer_layer_config={"vocab_size": 10},
    )
    pard = folder_of(
        tmp_path / "f", architectures=["LlamaForCausalLM"], vocab_size=10, pard_token=3
    )
    block = folder_of(
        tmp_path / "g", architectures=["DFlashDraftModel"], model_type="qwen3", vocab_size=10
    )
    assert [drafter_family(x) for x in (eagle, medusa, llama, Ngram(), None, "org/name")] == [
        "eagle3",
        "medusa",
        "independent",
        "ngram",
        "independent",
        "independent",
    ]
    assert [drafter_family(x) for x in (parallel, spoken, pard, block)] == [
        "peagle",
        "eagle3",
        "pard",
        "dflash",
    ]
    check_vocabularies([str(llama), str(spoken)])
    with pytest.raises(
        ArchsearchError, match="not started with medusa drafters here, only with .*; use vllm"
    ):
        OpenVinoEngine(EngineSettings()).start(llama, medusa, 2)
    with pytest.raises(ArchsearchError, match="has 2 Medusa heads, so gamma is at most 2, got 3"):
        VllmEngine(EngineSettings()).start(llama, medusa, 3)
    for one_gamma in (medusa, parallel, pard):
        with pytest.raises(ArchsearchError, match="one gamma for all batch sizes"):
            VllmEngine(EngineSettings()).start(llama, one_gamma, 2, schedule=((1, 4, 2), (5, 8, 1)))
