"""What llama.cpp verifies in the time of a pass over one token, on a tiny target (slow, in its own
environment)."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

import where_it_pays
from tests.engines.vllm.test_vllm_heads import engine_here


@pytest.mark.slow
def test_a_size_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine_here("llama.cpp")
    output = tmp_path / "sizes.csv"
    monkeypatch.setattr(sys, "argv", ["where_it_pays", str(output), "tiny", "--threads", "1"])
    where_it_pays.main()
    rows = list(csv.DictReader(output.read_text(encoding="utf-8").splitlines()))
    assert {row["size"] for row in rows} == {"tiny"} and {row["dtype"] for row in rows} == {"q8_0"}
    for row in rows:
        assert float(row["verified"]) > 0 and (row["tokens"] != "1" or row["verified"] == "1.0")
