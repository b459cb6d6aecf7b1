"""Without torch and transformers: what answers, answers; what needs them says so in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import archsearch

REFUSE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in ("torch", "transformers", "accelerate", "gguf", "safetensors", "tokenizers",
                   "huggingface_hub"):
            raise ModuleNotFoundError(f"No module named {top!r}", name=name)

sys.meta_path.insert(0, Missing())
from archsearch.cli import main
"""
RUN = "main()"
RUN_ALL = """
import json
from click.testing import CliRunner
results = (CliRunner().invoke(main, command) for command in json.loads(sys.argv[1]))
print(json.dumps([(result.exit_code, result.stderr) for result in results]))
"""


def light(*arguments: str, where: Path, program: str = RUN) -> subprocess.CompletedProcess[str]:
    root = str(Path(archsearch.__file__).parent.parent)
    return subprocess.run(
        [sys.executable, "-c", REFUSE + program, *arguments],
        cwd=where,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow(own=True)
def test_answers_need_no_torch(tmp_path: Path) -> None:
    question = ("--target", "llama-3.1-8b", "--gpu", "h100")
    for command in (
        ("estimate", *question, "--draft", "eagle3", "--draft", "llama-3.2-1b"),
        ("search", *question, "--trials", "4", "--family", "independent"),
        ("report",),
        ("schedule",),
        ("list", "runs"),
        ("doctor",),
    ):
        done = light(*command, where=tmp_path)
        assert done.returncode == 0, (command, done.stderr)


def test_what_runs_models_names_its_extra(tmp_path: Path) -> None:
    commands = [
        ("profile", "--gpu", "cpu", "--target", "smollm2-135m"),
        ("estimate", "--target", "some-org/some-model", "--draft", "eagle3", "--gpu", "h100"),
        ("search", "--target", "smollm2-135m", "--gpu", "h100", "--alpha", "distilled"),
    ]
    done = light(json.dumps(commands), where=tmp_path, program=RUN_ALL)
    results = json.loads(done.stdout)
    assert len(results) == len(commands)
    for command, (status, said) in zip(commands, results, strict=True):
        assert status == 2 and said.count("\n") == 1, command
        assert said.startswith("Error: this needs t"), command
        assert said.endswith('run: pip install "archsearch[torch]"\n'), command
    assert not list(tmp_path.iterdir()), "nothing half-written"
