"""`profile`: a device and its engines measured, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from archsearch.latency.engine_passes import EnginePasses
from tests.cli.commands import SEARCH, call, files_in, last_json, refused
from tests.doubles.world import make_model_folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--engine", "vllm", "--engine-python", sys.executable),
            "profiling vllm runs a target in it; name one with --target",
        ),
        (
            ("--engine", "vllm", "--target", "target"),
            "vLLM is not installed; run: archsearch engine install vllm",
        ),
        (("--engine", "openvino", "--target", "target"), "run: archsearch engine install openvino"),
        (
            ("--engine", "vllm", "--target", "target", "--engine-python", "nowhere"),
            "nowhere, which is no file",
        ),
        (
            ("--target", "target", "--engine-python", "nowhere"),
            "leave --engine-python out, or name another --engine (vllm",
        ),
        (
            ("--engine", "openvino", "--target", "bare", "--engine-python", sys.executable),
            "which makes them up",
        ),
        (("--engine", "warp"), "unknown engine 'warp'"),
    ],
)
def test_what_profile_refuses_of_engines_before_it_measures(
    with_ranks: Path, arguments: tuple[str, ...], words: str
) -> None:
    make_model_folder(with_ranks / "bare", weights=False)
    before = files_in(with_ranks)
    assert words in refused("profile", "--gpu", "cpu", "--output", "new", *arguments)
    assert files_in(with_ranks) == before and not (with_ranks / "new").exists()


def test_profile_engine_then_search_with_its_latencies(
    with_ranks: Path, made_up: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The engine's times are made up: this machine's own slowness must not divide them.
    monkeypatch.setattr(
        "archsearch.pipeline.profile.cpu._probe_slowdown", lambda bench, dtype: lambda: 1.0
    )
    profile = next((with_ranks / "profiles").glob("*/*"))
    arguments = (
        "profile",
        "--gpu",
        "cpu",
        "--target",
        "target",
        "--space",
        "tiny.yaml",
        "--dtype",
        "float32",
        "--budget",
        "1s",
        "--engine",
        "vllm",
        "--engine-python",
        sys.executable,
        "--output",
        str(profile),
    )
    text = call(*arguments).stdout
    assert "passes as vllm ran them: " in text
    assert (
        f"Next: archsearch search --target target --engine vllm --dtype float32 --profile {profile}"
        in text
    )
    with monkeypatch.context() as once:  # its passes were left out one by one above
        once.setattr(EnginePasses, "left_out_", np.zeros(1))
        assert last_json(call(*arguments, "--json"))["new_rows"] == 0
    result = last_json(call(*SEARCH, "--engine", "vllm", "--run", "runs/v", "--json"))
    assert "passes as vllm ran them" in result["latency"] and "WARNING" not in result["latency"]
    decode = result["best"][0]["decode_s"]["value"] * result["best"][0]["speedup"]["value"]
    assert decode > 5e-3 and "WARNING" in call(*SEARCH, "--engine", "openvino").stdout


def test_a_budget_that_is_too_short_says_so_and_measures_nothing_else(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 s took 3:24, most of it for rows that no price would use, and named the same command."""
    monkeypatch.setattr("archsearch.engines.measure.overhead.measure_overhead", None)
    monkeypatch.setattr("archsearch.profiling.cpu_sweep.sweep", lambda *_, **__: 0)
    asked = ("profile", "--gpu", "cpu", "--target", "target", "--space", "tiny.yaml")
    said = call(*asked, "--budget", "60s", "--output", "p").stdout
    assert "no model yet" in said and "Too little was measured to price anything" in said
    assert said.strip().endswith("--target target --budget 5m --output p")


@pytest.mark.campaign
def test_profile_end_to_end(world: Path) -> None:
    """A real sweep of the tiny world, twice: the second continues; then a check."""
    arguments = (
        "profile",
        "--gpu",
        "cpu",
        "--target",
        "target",
        "--space",
        "tiny.yaml",
        "--dtype",
        "float32",
        "--output",
        "p",
    )
    first = last_json(call(*arguments, "--budget", "20s", "--json"))
    assert first["rows"] == first["new_rows"] > 0
    second = last_json(call(*arguments, "--budget", "60s", "--check", "4", "--json"))
    assert (
        second["rows"] >= first["rows"] and second["checks"]["float32"]["draft step"]["cases"] == 8
    )
    assert "known error" in call(*SEARCH[:3], "--profile", "p", *SEARCH[5:], "--explain").stdout


def test_a_gpu_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import archsearch.hardware.identify as identify

    monkeypatch.setattr(identify, "visible_gpus", list)
    line = refused("profile", "--gpu", "a100")
    assert "no NVIDIA GPU is visible" in line and "--gpu cpu" in line
    other = [identify.VisibleGpu(0, "NVIDIA H200", 143771 * 2**20, "570")]
    monkeypatch.setattr(identify, "visible_gpus", lambda: other)
    assert "NVIDIA H200" in refused("profile", "--gpu", "a100")
    refused("profile", "--gpu", "cpu", "--threads", "10000")
    refused("profile", "--gpu", "cpu", "--mode", "graph")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("budget", ["soon", "-5m", "0", "5x", "", "nan", "inf"])
def test_a_budget_that_is_none(tmp_path: Path, budget: str) -> None:
    line = refused("profile", "--gpu", "cpu", "--budget", budget)
    assert "--budget" in line and "write 90s, 10m or 1.5h" in line
    assert "write 90s" in refused(
        "search", "--target", "llama-13b", "--gpu", "a100", "--time-budget", budget
    )
