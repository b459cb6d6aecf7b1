"""How these tests call commands: one that must succeed, one that must be refused in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from click.testing import CliRunner, Result

from archsearch.cli import main

SEARCH = (
    "search",
    "--target",
    "target",
    "--gpu",
    "cpu",
    "--space",
    "tiny.yaml",
    "--context",
    "64",
    "--trials",
    "24",
)
CONFIRM = (
    *SEARCH,
    "--prompts",
    "prompts.jsonl",
    "--answer-tokens",
    "20",
    "--confirm",
    "1",
    "--finalists",
    "1",
    "--time-budget",
    "4s",
    "--anyway",  # the tiny target is too fast for any draft
)
GPU_SEARCH = ("search", "--target", "llama-3.1-8b", "--gpu", "h100", "--trials", "12", "--top", "2")
UNDER_LOAD = (
    "confirm",
    "runs/a",
    "--synthetic",
    "--engine",
    "vllm",
    "--engine-python",
    sys.executable,
)
ESTIMATE = ("estimate", "--target", "llama-13b", "--draft", "wide-796m", "--gpu", "a100")


@contextmanager
def single_threaded() -> Iterator[None]:
    """One torch thread: tiny models on several threads only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def call(*arguments: str) -> Result:
    """Run a command that must succeed."""
    result = invoke(*arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.stderr
    return result


def last_json(result: Result) -> dict:
    return json.loads(result.stdout.splitlines()[-1])


def refused(*arguments: str, code: int = 2) -> str:
    """Run a command that must be refused: exactly one line, which starts with Error:, and no
    traceback. The line."""
    result = invoke(*arguments)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == code, result.output
    lines = [
        line
        for line in result.stderr.splitlines()
        if line.strip() and "[" not in line[:40] and ": done in" not in line
    ]
    assert len(lines) == 1 and lines[0].startswith("Error: "), result.stderr
    assert "Traceback" not in result.output and not result.stdout.strip()
    return lines[0]


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
