"""`search` where nobody named a device: the GPUs that ship, one row each, where this machine would
not serve the target."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from archsearch.errors import ArchsearchError
from archsearch.needs import Needs
from archsearch.pipeline.search import survey, surveyed_devices
from archsearch.pipeline.session import SearchRequest
from archsearch.records import as_data
from archsearch.report.phrases import AskedBudget, ServedBy
from archsearch.search.objective import Score
from archsearch.workload import Workload, WorkloadRequest

module = importlib.import_module("archsearch.pipeline.search")  # its name is the function's


SCORE = Path(__file__).parents[1] / "fixtures" / "run-0.2.0" / "gpu" / "best" / "1" / "score.json"
SHIPPED = ("a100-sxm4-80gb", "h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm")


def request(target: str, **asked: Any) -> SearchRequest:
    return SearchRequest.decide(target, WorkloadRequest(**asked))[0]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "visible_gpus", lambda: [])


def test_only_a_target_that_this_machine_would_not_serve_is_surveyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert surveyed_devices(request("llama-65b")) == SHIPPED
    assert (
        surveyed_devices(request("llama-65b", gpu="h100"))
        == ()
        == surveyed_devices(request("smollm2-135m"))
    )
    with pytest.raises(ArchsearchError, match="llama-650b"):
        surveyed_devices(request("llama-650b"))
    monkeypatch.setattr(module, "visible_gpus", lambda: ["a GPU"])
    assert surveyed_devices(request("llama-65b")) == ()


def test_a_row_each_with_the_devices_that_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    score = Score.from_dict(json.loads(SCORE.read_text(encoding="utf-8")))
    exists = replace(score, needs=Needs("exists", "org/a-draft-of-a-long-name-that-is-cut"))
    asked: list[SearchRequest] = []

    def found(each: SearchRequest) -> SimpleNamespace:
        asked.append(each)
        if each.asked.gpu == SHIPPED[0]:
            raise ArchsearchError("eight do not hold it")
        return SimpleNamespace(
            by=ServedBy("vllm", "0.33.0", None, "vllm 0.33.0"),
            workload=Workload(tensor_parallel=2),
            dtype="bfloat16",
            best=(exists, score),
            warnings=(),
            training_budget=AskedBudget(24.0, False, 0.0, 0.0, 0.0, "modelled"),
        )

    monkeypatch.setattr(module, "search", found)
    result = survey(request("llama-65b"), SHIPPED)
    assert (
        [row["device"] for row in as_data(result)["survey"]]
        == list(SHIPPED)
        == [each.asked.gpu for each in asked]
    )
    assert all(each.run is not None and not each.run.exists() for each in asked)
    text = str(result)
    assert (
        max(map(len, text.splitlines())) <= 100
        and "2 x h100-sxm5-80gb" in text
        and "given 24 GPU-hours" in text
    )
    assert f"{SHIPPED[0]}: eight do not hold it." in text and f"--gpu {SHIPPED[1]}" in text
    assert "independent: org/a-draft-of" in text and "independent: 2x" in text
