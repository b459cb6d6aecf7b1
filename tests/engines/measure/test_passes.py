"""Rows out of an engine's steps, on an engine whose times are made up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archsearch.architecture.architecture import Architecture
from archsearch.engines.engine import EngineStep
from archsearch.engines.measure.passes import (
    BATCHES,
    GAMMAS,
    ONE_REQUEST_GAMMAS,
    Case,
    PassRequest,
    measure_passes,
    spread_drafts,
)
from archsearch.errors import RunFailed
from archsearch.profiles import PassShape
from tests.doubles.made_up_engine import MadeUpEngine

TARGET = Architecture(64, 128, 4, 4, 2, 16, 320)
DRAFTS = [(TARGET.replace(num_hidden_layers=layers), Path(f"draft-{layers}")) for layers in (1, 2)]


def measured(
    engine: MadeUpEngine,
    record: Callable = lambda row: None,
    *,
    alone: bool = True,
    gammas: Sequence[Sequence[int]] = GAMMAS,
    batches: Sequence[int] = BATCHES,
    **options: Any,
) -> list:
    cases = [Case([(batch, 0) for batch in batches])] if alone else []
    cases += [
        Case(list(zip(batches, gammas[number], strict=True)), draft, folder, place=number)
        for number, (draft, folder) in enumerate(DRAFTS)
    ]
    values = {"dtype": "bfloat16", "mode": "eager", "contexts": (64,), **options}
    asked = PassRequest(target="target", architecture=TARGET, **values)
    rows = {}

    def keep(row: Any) -> None:
        record(row)
        rows[row.key] = row

    measure_passes(lambda case: engine, asked, cases, record=keep)
    return list(rows.values())


@pytest.mark.parametrize("schedules", [True, False])
def test_rows_are_the_engine_s_times(schedules: bool) -> None:
    kept: list = []
    rows = measured(MadeUpEngine(schedules=schedules), slowdown=lambda: 2.0, record=kept.append)
    assert {row.key: row for row in kept} == {row.key: row for row in rows} and {
        row.kind for row in rows
    } == {"pass", "rest"}
    targets = {
        (shape.architecture, shape.batch, shape.tokens): row
        for row in rows
        if row.kind == "pass"
        for shape in [PassShape.of(row)]
    }
    assert {batch for _, batch, _ in targets} == {1, 2, 4, 8}
    for row in rows:
        assert row.slowdown == 2.0 and row.dtype == "bfloat16" and len(row.times_s) >= 5
        sizes = row.sizes()
        if row.kind == "pass":
            shape = PassShape.of(row)
            arch, batch, tokens, context = (
                shape.architecture,
                shape.batch,
                shape.tokens,
                shape.context,
            )
            cold, is_target = row.cache == "cold", shape.role == "target"
            law = 10e-3 + 1e-3 * batch * tokens if is_target else 1e-3 + 0.2e-3 * batch * tokens
            assert row.median_s == pytest.approx(law / 2) and arch in (
                TARGET,
                DRAFTS[0][0],
                DRAFTS[1][0],
            )
            assert is_target == (arch == TARGET) and (cold or tokens == 1) and context % 64 == 0
        else:
            gamma = sizes["gamma"]
            assert row.median_s == pytest.approx(((2e-3 + 0.3e-3 * gamma) if gamma else 0.5e-3) / 2)
            assert sizes["first_tokens"] == (gamma + 2 if gamma else 0)


def test_a_call_during_which_the_pace_changed_is_made_once_more() -> None:
    def spread(*first: float) -> float:
        """Largest over smallest time of a row, where the machine's pace is `first`, then 2."""
        paces = itertools.chain(first, itertools.repeat(2.0))
        rows = measured(MadeUpEngine(), slowdown=lambda: next(paces))
        return max(max(row.times_s) / min(row.times_s) for row in rows)

    assert spread() == spread(1.0) == pytest.approx(1.0)
    assert spread(1.8) == pytest.approx(2.0 / 1.9)  # steady enough: the mean of both
    assert spread(1.0, 3.0) == pytest.approx(2.5 / 2.0)  # once more, not for ever


def test_a_schedule_needs_one_start_a_draft() -> None:
    engine = MadeUpEngine()
    measured(engine)
    assert [entry for entry in engine.log if entry.startswith("start")] == [
        "start 0",
        "start 5 schedule",
        "start 4 schedule",
    ]
    engine = MadeUpEngine(schedules=False)
    measured(engine, alone=False)
    starts = [entry for entry in engine.log if entry.startswith("start")]
    assert len(starts) == 8 and not any("schedule" in entry for entry in starts)


def test_an_engine_that_tells_nothing_is_refused() -> None:
    engine = MadeUpEngine(tells_steps=False)
    with pytest.raises(RunFailed, match="made-up does not tell what its steps take"):
        measured(engine)
    assert engine.log[-1] == "stop"


def test_drafts_are_spread_and_have_full_heads() -> None:
    shapes = [
        TARGET.replace(num_hidden_layers=layers, intermediate_size=ffn, draft_vocab_size=64)
        for layers in (1, 2, 4, 8)
        for ffn in (64, 128, 256)
    ]
    chosen = spread_drafts(shapes, 3)
    assert len(chosen) == 3 and all(not shape.trimmed for shape in chosen)
    assert {chosen[0].num_hidden_layers, chosen[1].num_hidden_layers} == {1, 8}
    assert len(spread_drafts(shapes[:2], 5)) == 2


def test_an_engine_that_catches_up_is_measured_behind_two_contexts() -> None:
    class CatchesUp(MadeUpEngine):
        """As llama.cpp: one request at a time, and a pass of the draft over what was verified
        besides those that draft."""

        def steps(self) -> tuple[EngineStep, ...]:
            def caught_up(step: EngineStep) -> EngineStep:
                if not step.gamma:
                    return step
                more = replace(
                    step,
                    draft_tokens=(step.gamma + 1, *(1,) * step.gamma),
                    draft_s=(2e-3, *(1e-3,) * step.gamma),
                )
                return replace(more, seconds=step.target_s + sum(more.draft_s) + 1e-3)

            return tuple(map(caught_up, super().steps()))

    engine = CatchesUp(name="llama.cpp", schedules=False)
    plan = {
        "gammas": ONE_REQUEST_GAMMAS,
        "contexts": (64, 256),
        "rounds": 20,
        "repeats": 1,
        "batches": (1,) * 4,
    }
    rows = measured(engine, **plan)
    passes = [PassShape.of(row) for row in rows if row.kind == "pass"]
    gammas = {gamma for line in ONE_REQUEST_GAMMAS[:2] for gamma in line}
    assert {shape.tokens for shape in passes if shape.role == "target"} == {
        1,
        *(gamma + 1 for gamma in gammas),
    }
    assert {shape.context for shape in passes if shape.role == "target" and shape.tokens == 1} == {
        64,
        256,
    }
    assert all(shape.context in (64, 256) for shape in passes)
    first = {row.sizes()["tokens"] for row in rows if row.kind == "pass" and row.cache == "cold"}
    assert first >= {gamma + 1 for gamma in gammas}
    for row in rows:
        if row.kind == "rest" and row.sizes()["gamma"]:
            assert row.sizes()["first_tokens"] == row.sizes()[
                "gamma"
            ] + 1 and row.median_s == pytest.approx(1e-3)


def test_the_gammas_of_one_request_cover_one_to_eight() -> None:
    assert {gamma for line in ONE_REQUEST_GAMMAS[:2] for gamma in line} == set(range(1, 9))
