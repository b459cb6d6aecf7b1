"""Rounds of an engine as rows, on an engine that runs by a law: what is planned, kept, left and
told; and the law comes back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from archsearch.architecture.architecture import Architecture
from archsearch.engines.measure.rounds import RoundRequest, measure_rounds, plan, round_drafts
from archsearch.errors import RunFailed
from archsearch.profiles import Measurement, Profile, RoundShape
from tests.doubles.lawful_engine import START_S, Clock, LawfulEngine, Seconds

TARGET = Architecture(4096, 14336, 32, 32, 8, 128, 128256)


def request(
    seconds: Seconds,
    clock: Clock,
    engines: list[tuple[Mapping[str, str], LawfulEngine]],
    **changes: Any,
) -> RoundRequest:
    folders: dict[Path, Architecture] = {}

    def folder_of(arch: Architecture) -> Path:
        path = Path(arch.label())
        folders[path] = arch
        return path

    def engine(options: Mapping[str, str]) -> LawfulEngine:
        made = LawfulEngine(seconds, clock, folders, refuses=options.get("RUNNER") == "2")
        engines.append((options, made))
        return made

    values = {"dtype": "bfloat16", "mode": "graph", **changes}
    return RoundRequest(
        target="target", architecture=TARGET, engine=engine, folder_of=folder_of, **values
    )


def law(draft: Architecture | None, gamma: int) -> float:
    return 6e-3 if draft is None else 7e-3 + gamma * (5e-4 + 1e-4 * draft.num_hidden_layers)


def test_the_plan_begins_with_what_tells_most() -> None:
    drafts = round_drafts(TARGET)
    assert sorted(draft.num_hidden_layers for draft in drafts) == [2, 8, 24]
    assert all(draft.vocab_size == TARGET.vocab_size and not draft.trimmed for draft in drafts)
    cases = plan(drafts, [{"RUNNER": "1"}, {"RUNNER": "0"}])
    assert len(cases) == len(set(cases)) == 14
    first = [
        (case.options, case.draft and case.draft.num_hidden_layers, case.gamma)
        for case in cases[:5]
    ]
    one = (("RUNNER", "1"),)
    assert first == [
        (one, None, 0),
        (one, 24, 6),
        (one, 2, 6),
        (one, 24, 1),
        ((("RUNNER", "0"),), None, 0),
    ]


def test_rounds_become_rows(tmp_path: Path) -> None:
    clock, engines, kept = Clock(), [], []
    asked = request(law, clock, engines, recorded={"async_scheduling": "0"}, tensor_parallel=2)
    found = measure_rounds(asked, record=kept.append, clock=clock)
    assert found.new_rows == len(kept) == 7 and not found.left and not found.failed
    for row in kept:
        shape = RoundShape.of(row)
        assert (
            row.kind == "round"
            and shape.target == TARGET
            and shape.version == "0.32.0"
            and shape.tensor_parallel == 2
        )
        assert shape.options == (("async_scheduling", "0"),) and (shape.gamma == 0) == (
            shape.draft is None
        )
        assert row.median_s == pytest.approx(law(shape.draft, shape.gamma), rel=0.003)
        if shape.gamma:
            assert max(row.times_s) < 1.01 * min(
                row.times_s
            )  # the round that was cut is not among them
        again = Measurement.from_dict(row.to_dict())
        assert again.key == row.key and RoundShape.of(again) == shape
    rates = {
        rates for _, engine in engines for draft, _, rates in engine.started if draft is not None
    }
    assert {len(chances) for chances in rates} == {1, 6}
    # The same command again measures nothing.
    profile = Profile({}, {}, folder=tmp_path)
    profile.save_header()
    for row in kept:
        profile.record(row)
    known = frozenset(
        row.shape for row in Profile.load(tmp_path).select("round", "bfloat16", "graph")
    )
    more = request(
        law, clock, engines, recorded={"async_scheduling": "0"}, tensor_parallel=2, known=known
    )
    assert measure_rounds(more, clock=clock).new_rows == 0


def test_the_budget_ends_it_before_a_start_would_overrun() -> None:
    clock = Clock()
    found = measure_rounds(request(law, clock, [], budget_s=4.5 * START_S), clock=clock)
    assert found.new_rows == 4 and clock.now <= 4.5 * START_S
    assert found.left == ("8 layers, gamma 6", "2 layers, gamma 1", "8 layers, gamma 1")


def test_what_one_runner_cannot_do_is_told_and_the_other_is_measured() -> None:
    clock = Clock()
    found = measure_rounds(
        request(law, clock, [], variants=[{"RUNNER": "2"}, {"RUNNER": "1"}], budget_s=1e6),
        clock=clock,
    )
    assert found.new_rows == 8 and len(found.failed) == 6  # the target alone runs under both
    assert found.failed["24 layers, gamma 6 (RUNNER=2)"].startswith("vLLM does not run")


def test_an_engine_that_runs_nothing_is_an_error() -> None:
    def broken(options: Mapping[str, str]) -> Any:
        raise RunFailed("no vLLM here")

    clock = Clock()
    asked = RoundRequest(
        target="t",
        architecture=TARGET,
        engine=broken,
        folder_of=lambda arch: Path(),
        dtype="bfloat16",
        mode="graph",
    )
    with pytest.raises(RunFailed, match="no round could be measured: no vLLM here"):
        measure_rounds(asked, clock=clock)
