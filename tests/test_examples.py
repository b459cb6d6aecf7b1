"""The scripts in examples/ run as they are documented, outside the checkout's folder; so does the
wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow  # fits kernel tables, builds a wheel


def ran(command: list[str], folder: Path, path: Path = ROOT) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_half_the_depth_matters_most_where_the_host_launches_kernels(tmp_path: Path) -> None:
    text = ran(
        [sys.executable, str(ROOT / "examples" / "half_the_depth.py"), "--picture", "plot.svg"],
        tmp_path,
    )
    gains = [float(value) for value in re.findall(r"([\d.]+) times$", text, re.MULTILINE)]
    assert len(gains) == 4
    launched, captured = gains[:2], gains[2:]
    assert min(launched) > 1.2 and all(1.0 < gain < min(launched) for gain in captured)
    assert (tmp_path / "plot.svg").stat().st_size < 100_000


def test_eagle_or_a_draft_is_answered_by_batch_size(tmp_path: Path) -> None:
    text = ran(
        [
            sys.executable,
            str(ROOT / "examples" / "eagle_or_draft.py"),
            "--drafts",
            "eagle3",
            "llama-3.2-1b",
        ],
        tmp_path,
    )
    assert (
        text.count("batch size") == 3
        and text.count("  -> ") == 3
        and "eagle3" in text
        and "sglang" in text
    )


def test_the_wheel_runs_outside_the_checkout(tmp_path: Path) -> None:
    """Built by pip, unpacked, and the two examples of the README's GPUs that need nothing but what
    ships."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--wheel-dir",
        str(tmp_path),
        str(ROOT),
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode and "hatchling" in built.stderr:
        pytest.skip("hatchling cannot be had here")
    assert built.returncode == 0, built.stderr[-2000:]
    (wheel,) = tmp_path.glob("archsearch-*.whl")
    inside = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(inside)
    start = [sys.executable, "-m", "archsearch.cli"]
    asked = ["--target", "llama-3.1-8b", "--gpu", "h100"]
    found = ran(
        [*start, "search", *asked, "--family", "independent", "--trials", "20", "--run", "runs/x"],
        tmp_path,
        inside,
    )
    assert "archsearch report runs/x" in found
    assert (tmp_path / "runs" / "x" / "report.html").read_text().count("data-chart=") > 5
    priced = ran(
        [
            *start,
            "estimate",
            *asked,
            "--draft",
            "llama-3.2-1b",
            "--gamma",
            "4",
            "--alpha",
            "0.8",
            "--engine",
            "sglang",
        ],
        tmp_path,
        inside,
    )
    assert "sglang" in priced
