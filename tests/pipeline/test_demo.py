"""The demo's own choices: the dtype that it profiles, and how much of everything it asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from archsearch import demo, pipeline
from archsearch.architecture.architecture import Architecture
from archsearch.hardware.identify import identify_cpu
from archsearch.pipeline.profile import cpu

TINY = Architecture(32, 64, 1, 2, 2, 16, 64)


def test_the_probe_runs() -> None:
    device = replace(identify_cpu(), threads=1)
    assert cpu.faster_dtype(device, TINY, 8, seconds=0.05) in ("float32", "bfloat16")


@pytest.mark.parametrize("plain", [0.0, 3.0])
@pytest.mark.parametrize(("slow", "fast"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_probe_takes_the_dtype_whose_steps_are_faster(monkeypatch, slow, fast, plain) -> None:
    """Plain steps, or the passes of a round where plain steps take as long."""
    now = [0.0]

    class Steps:
        def __init__(self, model: Any, **_: Any) -> None:
            name = str(next(model.parameters()).dtype).removeprefix("torch.")
            self.seconds = 2.0 if name == slow else 1.0

        def step(self, tokens: int) -> Any:
            def run() -> None:
                now[0] += plain if tokens == 1 and plain else self.seconds

            return run

    monkeypatch.setattr("archsearch.profiling.layers.ForwardRun", Steps)
    monkeypatch.setattr(cpu.time, "perf_counter", lambda: now[0])
    assert cpu.faster_dtype(identify_cpu(), TINY, 8, seconds=5.0) == fast


@pytest.mark.parametrize("sweeps", [[300], [34, 180, 260], [34, 34]])
def test_the_demo_asks_for_one_dtype_two_finalists_and_no_head(
    monkeypatch, tmp_path, sweeps
) -> None:
    """A busy machine is profiled until there are enough rows, or no more come."""
    asked: dict[str, Any] = {}
    rows = [0]

    def searched(request: pipeline.SearchRequest, *, anyway: bool) -> dict[str, Any]:
        asked["search"] = request
        return {"families": [], "notes": []}

    def profiled(request: pipeline.ProfileRequest) -> SimpleNamespace:
        asked["profile"] = request
        rows.append(sweeps[len(rows) - 1])
        return SimpleNamespace(rows=rows[-1], folder="f")

    monkeypatch.setattr(pipeline, "check_weights", lambda target: None)
    monkeypatch.setattr(pipeline, "search", searched)
    monkeypatch.setattr(pipeline, "profile_device", profiled)
    monkeypatch.setattr(pipeline, "export_rank", lambda *_: {"output": "o", "note": "n"})
    monkeypatch.setattr(cpu, "faster_dtype", lambda *_: "float32")
    monkeypatch.setattr(demo, "profiled", lambda: rows[-1] >= demo.ENOUGH_ROWS)
    monkeypatch.setattr(demo, "demo_text", lambda *_: "")
    target = SimpleNamespace(architecture=TINY)
    monkeypatch.setattr("archsearch.models.targets.resolve_target", lambda name: target)
    demo.run_demo(budget_s=60.0, output=Path("o"), run_path=tmp_path)
    assert asked["profile"].dtypes == ("float32",) and rows[1:] == sweeps
    search = asked["search"]
    assert (search.finalists, search.confirm, search.families) == (2, 1, ())


@pytest.mark.parametrize("dtypes", [("bfloat16",), ("bfloat16", "float32")])
def test_a_profile_of_one_dtype_is_enough(monkeypatch, dtypes) -> None:
    rows = [None] * (demo.ENOUGH_ROWS * len(dtypes))
    monkeypatch.setattr(demo, "find_profile", lambda *_: "")
    monkeypatch.setattr(demo.Profile, "load", lambda folder: SimpleNamespace(rows=rows))
    assert demo.profiled()
