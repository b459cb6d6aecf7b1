"""What rounds take beside the target's pass, on an engine whose times are made up; which heads a
profile measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from archsearch.acceptance.lookup import Ngram
from archsearch.architecture.architecture import Architecture
from archsearch.drafters.heads import Eagle3
from archsearch.drafters.lookup import NGram
from archsearch.drafters.read import drafter_of_config, family_of_config
from archsearch.engine_facts import engine_facts
from archsearch.engines.measure.drafted import DraftedCase, measure_drafted
from archsearch.files import read_json
from archsearch.pipeline.profile_engine import drafted_cases
from archsearch.profiles import DraftedShape
from tests.doubles.made_up_engine import MadeUpEngine

TARGET = Architecture(64, 128, 6, 4, 2, 16, 320)


def test_rounds_less_the_targets_pass() -> None:
    engine, kept = MadeUpEngine(), []
    cases = [
        DraftedCase(Eagle3.usual(TARGET), Path("head"), {1: 2, 4: 3}),
        DraftedCase(NGram(TARGET), Ngram(), {1: 2, 2: 2}),
    ]
    asked = {"engine": "vllm", "dtype": "bfloat16", "mode": "eager"}
    rows = measure_drafted(
        lambda case: engine, "target", cases, asked, 320, slowdown=lambda: 2.0, record=kept.append
    )
    assert kept == rows and len(rows) == 4
    for row in rows:
        shape = DraftedShape.of(row)
        gamma, batch = shape.gamma, shape.batch
        draft_s = gamma * 1e-3 + 0.2e-3 * batch * (gamma + 2 + gamma - 1)
        assert (
            row.median_s == pytest.approx((draft_s + 2e-3 + 0.3e-3 * gamma) / 2)
            and row.slowdown == 2.0
        )
        assert shape.engine == "vllm" and shape.context % 64 == 0
    assert [entry for entry in engine.log if entry.startswith("start")] == [
        "start 3 schedule",
        "start 2",
    ]
    assert engine.log.count("stop") == 2


def test_the_heads_of_a_profile_are_of_each_family_and_differ(tmp_path: Path) -> None:
    facts = engine_facts("vllm")
    cases = drafted_cases(TARGET, facts, tmp_path)
    assert [case.drafter.family for case in cases] == ["eagle3"] * 2 + ["peagle"] * 2 + [
        "medusa"
    ] * 2 + ["ngram"] * 2
    assert len({(str(case.source), tuple(case.gammas.items())) for case in cases}) == len(cases)
    for case in cases:
        assert case.scheduled == (case.drafter.family not in facts.unscheduled)
        if isinstance(case.source, Path):
            config = read_json(case.source / "config.json", "config")
            assert family_of_config(config) == case.drafter.family
            read, _ = drafter_of_config(config, TARGET)
            assert (
                read.architecture.num_hidden_layers == case.drafter.architecture.num_hidden_layers
            )
    assert not drafted_cases(TARGET, engine_facts("transformers"), tmp_path)
