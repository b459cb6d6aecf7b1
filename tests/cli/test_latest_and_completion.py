"""RUN left out is the latest run; a shell completes the values of options; what earlier runs say
is read, and what cannot be is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.shell_completion import BashComplete

from archsearch.cli import main
from tests.cli.commands import call, invoke

ROOT = Path(__file__).resolve().parents[2]


def offered(*words: str, incomplete: str = "") -> list[str]:
    found = BashComplete(main, {}, "archsearch", "_ARCHSEARCH_COMPLETE").get_completions(
        list(words), incomplete
    )
    return [item.value for item in found if item.type == "plain"]


def make_run(name: str, created: str) -> Path:
    run = Path("runs") / name
    run.mkdir(parents=True)
    info = {
        "schema_version": 1,
        "created": created,
        "arguments": {"target": "llama-3.1-8b"},
        "code": {},
        "packages": {},
        "device": {"key": "h100"},
        "profile": {},
        "space": {},
        "seed": 0,
    }
    (run / "run.yaml").write_text(yaml.safe_dump(info))
    return run


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_latest_run_is_taken_and_named() -> None:
    make_run("b-old", "2026-01-01T00:00:00+00:00")
    newest = make_run("a-new", "2026-02-01T00:00:00+00:00")
    os.utime(Path("runs/b-old/run.yaml"))  # when it began decides, not who touched it last
    result = call("report")
    assert result.exit_code == 0 and f"Report: {newest}/report.html" in result.stdout
    assert f"Latest run: {newest}" in result.stderr and not Path("runs/b-old/report.html").exists()


@pytest.mark.parametrize(
    "command",
    [["report"], ["train"], ["confirm"], ["schedule"], ["export", "--output", "x"], ["compare"]],
)
def test_no_run_at_all_is_one_line(command: list[str]) -> None:
    result = invoke(*command)
    assert (
        result.exit_code == 2 and "holds no run" in result.stderr and result.stderr.count("\n") == 1
    )


def test_compare_takes_the_latest_beside_the_one_that_is_named() -> None:
    run = make_run("a", "2026-01-01T00:00:00+00:00")
    result = invoke("compare", str(run))
    assert result.exit_code == 2 and "no other run" in result.stderr
    other = make_run("b", "2026-02-01T00:00:00+00:00")
    assert f"Latest run: {other}\n" in invoke("compare", str(run)).stderr
    assert f"Latest run: {other}, {run}" in invoke("compare").stderr


def test_a_shell_completes_names_of_values_and_runs() -> None:
    make_run("a", "2026-01-01T00:00:00+00:00")
    assert "llama-3.1-8b" in offered("search", "--target", incomplete="Llama-3.1")
    assert {"h100", "cpu"} <= set(offered("estimate", "--gpu"))
    assert offered("search", "--engine", incomplete="sg") == ["sglang"]
    # what is refused when it runs is completed all the same
    assert offered("search", "--engine", "vllm", "--engine", incomplete="sg") == ["sglang"]
    assert "h100" in offered("search", "--engine", "vllm", "--engine", "sglang", "--gpu")
    assert "eagle3" in offered("estimate", "--draft", incomplete="ea")
    assert "medusa" in offered("train", "--family")
    assert offered("search", "--space", incomplete="def") == ["default"]
    assert offered("report") == ["runs/a"]
    assert offered("compare", "runs/b") == ["runs/a"]


def test_what_is_left_out_of_earlier_runs_is_said_on_stderr(tmp_path: Path) -> None:
    """In a process of its own: pytest has a logging of its own. Libraries' warnings stay away."""
    (tmp_path / "runs" / "bad").mkdir(parents=True)
    (tmp_path / "runs" / "bad" / "run.yaml").write_text("arguments: [not, a, mapping")
    question = ("estimate", "--target", "llama-3.1-8b", "--draft", "llama-3.2-1b", "--gpu", "h100")
    done = subprocess.run(
        [sys.executable, "-c", "from archsearch.cli import main; main()", *question],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    (warning,) = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert warning.startswith("WARNING: an earlier run cannot be read and is left out: runs/bad/")
