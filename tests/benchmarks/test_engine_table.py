"""The table of best drafts by engine: its shapes, and that it says what it is meant to say on a
small grid."""

from __future__ import annotations

from pathlib import Path

import pytest

import engine_table as bench
from archsearch.architecture.catalogue import load
from archsearch.architecture.counts import parameters


def test_shapes_share_over_the_ranks_and_depths_have_equal_bodies() -> None:
    target = load("llama-3.1-70b").architecture
    shapes = bench.grid(target, 8)
    assert len(shapes) > 150 and len(set(shapes)) == len(shapes)
    assert all(
        shape.num_attention_heads % 8 == 0 and parameters(shape) < 0.5 * parameters(target)
        for shape in shapes
    )
    body = 0.8e9
    bodies = []
    for layers in bench.DEPTHS:
        shape = bench.of_depth(body, layers, 32000)
        bodies.append(parameters(shape) - 2 * 32000 * shape.hidden_size)
    assert max(bodies) / min(bodies) < 1.05 and bodies[0] == pytest.approx(body, rel=0.05)


def test_a_small_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "LAYERS", (2, 8))
    monkeypatch.setattr(bench, "WIDTHS", {1024: 64, 4096: 128})
    monkeypatch.setattr(bench, "FFN_RATIOS", (2.6875,))
    monkeypatch.setattr(bench, "GAMMAS", (2, 4))
    monkeypatch.setattr(bench, "DEPTHS", (2, 16))
    monkeypatch.setattr(
        bench,
        "ENGINES",
        tuple(e for e in bench.ENGINES if e.title in ("vllm", "sglang", "transformers")),
    )
    found = bench.main(
        ["--devices", "h100", "--targets", "llama-3.1-8b", "--output", str(tmp_path)]
    )
    part = found["cases"]["llama-3.1-8b, h100, TP 1"]
    for title, row in part["best"].items():
        assert (
            row["loss_in"][title] == 0.0
            and all(loss >= 0.0 for loss in row["loss_in"].values())
            and row["speedup"] > 1.0
        )
    # without graphs a draft's layers cost more than its width, in one graph it is the parameters
    # that cost
    assert part["growth"]["vllm"]["deep"] > 3 * part["growth"]["vllm"]["wide"]
    assert part["growth"]["transformers"]["deep"] > 10 * part["growth"]["transformers"]["wide"]
    assert part["growth"]["sglang"]["deep"] < 2 * part["growth"]["sglang"]["wide"]
    gamma = found["gamma"]["h100"]["qwen2.5-7b + qwen2.5-0.5b"]
    rows = {title: [row["speedup"] for row in gamma[title]["rows"]] for title in gamma}
    assert (
        rows["vllm"] == sorted(rows["vllm"], reverse=True) and rows["sglang"][3] > rows["sglang"][0]
    )
    assert "best draft by engine" in (tmp_path / "engine_table.md").read_text()
    again = bench.main(
        ["--devices", "h100", "--targets", "llama-3.1-8b", "--output", str(tmp_path)]
    )
    assert again["cases"] == found["cases"]  # done already: read back
