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
from archsearch.engines.measure.passes import Case, PassRequest, measure_passes
from archsearch.files import read_json
from archsearch.pipeline.profile.engine import drafted_cases
from archsearch.profiles import DraftedShape
from tests.doubles.made_up_engine import MadeUpEngine

TARGET = Architecture(64, 128, 6, 4, 2, 16, 320)


def test_rounds_less_the_targets_pass() -> None:
    engine, kept = MadeUpEngine(), []
    cases = [
        Case([(1, 2), (4, 3)], Eagle3.usual(TARGET), Path("head"), tokens=48),
        Case([(1, 2), (2, 2)], NGram(TARGET), Ngram(), tokens=48),
    ]
    asked = PassRequest(
        target="target",
        architecture=TARGET,
        dtype="bfloat16",
        mode="eager",
        slowdown=lambda: 2.0,
    )
    measure_passes(lambda case: engine, asked, cases, record=kept.append)
    assert len(kept) == 4
    for row in kept:
        shape = DraftedShape.of(row)
        gamma, batch = shape.gamma, shape.batch
        draft_s = gamma * 1e-3 + 0.2e-3 * batch * (gamma + 2 + gamma - 1)
        assert (
            row.median_s == pytest.approx((draft_s + 2e-3 + 0.3e-3 * gamma) / 2)
            and row.slowdown == 2.0
        )
        assert shape.engine == "made-up" and shape.context % 64 == 0
    assert [entry for entry in engine.log if entry.startswith("start")] == [
        "start 3 schedule",
        "start 2",
    ]
    assert engine.log[-1] == "stop"


def test_the_heads_of_a_profile_are_of_each_family_and_differ(tmp_path: Path) -> None:
    facts = engine_facts("vllm")
    cases = drafted_cases(TARGET, facts, tmp_path)
    assert [case.draft.family for case in cases] == ["eagle3"] * 2 + ["peagle"] * 2 + [
        "medusa"
    ] * 2 + ["ngram"] * 2
    assert len({(str(case.source), tuple(case.pairs)) for case in cases}) == len(cases)
    for case in cases:
        scheduled = len({gamma for _, gamma in case.pairs}) > 1
        assert scheduled == (case.draft.family not in facts.unscheduled)
        if isinstance(case.source, Path):
            config = read_json(case.source / "config.json", "config")
            assert family_of_config(config) == case.draft.family
            read, _ = drafter_of_config(config, TARGET)
            assert read.architecture.num_hidden_layers == case.draft.architecture.num_hidden_layers
    assert not drafted_cases(TARGET, engine_facts("transformers"), tmp_path)
