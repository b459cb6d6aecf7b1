"""What is known of the engines: who can do what, how each runs a draft, and that nothing else need
be told of a new one."""

from __future__ import annotations

from dataclasses import fields

import pytest

from archsearch.acceptance.estimator import GivenAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import FAMILIES, READ_ONLY
from archsearch.drafters.models import Independent
from archsearch.engine_facts import (
    ENGINES,
    EngineFacts,
    engine_facts,
    engine_title,
    engines_that,
    has_recipe,
    load,
    runnable_engine,
)
from archsearch.engines.engine import EngineSettings
from archsearch.errors import ArchsearchError
from archsearch.hardware.identify import resolve_device
from archsearch.latency.roofline import RooflineLatency
from archsearch.pipeline.families import family_spaces
from archsearch.search.objective import Scorer
from archsearch.search.space import load_space
from archsearch.workload import Workload

DRAFT = Architecture(256, 512, 2, 4, 4, 64, 32000, draft_vocab_size=8000)


@pytest.mark.parametrize(
    ("engine", "rows"), [(None, 8000), ("transformers", 8000), ("vllm", 32000), ("openvino", 32000)]
)
def test_only_some_engines_know_a_trimmed_head(engine: str | None, rows: int) -> None:
    assert engine_facts(engine).served_draft(DRAFT).head_rows == rows


def test_who_shares_the_draft() -> None:
    assert engine_facts("vllm").draft_ranks(4) == 4
    assert engine_facts("openvino").draft_ranks(4) == engine_facts(None).draft_ranks(4) == 1


def test_only_vllm_runs_an_idle_draft() -> None:
    device, workload = resolve_device("a100"), Workload(batch_size=8)
    names = engines_that(lambda row: True)
    costs = {name: RooflineLatency(device, "bfloat16", "graph", name) for name in names}
    idle = {name: latency.idle_draft_s(DRAFT, workload).value for name, latency in costs.items()}
    assert (
        idle["transformers"]
        == idle["openvino"]
        == 0
        < idle["vllm"]
        < costs["vllm"].draft_s(DRAFT, workload, 2).value
    )


def test_what_archsearch_runs_and_what_each_can() -> None:
    assert engines_that(lambda row: True) == ("transformers", "vllm", "openvino", "llama.cpp")
    assert engines_that(has_recipe) == ("vllm", "openvino", "llama.cpp")
    assert engines_that(lambda row: row.batches) == ("vllm", "openvino", "llama.cpp")
    assert engines_that(lambda row: row.synthesises) == ("transformers", "vllm", "llama.cpp")
    assert (
        engines_that(lambda row: row.schedules)
        == engines_that(lambda row: row.dummy_weights)
        == ("vllm",)
    )


@pytest.mark.parametrize("row", ENGINES.values(), ids=lambda row: row.name)
def test_a_row_is_whole(row: EngineFacts) -> None:
    for name in ("make", "recipe", "export"):
        path = getattr(row, name)
        assert not path or load(path) is not None
    assert not row.in_process or not row.recipe
    assert row.make or not any((row.recipe, row.in_process, row.server, row.synthesises))
    assert sum(map(bool, (row.export, row.draft_folder, row.not_exported))) <= 1
    assert row.version, "say which version the facts hold for"
    assert {field.name for field in fields(row)} >= {"sharded_draft", "idle_pass"}


def test_an_engine_that_runs_says_what_its_row_says() -> None:
    for name in ("transformers", "vllm", "openvino", "llama.cpp"):
        engine, row = load(ENGINES[name].make)(EngineSettings(), None), ENGINES[name]
        assert (engine.name, engine.facts) == (name, row)


def test_unknown_engines() -> None:
    with pytest.raises(
        ArchsearchError,
        match="unknown engine 'ollama'; choose one of transformers, vllm, openvino, sglang",
    ):
        engine_facts("ollama")
    with pytest.raises(
        ArchsearchError,
        match="unknown engine 'ollama'; choose one of transformers, vllm, openvino, llama.cpp$",
    ):
        runnable_engine("ollama")
    # No longer unknown: drafts are ranked for it, so the line says which engine confirms them.
    words = (
        "does not run SGLang: it ranks drafts for it .* --engine transformers or vllm or llama.cpp$"
    )
    with pytest.raises(ArchsearchError, match=words):
        runnable_engine("sglang")
    assert engine_title("vllm") == "vLLM" and engine_title("ollama") == "ollama"


def test_off_still_costs_a_round_in_tensorrt_llm() -> None:
    from archsearch.architecture.catalogue import load as shape
    from archsearch.hardware.device import load_device
    from archsearch.latency.roofline import RooflineLatency
    from archsearch.workload import Workload

    target, draft = shape("llama-3.1-8b").architecture, shape("llama-3.2-1b").architecture
    costs = {
        name: RooflineLatency(load_device("h100"), "bfloat16", "graph", name)
        .idle_s(target, draft, Workload())
        .value
        for name in ("vllm", "sglang", "tensorrt-llm")
    }
    assert costs["sglang"] == 0.0 and costs["vllm"] > 0.0
    assert costs["tensorrt-llm"] == pytest.approx(0.5e-3, rel=0.1), (
        "what a round adds, without drafting"
    )


def test_a_version_before_a_family_was_there_does_not_run_it() -> None:
    """A search for vLLM 0.10 led with DFlash, which is of 2026."""
    vllm = engine_facts("vllm")
    assert not vllm.lacks("dflash", "0.25") and "0.19 or later" in vllm.lacks("dflash", "0.10.0")
    assert not vllm.lacks("suffix", "0.12.0") and "0.12 or later" in vllm.lacks("suffix", "0.11.0")
    assert "49548" in vllm.schedule_doubt and "enable_adaptive_verification" in vllm.schedule_doubt


@pytest.mark.parametrize("row", ENGINES.values(), ids=lambda row: row.name)
def test_targets_without_an_interface_for_heads_are_of_known_types(row: EngineFacts) -> None:
    assert row.unread.keys() <= FAMILIES.keys() | READ_ONLY.keys()
    for kind, lost in row.unread.items():
        assert set(lost) <= row.families.keys()
        assert all(row.lacks(name, target=kind) and not row.lacks(name) for name in lost)
        assert not row.lacks("independent", target=kind)


def test_n_grams_are_as_the_engine_looks_them_up() -> None:
    """llama.cpp's have one length, and draft no fewer tokens than that."""
    found = {}
    for engine in ("transformers", "vllm", "llama.cpp"):
        facts = engine_facts(engine)
        space = family_spaces([load_space("ngram")], facts, DRAFT, optional=False).spaces[0]
        drafter = space.build((0,) * len(space.dimensions(DRAFT)), DRAFT)
        found[engine] = drafter.label(), facts.gammas(drafter, (1, 2))
    assert found == {
        "transformers": ("n-gram of 1 to 5", (1, 2)),
        "vllm": ("n-gram of 2 to 5", (1, 2)),
        "llama.cpp": ("n-gram of 2 to 2", (2,)),
    }
    assert engine_facts("llama.cpp").gammas(Independent(DRAFT), (1, 2)) == (1, 2)
    latency = RooflineLatency(resolve_device("h100"), "float16", "graph", "llama.cpp")
    workload, alpha = Workload(dtype="float16", mode="graph"), GivenAcceptance(0.02)
    assert Scorer(DRAFT, workload, latency, alpha, gammas=[1, 2])(drafter).gamma == 2
    with pytest.raises(ArchsearchError, match=r"cannot draft gamma 1$"):
        Scorer(DRAFT, workload, latency, alpha, gammas=[1])(drafter)
